"""The Triton kernel behind `fp8_row_kernels`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from ep_moe.quant.fp8_rows_triton import e4m3_blocks
from ep_moe.runtime.pdl import pdl_trigger, pdl_wait


@triton.jit
def round_rows(
    x, x_scale, slots, counts, out, scale, rows, rows_out, size,
    SMALLEST: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_trigger(PDL)
    pdl_wait(PDL)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < size
    if counts is not None:
        rows = tl.minimum(tl.load(counts), rows)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < rows
        used = there
        if slots is not None:
            used = row < 0
            for i in tl.static_range(TOP_K):
                slot = tl.load(slots + row.to(tl.int64) * TOP_K + i, mask=there, other=-1)
                used = used | ((slot >= 0) & (slot < rows_out))
        at = row.to(tl.int64)[:, None] * size + column
        number = tl.load(x + at, mask=inside & used[:, None], other=0.0)
        if x_scale is None:
            number, step = e4m3_blocks(number.to(tl.float32), SMALLEST)
        else:  # rounded before
            step = tl.load(x_scale + row, mask=used, other=0.0)
        if slots is None:
            tl.store(out + at, number, mask=inside & there[:, None])
            tl.store(scale + row, step, mask=there)
        else:
            for i in tl.static_range(TOP_K):
                slot = tl.load(slots + row.to(tl.int64) * TOP_K + i, mask=there, other=-1).to(tl.int64)
                kept = (slot >= 0) & (slot < rows_out)
                tl.store(out + slot[:, None] * size + column, number, mask=inside & kept[:, None])
                tl.store(scale + slot, step, mask=kept)
