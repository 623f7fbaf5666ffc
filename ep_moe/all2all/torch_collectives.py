"""Transports over torch's collectives, on any device: `local`, `allgather` and `torch_a2a`.

local       one rank, nothing travels
allgather   every rank receives every token and computes its own experts; reduce-scatter sums the outputs. The simplest
            transport, and the reference for the others. It moves R - 1 rows per token each way, whatever the routing.
            With K > R this is little more than any transport must move.
torch_a2a   each token travels once to each rank that holds one of its experts, by `all_to_all_single`, in four steps:

    plan       decide from the ids which rows go to which rank (no communication)
    exchange   exchange row counts between all pairs of ranks (the host waits for them once)
    dispatch   send rows, local ids and weights
    combine    return the results; sum them per token in rank order in float32, so that equal inputs give equal bits
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.fan_out import FanOut, RowExchange, Rows, wanted_places
from ep_moe.errors import InputError
from ep_moe.parallel.collectives import all_to_all_rows, as_bytes, as_rows, gather_rows, reduce_scatter_rows
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.types import LocalIds, Pending, PhysicalRouting, Received, RowLayout, Weighting, capturing


class LocalDispatcher(Dispatcher):
    """The transport of one rank: it passes rows on unchanged, and physical ids are local ids.

    An eager call waits for the device once, to check the ids. CUDA graph captures and compiled graphs do not check
    them, so the capability `host_sync` is False.
    """

    name = "local"
    tested_machines = "CPU; 1 H200"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        exact=True,
        differentiable=True,
        max_ranks=1,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 0, "one rank, nothing travels"

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        if problem is not None:
            raise InputError(problem)
        if not torch.compiler.is_compiling() and not capturing(x.device):
            self._check_ids([int(self._out_of_range(routing))])
        received = Received(
            x=x,
            x_scale=x_scale,
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=None,
            local_ids=cast("LocalIds", routing.ids),
            weights=routing.weights,
        )
        return Pending.of(received)

    def _combine(self, y: Tensor, handle: None, out: Tensor | None) -> Pending[Tensor]:
        return Pending.of(y)


class AllGatherDispatcher(Dispatcher):
    """All-gather of rows, ids and weights; reduce-scatter of outputs in the dtype of the rows."""

    name = "allgather"
    tested_machines = "CPU, gloo, 2 and 4 ranks; 2 and 4 H200, 4 H100, NCCL"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=False,
        to_all=True,
        host_sync=True,
        deterministic=True,
        exact=True,
        differentiable=True,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        if top_k >= layout.ep:
            return 30, f"top_k={top_k} >= ep={layout.ep}: a token reaches nearly every rank anyway"
        return 40, "every row to every rank"

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        if problem is not None:  # `routing` may not be a PhysicalRouting then
            self.rank_group.agree([0, 0], problem, x.device)
        gradients = {"x": x, "routing.weights": routing.weights}
        rows = self.rank_group.agree([x.shape[0], self._out_of_range(routing)], None, x.device, gradients=gradients)
        self._check_ids([row[1] for row in rows])
        counts = [row[0] for row in rows]
        pending_x = gather_rows(as_bytes(x), counts, self.rank_group)
        scale_dtype = self.dispatch_shape.row_format.scale
        pending_scale = None if x_scale is None else gather_rows(as_bytes(x_scale), counts, self.rank_group)
        pending_ids = gather_rows(routing.ids, counts, self.rank_group)
        pending_weights = gather_rows(routing.weights, counts, self.rank_group)

        def finish() -> Received:
            local = pending_ids.wait() - self.rank_group.rank * self.dispatch_shape.slots_per_rank
            mine = (local >= 0) & (local < self.dispatch_shape.slots_per_rank)
            return Received(
                x=as_rows(pending_x.wait(), x.dtype),
                x_scale=None if pending_scale is None else as_rows(pending_scale.wait(), scale_dtype),
                layout=RowLayout.RANK_MAJOR,
                weighting=Weighting.EXPERTS,
                handle=counts,
                local_ids=LocalIds(local.where(mine, torch.full_like(local, -1))),
                weights=pending_weights.wait(),
            )

        return Pending(finish)

    def _combine(self, y: Tensor, handle: list[int], out: Tensor | None) -> Pending[Tensor]:
        return reduce_scatter_rows(y, handle, self.rank_group)


@dataclass(frozen=True)
class _Handle:
    """State of a call. sent, received: rows per peer; fan_out: which of this rank's tokens go to which rank."""

    sent: list[int]
    received: list[int]
    fan_out: FanOut


class TorchAll2AllDispatcher(Dispatcher):
    """Sends a token once to each rank that has one of its experts, by `all_to_all_single`."""

    name = "torch_a2a"
    tested_machines = "CPU, gloo, 2 and 4 ranks; 2 and 4 H200, 4 H100, NCCL"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        exact=True,
        differentiable=True,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._over_ranks: RowExchange = partial(all_to_all_rows, rank_group=rank_group)

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        if top_k >= layout.ep:
            return 40, "a row per rank that needs it"
        return 30, f"top_k={top_k} < ep={layout.ep}: a token travels to {top_k} ranks at most, not to {layout.ep - 1}"

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        ranks = self.rank_group.size
        if problem is not None:
            self.rank_group.agree([0] * (ranks + 1), problem, x.device)
        ids = routing.ids.long()
        bad = self._out_of_range(routing)
        wanted = wanted_places(ids, self.dispatch_shape.slots_per_rank, ranks)
        gradients = {"x": x, "routing.weights": routing.weights}
        facts = self.rank_group.agree([bad, wanted.sum(0)], None, x.device, gradients=gradients)
        self._check_ids([row[0] for row in facts])
        sent = facts[self.rank_group.rank][1:]
        received = [row[1 + self.rank_group.rank] for row in facts]

        fan_out = FanOut.of(wanted, sum(sent), self.dispatch_shape.top_k)
        rows = Rows(as_bytes(x), None if x_scale is None else as_bytes(x_scale), ids, routing.weights)
        pending = rows.start(fan_out, self.dispatch_shape.slots_per_rank, self._over_ranks, sent, received)

        def finish() -> Received:
            return pending.wait().received(self.dispatch_shape, x.dtype, _Handle(sent, received, fan_out))

        return Pending(finish)

    def _combine(self, y: Tensor, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        pending = self._over_ranks(y, handle.received, handle.sent)

        def finish() -> Tensor:
            return handle.fan_out.sums(pending.wait())

        return Pending(finish)
