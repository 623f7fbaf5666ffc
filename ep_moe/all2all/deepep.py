"""`deepep` and `deepep_static`: DeepEP's intranode kernels (V1 `Buffer`, normal mode).

Both send a row once to each rank that has one of its experts. They run on DeepEP's own stream, so other work overlaps
them between `dispatch_start` and `wait()`. They differ in how received rows are allocated:

- `deepep`: the host waits for the number of rows that arrive, and allocates exactly these.
- `deepep_static`: allocates R * max_tokens rows. The host never waits, and a CUDA graph can capture the call.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.capabilities import one_host_problem
from ep_moe.errors import BackendUnavailable, InputError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.types import LocalIds, Pending, PhysicalRouting, Received, RowLayout, Weighting, capturing

RANKS = (2, 4, 8)  # group sizes for which DeepEP compiles its intranode kernels


class DeepEPDispatcher(Dispatcher):
    """DeepEP's intranode kernels. The host waits for the number of rows that arrive, and allocates exactly these."""

    name = "deepep"
    tested_machines = "DeepEP 1.2.1 on 2 and 4 H200, one host; on CPU, gloo, over an emulation of its V1 contract"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=False,
        max_ranks=RANKS[-1],
        max_top_k=128,
        alignment_bytes=16,
        dtypes=frozenset({torch.bfloat16}),
        dispatch_formats=frozenset({"plain", "fp8_block"}),
        devices=frozenset({"cuda"}),
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 60, "a row per rank that needs it"

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._buffer: Any = None

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec("deep_ep") is None:
            return "DeepEP (module deep_ep) is not installed; build it from github.com/deepseek-ai/DeepEP"
        return None

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        if layout.ep not in RANKS:
            return f"{cls.name} is compiled for {', '.join(map(str, RANKS))} ranks, ep={layout.ep}"
        return one_host_problem(cls.name, layout) or library_problem()

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        bad = 0 if problem else self._out_of_range(routing)
        rows = self.rank_group.agree([bad], problem, x.device)
        self._check_ids([row[0] for row in rows])
        return self._send(x, x_scale, routing.ids.long().contiguous(), routing.weights.contiguous(), 0)

    def _send(self, x: Tensor, x_scale: Tensor | None, ids: Tensor, weights: Tensor, worst: int) -> Pending[Received]:
        """Start DeepEP's dispatch. worst: rows to allocate, 0 to wait for their number. ids: int64, in range or -1."""
        buffer = self._connected(x.device)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            ids, self.dispatch_shape.num_physical
        )
        arrived, local, local_weights, _, handle, event = buffer.dispatch(
            x.contiguous() if x_scale is None else (x.contiguous(), x_scale.contiguous()),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=worst,
            async_finish=True,
        )

        def finish() -> Received:
            event.current_stream_wait()
            rows, scale = (arrived, None) if x_scale is None else arrived
            return Received(
                x=rows,
                x_scale=scale,
                layout=RowLayout.RANK_MAJOR,
                weighting=Weighting.EXPERTS,
                handle=handle,
                local_ids=LocalIds(local),
                weights=local_weights,
            )

        return Pending(finish)

    def _combine(self, y: Tensor, handle: Any, out: Tensor | None) -> Pending[Tensor]:
        sums, _, event = self._buffer.combine(y.contiguous(), handle, async_finish=True)

        def finish() -> Tensor:
            event.current_stream_wait()
            return sums  # type: ignore[no-any-return]

        return Pending(finish)

    def destroy(self) -> None:
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None

    def _connected(self, device: torch.device) -> Any:
        """Return DeepEP's buffer, allocated in the first call. Collective."""
        if self._buffer is None:
            if capturing(device):
                raise InputError(f"{self.name} makes its buffer in the first call: run the layer once before a capture")
            row_bytes = self.dispatch_shape.hidden_size * self.dispatch_shape.dtype.itemsize
            try:
                self._buffer = make_buffer(self.rank_group.group, self.rank_group.size, row_bytes)
            except (ImportError, OSError, RuntimeError, AssertionError) as error:
                raise BackendUnavailable(f"{self.name} cannot run here: {error}; choose another all2all") from error
        return self._buffer


class DeepEPStaticDispatcher(DeepEPDispatcher):
    """DeepEP's intranode kernels with R * max_tokens received rows. The host never waits, and it can be captured."""

    name = "deepep_static"
    tested_machines = "DeepEP 1.2.1 on 2 and 4 H200, one host; on CPU, gloo, over an emulation of its V1 contract"
    capabilities = dataclasses.replace(DeepEPDispatcher.capabilities, cuda_graph=True, host_sync=False, static=True)

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 50, "a row per rank that needs it, no host sync"

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        assert self.dispatch_shape.max_tokens is not None
        if problem is not None:
            self._poison(x.device, max_tokens)
            self.refuse(problem)
        assert max_tokens is not None
        ids = routing.ids.long()
        valid = (ids >= 0) & (ids < self.dispatch_shape.num_physical)
        ids = ids.where(valid, -1)  # DeepEP does not check ids
        return self._send(x, x_scale, ids, routing.weights.contiguous(), self.rank_group.size * max_tokens)

    def _poison(self, device: torch.device, max_tokens: int | None) -> None:
        """Make this call without rows, and answer the peers' rows with NaN.

        The peers have already started the call, and would otherwise wait for this rank.
        """
        if capturing(device):
            return
        g = self.dispatch_shape
        assert max_tokens is not None
        ids = torch.empty(0, g.top_k, dtype=torch.int64, device=device)
        received = self._send(*g.no_rows(device), ids, ids.float(), self.rank_group.size * max_tokens).wait()
        self._combine(torch.full_like(received.x, torch.nan, dtype=g.dtype), received.handle, None).wait()


def library_problem() -> str | None:
    """Return why the installed DeepEP cannot be used, or None.

    The attributes of the module tell DeepEP's interfaces apart. Version numbers do not, because forks choose their
    own. Release 2.x still has `Buffer` besides its new interface.
    """
    try:
        library = importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:
        return f"deep_ep does not import: {error}"
    if hasattr(library, "Buffer"):
        return None
    found = [name for name in ("ElasticBuffer", "EPBuffer") if hasattr(library, name)]
    kind = f"the interface of 2.x ({found[0]}), which has not been run here" if found else "no interface known here"
    return f"this deep_ep has {kind}; install one with the V1 interface (Buffer), such as DeepEP 1.2"


def make_buffer(group: Any, ranks: int, row_bytes: int) -> Any:
    """Create DeepEP's buffer for one group, of the size that DeepEP's own configurations ask for. Collective."""
    from deep_ep import Buffer

    configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    size = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    return Buffer(group, num_nvl_bytes=size, explicitly_destroy=True)
