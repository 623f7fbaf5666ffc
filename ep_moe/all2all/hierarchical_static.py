"""`hierarchical_static`: as `hierarchical`, with room for every token everywhere, so that no rank waits for counts.

Each call moves `max_tokens` rows per rank, whatever the routing: by all-gather over the rail and then within the node;
results come back by all-to-alls of equal parts. Sums have the order of `hierarchical`. Nothing can overflow, and CUDA
graphs can hold a call. Few tokens per rank hardly move more rows than must: nearly each has an expert on each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.hierarchical import levels_of, without_rails
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup, all_gather_single
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.types import LocalIds, Pending, PhysicalIds, PhysicalRouting, Received, RowLayout, Weighting, capturing


@dataclass(frozen=True)
class _Handle:
    """tokens: of this rank; bound: of every rank; invalid: bool [T, 1], which have an id of no expert."""

    tokens: int
    bound: int
    invalid: Tensor


class HierarchicalStaticDispatcher(Dispatcher):
    name = "hierarchical_static"
    run_on = "CPU, gloo, 2 nodes of 2 and 4 ranks, 4 nodes of 2; GPUs: NOT RUN"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        adjoint=True,
        dispatch_formats=frozenset(ROW_FORMATS),
        static=True,
    )

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._levels = levels_of(rank_group)
        self._first = rank_group.rank * dispatch_shape.slots_per_rank

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 48, "max_tokens rows to every rank, once to each node, without a wait for the host"

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        return without_rails(cls.name, layout)

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        assert max_tokens is not None, "the base class checks it"
        if problem is not None:
            self._poison(x.device, max_tokens)
            self.refuse(problem)
        return self._send(x, x_scale, routing, max_tokens)

    def _send(self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int) -> Pending[Received]:
        ids = routing.ids.int()
        invalid = ((ids < -1) | (ids >= self.dispatch_shape.num_physical)).any(1, keepdim=True)
        parts = [x, ids, routing.weights] if x_scale is None else [x, ids, routing.weights, x_scale]
        in_bytes = [_bytes(part) for part in parts]
        # rows behind the last token: all bits are set, so that ids are -1, and rows are of no expert
        widths = [part.shape[1] for part in in_bytes]
        message = torch.full((bound, sum(widths)), 255, dtype=torch.uint8, device=x.device)
        torch.cat(in_bytes, dim=1, out=message[: len(x)])
        over_rail = _gather(message, self._levels.rail)

        def finish() -> Received:
            found = _columns(_gather(over_rail(), self._levels.node)(), widths)
            rows, ids, weights, *scale = (column.view(part.dtype) for column, part in zip(found, parts, strict=True))
            local = ids - self._first
            return Received(
                x=rows,
                x_scale=scale[0] if scale else None,
                layout=RowLayout.RANK_MAJOR,
                weighting=Weighting.EXPERTS,
                handle=_Handle(len(x), bound, invalid),
                local_ids=LocalIds(local.where((local >= 0) & (local < self.dispatch_shape.slots_per_rank), -1)),
                weights=weights,
            )

        return Pending(finish)

    def _combine(self, y: Tensor, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        within_node = _exchange(y.contiguous(), self._levels.node)

        def finish() -> Tensor:
            of_node = _sum(within_node(), self._levels.node.size)
            total = _sum(_exchange(of_node, self._levels.rail)(), self._levels.rail.size)
            # nothing has waited for the device to refuse such an id; its token must not look like a result
            return total[: handle.tokens].masked_fill(handle.invalid, torch.nan)

        return Pending(finish)

    def _poison(self, device: torch.device, bound: int) -> None:
        """Take part with no rows, and give NaN to the peers' rows: they have started and cannot be called back."""
        if capturing(device):
            return
        g = self.dispatch_shape
        x, x_scale = g.no_rows(device)
        ids = torch.empty(0, g.top_k, dtype=torch.int32, device=device)
        received = self._send(x, x_scale, PhysicalRouting(PhysicalIds(ids), ids.float()), bound).wait()
        assert received.local_ids is not None
        here = (received.local_ids >= 0).any(1, keepdim=True)
        y = torch.zeros(len(here), g.hidden_size, dtype=g.dtype, device=device).masked_fill(here, torch.nan)
        self._combine(y, received.handle, None).wait()


def _bytes(x: Tensor) -> Tensor:
    """[rows, bytes of a row]. An expanded tensor without elements is contiguous whatever its strides, which a view by
    dtype refuses."""
    x = x.contiguous()
    return (x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _columns(message: Tensor, widths: list[int]) -> list[Tensor]:
    """Copies of its columns of so many bytes, in the widest words that all of them are made of: a copy of strided bytes
    moves them one by one."""
    word = next(kind for kind in (torch.int64, torch.int32, torch.uint8) if not any(w % kind.itemsize for w in widths))
    columns = message.view(word).split([width // word.itemsize for width in widths], dim=1)
    return [column.clone(memory_format=torch.contiguous_format) for column in columns]


def _gather(x: Tensor, rank_group: RankGroup) -> Callable[[], Tensor]:
    """[rows, ...] of every rank, one behind the other, once it is called."""
    if rank_group.size == 1:
        return lambda: x
    out = x.new_empty(rank_group.size * len(x), *x.shape[1:])
    work = all_gather_single(out, x, group=rank_group.group, async_op=True)
    return lambda: _waited(out, work)


def _exchange(x: Tensor, rank_group: RankGroup) -> Callable[[], Tensor]:
    """As many rows to every rank; what comes back is in the order of ranks."""
    if rank_group.size == 1:
        return lambda: x
    out = torch.empty_like(x)
    work = dist.all_to_all_single(out, x, group=rank_group.group, async_op=True)
    return lambda: _waited(out, work)


def _waited(out: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return out


def _sum(x: Tensor, parts: int) -> Tensor:
    """[parts * rows, H] to [rows, H]: added in float32, in their order."""
    first, *rest = x.view(parts, -1, x.shape[1])
    total: Tensor = first.float()
    for part in rest:
        total = total + part
    return total.to(x.dtype)
