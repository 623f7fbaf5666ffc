"""Joining row layouts to kernels: any layout as RANK_MAJOR, rows grouped by expert, and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ep_moe.all2all.wire_ids import to_local
from ep_moe.config import MoEConfig, Wire
from ep_moe.quant.fp8 import FP8_BLOCK
from ep_moe.quant.row_format import widen_arrived
from ep_moe.types import LocalIds, Received, RowLayout, Weighting


def as_rank_major(received: Received, num_slots: int) -> Received:
    """Describe rows of any layout as RANK_MAJOR ones with a single expert each, so that any kernel takes them.

    Moves no row, allocates ids [N, 1] only, and never waits for the device.

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
            slot = torch.where(slot < num_slots, slot, -1)  # of wider ranks; a transport may fill rows up there
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
        local_ids=cast("LocalIds", ids.view(-1, 1)),  # torch.compile cannot trace a call of a NewType
        weights=weights,
    )


def localized(received: Received, num_slots: int) -> Received:
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
    if weights is None:  # then no route has a weight of 0
        weights = torch.ones_like(wire.ids, dtype=torch.float32)
    local = torch.empty_like(wire.ids)
    to_local(wire.ids, weights, wire.base, num_slots, local)
    return dataclasses.replace(received, local_ids=cast("LocalIds", local), wire_ids=None)


def widened(received: Received, dtype: torch.dtype) -> Received:
    """Convert rows of any format to plain ones.

    Args:
        received: Rows of any format.
        dtype: Of the plain rows.

    Returns:
        The same rows in the format "plain".
    """
    if received.format == "plain":
        return received
    wire = Wire(dispatch=received.format, input_scale=received.input_scale)
    x = widen_arrived(received.x, received.x_scale, wire, dtype)
    return dataclasses.replace(received, x=x, x_scale=None, format="plain", input_scale=None)


def scaled_by_block(received: Received) -> Received:
    """Describe rows of fp8_row as rows of fp8_block: a row's scale stands for each 128 columns, as a view.

    Args:
        received: Rows of any format.

    Returns:
        Rows of fp8_block for rows of fp8_row; others as they are.
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
        The first row of each expert, and one past its last: int32 [L] each. None for RANK_MAJOR rows.
    """
    match received.layout:
        case RowLayout.RANK_MAJOR:
            return None, None
        case RowLayout.CONTIGUOUS:
            assert received.expert_offsets is not None
            offsets = received.expert_offsets[: num_slots + 1].int()  # no rows beyond this rank's slots
            return offsets[:-1], offsets[1:]
        case RowLayout.BATCHED:
            assert received.expert_counts is not None
            capacity = received.x.shape[1]
            starts = torch.arange(0, num_slots * capacity, capacity, dtype=torch.int32, device=received.x.device)
            return starts, starts + received.expert_counts[:num_slots].int()


def expected_pairs(config: MoEConfig, num_slots: int, routes: int, *, everyone: bool = False) -> float:
    """Estimate the local experts of a row, if the router is uniform and all tokens of all ranks have a row here.

    Where only wanted tokens have a row, they have a few more, and tiles are a little smaller than they might be.

    Args:
        config: The layer.
        num_slots: Slots of this rank.
        routes: Ids of a row, 1 for rows that were repeated per expert.
        everyone: Rows for other ranks' experts are here too.

    Returns:
        The mean number of local experts.
    """
    return 1.0 if routes == 1 and not everyone else routes * min(1.0, num_slots / config.num_experts)


@dataclass(frozen=True)
class GroupedRows:
    """Received rows repeated per local expert and sorted by it: M rows, M = number of (row, local expert) pairs.

    Args:
        x: [M, H].
        expert: int64 [M], ascending.
        ends: int32 [L], one past each expert's last row.
        weights: float32 [M].
        slots: int64 [N, K], where each pair's row lies, M for none.
    """

    x: Tensor
    expert: Tensor
    ends: Tensor
    weights: Tensor
    slots: Tensor


def group_rows(received: Received, num_slots: int) -> GroupedRows:
    """Repeat rows per local expert, and sort them by it. Waits for the device once, for M.

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
        weights = torch.ones(ids.shape, device=ids.device)
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
    """`group_rows` in a compiled graph, whose shapes cannot depend on M: routes without an expert come last, behind
    `ends`, and no slot is there."""
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
    """Multiply by the weights, and sum each received row's pairs in slot order in float32.

    Args:
        y: [M, H], outputs of grouped rows.
        grouped: As `group_rows` returned them.

    Returns:
        [N, H] in y's dtype, exactly zero where a row has no pair.
    """
    weighted = y.float() * grouped.weights.unsqueeze(1)
    weighted = torch.cat([weighted, weighted.new_zeros(1, y.shape[1])])
    total = weighted[grouped.slots[:, 0]]
    for column in grouped.slots.unbind(1)[1:]:
        total = total + weighted[column]
    return total.to(y.dtype)
