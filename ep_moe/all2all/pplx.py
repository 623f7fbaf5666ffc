"""`pplx`: pplx-kernels' intranode all2all, for decode sizes.

Rows arrive grouped by expert, with room for all tokens at each expert (BATCHED), one copy per route. Combine multiplies
by the routing weights.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot
from ep_moe.all2all.capabilities import one_host_problem
from ep_moe.all2all.wire_ids import to_distinct
from ep_moe.errors import BackendUnavailable
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.types import Pending, PhysicalRouting, Received, RowLayout, Weighting, capturing


@dataclass(frozen=True)
class _Handle:
    """State of a call. ids, weights: as sent; routed: bool [T, 1], tokens with at least one expert."""

    buffer_slot: BufferSlot
    ids: Tensor
    weights: Tensor
    routed: Tensor


class PplxDispatcher(Dispatcher):
    """pplx-kernels' intranode all2all: rows grouped by expert, one copy per route, for decode sizes."""

    name = "pplx"
    tested_machines = (
        "pplx-kernels 12cecfd on 2 and 4 H200, one host; on CPU, gloo, over an emulation of its intranode contract"
    )
    capabilities = DispatcherCapabilities(
        layout=RowLayout.BATCHED,
        weighting=Weighting.COMBINE,
        dedup=False,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,  # rows arrive in any order, but are summed in the order of routes
        differentiable=False,
        alignment_bytes=16,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        dispatch_formats=frozenset({"plain", "fp8_block", "fp8_tensor"}),
        scale_alignment_bytes=16,
        static=True,
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 70, "a row per route, for few tokens"

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self.buffer_pool = BufferPool(self.name, self._connect)

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec("pplx_kernels") is None:
            return "pplx-kernels is not installed; build it from github.com/ppl-ai/pplx-kernels"
        return None

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        ranks = layout.group("ep")
        if ranks != sorted(ranks):
            return f"{cls.name} needs the ranks of the EP group in ascending order, got {ranks}"
        return one_host_problem(cls.name, layout)

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count the received rows. Buffers within the library are not counted."""
        assert dispatch_shape.max_tokens is not None
        rows = dispatch_shape.slots_per_rank * dispatch_shape.num_ranks * dispatch_shape.max_tokens
        return rows * (dispatch_shape.row_bytes + dispatch_shape.scale_bytes)

    @classmethod
    def calls_in_parts(cls, dispatch_shape: DispatchShape) -> int:
        """Return 3: a call keeps its workspace until its results have been received."""
        return 3

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        buffer_slot = self.buffer_pool.take(x.device)
        if problem is not None:
            self._poison(buffer_slot, x.device)
            self.refuse(problem)
        g = self.dispatch_shape
        ids = torch.empty(routing.ids.shape, dtype=torch.int32, device=x.device)
        weights = torch.empty(routing.ids.shape, dtype=torch.float32, device=x.device)
        own_expert = self.rank_group.rank * g.slots_per_rank
        to_distinct(routing.ids.contiguous(), routing.weights.contiguous(), own_expert, g.num_physical, ids, weights)
        routed = ((routing.ids >= 0) & (routing.ids < g.num_physical)).any(1, keepdim=True)
        buffer_slot.busy = True
        handle = _Handle(buffer_slot, ids.view(torch.uint32), weights, routed)
        rows, scale = x.contiguous(), None if x_scale is None else x_scale.contiguous()
        buffer_slot.workspace.dispatch(rows, scale, handle.ids, send=True)

        def finish() -> Received:
            workspace = buffer_slot.workspace
            workspace.dispatch(rows, scale, handle.ids, send=False)
            return Received(
                x=workspace.rows,
                x_scale=workspace.scales,
                layout=RowLayout.BATCHED,
                weighting=Weighting.COMBINE,
                handle=handle,
                expert_counts=workspace.counts,
            )

        return Pending(finish)

    def _combine(self, y: Tensor, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        rows, workspace = y.contiguous(), handle.buffer_slot.workspace
        assert self.dispatch_shape.max_tokens is not None
        sums = y.new_empty(self.dispatch_shape.max_tokens, y.shape[-1])
        workspace.combine(sums, handle.ids, handle.weights, rows, send=True)

        def finish() -> Tensor:
            workspace.combine(sums, handle.ids, handle.weights, rows, send=False)
            handle.buffer_slot.release(y.device)
            # a token without an expert went to this rank with weight 0; 0 * inf in its row would give NaN
            return torch.where(handle.routed, sums[: len(handle.ids)], 0)

        return Pending(finish)

    def _poison(self, buffer_slot: BufferSlot, device: torch.device) -> None:
        """Make this call without rows, and answer the peers' rows with NaN.

        The peers have already started the call, and would otherwise wait for this rank.
        """
        if capturing(device):
            return
        g, workspace = self.dispatch_shape, buffer_slot.workspace
        ids = torch.empty(0, g.top_k, dtype=torch.int32, device=device)
        weights, unsigned = ids.float(), ids.view(torch.uint32)
        for send in (True, False):
            workspace.dispatch(*g.no_rows(device), unsigned, send=send)
        y = torch.full_like(workspace.rows, torch.nan, dtype=g.dtype)
        out = y.new_empty(g.max_tokens or 1, g.hidden_size)
        for send in (True, False):
            workspace.combine(out, unsigned, weights, y, send=send)

    def destroy(self) -> None:
        self.buffer_pool.destroy()

    def _connect(self, device: torch.device) -> Workspace:
        try:
            return Workspace(self.dispatch_shape, self.rank_group, device)
        except (ImportError, OSError, RuntimeError) as error:
            raise BackendUnavailable(f"{self.name} cannot run here: {error}; choose another all2all") from error


class Workspace:
    """pplx-kernels' buffers for one call, and the tensors into which it delivers rows.

    rows: [L, N, H], N = R * max_tokens
    scales: float32 [L, N, H / 128] for fp8_block rows, else None
    counts: int32 [L], rows per expert
    """

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup, device: torch.device) -> None:
        g = dispatch_shape
        assert g.max_tokens is not None
        shape = (g.slots_per_rank, g.num_ranks * g.max_tokens)
        self.rows = torch.empty(*shape, g.hidden_size, dtype=g.row_dtype, device=device)
        self.scales = torch.empty(*shape, g.scales, dtype=torch.float32, device=device) if g.scales else None
        self.counts = torch.zeros(g.slots_per_rank, dtype=torch.int32, device=device)
        self._all2all = make_all2all(g, rank_group)

    def dispatch(self, x: Tensor, x_scale: Tensor | None, ids: Tensor, *, send: bool) -> None:
        self._all2all.dispatch(
            out_expert_num_tokens=self.counts,
            out_expert_x=self.rows,
            out_expert_x_scale=self.scales,
            dp_x=x,
            dp_x_scale=x_scale,
            indices=ids,
            bound_m=None,
            do_send=send,
            do_recv=not send,
        )

    def combine(self, out: Tensor, ids: Tensor, weights: Tensor, y: Tensor, *, send: bool) -> None:
        self._all2all.combine(
            out_tokens=out,
            indices=ids,
            weights=weights,
            expert_y=y,
            bound_m=None,
            do_send=send,
            do_recv=not send,
        )

    def destroy(self) -> None:
        self._all2all.destroy()


def make_all2all(dispatch_shape: DispatchShape, rank_group: RankGroup) -> Any:
    """Create pplx-kernels' object for one workspace. Collective.

    pplx-kernels exchanges memory handles over a process group with a CPU backend.
    """
    from pplx_kernels import AllToAll

    group = dist.new_group(list(rank_group.ranks), backend="cpu:gloo,cuda:nccl", use_local_synchronization=True)
    return AllToAll.intranode(
        max_num_tokens=dispatch_shape.max_tokens,
        num_experts=dispatch_shape.num_physical,
        experts_per_token=dispatch_shape.top_k,
        rank=rank_group.rank,
        world_size=rank_group.size,
        dp_size=1,
        hidden_dim=dispatch_shape.hidden_size,
        hidden_dim_bytes=dispatch_shape.row_bytes,
        hidden_dim_scale_bytes=dispatch_shape.scale_bytes,
        group_name=group.group_name,
    )
