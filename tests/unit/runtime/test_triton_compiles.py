"""Compile kernels for Hopper without a GPU.

Gluon kernels run nowhere else without one. Whole expert steps are compiled too, because Triton's interpreter, in which
their other tests run, accepts what its compiler refuses.
"""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing", allow_module_level=True)

from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ep_moe import ExpertMap, MoEConfig, RoutingConfig, RoutingMethod, Wire
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.hopper import (
    fused_4bit,
    gemm_fp8_block,
    gemm_fp8_block_gluon,
    gemm_grouped,
    gemm_grouped_4bit,
    gemm_skinny_4bit,
    gemm_streaming,
)
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.experts_4bit import W4A8TritonExperts, W4A16TritonExperts
from ep_moe.experts.hopper.experts_fp8 import (
    Fp8BlockTritonExperts,
    Fp8ChannelTritonExperts,
    Fp8DynamicTritonExperts,
    Fp8TensorTritonExperts,
)
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.kernels import BlockScales, MatrixScales, RowScales
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.router import kernels
from ep_moe.runtime import devices
from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.runtime.nvrtc import SHARED
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import Activation, LocalIds, PeerRows, Received, Routing, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.triton_compiles import Hopper

EXPERTS, HIDDEN, INNER, ROWS = 40, 2048, 768, 512
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SMALL, CPU = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=4), torch.device("cpu")


class Compiled:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel):
        self.kernel, self.shared = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.shared.append(self.kernel.warmup(*args, grid=grid, **options).metadata.shared)

        return launch


@pytest.fixture(autouse=True)
def hopper():
    with mock.patch.object(driver, "_active", Hopper()):
        yield


def operands(dtype: torch.dtype):
    """Return rows, both weights, activations and results of two consecutive products, and the scales of both."""
    one = torch.ones(EXPERTS)
    scales = (MatrixScales(0.5, one, one), MatrixScales(one, one)) if dtype == FP8 else (None, None)
    shapes = (ROWS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (ROWS, INNER), (EXPERTS, HIDDEN, INNER)
    return *(torch.empty(shape, dtype=dtype) for shape in shapes), torch.empty(ROWS, HIDDEN, dtype=BF16), *scales


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "e4m3 by row", "e4m3 by row and channel", "e4m3 by block"])
@pytest.mark.parametrize("rows", [1, 11, 23])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_streamed_products_fit(activation, rows, kind, biased):
    x, w13, act, w2, y, *scales = operands(BF16 if kind == "bf16" else FP8)
    to = act
    if kind == "e4m3 by block":
        blocks = [torch.ones(w.shape[0], w.shape[1] // 128, w.shape[2] // 128) for w in (w13, w2)]
        scales = [
            BlockScales(torch.ones(ROWS, w.shape[2] // 128), own) for w, own in zip((w13, w2), blocks, strict=True)
        ]
        to = act.bfloat16()
    if kind.startswith("e4m3 by row"):
        of_weights = [torch.ones(EXPERTS, 2, 3)[:, 0, 0]] * 2
        if kind.endswith("channel"):
            of_weights = [torch.ones(w.shape[:2]) for w in (w13 if activation == "swiglu" else w13[:, :INNER], w2)]
        scales, to = [RowScales(torch.ones(ROWS), own) for own in of_weights], act.bfloat16()
    first, second = scales
    ring, ends = gemm_streaming.ring_for(rows, w13), torch.zeros(EXPERTS, dtype=torch.int32)
    lists = Lists(ends, ends, ends)
    w13 = w13 if activation == "swiglu" else w13[:, :INNER].contiguous()
    of_first, of_second = (torch.zeros(w.shape[:2], dtype=BF16) if biased else None for w in (w13, w2))
    compiled = Compiled(gemm_streaming.stream)
    early = {"PDL": True, "launch_pdl": True}
    with (
        mock.patch.object(gemm_streaming, "stream", compiled),
        mock.patch.object(gemm_streaming, "pdl_launch", return_value=early),
        mock.patch.object(gemm_streaming, "multiprocessors", return_value=132),
    ):
        between = {"gather": True, "activation": Activation(activation), "scales": first, "bias": of_first}
        gemm_streaming.product(x, w13, lists, to, ring, **between)
        gemm_streaming.product(act, w2, lists, y, ring, scales=second, bias=of_second)
    assert len(compiled.shared) == 2
    assert max(compiled.shared) <= SHARED


@pytest.mark.parametrize("rows", [40, 90, 1000])
def test_products_with_a_scale_for_each_block_fit(rows):
    x, w13, act, w2, y, *_ = operands(FP8)
    of_x, of_w13 = torch.ones(ROWS, HIDDEN // 128), torch.ones(EXPERTS, 2 * INNER // 128, HIDDEN // 128)
    of_act, of_w2 = torch.ones(ROWS, INNER // 128), torch.ones(EXPERTS, HIDDEN // 128, INNER // 128)
    ends, compiled = torch.zeros(EXPERTS, dtype=torch.int32), Compiled(gemm_fp8_block_gluon._gemm)

    def config(w, activated):
        return gemm_fp8_block.config_for(rows * EXPERTS, *w.shape[:2], hopper=True, activated=activated)

    with mock.patch.object(gemm_fp8_block_gluon, "_gemm", compiled):
        gemm_fp8_block.grouped_gemm_activate(x, of_x, w13, of_w13, ends, act, of_act, config=config(w13, True))
        gemm_fp8_block.grouped_gemm(act, of_act, w2, of_w2, ends, y, config=config(w2, False))
    assert len(compiled.shared) == 2
    assert max(compiled.shared) <= SHARED


def built(kind: type[Experts], scheme: str, config: MoEConfig) -> Experts:
    weights = ExpertWeights(
        config,
        ExpertMap.uneven([4, 4]),
        device=CPU,
        dtype=BF16,
        scheme=SCHEMES[scheme],
        weight_layout=kind.weight_layout,
        trainable=False,
    )
    return kind(config, weights, Workspaces(CPU), ExpertsOptions())


@pytest.mark.parametrize("answers", [None, BF16, FP8], ids=["kept", "to peers", "to peers in E4M3"])
@pytest.mark.parametrize("rows", [2, 40, 200, 4000])
@pytest.mark.parametrize(("kind", "scheme", "wire"), [
    (Bf16TritonExperts, "none", "plain"), (Fp8TensorTritonExperts, "fp8_static", "plain"),
    (Fp8BlockTritonExperts, "fp8_block", "plain"), (Fp8DynamicTritonExperts, "fp8_dynamic", "plain"),
    (Fp8DynamicTritonExperts, "fp8_dynamic", "fp8_row"), (Fp8ChannelTritonExperts, "fp8_channel", "plain"),
    (Fp8ChannelTritonExperts, "fp8_channel", "fp8_row"), (W4A16TritonExperts, "mxfp4", "plain"),
    (W4A16TritonExperts, "nvfp4a16", "plain"), (W4A16TritonExperts, "int4", "plain"),
    (W4A16TritonExperts, "mxint4", "plain"), (W4A8TritonExperts, "mxfp4_fp8", "plain"),
    (W4A8TritonExperts, "int4_fp8", "fp8_row"), (W4A8TritonExperts, "mxint4_fp8", "plain"),
])  # fmt: skip
def test_whole_steps_compile(kind, scheme, wire, rows, answers):
    """Whole expert steps compile for Hopper, with biases where the kernel takes them.

    Kernels that NVRTC compiles are replaced.
    """
    config = dataclasses.replace(SMALL, expert_bias=kind.capabilities.biases)
    ids = torch.zeros(rows, SMALL.top_k, dtype=torch.int64)
    x, x_scale = quantize_for_wire(torch.zeros(rows, SMALL.hidden_size, dtype=BF16), Wire(dispatch=wire))
    received = Received(
        x=x,
        x_scale=x_scale,
        format=wire,
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(ids),
        weights=torch.ones(ids.shape),
    )
    out: Tensor | PeerRows = torch.empty_like(x, dtype=BF16)
    if answers is not None:
        blocks = tuple(torch.empty(2, rows // 2, SMALL.hidden_size, dtype=answers))
        out = PeerRows(blocks, torch.tensor([block.data_ptr() for block in blocks]), 0, 0)
    names, run = [], JITFunction.run

    def compiled(self, *args, warmup, **options):
        names.append(self.fn.__name__)
        return run(self, *args, warmup=True, **options)

    with (
        mock.patch.object(JITFunction, "run", compiled),
        mock.patch.object(CompiledKernel, "__getitem__", return_value=mock.Mock()),  # the launch of kernels that wait
        mock.patch.object(devices, "supports_pdl", return_value=True),
        mock.patch.object(gemm_grouped, "grouped_gemm") as products,
        mock.patch.object(gemm_grouped_4bit, "product", products),
        mock.patch.object(fused_4bit, "MOST_ROUTES", 0),
        mock.patch.object(gemm_skinny_4bit, "product", products),
        mock.patch.object(gemm_grouped_4bit, "programs", return_value=132),
    ):
        built(kind, scheme, config)(received, out)
    assert names[-1] == "_reduce"
    plain = kind in (Bf16TritonExperts, W4A16TritonExperts)
    rounds = not plain and (wire == "plain" or rows > 200)  # or copies, if rows are sorted
    assert len(names) + products.call_count >= 3 + rounds, "rounding, two products, sums"


@pytest.mark.parametrize("method", ["softmax_topk", "topk_softmax", "topk_sigmoid", "sigmoid_topk"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "float32"])
def test_routers(method, dtype, monkeypatch):
    grouped = method == "sigmoid_topk"
    routing = RoutingConfig(
        method=RoutingMethod(method), correction_bias=grouped, num_groups=8 if grouped else 1,
        top_groups=4 if grouped else 1, float32_logits=dtype == torch.float32, bias=not grouped,
    )  # fmt: skip
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=128, top_k=8, routing=routing)
    made = [Compiled(kernels._partial_logits), Compiled(kernels._choose)]
    of_router = kernels.RouterKernels(config)
    x, weight = torch.empty(3, HIDDEN, dtype=BF16), torch.empty(128, HIDDEN, dtype=dtype)
    bias, correction = (None, torch.empty(128)) if grouped else (torch.empty(128, dtype=dtype), None)
    chosen = Routing(torch.empty(20, 8, dtype=torch.int64), torch.empty(20, 8))
    monkeypatch.setattr(kernels, "_partial_logits", made[0])
    monkeypatch.setattr(kernels, "_choose", made[1])
    of_router.launch_fixed(x, weight, bias, correction, of_router.parts(20, CPU), chosen, launch_directly)
    assert [len(kernel.shared) for kernel in made] == [1, 1]
