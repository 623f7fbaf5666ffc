"""The Triton forms of `micro_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.runtime.grids import cdiv

_BLOCKS = 64  # of one program
_OF_6, _OF_448 = tl.constexpr(1 / 6), tl.constexpr(1 / 448)
_FP8_MAX, _FP8_NAN = tl.constexpr(448.0), tl.constexpr(127)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


def nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    rows, blocks = scale.shape
    if rows:
        _nvfp4_rows[(rows, cdiv(blocks, _BLOCKS))](x, global_scale, data, scale, blocks, BLOCKS=_BLOCKS)


def mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
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
    # the maxima above leave NaN out; a NaN's block becomes NaN by its scale, as E2M1 has none
    lost = tl.max(((even != even) | (odd != odd)).to(tl.int32), axis=1) > 0
    rounded = tl.minimum(encode * (largest * _OF_6), _FP8_MAX).to(tl.float8e4nv)
    bits = tl.where(lost, _FP8_NAN, rounded.to(tl.uint8, bitcast=True))
    tl.store(scale.to(tl.pointer_type(tl.uint8), bitcast=True) + block, bits, mask=inside)
    step = rounded.to(tl.float32)
    factor = tl.where(step == 0.0, 0.0, tl.div_rn(1.0, step * tl.div_rn(1.0, encode)))
    low, high = _e2m1(even * factor[:, None]), _e2m1(odd * factor[:, None])
    tl.store(data + pair, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _e2m1(value):
    """The code of the nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code; the sign in bit 3."""
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
    exponent = tl.where(wanted < _TINY, 0, exponent)
    tl.store(scale + block, exponent.to(tl.uint8), mask=inside)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.where(exponent[:, None] == 0, 0.0, tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX))
    bits = tl.where(values != values, _FP8_NAN, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(data.to(tl.pointer_type(tl.uint8), bitcast=True) + at, bits, mask=inside[:, None])
