"""Rows that go to several places, whose results come back as one sum: what transports of torch's collectives share.

`FanOut` says which copies go where, `Rows` is what travels, and `in_order` adds what comes back. A place is a rank, or
a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.all2all.base import DispatchShape
from ep_moe.parallel.collectives import as_rows
from ep_moe.types import LocalIds, Pending, Received, RowLayout, Weighting

# Rows grouped by destination, and how many go to and come from each rank of a group, to rows grouped by source.
# Backward carries their gradients the other way.
RowExchange: TypeAlias = "Callable[[Tensor, list[int], list[int]], Pending[Tensor]]"


@dataclass(frozen=True)
class FanOut:
    """Rows that go to several places: nodes of a rail, or ranks of a node.

    place, row: int64 [copies], of each copy; places ascending, and rows within them
    slots: int64 [rows, M], where each row's copies lie among these, places ascending, `copies` for none
    """

    place: Tensor
    row: Tensor
    slots: Tensor

    @classmethod
    def of(cls, wanted: Tensor, copies: int, top_k: int) -> FanOut:
        """wanted: bool [rows, places], which rows go where; copies: how many are True, so that nothing waits for the
        device; top_k: in how many places a row is at most."""
        rows, places = wanted.shape
        first = wanted.t().flatten()
        place = first.to(torch.uint8).argsort(descending=True, stable=True)[:copies]  # a sort of bool is CPU's alone
        at = (first.long().cumsum(0) - 1).view(places, rows).t().where(wanted, copies)
        width = min(top_k, places)
        nth = (wanted.long().cumsum(1) - 1).where(wanted, width)  # behind all: a column for places without a copy
        slots = at.new_full((rows, width + 1), copies).scatter_(1, nth, at)[:, :width]
        return cls(place // max(rows, 1), place % max(rows, 1), slots)

    def copies(self, x: Tensor) -> Tensor:
        """x [rows, ...] to [copies, ...]. Bytes have no gradient."""
        return spread(x, self.row, self.slots) if x.is_floating_point() else x[self.row]

    def sums(self, copies: Tensor) -> Tensor:
        """[copies, ...] to [rows, ...], added in float32 and in the order of places."""
        return summed(copies, self.row, self.slots)


@dataclass(frozen=True)
class Rows:
    """What travels. x [rows, ...], scale [rows, ...] or None: numbers of one byte as bytes; ids: int64 [rows, K] among
    those of the place that the rows are at, -1 for none of its own; weights: float32 [rows, K]"""

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor

    def start(
        self, fan_out: FanOut, ids_per_place: int, exchange: RowExchange, send: list[int], receive: list[int]
    ) -> Pending[Rows]:
        """Send a copy to each place that has an expert of a row."""
        x = exchange(fan_out.copies(self.x), send, receive)
        scale = None if self.scale is None else exchange(self.scale[fan_out.row], send, receive)
        ids = self.ids[fan_out.row] - fan_out.place.unsqueeze(1) * ids_per_place
        ids = ids.where((ids >= 0) & (ids < ids_per_place), -1)
        # ids are far below 2**24, so that float32 holds them exactly and both travel in one message
        meta = exchange(torch.cat([ids.float(), fan_out.copies(self.weights)], dim=1), send, receive)

        def finish() -> Rows:
            ids, weights = meta.wait().chunk(2, dim=1)
            return Rows(x.wait(), None if scale is None else scale.wait(), ids.detach().long(), weights)

        return Pending(finish)

    def received(self, shape: DispatchShape, dtype: torch.dtype, handle: Any) -> Received:
        """As experts take them, at the last of their places. dtype: of rows before they were bytes"""
        return Received(
            x=as_rows(self.x, dtype),
            x_scale=None if self.scale is None else as_rows(self.scale, shape.row_format.scale),
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=handle,
            local_ids=LocalIds(self.ids.int()),
            weights=self.weights,
        )


def wanted_places(ids: Tensor, slots_per_rank: int, ranks: int) -> Tensor:
    """bool [rows, ranks]: which ranks hold an expert of which row; ids of no expert are of no rank."""
    owner = (ids // slots_per_rank).where((ids >= 0) & (ids < ranks * slots_per_rank), ranks)
    found = torch.zeros(len(ids), ranks + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, owner, True)[:, :ranks]


def in_order(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape: in float32 and their order, rounded once."""
    coming = iter(parts)
    first = next(coming)
    total = first.to(torch.float32, copy=True)
    for part in coming:
        total += part
    return total.to(first.dtype)


class _Spread(Function):
    """Each is the other's adjoint: torch's own adjoint of an index sorts rows, or adds them in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(token, slots)
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return summed(grad, *ctx.saved_tensors), None, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(token, slots)
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return in_order(padded[column] for column in slots.unbind(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return spread(grad, *ctx.saved_tensors), None, None


def spread(x: Tensor, token: Tensor, slots: Tensor) -> Tensor:
    """x[token], [rows, ...]. token, slots: as `FanOut.row` and `FanOut.slots`"""
    found: Tensor = _Spread.apply(x, token, slots)
    return found


def summed(rows: Tensor, token: Tensor, slots: Tensor) -> Tensor:
    """The sum of each token's rows, in float32 and the order of ranks, [T, ...]."""
    found: Tensor = _Summed.apply(rows, token, slots)
    return found
