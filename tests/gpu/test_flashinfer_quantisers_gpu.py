"""Block-scaled formats and layouts equal FlashInfer's own functions on a GPU bit for bit.

FlashInfer's quantizers compile to nothing below compute capability 10.0 (`__CUDA_ARCH__ >= 1000`). Below that, the
swizzle and the reciprocal that they use are still compared.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8_MAX
from ep_moe.quant.microscale import E2M1_MAX, NVFP4_RANGE, quantize_mxfp8, quantize_nvfp4, unpack_nibbles
from ep_moe.weights.layouts.base import ScaleLayout, arrange

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
quantization = pytest.importorskip("flashinfer.quantization", reason="FlashInfer is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed")
tl, SfLayout = triton.language, quantization.SfLayout

# the first call compiles FlashInfer's module
pytestmark = pytest.mark.timeout(3600)
blackwell = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (10, 0),
    reason="FlashInfer has these quantizers from compute capability 10.0 on",
)

LAYOUTS = {
    ScaleLayout.LINEAR: SfLayout.layout_linear,
    ScaleLayout.SWIZZLED_128X4: SfLayout.layout_128x4,
    ScaleLayout.SWIZZLED_8X4: SfLayout.layout_8x4,
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def rows(dtype: torch.dtype, count: int = 257, columns: int = 1024) -> Tensor:
    """Return normal numbers whose magnitudes differ by row and block, with zeros."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(count, columns, device="cuda", generator=generator)
    x *= torch.exp2(
        torch.randint(-12, 3, (count, columns // 32), device="cuda", generator=generator).float()
    ).repeat_interleave(32, 1)
    x[3] = 0
    return x.to(dtype)


def steps_from_a_tie(exact: Tensor, midpoints: Tensor) -> Tensor:
    """Return whether a number is within 2**-21 of a midpoint, relative to itself.

    Then the error of an approximate reciprocal may decide the rounding.
    """
    distance = (exact.abs().unsqueeze(-1) - midpoints).abs().amin(-1)
    return distance <= exact.abs() * 2.0**-21


E2M1_MIDDLE = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)


@blackwell
@each_dtype
@each_layout
def test_nvfp4(layout, dtype):
    x = rows(dtype)
    global_scale = x.float().abs().max() / NVFP4_RANGE
    data, scale = quantization.nvfp4_quantize(
        x, (1 / global_scale).view(1), sfLayout=LAYOUTS[layout], nvfp4_4over6=None
    )
    ours, own = quantize_nvfp4(x, global_scale)
    wanted = arrange(own.view(torch.uint8), layout)
    assert torch.equal(scale.view(torch.uint8).flatten()[: wanted.numel()], wanted.flatten())
    factor = own.double().repeat_interleave(16, 1) * global_scale.double()
    exact = torch.where(factor > 0, x.double() / factor, 0.0)
    differ = unpack_nibbles(data.view(torch.uint8)) != unpack_nibbles(ours)
    differ &= factor > 0  # codes under a scale of zero mean zero
    print(f"NVFP4 {dtype}: {int(differ.sum())} of {differ.numel()} codes differ")
    assert not (differ & ~steps_from_a_tie(exact, E2M1_MIDDLE.cuda())).any()


@blackwell
@each_dtype
@each_layout
def test_mxfp8(layout, dtype):
    x = rows(dtype)
    data, scale = quantization.mxfp8_quantize(x, sf_swizzle_layout=LAYOUTS[layout])
    ours, own = quantize_mxfp8(x)
    wanted = arrange(own, layout)
    assert torch.equal(scale.view(torch.uint8).flatten()[: wanted.numel()], wanted.flatten())
    assert torch.equal(data.view(torch.uint8), ours.view(torch.uint8))  # scales are powers of two, so no tie moves


@pytest.mark.parametrize("shape", [(128, 4), (257, 64), (3, 256, 12), (2, 100, 6)], ids=str)
def test_swizzle(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    theirs = quantization.block_scale_interleave(scales)
    assert torch.equal(theirs.view(-1), arrange(scales, ScaleLayout.SWIZZLED_128X4).flatten())


@triton.jit
def reciprocal(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    value = tl.load(x + at)
    found = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    tl.store(out + at, found)


def test_approximate_reciprocals():
    """`rcp.approx.ftz.f32` is off by at most the last bit.

    - Of 6 and 448 it is the nearest number, so scales are equal.
    - Of powers of two it is exact, so MXFP8 is equal bit for bit.
    """
    constants = torch.tensor([E2M1_MAX, FP8_MAX], device="cuda")
    powers = torch.exp2(torch.arange(-125.0, 126.0, device="cuda"))
    others = torch.rand(4096 - 2 - len(powers), device="cuda") + 0.5
    x = torch.cat([constants, powers, others])
    out = torch.empty_like(x)
    reciprocal[(1,)](x, out, len(x))
    exact = 1 / x
    assert torch.equal(out[: 2 + len(powers)], exact[: 2 + len(powers)])
    assert (out.view(torch.int32) - exact.view(torch.int32)).abs().max() <= 1
