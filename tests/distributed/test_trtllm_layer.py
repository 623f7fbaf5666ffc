"""Whole layers on `flashinfer_trtllm` under any map, with and without etp, and on its monolithic kernel over etp.

On the CPU. FlashInfer's entry points are emulated from the tensors that they would be given. Results are compared with
float64 on the dequantized weights.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.flashinfer.trtllm import FlashInferTrtllmExperts
from ep_moe.experts.fused.flashinfer_trtllm import FlashInferTrtllmMonolithic
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import Activation
from ep_moe.weights.initial import random_expert
from tests.emulations.trtllm import emulate
from tests.fixtures.helpers import integer_routing

EXPERTS, BF16 = 10, torch.bfloat16
SHAPES = {"nvfp4": (512, 256), "mxint4": (256, 512)}  # others: 256, 256
MAPS = {
    "uneven": lambda ranks: ExpertMap.uneven([EXPERTS - sum(range(ranks)), *range(1, ranks)]),
    "redundant": lambda ranks: ExpertMap.redundant(EXPERTS, ranks, 2 * ranks),
    "permuted": lambda ranks: ExpertMap.round_robin(EXPERTS, ranks),
    "one rank empty": lambda ranks: ExpertMap.uneven([0, EXPERTS, *[0] * (ranks - 2)]),
}


def on_the_cpu() -> None:
    """Replace FlashInfer's kernels by the emulation in a rank's process."""
    for kind in (FlashInferTrtllmExperts, FlashInferTrtllmMonolithic):
        kind.capabilities = dataclasses.replace(
            kind.capabilities, devices=frozenset({"cpu"}), min_compute_capability=None, max_compute_capability=None
        )
        kind.available = classmethod(lambda cls: None)
    trtllm_op.call = emulate


def shape(scheme: str) -> MoEConfig:
    hidden, inner = SHAPES.get(scheme, (256, 256))
    clamped = scheme in ("none", "mxfp4_mxfp8")
    return MoEConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=EXPERTS,
        top_k=3,
        activation=Activation.SWIGLU_CLAMPED if clamped else Activation.SWIGLU,
        activation_limit=1.0,
        expert_bias=scheme in trtllm_op.FP4,
    )


def largest_errors(scheme: str, etp: int, maps: list[str], plant=None) -> dict[str, float]:
    """Return this rank's largest error as a multiple of what rounding may cause, by map."""
    on_the_cpu()
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), shape(scheme)
    tokens = (33, 0, 7, 20)[rank]
    tensors = [random_expert(config, SCHEMES[scheme], expert, BF16) for expert in range(EXPERTS)]
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(rank)).to(BF16)
    routing = integer_routing(tokens, config, rank)  # some are -1
    expected, limit = expected_and_limit(config, SCHEMES[scheme], tensors, x, routing.ids, routing.weights, BF16)
    # up to 4 ranks' partial sums are added in bf16; each addition rounds by at most a rank's `limit`
    limit = (1 + ranks) * limit
    found = {}
    parallel = ParallelConfig(dp=ranks, ep=ranks // etp, etp=etp)
    with EPContext.from_groups(parallel, device=rank_device()) as context:
        for name in maps:
            layer = MoELayer(
                config,
                context,
                expert_map=MAPS[name](context.layout.ep),
                quantization=scheme,
                dtype=BF16,
                experts="flashinfer_trtllm",
            )
            layer._checks.first_call(layer)  # before the fault is planted, which this check would find
            for expert in range(EXPERTS):
                layer.update_expert(expert, **tensors[expert])
            if plant is not None:
                plant(layer.expert_weights)
            with torch.no_grad():
                found[name] = max_error_ratio(layer.forward_routed(x, routing), expected, limit)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="over an emulation, on the CPU")
@distributed(4)
@pytest.mark.parametrize(
    ("scheme", "etp"),
    [
        ("none", 1), ("fp8_static", 1), ("fp8_block", 2), ("mxfp8", 1), ("nvfp4", 1), ("nvfp4", 2), ("mxfp4_mxfp8", 2),
        ("mxint4", 2),
    ],
)  # fmt: skip
def test_within_the_bound_under_any_map(scheme, etp, world_size):
    maps = list(MAPS) if scheme in ("none", "nvfp4") else ["redundant"]
    for name, ratio in largest_errors(scheme, etp, maps).items():
        assert ratio <= 1, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="over an emulation, on the CPU")
@distributed(4)
def test_a_global_scale_of_the_slot_next_to_it_is_seen(world_size):
    def plant(weights) -> None:
        scale = weights.get_parameter("w13_global_scale").data
        scale.copy_(scale.roll(1, 0))

    (ratio,) = largest_errors("nvfp4", 1, ["redundant"], plant).values()
    assert ratio > 1 or dist.get_rank() == 1  # rank 1 has no tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="over an emulation, on the CPU")
@distributed(2)
def test_monolithic_over_an_etp_group(world_size):
    """Over etp, each rank routes all tokens of the group and holds a piece of every expert.

    One rank adds the bias of w2.
    """
    on_the_cpu()
    rank = dist.get_rank()
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, renormalize=True, correction_bias=True)
    config = dataclasses.replace(shape("nvfp4"), num_experts=8, routing=routing)
    tensors = [random_expert(config, SCHEMES["nvfp4"], expert, BF16) for expert in range(8)]
    x = torch.randn((5, 3)[rank], config.hidden_size, generator=torch.Generator().manual_seed(rank)).to(BF16)
    parallel = ParallelConfig(dp=world_size, ep=1, etp=world_size)
    with EPContext.from_groups(parallel, device=rank_device()) as context:
        torch.manual_seed(0)  # the same router on both ranks
        layer = MoELayer(config, context, quantization="nvfp4", dtype=BF16, experts="flashinfer_trtllm_monolithic")
        for expert in range(8):
            layer.update_expert(expert, **tensors[expert])
        with torch.no_grad():
            chosen = layer.router(x)
            expected, limit = expected_and_limit(config, SCHEMES["nvfp4"], tensors, x, chosen.ids, chosen.weights, BF16)
            assert max_error_ratio(layer(x), expected, (1 + world_size) * limit) <= 1
