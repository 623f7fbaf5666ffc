"""Test which kernel computes a product with 4-bit weights, and its arguments. Nothing is launched."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ep_moe import Activation
from ep_moe.experts.hopper import (
    fused_4bit,
    gemm_4bit,
    gemm_grouped,
    gemm_grouped_4bit,
    gemm_skinny_4bit,
    scaling_fp8,
)
from ep_moe.experts.hopper.gemm_skinny import FEWEST
from ep_moe.experts.hopper.numbers_4bit import Weights
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.experts.hopper.scaling import Products, Rows
from ep_moe.experts.hopper.scaling_4bit import FourBits, FourBitsFp8, Packed
from ep_moe.experts.hopper.step import SCALINGS

SLOTS, HIDDEN, INNER, ROUTES, SPARE = 3, 256, 128, 40, 7
KINDS = {name: kind for name, kind in SCALINGS.items() if issubclass(kind, Packed)}
each_scheme = pytest.mark.parametrize("scheme", KINDS)


def made(scheme: str, *, exact: bool = False) -> tuple[Packed, dict[str, torch.Tensor]]:
    """Return a step, and its scratch memory."""
    kind = KINDS[scheme]
    w13 = torch.zeros(SLOTS, HIDDEN // 128, 2 * INNER, 16, dtype=torch.int32)
    w2 = torch.zeros(SLOTS, INNER // 128, HIDDEN, 16, dtype=torch.int32)
    scales = []
    for name in kind.names:
        rows = len(w13[0, 0]) if name.startswith("w13") else HIDDEN
        sizes = {"scale": (1, 1, rows), "row_scale": (rows,), "global_scale": ()}
        scales.append(torch.ones(SLOTS, *sizes[name.partition("_")[2]]))
    biases = torch.zeros(SLOTS, 2 * INNER), torch.zeros(SLOTS, HIDDEN)
    products = Products(
        w13, w2, scales, torch.bfloat16, Activation.SWIGLU, 1.5, 7.0, SPARE, lambda *_, **__: None, biases, exact
    )
    shapes = kind.scratch_shapes(ROUTES, HIDDEN, INNER, True, torch.bfloat16)
    return kind(products), {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def calls_of(run) -> list[tuple[str, dict[str, object]]]:
    """Return the products that `run` makes, by module, with their arguments by name."""
    found = []

    def noted(module, names):
        def product(*given, **how):
            found.append((module, dict(zip(names, given, strict=True)) | how))

        return product

    with (
        mock.patch.object(
            gemm_skinny_4bit, "product", noted("skinny", ("x", "ids", "routing", "base", "w", "out", "tile"))
        ),
        mock.patch.object(
            fused_4bit, "products", noted("fused", ("x", "ids", "routing", "base", "w13", "w2", "act", "y", "tile"))
        ),
        mock.patch.object(gemm_4bit, "product", noted("listed", ("x", "w", "lists", "out", "tile"))),
        mock.patch.object(gemm_grouped_4bit, "product", noted("grouped", ("x", "w", "ends", "out", "tiles"))),
        mock.patch.object(gemm_grouped, "multiprocessors", return_value=132),
        mock.patch.object(scaling_fp8, "round_rows"),
    ):
        run()
    return found


def check(step: Packed, scratch: dict[str, torch.Tensor], calls: list[tuple[str, dict[str, object]]]) -> None:
    """Check the arguments that all kernels have in common."""
    (_, first), (_, second) = calls
    p, names = step.products, step.names
    for which, (given, data, bias) in enumerate(((first, p.w13, p.biases[0]), (second, p.w2, p.biases[1]))):
        w = given["w"]
        assert isinstance(w, Weights)
        assert w.data is data
        assert w.bias is bias
        held = {
            name: scale for name, scale in zip(names, p.scales, strict=True) if name.startswith(("w13", "w2")[which])
        }
        assert w.scale is held[f"{('w13', 'w2')[which]}_scale"]
        assert w.factor is held.get(f"{('w13', 'w2')[which]}_global_scale")
        assert w.row_scale is held.get(f"{('w13', 'w2')[which]}_row_scale")
        assert w.e4m3 == ("act_scale" in scratch)
        assert given["launch"] is p.launch
    assert first["out"] is scratch["act"]
    assert second["out"] is scratch["y"]
    assert (first["activation"], first["alpha"], first["limit"]) == (Activation.SWIGLU, 1.5, 7.0)
    assert not {"activation", "alpha", "limit"} & set(second)
    assert second["x"] is scratch["act_numbers" if "act_scale" in scratch else "act"]
    if "act_scale" in scratch:
        assert second["x_scale" if "tile" in second else "a_scale"] is scratch["act_scale"]


@pytest.mark.parametrize("scheme", [name for name, kind in KINDS.items() if issubclass(kind, FourBitsFp8)])
def test_the_fewest_e4m3_rows(scheme):
    step, scratch = made(scheme)
    assert step.skinny_tiles(FEWEST + 1, 0.1) is None
    tiles = step.skinny_tiles(FEWEST, 1000.0)
    assert tiles is not None
    assert not tiles.sort
    x, scale, routing_args = torch.zeros(5, HIDDEN), torch.ones(5), (torch.zeros(5, 4), None, 2)
    calls = calls_of(lambda: step.run_skinny(Rows(x, scale), routing_args, tiles, None, scratch))
    assert [module for module, _ in calls] == ["skinny", "skinny"]
    check(step, scratch, calls)
    (_, first), (_, second) = calls
    assert first["x"] is x
    assert first["x_scale"] is scale
    assert first["gather"]
    assert not second.get("gather")
    for given, of in ((first, tiles.first), (second, tiles.second)):
        assert (given["ids"], given["routing"], given["base"], given["tile"]) == (*routing_args, of)


@pytest.mark.parametrize("scheme", [name for name, kind in KINDS.items() if issubclass(kind, FourBits)])
def test_few_bf16_rows(scheme, monkeypatch):
    step, scratch = made(scheme)
    tiles = step.skinny_tiles(40, 1.0)
    assert tiles is not None
    assert not tiles.sort
    x, routing_args = torch.zeros(5, HIDDEN), (torch.zeros(5, 4), None, 2)
    ((module, given),) = calls_of(lambda: step.run_skinny(Rows(x), routing_args, tiles, None, scratch))
    assert module == "fused"
    first, second = {**given, "w": given["w13"], "out": given["act"]}, {"w": given["w2"], "out": given["y"]}
    check(step, scratch, [("fused", first), ("fused", {**second, "x": given["act"], "launch": given["launch"]})])
    assert given["x"] is x
    assert (given["ids"], given["routing"], given["base"], given["tile"]) == (*routing_args, tiles.first)


def test_tiles_of_few_bf16_rows():
    step, _ = made("mxfp4")
    routes, rows = fused_4bit.MOST_ROUTES, fused_4bit.MOST_ROWS
    assert step.skinny_tiles(routes + 1, 1.0) is None
    assert step.skinny_tiles(routes, rows + 0.1) is None
    short, tall = step.skinny_tiles(routes, fused_4bit.SHORT_ROWS), step.skinny_tiles(routes, rows)
    assert (short.first.block_m, tall.first.block_m) == (8, 16)


@each_scheme
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("writes_to_peers", [False, True])
@pytest.mark.parametrize("each", [0.5, 5.0, 15.0, 40.0, 500.0])
def test_sorted_rows(each, writes_to_peers, exact, scheme):
    step, scratch = made(scheme, exact=exact)
    source, ends = torch.zeros(ROUTES, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int32)
    lists = Lists(source, source, ends, torch.zeros(ROUTES) if writes_to_peers else None)
    e4m3 = "act_scale" in scratch
    rows = (
        Rows(torch.zeros(ROUTES, HIDDEN), torch.ones(ROUTES)) if e4m3 else Rows(torch.zeros(9, HIDDEN), source=source)
    )
    calls = calls_of(lambda: step.by_gemm_grouped(rows, lists, each, scratch))
    check(step, scratch, calls)
    few = [each <= limit and not exact for limit in step.listed_up_to]
    assert [module for module, _ in calls] == [
        "listed" if few[0] else "grouped", "listed" if few[1] and not writes_to_peers else "grouped"
    ]  # fmt: skip
    for which, (module, given) in enumerate(calls):
        if module == "listed":
            assert not e4m3
            assert given["lists"] is lists
            assert given["gather"] == (which == 0)
            assert given["tile"] == gemm_4bit.tile_for(each)
        else:
            assert given["ends"] is ends
            assert given["source"] is (rows.source if which == 0 else None)
            assert given["addresses"] is (lists.addresses if which == 1 else None)
            assert given["spare_sms"] == SPARE
            if which == 0:
                assert given["a_scale"] is rows.scale


def test_few_rows_in_bf16_are_listed():
    """Only bf16 rows use the kernel for listed routes, because it does not read E4M3."""
    assert all(
        (max(kind.listed_up_to) > 0) == ("act_scale" not in kind.scratch_shapes(1, 1, 1, True, torch.bfloat16))
        for kind in KINDS.values()
    )


@pytest.mark.parametrize("e4m3", [False, True])
def test_tiles_by_rows_of_an_expert(e4m3):
    """Tiles have more rows if experts do. Two programs share a multiprocessor only for few rows."""
    data = torch.empty(32, 16, 1536, 16, device="meta")
    w = Weights(data, torch.empty(32, 16, 1, 1536, device="meta"), "mxfp4", 32, None, None, e4m3)
    with mock.patch.object(gemm_grouped, "multiprocessors", return_value=132):
        found = [gemm_grouped_4bit.tiles_for(rows, w) for rows in (0.1, 4, 16, 64, 512)]
    assert [tiles.rows for tiles in found][1:] == sorted(tiles.rows for tiles in found[1:])
    assert [tiles.programs for tiles in found[1:]] == [2, 2, 1, 1]
    assert (found[1].rows, found[-1].rows) == (16, 128)
    for tiles, rows in zip(found[1:], (4, 16, 64, 512), strict=True):
        assert tiles.rows >= min(rows, 96), "with fewer the weights are read again"
