"""EPLB on layers captured in CUDA graphs, on GPUs under torchrun.

Replays are right during and after migrations, and count load.
"""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    EPContext,
    EPLBConfig,
    ExpertBalancer,
    ExpertMap,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    PeerTimeout,
    RebalanceError,
)
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.eplb.migration.consensus import State
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.initial import random_expert
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.eplb_cases import all_alike, assert_slots, make_layers, on_request, random_map
from tests.fixtures.layer_static import TOKENS, WIDE, Captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
BUDGETS = {"in pieces": 200_000, "all at once": 1 << 30}  # bytes per step; a row has 400,000 to 800,000


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@distributed(2, 4)  # runs first, before other tests compile its kernels
def test_the_first_rebalance_makes_nothing(world_size):
    """The first rebalance allocates no device memory and no pinned memory, and compiles no kernel.

    Forwards would wait for any of these. Every other slot of one layer has a scale that is not aligned to 16 bytes.
    """
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device()) as context:
        large = MoEConfig(hidden_size=1024, intermediate_size=1024, num_experts=10, top_k=3)
        names = {"all2all": "allgather", "experts": "reference"}
        layers = [*make_layers(context, **names), *make_layers(context, config=large, **names)]
        held = layers[1].expert_weights
        held.register_buffer("w13_extra_scale", torch.ones(held.num_slots, 6, device=context.device))
        maps = [random_map(world_size, layers[0].placement.expert_map.slots_per_rank, seed) for seed in (1, 2)]
        config = EPLBConfig(interval=4, window=4, sync_every=2, bytes_per_step=4 << 20)
        torch.cuda.synchronize(context.device)
        torch.cuda.empty_cache()
        with ExpertBalancer(layers, context, config, planner=lambda load, current: maps) as balancer:
            before, compiled = _made(context.device), []
            # no forwards: they would leave cached memory that a rebalance could use
            with on_compilation(lambda **found: compiled.append(found["repr"])):
                while balancer.stats().commits < 2:
                    for layer in layers:
                        layer.placement.expert_load.add_(1)
                    balancer.step()
            assert _made(context.device) == before
            assert compiled == []
            balancer.settle()
            for layer in layers:
                assert_slots(layer)


def _made(device):
    """Return how many allocations of device memory and of pinned memory the driver made."""
    return torch.cuda.memory_stats(device)["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


def on_compilation(call):
    from triton import knobs

    return mock.patch.object(knobs.runtime, "jit_post_compile_hook", call)


def settled(balancer, check, most=3000):
    """Replay and step until the balancer is idle; every replay must be right."""
    for number in range(most):
        if balancer.state is State.IDLE:
            return number
        check(number)
        balancer.step()
    raise AssertionError(f"still in {balancer.state.name} after {most} steps")


@pytest.mark.skipif(bool(FlashInferNVLinkDispatcher.available()), reason="needs FlashInfer")
@distributed(2, 4)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("scheme", "experts"),
    [
        ("none", "bf16_triton"),
        ("fp8_block", "fp8_block_triton"),
        ("fp8_dynamic", "flashinfer_cutlass"),
        ("fp8_channel", "fp8_channel_triton"),
        ("mxfp4", "flashinfer_cutlass"),
        ("mxfp4", "w4a16_triton"),
    ],
)
def test_replays_while_experts_move(scheme, experts, budget, world_size):
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=64) as context:
        tensors = [random_expert(WIDE, SCHEMES[scheme], expert, torch.bfloat16, device) for expert in range(10)]
        names = {"quantization": scheme, "experts": experts, "dtype": torch.bfloat16}
        layers = [MoELayer(WIDE, context, expert_map=ExpertMap.redundant(10, world_size, 6), **names) for _ in range(2)]
        for layer in layers:
            layer.requires_grad_(False)
            for expert in range(10):
                layer.update_expert(expert, **tensors[expert])
        with context.token_limit(TOKENS):
            captured = [Captured(layer, tensors, scheme) for layer in layers]
        slots_per_rank = layers[0].placement.expert_map.slots_per_rank
        with ExpertBalancer(layers, context, on_request(bytes_per_step=BUDGETS[budget], sync_every=2)) as balancer:
            for turn in range(4):
                maps = [random_map(world_size, slots_per_rank, 10 * turn + index) for index in range(2)]

                def check(number, turn=turn):
                    for index, graph in enumerate(captured):
                        found = graph.replay(TOKENS, 1000 * turn + 10 * number + index + 7 * rank)
                        assert found <= 1, (balancer.state.name, number, index, found)

                balancer.move_to(maps)
                all_alike(settled(balancer, check))
                assert [layer.placement.expert_map for layer in layers] == maps
                check(-1)
                for layer in layers:
                    assert_slots(layer, lambda _config, expert, _seed: tensors[expert])
            assert balancer.stats().commits == 8
            before = layers[0].stats().expert_load
            with balancer.no_stats():
                captured[0].replay(TOKENS, 5)
            assert layers[0].stats().expert_load == before, "a replay within no_stats was counted"
            captured[0].replay(TOKENS, 5)
            assert sum(layers[0].stats().expert_load) > sum(before), "a replay was not counted"


@distributed(2, 4)
def test_a_step_does_not_wait_for_the_device(world_size):
    """`step()` never waits for the device, whether idle, sending or committing; torch's sync debug mode raises if it
    does.

    Load is counted over NCCL, window after window.
    """
    device = rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device) as context:
        layers = make_layers(context, 2, all2all="allgather", experts="reference")
        x = torch.randn(64, 16, device=device)

        def planner(load, current):
            return [
                random_map(world_size, placed.slots_per_rank, int(load.sum()) + i) for i, placed in enumerate(current)
            ]

        config = EPLBConfig(interval=20, window=10, sync_every=2, bytes_per_step=4096)
        with ExpertBalancer(layers, context, config, planner=planner) as balancer:
            for _ in range(200):
                for layer in layers:
                    layer(x)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    balancer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            balancer.settle()
            assert balancer.stats().commits > 0
            for layer in layers:
                assert_slots(layer)


@distributed(2)
def test_a_rank_that_does_not_step_is_given_up(world_size):
    """A rank that stops stepping is given up: its communicator is aborted, and layers go on with the old map."""
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=2), device=device, deadline_s=30.0) as context:
        config = MoEConfig(hidden_size=1024, intermediate_size=1024, num_experts=10, top_k=3)
        layers = make_layers(context, 1, config=config, make=_random, all2all="allgather", experts="reference")
        before = layers[0].placement.expert_map
        balancer = ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 20, deadline_s=4.0))
        balancer.move_to([random_map(2, before.slots_per_rank, 3)])
        for _ in range(200):
            if gather_from_all_ranks(balancer.state) == [State.MOVING, State.MOVING]:
                break
            balancer.step()
        if rank == 0:
            with pytest.raises((PeerTimeout, RebalanceError), match="was rolled back, and the balancer is off"):
                balancer.settle()
        barrier(device)
        if rank == 1:
            with pytest.raises((PeerTimeout, RebalanceError), match="was rolled back, and the balancer is off"):
                balancer.settle()
        assert layers[0].placement.expert_map == before
        assert_slots(layers[0], _random)
        layers[0](torch.randn(8, 1024, device=device))
        torch.cuda.synchronize(device)


def _random(config: MoEConfig, expert: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + expert)
    shapes = {"w13": (2 * config.intermediate_size, config.hidden_size), "w2": (config.hidden_size, 1024)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
