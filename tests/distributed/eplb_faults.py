"""Rebalances that go wrong: what tests of them begin with, and what must hold afterwards."""

import pytest

from ep_moe import PeerTimeout
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.migration.schedule import moves
from tests.distributed.cases import check_call, everywhere
from tests.distributed.eplb_cases import assert_slots, drive, random_map

LOST = 1
DEADLINE_S = 2.0


def new_map(layer, seed=1):
    placed = layer.placement.expert_map
    return random_map(placed.num_ranks, placed.slots_per_rank, seed)


def busy_map(layer):
    """A map to which every rank has something to send, to receive and to copy."""
    old = layer.placement.expert_map
    for seed in range(1000):
        found = moves(old, new_map(layer, seed))
        ends = [{t.source for t in found.transfers}, {t.target for t in found.transfers}]
        if all(found.local) and all(len(ranks) == old.num_ranks for ranks in ends):
            return new_map(layer, seed)
    raise AssertionError("none")


def step_until(balancer, condition, layers=(), context=None, most=200):
    """On all ranks, until it holds on all of them."""
    for _ in range(most):
        if all(everywhere(bool(condition()))):
            return
        for layer in layers:
            check_call(layer, context, tokens=3)
        balancer.step()
    raise AssertionError(f"still in {balancer.state.name}")


def raises_everywhere(kind, balancer, layers, context):
    """Forwards, all of them right, and steps, until the same error is raised by the same step on all ranks."""
    for _ in range(3000):
        for layer in layers:
            check_call(layer, context, tokens=3)
        try:
            balancer.step()
            mine = ("", "")
        except kind as error:
            mine = (type(error).__name__, str(error))
        found = everywhere(mine)
        if any(found):
            assert len(set(found)) == 1, found
            if mine[0]:
                return mine[1]
    raise AssertionError("no error")


def goes_on(balancer, layers, context):
    """After a rollback: what was, is; and the next rebalance works."""
    assert balancer.state is State.IDLE
    for layer in layers:
        assert_slots(layer)
        check_call(layer, context)
    maps = [new_map(layer, 33) for layer in layers]
    balancer.move_to(maps)
    drive(balancer, layers, context)
    assert [layer.placement.expert_map for layer in layers] == maps
    for layer in layers:
        assert_slots(layer)


def is_off(balancer, layers, kind=PeerTimeout):
    assert balancer.state is State.OFF
    for _ in range(2):
        with pytest.raises(kind, match="the balancer is off"):
            balancer.step()
        with pytest.raises(kind, match="the balancer is off"):
            balancer.move_to([layer.placement.expert_map for layer in layers])
    for layer in layers:
        assert_slots(layer)
