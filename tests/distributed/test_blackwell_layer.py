"""Layers over FlashInfer's Blackwell kernels on 4 ranks, with any placement and with etp, against float64.

The reference computes with the dequantized weights. On the CPU, emulations of the kernels compute from the bytes that
they are given.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Wire
from ep_moe.experts.flashinfer import cutedsl as cutedsl_op
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import Routing
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutedsl
from ep_moe.weights.layouts import cutlass as cutlass_layouts
from tests.fixtures.blackwell_layer import on_the_cpu
from tests.fixtures.helpers import integer_routing

EXPERTS, BF16 = 10, torch.bfloat16
CONFIG = MoEConfig(hidden_size=128, intermediate_size=256, num_experts=EXPERTS, top_k=3)
KERNELS = [
    ("flashinfer_cutlass", "nvfp4"),
    ("flashinfer_cutlass", "mxfp4_mxfp8"),
    ("flashinfer_cutlass", "mxfp8"),
    ("flashinfer_cutedsl", "nvfp4"),
]


def permuted(ranks: int) -> ExpertMap:
    order = [(7 * expert + 3) % EXPERTS for expert in range(EXPERTS)]
    return ExpertMap.from_ranks([order[rank::ranks] for rank in range(ranks)], num_experts=EXPERTS)


MAPS = {
    "uneven": lambda ranks: ExpertMap.uneven([EXPERTS - sum(range(ranks)), *range(1, ranks)]),
    "redundant": lambda ranks: ExpertMap.redundant(EXPERTS, ranks, 2 * ranks),
    "permuted": permuted,
    "one rank empty": lambda ranks: ExpertMap.uneven([0, EXPERTS, *[0] * (ranks - 2)]),
}


@functools.cache
def experts_of(scheme: str) -> list[dict[str, torch.Tensor]]:
    """Return random experts that share one set of input scales, so that the bound does not depend on the placement."""
    tensors = [random_expert(CONFIG, SCHEMES[scheme], expert, BF16) for expert in range(EXPERTS)]
    scales = {name: tensor for name, tensor in tensors[4].items() if name.endswith("_input_scale")}
    return [own | scales for own in tensors]


@functools.cache
def answered(scheme: str, tokens: int, rank: int) -> tuple[torch.Tensor, Routing, *tuple[torch.Tensor, ...]]:
    """Return a rank's rows, their routes, the expected result, its limit, and the sum of all routes' magnitudes.

    None of these depends on the expert map.
    """
    tensors = experts_of(scheme)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rank)).bfloat16()
    routing = integer_routing(tokens, CONFIG, rank)
    expected, limit = expected_and_limit(CONFIG, SCHEMES[scheme], tensors, x, routing.ids, routing.weights, BF16)
    size = sum(
        expected_and_limit(CONFIG, SCHEMES[scheme], tensors, x, ids, weights, BF16)[0].abs()
        for ids, weights in zip(routing.ids.split(1, 1), routing.weights.split(1, 1), strict=True)
    )
    return x, routing, expected, limit, size


def times_the_limit(
    kernel: str, scheme: str, layer_map: ExpertMap, context: EPContext, tokens: int, wire: Wire | None = None
) -> float:
    """Return the largest error on this rank as a multiple of what rounding may cause."""
    tensors, world = experts_of(scheme), dist.get_world_size()
    x, routing, expected, limit, size = answered(scheme, tokens, dist.get_rank())
    asked = {"experts": kernel, "quantization": scheme, "wire": wire, "dtype": BF16}
    layer = MoELayer(CONFIG, context, expert_map=layer_map, **asked)
    for expert in range(EXPERTS):
        layer.update_expert(expert, **tensors[expert])
    with torch.no_grad():
        y = layer.forward_routed(x, routing)
    # ranks' partial sums are added in bf16; each addition rounds a sum that is at most the sum of all magnitudes
    return max_error_ratio(y, expected, limit + world * torch.finfo(BF16).eps / 2 * (size + limit))


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(4)
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize(("kernel", "scheme"), KERNELS)
def test_within_the_bound_under_any_map(kernel, scheme, etp, world_size):
    on_the_cpu()
    assert (integer_routing(7, CONFIG, 2).ids == -1).any()
    parallel = ParallelConfig(dp=world_size, ep=world_size // etp, etp=etp)
    with EPContext.from_groups(parallel, device=torch.device("cpu")) as context:
        for name, make in MAPS.items():
            found = times_the_limit(kernel, scheme, make(context.layout.ep), context, (20, 0, 7, 33)[dist.get_rank()])
            assert found <= 1, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(4)
@pytest.mark.parametrize(("kernel", "scheme"), KERNELS)
def test_rows_rounded_before_the_wire_are_rounded_once(kernel, scheme, world_size):
    """Rows that travel in the kernel's own format meet the same bound as plain rows."""
    on_the_cpu()
    scale = experts_of(scheme)[0].get("w13_input_scale")
    wire = Wire(dispatch="mxfp8") if scale is None else Wire(dispatch="nvfp4", input_scale=float(scale))
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=torch.device("cpu")) as context:
        tokens = (20, 0, 7, 33)[dist.get_rank()]
        assert times_the_limit(kernel, scheme, permuted(world_size), context, tokens, wire) <= 1


def gate_first() -> None:
    cutlass_layouts.CutlassSm90._swapped = lambda self, tensors: dict(tensors)
    cutedsl.swap_halves = lambda tensor: tensor


def not_swizzled() -> None:
    cutlass_layouts.arrange = cutedsl.arrange = lambda scales, layout: scales.contiguous()


def wrong_interleave() -> None:
    cutedsl.GROUP = 32


def wrong_global_scale() -> None:
    """Double the alphas that the kernels multiply by: `alpha1` or, without a global scale, the ones that stand for
    it."""
    fill = cutlass_op._fill_scales

    def filled(scheme, stored, own, input_scale) -> None:
        fill(scheme, stored, own, input_scale)
        own["alpha1" if scheme == "nvfp4" else "ones"].mul_(2)

    cutlass_op._fill_scales = filled
    multiply = torch.mul
    cutedsl_op.torch = type("torch", (), {**vars(torch), "mul": lambda *a, out: multiply(*a, out=out).mul_(2)})


PLANTED = [(kernel, scheme, error) for kernel, scheme in KERNELS
           for error in ("gate_first", "not_swizzled", "wrong_global_scale", "wrong_interleave")
           if kernel == "flashinfer_cutedsl" or error != "wrong_interleave"]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(2)
@pytest.mark.parametrize(("kernel", "scheme", "error"), PLANTED)
def test_planted_errors_are_seen_by_every_rank(kernel, scheme, error, world_size):
    on_the_cpu()
    globals()[error]()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=torch.device("cpu")) as context:
        assert times_the_limit(kernel, scheme, permuted(world_size), context, 20) > 1
