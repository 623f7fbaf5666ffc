"""Faults during a rebalance: all ranks keep the old maps or all have the new ones, and each rank raises or warns.

No rank hangs and no weights are lost.
"""

import os
import re
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from ep_moe import EPLBConfig, ExpertBalancer, ExpertMap, PeerTimeout, RebalanceError
from ep_moe.eplb import balancer as balancer_module
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.migration.slots import SlotStore
from ep_moe.eplb.migration.transfer import Migration, Mover
from ep_moe.testing import distributed
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks, same_error
from tests.fixtures.eplb_cases import ROW, assert_slots, context_of, drive, make_layers, on_request
from tests.fixtures.eplb_faults import (
    DEADLINE_S,
    LOST,
    assert_balancer_off,
    assert_recovers,
    busy_map,
    new_map,
    raises_everywhere,
    step_until,
)

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
    assert time.monotonic() - start < 3 * DEADLINE_S + 8  # heartbeats are read twice, 3 s apart
    sentence = str(caught.value)
    assert f"rank {LOST} " in sentence.lower(), sentence
    assert "of moe0" in sentence
    assert "was rolled back, and the balancer is off" in sentence
    assert [layer.placement.expert_map for layer in layers] == before
    assert_balancer_off(balancer, layers)


@distributed(2, 4)
@pytest.mark.parametrize(("naps", "ends"), [(0.3, "commit"), (2.5 * DEADLINE_S, "rollback")])
def test_a_slow_rank(naps, ends, world_size):
    """A rank slower than the deadline makes all ranks roll back, itself included; a faster one is waited for."""
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
            assert_balancer_off(balancer, layers)
            check_call(layers[0], context, what="the layer goes on without a balancer")


@distributed(2, 4)
def test_a_lost_message(world_size):
    with context_of(10.0) as context:
        layers = make_layers(context, 2)
        before = [layer.placement.expert_map for layer in layers]
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layer) for layer in layers])
        step_until(balancer, lambda: balancer.state is State.MOVING)
        exchange, lost = Mover.exchange, []

        def drops_one(mover, sent, received):
            if dist.get_rank() == LOST and sent is not None and not lost:
                lost.append(sent)
                sent = None
            return exchange(mover, sent, received)

        with mock.patch.object(Mover, "exchange", drops_one):
            sentence = raises_everywhere(PeerTimeout, balancer, layers, context)
        # the device that waits for its peer's bytes may not have sent its own either
        assert re.search(f"bytes (to rank {LOST} and )?from rank {LOST} did not arrive within 1 s", sentence)
        assert [layer.placement.expert_map for layer in layers] == before
        assert_balancer_off(balancer, layers)


# --- bytes that are not what they were -------------------------------------------------------------------------------


@distributed(2, 4)
@pytest.mark.parametrize("where", ["sent", "arrived", "copied within the rank", "never written"])
def test_a_corrupt_row(where, world_size):
    """One flipped bit of a row on one rank, or bytes that a transport did not write, are found."""
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
        assert any(gather_from_all_ranks(bool(done)))
        assert "does not match its checksum" in sentence
        assert re.search(r"rebalance in MOVING of moe\d \(step \d+\) was rolled back", sentence), sentence
        assert "The balancer goes on" in sentence
        assert balancer.stats().rollbacks == 1
        assert_recovers(balancer, layers, context)
        balancer.close()


# --- plans -----------------------------------------------------------------------------------------------------------


def by_itself(context, layers, planner, **options):
    config = EPLBConfig(interval=4, window=4, sync_every=2, **options)
    return ExpertBalancer(layers, context, config, planner=planner)


DIFFERENT, LATE = "the ranks made different plans: their digest is", "rank 1: PLANNING took longer than 1 s"


@distributed(2)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("another plan", DIFFERENT),
        ("another order of layers", DIFFERENT),
        ("an exception", "rank 1: ZeroDivisionError: "),
        ("too few maps", "rank 1: the planner must return a map per layer, 2, got 1"),
        ("no map", "rank 1: Placement.update needs a map with slots_per_rank="),
        ("no answer", LATE),
    ],
)
def test_a_plan_that_goes_wrong_on_one_rank(fault, words, world_size):
    plan_with(fault, words, world_size)


@distributed(4)
@pytest.mark.parametrize(("fault", "words"), [("another plan", DIFFERENT), ("no answer", LATE)])
def test_a_plan_that_goes_wrong_on_one_of_four_ranks(fault, words, world_size):
    """A plan that differs or is missing on one of four ranks is found by the others.

    Faults that a rank finds by itself are tested above on fewer ranks.
    """
    plan_with(fault, words, world_size)


def plan_with(fault, words, world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        good = [new_map(layers[0], 1), new_map(layers[0], 2)]
        faulty, given_up = [dist.get_rank() == LOST], threading.Event()

        def planner(load, current):
            if not faulty[0]:
                return good
            if fault == "no answer":
                assert given_up.wait(30)  # answers after its deadline, during the next plan
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
        step_until(balancer, lambda: balancer.state is State.PLANNING, layers, context)
        given_up.set()
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
        assert_recovers(balancer, layers, context)
        balancer.move_to(good)
        same_error(balancer_module.InputError, lambda: balancer.move_to(good))
        balancer.close()
        assert [layer.placement.expert_map for layer in layers] == good, "close brings it to its end"
