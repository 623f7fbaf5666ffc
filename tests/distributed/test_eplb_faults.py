"""A rebalance in which something goes wrong: the old maps stay in force on all ranks, or the new ones on all, and each
rank is told. Nothing hangs and nothing is lost."""

import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPLBConfig, ExpertBalancer, ExpertMap, PeerTimeout, RebalanceError
from ep_moe.eplb import balancer as balancer_module
from ep_moe.eplb.migrate import Migration, Mover
from ep_moe.eplb.pact import Facts, Pact, State, Trouble
from ep_moe.eplb.schedule import moves
from ep_moe.eplb.store import SlotStore
from ep_moe.testing import distributed
from tests.distributed.cases import check_call, everywhere, same_error
from tests.distributed.eplb_cases import (
    ROW,
    all_alike,
    assert_slots,
    context_of,
    drive,
    make_layers,
    on_request,
    random_map,
)
from tests.helpers import fill

LOST = 1
DEADLINE_S = 2.0


def new_map(layer, seed=1):
    placed = layer.placement.expert_map
    return random_map(placed.num_ranks, placed.cap, seed)


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
    for layer in layers:
        assert_slots(layer)


# --- a rank is lost --------------------------------------------------------------------------------------------------


@distributed(2, 4, deadline_s=40, expect_dead=[LOST])
@pytest.mark.parametrize("when", ["before its bytes are sent", "between two batches", "with all its bytes sent"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_is_lost_on_the_way(how, when, world_size):
    context = context_of(10.0)
    layers = make_layers(context, 2)
    before = [layer.placement.expert_map for layer in layers]
    balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW, deadline_s=DEADLINE_S))
    balancer.move_to([new_map(layer) for layer in layers])
    step_until(balancer, lambda: balancer.state is State.MOVING)
    migration = balancer._migration
    if when == "between two batches":
        for _ in range(2):
            balancer.step()
    elif when == "with all its bytes sent":
        while not migration.done:
            migration.advance()
    if dist.get_rank() == LOST:
        if how == "dies":
            os._exit(7)
        threading.Event().wait()
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        balancer.settle()
    assert time.monotonic() - start < 3 * DEADLINE_S + 8  # two readings of heartbeats 3 s apart
    sentence = str(caught.value)
    assert f"rank {LOST} " in sentence.lower(), sentence
    assert "of moe0" in sentence
    assert "was rolled back, and the balancer is off" in sentence
    assert [layer.placement.expert_map for layer in layers] == before
    is_off(balancer, layers)


@distributed(2, 4)
@pytest.mark.parametrize(("naps", "ends"), [(0.3, "commit"), (2.5 * DEADLINE_S, "rollback")])
def test_a_slow_rank(naps, ends, world_size):
    """Faster than the deadline: waited for. Slower: all roll back, also the slow one, when it comes."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        before = layers[0].placement.expert_map
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING)
        for _ in range(3):
            balancer.step()
        if dist.get_rank() == LOST:
            time.sleep(naps)
        if ends == "commit":
            drive(balancer, layers, context)
            assert layers[0].placement.expert_map == new_map(layers[0])
            assert_slots(layers[0])
            balancer.close()
        else:
            with pytest.raises(PeerTimeout, match="was rolled back, and the balancer is off"):
                balancer.settle()
            assert layers[0].placement.expert_map == before
            is_off(balancer, layers)
            check_call(layers[0], context, what="the layer goes on without a balancer")


@distributed(2, 4)
def test_a_lost_message(world_size):
    with context_of(10.0) as context:
        layers = make_layers(context, 2)
        before = [layer.placement.expert_map for layer in layers]
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layer) for layer in layers])
        step_until(balancer, lambda: balancer.state is State.MOVING)
        swap, lost = Mover.swap, []

        def drops_one(mover, sent, received):
            if dist.get_rank() == LOST and sent is not None and not lost:
                lost.append(sent)
                sent = None
            return swap(mover, sent, received)

        with mock.patch.object(Mover, "swap", drops_one):
            sentence = raises_everywhere(PeerTimeout, balancer, layers, context)
        assert f"bytes from rank {LOST} did not arrive within 1 s" in sentence
        assert [layer.placement.expert_map for layer in layers] == before
        is_off(balancer, layers)


# --- bytes that are not what they were -------------------------------------------------------------------------------


@distributed(2, 4)
@pytest.mark.parametrize("where", ["sent", "arrived", "copied within the rank", "never written"])
def test_a_corrupt_row(where, world_size):
    """One bit of one row, on one rank; or bytes that a transport forgot to write."""
    with context_of() as context:
        layers = make_layers(context)
        rank, done = dist.get_rank(), []
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=2 * ROW))
        balancer.move_to([busy_map(layers[0])])
        read, examine = SlotStore.read, Migration._examine

        def damaged_read(store, slot, start, stop, out):
            read(store, slot, start, stop, out)
            local = out.untyped_storage().data_ptr() != balancer._mover.staging._outbox.untyped_storage().data_ptr()
            if rank == LOST and not done and local == (where == "copied within the rank"):
                out[100] ^= 1
                done.append(slot)

        def damaged_examine(migration, batch):
            received = [part for _, part in batch.rounds if part]
            if rank == LOST and received and not done:
                row = migration._row(received[0].expert)
                done.append(row)
                if where == "never written":
                    row.zero_()
                else:
                    row[200] ^= 64
            examine(migration, batch)

        patches = {
            "arrived": (Migration, "_examine", damaged_examine),
            "never written": (Migration, "_examine", damaged_examine),
        }.get(where, (SlotStore, "read", damaged_read))
        with mock.patch.object(*patches):
            sentence = raises_everywhere(RebalanceError, balancer, layers, context)
        assert any(everywhere(bool(done)))
        assert "is not what its checksum says" in sentence
        assert "was rolled back" in sentence
        assert "The balancer goes on" in sentence
        assert balancer.stats().rollbacks == 1
        goes_on(balancer, layers, context)
        balancer.close()


# --- plans -----------------------------------------------------------------------------------------------------------


def by_itself(context, layers, planner, **options):
    config = EPLBConfig(interval=4, window=4, sync_every=2, **options)
    return ExpertBalancer(layers, context, config, planner=planner)


@distributed(2, 4)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("another plan", "the ranks made different plans: their digest is"),
        ("another order of layers", "the ranks made different plans: their digest is"),
        ("an exception", "rank 1: ZeroDivisionError: "),
        ("too few maps", "rank 1: the planner must return a map per layer, 2, got 1"),
        ("no map", "rank 1: Placement.update needs a map with cap="),
        ("no answer", "rank 1: PLANNING took longer than 1 s"),
    ],
)
def test_a_plan_that_goes_wrong_on_one_rank(fault, words, world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        good = [new_map(layers[0], 1), new_map(layers[0], 2)]
        faulty = [dist.get_rank() == LOST]

        def planner(load, current):
            if not faulty[0]:
                return good
            if fault == "no answer":
                time.sleep(4)
            return {
                "another plan": lambda: [good[0], new_map(layers[0], 3)],
                "another order of layers": lambda: good[::-1],
                "an exception": lambda: 1 // 0,
                "too few maps": lambda: good[:1],
                "no map": lambda: [ExpertMap.linear(10, world_size)] * 2,
                "no answer": lambda: good,
            }[fault]()

        balancer = by_itself(context, layers, planner, deadline_s=1.0)
        found = raises_everywhere(RebalanceError, balancer, layers, context)
        assert words in found, found
        for layer in layers:
            assert_slots(layer)
        faulty[0] = False
        step_until(balancer, lambda: balancer.stats().commits >= 2, layers, context)
        assert [layer.placement.expert_map for layer in layers] == good
        balancer.settle()
        for layer in layers:
            assert_slots(layer)
        balancer.close()


@distributed(2)
def test_maps_of_a_user_that_differ_or_do_not_fit(world_size):
    rank = dist.get_rank()
    with context_of() as context:
        layers = make_layers(context, 2)
        good = [new_map(layer) for layer in layers]
        balancer = ExpertBalancer(layers, context, on_request())
        for maps, words in (
            ([good, good[:1]][rank], "rank 1: move_to needs an ExpertMap per layer, 2, got 1"),
            ([good, [*good[:1], None]][rank], "rank 1: move_to needs an ExpertMap per layer, 2, got 2"),
            ([good, [new_map(layers[0], 7 + rank)] * 2][rank], "different plans"),
            ([ExpertMap.linear(12, 2)] * 2, "rank 0: Placement.update needs a map with num_experts=10, got 12"),
        ):
            balancer.move_to(maps)
            assert words in same_error(RebalanceError, balancer.settle)
        goes_on(balancer, layers, context)
        balancer.move_to(good)
        same_error(balancer_module.InputError, lambda: balancer.move_to(good))
        balancer.close()
        assert [layer.placement.expert_map for layer in layers] == good, "close brings it to its end"


# --- the ranks do not do alike ---------------------------------------------------------------------------------------


@distributed(2, 4)
def test_a_rank_that_skips_a_step_is_found_before_anything_is_put_in_force(world_size):
    """Its commits would come between other forwards than everybody else's."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        before = layers[0].placement.expert_map
        config = on_request(bytes_per_step=ROW, deadline_s=DEADLINE_S)
        balancer = ExpertBalancer(layers, context, config)
        balancer.move_to([new_map(layers[0])])
        found = ""
        for number in range(6):
            check_call(layers[0], context, tokens=3)
            if dist.get_rank() == LOST and number == 1:
                continue
            try:
                balancer.step()
            except RebalanceError as error:
                found = found or str(error)
        assert "the ranks are not in step: forward is" in found
        assert "call ExpertBalancer.step() after every forward, on all ranks alike" in found
        assert layers[0].placement.expert_map == before
        is_off(balancer, layers, RebalanceError)


@distributed(2)
def test_a_step_that_is_skipped_just_before_a_commit(world_size):
    """Too late to be found in time: that rank is told that outputs may be wrong, and has the others' map."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        x = torch.zeros(3, 16, device=context.device)
        if dist.get_rank() != LOST:
            balancer.step()
        layers[0](x)
        if dist.get_rank() == LOST:
            with pytest.raises(RebalanceError, match="outputs since then may be wrong"):
                balancer.step()
        else:
            balancer.step()
        assert layers[0].placement.expert_map == new_map(layers[0])
        assert_slots(layers[0])
        check_call(layers[0], context)


@distributed(2, 4)
@pytest.mark.parametrize("first", ["that rank", "the others"])
def test_weights_that_one_rank_alone_writes(first, world_size):
    """After it has told the others that it is ready: nothing but the store can tell what they have done."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        before, rank = layers[0].placement.expert_map, dist.get_rank()
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        if rank == LOST:
            layers[0].expert_weights.updates += 1
        if (rank == LOST) == (first == "the others"):
            time.sleep(1)
        if rank == LOST and first == "that rank":
            balancer.step()  # it begins anew, and finds out that it is alone
        if rank != LOST and first == "the others":
            balancer.step()
            assert balancer.state is State.IDLE
        else:
            with pytest.raises((RebalanceError, PeerTimeout), match="the balancer is off"):
                balancer.settle()
        now = all_alike(layers[0].placement.expert_map.to_json())
        assert now == (before if first == "that rank" else new_map(layers[0])).to_json()
        assert_slots(layers[0])
        check_call(layers[0], context)


@distributed(2, 4)
@pytest.mark.parametrize("first", ["the one that lost the others", "the others"])
def test_ranks_that_hear_different_things_do_the_same(first, world_size):
    """Rank 1 does not get the answer by which all others put a layer in force. Whoever speaks first in the store, all
    have the same map after it."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        before, after = layers[0].placement.expert_map, new_map(layers[0])
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([after])
        # then all have told that they are ready, and will hear it at the next step
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        rank, hear = dist.get_rank(), Pact.hear

        def deaf(pact):
            found = hear(pact)
            if (rank == LOST) == (first == "the others"):
                time.sleep(1)
            if rank == LOST:
                raise PeerTimeout("planted: connection lost")
            return found

        with mock.patch.object(Pact, "hear", deaf):
            if first == "the others" and rank != LOST:
                balancer.step()
                assert balancer.state is State.IDLE
                balancer._pact.tell(Facts(0, 0, State.IDLE, 0, True, Trouble.NONE, 0))
                with pytest.raises(PeerTimeout, match="lost its peers in eplb agree"):
                    hear(balancer._pact)  # nobody answers who has lost the others
            else:
                with pytest.raises((PeerTimeout, RebalanceError), match="the balancer is off"):
                    balancer.step()
                assert balancer.state is State.OFF
        now = all_alike(layers[0].placement.expert_map.to_json())
        assert now == (after if first == "the others" else before).to_json()
        assert_slots(layers[0])
        check_call(layers[0], context)


@distributed(2)
def test_another_map_on_the_way(world_size):
    """Somebody puts a map of his own in force while experts move: theirs stays."""
    with context_of() as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING)
        mine = random_map(2, 8, 77)
        layers[0].placement.update(mine)
        layers[0].expert_weights.expert_map = mine
        for expert_layer in layers:
            updates = expert_layer.expert_weights.updates
            fill(expert_layer)
            expert_layer.expert_weights.updates = updates
        sentence = raises_everywhere(RebalanceError, balancer, layers, context)
        assert "another map was put in force while its experts were moved" in sentence
        assert layers[0].placement.expert_map == mine
        goes_on(balancer, layers, context)
        balancer.close()


@distributed(2)
def test_a_context_that_is_through_ends_the_balancer_too(world_size):
    """What the layers' watch has found is raised by the next exchange, and the old map stays."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        context.ledger.refuse("planted: this context is at its end")
        with pytest.raises(balancer_module.InputError, match="planted: this context is at its end"):
            balancer.settle()
        is_off(balancer, layers, balancer_module.InputError)
        with pytest.raises(ConfigError):
            ExpertBalancer(layers, context, on_request(nodes=3))
