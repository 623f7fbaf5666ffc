"""The Triton forms of `fp8_scales`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.experts.flashinfer.tensor_scales import Inputs, TensorScales
from ep_moe.runtime.grids import cdiv, next_power_of_2

_BLOCK = 1024
_FP8_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(1e-12)


def round_rows(x: Tensor, w13: Tensor, w2: Tensor, inputs: Inputs, out: Tensor, scales: TensorScales) -> None:
    rows, hidden = x.shape
    slots = len(w13)
    _round_rows[(rows, cdiv(hidden, _BLOCK))](
        x, w13, w2, inputs.first, inputs.second, inputs.cap, out,
        scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale,
        hidden, x.stride(0), slots,
        DYNAMIC=inputs.dynamic, SLOTS=next_power_of_2(slots), BLOCK=_BLOCK,
    )  # fmt: skip


def column_scales(inputs: Inputs, act1: Tensor, act2: Tensor, alpha1: Tensor, alpha2: Tensor) -> None:
    slots = len(alpha1)
    _column_scales[(2,)](
        inputs.first, inputs.second, inputs.cap, act1, act2, alpha1, alpha2, len(act1), len(act2), slots,
        DYNAMIC=inputs.dynamic, HALF=act1.dtype == torch.float16, SLOTS=next_power_of_2(slots), BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _first_scale(first, slot, slots, DYNAMIC: tl.constexpr):
    if DYNAMIC:
        scale = tl.maximum(tl.div_rn(tl.load(first), _FP8_MAX), _TINY)
    else:
        scale = tl.max(tl.load(first + slot, mask=slot < slots, other=0.0))
    return scale


@triton.jit
def _second_scale(first, second, cap, slot, slots, DYNAMIC: tl.constexpr):
    scale = tl.load(second + slot, mask=slot < slots, other=0.0)
    if DYNAMIC:
        scale = scale * (tl.load(first + 1) + 1.0)
        scale = tl.where(cap > 0, tl.minimum(scale, cap), scale)
        scale = tl.maximum(tl.div_rn(scale, _FP8_MAX), _TINY)
    return scale


@triton.jit
def _round_rows(
    x, w13, w2, first, second, cap, out, alpha1, quant2, alpha2, input_scale, hidden, row_stride, slots,
    DYNAMIC: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    scale = _first_scale(first, slot, slots, DYNAMIC)
    value = tl.div_rn(tl.load(x + row * row_stride + at, mask=at < hidden, other=0.0).to(tl.float32), scale)
    value = tl.minimum(tl.maximum(value, -_FP8_MAX), _FP8_MAX)
    tl.store(out + row * hidden + at, value.to(tl.float8e4nv), mask=at < hidden)
    if tl.program_id(0) + tl.program_id(1) == 0:
        inside = slot < slots
        inner = _second_scale(first, second, cap, slot, slots, DYNAMIC)
        tl.store(alpha1 + slot, tl.load(w13 + slot, mask=inside, other=0.0) * scale, mask=inside)
        tl.store(quant2 + slot, tl.div_rn(1.0, inner), mask=inside)
        tl.store(alpha2 + slot, tl.load(w2 + slot, mask=inside, other=0.0) * inner, mask=inside)
        tl.store(input_scale, scale)


@triton.jit
def _column_scales(
    first, second, cap, act1, act2, alpha1, alpha2, hidden, inner, slots,
    DYNAMIC: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    if tl.program_id(0) == 0:
        _fill(_first_scale(first, slot, slots, DYNAMIC), act1, alpha1, hidden, slot, slots, HALF, BLOCK)
    else:
        scale = tl.max(_second_scale(first, second, cap, slot, slots, DYNAMIC))
        _fill(scale, act2, alpha2, inner, slot, slots, HALF, BLOCK)


@triton.jit
def _fill(scale, act, alpha, columns, slot, slots, HALF: tl.constexpr, BLOCK: tl.constexpr):
    rounded = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    if HALF:
        rounded = tl.minimum(tl.maximum(rounded, 0.000030517578125), 16384.0)
    reciprocal = tl.div_rn(1.0, rounded)
    tl.store(alpha + slot, rounded + tl.zeros_like(slot).to(tl.float32), mask=slot < slots)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(act + at, (reciprocal + tl.zeros_like(at).to(tl.float32)).to(act.dtype.element_ty), mask=at < columns)
