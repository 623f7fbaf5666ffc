"""The Triton forms of `fp8_tensor_rows` against the torch forms, which define them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.experts import fp8_tensor_rows
from tests.test_fp8_block_kernels import DEVICE
from tests.test_fp8_tensor_rows import E4M3, empty_scales, scales_and_rows

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts import fp8_tensor_rows_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1, 8), (3, 1500), (0, 64)])
def test_numbers(size, dtype):
    """Exact ones: the interpreter (3.6) loses the carry when a mantissa rounds up to the next power of two."""
    generator = torch.Generator().manual_seed(sum(size))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(E4M3)
    x = (codes.float() / 4).to(dtype)
    if size[0] > 1:
        x[1, 700:705] = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4, -113])
    found = torch.full(size, 1.0, device=DEVICE).to(E4M3)
    fp8_tensor_rows_triton.round_by(x.to(DEVICE), 0.25, found)
    wanted = fp8_tensor_rows.round_by(x, 0.25)
    assert torch.equal(found.cpu().float().nan_to_num(999.0), wanted.float().nan_to_num(999.0))


def test_nothing_beyond_the_end_is_written():
    found = torch.full((2048,), 1.0, device=DEVICE).to(E4M3)
    fp8_tensor_rows_triton.round_by(torch.full((1030,), 3.0, device=DEVICE), 1.0, found[:1030])
    assert found.float().tolist() == [3.0] * 1030 + [1.0] * 1018


def test_scales():
    _, inputs, w13, w2 = scales_and_rows()
    wanted, found = empty_scales(), empty_scales(DEVICE)
    fp8_tensor_rows.fill_scales(0.0137, w13, w2, inputs.second, wanted)
    there = (tensor.to(DEVICE) for tensor in (w13, w2, inputs.second))
    fp8_tensor_rows_triton.fill_scales(0.0137, *there, found)
    for name, value in vars(wanted).items():
        assert torch.equal(getattr(found, name).cpu(), value), name
