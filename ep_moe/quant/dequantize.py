"""Sizes of blocks in published checkpoints, and float8 with its scales to plain numbers, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK = 128
INT4_GROUP = 128
FP8 = torch.float8_e4m3fn


def dequantize_fp8_blocks(
    weight: Tensor, scale: Tensor, *, row: int = 0, column: int = 0, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> Tensor:
    """One factor per block, 128 x 128 in DeepSeek-V3's `weight_scale_inv`.

    weight: float8 [r, c], the part of the matrix that starts at (row, column)
    scale: the factors from block (row // block[0], column // block[1]) on
    block: its rows and columns
    Returns float32 [r, c].
    """
    rows, columns = weight.shape
    row_block = (torch.arange(rows, device=weight.device) + row % block[0]) // block[0]
    column_block = (torch.arange(columns, device=weight.device) + column % block[1]) // block[1]
    return weight.float() * scale.float()[row_block.unsqueeze(1), column_block]


def dequantize_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """One factor for each row, or for all. weight: float8 [r, c]; scale: [r] or [1], any float dtype. float32 [r, c]"""
    return weight.float() * scale.float().unsqueeze(1)
