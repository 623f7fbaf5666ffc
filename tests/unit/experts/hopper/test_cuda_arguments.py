"""What products in CUDA are launched with, beside the parameters that their kernels declare. It runs none."""

from __future__ import annotations

import re
from ctypes import c_float, c_int, c_void_p
from unittest import mock

import pytest
import torch

from ep_moe.experts.hopper import gemm_grouped, gemm_grouped_4bit, gemm_skinny_4bit
from ep_moe.experts.hopper.numbers_4bit import Weights, numbers_text
from ep_moe.runtime import nvrtc
from ep_moe.types import Activation

KINDS = {c_int: "int", c_float: "float", c_void_p: "pointer", None: "map"}
SLOTS, HIDDEN, INNER, ROWS = 3, 256, 128, 6


def declared(text: str, name: str) -> list[tuple[str, str]]:
    """Kinds and names of a kernel's parameters."""
    given = re.search(rf"\b{name}\((const [^{{]*?)\)\s*\{{", text, re.DOTALL)
    found = []
    for one in given[1].split(","):
        kind = "pointer" if "*" in one else "map" if "Map" in one else "float" if "float" in one else "int"
        found.append((kind, one.split()[-1].lstrip("*&")))
    return found


def launched(run) -> tuple[dict[str, object], int, int]:
    """Arguments by the names of parameters, the programs, and the bytes of shared memory of a launch."""
    made = {}

    def kernel(text, name, form, device):
        made.update(text=text, name=name)

    with (
        mock.patch.object(nvrtc, "kernel", kernel),
        mock.patch.object(nvrtc, "Kernel", lambda function, device, threads, shared: shared),
        mock.patch.object(nvrtc, "Arguments", list),
        mock.patch.object(nvrtc, "tensor_map", lambda *given: given),
        mock.patch.object(gemm_grouped, "multiprocessors", return_value=132),
    ):
        run(lambda shared, grid, arguments: made.update(shared=shared, grid=grid, arguments=arguments))
    parameters = declared(made["text"], made["name"])
    assert [KINDS[kind] for _, kind in made["arguments"]] == [kind for kind, _ in parameters]
    named = {name: value for (value, _), (_, name) in zip(made["arguments"], parameters, strict=True)}
    return named, made["grid"][0], made["shared"]


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


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("int4", [False, True])
def test_the_fewest_rows_of_four_bits(int4, e4m3):
    w, (x, scale) = weights(2 * INNER, HIDDEN, e4m3=e4m3, int4=int4), rows_of(HIDDEN, e4m3)
    ids, routing = torch.zeros(ROWS, 2, dtype=torch.int64), torch.ones(ROWS, 2)
    out, tile = torch.empty(12, INNER), gemm_skinny_4bit.tiles_for(ids.numel()).first
    named, programs, shared = launched(
        lambda launch: gemm_skinny_4bit.product(
            x, ids, routing, 7, w, out, tile, x_scale=scale, activation=Activation.SWIGLU, alpha=1.5, limit=2.5,
            gather=True, launch=launch,
        )
    )  # fmt: skip
    tensors = {"x": x, "ids": ids, "routing": routing, "codes": w.data, "scales": w.scale, "bias": w.bias, "out": out}
    tensors |= {"x_scale": scale, "factor": w.factor, "row_scale": w.row_scale}
    for name, tensor in tensors.items():
        assert named[name] == (0 if tensor is None else tensor.data_ptr()), name
    numbers = {"id_bytes": 8, "base": 7, "pairs": 12, "experts": SLOTS, "depth": HIDDEN, "rows": 2 * INNER}
    numbers |= {"width": INNER, "blocks": 2, "every": 2, "alpha": 1.5, "limit": 2.5}
    assert {name: named[name] for name in numbers} == numbers
    assert named["unit"] == (1.0 if e4m3 else 2.0**32)
    assert programs == SLOTS * (INNER // (8 * tile.warps // tile.split))
    assert shared == gemm_skinny_4bit.shared_bytes(tile, x.element_size())


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
        for name, tensor in tensors.items():
            assert named[name] == (0 if tensor is None else tensor.data_ptr()), name
        numbers = {"experts": SLOTS, "all_rows": ROWS, "n": HIDDEN, "k_blocks": 2 if e4m3 else 3, "most": tile.rows}
        numbers |= {"stages": tile.stages, "b_step": 1 if w.row_scale is None else HIDDEN}
        assert {name: named[name] for name in numbers} == numbers
        assert named["a_factor"] == (1.0 if e4m3 else 2.0**32)
        assert programs == 100 * tile.programs
        assert shared == gemm_grouped_4bit.shared_bytes(tile, SLOTS, w)
        box = 128 // a.element_size()
        assert named["wide"] == (a.data_ptr(), a.element_size(), (INNER + 64, ROWS), (INNER + 64,), (box, 64))
        assert named["step"][-1] == (box, 16)


def test_numbers_have_room_in_both_kernels():
    assert "8 * EXPONENTS" in numbers_text("gemm_skinny_4bit.cu")
    assert "scales + 2 * EXPONENTS" in gemm_grouped.kernel_text()  # floats, of 8 bytes each
