"""`allgather`: every rank receives every token and serves its own experts; outputs are summed by reduce-scatter.

The plainest transport, and the oracle of the others. It moves R - 1 rows per token each way whatever the routing, which
is little more than any transport must where K is larger than R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities
from ep_moe.parallel.rank_group import as_bytes, as_rows, gather_rows, reduce_scatter_rows
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.types import LocalIds, Pending, PhysicalRouting, Received, RowLayout, Weighting


class AllGatherDispatcher(Dispatcher):
    """All-gather of rows, ids and weights; reduce-scatter of outputs in the dtype of the rows."""

    name = "allgather"
    run_on = "CPU, gloo, 2 and 4 ranks; 4 H200, NCCL"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=True,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    @classmethod
    def preference(cls, top_k: int, ranks: int) -> tuple[int, str]:
        if top_k >= ranks:
            return 30, f"top_k={top_k} >= ep={ranks}: a token reaches nearly every rank anyway"
        return 40, "every row to every rank"

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        if problem is not None:  # which may be that routing is none
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
