"""Weight layouts of the Hopper mixed-input GEMMs equal FlashInfer's own functions bit for bit."""

import pytest
import torch

from ep_moe.weights.layouts import cutlass_mixed as sm90

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("FlashInfer has these layouts for sm90 alone", allow_module_level=True)
fused_moe = pytest.importorskip("flashinfer.fused_moe", reason="FlashInfer is not installed")

# the first call may have FlashInfer compile its fused_moe_90 module
pytestmark = pytest.mark.timeout(3600)

SHAPES = [(1, 64, 128), (3, 192, 384), (2, 1024, 2944)]
each_shape = pytest.mark.parametrize(("experts", "rows", "cols"), SHAPES)


def random_bytes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


@each_shape
@pytest.mark.parametrize(
    ("kind", "there", "back"),
    [
        ("fp4", sm90.interleave_mxfp4_bf16, sm90.deinterleave_mxfp4_bf16),
        ("int4", sm90.interleave_int4_fp8, sm90.deinterleave_int4_fp8),
        ("fp4_fp8", sm90.interleave_mxfp4_fp8, sm90.deinterleave_mxfp4_fp8),
    ],
)
def test_weights(kind, there, back, experts, rows, cols):
    data = random_bytes(experts, rows, cols // 2)
    expected = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(data, kind)
    assert torch.equal(there(data), expected)
    assert torch.equal(there(data.cpu()), expected.cpu())
    assert torch.equal(back(expected), data)


@each_shape
def test_scales(experts, rows, cols):
    scale = random_bytes(experts, rows, cols // 32)
    expected = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scale).view(torch.int32)
    assert torch.equal(sm90.fold_mxfp4_scale(scale), expected)
    assert torch.equal(sm90.unfold_mxfp4_scale(expected), scale)
    scale = torch.randn(experts, rows, cols // 128, device="cuda").bfloat16()
    expected = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scale, 128)
    assert torch.equal(sm90.fold_int4_scale(scale), expected)
    assert torch.equal(sm90.unfold_int4_scale(expected), scale)


@each_shape
@pytest.mark.parametrize(("low", "high"), [(118, 126), (110, 130), (0, 121)], ids=["narrow", "wide", "with zero"])
def test_humming(low, high, experts, rows, cols):
    data, scale = random_bytes(experts, rows, cols // 2), random_bytes(experts, rows, cols // 32, low=low, high=high)
    weight, offset, residual = fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(data, scale)
    expected = weight, offset.view(torch.int32), residual
    for device in ("cuda", "cpu"):
        for ours, theirs in zip(sm90.fold_humming(data.to(device), scale.to(device)), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.cpu(), theirs.cpu())
    for ours, theirs in zip(
        sm90.unfold_humming(*expected), sm90.unfold_humming(*(t.cpu() for t in expected)), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(sm90.humming_is_exact(data, scale).cpu(), sm90.humming_is_exact(data.cpu(), scale.cpu()))
