"""Quantize rows to E4M3 and dequantize them, and dequantize E4M3 weights.

fp8_block has a linear float32 scale per 128 columns, as DeepSeek-V3's activations have, and fp8_row one per row.
fp8_tensor has one scale that is known beforehand and passed to the kernel as a number.

The torch functions define the results, and run on CPUs. Each Triton function is one launch that does not synchronize.
Every kernel that quantizes rows for transport uses the same device functions (`e4m3_blocks` and others), so that rows
are bitwise equal over all transports.
"""

# functions in Triton's language have no type annotations
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import Wire
from ep_moe.runtime.devices import on_device
from ep_moe.runtime.launch_cache import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton

FP8_BLOCK = 128  # columns of a row that share a scale; also the rows and columns of a block of weights
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # E4M3's largest number
SMALLEST = 1e-10  # lower bound of the largest magnitude that a scale is computed from: zeros get a nonzero scale


def to_fp8(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Round x / scale to the nearest E4M3 number. Values beyond 448 saturate, and NaN remains NaN.

    Args:
        x: A floating-point tensor [...].
        scale: A number, or float32 that broadcasts to x. The division is in float32.

    Returns:
        float8_e4m3fn [...].
    """
    # clamp first: the result of casting values beyond 448 differs between versions of torch
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def rescale_fp8(codes: Tensor, scale: Tensor, larger: Tensor) -> Tensor:
    """Requantize E4M3 codes to a larger scale.

    Args:
        codes: float8_e4m3fn [...], with the values codes * scale.
        scale: float32 that broadcasts to codes.
        larger: The new scale, with the shape of `scale` and nowhere smaller.

    Returns:
        float8_e4m3fn [...]. Times `larger`, they approximate the same values.
    """
    return (codes.float() * (scale / larger)).to(FP8)


def dequantize_fp8_blocks(
    weight: Tensor, scale: Tensor, *, row: int = 0, column: int = 0, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> Tensor:
    """Dequantize E4M3 weights with a scale per block, such as the 128 x 128 of DeepSeek-V3's `weight_scale_inv`.

    Args:
        weight: float8 [r, c], the part of the matrix that starts at (row, column).
        scale: The scales, starting with that of block (row // block[0], column // block[1]).
        row: The part's first row in the matrix.
        column: The part's first column in the matrix.
        block: Rows and columns of a block.

    Returns:
        float32 [r, c].
    """
    rows, columns = weight.shape
    row_block = (torch.arange(rows, device=weight.device) + row % block[0]) // block[0]
    column_block = (torch.arange(columns, device=weight.device) + column % block[1]) // block[1]
    return weight.float() * scale.float()[row_block.unsqueeze(1), column_block]


def dequantize_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantize E4M3 weights with a scale per row, or one scale.

    Args:
        weight: float8 [r, c].
        scale: [r] or [1], any floating-point dtype.

    Returns:
        float32 [r, c].
    """
    return weight.float() * scale.float().unsqueeze(1)


def round_fp8(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """Quantize rows for transport in `fp8_block`, `fp8_row` or `fp8_tensor`.

    Args:
        x: [T, H].
        wire: The wire, whose `dispatch` is one of these three.

    Returns:
        float8_e4m3fn [T, H], and scales float32 [T, H / 128], [T, 1] or None.
    """
    if wire.dispatch in ("fp8_block", "fp8_row"):
        return round_blocks(x, FP8_BLOCK if wire.dispatch == "fp8_block" else x.shape[1])
    assert wire.dispatch == "fp8_tensor"
    assert wire.input_scale is not None
    return round_by(x, wire.input_scale), None


def round_blocks(x: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 with a scale per block: scale = amax / 448 and value = code * scale, as DeepSeek-V3 does.

    Codes and scales are bitwise equal to those of `kernels.round_rows`, `gemm_fp8_block.quantize_rows` and
    `call_scales.round_rows`.

    Args:
        x: [..., H].
        block: Columns that share a scale. It divides H.

    Returns:
        float8_e4m3fn [..., H] and float32 [..., H / block].
    """
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // block, dtype=torch.float32, device=x.device)
    if x.is_cuda:
        with on_device(x.device):
            launch_round_blocks(x, out, scale)
        return out, scale
    blocks = x.float().unflatten(-1, (-1, block))
    scale.copy_(blocks.abs().amax(-1).clamp(min=SMALLEST) / FP8_MAX)
    return out.copy_((blocks * (1 / scale).unsqueeze(-1)).flatten(-2)), scale


def widen_blocks(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of `round_blocks`.

    Args:
        x: float8_e4m3fn [..., H].
        scale: float32 [..., H / block].
        dtype: The dtype of the result.

    Returns:
        [..., H].
    """
    wide: Tensor = (x.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
    return wide.to(dtype)


def round_by(x: Tensor, input_scale: float, out: Tensor | None = None) -> Tensor:
    """Round x / input_scale to E4M3, as `to_fp8` does.

    Args:
        x: [..., H].
        input_scale: The scale of all rows. On GPUs it is a scalar argument of the kernel.
        out: Contiguous float8_e4m3fn [..., H], the output. Default: a new tensor.

    Returns:
        float8_e4m3fn [..., H].
    """
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=FP8, device=x.device) if out is None else out
    if x.is_cuda:
        with on_device(x.device):
            launch_round_by(x, input_scale, out)
        return out
    return out.copy_(to_fp8(x, x.new_tensor(input_scale, dtype=torch.float32)))


def widen_by(x: Tensor, input_scale: float, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of `round_by`.

    Args:
        x: float8_e4m3fn [..., H].
        input_scale: The scale passed to `round_by`.
        dtype: The dtype of the result.

    Returns:
        [..., H].
    """
    return (x.float() * input_scale).to(dtype)


# --- Triton ---------------------------------------------------------------------------------------------------------

_TILE, _WIDE_TILE = 1024, 4096  # elements of a program; the wide tile if enough programs remain to fill the GPU
_E4M3_MAX, _E4M3_NAN = tl.constexpr(448.0), tl.constexpr(127)


def launch_round_blocks(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Launch the Triton kernel of `round_blocks`.

    Args:
        x: Contiguous [..., H].
        out: float8_e4m3fn [..., H].
        scale: float32 [..., H / block].
    """
    if blocks := scale.numel():
        size = x.numel() // blocks
        width = next_power_of_2(size)
        tall = max(1, _WIDE_TILE // width)
        _round_blocks[(cdiv(blocks, tall),)](
            x, out, scale, blocks, SMALLEST=SMALLEST, SIZE=size, WIDTH=width, BLOCKS=tall,
            num_warps=4 if width <= _WIDE_TILE else 8,
        )  # fmt: skip


def launch_round_by(x: Tensor, input_scale: float, out: Tensor) -> None:
    """Launch the Triton kernel of `round_by`.

    Args:
        x: Contiguous [..., H].
        input_scale: The scale of all rows.
        out: Contiguous float8_e4m3fn [..., H].
    """
    if x.numel():
        wide = x.numel() >= 1 << 21
        tile = _WIDE_TILE if wide else _TILE
        warps = 8 if wide else 4
        _round_by[(cdiv(x.numel(), tile),)](x, input_scale, out, x.numel(), TILE=tile, num_warps=warps)


@triton.jit
def e4m3_blocks(value, SMALLEST: tl.constexpr):
    """Return E4M3 codes and scales of float32 [..., columns that share a scale]."""
    step = e4m3_step(tl.max(tl.abs(value), -1), SMALLEST)
    return e4m3_under(value, tl.expand_dims(step, -1)), step


@triton.jit
def e4m3_step(largest, SMALLEST: tl.constexpr):
    """Return the scale for a largest magnitude."""
    # IEEE division, so that results on a GPU and on a CPU are bitwise equal
    return tl.div_rn(tl.maximum(largest, SMALLEST), 448.0)


@triton.jit
def e4m3_under(value, step):
    """Return the E4M3 codes of float32 values under a scale."""
    return (value * tl.div_rn(1.0, step)).to(tl.float8e4nv)


@triton.jit
def e4m3_by(value, input_scale):
    """Return `to_e4m3` of value / input_scale."""
    return to_e4m3(tl.div_rn(value, tl.cast(input_scale, tl.float32)))  # the argument may be an integer


@triton.jit
def to_e4m3(value):
    """Return the bits of E4M3 numbers, uint8, of float32 values, saturating at 448."""
    rounded = tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX).to(tl.float8e4nv)  # minimum does not propagate NaN
    return tl.where(value != value, _E4M3_NAN, rounded.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def of_e4m3(bits):
    """Convert the bits of E4M3 numbers to float32: the inverse of `to_e4m3`."""
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
