"""`MoELayer.capture` on GPUs: replays equal eager calls bit for bit, whatever changes between them, and save host
time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoELayer, ParallelConfig
from ep_moe.bench.harness import host
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device
from tests.fixtures.captured_layer import PAIRS, SHARED, built, on_gpus, routes, rows, written
from tests.fixtures.distributed_cases import gather_from_all_ranks, run_eager, same_error


@contextmanager
def watched(layer: MoELayer) -> Iterator[list[bool]]:
    """Record for each call within whether it was a replay."""
    found: list[bool] = []
    replay = layer._graphs.replay

    def seen(*arguments: object) -> Tensor | None:
        out = replay(*arguments)
        found.append(out is not None)
        return out

    with mock.patch.object(layer._graphs, "replay", seen):
        yield found


def check(layer: MoELayer, tokens: int, seed: int, *, replays: bool, routed: bool = True) -> None:
    """Check that a call equals the eager call bit for bit. Collective."""
    x, routing = rows(layer, tokens, seed), routes(layer, tokens, seed) if routed else None
    with watched(layer) as found:
        y = layer(x) if routing is None else layer.forward_routed(x, routing)
    expected = run_eager(layer, x, routing)
    assert found == [replays], (tokens, seed)
    assert torch.equal(y, expected), (tokens, seed, (y.float() - expected.float()).abs().max())
    assert y.isfinite().all()
    chosen = tokens > 0 and (routing is None or bool((routing.ids >= 0).any()))
    assert (y != 0).any() == chosen, "experts that give nothing would hide all"


@on_gpus
@distributed(2, 4)
@pytest.mark.parametrize("pair", PAIRS)
@torch.no_grad()
def test_the_same_bits_with_other_rows_routes_tokens_and_maps(pair, world_size):
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=64) as context:
        layer = built(context, pair)
        with context.token_limit(40):
            layer.capture_routed([1, 4, 32])
            for step in range(12):
                # numbers of tokens that only some ranks captured, in another order than the captures
                tokens = (4, 5, 32, 1, 0, 33)[(step + rank) % 6]
                check(layer, tokens, 10 * step + rank, replays=tokens != 33)
            placed = layer.placement.expert_map
            turned = (
                placed.physical_to_logical[placed.slots_per_rank :]
                + placed.physical_to_logical[: placed.slots_per_rank]
            )
            other = ExpertMap(physical_to_logical=turned, num_experts=10, num_ranks=world_size)
            layer.placement.update(other)
            layer.expert_weights.set_expert_map(other)
            written(layer)
            check(layer, 32, 77 + rank, replays=True)
        check(layer, 32, rank, replays=False)
        assert len(set(gather_from_all_ranks(context.flight_recorder.number))) == 1


@on_gpus
@distributed(2, 4)
@torch.no_grad()
def test_layers_that_share_memory_and_shared_experts_beside(world_size):
    """Two captured layers that share buffers take turns and stay right, with shared experts and the layer's own
    router."""
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=64) as context:
        layers = [built(context, config=SHARED) for _ in range(2)]
        for layer in layers:
            layer.capture([2, 16, 64, 1, 0])
        for step in range(8):
            check(layers[step % 2], (16, 64, 2, 0)[(step // 2 + rank) % 4], step, replays=True, routed=False)
        for tokens, captured in ((9, 16), (40, 64), (3, 16)):
            # the same rows, with and without tokens in the rows behind them
            more = rows(layers[0], captured, tokens + rank)
            with watched(layers[0]) as found:
                fewer = layers[0](more[:tokens])
            assert found == [True]
            assert torch.equal(fewer, layers[0](more)[:tokens]), tokens
        x = rows(layers[0], 16, 5)
        first = layers[0](x)
        kept = first.clone()
        layers[0](rows(layers[0], 16, 6))
        layers[1](x)
        assert torch.equal(first, kept), "a result is the caller's own"
        assert torch.equal(layers[0](x.view(4, 4, -1)), first.view(4, 4, -1))
        with torch.inference_mode():
            assert torch.equal(layers[0](x), first)


@on_gpus
@distributed(2, 4)
@torch.no_grad()
def test_other_streams_and_a_capture_around_it(world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=64) as context:
        layer = built(context)
        layer.capture_routed([16])
        other = torch.cuda.Stream(layer.device)
        for step in range(6):
            check(layer, 16, step + 10 * rank, replays=True)
            other.wait_stream(torch.cuda.current_stream(layer.device))
            with torch.cuda.stream(other):
                check(layer, 16, step + 10 * rank, replays=False)
            # no synchronization between streams except the layer's own
            x, routing = rows(layer, 16, step), routes(layer, 16, step)
            torch.cuda.synchronize(layer.device)
            with torch.cuda.stream(other):
                aside = run_eager(layer, x, routing)
            y = layer.forward_routed(x, routing)
            torch.cuda.synchronize(layer.device)
            assert torch.equal(y, aside), step
        graph = torch.cuda.CUDAGraph()
        x, routing = rows(layer, 16, rank), routes(layer, 16, rank)
        with watched(layer) as found, torch.cuda.graph(graph, stream=torch.cuda.Stream(layer.device)):
            y = layer.forward_routed(x, routing)
        assert found == [False], "inside a capture of the user's"
        graph.replay()
        assert torch.equal(y, run_eager(layer, x, routing))


@on_gpus
@distributed(2, 4, set_device=True)  # the timer uses the current device
def test_the_host_of_a_replay(world_size):
    """A replay of one token takes less than half of the host time of an eager call.

    With one token, host time dominates.
    """
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=1) as context:
        layer = built(context)
        x, routing = rows(layer, 1, 0), routes(layer, 1, 0)

        with torch.no_grad():
            before = host(lambda: run_eager(layer, x, routing), before=lambda: barrier(layer.device))
            layer.capture_routed([1])
            after = host(lambda: layer.forward_routed(x, routing), before=lambda: barrier(layer.device))
        times = gather_from_all_ranks((round(before), round(after)))
        if dist.get_rank() == 0:
            print(f"host, us: {times}")  # noqa: T201
        assert all(replayed < own / 2 for own, replayed in times), times


@on_gpus
@distributed(2, 4)
@torch.no_grad()
def test_load_tuning_and_bad_input(world_size):
    """A capture counts no load, `tune` drops captures, and a rank that refuses a call raises on all ranks.

    The refusal comes last, because it closes the context.
    """
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=64) as context:
        layer = built(context)
        layer.capture_routed([16])
        layer.capture([16])  # without a routing: the layer's router is captured too
        assert not any(layer.stats().expert_load), "a capture is no load"
        routing = routes(layer, 16, rank)
        layer.forward_routed(rows(layer, 16, rank), routing)
        counted = int((routing.ids >= 0).sum())
        assert sum(layer.stats().expert_load) == sum(gather_from_all_ranks(counted))
        with layer.no_stats():
            layer.forward_routed(rows(layer, 16, rank), routing)
        assert sum(layer.stats().expert_load) == sum(gather_from_all_ranks(counted))
        layer.tune([16])
        check(layer, 16, rank, replays=False)
        found = same_error(ConfigError, lambda: layer.capture_routed([65]))
        assert "at most 64 (the token limit), got [65]" in found
        layer.capture_routed([16])
        check(layer, 16, rank, replays=True)
        x = rows(layer, 16, rank)
        if rank == 1:
            with pytest.raises(InputError, match="x must be bfloat16 as the layer is, got float32"):
                layer.forward_routed(x.float(), routing)
        else:
            with watched(layer) as replayed:
                y = layer.forward_routed(x, routing)
            assert replayed == [True]
            assert y.isnan().any(), "rank 1's experts gave no number"
