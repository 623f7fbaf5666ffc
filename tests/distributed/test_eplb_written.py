"""Parameters written while their experts migrate: all replicas end with the new numbers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_moe import EPContext, ExpertBalancer, MoEConfig, MoELayer, ParallelConfig, RebalanceError
from ep_moe.eplb.migration.consensus import State
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import check_call
from tests.fixtures.eplb_cases import ROW, all_alike, assert_slots, context_of, make_layers, on_request, random_map
from tests.fixtures.eplb_faults import DEADLINE_S, LOST, await_first, new_map, note_first, step_until
from tests.fixtures.helpers import integer_expert, saved_expert


def in_place(module, name, numbers):
    getattr(module, name).copy_(numbers)


def many(module, name, numbers):
    torch._foreach_copy_([getattr(module, name)], [numbers])


def data(module, name, numbers):
    getattr(module, name).data = numbers.clone()


def assigned(module, name, numbers):
    setattr(module, name, nn.Parameter(numbers.clone(), requires_grad=False))


@torch.no_grad()
def write(layer, how, seed, experts=range(10)):
    """Write new numbers to the tensors of these experts that this rank holds."""
    for expert, module in layer.expert_weights.named_children():
        if int(expert) in experts:
            for name, numbers in saved_expert(layer.config, int(expert), seed).items():
                how(module, name, numbers.to(layer.device))


@distributed(2, deadline_s=120)
@pytest.mark.parametrize("how", [in_place, many, data, assigned])
def test_parameters_written_on_the_way_are_not_lost(how, world_size):
    """A parameter write at any time of a migration reaches all replicas, also in the middle of a row's transfer."""
    with context_of() as context:
        (layer,) = make_layers(context)
        restarts = 0
        for turn in range(10):
            with ExpertBalancer([layer], context, on_request(bytes_per_step=ROW // 3)) as balancer:
                balancer.move_to([random_map(2, 8, turn)])
                number = 0
                while balancer.state is not State.IDLE or number <= turn:
                    early = turn % 2 == 0
                    if number == turn and early:
                        write(layer, how, turn)
                    seed = turn if number > turn or (number == turn and early) else max(turn - 1, 0)
                    check_call(layer, context, tokens=3, seed=seed, what=f"turn {turn}, step {number}")
                    if number == turn and not early:
                        write(layer, how, turn)
                    balancer.step()
                    number += 1
                check_call(layer, context, seed=turn)
                assert_slots(layer, seed=turn)
                restarts += all_alike(balancer.stats().restarts)
        assert restarts > 2


@distributed(2)
def test_an_expert_that_one_rank_alone_holds(world_size):
    """A write to an expert that only one rank holds reaches its new ranks before any commit."""
    with context_of() as context:
        (layer,) = make_layers(context, redundant=0)
        held = layer.placement.expert_map
        assert 0 in held.local(0)
        assert 0 not in held.local(1)
        with ExpertBalancer([layer], context, on_request(bytes_per_step=ROW // 3)) as balancer:
            balancer.move_to([random_map(2, 5, 3)])
            step_until(balancer, lambda: balancer.state is State.MOVING)
            balancer.step()
            write(layer, in_place, 1, experts=(0,))
            balancer.settle()
            assert all_alike(balancer.stats().restarts) == 1
        assert_slots(layer, lambda config, expert, _: integer_expert(config, expert, int(expert == 0)))


@distributed(2, 4)
@pytest.mark.parametrize("first", ["that rank", "the others"])
def test_a_rank_that_writes_when_it_has_said_that_it_is_ready(first, world_size):
    """A write after reporting ready restarts all ranks, if this rank reaches the store first.

    Otherwise the others have committed the old numbers, and this rank raises.
    """
    with context_of(10.0) as context:
        (layer,) = make_layers(context)
        rank = dist.get_rank()
        balancer = ExpertBalancer([layer], context, on_request(bytes_per_step=1 << 30, deadline_s=DEADLINE_S))
        balancer.move_to([new_map(layer)])
        step_until(balancer, lambda: balancer.state is State.MOVING and balancer._migration.done)
        if rank == LOST:
            write(layer, in_place, 0)
        if (rank == LOST) == (first == "the others"):
            await_first()
        if rank == LOST and first == "the others":
            with pytest.raises(RebalanceError, match=r"parameters of moe0 were written on this rank.*update_expert"):
                balancer.step()
        else:
            balancer.step()
            note_first()
        if first == "the others":
            if rank != LOST:
                assert balancer.state is State.IDLE
        else:
            balancer.settle()
            assert all_alike(balancer.stats().restarts) == 1
        assert all_alike(layer.placement.expert_map.to_json()) == new_map(layer).to_json()
        assert_slots(layer)
        check_call(layer, context)


@distributed(2)
def test_a_write_to_a_piece_of_etp_is_seen(world_size):
    """A write to an etp rank's piece, which goes through a DTensor, is noticed."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1, etp=2), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2), context)
        weights = layer.expert_weights
        before = weights.version_key()
        assert weights.version_key() == before
        with torch.no_grad():
            weights.get_submodule("2").w2.mul_(2)
        assert weights.version_key() != before
