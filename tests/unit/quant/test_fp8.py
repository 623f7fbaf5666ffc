"""Test E4M3 numbers with a scale for each block."""

import pytest
import torch

from ep_moe.quant.fp8 import FP8, dequantize_fp8_blocks
from tests.fixtures.helpers import assert_same


@pytest.mark.parametrize("block", [(4, 4), (2, 8), (8, 2)])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (5, 3)])
def test_a_part_has_the_factors_of_its_blocks(block, row, column):
    """A part of a matrix gets the scales of its blocks, for blocks of any shape, from any row and column on."""
    scale = torch.arange(1.0, 65.0).reshape(8, 8)
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    part = whole[row : row + 7, column : column + 6]
    left = scale[row // block[0] :, column // block[1] :]
    codes = torch.ones(7, 6).to(FP8)
    assert torch.equal(dequantize_fp8_blocks(codes, left, row=row, column=column, block=block), part)


# --- where torch makes new tensors elsewhere than on the host by default ---------------------------------------------


def test_checkpoints_blocks():
    weight, scale = torch.ones(130, 200).to(torch.float8_e4m3fn), torch.arange(4.0).view(2, 2)
    expected = dequantize_fp8_blocks(weight, scale)
    with torch.device("meta"):
        assert_same(dequantize_fp8_blocks(weight, scale), expected)
