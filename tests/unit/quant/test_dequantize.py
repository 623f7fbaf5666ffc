"""Test dequantization against loops that follow the formats' definitions number by number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe.quant.fp8 import dequantize_fp8_blocks, round_blocks
from ep_moe.quant.microscale import dequantize_mxfp4
from tests.fixtures.dequantize import block_loop, mxfp4_loop


def fp8_matrix(rows: int, columns: int, seed: int = 0):
    """Return a float8 matrix and one scale per 128 x 128 block.

    All scales differ, so that a wrong block is detected.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = (100 * torch.randn(rows, columns, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
    factors = torch.arange(1, 1 + blocks[0] * blocks[1]).view(blocks) * (1 + torch.rand(blocks, generator=generator))
    return weight, factors


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (129, 127), (128, 256), (300, 515)])
def test_fp8_whole_matrix(rows, columns):
    weight, factors = fp8_matrix(rows, columns)
    torch.testing.assert_close(dequantize_fp8_blocks(weight, factors), block_loop(weight, factors), rtol=0, atol=0)


def test_numbers_are_rounded_by_the_scale_of_their_block_however_small_they_are():
    """Tiny numbers are rounded by the scale of their block.

    The lower bound applies to the largest number of a block, and not to the scale, which is 448 times as small.
    """
    x = torch.tensor([0.0, 1e-11, 1e-9, 1.0]).repeat_interleave(128).view(2, 256)
    codes, scale = round_blocks(x)
    assert torch.equal(scale, torch.tensor([[1e-10, 1e-10], [1e-9, 1.0]]) / 448)
    assert codes.float()[:, ::128].tolist() == [[0.0, 44.0], [448.0, 448.0]]


def spans(size):
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda span: span[0] < span[1])


WEIGHT, FACTORS = fp8_matrix(300, 280)
WHOLE = block_loop(WEIGHT, FACTORS)


@settings(max_examples=100, deadline=None)
@given(rows=spans(300), columns=spans(280))
def test_fp8_any_part_of_a_matrix(rows, columns):
    part = WEIGHT[slice(*rows), slice(*columns)]
    scale = FACTORS[rows[0] // 128 : math.ceil(rows[1] / 128), columns[0] // 128 : math.ceil(columns[1] / 128)]
    found = dequantize_fp8_blocks(part, scale, row=rows[0], column=columns[0])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, WHOLE[slice(*rows), slice(*columns)], rtol=0, atol=0)


def test_fp8_every_code_and_other_scale_dtypes():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize_fp8_blocks(codes, torch.tensor([[0.5]], dtype=dtype))
        torch.testing.assert_close(found, codes.float() / 2, rtol=0, atol=0, equal_nan=True)


def same_bits(found, expected):
    assert found.dtype == torch.float32
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    # compare bits, because -0 equals 0
    assert torch.equal(found[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def test_mxfp4_all_codes_at_all_scales():
    """Every byte is right at every scale, including subnormal results, overflow to inf, and NaN."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16)
    same_bits(dequantize_mxfp4(bytes_, scales), mxfp4_loop(bytes_, scales))


def test_mxfp4_low_nibble_comes_first():
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, 3] = 0x72  # codes 2 (1.0) and 7 (6.0)
    found = dequantize_mxfp4(block, torch.tensor([128], dtype=torch.uint8))
    assert found.tolist() == [0.0] * 6 + [2.0, 12.0] + [0.0] * 24


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=0, max_size=3), st.integers(1, 3), st.integers(0, 1000))
def test_mxfp4_any_leading_shape(lead, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*lead, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (*lead, groups), dtype=torch.uint8, generator=generator)
    same_bits(dequantize_mxfp4(blocks, scales), mxfp4_loop(blocks, scales))


def test_mxfp4_equals_transformers():
    """MXFP4 equals transformers' conversion of GPT-OSS checkpoints.

    transformers returns experts transposed, [E, columns, rows].
    """
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (3, 10, 4), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    same_bits(dequantize_mxfp4(blocks, scales), theirs.transpose(1, 2).contiguous())
