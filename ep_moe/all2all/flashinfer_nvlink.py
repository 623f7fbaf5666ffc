"""`flashinfer_nvlink`: FlashInfer's one-sided all2all. Each rank writes its rows directly into its peers' memory over
NVLink, and reads the experts' outputs from their memory.

The host never waits, and shapes do not depend on the routing: R * max_tokens rows arrive, and empty rows have ids -1.
A workspace holds one call in flight. A second call before the first is combined gets its own workspace.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot
from ep_moe.all2all.capabilities import one_host_problem
from ep_moe.all2all.wire_ids import to_wire
from ep_moe.errors import BackendUnavailable
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.runtime.devices import SideStream
from ep_moe.types import Pending, PhysicalIds, PhysicalRouting, Received, RowLayout, Weighting, WireIds, capturing

TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # for which FlashInfer compiles its kernels


class FlashInferNVLinkDispatcher(Dispatcher):
    """FlashInfer's one-sided all2all over NVLink, with room for R * max_tokens rows."""

    name = "flashinfer_nvlink"
    tested_machines = "2 and 4 H200, 2 H100, one host; on CPU, gloo, over an emulation of its contract"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,  # rows arrive in any order, but are summed in the order of ranks
        differentiable=False,
        max_ranks=64,
        max_top_k=TOP_KS[-1],
        alignment_bytes=16,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        dispatch_formats=frozenset(ROW_FORMATS),
        combine_formats=frozenset({"plain", "fp8"}),
        static=True,
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 20, "straight into peers' memory, no host sync"

    _made: ClassVar[int] = 0  # FlashInfer shares workspaces of equal parameters in a process; ours must all differ

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._top_k = _wire_top_k(dispatch_shape)
        self._base = rank_group.rank * dispatch_shape.slots_per_rank
        self.buffer_pool = BufferPool(self.name, self._connect)
        self._side = SideStream()

    @classmethod
    def available(cls) -> str | None:
        return registry.without_flashinfer()

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        return one_host_problem(cls.name, layout)

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count received rows with ids and weights, and the experts' rows. Quantized rows count like plain ones."""
        assert dispatch_shape.max_tokens is not None
        row = dispatch_shape.hidden_size * dispatch_shape.dtype.itemsize
        return dispatch_shape.num_ranks * dispatch_shape.max_tokens * (2 * row + 8 * _wire_top_k(dispatch_shape))

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        buffer_slot = self.buffer_pool.take(x.device)
        if problem is not None:
            self._poison(buffer_slot, x.device, max_tokens)
            self.refuse(problem)
        wire = (len(x), self._top_k)
        ids = torch.empty(wire, dtype=torch.int32, device=x.device)
        weights = torch.empty(wire, dtype=torch.float32, device=x.device)
        to_wire(
            routing.ids.contiguous(),
            routing.weights.contiguous(),
            self._base,
            self.dispatch_shape.num_physical,
            ids,
            weights,
        )
        buffer_slot.busy = True
        scale = None if x_scale is None else x_scale.contiguous()
        arrived = buffer_slot.workspace.dispatch(
            x.contiguous(), ids, weights, hidden_states_scale=scale, max_tokens_per_rank=max_tokens
        )
        received = Received(
            x=arrived.hidden_states,
            x_scale=arrived.hidden_states_scale,
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=buffer_slot,
            wire_ids=WireIds(PhysicalIds(arrived.topk_ids), self._base),
            weights=arrived.topk_weights,
            out=buffer_slot.workspace.get_combine_input_buffer(self.dispatch_shape.dtype),
        )
        return Pending.of(received)

    def _combine(self, y: Tensor, handle: BufferSlot, out: Tensor | None) -> Pending[Tensor]:
        sums = handle.workspace.combine(y.contiguous())
        handle.release(y.device)
        return Pending.of(sums)

    def _poison(self, buffer_slot: BufferSlot, device: torch.device, max_tokens: int | None) -> None:
        """Make this call without rows, and answer the peers' rows with NaN.

        The peers have already started the call, and would otherwise wait for this rank.

        max_tokens: the token limit of the call, by which the peers lay out their buffers
        """
        if capturing(device):
            return
        g = self.dispatch_shape
        x, x_scale = g.no_rows(device)
        ids = torch.empty(0, self._top_k, dtype=torch.int32, device=device)
        buffer_slot.workspace.dispatch(x, ids, ids.float(), hidden_states_scale=x_scale, max_tokens_per_rank=max_tokens)
        rows = buffer_slot.workspace.get_combine_input_buffer(g.dtype).fill_(torch.nan)
        buffer_slot.workspace.combine(rows)

    def destroy(self) -> None:
        self.buffer_pool.destroy()

    def _connect(self, device: torch.device) -> Any:
        g, kind = self.dispatch_shape, type(self)
        number = max(
            row[0] for row in self.rank_group.exchange(torch.tensor([kind._made], dtype=torch.int64, device=device))
        )
        kind._made = number + 1
        group = {
            "world_size": self.rank_group.size,
            "rank": self.rank_group.rank,
            "device": device.index,
            "process_group": self.rank_group.group,
        }
        params = {
            "num_experts": g.num_physical,
            "top_k": self._top_k,
            "max_tokens_per_rank": g.max_tokens,
            "hidden_size": g.hidden_size,
            "dtype": g.dtype,
        }
        config = {
            "extra_payload_bytes_per_token": 128 * number,  # makes the size unique: sizes are padded to 128 bytes
            "use_low_precision_combine": g.wire.combine == "fp8",
        }
        try:
            return communication(group, params, config)
        except RuntimeError as error:  # FlashInfer checks this on all ranks, so all raise
            raise BackendUnavailable(f"{self.name} cannot run here: {error}; choose another all2all") from error


def _wire_top_k(dispatch_shape: DispatchShape) -> int:
    return next(size for size in TOP_KS if size >= dispatch_shape.top_k)


def communication(group: dict[str, Any], params: dict[str, Any], config: dict[str, Any]) -> Any:
    """Create FlashInfer's object for one workspace. Collective."""
    from flashinfer.comm.comm_backend import TorchDistBackend
    from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication

    class Whole(TorchDistBackend):  # type: ignore[misc]
        """The EP group, unsplit.

        FlashInfer's own `Split` passes ranks within the group to torch, which expects global ranks. Several EP groups
        in one job would then wait for each other forever.
        """

        def Split(self, color: int, key: int) -> Whole:  # noqa: N802
            return self

    bootstrap, own = BootstrapConfig(**group), Whole(group=group["process_group"])
    return create_communication(bootstrap, MoEEpCommParams(**params), NVLinkOneSidedConfig(**config, comm_backend=own))
