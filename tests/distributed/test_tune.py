"""Tuning on several ranks: one rank measures, all use its result, and its errors are raised on all."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig
from ep_moe.cli import tune as cli_tune
from ep_moe.experts.base import Experts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=2)


class Tuned(ReferenceExperts):
    """A kernel to tune, which records which rank measured and for how many rows."""

    def tune(self, rows, cache):
        if cache is not None and cache.name == "bad":
            raise OSError("no space left on device")
        measured.append(dist.get_rank())
        return [dist.get_rank(), *rows]

    def use(self, tuned):
        self.tuned = tuned


measured: list[int] = []


def made(context: EPContext, *counts: int, config: MoEConfig = CONFIG) -> MoELayer:
    layer = MoELayer(config, context, expert_map=ExpertMap.uneven(counts))
    layer.experts = Tuned(config, layer.expert_weights, context._workspaces)
    return layer


@distributed(2, 4)
def test_the_rank_with_the_most_experts_measures(world_size):
    measured.clear()
    rest = [1] * (world_size - 2)
    with EPContext.from_groups(ParallelConfig(dp=world_size, ep=world_size), device=rank_device()) as context:
        first, last = made(context, 6 - sum(rest), 0, *rest), made(context, 0, *rest, 6 - sum(rest))
        assert first.tune((8, 64)) == [0, 8, 64]
        assert last.tune((8,)) == [world_size - 1, 8]
        assert (first.experts.tuned, last.experts.tuned) == ([0, 8, 64], [world_size - 1, 8])
    assert measured == {0: [0], world_size - 1: [world_size - 1]}.get(dist.get_rank(), [])


@distributed(4)
def test_ranks_are_counted_in_expert_groups(world_size):
    measured.clear()
    with EPContext.from_groups(ParallelConfig(dp=4, ep=2, etp=2), device=rank_device()) as context:
        layer = made(context, 1, 5)
        assert layer.tune((8,)) == [2, 8]
    assert measured == ([2] if dist.get_rank() == 2 else [])


@distributed(2)
def test_layers_of_one_shape_are_measured_once(world_size):
    measured.clear()
    with EPContext.from_groups(ParallelConfig(dp=2, ep=2), device=rank_device()) as context:
        wide = dataclasses.replace(CONFIG, hidden_size=32)
        layers = [made(context, 3, 3), made(context, 3, 3), made(context, 3, 3, config=wide), made(context, 4, 2)]
        context.tune((4,))
        assert all(layer.experts.tuned == [0, 4] for layer in layers)
        assert len(measured) == (3 if dist.get_rank() == 0 else 0)


@distributed(2)
def test_what_goes_wrong_on_the_measuring_rank_is_raised_on_all(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2, ep=2), device=rank_device()) as context:
        layer = made(context, 2, 4)
        with pytest.raises(ConfigError, match="tune moe0: rank 1: no space left on device"):
            layer.tune((8,), cache="bad")
        with pytest.raises(ConfigError, match="tune moe0: rank 1: tune: rows must be integers of at least 1, got 0"):
            layer.tune((0,))
        assert layer.tune((8,)) == [1, 8]  # the next call works


@distributed(2)
def test_a_kernel_with_nothing_to_tune(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2, ep=2), device=rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        assert layer.tune() == []
        context.tune(cache="unused")
        assert Experts.tune(layer.experts, (8,), None) == []
        x = torch.ones(3, 16, device=context.device)
        assert layer(x).shape == (3, 16)


@distributed(1)
def test_a_number_of_tokens_is_measured_once(world_size):
    config = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=8, top_k=2)
    with EPContext.from_groups(ParallelConfig(), device=rank_device(), max_tokens=8) as context:
        found = cli_tune.tune(context, config, [8, 2, 8], dtype=torch.float32)
    lines = [(line.tokens, line.all2all, line.experts, line.pipeline) for line in found.measured]
    assert sorted({line[0] for line in lines}) == [2, 8]
    assert len(set(lines)) == len(lines)
