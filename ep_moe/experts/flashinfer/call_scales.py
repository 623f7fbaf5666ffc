"""Compute per-tensor fp8 scales of one call of `cutlass_op`, and round rows by them.

The torch code defines the results and runs on CPU. On GPUs, Triton kernels do each function in one launch. They
allocate nothing and never wait.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8_MAX, to_fp8
from ep_moe.quant.microscale import power_of_two_above
from ep_moe.runtime.launch_cache import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton

TINY = 1e-12  # the scale if all rows are zero


@dataclass(frozen=True)
class Inputs:
    """The source of the scales of both products' inputs.

    Static: `first` and `second` are the checkpoint's input scales, float32 [L] each. The first product uses the largest
    of `first`.

    Dynamic: `first` has the rows' extremes, float32 [2] (`row_extremes`). `second` is `w13_bound`, float32 [L]: an
    activation is at most this bound times (largest squared length of a row + 1). `activation_bound` is an absolute
    bound of activations, 0 for none.
    """

    first: Tensor
    second: Tensor
    dynamic: bool
    activation_bound: float = 0.0

    def scales(self) -> tuple[Tensor, Tensor]:
        """Return the scales of both inputs, float32 scalar and float32 [L]. A value is fp8 * scale."""
        if not self.dynamic:
            return self.first.amax(0), self.second
        largest, square = self.first
        bound = self.second * (square + 1)
        if self.activation_bound > 0:
            bound = bound.clamp(max=self.activation_bound)
        return (largest / FP8_MAX).clamp(min=TINY), (bound / FP8_MAX).clamp(min=TINY)


@dataclass(frozen=True)
class TensorScales:
    """The argument `quant_scales` of `cutlass_fused_moe` for fp8 weights and rows, which `round_rows` fills."""

    alpha1: Tensor  # float32 [L]: scale of w13 times scale of the rows
    quant2: Tensor  # float32 [L]: 1 / scale of the second product's input
    alpha2: Tensor  # float32 [L]: scale of w2 times scale of the second product's input
    input_scale: Tensor  # float32 scalar: scale of the rows


def round_rows(x: Tensor, w13: Tensor, w2: Tensor, inputs: Inputs, out: Tensor, scales: TensorScales) -> None:
    """Write x / scale to out in E4M3, saturating, and fill all of `scales`.

    x: [N, H]; w13, w2: float32 [L], scales of the weights; out: float8_e4m3fn [N, H]
    """
    if x.is_cuda:
        launch_round_rows(x, w13, w2, inputs, out, scales)
        return
    first, second = inputs.scales()
    out.copy_(to_fp8(x, first))
    scales.alpha1.copy_(w13 * first)
    scales.quant2.copy_(1 / second)
    scales.alpha2.copy_(w2 * second)
    scales.input_scale.copy_(first)


def column_scales(inputs: Inputs, act1: Tensor, act2: Tensor, alpha1: Tensor, alpha2: Tensor) -> None:
    """Fill the activation scales of a call with INT4 weights.

    The kernel multiplies rows by `act` in bf16 or fp16, and sums by `alpha` in float32. Scales are rounded up to powers
    of two, so that both factors cancel exactly.

    act1: [H]; act2: [I]; alpha1, alpha2: float32 [L]
    """
    if act1.is_cuda:
        launch_column_scales(inputs, act1, act2, alpha1, alpha2)
        return
    first, second = inputs.scales()
    for scale, act, alpha in ((first, act1, alpha1), (second.amax(), act2, alpha2)):
        rounded = power_of_two_above(scale)
        if act.dtype == torch.float16:
            rounded = rounded.clamp(2.0**-15, 2.0**14)  # keeps the reciprocal a normal float16 number
        act.fill_(1 / rounded)
        alpha.fill_(rounded)


def fill_scales(input_scale: float, w13: Tensor, w2: Tensor, second: Tensor, scales: TensorScales) -> None:
    """Fill all of `scales`, as `round_rows` does, for rows that arrived rounded.

    input_scale: scale of the rows; w13, w2, second: float32 [L], scales of the weights and of the second product's
    input
    """
    if w13.is_cuda:
        launch_fill_scales(input_scale, w13, w2, second, scales)
        return
    scales.alpha1.copy_(w13 * input_scale)
    scales.quant2.copy_(1 / second)
    scales.alpha2.copy_(w2 * second)
    scales.input_scale.fill_(input_scale)


# --- Triton ---------------------------------------------------------------------------------------------------------

_BLOCK = 1024
_E4M3_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(TINY)


def launch_round_rows(x: Tensor, w13: Tensor, w2: Tensor, inputs: Inputs, out: Tensor, scales: TensorScales) -> None:
    rows, hidden = x.shape
    slots = len(w13)
    _round_rows[(rows, cdiv(hidden, _BLOCK))](
        x, w13, w2, inputs.first, inputs.second, inputs.activation_bound, out,
        scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale,
        hidden, x.stride(0), slots,
        DYNAMIC=inputs.dynamic, SLOTS=next_power_of_2(slots), BLOCK=_BLOCK,
    )  # fmt: skip


def launch_column_scales(inputs: Inputs, act1: Tensor, act2: Tensor, alpha1: Tensor, alpha2: Tensor) -> None:
    slots = len(alpha1)
    _column_scales[(2,)](
        inputs.first, inputs.second, inputs.activation_bound, act1, act2, alpha1, alpha2, len(act1), len(act2), slots,
        DYNAMIC=inputs.dynamic, HALF=act1.dtype == torch.float16, SLOTS=next_power_of_2(slots), BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _first_scale(first, slot, slots, DYNAMIC: tl.constexpr):
    if DYNAMIC:
        scale = tl.maximum(tl.div_rn(tl.load(first), _E4M3_MAX), _TINY)
    else:
        scale = tl.max(tl.load(first + slot, mask=slot < slots, other=0.0))
    return scale


@triton.jit
def _second_scale(first, second, activation_bound, slot, slots, DYNAMIC: tl.constexpr):
    scale = tl.load(second + slot, mask=slot < slots, other=0.0)
    if DYNAMIC:
        scale = scale * (tl.load(first + 1) + 1.0)
        scale = tl.where(activation_bound > 0, tl.minimum(scale, activation_bound), scale)
        scale = tl.maximum(tl.div_rn(scale, _E4M3_MAX), _TINY)
    return scale


@triton.jit
def _round_rows(
    x, w13, w2, first, second, activation_bound, out, alpha1, quant2, alpha2, input_scale, hidden, row_stride, slots,
    DYNAMIC: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    scale = _first_scale(first, slot, slots, DYNAMIC)
    value = tl.div_rn(tl.load(x + row * row_stride + at, mask=at < hidden, other=0.0).to(tl.float32), scale)
    value = tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX)
    tl.store(out + row * hidden + at, value.to(tl.float8e4nv), mask=at < hidden)
    if tl.program_id(0) + tl.program_id(1) == 0:
        inside = slot < slots
        inner = _second_scale(first, second, activation_bound, slot, slots, DYNAMIC)
        tl.store(alpha1 + slot, tl.load(w13 + slot, mask=inside, other=0.0) * scale, mask=inside)
        tl.store(quant2 + slot, tl.div_rn(1.0, inner), mask=inside)
        tl.store(alpha2 + slot, tl.load(w2 + slot, mask=inside, other=0.0) * inner, mask=inside)
        tl.store(input_scale, scale)


@triton.jit
def _column_scales(
    first, second, activation_bound, act1, act2, alpha1, alpha2, hidden, inner, slots,
    DYNAMIC: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    if tl.program_id(0) == 0:
        _fill(_first_scale(first, slot, slots, DYNAMIC), act1, alpha1, hidden, slot, slots, HALF, BLOCK)
    else:
        scale = tl.max(_second_scale(first, second, activation_bound, slot, slots, DYNAMIC))
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


def launch_fill_scales(input_scale: float, w13: Tensor, w2: Tensor, second: Tensor, scales: TensorScales) -> None:
    _fill_scales[(1,)](
        input_scale, w13, w2, second, scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale, len(w13),
        SLOTS=next_power_of_2(len(w13)),
    )  # fmt: skip


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


# --- steps on received rows -------------------------------------------------------------------------------------------
# Ids that a kernel accepts, and extremes of rows. In torch on CPU, in Triton on GPUs.


def clean_ids(
    ids: Tensor, weights: Tensor | None, base: int, num_slots: int, out_ids: Tensor, out_weights: Tensor | None
) -> None:
    """Convert ids to local ids that kernels accept: int32, distinct within a row, -1 for routes without a local expert.

    Routes of weight 0 also become -1. The first of several equal ids gets the sum of their weights.

    ids: int [N, K], local ids plus `base`; weights: float32 [N, K] or None; out_ids: int32 [N, K]; out_weights: float32
    [N, K], None if weights is None; all contiguous
    """
    if ids.is_cuda:
        launch_clean_ids(ids, weights, base, num_slots, out_ids, out_weights)
        return
    ids = ids - base
    valid = (ids >= 0) & (ids < num_slots)
    if weights is not None:
        valid = valid & (weights != 0)
    top_k = ids.shape[1]
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)  # [N, K, K]
    repeated = (same & ids.new_ones(top_k, top_k, dtype=torch.bool).tril(-1)).any(2)
    out_ids.copy_(torch.where(valid & ~repeated, ids, -1))
    if weights is not None and out_weights is not None:
        merged = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
        out_weights.copy_(torch.where(out_ids >= 0, merged, 0.0))


def row_extremes(x: Tensor, ids: Tensor, out: Tensor) -> None:
    """Raise `out` to the largest magnitude and the largest squared length of rows with a local expert.

    Rows without a local expert may be uninitialized.

    x: [N, H]; ids: int32 [N, K], -1 for none; out: float32 [2], zero before the first call
    """
    if x.is_cuda:
        launch_row_extremes(x, ids, out)
        return
    rows = torch.where((ids >= 0).any(1, keepdim=True), x.float(), 0.0)
    torch.maximum(out, torch.stack([rows.abs().max(), rows.square().sum(1).max()]), out=out)


# --- Triton ---------------------------------------------------------------------------------------------------------


def launch_clean_ids(
    ids: Tensor, weights: Tensor | None, base: int, num_slots: int, out_ids: Tensor, out_weights: Tensor | None
) -> None:
    rows, top_k = ids.shape
    width = next_power_of_2(top_k)
    block = max(1, 2048 // width**2)  # pairs of columns that a program compares at once
    _clean_ids[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, base, num_slots,
        TOP_K=top_k, WIDTH=width, BLOCK=block, WEIGHTED=weights is not None,
    )  # fmt: skip


@triton.jit
def _clean_ids(
    ids, weights, out_ids, out_weights, rows, base, num_slots,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < TOP_K)[None, :]
    at = row.to(tl.int64)[:, None] * TOP_K + column[None, :]
    id = tl.load(ids + at, mask=inside, other=-1) - base  # noqa: A001
    valid = inside & (id >= 0) & (id < num_slots)
    if WEIGHTED:
        weight = tl.load(weights + at, mask=inside, other=0.0)
        valid = valid & (weight != 0.0)
    same = (id[:, :, None] == id[:, None, :]) & valid[:, None, :]
    earlier = column[None, None, :] < column[None, :, None]
    repeated = tl.max((same & earlier).to(tl.int32), axis=2) > 0
    keep = valid & (repeated == 0)
    tl.store(out_ids + at, tl.where(keep, id, -1), mask=inside)
    if WEIGHTED:
        merged = tl.sum(tl.where(same, weight[:, None, :], 0.0), axis=2)
        tl.store(out_weights + at, tl.where(keep, merged, 0.0), mask=inside)


def launch_row_extremes(x: Tensor, ids: Tensor, out: Tensor) -> None:
    rows, hidden = x.shape
    top_k = ids.shape[1]
    _row_extremes[(rows,)](x, ids, out, hidden, x.stride(0), top_k, BLOCK=_BLOCK, IDS=next_power_of_2(top_k))


@triton.jit
def _row_extremes(x, ids, out, hidden, row_stride, top_k, BLOCK: tl.constexpr, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, IDS)
    mine = tl.max(tl.load(ids + row * top_k + column, mask=column < top_k, other=-1))
    if mine >= 0:
        largest = 0.0
        square = 0.0
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * row_stride + at, mask=at < hidden, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value)))
            square += tl.sum(value * value)
        # a maximum does not depend on the order of atomics, so equal calls give equal bits; both numbers are >= 0
        tl.atomic_max(out, largest)
        tl.atomic_max(out + 1, square)
