"""Block-scaled formats in plain torch, on any device: NVFP4, MXFP4, MXFP8, and INT4 with a scale per group.

E2M1 and INT4 codes are packed two per byte, the even column in the low nibble. Scales are linear, [..., c / block].
`ep_moe.quant.kernels` has Triton kernels for NVFP4 and MXFP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8, FP8_MAX
from ep_moe.runtime.devices import on_device_of

NVFP4_BLOCK = 16
MX_BLOCK = 32
E2M1_MAX = 6.0
INT4_GROUP = 128  # columns that share a scale in published checkpoints
NVFP4_RANGE = FP8_MAX * E2M1_MAX  # the largest NVFP4 value divided by its global scale
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
_TINY = torch.finfo(torch.float32).tiny
# torch 2.11's frexp and ldexp access invalid memory if their tensor is not on the current GPU
_on_tensor_device = on_device_of(lambda x: x.device)


def quantize_nvfp4(x: Tensor, global_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Quantize to E2M1 with an E4M3 scale per 16 columns and a float32 global scale.

    value = code * scale * global_scale. A block beyond the range saturates. A block so small that its scale is zero
    becomes zeros.

    The arithmetic is that of FlashInfer 0.7.2 (`cvt_warp_fp16_to_fp4`, quantization_utils.cuh), in float32 and in the
    same order: with g = 1 / global_scale, scale = E4M3(g * (amax * (1 / 6))), code = E2M1(x * (1 / (scale * (1 / g)))).
    FlashInfer's three reciprocals are `rcp.approx.ftz.f32`, with an error of at most one last bit. Those here are
    correctly rounded. Two differences can result:

    - A scale may differ by one step if g * amax / 6 is within a relative 2**-21 of the middle of two E4M3 numbers.
    - A code may differ by one if x / (scale * global_scale) is that close to the middle of two E2M1 numbers.

    A comparison with a GPU must exclude those, and the codes of blocks with a zero scale, which are arbitrary.

    Args:
        x: A floating-point tensor [..., c].
        global_scale: The dequantization scale, a scalar or [..., 1]: amax / (448 * 6), as ModelOpt's `weight_scale_2`
            and `input_scale`.

    Returns:
        data uint8 [..., c / 2] and scale float8_e4m3fn [..., c / 16].
    """
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    encode = 1 / _single(global_scale)
    largest = blocks.abs().amax(-1)
    # clamp first: the result of casting values beyond 448 differs between versions of torch
    scale = (encode * (largest * (1 / E2M1_MAX))).clamp(max=FP8_MAX).to(FP8)
    factor = 1 / (scale.float() * (1 / encode))
    factor = torch.where(scale.float() == 0, 0.0, factor)
    return pack_nibbles(e2m1_codes(blocks * factor.unsqueeze(-1)).flatten(-2)), scale


def dequantize_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor | float) -> Tensor:
    """Dequantize NVFP4: the inverse of `quantize_nvfp4`, up to rounding.

    Args:
        data: uint8 [..., c / 2].
        scale: float8_e4m3fn [..., c / 16].
        global_scale: A scalar or [..., 1].

    Returns:
        float32 [..., c].
    """
    return _scaled(e2m1_values(data), scale.float() * _single(global_scale))


def _single(global_scale: Tensor | float) -> Tensor:
    """Convert to float32. A Python number becomes a CPU tensor, which is allowed in a CUDA graph capture."""
    if isinstance(global_scale, Tensor):
        return global_scale.float()
    return torch.tensor(global_scale, dtype=torch.float32, device="cpu")


@_on_tensor_device
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 with an E8M0 scale per 32 columns: value = data * 2 ** (scale - 127).

    The exponent is that of amax / 448, rounded up so that nothing saturates. The OCP specification rounds down. The
    arithmetic is that of FlashInfer 0.7.2 (`cvt_warp_fp16_to_mxfp8`, quantization_utils.cuh), which flushes numbers
    below 2**-126 to zero. If amax / 448 is that small, the block becomes zeros with scale 0.

    Args:
        x: A floating-point tensor [..., c] of finite values.

    Returns:
        data float8_e4m3fn [..., c] and scale uint8 [..., c / 32].
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
    """Dequantize MXFP8: the inverse of `quantize_mxfp8`, up to rounding.

    Args:
        data: float8_e4m3fn [..., c].
        scale: uint8 [..., c / 32].

    Returns:
        float32 [..., c].
    """
    return _scaled(data.float(), e8m0_values(scale))


@_on_tensor_device
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E2M1 with an E8M0 scale per 32 columns: value = code * 2 ** (scale - 127).

    By OCP Microscaling Formats 1.0, section 6.3, the shared exponent is that of the largest magnitude, minus E2M1's
    largest exponent. Values above 6 then saturate.

    Args:
        x: A floating-point tensor [..., c].

    Returns:
        data uint8 [..., c / 2] and scale uint8 [..., c / 32].
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 1 - _E2M1_MAX_EXPONENT).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    values = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    return pack_nibbles(e2m1_codes(values).flatten(-2)), (exponent + 127).to(torch.uint8)


def dequantize_mxfp4(data: Tensor, scale: Tensor) -> Tensor:
    """Dequantize MXFP4: the inverse of `quantize_mxfp4`, up to rounding.

    Args:
        data: uint8 [..., c / 2], or [..., c / 32, 16] as in GPT-OSS's checkpoints.
        scale: uint8 [..., c / 32].

    Returns:
        float32 [..., c].
    """
    return _scaled(e2m1_values(data), e8m0_values(scale))


def quantize_int4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize to two's complement INT4 in [-7, 7] with a bf16 scale per group of columns: value = data * scale.

    Args:
        x: A floating-point tensor [..., c].
        group: The number of columns that share a scale.

    Returns:
        data uint8 [..., c / 2] and scale bfloat16 [..., c / group].
    """
    groups = x.float().unflatten(-1, (-1, group))
    scale = scale_to(groups.abs().amax(-1), 7.0).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
    return pack_nibbles((codes & 0xF).view(torch.uint8).flatten(-2)), scale


def dequantize_int4(data: Tensor, scale: Tensor) -> Tensor:
    """Dequantize two's complement INT4 with a scale per group. The size of groups follows from the shape of the scales.

    Args:
        data: uint8 [..., c / 2].
        scale: [..., c / group].

    Returns:
        float32 [..., c].
    """
    codes = unpack_nibbles(data).to(torch.int8)
    return _scaled(torch.where(codes > 7, codes - 16, codes).float(), scale.float())


def rescale_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor, larger: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize NVFP4 to a larger global scale.

    Args:
        data: uint8 [..., c / 2].
        scale: float8_e4m3fn [..., c / 16].
        global_scale: A scalar or [..., 1].
        larger: The new global scale, with the shape of `global_scale` and nowhere smaller.

    Returns:
        data and scale, as `quantize_nvfp4` returns them.
    """
    return quantize_nvfp4(dequantize_nvfp4(data, scale, global_scale), larger)


def power_of_two_above(scale: Tensor) -> Tensor:
    """Round up to powers of two, using the bits of the mantissa.

    Args:
        scale: float32, normal numbers.

    Returns:
        The smallest powers of two that are at least `scale`, float32.
    """
    return ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def scale_to(largest: Tensor, top: float) -> Tensor:
    """Return the scales by which `top` represents `largest`: largest / top.

    Args:
        largest: Magnitudes, float32.
        top: The largest number of the format.

    Returns:
        Scales. They are 1 for zeros, and for values so small that the scale would not be a normal number (dividing by
        it could overflow).
    """
    # divide by a tensor: for a Python number, a GPU multiplies by the reciprocal, and the last bit differs from a CPU's
    scale = largest / torch.full((), top, dtype=largest.dtype, device=largest.device)
    return torch.where(scale >= _TINY, scale, torch.ones_like(scale))


def e2m1_codes(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 (ties to the even code, saturating).

    Args:
        values: A floating-point tensor.

    Returns:
        4-bit codes in uint8.
    """
    magnitude = values.abs()
    # midpoints between neighbors 0 .5 1 1.5 2 3 4 6; a tie rounds to the neighbor with the even code
    code = torch.zeros_like(values, dtype=torch.uint8)
    for lower, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude > midpoint) if lower % 2 == 0 else (magnitude >= midpoint)
    return torch.bitwise_or(code, torch.signbit(values).to(torch.uint8) << 3)


@_on_tensor_device
def e2m1_values(packed: Tensor) -> Tensor:
    """Decode E2M1: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, table 5).

    Computed without a table, which could not be copied to the device in a CUDA graph capture.

    Args:
        packed: uint8 [..., c / 2].

    Returns:
        float32 [..., c].
    """
    code = unpack_nibbles(packed).int()
    exponent, mantissa = (code >> 1) & 3, (code & 1) * 0.5
    size = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent - 1))
    return torch.where(code > 7, -size, size)


def e8m0_values(scale: Tensor) -> Tensor:
    """Decode E8M0: 2 ** (scale - 127), NaN for 255.

    Args:
        scale: uint8.

    Returns:
        float32.
    """
    return scale.view(torch.float8_e8m0fnu).float()


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte, even columns in the low nibble.

    Args:
        codes: uint8 [..., c].

    Returns:
        uint8 [..., c / 2].
    """
    low, high = codes[..., 0::2], codes[..., 1::2]
    packed: Tensor = low | (high << 4)
    return packed


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack two 4-bit codes per byte: the inverse of `pack_nibbles`.

    Args:
        packed: uint8 [..., c / 2].

    Returns:
        uint8 [..., c].
    """
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply values [..., c] or [..., blocks, c / blocks] by their scales [..., blocks]. Return [..., c]."""
    if values.dim() == scale.dim():
        values = values.unflatten(-1, (scale.shape[-1], -1))
    scaled: Tensor = values * scale.unsqueeze(-1)
    return scaled.flatten(-2)
