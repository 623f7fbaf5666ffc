"""Rows in E4M3 under one scale, and the scales of products whose operands have one each (`fp8_static`).

Nothing here allocates or waits for the device: the caller brings every output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.launch_cache import Launch, at_once

BLOCK = 1024  # columns of a program


@dataclass(frozen=True)
class MatrixScales:
    """Of a product's operands in E4M3: value = number * scale. They are multiplied in after the sums, in float32.

    rows: a float or float32 [1] for all rows, or float32 [L], of each expert's; weights: float32 [L]
    out: float32 [L], of the product's rows where they are rounded to E4M3 too, saturating at 448
    """

    rows: Tensor | float
    weights: Tensor
    out: Tensor | None = None

    def given(self) -> tuple[Any, ...]:
        """To kernels: factor, tensor or None, step from one expert's to the next's; then weights, out."""
        if isinstance(self.rows, float):
            return self.rows, None, 0, self.weights, self.out
        return 1.0, self.rows, int(self.rows.numel() > 1), self.weights, self.out


NO_SCALES = (None, None, None, None, None)  # what kernels are given for operands in bf16


def round_rows(
    x: Tensor, input_scales: Tensor, out: Tensor, scale: Tensor, slots: Tensor | None = None, *,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """Each row of x once, as `fp8_scales.round_rows` rounds it: x / scale to the nearest E4M3, saturating at 448.

    x: bf16 [N, H]; input_scales: float32 [L], of which the largest is the scale; scale: float32 [1], where it is left
    slots: int32 [N, K], the rows of the output that a row goes to, below 0 or at least M for none; the others are left
        as they are. None for row n to row n
    out: e4m3 [M, H]; launch: how the kernel is launched
    """
    from ep_moe.quant import fp8_tensor_kernels_triton as kernels

    rows, size = x.shape
    block = min(BLOCK, next_power_of_2(size))
    launch(
        kernels.round_rows, (rows, cdiv(size, block)),
        x, input_scales, slots, out, scale, len(input_scales), out.shape[0], size,
        SLOTS=next_power_of_2(len(input_scales)), TOP_K=1 if slots is None else slots.shape[1], BLOCK=block,
    )  # fmt: skip
