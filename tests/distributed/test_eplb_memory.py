"""The balancer's memory is allocated with it and grows only for large cycles. A failed allocation raises on all
ranks."""

import dataclasses
import os
from unittest import mock

import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPLBConfig, ExpertBalancer, RebalanceError
from ep_moe.eplb.migration import transfer
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.migration.transfer import Staging
from ep_moe.testing import distributed
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.eplb_cases import CONFIG, ROW, assert_slots, context_of, make_layers, on_request, random_map
from tests.fixtures.eplb_faults import LOST, assert_recovers, new_map, raises_everywhere


@distributed(2)
def test_the_first_rebalance_makes_no_memory(world_size):
    """The first rebalance allocates nothing: it uses the buffers made with the balancer, for experts and for counts.

    Forwards would wait for allocations.
    """
    with context_of() as context:
        layers = [*make_layers(context), *make_layers(context, config=dataclasses.replace(CONFIG, hidden_size=32))]
        maps = [random_map(world_size, layers[0].placement.expert_map.slots_per_rank, seed) for seed in (3, 4)]
        config = EPLBConfig(interval=4, window=2, sync_every=1, bytes_per_step=ROW)
        with ExpertBalancer(layers, context, config, planner=lambda load, current: maps) as balancer:
            before = _addresses(balancer)
            with mock.patch.object(Staging, "_empty", side_effect=AssertionError("memory is made")):
                for _ in range(4):
                    for layer in layers:
                        layer(torch.ones(3, layer.config.hidden_size, device=context.device))
                    balancer.step()
                while balancer.stats().commits < 2:
                    balancer.step()
                    if balancer._migration is not None:
                        own, kept = balancer._migration, balancer._mover.staging
                        assert own._damage.data_ptr() == kept.damage.data_ptr()
                        assert own._damage_on_host.data_ptr() == kept.damage_on_host.data_ptr()
                balancer.settle()
            assert _addresses(balancer) == before
            for layer in layers:
                assert_slots(layer)


def _addresses(balancer):
    kept, load = balancer._mover.staging, balancer._load
    held = [*kept._rows, kept._outbox, kept.damage, kept.damage_on_host, load._before, load._counts, load._on_host]
    return [tensor.data_ptr() for tensor in held]


@distributed(2)
def test_a_plan_that_needs_more_than_is_kept(world_size):
    """Experts that change places in a larger cycle get extra staging memory, which is freed afterwards."""
    with context_of() as context, mock.patch.object(transfer, "_CYCLE", 1):
        layers = make_layers(context, 2)
        slots_per_rank = layers[0].placement.expert_map.slots_per_rank
        with ExpertBalancer(layers, context, on_request(bytes_per_step=ROW, bytes_per_commit=1)) as balancer:
            held, most = balancer.stats().staging_bytes, 0
            assert held == 2 * ROW, "of an expert, and of a step"
            for turn in range(2):
                maps = [random_map(world_size, slots_per_rank, 10 * turn + index) for index in range(2)]
                balancer.move_to(maps)
                while balancer.state is not State.IDLE:
                    balancer.step()
                    most = max(most, balancer.stats().staging_bytes)
                assert most > 3 * ROW
                assert balancer.stats().staging_bytes == held
                assert [layer.placement.expert_map for layer in layers] == maps
                for layer in layers:
                    assert_slots(layer)


@distributed(2)
def test_no_memory_for_a_balancer(world_size):
    """If one rank cannot allocate the balancer's memory, all ranks raise before any group is made, and the next
    works."""
    with context_of() as context:
        layers = make_layers(context)
        full = mock.patch.object(Staging, "_empty", side_effect=torch.OutOfMemoryError("out of memory"))
        config = on_request(bytes_per_step=ROW, bytes_per_commit=1)
        with full if dist.get_rank() == LOST else mock.patch.object(os, "getpid", os.getpid):
            sentence = same_error(ConfigError, lambda: ExpertBalancer(layers, context, config))
        words = f"rank 1: EPLBConfig.bytes_per_commit=1 and bytes_per_step={ROW} need {9 * ROW} bytes of memory on "
        assert words in sentence, sentence
        balancer = ExpertBalancer(layers, context, config)
        assert_recovers(balancer, layers, context)
        balancer.close()


@distributed(2)
def test_no_memory_for_what_comes(world_size):
    """If one rank cannot reserve memory for a migration, all ranks raise before anything travels."""
    with context_of() as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request())
        balancer.move_to([new_map(layers[0])])
        full = mock.patch.object(Staging, "reserve", side_effect=torch.OutOfMemoryError("out of memory"))
        with full if dist.get_rank() == LOST else mock.patch.object(os, "getpid", os.getpid):
            sentence = raises_everywhere(RebalanceError, balancer, layers, context)
        assert "rank 1: OutOfMemoryError: out of memory" in sentence
        assert_recovers(balancer, layers, context)
        balancer.close()
