"""How large products are cut, on a machine without a GPU. What they give: tests/gpu."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ep_moe import Activation, nvrtc
from ep_moe.experts import turned_gemm
from ep_moe.experts.turned_gemm import CUTS, Turned, cut_for

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(("rows", "most"), [(96, 112), (128, 96), (192, 112), (256, 144), (512, 144), (1024, 192)])
def test_tiles_fill_the_waves(rows, most):
    """32 experts of Qwen3-30B-A3B on 132 multiprocessors: 128 rows of each are 192 tiles, two waves for the work of
    1.5, and half as wide they are three; 256 are two tiles of 128 or 144 each, 384 tiles, three waves."""
    assert cut_for(rows, 32, 6, 132).rows == most


def test_experts_with_few_more_rows_than_average_are_not_cut_again():
    assert cut_for(128, 64, 16, 132) == Turned(144)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_all_cuts_fit(cut):
    assert turned_gemm.shared_bytes(cut, 256) <= nvrtc.SHARED
    assert cut.rows % turned_gemm.STEP == 0


def test_many_rows_have_them_on_the_left():
    pytest.importorskip("triton", reason="Triton is not installed")
    from ep_moe.experts import hopper_gemm
    from ep_moe.experts.hopper_gemm import Tiles, first_cut, second_cut

    with mock.patch.object(hopper_gemm, "multiprocessors", return_value=132):
        w13, w2 = torch.empty(4, 1536, 2048, dtype=BF16), torch.empty(4, 2048, 768, dtype=BF16)
        assert isinstance(first_cut(2048, w13), Turned)
        assert first_cut(2049, w13) == Tiles(256)
        assert isinstance(first_cut(500, torch.empty(4, 256, 7168)), Turned)
        assert isinstance(first_cut(600, torch.empty(4, 256, 7168)), Tiles)
        assert isinstance(second_cut(512, w2), Turned)
        assert second_cut(513, w2) == Tiles(256, group_m=8)
        assert second_cut(513, w2.to(FP8)) == Tiles(128, stages=6)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("activation", ["", *(kind.value for kind in Activation)], ids=lambda name: name or "none")
@pytest.mark.parametrize(("itemsize", "out_bytes"), [(2, 2), (1, 1), (1, 2)], ids=["bf16", "e4m3", "e4m3 to bf16"])
def test_compiles_for_hopper_without_a_word(itemsize, out_bytes, activation):
    """A word would be of products that wait for each other, for want of registers."""
    binary, words = nvrtc.compile_kernels(
        turned_gemm.source(itemsize), turned_gemm.options(itemsize, out_bytes, activation)
    )
    assert binary
    assert words == ""


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_what_does_not_compile_says_where():
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile_kernels("__global__ void kernel() { undefined(); }")
