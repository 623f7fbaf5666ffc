"""`nvlink_p2p`: an all2all within one host by this project's kernels. Each rank writes rows into its peers' memory.

A call launches two kernels: one sends, one receives. The experts' last kernel writes the results directly back. If it
cannot (`peer_out`), a third kernel returns them. Small calls use LL packets, which need no flag. Large calls that
overlap other work use copy engines.

Token t of rank s has the index s * limit + t on every rank, where limit is the token limit of the call. So no rank
counts, packs or exchanges anything before it sends rows, and a token's rank knows where its results arrive. Ids and
weights of all tokens go to all ranks. A row goes once to each rank that holds one of its experts. A rank sets a flag in
each peer's memory when it has written rows (dispatch), and when its results are ready (combine). The flag holds the
sequence number of the call. It increases from call to call, so CUDA-graph replays need no reset.

Dispatch and combine alternate, so no buffer is overwritten before it is read:

- A rank sends rows of the next call after its peer has flagged that its experts are done.
- A rank writes results after all rows of the call have arrived. A peer sends them after it has read the last results.

Without `max_tokens` the buffers grow. The ranks agree on the token limit before each call (`Dispatcher.call_bound`), so
all of them allocate larger buffers in the same call.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot, RecordableCall
from ep_moe.all2all.capabilities import one_host_problem
from ep_moe.all2all.nvlink_p2p.buffers import PeerMemory, Workspace, pieces, place_shapes
from ep_moe.all2all.nvlink_p2p.reference import (
    copy_answers,
    receive,
    receive_route_values,
    send,
    send_copies,
    send_route_values,
    signal_answers_written,
)
from ep_moe.errors import BackendUnavailable, InputError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.runtime.devices import SideStream, without_peer_atomics
from ep_moe.runtime.workspace import carved_bytes
from ep_moe.types import PeerRows, Pending, PhysicalIds, PhysicalRouting, Received, RowLayout, Weighting, capturing

_log = logging.getLogger("ep_moe.all2all")

make_memory: Any = PeerMemory  # collective; CPU tests replace it by memory that processes share
BLOCKS, BLOCKS_BESIDE = 132, 24  # most programs of a kernel: alone, and beside kernels that need multiprocessors too


@dataclass(frozen=True)
class _Handle:
    """State of a call.

    tokens, bound: T and the token limit
    weights: float32 [T, K], receives one number per route (`combine_with_weights`); else None
    """

    buffer_slot: BufferSlot
    tokens: int
    bound: int
    weights: Tensor | None = None


class NVLinkP2PDispatcher(Dispatcher):
    """This project's kernels, which write rows and results directly into the memory of peers on one host."""

    name = "nvlink_p2p"
    tested_machines = (
        "2 and 4 H200 and H100, one host, fp8 back and fp8_row out on 2; on CPU over memory that ranks share"
    )
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        exact=True,
        differentiable=False,
        adjoint=True,
        returns_weights=True,
        max_ranks=8,
        alignment_bytes=16,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        devices=frozenset({"cuda"}),
        dispatch_formats=frozenset(ROW_FORMATS),
        combine_formats=frozenset({"plain", "fp8"}),
        rounds=frozenset({"fp8_block", "fp8_row", "fp8_tensor"}),
        static=True,
        grows=True,
        peer_out=True,
        per_route=True,
        places=True,
    )

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 10, "straight into peers' memory by own kernels, no host sync"

    # rows and results use LL packets if the rows from one rank to another have at most this many bytes
    low_latency_bytes: ClassVar[int] = 1 << 18
    low_latency_programs: ClassVar[int] = 512  # most programs (of 4 warps) of a packet kernel; all must run at once
    copied_bytes: ClassVar[int] = 1 << 20  # overlapped calls use copy engines from this many bytes per rank

    least_room: ClassVar[int] = 256  # tokens for which growing buffers are first allocated: decode calls fit

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._most_by_packets = self._low_latency_tokens(dispatch_shape)
        self._room = dispatch_shape.max_tokens or self.least_room  # tokens per rank for which buffers are allocated
        self.buffer_pool = BufferPool(self.name, self._connect)
        self._side: SideStream = SideStream()

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; it comes with torch on Linux with CUDA"
        return None

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        problem = one_host_problem(cls.name, layout)
        if layout.paper_gpus is not None:  # a planned layout assumes NVLink between its GPUs; there is no driver to ask
            return problem
        if problem is None and (apart := without_peer_atomics(layout.ep * layout.etp)) is not None:
            problem = f"{cls.name} needs NVLink between the GPUs, and {apart[0]} and {apart[1]} have none"
        return problem

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count all memory of one call in flight, with flags. 0 for growing buffers, which are not allocated yet."""
        if dispatch_shape.max_tokens is None:
            return 0
        return carved_bytes(place_shapes(dispatch_shape, cls._low_latency_tokens(dispatch_shape)))

    @classmethod
    def room_for(cls, bound: int) -> int:
        return max(cls.least_room, bound)

    def held_bytes(self) -> int:
        return sum(
            self.buffer_bytes(buffer_slot.workspace.dispatch_shape) for buffer_slot in self.buffer_pool.buffer_slots
        )

    @classmethod
    def calls_in_parts(cls, dispatch_shape: DispatchShape) -> int:
        """Return 3 with copy engines, whose results occupy a workspace until they are summed, else 2."""
        return 3 if cls._copies(dispatch_shape) else 2

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        assert max_tokens is not None
        buffer_slot = self._buffers(x.device, max_tokens)
        if problem is not None:
            self._poison(buffer_slot, x.device, max_tokens)
            self.refuse(problem)
        buffer_slot.busy = True
        how = {"packets": self._uses_packets(max_tokens), "allow_pdl": not self._side.active}
        if self._uses_copy_engines(max_tokens):
            send_copies(buffer_slot.workspace, x, x_scale, routing, max_tokens)
        else:
            send(buffer_slot.workspace, x, x_scale, routing, max_tokens, self._blocks, **how)
        there = buffer_slot.workspace.received(max_tokens, **how)
        return Pending.of(Received(handle=_Handle(buffer_slot, len(x), max_tokens), **there))

    def _buffers(self, device: torch.device, bound: int) -> BufferSlot:
        """Return a buffer slot for `bound` tokens per rank. Collective if it is allocated."""
        before, self._room = self._room, max(self._room, bound)
        try:
            found = self.buffer_pool.take(device, lambda workspace: workspace.room >= bound)
        except BaseException:
            self._room = before
            raise
        if self._room > before and self.rank_group.rank == 0 and not self.rank_group.known.grew:
            self.rank_group.known.grew = True  # said once
            _log.warning(
                "%s has allocated buffers for %d tokens per rank (%.1f MiB), and reallocates them for a call with "
                "more tokens; EPContext.from_torchrun(max_tokens=...) allocates them once, which CUDA graphs need",
                self.name, self._room, self.held_bytes() / 2**20,
            )  # fmt: skip
        return found

    def _combine(self, y: Tensor, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        answers = handle.buffer_slot.workspace.local_tensors["answers"]
        if y.data_ptr() != answers.data_ptr():
            answers[: len(y)].copy_(y)
        if not self._uses_copy_engines(handle.bound):
            found = self._receive(handle, out, signal_first=True, send_first=True)
            return Pending.of(found)
        copy_answers(handle.buffer_slot.workspace, handle.bound)
        signal_answers_written(handle.buffer_slot.workspace)
        return Pending(partial(self._receive, handle, out, signal_first=False))

    def _combine_written(self, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        if not self._uses_copy_engines(handle.bound):
            found = self._receive(handle, out, signal_first=True)
            return Pending.of(found)
        signal_answers_written(handle.buffer_slot.workspace)
        return Pending(partial(self._receive, handle, out, signal_first=False))

    def combine_with_weights(
        self,
        y: Tensor | PeerRows,
        by_route: Tensor,
        handle: _Handle,
        out: Tensor | None = None,
        weights_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if weights_out is None:
            weights_out = by_route.new_empty(handle.tokens, self.dispatch_shape.top_k)
        send_route_values(handle.buffer_slot.workspace, by_route, handle.bound)
        return self.combine(y, replace(handle, weights=weights_out), out), weights_out

    def recordable_call(self, bound: int) -> RecordableCall | None:
        g, slots = self.dispatch_shape, self.buffer_pool.buffer_slots
        rounded_here = g.wire.dispatch == "plain" or g.wire.dispatch in self.capabilities.rounds
        if not slots or not rounded_here or bound > slots[0].workspace.room:
            return None
        workspace, packets = slots[0].workspace, self._uses_packets(bound)

        def there(x: Tensor, routing: PhysicalRouting) -> None:
            send(workspace, x, None, routing, bound, BLOCKS, packets=packets, allow_pdl=True)

        def back(y: Tensor | PeerRows, out: Tensor) -> None:
            send_first = isinstance(y, Tensor)  # y is `received.out` then, from which `receive` sends
            receive(workspace, len(out), bound, signal_first=True, send_first=send_first, packets=packets, out=out)

        received = Received(handle=None, **workspace.received(bound, packets=packets, allow_pdl=True))
        return RecordableCall(slots[0], received, there, back, latency_bound=packets)

    def _receive(self, handle: _Handle, out: Tensor | None, *, signal_first: bool, send_first: bool = False) -> Tensor:
        buffer_slot, bound = handle.buffer_slot, handle.bound
        packets = self._uses_packets(bound)
        found = receive(
            buffer_slot.workspace,
            handle.tokens,
            bound,
            signal_first=signal_first,
            send_first=send_first,
            packets=packets,
            out=out,
        )
        if handle.weights is not None:
            receive_route_values(buffer_slot.workspace, handle.weights)
        buffer_slot.release(found.device)
        return found

    def _poison(self, buffer_slot: BufferSlot, device: torch.device, max_tokens: int | None) -> None:
        """Make this call without rows, and answer the peers' rows with NaN.

        The peers have already started the call, and would otherwise wait for this rank.
        """
        if capturing(device):
            return
        assert max_tokens is not None
        ids = torch.empty(0, self.dispatch_shape.top_k, dtype=torch.int64, device=device)
        nowhere = PhysicalRouting(PhysicalIds(ids), ids.float())
        packets = self._uses_packets(max_tokens)
        send(buffer_slot.workspace, *self.dispatch_shape.no_rows(device), nowhere, max_tokens, BLOCKS, packets=packets)
        buffer_slot.workspace.local_tensors["answers"].fill_(torch.nan)
        routes = self.dispatch_shape.num_ranks * max_tokens, self.dispatch_shape.top_k
        send_route_values(
            buffer_slot.workspace, torch.full(routes, torch.nan, dtype=torch.float32, device=device), max_tokens
        )
        receive(buffer_slot.workspace, 0, max_tokens, signal_first=True, send_first=True, packets=packets)

    def _uses_copy_engines(self, bound: int) -> bool:
        """Whether the current call uses copy engines. All ranks overlap it with other work, or none does.

        A rank that refuses the call may differ, because peers cannot tell copies from written rows.
        """
        if not self._side.active or self._uses_packets(bound):
            return False
        return self._copies(replace(self.dispatch_shape, max_tokens=bound) if self.grows else self.dispatch_shape)

    def _uses_packets(self, bound: int) -> bool:
        """Whether a call uses LL packets. Depends on `bound` alone: a rank that refuses a call knows nothing else."""
        return bound <= self._most_by_packets

    @property
    def _blocks(self) -> int:
        return BLOCKS_BESIDE if self._side.active else BLOCKS

    @classmethod
    def _low_latency_tokens(cls, dispatch_shape: DispatchShape) -> int:
        """Return the largest token limit of a call that uses packets.

        Packets double the bytes. In larger calls the links limit the time, and packets would be slower.
        """
        row, returned = dispatch_shape.hidden_size * dispatch_shape.dtype.itemsize, dispatch_shape.returned
        return min(
            cls.low_latency_bytes // row,
            cls.low_latency_programs // (dispatch_shape.num_ranks * pieces(row) * returned),
        )

    @classmethod
    def _copies(cls, dispatch_shape: DispatchShape) -> bool:
        assert dispatch_shape.max_tokens is not None
        many = dispatch_shape.max_tokens > cls._low_latency_tokens(dispatch_shape)
        return many and dispatch_shape.max_tokens * dispatch_shape.row_bytes >= cls.copied_bytes

    def destroy(self) -> None:
        self.buffer_pool.destroy()

    def _connect(self, device: torch.device) -> Workspace:
        shape = replace(self.dispatch_shape, max_tokens=self._room)
        shapes = place_shapes(shape, self._low_latency_tokens(shape))
        try:
            memory = make_memory(self.rank_group, device, carved_bytes(shapes))
        except (ImportError, OSError, RuntimeError) as error:
            raise BackendUnavailable(f"{self.name} cannot run here: {error}; choose another all2all") from error
        except InputError as error:  # raised on all ranks, which keep their present buffers
            found = BackendUnavailable(
                f"{self.name} could not allocate buffers for {self._room} tokens per rank, {error}; pass fewer "
                "tokens in a call, or choose another all2all"
            )
            found.agreed_by = self
            raise found from error
        return Workspace(shape, self.rank_group.rank, shapes, memory)
