"""Triton kernels that quantize rows into the layout of a GEMM's input, and the scales of such GEMMs.

Rows are quantized to E4M3 with one scale per row or one for all (`fp8_static`), and to NVFP4 and MXFP8 for Blackwell's
kernels. These functions neither allocate outputs nor synchronize the device: the caller passes every output. On CPUs,
`nvfp4_rows` and `mxfp8_rows` run in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ep_moe.quant.fp8 import SMALLEST, e4m3_blocks, e4m3_step, e4m3_under
from ep_moe.quant.microscale import quantize_mxfp8, quantize_nvfp4
from ep_moe.runtime.devices import multiprocessors, on_device
from ep_moe.runtime.launch_cache import (
    Launch,
    cdiv,
    launch_directly,
    next_power_of_2,
    pdl_launch,
    pdl_trigger,
    pdl_wait,
)
from ep_moe.runtime.triton_compat import tl, triton

# functions in Triton's language have no type annotations
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


# tuned on an H200
PROGRAMS = 16  # programs per multiprocessor
TILE = 4096  # elements that a program processes at once: several rows, or one row if that is longer


@dataclass(frozen=True)
class RowScales:
    """Scales of a GEMM's E4M3 operands, one per row, applied in float32 after the accumulation.

    Args:
        rows: float32 [M], value = code * scale.
        weights: float32 [L], one per matrix, with any stride; or [L, n], one per row of each matrix, contiguous in n.
    """

    rows: Tensor
    weights: Tensor

    @property
    def per_channel(self) -> bool:
        """Whether each row of weights (output channel) has its own scale."""
        return self.weights.dim() == 2

    def kernel_args(self) -> tuple[Any, ...]:
        """Return the arguments of kernels, in the form of `MatrixScales.kernel_args`."""
        return 1.0, self.rows, 0, self.weights, None


def round_rows(
    x: Tensor, out: Tensor, scale: Tensor, *, x_scale: Tensor | None = None, slots: Tensor | None = None,
    counts: Tensor | None = None, pdl: bool = False, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Quantize each row to E4M3 with its own scale: scale = amax / 448, out = x / scale to the nearest.

    An amax below 1e-10 is replaced by 1e-10. NaN remains NaN.

    Args:
        x: bf16 [N, H].
        out: float8_e4m3fn [M, H].
        scale: float32 [M].
        x_scale: float32 [N] or [N, 1], if x is quantized already. Rows and scales are then copied. Default: None.
        slots: int32 [N, K], the output rows that each row is written to; below 0 or at least M for none. Other output
            rows are not changed. Default: row n is written to row n.
        counts: int32 [1] on the device, the number of leading rows to quantize. Default: all rows.
        pdl: Use programmatic dependent launch: overlap with the previous kernel, and let the next one overlap.
        launch: The function that launches the kernel.
    """
    rows, size = x.shape
    width = next_power_of_2(size)
    tall = max(1, TILE // width)
    launch(
        _round_rows, (min(cdiv(rows, tall), PROGRAMS * multiprocessors(x.device)),),
        x, x_scale, slots, counts, out, scale, rows, out.shape[0], size,
        SMALLEST=SMALLEST, TOP_K=1 if slots is None else slots.shape[1], ROWS=tall, WIDTH=width,
        num_warps=4 if width <= TILE else 8, **pdl_launch(x.device, pdl),
    )  # fmt: skip


def round_columns(w: Tensor, out: Tensor, scale: Tensor, *, launch: Launch = launch_directly) -> None:
    """Quantize matrices to E4M3 and transpose them. Bitwise equal to `round_rows` of each column of w.

    Args:
        w: bf16 [L, K, N], contiguous.
        out: float8_e4m3fn [L, N, K], contiguous.
        scale: float32 [L, N].
        launch: The function that launches the kernels.
    """
    experts, depth, size = w.shape
    if not w.numel():
        return
    given = (w, scale, depth, size)
    launch(_column_scales, (experts, cdiv(size, SIDE)), *given, SMALLEST=SMALLEST, DEPTH=2 * SIDE, WIDTH=SIDE)
    grid = (experts, cdiv(size, SIDE), cdiv(depth, 2 * SIDE))
    launch(_round_columns, grid, *given, out, DEPTH=2 * SIDE, WIDTH=SIDE)


COLUMNS = 1024  # columns of a program
SIDE = 64  # columns of a transposed tile, which has twice as many rows


@dataclass(frozen=True)
class MatrixScales:
    """Scales of a GEMM's E4M3 operands, one per matrix, applied in float32 after the accumulation.

    Args:
        rows: A float or float32 [1] for all rows, or float32 [L], one for each expert's rows; value = code * scale.
        weights: float32 [L].
        out: float32 [L], the scales of the output if it is quantized to E4M3 too, saturating at 448; otherwise None.
    """

    rows: Tensor | float
    weights: Tensor
    out: Tensor | None = None

    def kernel_args(self) -> tuple[Any, ...]:
        """Return the arguments of kernels: factor, tensor of scales or None, its stride over experts, weights, out."""
        if isinstance(self.rows, float):
            return self.rows, None, 0, self.weights, self.out
        return 1.0, self.rows, int(self.rows.numel() > 1), self.weights, self.out


@dataclass(frozen=True)
class BlockScales:
    """Scales of a GEMM's E4M3 operands, applied in float32 after the accumulation of each 128 columns along K.

    Args:
        rows: float32 [M, K / 128], with any strides; value = code * scale.
        weights: float32 [L, n / 128, K / 128], contiguous.
    """

    rows: Tensor
    weights: Tensor

    def kernel_args(self) -> tuple[Any, ...]:
        """Return the arguments of kernels, in the form of `MatrixScales.kernel_args`."""
        return 1.0, self.rows, 0, self.weights, None


NO_SCALES = (None, None, None, None, None)  # the arguments of kernels for operands in bf16


def round_rows_by_tensor(
    x: Tensor, input_scales: Tensor, out: Tensor, scale: Tensor, slots: Tensor | None = None, *,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Quantize rows to E4M3 by the largest of the experts' scales, as `call_scales.round_rows` does.

    Args:
        x: bf16 [N, H].
        input_scales: float32 [L]. The largest is the scale.
        out: float8_e4m3fn [M, H], x / scale to the nearest, saturating at 448.
        scale: float32 [1], the scale, written.
        slots: int32 [N, K], the output rows that each row is written to; below 0 or at least M for none. Other output
            rows are not changed. Default: row n is written to row n.
        launch: The function that launches the kernel.
    """
    rows, size = x.shape
    block = min(COLUMNS, next_power_of_2(size))
    launch(
        _round_rows_by_tensor, (rows, cdiv(size, block)),
        x, input_scales, slots, out, scale, len(input_scales), out.shape[0], size,
        SLOTS=next_power_of_2(len(input_scales)), TOP_K=1 if slots is None else slots.shape[1], BLOCK=block,
    )  # fmt: skip


def nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    """Run `quantize_nvfp4` into given outputs. All tensors are contiguous.

    Args:
        x: [N, H].
        global_scale: float32 scalar.
        data: uint8 [N, H / 2], written.
        scale: float8_e4m3fn [N, H / 16], written.
    """
    if x.is_cuda:
        with on_device(x.device):
            launch_nvfp4_rows(x, global_scale, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_nvfp4(x, global_scale), strict=True):
        out.copy_(rounded)


def mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
    """Run `quantize_mxfp8` into given outputs. All tensors are contiguous.

    Args:
        x: [N, H].
        data: float8_e4m3fn [N, H], written.
        scale: uint8 [N, H / 32], written.
    """
    if x.is_cuda:
        with on_device(x.device):
            launch_mxfp8_rows(x, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_mxfp8(x), strict=True):
        out.copy_(rounded)


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _column_scales(w, scale, depth, size, SMALLEST: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the scales of WIDTH columns of an expert, as `_round_rows` computes those of rows."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    own = w + tl.program_id(0).to(tl.int64) * depth * size
    largest = tl.zeros([WIDTH], tl.float32)
    for start in range(0, depth, DEPTH):
        row = start + tl.arange(0, DEPTH)
        there = (row < depth)[:, None] & inside[None, :]
        value = tl.load(own + row[:, None] * size + column[None, :], mask=there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 0))
    to = scale + tl.program_id(0).to(tl.int64) * size + column
    tl.store(to, e4m3_step(largest, SMALLEST), mask=inside)


@triton.jit
def _round_columns(w, scale, depth, size, out, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Quantize a tile and store it transposed."""
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
    inside, there = column < size, row < depth
    step = tl.load(scale + expert * size + column, mask=inside, other=1.0)
    at = w + expert * depth * size + row[:, None] * size + column[None, :]
    value = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    to = out + expert * depth * size + column[:, None] * depth + row[None, :]
    tl.store(to, tl.trans(e4m3_under(value, step[None, :])), mask=inside[:, None] & there[None, :])


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
        else:  # quantized before
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
    """Clamp to E4M3's finite range. NaN remains NaN."""
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
    # IEEE division, so that rows which were quantized before transport are bitwise equal
    number = saturated(tl.div_rn(value, scale)).to(tl.float8e4nv)
    if slots is None:
        tl.store(out + n * size + at, number, mask=inside)
    else:
        for i in tl.static_range(TOP_K):
            slot = tl.load(slots + n * TOP_K + i).to(tl.int64)
            tl.store(out + slot * size + at, number, mask=inside & (slot >= 0) & (slot < rows_out))


_BLOCKS = 64  # blocks of one program
_OF_6, _OF_448 = tl.constexpr(1 / 6), tl.constexpr(1 / 448)
_LARGEST, _NAN = tl.constexpr(448.0), tl.constexpr(127)
_NORMAL = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


def launch_nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    """Launch the Triton kernel of `nvfp4_rows`.

    Args:
        x: [N, H].
        global_scale: float32 scalar.
        data: uint8 [N, H / 2], written.
        scale: float8_e4m3fn [N, H / 16], written.
    """
    rows, blocks = scale.shape
    if rows:
        _nvfp4_rows[(rows, cdiv(blocks, _BLOCKS))](x, global_scale, data, scale, blocks, BLOCKS=_BLOCKS)


def launch_mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
    """Launch the Triton kernel of `mxfp8_rows`.

    Args:
        x: [N, H].
        data: float8_e4m3fn [N, H], written.
        scale: uint8 [N, H / 32], written.
    """
    rows, blocks = scale.shape
    if rows:
        _mxfp8_rows[(rows, cdiv(blocks, _BLOCKS))](x, data, scale, blocks, BLOCKS=_BLOCKS)


@triton.jit
def _nvfp4_rows(x, global_scale, data, scale, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    block += tl.program_id(0).to(tl.int64) * blocks
    pair = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    even = tl.load(x + 2 * pair, mask=inside[:, None], other=0.0).to(tl.float32)
    odd = tl.load(x + 2 * pair + 1, mask=inside[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    encode = tl.div_rn(1.0, tl.load(global_scale))
    # the maximum above ignores NaN. E2M1 has no NaN, so a block with one gets a NaN scale
    lost = tl.max(((even != even) | (odd != odd)).to(tl.int32), axis=1) > 0
    rounded = tl.minimum(encode * (largest * _OF_6), _LARGEST).to(tl.float8e4nv)
    bits = tl.where(lost, _NAN, rounded.to(tl.uint8, bitcast=True))
    tl.store(scale.to(tl.pointer_type(tl.uint8), bitcast=True) + block, bits, mask=inside)
    step = rounded.to(tl.float32)
    factor = tl.where(step == 0.0, 0.0, tl.div_rn(1.0, step * tl.div_rn(1.0, encode)))
    low, high = _e2m1(even * factor[:, None]), _e2m1(odd * factor[:, None])
    tl.store(data + pair, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _e2m1(value):
    """Return the code of the nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code, with the sign in bit 3."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _mxfp8_rows(x, data, scale, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    block += tl.program_id(0).to(tl.int64) * blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    wanted = tl.max(tl.abs(values), axis=1) * _OF_448
    number = wanted.to(tl.int32, bitcast=True)
    exponent = (number >> 23) + ((number & 0x7FFFFF) != 0)  # biased by 127 as E8M0, rounded up
    exponent = tl.where(wanted < _NORMAL, 0, exponent)
    tl.store(scale + block, exponent.to(tl.uint8), mask=inside)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.where(exponent[:, None] == 0, 0.0, tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST))
    bits = tl.where(values != values, _NAN, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(data.to(tl.pointer_type(tl.uint8), bitcast=True) + at, bits, mask=inside[:, None])
