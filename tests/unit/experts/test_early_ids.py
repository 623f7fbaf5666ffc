"""Test that ids which arrive before their rows reach the kernel that sorts routes, by its launch arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts.hopper import fused_4bit, gemm_grouped_4bit, route_sort
from ep_moe.experts.hopper.scaling_4bit import Packed
from ep_moe.experts.hopper.step import SCALINGS, hopper_moe

ROWS, TOP_K, SLOTS, HIDDEN, INNER = 160, 4, 8, 256, 256
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def scales_of(scaling: str) -> list[torch.Tensor]:
    if scaling in ("row", "block"):
        return [torch.ones(SLOTS, 2 * INNER // 128, HIDDEN // 128), torch.ones(SLOTS, HIDDEN // 128, INNER // 128)]
    if scaling == "channel":
        return [torch.ones(SLOTS, 2 * INNER), torch.ones(SLOTS, HIDDEN)]
    return [torch.ones(SLOTS) for _ in SCALINGS[scaling].names]


def weights_of(scaling: str) -> tuple[torch.dtype, list[torch.Tensor], list[torch.Tensor]]:
    """Return the dtype of received rows, w13 and w2, and the scales of a scaling."""
    sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    kind = SCALINGS[scaling]
    if issubclass(kind, Packed):
        words = {16: 2, 32: 2 if kind.format == "int4" else 1, 128: 1}[kind.group]
        scales = [torch.zeros(SLOTS, columns // 128, words, rows, dtype=torch.int32) for rows, columns in sizes]
        by_row = [torch.ones(SLOTS, rows) for rows, _ in sizes]
        factors = by_row if "w2_row_scale" in kind.names else [torch.ones(SLOTS)] * (len(kind.names) - 2)
        return (
            E4M3 if scaling.endswith("_fp8") else BF16,
            [torch.zeros(SLOTS, columns // 128, rows, 16).int() for rows, columns in sizes],
            scales + factors,
        )
    dtype = BF16 if scaling in ("none", "trained") else E4M3
    return dtype, [torch.zeros(SLOTS, *size).to(dtype) for size in sizes], scales_of(scaling)


def step(scaling: str, launch: Any, given: tuple, space: torch.Tensor, chunk: int) -> None:
    """Run one call of rows that were rounded before they were sent."""
    dtype, weights, scales = weights_of(scaling)
    x, out = torch.zeros(ROWS, HIDDEN).to(dtype), torch.zeros(ROWS, HIDDEN).bfloat16()
    by_row = torch.ones(ROWS, 1)
    x_scale = {"row": by_row, "channel": by_row, "block": torch.ones(ROWS, HIDDEN // 128)}.get(scaling)
    x_scale = by_row if scaling.endswith("_fp8") else x_scale
    input_scale = 0.1 if scaling == "matrix" else None
    hopper_moe(
        out, space, scaling, x, x_scale, input_scale, BF16, *given, None, None, None, *weights, scales, [],
        "swiglu", 0.0, 0.0, 1.0, chunk, 0, False, False, None, 0, 1, 0, None, 0,
        launch=launch,
    )  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_the_first_sort_waits_for_ids_alone(early, parts, scaling, monkeypatch):
    """Only the sort of the first part waits for ids. Later parts come after a kernel that has waited for all rows."""
    made = []
    monkeypatch.setattr(gemm_grouped_4bit, "product", lambda *_, **__: None)  # a CUDA kernel
    monkeypatch.setattr(fused_4bit, "MOST_ROUTES", 0)  # its kernel sorts by itself, when all rows have arrived

    def launch(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        if kernel is route_sort._place_pairs:
            made.append(dict(zip(kernel.arg_names, args, strict=False)))

    ids_ready, calls = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    given = (torch.zeros(ROWS, TOP_K, dtype=torch.int32), 0, *((ids_ready, calls) if early else (None, None)))
    step(scaling, launch, given, torch.zeros(1 << 24, dtype=torch.uint8), ROWS * TOP_K // parts)
    assert len(made) == parts
    assert (made[0]["ids_ready"], made[0]["sequence"]) == ((ids_ready, calls) if early else (None, None))
    assert all(sort["ids_ready"] is None for sort in made[1:])
