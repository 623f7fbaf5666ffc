"""Block-scaled numbers in plain torch, on any device: NVFP4, MXFP4, MXFP8, and INT4 with a scale per 32.

E2M1 codes and INT4 lie two to a byte, the even column in the low nibble. Scales are linear, [..., c / block]. Rows of
NVFP4 and MXFP8, as Blackwell's kernels take them, have a Triton form too: one launch, which allocates nothing and never
waits. The torch forms are the definition.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8, FP8_MAX
from ep_moe.runtime.devices import on_device, on_device_of
from ep_moe.runtime.grids import cdiv
from ep_moe.runtime.triton_compat import tl, triton

NVFP4_BLOCK = 16
MX_BLOCK = 32
E2M1_MAX = 6.0
INT4_GROUP = 128  # columns of a scale in published checkpoints
NVFP4_RANGE = FP8_MAX * E2M1_MAX  # the largest NVFP4 number, in units of its global scale
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
_TINY = torch.finfo(torch.float32).tiny


def quantize_nvfp4(x: Tensor, global_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """E2M1 with an E4M3 scale per 16 columns, under one float32 scale: value = code * scale * global_scale.

    x: any float [..., c]; global_scale: decode factor, a scalar or [..., 1], amax / (448 * 6) as ModelOpt's
    `weight_scale_2` and `input_scale`. Returns data uint8 [..., c / 2] and scale float8_e4m3fn [..., c / 16].
    A block beyond the range saturates; one so small that its scale is zero becomes zeros.

    The arithmetic of FlashInfer 0.7.2 (`cvt_warp_fp16_to_fp4`, quantization_utils.cuh), in float32 and in its order:
    with g = 1 / global_scale, scale = E4M3(g * (amax * (1 / 6))), code = E2M1(x * (1 / (scale * (1 / g)))). Its three
    reciprocals are `rcp.approx.ftz.f32`, a last bit off at most; these are the nearest. So a scale may differ by one
    step where g * amax / 6 lies within 2**-21 of itself from the middle of two E4M3 numbers, and a code by one where
    x / (scale * global_scale) does so from the middle of two E2M1 numbers. A comparison with a GPU leaves those out,
    and the codes of blocks whose scale is zero, which mean zero whatever they are.
    """
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    encode = 1 / _single(global_scale)
    largest = blocks.abs().amax(-1)
    # versions of torch differ in what a cast of more than 448 gives
    scale = (encode * (largest * (1 / E2M1_MAX))).clamp(max=FP8_MAX).to(FP8)
    factor = 1 / (scale.float() * (1 / encode))
    factor = torch.where(scale.float() == 0, 0.0, factor)
    return pack_nibbles(e2m1_codes(blocks * factor.unsqueeze(-1)).flatten(-2)), scale


def dequantize_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor | float) -> Tensor:
    """The inverse up to rounding: float32 [..., c]. global_scale: a scalar or [..., 1]."""
    return _scaled(e2m1_values(data), scale.float() * _single(global_scale))


def _single(global_scale: Tensor | float) -> Tensor:
    """In float32; a number stays on the host, also in a capture."""
    if isinstance(global_scale, Tensor):
        return global_scale.float()
    return torch.tensor(global_scale, dtype=torch.float32, device="cpu")


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 with an E8M0 scale per 32 columns: value = data * 2 ** (scale - 127).

    x: any finite float [..., c]. Returns data float8_e4m3fn [..., c] and scale uint8 [..., c / 32].
    The exponent is that of amax / 448 rounded up, so that nothing saturates, where the OCP document rounds down; the
    arithmetic of FlashInfer 0.7.2 (`cvt_warp_fp16_to_mxfp8`, quantization_utils.cuh), compiled to take numbers below
    2**-126 as zero. A block whose amax / 448 is that small is zeros with scale 0.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    wanted = blocks.abs().amax(-1) * (1 / FP8_MAX)
    mantissa, exponent = torch.frexp(wanted)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    zero = wanted < _TINY
    values = torch.ldexp(blocks, -exponent.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    values = torch.where(zero.unsqueeze(-1), 0.0, values)
    return values.to(FP8).flatten(-2), torch.where(zero, 0, exponent + 127).to(torch.uint8)


def dequantize_mxfp8(data: Tensor, scale: Tensor) -> Tensor:
    """The inverse up to rounding: float32 [..., c]."""
    return _scaled(data.float(), e8m0_values(scale))


@on_device_of(lambda x: x.device)  # else torch 2.11 reads memory that is not there, of a GPU that is not current
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 with an E8M0 scale per 32 columns: value = code * 2 ** (scale - 127).

    x: any float [..., c]. Returns data uint8 [..., c / 2] and scale uint8 [..., c / 32].
    OCP Microscaling Formats 1.0, section 6.3: the shared exponent is that of the largest magnitude, less E2M1's own;
    what lies above 6 then saturates.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 1 - _E2M1_MAX_EXPONENT).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    values = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    return pack_nibbles(e2m1_codes(values).flatten(-2)), (exponent + 127).to(torch.uint8)


def dequantize_mxfp4(data: Tensor, scale: Tensor) -> Tensor:
    """The inverse up to rounding: float32 [..., c]. data: [..., c / 2], or by blocks as GPT-OSS's checkpoints,
    [..., c / 32, 16]."""
    return _scaled(e2m1_values(data), e8m0_values(scale))


def quantize_mxint4(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 with a bf16 scale per 32 columns: data uint8 [..., c / 2], scale bfloat16 [..., c / 32]."""
    return quantize_int4(x, MX_BLOCK)


def dequantize_mxint4(data: Tensor, scale: Tensor) -> Tensor:
    """The inverse up to rounding: float32 [..., c]."""
    return dequantize_int4(data, scale)


def quantize_int4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Two's complement INT4 in [-7, 7] with a bf16 scale per `group` columns: value = data * scale.

    x: any float [..., c]. Returns data uint8 [..., c / 2] and scale bfloat16 [..., c / group].
    """
    groups = x.float().unflatten(-1, (-1, group))
    scale = scale_to(groups.abs().amax(-1), 7.0).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
    return pack_nibbles((codes & 0xF).view(torch.uint8).flatten(-2)), scale


def dequantize_int4(data: Tensor, scale: Tensor) -> Tensor:
    """Two's complement INT4 times a scale per group, whatever its size: float32 [..., c].

    data: uint8 [..., c / 2]; scale: [..., c / group].
    """
    codes = unpack_nibbles(data).to(torch.int8)
    return _scaled(torch.where(codes > 7, codes - 16, codes).float(), scale.float())


def rescale_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor, larger: Tensor) -> tuple[Tensor, Tensor]:
    """Round NVFP4 numbers a second time, under a larger global scale: data and scale as `quantize_nvfp4` returns."""
    return quantize_nvfp4(dequantize_nvfp4(data, scale, global_scale), larger)


def power_of_two_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below `scale` (float32, normal): round the mantissa's bits up."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def scale_to(largest: Tensor, top: float) -> Tensor:
    """The scale that brings `largest` to `top`; 1 for all zeros, and for numbers so small that the scale would not be a
    normal number (dividing by it could overflow)."""
    scale = largest / top
    return torch.where(scale >= _TINY, scale, torch.ones_like(scale))


def e2m1_codes(values: Tensor) -> Tensor:
    """Nearest E2M1 (ties to the even code, saturating), as 4-bit codes in uint8."""
    magnitude = values.abs()
    # midpoints between neighbours 0 .5 1 1.5 2 3 4 6; a tie belongs to the neighbour whose code is even
    code = torch.zeros_like(values, dtype=torch.uint8)
    for lower, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude > midpoint) if lower % 2 == 0 else (magnitude >= midpoint)
    return torch.bitwise_or(code, torch.signbit(values).to(torch.uint8) << 3)


def e2m1_values(packed: Tensor) -> Tensor:
    """uint8 [..., c / 2] to float32 [..., c]: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0,
    table 5). No table: a CUDA graph's capture could not bring it to the device."""
    code = unpack_nibbles(packed).int()
    exponent, mantissa = (code >> 1) & 3, (code & 1) * 0.5
    size = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent - 1))
    return torch.where(code > 7, -size, size)


def e8m0_values(scale: Tensor) -> Tensor:
    """uint8 to float32: 2 ** (scale - 127); 255 is E8M0's NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., c] to [..., c / 2], even columns in the low nibble."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    packed: Tensor = low | (high << 4)
    return packed


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., c], or [..., blocks, c / blocks], by their scale [..., blocks]: [..., c]."""
    if values.dim() == scale.dim():
        values = values.unflatten(-1, (scale.shape[-1], -1))
    scaled: Tensor = values * scale.unsqueeze(-1)
    return scaled.flatten(-2)


def nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    """`quantize_nvfp4` in place. x: [N, H]; global_scale: float32 scalar; data: uint8 [N, H / 2]; scale:
    float8_e4m3fn [N, H / 16]; all contiguous"""
    if x.is_cuda:
        with on_device(x.device):
            launch_nvfp4_rows(x, global_scale, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_nvfp4(x, global_scale), strict=True):
        out.copy_(rounded)


def mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
    """`quantize_mxfp8` in place. x: [N, H]; data: float8_e4m3fn [N, H]; scale: uint8 [N, H / 32]; all contiguous"""
    if x.is_cuda:
        with on_device(x.device):
            launch_mxfp8_rows(x, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_mxfp8(x), strict=True):
        out.copy_(rounded)


# --- Triton ---------------------------------------------------------------------------------------------------------

_BLOCKS = 64  # of one program
_OF_6, _OF_448 = tl.constexpr(1 / 6), tl.constexpr(1 / 448)
_LARGEST, _NAN = tl.constexpr(448.0), tl.constexpr(127)
_NORMAL = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


def launch_nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    rows, blocks = scale.shape
    if rows:
        _nvfp4_rows[(rows, cdiv(blocks, _BLOCKS))](x, global_scale, data, scale, blocks, BLOCKS=_BLOCKS)


def launch_mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
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
    rounded = tl.minimum(encode * (largest * _OF_6), _LARGEST).to(tl.float8e4nv)
    bits = tl.where(lost, _NAN, rounded.to(tl.uint8, bitcast=True))
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
    exponent = tl.where(wanted < _NORMAL, 0, exponent)
    tl.store(scale + block, exponent.to(tl.uint8), mask=inside)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.where(exponent[:, None] == 0, 0.0, tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST))
    bits = tl.where(values != values, _NAN, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(data.to(tl.pointer_type(tl.uint8), bitcast=True) + at, bits, mask=inside[:, None])
