"""The Triton forms of `fp8_rows`, and their arithmetic for the kernels that round rows on their way: it stands here
once, so that a row has the same bits whichever way it travels."""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.quant.row_format import SMALLEST
from ep_moe.runtime.grids import cdiv, next_power_of_2

_TILE, _WIDE_TILE = 1024, 4096  # numbers of a program; the latter from so many programs on that all are busy
_FP8_MAX, _FP8_NAN = tl.constexpr(448.0), tl.constexpr(127)


def round_blocks(x: Tensor, out: Tensor, scale: Tensor) -> None:
    if blocks := scale.numel():
        size = x.numel() // blocks
        width = next_power_of_2(size)
        tall = max(1, _WIDE_TILE // width)
        _round_blocks[(cdiv(blocks, tall),)](
            x, out, scale, blocks, SMALLEST=SMALLEST, SIZE=size, WIDTH=width, BLOCKS=tall,
            num_warps=4 if width <= _WIDE_TILE else 8,
        )  # fmt: skip


def round_by(x: Tensor, input_scale: float, out: Tensor) -> None:
    if x.numel():
        wide = x.numel() >= 1 << 21
        tile = _WIDE_TILE if wide else _TILE
        warps = 8 if wide else 4
        _round_by[(cdiv(x.numel(), tile),)](x, input_scale, out, x.numel(), TILE=tile, num_warps=warps)


@triton.jit
def e4m3_blocks(value, SMALLEST: tl.constexpr):
    """value: float32 [..., columns with one scale]. E4M3 numbers, and scales."""
    step = e4m3_step(tl.max(tl.abs(value), -1), SMALLEST)
    return e4m3_under(value, tl.expand_dims(step, -1)), step


@triton.jit
def e4m3_step(largest, SMALLEST: tl.constexpr):
    """The scale of numbers whose largest magnitude is given."""
    # exact division, so that rows rounded on a GPU and on a CPU have the same bits
    return tl.div_rn(tl.maximum(largest, SMALLEST), 448.0)


@triton.jit
def e4m3_under(value, step):
    """value: float32. E4M3 numbers, under their scale."""
    return (value * tl.div_rn(1.0, step)).to(tl.float8e4nv)


@triton.jit
def e4m3_by(value, input_scale):
    """`to_e4m3` of value / input_scale."""
    return to_e4m3(tl.div_rn(value, tl.cast(input_scale, tl.float32)))  # it may have been a whole number


@triton.jit
def to_e4m3(value):
    """value: float32. The bits of E4M3 numbers, uint8, saturating at 448."""
    rounded = tl.minimum(tl.maximum(value, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)  # minima leave NaN out
    return tl.where(value != value, _FP8_NAN, rounded.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def of_e4m3(bits):
    """The inverse, float32."""
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _round_blocks(
    x, out, scale, blocks,
    SMALLEST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, column = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, WIDTH)
    at, inside = block[:, None] * SIZE + column[None, :], (block < blocks)[:, None] & (column < SIZE)[None, :]
    number, step = e4m3_blocks(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), SMALLEST)
    tl.store(out + at, number, mask=inside)
    tl.store(scale + block, step, mask=block < blocks)


@triton.jit
def _round_by(x, input_scale, out, numbers, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = e4m3_by(tl.load(x + at, mask=at < numbers, other=0.0).to(tl.float32), input_scale)
    tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + at, bits, mask=at < numbers)
