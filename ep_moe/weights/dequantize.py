"""Quantised checkpoint formats to plain numbers, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK = 128
MXFP4_BLOCK = 32
INT4_GROUP = 128

# E2M1: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, table 5)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def dequantize_fp8_blocks(weight: Tensor, scale: Tensor, *, row: int = 0, column: int = 0) -> Tensor:
    """DeepSeek-V3's `weight_scale_inv`: one float32 factor per 128 x 128 block.

    weight: float8 [r, c], the part of the matrix that starts at (row, column)
    scale: the factors from block (row // 128, column // 128) on
    Returns float32 [r, c].
    """
    rows, columns = weight.shape
    row_block = (torch.arange(rows) + row % FP8_BLOCK) // FP8_BLOCK
    column_block = (torch.arange(columns) + column % FP8_BLOCK) // FP8_BLOCK
    return weight.float() * scale.float()[row_block.unsqueeze(1), column_block]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """GPT-OSS's `_blocks` and `_scales`: 32 E2M1 numbers, low nibble first, times 2 ** (scale - 127).

    blocks: uint8 [..., c / 32, 16]; scales: uint8 (E8M0) [..., c / 32]. Returns float32 [..., c].
    """
    values_of = _E2M1.to(blocks.device)
    low, high = values_of[(blocks & 0xF).long()], values_of[(blocks >> 4).long()]
    values = torch.stack([low, high], dim=-1).flatten(-2)  # [..., c / 32, 32]
    factors = scales.view(torch.float8_e8m0fnu).float()  # 255 is its NaN
    return (values * factors.unsqueeze(-1)).flatten(-2)


def dequantize_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """Two's complement INT4, even column in the low nibble, times a scale per 128 columns.

    packed: uint8 [..., c / 2]; scale: [..., c / 128]. Returns float32 [..., c].
    """
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    values = torch.where(codes > 7, codes - 16, codes).float()
    groups: Tensor = values.unflatten(-1, (-1, INT4_GROUP)) * scale.float().unsqueeze(-1)
    return groups.flatten(-2)
