"""Triton's rounding of rows to NVFP4 and MXFP8 equals the definition in plain torch bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.quant import kernels
from ep_moe.quant.microscale import dequantize_mxfp8, dequantize_nvfp4, quantize_mxfp8, quantize_nvfp4

pytestmark = pytest.mark.timeout(300)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SIZES = [(1, 64), (257, 1024), (33, 7168), (4, 2880), (0, 128)]


def rows(count: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return blocks of all magnitudes of the dtype, zeros, and E2M1 midpoints of both signs."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(-40, 20, (count, hidden // 32), generator=generator).float()
    x = torch.randn(count, hidden, generator=generator) * torch.exp2(sizes).repeat_interleave(32, 1)
    x[::7, :32] = 0
    middles = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[1::5, -32:] = torch.cat([middles, -middles, middles, -middles])
    return x.clamp(-60000, 60000).to(dtype).cuda()


def same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@each_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("global_scale", [1.0, 0.0021, 3e-8])
def test_nvfp4(global_scale, size, dtype):
    x, factor = rows(*size, dtype), torch.tensor(global_scale, device="cuda")
    data = torch.full((size[0], size[1] // 2), 255, dtype=torch.uint8, device="cuda")
    scale = torch.empty(size[0], size[1] // 16, dtype=torch.float8_e4m3fn, device="cuda")
    kernels.nvfp4_rows(x, factor, data, scale)
    wanted, wanted_scale = quantize_nvfp4(x.cpu(), factor.cpu())
    same(scale.cpu(), wanted_scale)
    same(data.cpu(), wanted)


@each_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mxfp8(size, dtype):
    x = rows(*size, dtype)
    data = torch.empty(size, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.full((size[0], size[1] // 32), 255, dtype=torch.uint8, device="cuda")
    kernels.mxfp8_rows(x, data, scale)
    wanted, wanted_scale = quantize_mxfp8(x.cpu())
    same(scale.cpu(), wanted_scale)
    same(data.cpu(), wanted)


def test_nothing_is_allocated():
    x = rows(64, 1024, torch.bfloat16)
    data, scale = torch.empty(64, 512, dtype=torch.uint8, device="cuda"), torch.empty(64, 64, device="cuda")
    scale, factor = scale.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    kernels.nvfp4_rows(x, factor, data, scale)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kernels.nvfp4_rows(x, factor, data, scale)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_nan_stays():
    """NaN stays: in NVFP4 in its whole block of 16, through the scale, in MXFP8 in its place."""
    x = torch.randn(3, 128)
    x[0, 5] = x[1, 100] = torch.nan
    x[1, 96:100] = x[2, :32] = 0
    found = torch.empty(3, 64, dtype=torch.uint8).cuda(), torch.empty(3, 8, dtype=torch.float8_e4m3fn).cuda()
    factor = torch.tensor(0.002)
    kernels.nvfp4_rows(x.cuda(), factor.cuda(), *found)
    back = dequantize_nvfp4(*(part.cpu() for part in found), factor)
    wanted = dequantize_nvfp4(*quantize_nvfp4(x, factor), factor)
    torch.testing.assert_close(back, wanted, rtol=0, atol=0, equal_nan=True)
    assert back.isnan().sum() == 32
    found = torch.empty(3, 128, dtype=torch.float8_e4m3fn).cuda(), torch.empty(3, 4, dtype=torch.uint8).cuda()
    kernels.mxfp8_rows(x.cuda(), *found)
    back = dequantize_mxfp8(*(part.cpu() for part in found))
    assert torch.equal(back.isnan(), x.isnan())
