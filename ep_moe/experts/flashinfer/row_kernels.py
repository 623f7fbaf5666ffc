"""Small steps on received rows: ids a kernel can take, and extremes. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms allocate nothing and never wait.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton


def clean_ids(
    ids: Tensor, weights: Tensor | None, base: int, num_slots: int, out_ids: Tensor, out_weights: Tensor | None
) -> None:
    """Local ids as kernels want them: int32, distinct within a row, -1 for whatever is no slot and for routes of weight
    0; a repeated id's weight goes to its first place.

    ids: int [N, K], counted from `base`; weights: float32 [N, K] or None; out_ids: int32 [N, K]; out_weights: float32
    [N, K], None with weights None; all contiguous
    """
    if ids.is_cuda:
        launch_clean_ids(ids, weights, base, num_slots, out_ids, out_weights)
        return
    ids = ids - base
    valid = (ids >= 0) & (ids < num_slots)
    if weights is not None:
        valid = valid & (weights != 0)
    top_k = ids.shape[1]
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)  # [N, K, K]
    repeated = (same & ids.new_ones(top_k, top_k, dtype=torch.bool).tril(-1)).any(2)
    out_ids.copy_(torch.where(valid & ~repeated, ids, -1))
    if weights is not None and out_weights is not None:
        merged = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
        out_weights.copy_(torch.where(out_ids >= 0, merged, 0.0))


def row_extremes(x: Tensor, ids: Tensor, out: Tensor) -> None:
    """Raise `out` to the largest magnitude and the largest squared length among rows that have a local expert; other
    rows may hold anything. x: [N, H]; ids: int32 [N, K]; out: float32 [2], zero to begin with."""
    if x.is_cuda:
        launch_row_extremes(x, ids, out)
        return
    rows = torch.where((ids >= 0).any(1, keepdim=True), x.float(), 0.0)
    torch.maximum(out, torch.stack([rows.abs().max(), rows.square().sum(1).max()]), out=out)


# --- Triton ---------------------------------------------------------------------------------------------------------

_BLOCK = 1024


def launch_clean_ids(
    ids: Tensor, weights: Tensor | None, base: int, num_slots: int, out_ids: Tensor, out_weights: Tensor | None
) -> None:
    rows, top_k = ids.shape
    width = next_power_of_2(top_k)
    block = max(1, 2048 // width**2)  # pairs of columns that a program compares at once
    _clean_ids[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, base, num_slots,
        TOP_K=top_k, WIDTH=width, BLOCK=block, WEIGHTED=weights is not None,
    )  # fmt: skip


@triton.jit
def _clean_ids(
    ids, weights, out_ids, out_weights, rows, base, num_slots,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < TOP_K)[None, :]
    at = row.to(tl.int64)[:, None] * TOP_K + column[None, :]
    id = tl.load(ids + at, mask=inside, other=-1) - base  # noqa: A001
    valid = inside & (id >= 0) & (id < num_slots)
    if WEIGHTED:
        weight = tl.load(weights + at, mask=inside, other=0.0)
        valid = valid & (weight != 0.0)
    same = (id[:, :, None] == id[:, None, :]) & valid[:, None, :]
    earlier = column[None, None, :] < column[None, :, None]
    repeated = tl.max((same & earlier).to(tl.int32), axis=2) > 0
    keep = valid & (repeated == 0)
    tl.store(out_ids + at, tl.where(keep, id, -1), mask=inside)
    if WEIGHTED:
        merged = tl.sum(tl.where(same, weight[:, None, :], 0.0), axis=2)
        tl.store(out_weights + at, tl.where(keep, merged, 0.0), mask=inside)


def launch_row_extremes(x: Tensor, ids: Tensor, out: Tensor) -> None:
    rows, hidden = x.shape
    top_k = ids.shape[1]
    _row_extremes[(rows,)](x, ids, out, hidden, x.stride(0), top_k, BLOCK=_BLOCK, IDS=next_power_of_2(top_k))


@triton.jit
def _row_extremes(x, ids, out, hidden, row_stride, top_k, BLOCK: tl.constexpr, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, IDS)
    mine = tl.max(tl.load(ids + row * top_k + column, mask=column < top_k, other=-1))
    if mine >= 0:
        largest = 0.0
        square = 0.0
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * row_stride + at, mask=at < hidden, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value)))
            square += tl.sum(value * value)
        # both are >= 0: a maximum is the same number whatever the order, so that equal calls give equal bits
        tl.atomic_max(out, largest)
        tl.atomic_max(out + 1, square)
