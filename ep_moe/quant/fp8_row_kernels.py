"""Rows in E4M3 with one scale each, and the scales of products of such rows with matrices that have one scale each.

Nothing here allocates or waits for the device: the caller brings every output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ep_moe.quant.row_format import SMALLEST
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.launch_cache import Launch, at_once

# on an H200
PROGRAMS = 16  # a multiprocessor
TILE = 4096  # values of a program at once, if that is a row


@dataclass(frozen=True)
class RowScales:
    """Of a product's operands in E4M3: value = number * scale. They are multiplied in after the sums, in float32.

    rows: float32 [M]; weights: float32 [L], of any stride
    """

    rows: Tensor
    weights: Tensor

    def given(self) -> tuple[Any, ...]:
        """As `MatrixScales.given`."""
        return 1.0, self.rows, 0, self.weights, None


def round_rows(
    x: Tensor, out: Tensor, scale: Tensor, *, x_scale: Tensor | None = None, slots: Tensor | None = None,
    counts: Tensor | None = None, soon: bool = False, launch: Launch = at_once,
) -> None:  # fmt: skip
    """scale = amax / 448 of a row, out = x / scale rounded to the nearest e4m3. An amax below 1e-10 counts as 1e-10.
    Values that are no number stay none.

    x: bf16 [N, H]; out: e4m3 [M, H]; scale: float32 [M]
    x_scale: float32 [N] or [N, 1], of rows that are e4m3 already: they and it are copied
    slots: int32 [N, K], the rows of the output that a row goes to, below 0 or at least M for none; the others are left
        as they are. None for row n to row n
    counts: int32 [1], on the device: only so many of the first rows are made. launch: how the kernel is launched
    soon: start before the kernel ahead has ended, and let the next one
    """
    from ep_moe.quant import fp8_row_kernels_triton as kernels
    from ep_moe.runtime.pdl import pdl_launch

    rows, size = x.shape
    width = next_power_of_2(size)
    tall = max(1, TILE // width)
    launch(
        kernels.round_rows, (min(cdiv(rows, tall), PROGRAMS * multiprocessors(x.device)),),
        x, x_scale, slots, counts, out, scale, rows, out.shape[0], size,
        SMALLEST=SMALLEST, TOP_K=1 if slots is None else slots.shape[1], ROWS=tall, WIDTH=width,
        num_warps=4 if width <= TILE else 8, **pdl_launch(x.device, soon),
    )  # fmt: skip
