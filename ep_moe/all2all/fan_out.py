"""Send copies of rows to several places, and sum the results. Shared by the transports over torch's collectives.

A place is a rank or a node. `FanOut` says which copies go to which place, `Rows` holds the tensors that travel, and
`in_order` sums the results.
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

# (rows grouped by destination, rows to each rank, rows from each rank) -> rows grouped by source. Backward exchanges
# the gradients in the opposite direction.
RowExchange: TypeAlias = "Callable[[Tensor, list[int], list[int]], Pending[Tensor]]"


@dataclass(frozen=True)
class FanOut:
    """Which rows are copied to which places (nodes of a rail, or ranks of a node).

    place, row: int64 [copies], the place and the row of each copy, sorted by place, then by row
    slots: int64 [rows, M], the indices of each row's copies, sorted by place; `copies` pads rows with fewer than M
    """

    place: Tensor
    row: Tensor
    slots: Tensor

    @classmethod
    def of(cls, wanted: Tensor, copies: int, top_k: int) -> FanOut:
        """Build it from a mask, without waiting for the device.

        wanted: bool [rows, places], whether a row goes to a place
        copies: the number of True in `wanted`, known to the host
        top_k: the most places of a row
        """
        rows, places = wanted.shape
        first = wanted.t().flatten()
        place = first.to(torch.uint8).argsort(descending=True, stable=True)[:copies]  # CUDA does not sort bool
        at = (first.long().cumsum(0) - 1).view(places, rows).t().where(wanted, copies)
        width = min(top_k, places)
        nth = (wanted.long().cumsum(1) - 1).where(wanted, width)  # `width`: an extra column for places without a copy
        slots = at.new_full((rows, width + 1), copies).scatter_(1, nth, at)[:, :width]
        return cls(place // max(rows, 1), place % max(rows, 1), slots)

    def copies(self, x: Tensor) -> Tensor:
        """Copy x [rows, ...] to [copies, ...]. Integer rows (bytes) have no gradient."""
        return spread(x, self.row, self.slots) if x.is_floating_point() else x[self.row]

    def sums(self, copies: Tensor) -> Tensor:
        """Sum the copies [copies, ...] of each row to [rows, ...], in float32, in the order of places."""
        return summed(copies, self.row, self.slots)


@dataclass(frozen=True)
class Rows:
    """The tensors that travel.

    x, scale: [rows, ...], scale may be None; one-byte dtypes are viewed as uint8
    ids: int64 [rows, K], counted from the first expert of the place where the rows are; -1 for experts elsewhere
    weights: float32 [rows, K]
    """

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor

    def start(
        self, fan_out: FanOut, ids_per_place: int, exchange: RowExchange, send: list[int], receive: list[int]
    ) -> Pending[Rows]:
        """Send a copy of each row to each place that holds one of its experts."""
        x = exchange(fan_out.copies(self.x), send, receive)
        scale = None if self.scale is None else exchange(self.scale[fan_out.row], send, receive)
        ids = self.ids[fan_out.row] - fan_out.place.unsqueeze(1) * ids_per_place
        ids = ids.where((ids >= 0) & (ids < ids_per_place), -1)
        # float32 holds integers below 2**24 exactly, so ids travel in one message with the weights
        meta = exchange(torch.cat([ids.float(), fan_out.copies(self.weights)], dim=1), send, receive)

        def finish() -> Rows:
            ids, weights = meta.wait().chunk(2, dim=1)
            return Rows(x.wait(), None if scale is None else scale.wait(), ids.detach().long(), weights)

        return Pending(finish)

    def received(self, shape: DispatchShape, dtype: torch.dtype, handle: Any) -> Received:
        """Return the rows for the experts, after the last exchange. dtype: dtype of rows before they became bytes"""
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
    """Return bool [rows, ranks]: whether a rank holds an expert of a row. Ids out of range belong to no rank."""
    owner = (ids // slots_per_rank).where((ids >= 0) & (ids < ranks * slots_per_rank), ranks)
    found = torch.zeros(len(ids), ranks + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, owner, True)[:, :ranks]


def in_order(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, added in float32 in the given order and rounded once."""
    coming = iter(parts)
    first = next(coming)
    total = first.to(torch.float32, copy=True)
    for part in coming:
        total += part
    return total.to(first.dtype)


class _Spread(Function):
    """Copy rows. Backward sums the copies (`_Summed`): each function is the adjoint of the other.

    The backward of torch's indexing would sort the rows, or add them in an undefined order.
    """

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
    """Return x[token], [copies, ...]. token, slots: `FanOut.row` and `FanOut.slots`"""
    found: Tensor = _Spread.apply(x, token, slots)
    return found


def summed(rows: Tensor, token: Tensor, slots: Tensor) -> Tensor:
    """Return the sum of each token's rows, [T, ...], added in float32 in the order of places."""
    found: Tensor = _Summed.apply(rows, token, slots)
    return found
