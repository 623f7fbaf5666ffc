"""Rows in E4M3 where a kernel wants them, and the scales of products of such rows with matrices that have one scale
each: of rows one each, or one for all (`fp8_static`).

Nothing here allocates or waits for the device: the caller brings every output.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ep_moe.quant.fp8 import e4m3_blocks
from ep_moe.quant.row_format import SMALLEST
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.launch_cache import Launch, at_once
from ep_moe.runtime.pdl import pdl_launch, pdl_trigger, pdl_wait
from ep_moe.runtime.triton_compat import tl, triton

# on an H200
PROGRAMS = 16  # a multiprocessor
TILE = 4096  # values of a program at once, if that is a row


@dataclass(frozen=True)
class RowScales:
    """Of a product's operands in E4M3: value = number * scale. They are multiplied in after the sums, in float32.

    rows: float32 [M]; weights: float32 [L], of any stride
    """

    rows: Tensor
    weights: Tensor

    def given(self) -> tuple[Any, ...]:
        """As `MatrixScales.given`."""
        return 1.0, self.rows, 0, self.weights, None


def round_rows(
    x: Tensor, out: Tensor, scale: Tensor, *, x_scale: Tensor | None = None, slots: Tensor | None = None,
    counts: Tensor | None = None, soon: bool = False, launch: Launch = at_once,
) -> None:  # fmt: skip
    """scale = amax / 448 of a row, out = x / scale rounded to the nearest e4m3. An amax below 1e-10 counts as 1e-10.
    Values that are no number stay none.

    x: bf16 [N, H]; out: e4m3 [M, H]; scale: float32 [M]
    x_scale: float32 [N] or [N, 1], of rows that are e4m3 already: they and it are copied
    slots: int32 [N, K], the rows of the output that a row goes to, below 0 or at least M for none; the others are left
        as they are. None for row n to row n
    counts: int32 [1], on the device: only so many of the first rows are made. launch: how the kernel is launched
    soon: start before the kernel ahead has ended, and let the next one
    """
    rows, size = x.shape
    width = next_power_of_2(size)
    tall = max(1, TILE // width)
    launch(
        _round_rows, (min(cdiv(rows, tall), PROGRAMS * multiprocessors(x.device)),),
        x, x_scale, slots, counts, out, scale, rows, out.shape[0], size,
        SMALLEST=SMALLEST, TOP_K=1 if slots is None else slots.shape[1], ROWS=tall, WIDTH=width,
        num_warps=4 if width <= TILE else 8, **pdl_launch(x.device, soon),
    )  # fmt: skip


COLUMNS = 1024  # columns of a program


@dataclass(frozen=True)
class MatrixScales:
    """Of a product's operands in E4M3: value = number * scale. They are multiplied in after the sums, in float32.

    rows: a float or float32 [1] for all rows, or float32 [L], of each expert's; weights: float32 [L]
    out: float32 [L], of the product's rows where they are rounded to E4M3 too, saturating at 448
    """

    rows: Tensor | float
    weights: Tensor
    out: Tensor | None = None

    def given(self) -> tuple[Any, ...]:
        """To kernels: factor, tensor or None, step from one expert's to the next's; then weights, out."""
        if isinstance(self.rows, float):
            return self.rows, None, 0, self.weights, self.out
        return 1.0, self.rows, int(self.rows.numel() > 1), self.weights, self.out


NO_SCALES = (None, None, None, None, None)  # what kernels are given for operands in bf16


def round_rows_by_tensor(
    x: Tensor, input_scales: Tensor, out: Tensor, scale: Tensor, slots: Tensor | None = None, *,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """Each row of x once, as `call_scales.round_rows` rounds it: x / scale to the nearest E4M3, saturating at 448.

    x: bf16 [N, H]; input_scales: float32 [L], of which the largest is the scale; scale: float32 [1], where it is left
    slots: int32 [N, K], the rows of the output that a row goes to, below 0 or at least M for none; the others are left
        as they are. None for row n to row n
    out: e4m3 [M, H]; launch: how the kernel is launched
    """
    rows, size = x.shape
    block = min(COLUMNS, next_power_of_2(size))
    launch(
        _round_rows_by_tensor, (rows, cdiv(size, block)),
        x, input_scales, slots, out, scale, len(input_scales), out.shape[0], size,
        SLOTS=next_power_of_2(len(input_scales)), TOP_K=1 if slots is None else slots.shape[1], BLOCK=block,
    )  # fmt: skip


@triton.jit
def _round_rows(
    x, x_scale, slots, counts, out, scale, rows, rows_out, size,
    SMALLEST: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_trigger(PDL)
    pdl_wait(PDL)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < size
    if counts is not None:
        rows = tl.minimum(tl.load(counts), rows)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < rows
        used = there
        if slots is not None:
            used = row < 0
            for i in tl.static_range(TOP_K):
                slot = tl.load(slots + row.to(tl.int64) * TOP_K + i, mask=there, other=-1)
                used = used | ((slot >= 0) & (slot < rows_out))
        at = row.to(tl.int64)[:, None] * size + column
        number = tl.load(x + at, mask=inside & used[:, None], other=0.0)
        if x_scale is None:
            number, step = e4m3_blocks(number.to(tl.float32), SMALLEST)
        else:  # rounded before
            step = tl.load(x_scale + row, mask=used, other=0.0)
        if slots is None:
            tl.store(out + at, number, mask=inside & there[:, None])
            tl.store(scale + row, step, mask=there)
        else:
            for i in tl.static_range(TOP_K):
                slot = tl.load(slots + row.to(tl.int64) * TOP_K + i, mask=there, other=-1).to(tl.int64)
                kept = (slot >= 0) & (slot < rows_out)
                tl.store(out + slot[:, None] * size + column, number, mask=inside & kept[:, None])
                tl.store(scale + slot, step, mask=kept)


@triton.jit
def saturated(value):
    """Within E4M3's finite numbers; what is no number stays none."""
    value = tl.where(value > 448.0, 448.0, value)
    return tl.where(value < -448.0, -448.0, value)


@triton.jit
def _round_rows_by_tensor(
    x, input_scales, slots, out, scale_out, experts, rows_out, size,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    lane = tl.arange(0, SLOTS)
    scale = tl.max(tl.load(input_scales + lane, mask=lane < experts, other=0.0))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale_out, scale)
    used = n >= 0
    if slots is not None:
        used = n < 0
        for i in tl.static_range(TOP_K):
            slot = tl.load(slots + n * TOP_K + i)
            used = used | ((slot >= 0) & (slot < rows_out))
    value = tl.load(x + n * size + at, mask=inside & used, other=0.0).to(tl.float32)
    # exact division, so that rows rounded before they travelled have the same bits
    number = saturated(tl.div_rn(value, scale)).to(tl.float8e4nv)
    if slots is None:
        tl.store(out + n * size + at, number, mask=inside)
    else:
        for i in tl.static_range(TOP_K):
            slot = tl.load(slots + n * TOP_K + i).to(tl.int64)
            tl.store(out + slot * size + at, number, mask=inside & (slot >= 0) & (slot < rows_out))
