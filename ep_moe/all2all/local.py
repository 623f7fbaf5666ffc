"""`local`: one rank, nothing travels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities
from ep_moe.errors import InputError
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.types import LocalIds, Pending, PhysicalRouting, Received, RowLayout, Weighting, capturing


class LocalDispatcher(Dispatcher):
    """Hands the rows on as they are; physical ids are local ids. An eager call waits for the device once, to check
    the ids; CUDA-graph captures and compiled graphs take them on trust, and so it counts as free of host syncs."""

    name = "local"
    run_on = "CPU; 1 H200"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=True,
        max_ranks=1,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    @classmethod
    def preference(cls, top_k: int, ranks: int) -> tuple[int, str]:
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
