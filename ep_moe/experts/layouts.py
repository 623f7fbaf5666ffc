"""Conversions between row layouts: any layout to RANK_MAJOR, and RANK_MAJOR rows to rows grouped by expert and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ep_moe.all2all.wire_ids import to_local
from ep_moe.config import MoEConfig, Wire
from ep_moe.quant.fp8 import FP8_BLOCK
from ep_moe.quant.row_format import dequantize_from_wire
from ep_moe.types import LocalIds, Received, RowLayout, Weighting


def as_rank_major(received: Received, num_slots: int) -> Received:
    """Describe rows of any layout as RANK_MAJOR rows with one expert each, so that any kernel can read them.

    Moves no row, allocates only ids [N, 1], and never waits for the device.

    Args:
        received: Rows of any layout.
        num_slots: Slots of this rank.

    Returns:
        RANK_MAJOR rows. Those beyond an expert's count have id -1.
    """
    x, device = received.x, received.x.device
    match received.layout:
        case RowLayout.RANK_MAJOR:
            return received
        case RowLayout.CONTIGUOUS:
            assert received.expert_offsets is not None
            row = torch.arange(len(x), device=device, dtype=received.expert_offsets.dtype)
            ids = torch.searchsorted(received.expert_offsets, row, right=True) - 1
            ids = torch.where(ids < num_slots, ids, -1)
        case RowLayout.BATCHED:
            assert received.expert_counts is not None
            slot = torch.arange(len(x), device=device).unsqueeze(1)
            slot = torch.where(slot < num_slots, slot, -1)  # slots of ranks with more; a transport may fill them
            place = torch.arange(x.shape[1], device=device)
            ids = torch.where(place < received.expert_counts.unsqueeze(1), slot, -1)
    weights = None
    if received.weighting is Weighting.EXPERTS:
        assert received.weights is not None
        weights = received.weights.reshape(-1, 1)
    return Received(
        x=x.flatten(0, -2),
        format=received.format,
        x_scale=None if received.x_scale is None else received.x_scale.flatten(0, -2),
        input_scale=received.input_scale,
        layout=RowLayout.RANK_MAJOR,
        weighting=received.weighting,
        handle=received.handle,
        local_ids=cast("LocalIds", ids.view(-1, 1)),  # torch.compile cannot trace a NewType call
        weights=weights,
    )


def with_local_ids(received: Received, num_slots: int) -> Received:
    """Compute local ids from `wire_ids`.

    Args:
        received: RANK_MAJOR rows.
        num_slots: Slots of this rank.

    Returns:
        The same rows with `local_ids`, and without `wire_ids`.
    """
    if received.wire_ids is None:
        return received
    wire, weights = received.wire_ids, received.weights
    if weights is None:  # no route has weight 0
        weights = torch.ones_like(wire.ids, dtype=torch.float32)
    local = torch.empty_like(wire.ids)
    to_local(wire.ids, weights, wire.base, num_slots, local)
    return dataclasses.replace(received, local_ids=cast("LocalIds", local), wire_ids=None)


def as_plain(received: Received, dtype: torch.dtype) -> Received:
    """Convert rows of any format to plain ones.

    Args:
        received: Rows of any format.
        dtype: Dtype of the plain rows.

    Returns:
        The same rows in the format "plain".
    """
    if received.format == "plain":
        return received
    wire = Wire(dispatch=received.format, input_scale=received.input_scale)
    x = dequantize_from_wire(received.x, received.x_scale, wire, dtype)
    return dataclasses.replace(received, x=x, x_scale=None, format="plain", input_scale=None)


def scaled_by_block(received: Received) -> Received:
    """Describe fp8_row rows as fp8_block rows, by a view that repeats the row's scale for each 128 columns.

    Args:
        received: Rows of any format.

    Returns:
        fp8_block rows for fp8_row rows; other rows unchanged.
    """
    if received.format != "fp8_row":
        return received
    assert received.x_scale is not None
    scale = received.x_scale.expand(*received.x.shape[:-1], received.x.shape[-1] // FP8_BLOCK)
    return dataclasses.replace(received, x_scale=scale, format="fp8_block")


def row_bounds(received: Received, num_slots: int) -> tuple[Tensor | None, Tensor | None]:
    """Find each expert's rows. Never waits for the device.

    Args:
        received: Rows of any layout.
        num_slots: Slots of this rank, L.

    Returns:
        The first row of each expert, and the row after its last: int32 [L] each. None for RANK_MAJOR rows.
    """
    match received.layout:
        case RowLayout.RANK_MAJOR:
            return None, None
        case RowLayout.CONTIGUOUS:
            assert received.expert_offsets is not None
            offsets = received.expert_offsets[: num_slots + 1].int()  # leave out slots of ranks with more
            return offsets[:-1], offsets[1:]
        case RowLayout.BATCHED:
            assert received.expert_counts is not None
            capacity = received.x.shape[1]
            starts = torch.arange(0, num_slots * capacity, capacity, dtype=torch.int32, device=received.x.device)
            return starts, starts + received.expert_counts[:num_slots].int()


def expected_pairs(config: MoEConfig, num_slots: int, routes: int, *, everyone: bool = False) -> float:
    """Estimate the local experts per received row, for a uniform router and rows of all tokens of all ranks.

    If only tokens with a local expert have a row, a row has a few more, and tiles are slightly too small.

    Args:
        config: The layer's configuration.
        num_slots: Slots of this rank.
        routes: Ids of a row, 1 for rows that were repeated per expert.
        everyone: Rows without a local expert are included.

    Returns:
        The mean number of local experts.
    """
    return 1.0 if routes == 1 and not everyone else routes * min(1.0, num_slots / config.num_experts)


@dataclass(frozen=True)
class GroupedRows:
    """Received rows, repeated once per local expert and sorted by expert: M rows for M (row, local expert) pairs.

    Args:
        x: [M, H].
        expert: int64 [M], ascending.
        ends: int32 [L], the index after each expert's last row.
        weights: float32 [M].
        slots: int64 [N, K], the index of each route's row in x, M for a route without a local expert.
    """

    x: Tensor
    expert: Tensor
    ends: Tensor
    weights: Tensor
    slots: Tensor


def group_rows(received: Received, num_slots: int) -> GroupedRows:
    """Repeat rows once per local expert, and sort them by expert. Waits for the device once, for M.

    Args:
        received: RANK_MAJOR rows with local ids.
        num_slots: Slots of this rank.

    Returns:
        The grouped rows.
    """
    assert received.layout is RowLayout.RANK_MAJOR
    assert received.local_ids is not None
    ids = received.local_ids.long()
    weights = received.weights
    if weights is None:
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    rows, top_k = ids.shape
    flat = ids.flatten()
    if torch.compiler.is_compiling():
        return _group_all(received, weights, flat, num_slots)
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # -1 sorts first and is left out
    expert = flat[order]
    counts = torch.zeros(num_slots, dtype=torch.int64, device=ids.device).index_add_(0, expert, torch.ones_like(expert))
    slots = torch.full_like(flat, len(order))
    slots[order] = torch.arange(len(order), device=ids.device)
    return GroupedRows(
        x=received.x[order // top_k],
        expert=expert,
        ends=counts.cumsum(0).int(),
        weights=weights.flatten()[order],
        slots=slots.view(rows, top_k),
    )


def _group_all(received: Received, weights: Tensor, flat: Tensor, num_slots: int) -> GroupedRows:
    """Group rows in a compiled graph, whose shapes cannot depend on M.

    There are N * K rows. Routes without an expert come last, after `ends[-1]`, and no entry of `slots` refers to them.
    """
    top_k, pairs = weights.shape[1], len(flat)
    known = (flat >= 0) & (flat < num_slots)
    order = flat.where(known, num_slots).argsort(stable=True)
    expert, named = flat[order], known[order]
    expert = expert.where(named, 0)
    counts = torch.zeros(num_slots, dtype=torch.int64, device=flat.device).index_add_(0, expert, named.long())
    place = torch.arange(pairs, device=flat.device).where(named, pairs)
    return GroupedRows(
        x=received.x[order // top_k],
        expert=expert,
        ends=counts.cumsum(0).int(),
        weights=weights.flatten()[order],
        slots=torch.zeros_like(flat).scatter(0, order, place).view(-1, top_k),
    )


def reduce_rows(y: Tensor, grouped: GroupedRows) -> Tensor:
    """Multiply outputs by the routing weights, and sum them per received row in float32, in the order of its K routes.

    Args:
        y: [M, H], outputs of grouped rows.
        grouped: The result of `group_rows`.

    Returns:
        [N, H] in y's dtype, exactly zero for a row without a local expert.
    """
    weighted = y.float() * grouped.weights.unsqueeze(1)
    weighted = torch.cat([weighted, weighted.new_zeros(1, y.shape[1])])
    total = weighted[grouped.slots[:, 0]]
    for column in grouped.slots.unbind(1)[1:]:
        total = total + weighted[column]
    return total.to(y.dtype)
