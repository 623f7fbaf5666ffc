"""Convert 4-bit weights to and from the layouts of FlashInfer's mixed-input CUTLASS GEMMs on Hopper.

The formulas reproduce FlashInfer 0.7.2.post1. Python names below are in `flashinfer/fused_moe/prepare.py`, kernels in
`flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu`.

Each function takes one matrix [rows, cols] or a stack of them with any leading dimensions, on any device, and returns
new tensors. `cols` is the contracted dimension. The GEMMs need rows % 64 == 0 and cols % 128 == 0.

Canonical data:
    data: uint8 [..., rows, cols / 2], the low nibble is the even column; E2M1 codes, or int4 in two's complement
    MXFP4 scale: uint8 E8M0 [..., rows, cols / 32], value = e2m1 * 2 ** (scale - 127)
    INT4 scale: bfloat16 [..., rows, cols / 128], value = int4 * scale

Weights move only inside blocks of 16 rows x 64 columns, scales only inside blocks of 64 rows x 128 columns. Splitting,
joining or swapping blocks of rows (gate and up) therefore commutes with every layout if the blocks have a multiple of
64 rows. So does splitting columns at multiples of 128. The exception is `fold_humming`, whose residual belongs to a
whole matrix: fold gate and up together, in either order, and split a matrix over etp before folding it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ep_moe.quant.microscale import MX_BLOCK, e2m1_values, pack_nibbles, unpack_nibbles
from ep_moe.runtime.devices import on_device_of

HUMMING_RANGE = 11
"""How far block exponents of one matrix may spread for `fold_humming` to keep them all; E4M3 has no more."""

HUMMING_COMPENSATION = 64.0
"""FlashInfer wants `fold_humming`'s residual times this: its E4M3 weights come out 2 ** 6 too small."""

# The kernel converts E2M1 to bfloat16 by masks and shifts. For each of four nibbles: (mask, left shift) pairs.
_BF16_BITS = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 11), (6, 9), (1, 13)))


def interleave_mxfp4_bf16(data: Tensor) -> Tensor:
    """Interleave MXFP4 weights for bfloat16 activations (`use_w4_group_scaling`).

    `interleave_moe_weights_for_sm90_mixed_gemm(data, "fp4")`, interleave_fp4_weights_for_sm90_mixed_gemm_kernel.
    data: uint8 [..., rows, cols / 2]. Returns the same shape and dtype.
    """
    # row: block of 16, half, row of 8; byte: block of 32, pair, destination half, quad, thread
    x = _split(data, (2, 8), (2, 2, 2, 4))
    nibbles = unpack_nibbles(_reorder(x, 0, 5, 2, 3, 4, 7, 6, 1).flatten(-2)).unflatten(
        -1, (-1, 2)
    )  # [..., 4 bytes, low and high]
    word = torch.zeros_like(nibbles[..., 0, :], dtype=torch.int32)
    for i, parts in enumerate(_BF16_BITS):
        for mask, shift in parts:
            word |= (nibbles[..., i, :].int() & mask) << shift
    return torch.stack([word & 0xFF, word >> 8], dim=-1).to(torch.uint8).reshape(data.shape)


def deinterleave_mxfp4_bf16(weight: Tensor) -> Tensor:
    """Inverse of `interleave_mxfp4_bf16`."""
    x = _split(weight, (2, 8), (2, 4, 2, 2)).int()
    word = x[..., 0] | x[..., 1] << 8  # [..., low and high]
    data = []
    for parts in _BF16_BITS:
        nibbles = torch.zeros_like(word)
        for mask, shift in parts:
            nibbles |= word >> shift & mask
        data.append(pack_nibbles(nibbles).squeeze(-1).to(torch.uint8))
    x = torch.stack(data, dim=-1).unflatten(-1, (2, 2))
    return _reorder(x, 0, 7, 2, 3, 4, 1, 6, 5).reshape(weight.shape)


def interleave_int4_fp8(data: Tensor) -> Tensor:
    """Interleave INT4 weights for fp8 activations (`use_w4_group_scaling` and `use_packed_weights`).

    `interleave_moe_weights_for_sm90_mixed_gemm(data, "int4")`, interleave_int4_weights_for_sm90_mixed_gemm_kernel:
    bytes move in pairs, bits within a byte do not change.
    data: uint8 [..., rows, cols / 2]. Returns the same shape and dtype.
    """
    # row: block of 16, half, row of 8; byte: block of 32, pair, destination half, thread, its two bytes
    x = _split(data, (2, 8), (2, 2, 4, 2))
    return _reorder(x, 0, 5, 2, 3, 4, 6, 1, 7).reshape(data.shape)


def deinterleave_int4_fp8(weight: Tensor) -> Tensor:
    """Inverse of `interleave_int4_fp8`."""
    x = _split(weight, (2, 8), (2, 4, 2, 2))
    return _reorder(x, 0, 6, 2, 3, 4, 1, 5, 7).reshape(weight.shape)


def interleave_mxfp4_fp8(data: Tensor) -> Tensor:
    """Reorder E2M1 codes for fp8 activations: the last step of `fold_humming`. A bijection of all codes.

    `interleave_moe_weights_for_sm90_mixed_gemm(data, "fp4_fp8")`,
    interleave_fp4_fp8_weights_for_sm90_mixed_gemm_kernel: the layout of INT4, then a permutation of each thread's eight
    sign bits (preprocess_fp4x8_signs_for_fp8; sm90 is built with CUTLASS_MIXED_GEMM_FP4_FP8_PREPROCESSED_SIGNS).
    data: uint8 [..., rows, cols / 2]. Returns the same shape and dtype.
    """
    x: Tensor = interleave_int4_fp8(data).unflatten(-1, (-1, 4))
    signs: Tensor = (unpack_nibbles(x) >> 3).unflatten(-1, (2, 4))  # of the thread's four columns in two rows
    return (x & 0x77 | signs[..., 0, :] << 7 | signs[..., 1, :] << 3).reshape(data.shape)


def deinterleave_mxfp4_fp8(weight: Tensor) -> Tensor:
    """Inverse of `interleave_mxfp4_fp8`."""
    x = weight.unflatten(-1, (-1, 4))
    signs = torch.cat([x >> 7, x >> 3 & 1], dim=-1).unflatten(-1, (4, 2))
    return deinterleave_int4_fp8((x & 0x77 | signs[..., 0] << 3 | signs[..., 1] << 7).reshape(weight.shape))


def fold_mxfp4_scale(scale: Tensor) -> Tensor:
    """Interleave MXFP4 scales for the kernel's `quant_scales`.

    `interleave_moe_scales_for_sm90_mixed_gemm(scale, 32).view(torch.int32)`.
    scale: uint8 [..., rows, cols / 32]. Returns int32 [..., rows / 64, cols / 128, 16, 4].
    The bfloat16 kernel reads byte 0 as 0 (not 2 ** -127) and 255 as infinity (not NaN).
    """
    assert scale.dtype is torch.uint8
    return _fold(scale, slices=4).contiguous().view(torch.int32)


def unfold_mxfp4_scale(folded: Tensor) -> Tensor:
    """Inverse of `fold_mxfp4_scale`."""
    assert folded.dtype is torch.int32
    return _unfold(folded.contiguous().view(torch.uint8), slices=4)


def fold_int4_scale(scale: Tensor) -> Tensor:
    """Interleave INT4 scales: `interleave_moe_scales_for_sm90_mixed_gemm(scale, 128)`.

    scale: bfloat16 [..., rows, cols / 128]; the kernel reads bfloat16 also if activations are float16.
    Returns bfloat16 [..., rows / 64, cols / 128, 8, 8].
    """
    assert scale.dtype is torch.bfloat16
    return _fold(scale, slices=8).contiguous()


def unfold_int4_scale(folded: Tensor) -> Tensor:
    """Inverse of `fold_int4_scale`."""
    assert folded.dtype is torch.bfloat16
    return _unfold(folded, slices=8)


def fold_humming(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert MXFP4 weights for fp8 activations (`use_wfp4afp8_humming`).

    The same as `preprocess_moe_weights_for_sm90_mixed_gemm_humming`.

    data: uint8 [..., rows, cols / 2]; scale: uint8 [..., rows, cols / 32]
    Returns weight uint8 [..., rows, cols / 2], offset int32 [..., rows / 64, cols / 128, 16, 4] (folded like scales)
    and residual float32 [...]. FlashInfer expects residual * HUMMING_COMPENSATION.

    The kernel computes E4M3 weights e2m1 * 2 ** (offset - 6) before the multiplication, and multiplies the product by
    the residual after it. For each matrix of the stack, over all its rows and columns:

        floor = max(scale.min(), scale.max() - 11)
        offset = max(scale, floor) - floor + 1, in [1, 12]
        residual = 2 ** (floor - 128)

    Blocks with scale >= floor keep their values (-0 becomes +0). In a block with d = floor - scale > 0, each code
    becomes the E2M1 nearest to e2m1 * 2 ** -d, ties away from zero, so that the block can use the floor's exponent.
    From d = 5 on, all codes become 0. A value changes by at most 2 ** (floor - 129). This is 2 ** -13 of the value of
    code 1.0 in the largest block, but may be the whole value. `humming_is_exact` tells whether any value changes.

    FlashInfer's table of codes is wrong for d >= 128; the zeros here are right. Scale 255 (NaN) counts as 2 ** 128.
    """
    offset, depth, floor = _humming_offsets(scale)
    rewritten = _look_up(_humming_tables()[0], data, depth)
    residual = floor.to(torch.uint8).view(torch.float8_e8m0fnu).float()[..., 0, 0] * 0.5
    return interleave_mxfp4_fp8(rewritten), fold_mxfp4_scale(offset.to(torch.uint8)), residual


@on_device_of(lambda weight, *_: weight.device)  # torch.frexp of torch 2.11 requires the current device
def unfold_humming(weight: Tensor, offset: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Convert back to MXFP4 data and scales, with the values that the kernel uses.

    They equal those given to `fold_humming` if it was exact, but codes of -0 and scales below the floor are not
    restored.

    residual: as returned by `fold_humming`
    """
    floor = torch.frexp(residual).exponent + 127
    scale = unfold_mxfp4_scale(offset) + (floor - 1)[..., None, None]
    return deinterleave_mxfp4_fp8(weight), scale.to(torch.uint8)


def humming_is_exact(data: Tensor, scale: Tensor) -> Tensor:
    """Return whether `fold_humming` keeps every value: bool [...], one for each matrix of the stack.

    It does if scale.max() - scale.min() <= HUMMING_RANGE. With a wider range it does if the blocks below the floor hold
    zeros, or values that remain E2M1 numbers when divided.
    """
    return _look_up(_humming_tables()[1], data, _humming_offsets(scale)[1]).flatten(-2).all(-1)


def _humming_offsets(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each block's offset and depth below the floor, and the floor [..., 1, 1], all int32."""
    assert scale.dtype is torch.uint8
    wide = scale.int()
    floor = torch.maximum(wide.amin((-2, -1), keepdim=True), wide.amax((-2, -1), keepdim=True) - HUMMING_RANGE)
    raised = torch.maximum(wide, floor)
    return raised - floor + 1, raised - wide, floor


@cache
def _humming_tables() -> tuple[Tensor, Tensor]:
    """Return tables [6 * 256] by depth (0 .. 5) and byte of two codes: the new byte, and whether its values stay."""
    grid = e2m1_values(pack_nibbles(torch.arange(8, dtype=torch.uint8, device="cpu"))).tolist()
    new, kept = [], []
    for depth in range(6):
        nearest = []
        for value in grid:
            errors = [abs(entry - value / 2**depth) for entry in grid]
            nearest.append(max(code for code in range(8) if errors[code] == min(errors)))
        # as in FlashInfer's table: a value that is rounded to 0 keeps its sign, but a given -0 does not
        codes = [0 if code == 8 else code & 8 | nearest[code & 7] for code in range(16)]
        exact = [grid[nearest[code & 7]] * 2**depth == grid[code & 7] for code in range(16)]
        new += [codes[byte & 15] | codes[byte >> 4] << 4 for byte in range(256)]
        kept += [exact[byte & 15] and exact[byte >> 4] for byte in range(256)]
    return torch.tensor(new, dtype=torch.uint8, device="cpu"), torch.tensor(kept, dtype=torch.bool, device="cpu")


def _look_up(table: Tensor, data: Tensor, depth: Tensor) -> Tensor:
    assert data.dtype is torch.uint8
    assert data.shape[-1] * 2 == depth.shape[-1] * MX_BLOCK
    index = data.unflatten(-1, (-1, MX_BLOCK // 2)) + (depth.clamp(max=5) * 256).unsqueeze(-1)
    return table.to(data.device).index_select(0, index.flatten()).reshape(data.shape)


def _split(x: Tensor, rows: tuple[int, ...], cols: tuple[int, ...]) -> Tensor:
    """Reshape [..., r, c] to [..., r / prod(rows), *rows, c / prod(cols), *cols]."""
    assert x.dtype is torch.uint8
    split: Tensor = x.unflatten(-2, (-1, *rows)).unflatten(-1, (-1, *cols))
    return split


def _reorder(x: Tensor, *order: int) -> Tensor:
    """Permute the last dimensions."""
    lead = x.dim() - len(order)
    return x.permute(*range(lead), *(lead + i for i in order))


def _fold(scale: Tensor, slices: int) -> Tensor:
    """Group the scales of blocks of 64 rows x 128 columns.

    The 64 rows form `slices` slices of consecutive rows. Row i of all slices is stored in 16 contiguous bytes.
    """
    groups = 16 // scale.element_size() // slices
    x = scale.unflatten(-2, (-1, slices, 64 // slices)).unflatten(-1, (-1, groups))
    return _reorder(x, 0, 3, 2, 1, 4).flatten(-2)


def _unfold(folded: Tensor, slices: int) -> Tensor:
    x = folded.unflatten(-1, (slices, -1))
    return _reorder(x, 0, 3, 2, 1, 4).flatten(-2).flatten(-4, -2).contiguous()
