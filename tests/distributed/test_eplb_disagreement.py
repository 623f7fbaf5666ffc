"""Ranks that act differently during a migration: each rank raises, and all ranks keep the same maps."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, ExpertBalancer, InputError, PeerTimeout, RebalanceError
from ep_moe.eplb import balancer as balancer_module
from ep_moe.eplb.migration.consensus import RankStatus, State, StatusExchange, Trouble
from ep_moe.testing import distributed
from tests.fixtures.distributed_cases import check_call, same_error
from tests.fixtures.eplb_cases import ROW, all_alike, assert_slots, context_of, make_layers, on_request, random_map
from tests.fixtures.eplb_faults import (
    DEADLINE_S,
    LOST,
    assert_balancer_off,
    assert_recovers,
    await_first,
    new_map,
    note_first,
    raises_everywhere,
    step_until,
)
from tests.fixtures.helpers import fill


@distributed(2, 4)
def test_a_rank_that_skips_a_step_is_found_before_anything_is_put_in_force(world_size):
    """A rank that skips `step()` is found before any commit.

    Its commits would fall between other forwards than those of its peers.
    """
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
        assert_balancer_off(balancer, layers, RebalanceError)


@distributed(2, deadline_s=60)
def test_a_rank_that_skipped_a_step_while_nothing_moved_is_found(world_size):
    with context_of() as context:
        balancer = ExpertBalancer(make_layers(context, 2), context, on_request())
        for _ in range(1 + dist.get_rank()):
            balancer.step()
        balancer.move_to([random_map(2, 8, seed) for seed in (1, 2)])
        found = ""
        for _ in range(12):
            try:
                balancer.step()
            except RebalanceError as error:
                found = found or str(error)
        assert "step is 1 on rank 0, 2 on rank 1; call ExpertBalancer.step()" in found


@distributed(2)
def test_a_step_that_is_skipped_just_before_a_commit(world_size):
    """A `step()` skipped just before a commit raises in the next call.

    It is too late to prevent the commit. The rank that skipped gets the map of the others and a RebalanceError.
    """
    with context_of(10.0) as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        x = torch.zeros(3, 16, device=context.device)
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        if dist.get_rank() != LOST:
            balancer.step()
        with pytest.raises(InputError, match=r"use different expert maps.*ExpertBalancer\.step"):
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
    """A rank that writes weights after it reported ready restarts the transfer, unless the others have committed.

    Only the store tells then whether they have. All ranks have one map.
    """
    with context_of(10.0) as context:
        layers, rank = make_layers(context), dist.get_rank()
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        if rank == LOST:
            layers[0].expert_weights.updates += 1
        if (rank == LOST) == (first == "the others"):
            await_first()
        if rank == LOST and first == "that rank":
            balancer.step()
            note_first()
        if rank != LOST and first == "the others":
            balancer.step()
            note_first()
        if rank == LOST and first == "the others":
            with pytest.raises(RebalanceError, match=r"the balancer is off: parameters of moe0 were written on this"):
                balancer.settle()
        else:
            balancer.settle()
            assert balancer.state is State.IDLE
            assert balancer.stats().restarts == (first == "that rank")
        assert all_alike(layers[0].placement.expert_map.to_json()) == new_map(layers[0]).to_json()
        assert_slots(layers[0])
        check_call(layers[0], context)


@distributed(2, 4)
@pytest.mark.parametrize("first", ["the one that lost the others", "the others"])
def test_ranks_that_receive_different_statuses_do_the_same(first, world_size):
    """All ranks have the same map if rank 1 misses the answer that made the others commit.

    The first rank that writes to the store decides.
    """
    with context_of(10.0) as context:
        layers = make_layers(context)
        before, after = layers[0].placement.expert_map, new_map(layers[0])
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([after])
        # all have reported ready; the next step brings the answers
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        rank, wait_for_statuses = dist.get_rank(), StatusExchange.wait_for_statuses

        def miss_answers(exchange):
            found = wait_for_statuses(exchange)
            if (rank == LOST) == (first == "the others"):
                await_first()
            if rank == LOST:
                raise PeerTimeout("planted: connection lost")
            return found

        with mock.patch.object(StatusExchange, "wait_for_statuses", miss_answers):
            if first == "the others" and rank != LOST:
                balancer.step()
                note_first()
                assert balancer.state is State.IDLE
                balancer._status_exchange.post_status(RankStatus(0, 0, State.IDLE, 0, True, Trouble.NONE, 0))
                with pytest.raises(PeerTimeout, match="lost its peers in eplb agree"):
                    wait_for_statuses(balancer._status_exchange)  # no rank answers a rank that has lost the others
            else:
                with pytest.raises((PeerTimeout, RebalanceError), match="the balancer is off"):
                    balancer.step()
                note_first()
                assert balancer.state is State.OFF
        now = all_alike(layers[0].placement.expert_map.to_json())
        assert now == (after if first == "the others" else before).to_json()
        assert_slots(layers[0])
        check_call(layers[0], context)


@distributed(2)
def test_another_map_on_the_way(world_size):
    """A map that the user puts in force during a migration stays, and the migration raises."""
    with context_of() as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=ROW))
        balancer.move_to([new_map(layers[0])])
        step_until(balancer, lambda: balancer.state is State.MOVING)
        mine = random_map(2, 8, 77)
        layers[0].placement.update(mine)
        layers[0].expert_weights.set_expert_map(mine)
        for expert_layer in layers:
            updates = expert_layer.expert_weights.updates
            fill(expert_layer)
            expert_layer.expert_weights.updates = updates
        sentence = raises_everywhere(RebalanceError, balancer, layers, context)
        assert "its expert map was changed while its experts were moving" in sentence
        assert layers[0].placement.expert_map == mine
        assert_recovers(balancer, layers, context)
        balancer.close()


@distributed(2)
@pytest.mark.parametrize("when", ["while experts arrive", "before the others commit", "after the others commit"])
def test_a_map_that_one_rank_alone_changes(when, world_size):
    """All ranks raise, or refuse the next call: a commit over another map would leave slots with other experts."""
    with context_of(10.0) as context:
        layers, rank = make_layers(context), dist.get_rank()
        early = when == "while experts arrive"
        budget = ROW if early else 1 << 30
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=budget, deadline_s=DEADLINE_S))
        before, after, mine = layers[0].placement.expert_map, new_map(layers[0]), random_map(2, 8, 77)
        balancer.move_to([after])
        step_until(balancer, lambda: balancer.state is State.MOVING and (early or balancer._migration.done))
        if rank == LOST:
            layers[0].placement.update(mine)
            layers[0].expert_weights.set_expert_map(mine)
        if when == "after the others commit":
            if rank == LOST:
                await_first()
                with pytest.raises(RebalanceError, match="the expert map of moe0 was changed on this rank alone"):
                    balancer.step()
            else:
                balancer.step()
                note_first()
        else:
            if rank != LOST and not early:
                await_first()
            if rank == LOST and not early:
                balancer.step()
                note_first()
            found = same_error(RebalanceError, balancer.settle)
            assert "rank 1: layer moe0: its expert map was changed while its experts were moving" in found
            assert balancer.state is State.IDLE
        now = layers[0].placement.expert_map
        assert now == (mine if rank == LOST else after if "after" in when else before)
        x = torch.zeros(3, 16, device=context.device)
        assert "the ranks use different expert maps" in same_error(InputError, lambda: layers[0](x))


@distributed(2)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [("one", "rank 1: layer moe0: Placement.update changed the expert map"), ("one of both", "different plans"),
     ("all", "rank 0: layer moe0: Placement.update changed the expert map")],
)  # fmt: skip
def test_a_map_that_is_changed_before_a_rebalance(ranks, words, world_size):
    """Experts would be sent from slots that hold others, and all ranks would have one map afterwards."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        before = layers[0].placement.expert_map
        balancer = ExpertBalancer(layers, context, on_request(deadline_s=DEADLINE_S))
        if ranks == "all" or dist.get_rank() == LOST:
            layers[0].placement.update(random_map(2, 8, 77))
            if ranks == "one of both":  # of placement and weights
                layers[0].expert_weights.set_expert_map(random_map(2, 8, 77))
        balancer.move_to([new_map(layers[0], 3)])
        assert words in same_error(RebalanceError, balancer.settle)
        layers[0].placement.update(before)
        layers[0].expert_weights.set_expert_map(before)
        assert_recovers(balancer, layers, context)


@distributed(2)
def test_a_context_that_is_through_ends_the_balancer_too(world_size):
    """A context that was refused ends its balancer: the next exchange raises the error, and the old map stays."""
    with context_of(10.0) as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request(deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layers[0])])
        context.flight_recorder.refuse("planted: this context is at its end")
        with pytest.raises(balancer_module.InputError, match="planted: this context is at its end"):
            balancer.settle()
        assert_balancer_off(balancer, layers, balancer_module.InputError)
        with pytest.raises(ConfigError, match=r"EPLBConfig.nodes must divide the 2 EP ranks, got 3"):
            ExpertBalancer(layers, context, on_request(nodes=3))
