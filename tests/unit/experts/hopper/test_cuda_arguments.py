"""Test the launch arguments of CUDA matrix products against the parameters that the kernels declare. None is run."""

from __future__ import annotations

import dataclasses
import math
import re
from ctypes import c_float, c_int, c_void_p
from unittest import mock

import pytest
import torch

from ep_moe.experts.hopper import fused_4bit, gemm_grouped, gemm_grouped_4bit, gemm_skinny_4bit
from ep_moe.experts.hopper.gemm_grouped import PINGPONG
from ep_moe.experts.hopper.numbers_4bit import Weights, numbers_text
from ep_moe.quant.kernels import BlockScales, MatrixScales, RowScales
from ep_moe.runtime import nvrtc
from ep_moe.types import Activation

KINDS = {c_int: "int", c_float: "float", c_void_p: "pointer", None: "map"}
SLOTS, HIDDEN, INNER, ROWS = 3, 256, 128, 6


def declared(text: str, name: str) -> list[tuple[str, str]]:
    """Return the kinds and names of a kernel's parameters."""
    given = re.search(rf"\b{name}\((const [^{{]*?)\)\s*\{{", text, re.DOTALL)
    found = []
    for one in given[1].split(","):
        kind = "pointer" if "*" in one else "map" if "Map" in one else "float" if "float" in one else "int"
        found.append((kind, one.split()[-1].lstrip("*&")))
    return found


def launched(run) -> tuple[dict[str, object], int, int]:
    """Return a launch: its arguments by parameter name, the number of programs, and bytes of shared memory.

    The arguments include the compile-time definitions, the products in the source, and the threads of a program.
    """
    made = {}

    def kernel(text, name, form, device):
        assert device is torch.device("cpu").index
        defined = [one.removeprefix("-D").partition("=") for one in form]
        made.update(text=text, name=name, defined={name: int(value or 1) for name, _, value in defined})

    with (
        mock.patch.object(nvrtc, "kernel", kernel),
        mock.patch.object(nvrtc, "Kernel", lambda function, *how, cooperative=False: (*how, cooperative)),
        mock.patch.object(nvrtc, "Arguments", list),
        mock.patch.object(nvrtc, "tensor_map", lambda *given: given),
        mock.patch.object(gemm_grouped, "multiprocessors", return_value=132),
    ):
        run(lambda kernel, grid, arguments: made.update(kernel=kernel, grid=grid, arguments=arguments))
    parameters = declared(made["text"], made["name"])
    assert [KINDS[kind] for _, kind in made["arguments"]] == [kind for kind, _ in parameters]
    named = {name: value for (value, _), (_, name) in zip(made["arguments"], parameters, strict=True)}
    device, threads, shared, named["cooperative"] = made["kernel"]
    assert device == torch.device("cpu")
    named |= made["defined"] | {"threads": threads, "products": products(made["text"])}
    return named, made["grid"][0], shared


def products(text: str) -> dict[tuple[str, str], list[int]]:
    """Return the widths of the products in a source text, by kind of numbers and order of operands."""
    found = {}
    for width, depth, kind, named, order, sums, read in re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\S+) (.*?), more, 1, 1(.*?);}\"\s*: (.*?) : (.*?)\);",
        text,
    ):
        numbers = [int(number) for number in re.findall(r"%(\d+)", named)]
        given = sums.split(",") + read.split(",")
        assert numbers == list(range(len(given) - 1)), "sums, weights, and b; the last is whether sums were begun"
        assert sums.split(", ") == [f'"+f"(sum[{number}])' for number in range(int(width) // 2)]
        found.setdefault((f"{kind} {depth}", order), []).append(int(width))
    return found


def weights(rows: int, columns: int, *, e4m3: bool, int4: bool) -> Weights:
    blocks = -(-columns // 128)
    return Weights(
        torch.zeros(SLOTS, blocks, rows, 16, dtype=torch.int32), torch.zeros(SLOTS, blocks, 1, rows, dtype=torch.int32),
        "int4" if int4 else "mxfp4", 32, None if e4m3 or int4 else torch.ones(SLOTS), torch.zeros(SLOTS, rows), e4m3,
        torch.ones(SLOTS, rows) if e4m3 and not int4 else None,
    )  # fmt: skip


def rows_of(columns: int, e4m3: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.zeros(ROWS, columns, dtype=torch.float8_e4m3fn if e4m3 else torch.bfloat16)
    return x, torch.ones(ROWS) if e4m3 else None


def checked(named: dict[str, object], tensors: dict[str, torch.Tensor | None], numbers: dict[str, float]) -> None:
    for name, tensor in tensors.items():
        assert named[name] == (0 if tensor is None else tensor.data_ptr()), name
    assert {name: named[name] for name in numbers} == numbers


@pytest.mark.parametrize("int4", [False, True])
def test_the_fewest_rows_of_four_bits(int4):
    inner = 8 * INNER
    w, (x, scale) = weights(2 * inner, HIDDEN, e4m3=True, int4=int4), rows_of(HIDDEN, True)
    ids, routing = torch.zeros(ROWS, 2, dtype=torch.int64), torch.ones(ROWS, 2)
    out, tile = torch.empty(12, inner), gemm_skinny_4bit.tiles_for(ids.numel()).first
    named, programs, shared = launched(
        lambda launch: gemm_skinny_4bit.product(
            x, ids, routing, 7, w, out, tile, x_scale=scale, activation=Activation.SWIGLU, alpha=1.5, limit=2.5,
            gather=True, launch=launch,
        )
    )  # fmt: skip
    tensors = {"x": x, "ids": ids, "routing": routing, "codes": w.data, "scales": w.scale, "bias": w.bias, "out": out}
    tensors |= {"x_scale": scale, "row_scale": w.row_scale}
    numbers = {"id_bytes": 8, "base": 7, "pairs": 12, "experts": SLOTS, "depth": HIDDEN, "rows": 2 * inner}
    numbers |= {"width": inner, "blocks": 2, "every": 2, "alpha": 1.5, "limit": 2.5}
    numbers |= {"WARPS": tile.warps, "SPLIT": tile.split, "AHEAD": tile.stages, "GATED": 1, "SWIGLU": 1, "BIASED": 1}
    numbers |= {"threads": 32 * tile.warps, "FP8": 1, "INT4": int4, "GROUP": 32, "WORDS": 1}
    checked(named, tensors, numbers)
    assert programs == SLOTS * (inner // (8 * tile.warps // tile.split))
    chunk = 8 * (tile.stages * tile.split * 128 * x.element_size() + 16)  # of 8 rows
    assert shared == 2 * 8 * 4 + 8 * 20 + 2 * chunk


def test_as_many_routes_of_four_bits_as_there_may_be():
    """The largest number of routes is supported for the product after an activation.

    It has a row per route, and none of the optional tensors.
    """
    w = dataclasses.replace(weights(INNER, HIDDEN, e4m3=True, int4=True), bias=None, row_scale=None)
    x, ids, out = torch.zeros(32, HIDDEN), torch.zeros(16, 2, dtype=torch.int32), torch.empty(32, INNER)
    tile, scale = gemm_skinny_4bit.tiles_for(32).second, torch.ones(32)
    named, _, _ = launched(
        lambda launch: gemm_skinny_4bit.product(x, ids, None, 0, w, out, tile, x_scale=scale, launch=launch)
    )
    tensors = dict.fromkeys(("routing", "bias", "row_scale")) | {"x": x, "x_scale": scale, "out": out}
    numbers = {"id_bytes": 4, "pairs": 32, "rows": INNER, "width": INNER, "every": 1, "GATED": 0, "BIASED": 0}
    checked(named, tensors, numbers)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("rows", [1.0, 8.0])
def test_both_products_of_few_bf16_rows(rows, int4, gated):
    w13 = weights(INNER * (1 + gated), HIDDEN, e4m3=False, int4=int4)
    w2, (x, _) = weights(HIDDEN, INNER, e4m3=False, int4=int4), rows_of(HIDDEN, False)
    ids, routing = torch.zeros(ROWS, 2, dtype=torch.int64), torch.ones(ROWS, 2)
    act, y = torch.empty(12, INNER).bfloat16(), torch.empty(12, HIDDEN).bfloat16()
    tile = fused_4bit.tiles_for(12, rows, w13, w2).first
    activation = Activation.SWIGLU if gated else Activation.RELU2
    named, programs, shared = launched(
        lambda launch: fused_4bit.products(
            x, ids, routing, 7, w13, w2, act, y, tile, activation=activation, alpha=1.5, limit=2.5, launch=launch
        )
    )
    tensors = {"x": x, "ids": ids, "routing": routing, "act": act, "y": y}
    for number, w in ((13, w13), (2, w2)):
        of = {"codes": w.data, "scales": w.scale, "factor": w.factor, "bias": w.bias}
        tensors |= {f"{name}{number}": tensor for name, tensor in of.items()}
    height = 8 if rows == 1.0 else 16
    most = min(12, SLOTS + 12 // height)
    numbers = {"id_bytes": 8, "base": 7, "pairs": 12, "experts": SLOTS, "most_tiles": most, "every": 2}
    numbers |= {"hidden": HIDDEN, "inner": INNER, "unit": 2.0**32, "alpha": 1.5, "limit": 2.5}
    numbers |= {"GATED": gated, activation.value.upper(): 1}
    numbers |= {"WARPS": 24, "AHEAD": 1, "ROWS": height, "FP8": 0, "INT4": int4, "threads": 768, "cooperative": True}
    checked(named, tensors, numbers)
    assert (programs, shared) == (132, nvrtc.SHARED)
    # the lists of routes and tiles, up to a multiple of 128 bytes, and the sums of the other warps
    head = 16 + 4 * (SLOTS + 1) + 2 * 4 * 12 + 12 * most
    left = shared - -(-head // 128) * 128 - 23 * height // 8 * 512
    assert (named["room13"], named["room2"]) == (left // (2 * HIDDEN + 16), left // (2 * INNER + 16))


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("int4", [False, True])
def test_many_rows_of_four_bits(int4, e4m3):
    w, (a, scale) = weights(HIDDEN, INNER + 64, e4m3=e4m3, int4=int4), rows_of(INNER + 64, e4m3)
    ends, out, away = torch.zeros(SLOTS, dtype=torch.int32), torch.empty(ROWS, HIDDEN), torch.zeros(ROWS).long()
    for tile in gemm_grouped_4bit.candidates_of(w):
        named, programs, shared = launched(
            lambda launch, tile=tile: gemm_grouped_4bit.product(
                a, w, ends, out, tile, a_scale=scale, spare_sms=32, addresses=away, launch=launch
            )
        )
        by_row = w.row_scale if w.row_scale is not None else w.factor
        tensors = {"out": out, "ends": ends, "a_scale": scale, "b_scale": by_row, "bias": w.bias, "addresses": away}
        tensors |= {"codes": w.data, "code_scales": w.scale, "gathered": None, "source": None, "out_scale": None}
        numbers = {"experts": SLOTS, "all_rows": ROWS, "n": HIDDEN, "k_blocks": 2 if e4m3 else 3, "most": tile.rows}
        numbers |= {"stages": tile.stages, "b_step": 1 if w.row_scale is None else HIDDEN}
        numbers |= {"FOUR_BITS": 1, "SCALED_ROWS": e4m3, "FACTOR": not e4m3, "CHANNELS": w.row_scale is not None}
        numbers |= {"BIASED": 1, "AWAY": 1, "GATHER": 0, "GATED": 0, "MOST": tile.rows, "PROGRAMS": tile.programs}
        numbers |= {"FP8": e4m3, "INT4": int4, "GROUP": 32, "WORDS": 1, "threads": 384}
        checked(named, tensors, numbers)
        assert tile.rows % named["ROUND"] == named["ROUND"] % 16 == 0
        assert named["a_factor"] == (1.0 if e4m3 else 2.0**32)
        assert programs == 100 * tile.programs
        stage = tile.rows * 128 * (1 if e4m3 else 2) + 256 * (64 + 4) + 2 * 8  # rows, codes with scales, barriers
        assert shared == tile.stages * stage + 2 * 2 * 4096 + 8 * 20 + 4 * (2 * SLOTS + 1)
        box = 128 // a.element_size()
        assert named["wide"] == (a.data_ptr(), a.element_size(), (INNER + 64, ROWS), (INNER + 64,), (box, 64))
        assert named["step"][-1] == (box, 16)
        how = ("e4m3.e4m3 32", "") if e4m3 else ("bf16.bf16 16", ", 0")
        assert named["products"] == {how: list(range(16, tile.rows + 1, 16))}


def test_rows_of_four_bits_that_are_gathered():
    w, a = weights(2 * HIDDEN, INNER, e4m3=False, int4=False), torch.zeros(2 * ROWS, INNER).bfloat16()
    w = dataclasses.replace(w, bias=None)
    ends, out, source = torch.zeros(SLOTS).int(), torch.empty(ROWS, HIDDEN), torch.arange(ROWS).int()
    tile = gemm_grouped_4bit.candidates_of(w)[0]
    named, _, _ = launched(
        lambda launch: gemm_grouped_4bit.product(
            a, w, ends, out, tile, activation=Activation.SWIGLU, alpha=1.5, limit=2.5, source=source, launch=launch
        )
    )
    numbers = {"all_rows": ROWS, "n": HIDDEN, "row_bytes": 2 * INNER, "alpha": 1.5, "limit": 2.5}
    numbers |= {"GATHER": 1, "AWAY": 0, "GATED": 1, "SWIGLU": 1, "BIASED": 0}
    checked(named, {"bias": None, "gathered": a, "source": source, "addresses": None}, numbers)
    assert named["step"][2] == (INNER, 2 * ROWS)


EACH = torch.ones(SLOTS)
SCALES = {  # kind -> scales, and the strides of row scales and of weight scales
    "none": (None, 0, 1),
    "one of rows": (MatrixScales(0.5, EACH), 0, 1),
    "of experts": (MatrixScales(EACH.clone(), EACH, EACH.clone()), 1, 1),
    "of each row": (RowScales(torch.ones(ROWS), torch.ones(SLOTS, 2 * INNER)), 0, 2 * INNER),
    "of blocks": (BlockScales(torch.ones(2, ROWS).T, torch.ones(SLOTS, 2, 2)), 1, ROWS),
}


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(
    ("kind", "tiles"),
    [
        (kind, tiles)
        for kind in SCALES
        for tiles in ([gemm_grouped.BLOCKS] if kind == "of blocks" else [gemm_grouped.CANDIDATES[0], PINGPONG])
    ],
    ids=str,
)
def test_rows_of_experts(kind, tiles, gather, activation):
    scales, a_step, b_step = SCALES[kind]
    a, bias = rows_of(HIDDEN, scales is not None)[0].repeat(1 + gather, 1), torch.zeros(SLOTS, 2 * INNER)
    b, out_scale = torch.zeros(SLOTS, 2 * INNER, HIDDEN, dtype=a.dtype), getattr(scales, "out", None)
    width = INNER if activation.gated else 2 * INNER
    out = torch.empty(ROWS, width, dtype=torch.bfloat16 if out_scale is None else a.dtype)
    ends, away = torch.zeros(SLOTS).int(), torch.zeros(ROWS).long()
    source = torch.arange(ROWS).int() if gather else None
    named, programs, shared = launched(
        lambda launch: gemm_grouped.grouped_gemm(
            a, b, ends, out, tiles, activation=activation, alpha=1.5, limit=2.5, spare_sms=32, scales=scales,
            source=source, bias=bias, addresses=away, launch=launch,
        )
    )  # fmt: skip
    given, itemsize = getattr(scales, "rows", None), a.element_size()
    tensors = {"out": out, "ends": ends, "bias": bias, "addresses": away, "codes": None, "code_scales": None}
    tensors |= {"gathered": a if gather else None, "source": source, "out_scale": out_scale}
    tensors |= {"a_scale": None if isinstance(given, float) else given, "b_scale": getattr(scales, "weights", None)}
    numbers = {"experts": SLOTS, "all_rows": ROWS, "n": width, "k_blocks": HIDDEN * itemsize // 128}
    numbers |= {"most": tiles.rows, "stages": tiles.stages, "alpha": 1.5, "limit": 2.5}
    numbers |= {"units": 2 * INNER // (8 * (3 - out.element_size())), "row_bytes": HIDDEN * itemsize * gather}
    numbers |= {"a_factor": given if isinstance(given, float) else 1.0, "a_step": a_step, "b_step": b_step}
    numbers |= {"IN_BYTES": itemsize, "OUT_BYTES": out.element_size(), "BIASED": 1, "AWAY": 1}
    numbers |= {"GATED": activation.gated, activation.value.upper(): 1, "GATHER": gather}
    numbers |= dict.fromkeys(("TURNED", "OVER_ROWS", "ACCUMULATE", "FACTOR", "FOUR_BITS"), 0)
    most = 96 if kind == "of blocks" else 192
    numbers |= {"MOST": most, "ROUND": 16, "PROGRAMS": 1, "PINGPONG": tiles.pingpong, "threads": 384}
    numbers |= {"SCALED_ROWS": kind == "of each row", "CHANNELS": kind == "of each row", "BLOCKS": kind == "of blocks"}
    checked(named, tensors, numbers)
    at_once = 128 if tiles.pingpong else 256  # rows of weights
    stage = (at_once + tiles.rows) * 128 + 2 * 8 + (4 * most if kind == "of blocks" else 0)  # rows, barriers, scales
    assert (programs, shared) == (100, tiles.stages * stage + 2 * 2 * 4096 + 4 * (2 * SLOTS + 1))
    how = ("bf16.bf16 16", ", 0, 0") if itemsize == 2 else ("e4m3.e4m3 32", "")
    assert named["products"] == {how: list(range(16, most + 1, 16))}
    box = 128 // itemsize
    assert named["wide"] == (a.data_ptr(), itemsize, (HIDDEN, len(a)), (HIDDEN,), (box, 64))
    assert named["step"] == (*named["wide"][:-1], (box, 16))
    start, *_, shape, strides, box = named["weights"]
    reached = sum((size - 1) * step for size, step in zip(shape, (1, *strides), strict=True))
    assert (start, reached) == (b.data_ptr(), b.numel() - 1), "all weights, and none beyond"
    assert all(part <= size for part, size in zip(box, shape, strict=True))
    pieces = 2 if activation.gated and out.element_size() == 1 and not tiles.pingpong else 1
    assert pieces * math.prod(box[1:]) == at_once


@pytest.mark.parametrize(("tiles", "boxes"), [(gemm_grouped.CANDIDATES[0], 4), (PINGPONG, 2)], ids=str)
def test_rows_by_weights_that_are_turned(tiles, boxes):
    a, b = torch.zeros(ROWS, INNER).bfloat16(), torch.zeros(SLOTS, INNER, HIDDEN).bfloat16()
    ends, out = torch.zeros(SLOTS).int(), torch.empty(ROWS, HIDDEN).bfloat16()
    named, _, _ = launched(lambda launch: gemm_grouped.grouped_gemm(a, b, ends, out, tiles, turned=True, launch=launch))
    numbers = {"n": HIDDEN, "units": HIDDEN, "k_blocks": 2, "TURNED": 1, "GATED": 0, "BIASED": 0, "AWAY": 0}
    numbers["PINGPONG"] = tiles.pingpong
    assert named["products"].keys() == {("bf16.bf16 16", ", 1, 0")}
    checked(named, {"out": out, "bias": None, "addresses": None}, numbers)
    assert named["weights"] == (b.data_ptr(), 2, (64, SLOTS * INNER, HIDDEN // 64), (HIDDEN, 64), (64, 64, boxes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("accumulate", "factor"), [(False, 1.0), (False, 0.5), (True, 1.0)])
def test_gradients_of_weights(accumulate, factor, dtype):
    a, b = torch.zeros(ROWS, HIDDEN).bfloat16(), torch.zeros(ROWS, INNER).bfloat16()
    ends, out = torch.zeros(SLOTS).int(), torch.zeros(SLOTS, HIDDEN, INNER, dtype=dtype)
    named, programs, _ = launched(
        lambda launch: gemm_grouped.weight_gradient(a, b, ends, out, accumulate, factor, spare_sms=32, launch=launch)
    )
    absent = ("a_scale", "b_scale", "out_scale", "bias", "gathered", "source", "addresses", "codes", "code_scales")
    tensors = {"out": out, "ends": ends} | dict.fromkeys(absent)
    numbers = {"a_factor": factor, "experts": SLOTS, "all_rows": ROWS, "n": INNER, "units": HIDDEN, "row_bytes": 0}
    numbers |= {"most": 128, "stages": 6, "b_step": 1, "PINGPONG": 1, "threads": 384}
    numbers |= {"OVER_ROWS": 1, "ACCUMULATE": accumulate, "OUT_BYTES": out.element_size(), "TURNED": 0, "GATHER": 0}
    numbers["FACTOR"] = accumulate or factor != 1.0 or dtype == torch.float32
    checked(named, tensors, numbers)
    assert programs == 100
    assert named["products"].keys() == {("bf16.bf16 16", ", 1, 1")}
    assert named["weights"] == (b.data_ptr(), 2, (64, ROWS, INNER // 64), (INNER, 64), (64, 64, 2))
    assert named["wide"] == named["step"] == (a.data_ptr(), 2, (64, ROWS, HIDDEN // 64), (HIDDEN, 64), (64, 64, 1))


def test_programs_sort_as_many_routes_as_may_come():
    assert f"MOST_ROUTES = {fused_4bit.MOST_ROUTES};" in numbers_text("fused_4bit.cu")


def test_numbers_have_room_in_both_kernels():
    assert "8 * EXPONENTS" in numbers_text("gemm_skinny_4bit.cu")
    assert "scales + 2 * EXPONENTS" in gemm_grouped.kernel_text()  # the pointer counts floats, and an entry has 8 bytes
