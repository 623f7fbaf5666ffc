"""Ids that come before rows, on their way to the kernel that sorts: what experts' operators launch it with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts.hopper import bf16_op, fp8_block_op, fp8_tensor_op, route_sort_triton

ROWS, TOP_K, SLOTS, HIDDEN, INNER = 160, 4, 8, 256, 256
E4M3 = torch.float8_e4m3fn


def bf16(launch: Any, given: tuple, space: torch.Tensor, chunk: int) -> None:
    w13, w2 = torch.zeros(SLOTS, 2 * INNER, HIDDEN).bfloat16(), torch.zeros(SLOTS, HIDDEN, INNER).bfloat16()
    x = torch.zeros(ROWS, HIDDEN).bfloat16()
    rest = ("swiglu", 0.0, 0.0, 1.0, chunk, 0, None, 0, 1, 0, None, 0)
    bf16_op.bf16_moe(torch.zeros_like(x), space, x, *given, None, w13, w2, *rest, launch=launch)


def fp8_tensor(launch: Any, given: tuple, space: torch.Tensor, chunk: int) -> None:
    w13, w2 = torch.zeros(SLOTS, 2 * INNER, HIDDEN).to(E4M3), torch.zeros(SLOTS, HIDDEN, INNER).to(E4M3)
    scale, x = torch.ones(SLOTS), torch.zeros(ROWS, HIDDEN).to(E4M3)
    rest = ("swiglu", 0.0, 0.0, 1.0, chunk, 0, None, 0, 1, 0, None, 0)
    out, matrices = torch.zeros(ROWS, HIDDEN).bfloat16(), (w13, scale, scale, w2, scale, scale)
    fp8_tensor_op.fp8_tensor_moe(out, space, x, 0.1, *given, None, *matrices, *rest, launch=launch)


def fp8_block(launch: Any, given: tuple, space: torch.Tensor, chunk: int) -> None:
    w13, w2 = torch.zeros(SLOTS, 2 * INNER, HIDDEN).to(E4M3), torch.zeros(SLOTS, HIDDEN, INNER).to(E4M3)
    w13_scale, w2_scale = torch.ones(SLOTS, 4, 2), torch.ones(SLOTS, 2, 2)
    x, x_scale = torch.zeros(ROWS, HIDDEN).to(E4M3), torch.ones(ROWS, HIDDEN // 128)
    rest = ("swiglu", 0.0, 0.0, 1.0, chunk, 0, None, 0, 1, 0, None, 0)
    out, matrices = torch.zeros(ROWS, HIDDEN).bfloat16(), (w13, w13_scale, w2, w2_scale)
    before = (out, space, x, x_scale, torch.bfloat16)
    fp8_block_op.fp8_block_moe(*before, *given, None, None, None, *matrices, *rest, launch=launch)


@pytest.mark.parametrize("step", [bf16, fp8_tensor, fp8_block])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_the_first_sort_waits_for_ids_alone(early, parts, step):
    """Those of later passes come after a kernel that has awaited all."""
    made = []

    def launch(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        if kernel is route_sort_triton.place_pairs:
            made.append(dict(zip(kernel.arg_names, args, strict=False)))

    ids_ready, calls = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    given = (torch.zeros(ROWS, TOP_K, dtype=torch.int32), 0, *((ids_ready, calls) if early else (None, None)))
    step(launch, given, torch.zeros(1 << 24, dtype=torch.uint8), ROWS * TOP_K // parts)
    assert len(made) == parts
    assert (made[0]["ids_ready"], made[0]["sequence"]) == ((ids_ready, calls) if early else (None, None))
    assert all(sort["ids_ready"] is None for sort in made[1:])
