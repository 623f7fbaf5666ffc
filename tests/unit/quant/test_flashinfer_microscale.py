"""Test block-scaled formats and scale layouts against FlashInfer's Python and sources, wherever it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ep_moe.quant.microscale import dequantize_mxfp4, dequantize_nvfp4
from ep_moe.weights.layouts.base import ScaleLayout, arrange

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

import flashinfer
from flashinfer.quantization import fp4_quantization

KERNELS = Path(flashinfer.__file__).parent / "data/csrc/nv_internal/tensorrt_llm/kernels"


def scales(*shape: int) -> torch.Tensor:
    return torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 12), (384, 8)])
def test_mma_layout(rows, blocks):
    pytest.importorskip("cutlass", reason="CuteDSL is not installed")
    from flashinfer.cute_dsl.utils import convert_sf_from_mma_layout, convert_sf_to_mma_layout

    given = scales(3, rows, blocks)
    swizzled = arrange(given, ScaleLayout.SWIZZLED_128X4)
    theirs = convert_sf_to_mma_layout(swizzled.flatten(0, 1), m=rows, k=16 * blocks, num_groups=3)
    ours = arrange(given, ScaleLayout.MMA)
    assert torch.equal(ours, theirs)
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    back = convert_sf_from_mma_layout(ours, m=rows, k=16 * blocks, num_groups=3)
    assert torch.equal(back, swizzled.flatten(0, 1))


def their_offset(function: str, row: int, block: int, blocks: int) -> int:
    """Return the offset of a scale by evaluating the C++ function that FlashInfer's quantizers call."""
    source = (KERNELS / "quantization_utils.cuh").read_text()
    (body,) = re.findall(
        rf"int64_t {function}\(int mIdx, int kIdx, int (\w+)\) \{{(.*?)\n\}}", source, re.DOTALL
    )  # fmt: skip
    known = {"mIdx": row, "kIdx": block, body[0]: blocks}
    code = re.sub(r"//.*", "", body[1]).replace("const ", "")
    for statement in (" ".join(part.split()) for part in code.split(";")):
        if found := re.fullmatch(r"(?:int32_t|int64_t) (\w+) = (.*)", statement):
            assert re.fullmatch(r"[\w\s()*/%+-]+", found[2]), found[2]
            known[found[1]] = eval(found[2].replace("/", "//"), {"__builtins__": {}}, known)
    return known["SFOffset"]


@pytest.mark.parametrize(
    ("layout", "function", "tile"),
    [
        (ScaleLayout.SWIZZLED_128X4, "get_sf_out_offset_128x4", 128),
        (ScaleLayout.SWIZZLED_8X4, "get_sf_out_offset_8x4", 8),
    ],
)
def test_swizzles_by_their_index_functions(layout, function, tile):
    rows, blocks = 2 * tile - 3, 7
    given = scales(rows, blocks) + 1
    stored = arrange(given, layout).flatten()
    assert len(stored) == 2 * tile * 8
    for row in range(0, rows, 5):
        for block in range(blocks):
            assert stored[their_offset(function, row, block, blocks)] == given[row, block]


@pytest.mark.parametrize("block", [16, 32])
def test_their_dequantiser_agrees(block):
    """FlashInfer's `_e2m1_and_ufp8sf_scale_to_float_cpu` agrees for every byte under many scales."""
    data = torch.arange(256, dtype=torch.uint8).repeat(4).view(16, 64)
    scale = scales(16, 128 // block) + (64 if block == 32 else 0)
    global_scale = torch.tensor([0.0123])
    theirs = fp4_quantization._e2m1_and_ufp8sf_scale_to_float_cpu(
        data, scale, global_scale if block == 16 else None, block, 1 if block == 16 else 0, False
    )
    if block == 16:
        ours = dequantize_nvfp4(data, scale.view(torch.float8_e4m3fn), global_scale[0])
        torch.testing.assert_close(ours, theirs, rtol=2.0**-22, atol=0)  # FlashInfer multiplies in another order
    else:
        assert torch.equal(dequantize_mxfp4(data, scale), theirs)


def test_the_arithmetic_that_the_quantisers_follow():
    """FlashInfer's kernels still contain the statements that `microscale` repeats.

    They are in `cvt_warp_fp16_to_fp4` and `cvt_warp_fp16_to_mxfp8`.
    """
    source = re.sub(r"\s+", " ", (KERNELS / "quantization_utils.cuh").read_text())
    fp4 = source[source.index("cvt_warp_fp16_to_fp4(") : source.index("cvt_warp_fp16_to_fp4_with_vec_max(")]
    assert "auto SFValue = SFScaleVal * (vecMax * reciprocal_approximate_ftz(6.0f));" in fp4
    assert "? reciprocal_approximate_ftz(SFValue * reciprocal_approximate_ftz(SFScaleVal)) : 0.0f;" in fp4
    assert "fp2Vals[i].x *= outputScale;" in fp4
    mxfp8 = source[source.index("cvt_warp_fp16_to_mxfp8(") :]
    assert "float SFValue = vecMax * reciprocal_approximate_ftz(448.0f);" in mxfp8
    assert "__nv_cvt_float_to_e8m0(SFValue, __NV_SATFINITE, cudaRoundPosInf);" in mxfp8
    assert "outputScale = SFValue != 0.f ? reciprocal_approximate_ftz(SFValue) : 0.0f;" in mxfp8
