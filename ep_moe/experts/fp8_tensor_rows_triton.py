"""The Triton forms of `fp8_tensor_rows`."""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.experts.fp8_scales import TensorScales

_BLOCK, _WIDE_BLOCK = 1024, 4096  # numbers of a program; the latter from so many programs on that all are busy
_FP8_MAX, _FP8_NAN = tl.constexpr(448.0), tl.constexpr(127)


def round_by(x: Tensor, input_scale: float, out: Tensor) -> None:
    if x.numel():
        wide = x.numel() >= 1 << 21
        block = _WIDE_BLOCK if wide else _BLOCK
        warps = 8 if wide else 4
        _round_by[(triton.cdiv(x.numel(), block),)](x, input_scale, out, x.numel(), BLOCK=block, num_warps=warps)


def fill_scales(input_scale: float, w13: Tensor, w2: Tensor, second: Tensor, scales: TensorScales) -> None:
    _fill_scales[(1,)](
        input_scale, w13, w2, second, scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale, len(w13),
        SLOTS=triton.next_power_of_2(len(w13)),
    )  # fmt: skip


@triton.jit
def _round_by(x, input_scale, out, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.div_rn(tl.load(x + at, mask=at < numbers, other=0.0).to(tl.float32), input_scale)
    rounded = tl.minimum(tl.maximum(value, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)  # minima leave NaN out
    bits = tl.where(value != value, _FP8_NAN, rounded.to(tl.uint8, bitcast=True))
    tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + at, bits.to(tl.uint8), mask=at < numbers)


@triton.jit
def _fill_scales(
    input_scale, w13, w2, second, alpha1, quant2, alpha2, out_scale, slots, SLOTS: tl.constexpr
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    inside = slot < slots
    inner = tl.load(second + slot, mask=inside, other=1.0)
    tl.store(alpha1 + slot, tl.load(w13 + slot, mask=inside, other=0.0) * input_scale, mask=inside)
    tl.store(quant2 + slot, tl.div_rn(1.0, inner), mask=inside)
    tl.store(alpha2 + slot, tl.load(w2 + slot, mask=inside, other=0.0) * inner, mask=inside)
    tl.store(out_scale, input_scale)
