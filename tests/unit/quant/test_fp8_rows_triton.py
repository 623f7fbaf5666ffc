"""Test the Triton kernels of `fp8_rows` against the torch functions, which define them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.quant import fp8
from tests.fixtures.fp8_block_kernels import DEVICE, E4M3

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts.hopper.gemm_fp8_block import quantize_rows
from ep_moe.quant.kernels import round_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1, 8), (3, 1500), (0, 64)])
def test_numbers(size, dtype):
    """`launch_round_by` equals `round_by` for numbers that E4M3 represents.

    The interpreter (Triton 3.6) loses the carry when a mantissa rounds up to the next power of two.
    """
    generator = torch.Generator().manual_seed(sum(size))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(E4M3)
    x = (codes.float() / 4).to(dtype)
    if size[0] > 1:
        x[1, 700:705] = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4, -113])
    found = torch.full(size, 1.0, device=DEVICE).to(E4M3)
    fp8.launch_round_by(x.to(DEVICE), 0.25, found)
    wanted = fp8.round_by(x, 0.25)
    assert torch.equal(found.cpu().float().nan_to_num(999.0), wanted.float().nan_to_num(999.0))


def test_nothing_beyond_the_end_is_written():
    found = torch.full((2048,), 1.0, device=DEVICE).to(E4M3)
    fp8.launch_round_by(torch.full((1030,), 3.0, device=DEVICE), 1.0, found[:1030])
    assert found.float().tolist() == [3.0] * 1030 + [1.0] * 1018


@pytest.mark.parametrize("scale", [1, 2])
def test_a_scale_that_is_a_whole_number(scale):
    found = torch.zeros(8, device=DEVICE).to(E4M3)
    fp8.launch_round_by(torch.full((8,), 3.0, device=DEVICE), scale, found)
    assert found.float().tolist() == [3 / scale] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "block"), [
    ((1, 128), 128), ((7, 1920), 128), ((0, 128), 128), ((7, 1920), 1920), ((5, 7168), 7168), ((4, 384), 384),
])  # fmt: skip
def test_blocks(size, block, dtype):
    """`launch_round_blocks` equals `round_blocks` for numbers that E4M3 represents.

    Each block of E4M3 numbers contains 448, so its scale is the factor that the test applied.
    """
    generator = torch.Generator().manual_seed(sum(size))
    codes = torch.randint(0, 0x7F, size, dtype=torch.uint8, generator=generator)
    x = codes.view(E4M3).float().unflatten(-1, (-1, block))
    x[..., 5] = 448
    x = (x * torch.randint(-6, 7, (*x.shape[:-1], 1), generator=generator).float().exp2()).flatten(-2).to(dtype)
    x[3:4] = 0
    rows, blocks = size[0], size[1] // block
    found = torch.full((rows + 1, size[1]), 5.0, device=DEVICE).to(E4M3)
    scale = torch.full((rows + 1, blocks), 7.0, device=DEVICE)
    fp8.launch_round_blocks(x.to(DEVICE), found[:rows], scale[:rows])
    wanted, wanted_scale = fp8.round_blocks(x, block)
    assert torch.equal(found[:rows].cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale[:rows].cpu(), wanted_scale)
    assert (found[rows:].float() == 5).all(), "beyond the end"
    assert (scale[rows:] == 7).all(), "beyond the end"


@pytest.mark.parametrize(("kernel", "scales", "dtype"), [
    (quantize_rows, 5, torch.bfloat16), (quantize_rows, 5, torch.float16), (round_rows, 1, torch.bfloat16),
])  # fmt: skip
def test_the_bits_that_kernels_round_to(kernel, scales, dtype):
    """Quantizing kernels round to the bits of `launch_round_blocks`. scales: of a row of 640."""
    x = torch.randn(9, 640, generator=torch.Generator().manual_seed(0)).mul(torch.logspace(-6, 2, 640)).to(dtype)
    x[2], x[3, 130], x[4, 5], x[5, 300] = 0, torch.nan, 3e4, torch.inf
    x = x.to(DEVICE)
    found, wanted = (torch.full(x.shape, 1.0, device=DEVICE).to(E4M3) for _ in range(2))
    scale, wanted_scale = (torch.full((9, scales), 7.0, device=DEVICE) for _ in range(2))
    fp8.launch_round_blocks(x, found, scale)
    kernel(x, wanted, wanted_scale)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))
