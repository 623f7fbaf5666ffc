"""Automatic CUDA graphs on GPUs: replays equal eager calls bit for bit, beside ranks that run eagerly, and save host
time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ParallelConfig
from ep_moe.bench.harness import host
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device
from tests.fixtures import p2p_bodies
from tests.fixtures.captured_layer import built, on_gpus, routes, rows
from tests.fixtures.distributed_cases import gather_from_all_ranks, run_eager


@on_gpus
@distributed(1, 2, 4)
@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@pytest.mark.parametrize("bound", [40, 200], ids=["by packets", "by flags"])
def test_the_same_bits_with_other_rows_routes_tokens_and_maps(bound, pair, world_size):
    p2p_bodies.other_rows_routes_tokens_and_maps(bound, pair, world_size)


@on_gpus
@distributed(1, 2, 4)
def test_shared_experts(world_size):
    p2p_bodies.shared_experts(world_size)


@on_gpus
@distributed(1, 2, 4)
def test_other_streams_and_a_capture_around_it(world_size):
    p2p_bodies.other_streams_and_a_capture_around_it(world_size)


@on_gpus
@distributed(1, 2, 4, set_device=True)  # the timer uses the current device
@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@torch.no_grad()
def test_the_host_of_a_replayed_call(pair, world_size):
    """A replayed call of one token takes less than 2/3 of the host time of an eager call.

    With one token, host time dominates.
    """
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=1) as context:
        layer = built(context, pair)
        x, routing = rows(layer, 1, 0), routes(layer, 1, 0)
        own = host(lambda: run_eager(layer, x, routing), before=lambda: barrier(layer.device))
        repeated = host(lambda: layer.forward_routed(x, routing), before=lambda: barrier(layer.device))
        times = gather_from_all_ranks((round(own), round(repeated)))
        if dist.get_rank() == 0:
            print(f"{pair}, host, us: {times}")  # noqa: T201
        assert all(again < 2 / 3 * own for own, again in times), times
