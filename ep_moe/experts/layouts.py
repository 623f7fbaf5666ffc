"""Joining row layouts to kernels: rows as they are received, rows grouped by expert, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.types import Received, RowLayout


@dataclass(frozen=True)
class GroupedRows:
    """Received rows repeated per local expert and sorted by it: M rows, M = number of (row, local expert) pairs.

    x: [M, H]; expert: int64 [M], ascending; ends: int32 [L], one past each expert's last row
    weights: float32 [M]; slots: int64 [N, K], where each pair's row lies, M for none
    """

    x: Tensor
    expert: Tensor
    ends: Tensor
    weights: Tensor
    slots: Tensor


def group_rows(received: Received, num_slots: int) -> GroupedRows:
    """RANK_MAJOR to grouped. Waits for the device once, for M."""
    assert received.layout is RowLayout.RANK_MAJOR
    assert received.local_ids is not None
    assert received.weights is not None
    ids = received.local_ids.long()
    rows, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # -1 sorts first and is left out
    expert = flat[order]
    counts = torch.zeros(num_slots, dtype=torch.int64, device=ids.device).index_add_(0, expert, torch.ones_like(expert))
    slots = torch.full_like(flat, len(order))
    slots[order] = torch.arange(len(order), device=ids.device)
    return GroupedRows(
        x=received.x[order // top_k],
        expert=expert,
        ends=counts.cumsum(0).int(),
        weights=received.weights.flatten()[order],
        slots=slots.view(rows, top_k),
    )


def reduce_rows(y: Tensor, grouped: GroupedRows) -> Tensor:
    """Multiply [M, H] by the weights and sum each received row's pairs in slot order in float32: [N, H], exactly
    zero where a row has none."""
    weighted = y.float() * grouped.weights.unsqueeze(1)
    weighted = torch.cat([weighted, weighted.new_zeros(1, y.shape[1])])
    total = weighted[grouped.slots[:, 0]]
    for column in grouped.slots.unbind(1)[1:]:
        total = total + weighted[column]
    return total.to(y.dtype)
