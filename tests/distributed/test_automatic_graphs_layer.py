"""Repeated calls on GPUs: the bits of the layer itself, on ranks that repeat beside ranks that do not, and what is left
to the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig
from ep_moe.bench.harness import host
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Routing
from tests.fixtures.captured_layer import SHARED, built, on_gpus, routes, rows, written
from tests.fixtures.distributed_cases import everywhere, ran


def shifted(x: Tensor) -> Tensor:
    """The same numbers where no repeated call takes them: they begin between two multiples of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def check(layer: MoELayer, x: Tensor, routing: Routing | None) -> bool:
    """Whether the call is repeated. It gives what the layer gives when it runs. Collective."""
    with mock.patch.object(MoELayer, "run", autospec=True, side_effect=MoELayer.run) as run:
        y = layer(x) if routing is None else layer.forward_routed(x, routing)
    expected = ran(layer, x, routing)
    assert torch.equal(y, expected), (y.float() - expected.float()).abs().max()
    assert y.isfinite().all()
    assert (y != 0).any() == (y.numel() > 0), "experts that give nothing would hide all"
    return not run.called


@on_gpus
@distributed(1, 2, 4)
@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@pytest.mark.parametrize("bound", [40, 200], ids=["by packets", "by flags"])
@torch.no_grad()
def test_the_same_bits_with_other_rows_routes_tokens_and_maps(bound, pair, world_size):
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=bound) as context:
        layers = [built(context, pair) for _ in range(2)]  # which share the transport's memory
        for layer in layers:
            for _ in range(2):
                layer.forward_routed(rows(layer, 1, rank), routes(layer, 1, rank))
        for step in range(24):
            layer, aside = layers[step % 2], (step + rank) % 3 == 0
            tokens = (4, 5, 32, 1, 0, bound)[(step // 2 + rank) % 6]
            x, routing = rows(layer, tokens, 10 * step + rank), routes(layer, tokens, step)
            routing = None if step % 5 == 0 else routing
            repeated = check(layer, shifted(x) if aside else x, routing)
            assert repeated == (not aside or tokens == 0), step
        placed = layers[0].placement.expert_map
        turned = (
            placed.physical_to_logical[placed.slots_per_rank :] + placed.physical_to_logical[: placed.slots_per_rank]
        )
        other = ExpertMap(physical_to_logical=turned, num_experts=10, num_ranks=world_size)
        layers[0].placement.update(other)
        layers[0].expert_weights.set_expert_map(other)
        written(layers[0])
        assert check(layers[0], rows(layers[0], 32, rank), routes(layers[0], 32, rank))
        assert len(set(everywhere(context.flight_recorder.number))) == 1


@on_gpus
@distributed(1, 2, 4)
@torch.no_grad()
def test_shared_experts(world_size):
    """Behind few rows, and beside many."""
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=800) as context:
        layer = built(context, config=SHARED)
        torch.manual_seed(3)
        for parameter in layer.shared_experts.parameters():
            parameter.copy_(torch.randn(parameter.shape).div(16))
        for bound, few in ((40, True), (800, False)):
            with context.token_limit(bound):
                for step in range(8):
                    x, routing = rows(layer, (bound, 1, 7)[(step + rank) % 3], step), None
                    routing = None if step % 3 == 0 else routes(layer, len(x), step)
                    assert check(layer, x.view(1, *x.shape), routing) == (few and step > 1), step


@on_gpus
@distributed(1, 2, 4)
@torch.no_grad()
def test_other_streams_and_a_capture_around_it(world_size):
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=40) as context:
        layer = built(context)
        x, routing = rows(layer, 16, dist.get_rank()), routes(layer, 16, dist.get_rank())
        expected = ran(layer, x, routing)
        assert [check(layer, x, routing) for _ in range(3)][2]
        other = torch.cuda.Stream(layer.device)
        for _ in range(3):
            # without a wait between the streams but the layer's own
            torch.cuda.synchronize(layer.device)
            with torch.cuda.stream(other):
                for _ in range(4):
                    aside = layer.forward_routed(x, routing)
            y = layer.forward_routed(x, routing)
            torch.cuda.synchronize(layer.device)
            assert torch.equal(aside, expected)
            assert torch.equal(y, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(layer.device)):
            calls = [layer.forward_routed(x, routing) for _ in range(4)]
        other_x = rows(layer, 16, 100 + dist.get_rank())
        x.copy_(other_x)
        graph.replay()
        assert all(torch.equal(y, ran(layer, other_x, routing)) for y in calls)


@on_gpus
@distributed(1, 2, 4, set_device=True)  # what times is the current device\'s
@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@torch.no_grad()
def test_the_host_of_a_replayed_call(pair, world_size):
    """At one token, where the host is what takes time: less than two thirds of the layer's own."""
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=1) as context:
        layer = built(context, pair)
        x, routing = rows(layer, 1, 0), routes(layer, 1, 0)
        own = host(lambda: ran(layer, x, routing), before=lambda: barrier(layer.device))
        repeated = host(lambda: layer.forward_routed(x, routing), before=lambda: barrier(layer.device))
        times = everywhere((round(own), round(repeated)))
        if dist.get_rank() == 0:
            print(f"{pair}, host, us: {times}")  # noqa: T201
        assert all(again < 2 / 3 * own for own, again in times), times
