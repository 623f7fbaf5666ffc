"""Kernels compiled for Hopper without one. Those in Gluon: nothing else runs them on a machine without a GPU. Those
that sort pairs: Triton's interpreter, where they run, takes what its compiler refuses."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ep_moe.experts import (
    fp8_block_hopper_triton,
    fp8_block_kernels,
    pair_kernels,
    pair_kernels_triton,
    stream_gemm,
    stream_gemm_triton,
)
from ep_moe.experts.fp8_tensor_kernels import NO_SCALES, MatrixScales
from ep_moe.nvrtc import SHARED

EXPERTS, HIDDEN, INNER, ROWS = 40, 2048, 768, 512
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Hopper:
    """A driver that knows no more than for whom to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


class Compiled:
    """A kernel that is compiled where it would be launched."""

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
    """Rows, both weights, activations and results, of a product and the one behind it; scales of both."""
    one = torch.ones(EXPERTS)
    scales = (MatrixScales(0.5, one, one), MatrixScales(one, one)) if dtype == FP8 else (None, None)
    shapes = (ROWS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (ROWS, INNER), (EXPERTS, HIDDEN, INNER)
    return *(torch.empty(shape, dtype=dtype) for shape in shapes), torch.empty(ROWS, HIDDEN, dtype=BF16), *scales


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("rows", [1, 11, 23])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_streamed_products_fit(activation, rows, dtype):
    x, w13, act, w2, y, *scales = operands(dtype)
    first, second = (NO_SCALES if own is None else own.given() for own in scales)
    ring, ends = stream_gemm.ring_for(rows, stream_gemm.FEW), torch.zeros(EXPERTS, dtype=torch.int32)
    w13 = w13 if activation == "swiglu" else w13[:, :INNER].contiguous()
    compiled = Compiled(stream_gemm_triton._stream)
    early = {"EARLY": True, "launch_pdl": True}
    with (
        mock.patch.object(stream_gemm_triton, "_stream", compiled),
        mock.patch.object(stream_gemm_triton, "early", return_value=early),
    ):
        stream_gemm_triton.launch(x, ends, w13, ends, act, ring, 132, activation, 0.0, 0.0, first)
        stream_gemm_triton.launch(act, None, w2, ends, y, ring, 132, "", 0.0, 0.0, second)
    assert len(compiled.shared) == 2
    assert max(compiled.shared) <= SHARED


@pytest.mark.parametrize("rows", [40, 90, 1000])
def test_products_with_a_scale_for_each_block_fit(rows):
    x, w13, act, w2, y, *_ = operands(FP8)
    of_x, of_w13 = torch.ones(ROWS, HIDDEN // 128), torch.ones(EXPERTS, 2 * INNER // 128, HIDDEN // 128)
    of_act, of_w2 = torch.ones(ROWS, INNER // 128), torch.ones(EXPERTS, HIDDEN // 128, INNER // 128)
    ends, compiled = torch.zeros(EXPERTS, dtype=torch.int32), Compiled(fp8_block_hopper_triton._gemm)

    def config(w, activated):
        return fp8_block_kernels.config_for(rows * EXPERTS, *w.shape, hopper=True, activated=activated)

    with mock.patch.object(fp8_block_hopper_triton, "_gemm", compiled):
        fp8_block_kernels.grouped_gemm_activate(x, of_x, w13, of_w13, ends, act, of_act, config=config(w13, True))
        fp8_block_kernels.grouped_gemm(act, of_act, w2, of_w2, ends, y, config=config(w2, False))
    assert len(compiled.shared) == 2
    assert max(compiled.shared) <= SHARED


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pairs", [8, 4096, 4104], ids=["few", "as many as go in one launch", "more"])
def test_sorting_pairs_compiles(pairs, weighted, ids_dtype):
    ids, (source, slots) = torch.zeros(pairs // 8, 8, dtype=ids_dtype), torch.zeros(2, pairs, dtype=torch.int32)
    weights = torch.ones(ids.shape) if weighted else None
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    space = torch.zeros(pair_kernels.group_workspace(pairs, EXPERTS), dtype=torch.int32)
    names = ("count_pairs", "sum_counts", "place_pairs")
    kernels = {name: Compiled(getattr(pair_kernels_triton, name)) for name in names}
    with mock.patch.multiple(pair_kernels_triton, **kernels):
        pair_kernels.group_pairs(ids, EXPERTS, source, slots.view(ids.shape), ends, space, base=3, weights=weights)
    assert [len(kernel.shared) for kernel in kernels.values()] == [int(pairs > 4096), int(pairs > 4096), 1]
