"""The collectives on rows that a layer needs: differentiable, asynchronous, and with different row counts per rank.

Counts are host integers that every rank of the group knows. A collective without rows is skipped on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from ep_moe.runtime.batched_gradients import refuse_batch
from ep_moe.runtime.first_order import first_order_only
from ep_moe.types import Pending

if TYPE_CHECKING:  # rank_group imports this module at run time
    from ep_moe.parallel.rank_group import RankGroup

# torch 2.13 renamed these functions; 2.11 has only the old names
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# a collective that is started by a call with x: returns the tensor that it fills, and the work to wait for
Collective: TypeAlias = "partial[tuple[Tensor, dist.Work | None]]"


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], rank_group: RankGroup) -> Pending[Tensor]:
    """Start an all-to-all of rows. Differentiable.

    Args:
        x: [sum(send), ...], grouped by destination.
        send: The number of rows for each rank.
        receive: The number of rows from each rank.
        rank_group: The ranks that take part.

    Returns:
        [sum(receive), ...], grouped by source, pending.
    """
    if rank_group.size == 1:
        return Pending(lambda: x)
    there = partial(_all_to_all, send=list(send), receive=list(receive), rank_group=rank_group)
    back = partial(_all_to_all, send=list(receive), receive=list(send), rank_group=rank_group)
    return _start(x, there, back, rank_group)


def gather_rows(x: Tensor, counts: Sequence[int], rank_group: RankGroup) -> Pending[Tensor]:
    """Start an all-gather of rows. Its backward sums the gradients of a rank's rows over all ranks.

    Args:
        x: [counts[rank], ...], this rank's rows.
        counts: The number of rows of each rank.
        rank_group: The ranks that take part.

    Returns:
        [sum(counts), ...], in rank order, pending.
    """
    if rank_group.size == 1 or max(counts) == 0:
        return Pending(lambda: x)
    padded = _padded(x, max(counts))
    pending = _start(
        padded, partial(_all_gather, rank_group=rank_group), partial(_reduce_scatter, rank_group=rank_group), rank_group
    )
    return Pending(lambda: _trimmed(pending.wait(), counts))


def reduce_scatter_rows(y: Tensor, counts: Sequence[int], rank_group: RankGroup) -> Pending[Tensor]:
    """Start a reduce-scatter of rows: from partial rows [sum(counts), ...] of all ranks, return the sums of this rank's
    rows [counts[rank], ...], pending. Differentiable."""
    if rank_group.size == 1 or max(counts) == 0:
        return Pending(lambda: y)
    most = max(counts)
    parts = [_padded(part, most) for part in y.split(list(counts))]
    padded = y if min(counts) == most else torch.cat(parts)
    pending = _start(
        padded, partial(_reduce_scatter, rank_group=rank_group), partial(_all_gather, rank_group=rank_group), rank_group
    )
    return Pending(lambda: pending.wait()[: counts[rank_group.rank]])


def gather_replicated(x: Tensor, counts: Sequence[int], rank_group: RankGroup) -> Tensor:
    """All-gather rows, for a result that every rank uses in the same way.

    The gradient of the result is then the same on all ranks. Backward takes this rank's rows of it; a sum over ranks,
    as in `gather_rows`, would count it several times.
    """
    if rank_group.size == 1 or max(counts) == 0:
        return x
    out: Tensor = _GatherReplicated.apply(x, list(counts), rank_group)
    return out


def sum_gradients(x: Tensor, rank_group: RankGroup) -> Tensor:
    """Return x; backward sums the gradient over the group.

    For a value that is equal on all ranks, of which each rank uses a part.
    """
    if rank_group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    out: Tensor = _SumGradients.apply(x, rank_group)
    return out


def as_bytes(x: Tensor) -> Tensor:
    """Return E4M3 rows as a view of uint8 [..., H], because gloo does not support E4M3; other rows unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `as_bytes`. Rows of the right dtype are returned as they are: a view as another dtype has no gradient."""
    return x if x.dtype == dtype else x.view(dtype)


def _start(x: Tensor, there: Collective, back: Collective, rank_group: RankGroup) -> Pending[Tensor]:
    works: list[dist.Work] = []
    out: Tensor = _Collective.apply(x, there, back, rank_group, works)

    def finish() -> Tensor:
        with torch.no_grad():  # gloo's wait may copy into `out`, which autograd would record as an operation on it
            for work in works:
                work.wait()
                rank_group.nan_if_aborted(out)
        return out

    return Pending(finish)


def _padded(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x.contiguous()


def _trimmed(x: Tensor, counts: Sequence[int]) -> Tensor:
    most = max(counts)
    if min(counts) == most:
        return x
    return torch.cat([x[i * most : i * most + count] for i, count in enumerate(counts)])


def _all_to_all(
    x: Tensor, *, send: list[int], receive: list[int], rank_group: RankGroup
) -> tuple[Tensor, dist.Work | None]:
    out = x.new_empty(sum(receive), *x.shape[1:])
    work = dist.all_to_all_single(out, x.contiguous(), receive, send, group=rank_group.group, async_op=True)
    return out, work


def _all_gather(x: Tensor, *, rank_group: RankGroup) -> tuple[Tensor, dist.Work | None]:
    out = x.new_empty(rank_group.size * x.shape[0], *x.shape[1:])
    return out, all_gather_single(out, x.contiguous(), group=rank_group.group, async_op=True)


def _reduce_scatter(x: Tensor, *, rank_group: RankGroup) -> tuple[Tensor, dist.Work | None]:
    out = x.new_empty(x.shape[0] // rank_group.size, *x.shape[1:])
    return out, reduce_scatter_single(out, x.contiguous(), group=rank_group.group, async_op=True)


class _Collective(Function):
    """A collective whose backward is the adjoint collective."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Collective, back: Collective, rank_group: RankGroup, works: list[dist.Work]
    ) -> Tensor:
        ctx.back, ctx.rank_group, ctx.call_name = back, rank_group, rank_group.flight_recorder.call_name
        ctx.number = next(rank_group.exchanges)
        out, work = there(x)
        if work is not None:
            works.append(work)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        with ctx.rank_group.flight_recorder.step(f"backward by {ctx.back.func.__name__.lstrip('_')}"):
            ctx.rank_group.meet_in_backward(ctx.call_name, ctx.number, grad)
            out, work = ctx.back(grad)
            if work is not None:
                work.wait()
                ctx.rank_group.nan_if_aborted(out)
        return out, None, None, None, None


class _GatherReplicated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], rank_group: RankGroup) -> Tensor:
        ctx.counts, ctx.rank = counts, rank_group.rank
        out, work = _all_gather(_padded(x, max(counts)), rank_group=rank_group)
        if work is not None:
            work.wait()
            rank_group.nan_if_aborted(out)
        return _trimmed(out, counts)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.counts)[ctx.rank], None, None


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_group: RankGroup) -> Tensor:
        ctx.rank_group = rank_group
        return x.view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_batch(grad)
        total = grad.contiguous().clone()
        with ctx.rank_group.flight_recorder.step("backward of the token split"):
            ctx.rank_group.all_reduce(total)
        return total, None
