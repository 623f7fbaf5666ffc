"""E4M3: rows rounded and widened, and float8 weights to plain numbers.

fp8_block has a linear float32 scale for each 128 columns, as DeepSeek-V3 rounds its activations, fp8_row one for each
row, and fp8_tensor one scale that is known beforehand, which is a number of the launch.

The torch forms are the definition, and what runs on a CPU. A Triton form is one launch that never waits. Its arithmetic
(`e4m3_blocks` and so on) serves every kernel that rounds rows on their way, so that a row has the same bits whichever
way it travels.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import Wire
from ep_moe.runtime.devices import on_device
from ep_moe.runtime.launch_cache import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton

FP8_BLOCK = 128  # columns of a row with a scale of their own, and rows of weights
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # E4M3's largest number
SMALLEST = 1e-10  # a smaller largest magnitude of a row, or of its 128 columns, counts as this: zeros have a scale


def to_fp8(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Round x / scale to the nearest E4M3 number. What lies beyond 448 saturates, and a NaN stays one.

    Args:
        x: Any float [...].
        scale: A number, or float32 that broadcasts to x. The division is in float32.

    Returns:
        float8_e4m3fn [...].
    """
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)  # versions of torch differ in casts of more than 448


def rescale_fp8(codes: Tensor, scale: Tensor, larger: Tensor) -> Tensor:
    """Round E4M3 numbers a second time, under a larger scale.

    Args:
        codes: float8_e4m3fn [...], whose values are codes * scale.
        scale: float32 that broadcasts to codes.
        larger: As `scale`, and nowhere below it.

    Returns:
        float8_e4m3fn [...], whose values are about the same times `larger`.
    """
    return (codes.float() * (scale / larger)).to(FP8)


def dequantize_fp8_blocks(
    weight: Tensor, scale: Tensor, *, row: int = 0, column: int = 0, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> Tensor:
    """Dequantize E4M3 weights with a scale per block, 128 x 128 in DeepSeek-V3's `weight_scale_inv`.

    Args:
        weight: float8 [r, c], the part of the matrix that starts at (row, column).
        scale: The factors from block (row // block[0], column // block[1]) on.
        row: The part's first row.
        column: The part's first column.
        block: Rows and columns of a block.

    Returns:
        float32 [r, c].
    """
    rows, columns = weight.shape
    row_block = (torch.arange(rows, device=weight.device) + row % block[0]) // block[0]
    column_block = (torch.arange(columns, device=weight.device) + column % block[1]) // block[1]
    return weight.float() * scale.float()[row_block.unsqueeze(1), column_block]


def dequantize_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantize E4M3 weights with a scale per row, or one for all.

    Args:
        weight: float8 [r, c].
        scale: [r] or [1], any float dtype.

    Returns:
        float32 [r, c].
    """
    return weight.float() * scale.float().unsqueeze(1)


def round_fp8(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """Round rows as they travel in `fp8_block`, `fp8_row` or `fp8_tensor`.

    Args:
        x: [T, H].
        wire: Its `dispatch` is one of the three.

    Returns:
        float8_e4m3fn [T, H], and scales float32 [T, H / 128], [T, 1] or None.
    """
    if wire.dispatch in ("fp8_block", "fp8_row"):
        return round_blocks(x, FP8_BLOCK if wire.dispatch == "fp8_block" else x.shape[1])
    assert wire.dispatch == "fp8_tensor"
    assert wire.input_scale is not None
    return round_by(x, wire.input_scale), None


def round_blocks(x: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Round to E4M3 with a scale per block: scale = amax / 448 and value = number * scale, as DeepSeek-V3 does.

    Numbers and scales are those of `kernels.round_rows`, `gemm_fp8_block.quantize_rows` and
    `call_scales.round_rows`, bit for bit.

    Args:
        x: [..., H].
        block: Columns with a scale of their own, which divide H.

    Returns:
        float8_e4m3fn [..., H] and float32 [..., H / block].
    """
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // block, device=x.device)
    if x.is_cuda:
        with on_device(x.device):
            launch_round_blocks(x, out, scale)
        return out, scale
    blocks = x.float().unflatten(-1, (-1, block))
    scale.copy_(blocks.abs().amax(-1).clamp(min=SMALLEST) / FP8_MAX)
    return out.copy_((blocks * (1 / scale).unsqueeze(-1)).flatten(-2)), scale


def widen_blocks(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `round_blocks`, up to rounding.

    Args:
        x: float8_e4m3fn [..., H].
        scale: float32 [..., H / block].
        dtype: Of the result.

    Returns:
        [..., H].
    """
    wide: Tensor = (x.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
    return wide.to(dtype)


def round_by(x: Tensor, input_scale: float, out: Tensor | None = None) -> Tensor:
    """Round x / input_scale to E4M3 as `to_fp8`.

    Args:
        x: [..., H].
        input_scale: One scale for all, a number of the launch on GPUs.
        out: Contiguous float8_e4m3fn [..., H] to write to. Default: a new tensor.

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
    """Undo `round_by`, up to rounding.

    Args:
        x: float8_e4m3fn [..., H].
        input_scale: As for `round_by`.
        dtype: Of the result.

    Returns:
        [..., H].
    """
    return (x.float() * input_scale).to(dtype)


# --- Triton ---------------------------------------------------------------------------------------------------------

_TILE, _WIDE_TILE = 1024, 4096  # numbers of a program; the latter from so many programs on that all are busy
_E4M3_MAX, _E4M3_NAN = tl.constexpr(448.0), tl.constexpr(127)


def launch_round_blocks(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Launch the Triton form of `round_blocks`.

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
    """Launch the Triton form of `round_by`.

    Args:
        x: Contiguous [..., H].
        input_scale: One scale for all.
        out: Contiguous float8_e4m3fn [..., H].
    """
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
    rounded = tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX).to(tl.float8e4nv)  # minima leave NaN out
    return tl.where(value != value, _E4M3_NAN, rounded.to(tl.uint8, bitcast=True)).to(tl.uint8)


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
