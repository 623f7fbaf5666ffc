"""Test how large matrix products are tiled, without a GPU. tests/gpu tests their results."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ep_moe.experts.hopper import fused_4bit, gemm_fp8_block, gemm_grouped, gemm_grouped_4bit, gemm_skinny_4bit, step
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.gemm_grouped import CANDIDATES, PINGPONG, Tiles, tiles_for
from ep_moe.experts.hopper.numbers_4bit import Weights, numbers_text
from ep_moe.experts.hopper.scaling import Products, Rows
from ep_moe.experts.hopper.scaling_4bit import Packed
from ep_moe.experts.hopper.scaling_fp8 import BlockScaled
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.types import Activation

ROWS = {"scaled_rows": True}
CHANNELS = ROWS | {"channels": True}
COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)


def chosen(rows: int, experts: int, columns: int, *, gathered: bool = False) -> Tiles:
    """Return the tiles chosen for 132 multiprocessors."""
    w = torch.empty(experts, columns * gemm_grouped.WEIGHTS, 64, device="meta")
    with mock.patch.object(gemm_grouped, "multiprocessors", return_value=132):
        return tiles_for(rows, w, gathered=gathered)


@pytest.mark.parametrize(("rows", "most"), [(96, 112), (128, 96), (192, 112), (256, 144), (512, 144), (1024, 144)])
def test_tiles_fill_the_waves(rows, most):
    """Tiles fill whole waves of multiprocessors where possible.

    Example: 32 experts of Qwen3-30B-A3B. With 128 rows each, one tile per expert gives 192 tiles: two waves for the
    work
    of 1.5. Narrower tiles make three. With 256 rows, two tiles of 128 or 144 each give 384 tiles, three waves.
    """
    assert chosen(rows, 32, 6, gathered=True) == Tiles(most)


def test_experts_with_few_more_rows_than_average_are_not_cut_again():
    assert chosen(128, 64, 16, gathered=True) == Tiles(144)


@pytest.mark.parametrize(
    ("rows", "tiles"), [(48, Tiles(96)), (64, Tiles(96)), (128, PINGPONG), (192, Tiles(112)), (512, PINGPONG)]
)
def test_wide_tiles_of_rows_that_are_not_gathered_take_turns(rows, tiles):
    assert chosen(rows, 64, 8) == tiles
    assert not chosen(rows, 64, 8, gathered=True).pingpong
    assert not chosen(48, 32, 6).pingpong, "few rows, where it would need the fewest steps"


@pytest.mark.parametrize(
    ("pairs", "experts", "columns", "h200", "slower"),
    [
        (65536, 64, 1536, True, False),  # Qwen3-30B-A3B
        (16384, 32, 1536, False, False),
        (16384, 64, 1536, False, False),
        (8192, 32, 1536, False, False),
        (4096, 32, 5760, True, True),  # GPT-OSS-120B
        (16384, 32, 5760, True, True),
    ],
)
def test_rows_are_copied_where_it_was_faster(pairs, experts, columns, h200, slower):
    """slower: the choice on a GPU with seven tenths of an H200's memory rate, as an H100"""
    for rate, wanted in ((4.8e12, h200), (3.35e12, slower)):
        w = mock.Mock(spec=torch.Tensor, shape=(experts, columns, 64), is_cuda=True, __len__=lambda _: experts)
        with mock.patch.multiple(gemm_grouped, multiprocessors=lambda _: 132, memory_rate=lambda _, rate=rate: rate):
            assert gemm_grouped.copies_rows_first(pairs / experts, w) == wanted


@pytest.mark.parametrize("tiles", CANDIDATES, ids=str)
def test_all_tiles_fit(tiles):
    assert gemm_grouped.shared_bytes(tiles, 256, blocks=tiles == gemm_grouped.BLOCKS) <= nvrtc.SHARED
    assert tiles.rows % gemm_grouped.STEP == 0


@pytest.mark.parametrize(
    ("each", "exact", "dtype", "expected"),
    [
        (60, False, torch.bfloat16, "by_gemm_grouped"),
        (100, False, torch.bfloat16, "multiply"),
        (60, True, torch.bfloat16, "multiply"),
        (60, False, torch.float16, "multiply"),
    ],
)
def test_which_kernel_multiplies_with_scales_of_blocks(each, exact, dtype, expected):
    """Exact layers use one kernel for any number of rows, because its order of sums is fixed."""
    w = torch.empty(2, 128, 128, device="meta")
    products = Products(w, w, [], dtype, Activation.SWIGLU, 0.0, 0.0, 0, launch_directly, exact=exact)
    ways = dict.fromkeys(("by_gemm_grouped", "multiply", "prepare_rows", "prepare_sorted_rows", "_plain"), mock.DEFAULT)
    with (
        mock.patch.object(gemm_fp8_block, "has_hopper", return_value=True),
        mock.patch.multiple(BlockScaled, **ways) as called,
    ):
        BlockScaled(products).grouped(Rows(w), mock.MagicMock(), each, 2.0 * each, mock.MagicMock())
    assert [way for way in ("by_gemm_grouped", "multiply") if called[way].called] == [expected]


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("activation", [None, *COMPUTED], ids=lambda kind: kind.value if kind else "none")
@pytest.mark.parametrize(
    ("itemsize", "out_bytes", "scaled"),
    [
        (2, 2, {}),
        (2, 2, {"biased": True}),
        (1, 1, {}),
        (1, 2, {}),
        (1, 2, ROWS),
        (1, 2, CHANNELS),
        (1, 2, CHANNELS | {"biased": True}),
        (1, 2, {"blocks": True}),
        (1, 1, {"pingpong": True}),
        (1, 2, CHANNELS | {"biased": True, "pingpong": True}),
    ],
    ids=[
        "bf16",
        "bf16 with biases",
        "e4m3",
        "e4m3 to bf16",
        "e4m3 by row to bf16",
        "e4m3 by channel to bf16",
        "e4m3 with biases to bf16",
        "e4m3 by block to bf16",
        "e4m3, in turns",
        "e4m3 with biases to bf16, in turns",
    ],
)
def test_compiles_for_hopper_without_a_word(itemsize, out_bytes, scaled, activation):
    """The kernels compile for Hopper without compiler output, and stay small.

    Output would warn of products that wait for each other because registers are short. The kernels of both products of
    a
    layer must fit into a multiprocessor's instruction cache (docs/explanation/performance_log.md).
    """
    form = gemm_grouped.options(itemsize, out_bytes, activation, **scaled)
    text = gemm_grouped.source_text(itemsize, "blocks" if "blocks" in scaled else "")
    binary, words = nvrtc.compile_kernels(text, form)
    assert 0 < len(binary) < (105 if "biased" in scaled else 104 if scaled else 100) * 1024
    assert words == ""


def four_bits(scheme: str, slots: int = 2, rows: int = 256, *, biased: bool = False) -> Weights:
    scaling, words = step.SCALINGS[scheme], 2 if scheme in ("nvfp4a16", "mxint4", "mxint4_fp8") else 1
    data, scale = (torch.empty(slots, 2, *last, dtype=torch.int32) for last in ((rows, 16), (words, rows)))
    bias = torch.empty(slots, rows) if biased else None
    row_scale = torch.empty(slots, rows) if scheme == "mxfp4_fp8" else None
    return Weights(data, scale, scaling.format, scaling.group, None, bias, scheme.endswith("_fp8"), row_scale)


FOUR_BITS = sorted(name for name, scaling in step.SCALINGS.items() if issubclass(scaling, Packed))


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize(("scheme", "tile"), [
    (scheme, tile) for scheme in FOUR_BITS for tile in gemm_grouped_4bit.candidates_of(four_bits(scheme))
], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", [Activation.SWIGLU_CLAMPED, None], ids=["first", "second"])
def test_weights_of_four_bits_compile_for_hopper_without_a_word(activation, tile, scheme):
    w = four_bits(scheme, biased=True)
    how = {"gather": activation is not None and not w.e4m3, "away": activation is None}
    form = gemm_grouped_4bit.form_of(w, tile, activation, **how)
    binary, words = nvrtc.compile_kernels(gemm_grouped_4bit.source_text(tile.rows, w.e4m3), form)
    assert 0 < len(binary) < 100 * 1024
    assert words == ""


@pytest.mark.parametrize("scheme", FOUR_BITS)
def test_programs_of_a_multiprocessor_share_its_memory(scheme):
    """Programs on one multiprocessor share its 228 KiB of shared memory. Each program reserves 1 KiB more."""
    w = four_bits(scheme)
    for tile in gemm_grouped_4bit.candidates_of(w):
        assert gemm_grouped_4bit.shared_bytes(tile, 256, w) <= 228 * 1024 // tile.programs - 1024
        assert tile.stages >= 3


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("scheme", [scheme for scheme in FOUR_BITS if scheme.endswith("_fp8")])
@pytest.mark.parametrize("routes", [8, 32])
def test_the_fewest_e4m3_rows_compile_for_hopper(routes, scheme):
    w, found = four_bits(scheme, biased=True), gemm_skinny_4bit.tiles_for(routes)
    for tile, activation in ((found.first, Activation.SWIGLU_CLAMPED), (found.second, None)):
        form = gemm_skinny_4bit.form_of(w, tile, activation)
        assert nvrtc.compile_kernels(numbers_text("gemm_skinny_4bit.cu"), form)[1] == ""
        assert gemm_skinny_4bit.shared_bytes(tile) <= nvrtc.SHARED // gemm_skinny_4bit.programs(tile)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("scheme", [scheme for scheme in FOUR_BITS if not scheme.endswith("_fp8")])
@pytest.mark.parametrize("activation", [Activation.SWIGLU_CLAMPED, Activation.RELU2], ids=lambda a: a.value)
@pytest.mark.parametrize("rows", [1.0, 8.0])
def test_few_bf16_rows_compile_for_hopper(rows, activation, scheme):
    w = four_bits(scheme, biased=True)
    form = fused_4bit.form_of(w, fused_4bit.tiles_for(64, rows, w, w).first, activation)
    assert nvrtc.compile_kernels(numbers_text("fused_4bit.cu"), form)[1] == ""


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4a16", "int4", "mxint4", "int4_fp8", "mxint4_fp8"])
@pytest.mark.parametrize(("rows", "expected"), [(40, 96), (128, 96), (250, 128), (512, 128), (2000, 128)])
def test_tiles_of_four_bits_hold_an_experts_rows(rows, expected, scheme):
    w = four_bits(scheme, 32, 1536)
    with mock.patch.object(gemm_grouped_4bit, "programs", return_value=132):
        tiles = gemm_grouped_4bit.tiles_for(rows, w)
    assert tiles.rows == expected
    assert gemm_grouped_4bit.shared_bytes(tiles, 256, w) <= nvrtc.SHARED
    assert tiles.stages >= 4


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("mode", [
    "turned", "over_rows", "gather", "gather, biased", "turned, pingpong", "over_rows, pingpong", "pingpong, biased"
])  # fmt: skip
def test_products_of_training_compile_for_hopper_without_a_word(mode):
    form = gemm_grouped.options(2, 2, None, **dict.fromkeys(mode.split(", "), True))
    binary, words = nvrtc.compile_kernels(
        gemm_grouped.source_text(2, mode.split(", ")[0] if mode.startswith(("turned", "over_rows")) else ""), form
    )
    assert 0 < len(binary) < 100 * 1024
    assert words == ""


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_bytes", [2, 4])
def test_gradients_into_buffers_compile_for_hopper_without_a_word(out_bytes, accumulate):
    form = gemm_grouped.options(2, out_bytes, None, over_rows=True, accumulate=accumulate, factor=True, pingpong=True)
    binary, words = nvrtc.compile_kernels(gemm_grouped.source_text(2, "over_rows"), form)
    assert 0 < len(binary) < 100 * 1024
    assert words == ""


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize(("itemsize", "scaled"), [(2, {}), (2, {"biased": True}), (1, {}), (1, CHANNELS)])
def test_rows_written_to_peers_compile_for_hopper_without_a_word(itemsize, scaled):
    form = gemm_grouped.options(itemsize, 2, None, away=True, **scaled)
    binary, words = nvrtc.compile_kernels(gemm_grouped.source_text(itemsize), form)
    assert 0 < len(binary) < 105 * 1024
    assert words == ""


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_what_does_not_compile_says_where():
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile_kernels("__global__ void kernel() { undefined(); }")
