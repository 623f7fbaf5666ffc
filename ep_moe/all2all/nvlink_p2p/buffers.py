"""The memory of `nvlink_p2p`: how ranks share it, its layout on each rank, and the parts that belong to a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.base import DispatchShape
from ep_moe.parallel.rank_group import RankGroup, barrier
from ep_moe.runtime.devices import unseen_by_modes
from ep_moe.runtime.launch_cache import LaunchCache, cdiv
from ep_moe.runtime.workspace import Shapes, carve
from ep_moe.types import PeerPackets, PeerRows, PhysicalIds, RowLayout, Weighting, WireIds

# rows of the tensor `flags`: rows sent; answers written; ids and weights sent
ROWS_SENT, ANSWERS_READY, IDS_SENT = 0, 1, 2
PIECE = 512  # most 4-byte words of a row that one program of a packet kernel handles


def pieces(row_bytes: int) -> int:
    """Return how many programs of a packet kernel handle one row to one rank."""
    return cdiv(row_bytes, 4 * PIECE)


def answer_dtype(dispatch_shape: DispatchShape) -> torch.dtype:
    """Return the dtype of an answer (a result row) as it travels."""
    return torch.float8_e4m3fn if dispatch_shape.wire.combine == "fp8" else dispatch_shape.dtype


def answer_bytes(dispatch_shape: DispatchShape) -> int:
    return dispatch_shape.hidden_size * answer_dtype(dispatch_shape).itemsize


def place_shapes(dispatch_shape: DispatchShape, low_latency_tokens: int) -> Shapes:
    """Return the shapes and dtypes of each rank's memory. N = R * max_tokens.

    Token t of rank s has the index s * bound + t in all tensors [N, ...], where bound is the token limit of the call.

    rows [N, H / packed], scales [N, H / block], ids and weights [N, K]: written by peers
    answers [N, H]: written by the experts of this rank if they do not write to peers
    arrived [N, H]: answers for this rank's tokens, written by peers
    rounded [N, H]: answers in the dtype in which they travel, for copy engines; empty if that is the layer's dtype
    row_packets, answer_packets [R, T, packets of a row]: written by peers in calls of at most T = low_latency_tokens
        tokens
    weight_packets [max_tokens, K]: written by peers, one number for each route of this rank's tokens
    flags [3, R]: for ROWS_SENT, ANSWERS_READY and IDS_SENT, the sequence number of the last call for which each peer
        set the flag

    With `per_route` there are K answers for each token, one after the other.
    """
    g = dispatch_shape
    assert g.max_tokens is not None
    places, tokens = g.num_ranks * g.max_tokens, min(low_latency_tokens, g.max_tokens)
    answers = places * g.returned
    row = 2 * g.top_k + (g.row_bytes + g.scale_bytes) // 4
    answer = answer_bytes(g) // 4 + 1
    return {
        "rows": ((places, g.columns), g.row_dtype),
        "scales": ((places, g.scales), g.row_format.scale),
        "ids": ((places, g.top_k), torch.int32),
        "weights": ((places, g.top_k), torch.float32),
        "answers": ((answers, g.hidden_size), g.dtype),
        "arrived": ((answers, g.hidden_size), answer_dtype(g)),
        "rounded": ((0 if answer_dtype(g) == g.dtype else answers, g.hidden_size), answer_dtype(g)),
        "row_packets": ((g.num_ranks, tokens, _even(row)), torch.int64),
        "answer_packets": ((g.num_ranks, tokens * g.returned, _even(answer)), torch.int64),
        "weight_packets": ((g.max_tokens, g.top_k), torch.int64),
        "flags": ((3, g.num_ranks), torch.int32),
    }


def _even(packets: int) -> int:
    """Round up to an even number, because kernels store two packets at once."""
    return packets + packets % 2


class PeerMemory:
    """Memory of equal layout on all ranks of one host. Each rank reads and writes its peers' memory over NVLink.

    local: uint8 [size], this rank's memory, zeroed
    peers: the memory of all ranks, as this rank sees it
    addresses: int64 [R] on the device, the address of each rank's memory in this rank's address space

    Uses torch's symmetric memory with the backend `CUDA`, without NVSHMEM and multicast. Collective. Raises InputError
    on all ranks if the allocation fails on one.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        if rank_group.group is None:  # one rank, its own peer
            self.local = torch.zeros(size, dtype=torch.uint8, device=device)
            self.peers = [self.local]
            self.addresses = torch.tensor([self.local.data_ptr()], dtype=torch.int64, device=device)
            return
        problem = None
        try:
            self.local = symm_mem.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # usually out of memory
            problem = f"{size / 2**20:.0f} MiB on {device}: {error}"
        # without this, the other ranks would wait for this one in `rendezvous`
        rank_group.agree([], problem, device)
        handle = symm_mem.rendezvous(self.local, rank_group.group.group_name)
        self.peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(rank_group.size)]
        self.addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        self._handle = handle  # keeps the mapping alive
        self.local.zero_()
        barrier(device, rank_group.group)  # no peer may write before the memory is zeroed


class Workspace:
    """The memory of one call, on this rank and on its peers.

    room: the most tokens per rank
    local_tensors: this rank's tensors by name (`place_shapes`)
    peers: the tensors of all ranks
    offsets: byte offsets of the tensors, equal on all ranks
    sent_ids: int32 [max_tokens, K], private copy of the ids of this rank's tokens. `local_tensors["ids"]` may already
        hold the next call's ids, which peers may lay out by another token limit
    sent_weights: float32 [max_tokens, K], 0 where `sent_ids` is below 0; None unless the shape has `per_route`
    launch_cache: the launches over this memory
    sequence: int32 [5]:

        0  the sequence number of the current call
        1  a counter of the programs of dispatch that have written
        2  the sequence number of the last call
        3  the counter of `WireIds.sequence`, whose first element is element 2
        4  a counter of the programs that have written ids

        Dispatch sets element 0 to element 2 plus 1, and combine copies element 0 to element 2. So no kernel changes a
        number that its later programs still have to read.
    """

    def __init__(self, dispatch_shape: DispatchShape, rank: int, shapes: Shapes, memory: Any) -> None:
        assert dispatch_shape.max_tokens is not None
        self.dispatch_shape, self.rank, self.memory = dispatch_shape, rank, memory
        self.room = dispatch_shape.max_tokens
        self.local_tensors = carve(memory.local, shapes)
        self.peers = [carve(peer, shapes) for peer in memory.peers]
        start = memory.local.data_ptr()
        self.offsets = {name: self.local_tensors[name].data_ptr() - start for name in shapes}
        self.sent_ids = torch.empty(self.room, dispatch_shape.top_k, dtype=torch.int32, device=memory.local.device)
        self.sent_weights = torch.zeros_like(self.sent_ids, dtype=torch.float32) if dispatch_shape.per_route else None
        self.sequence = torch.zeros(5, dtype=torch.int32, device=memory.local.device)
        self._peer_out: dict[tuple[int, bool], PeerRows] = {}  # few, and made once
        self._received: dict[tuple[int, bool, bool], dict[str, Any]] = {}
        self.launch_cache = LaunchCache()

    def peer_out(self, bound: int, *, packets: bool = False) -> PeerRows:
        """Return the peers' memory for this rank's answers. packets: on GPUs, the memory for packets"""
        if (bound, packets) not in self._peer_out:
            rows = bound * self.dispatch_shape.returned
            part = slice(self.rank * rows, (self.rank + 1) * rows)
            blocks = tuple(peer["arrived"][part] for peer in self.peers)
            start = self.offsets["arrived"] + part.start * answer_bytes(self.dispatch_shape)
            made = PeerRows(blocks, self.memory.addresses, start, self.rank)
            self._peer_out[bound, packets] = self._as_packets(made) if packets and self.sequence.is_cuda else made
        return self._peer_out[bound, packets]

    def received(self, bound: int, *, packets: bool = False, allow_pdl: bool = False) -> dict[str, Any]:
        """Return the fields of a call's `Received`, except `handle`. packets, allow_pdl: as of `reference.send`"""
        if (bound, packets, allow_pdl) not in self._received:
            # views created in inference mode cannot be written outside it
            with torch.inference_mode(False), unseen_by_modes():
                self._received[bound, packets, allow_pdl] = self._rows_received(bound, packets, allow_pdl)
        return self._received[bound, packets, allow_pdl]

    def _rows_received(self, bound: int, packets: bool, allow_pdl: bool) -> dict[str, Any]:
        g, rows = self.dispatch_shape, slice(0, self.dispatch_shape.num_ranks * bound)
        ids_ready = self._ids_signals() if allow_pdl and not packets else ()  # no kernel starts early beside other work
        at = {name: self.local_tensors[name][rows] for name in ("rows", "scales", "ids", "weights")}
        return {
            "x": at["rows"],
            "x_scale": at["scales"] if g.scales else None,
            "format": g.wire.dispatch,
            "input_scale": g.wire.input_scale,
            "layout": RowLayout.RANK_MAJOR,
            "weighting": Weighting.COMBINE if g.per_route else Weighting.EXPERTS,
            "wire_ids": WireIds(PhysicalIds(at["ids"]), self.rank * g.slots_per_rank, *ids_ready),
            "weights": None if g.per_route else at["weights"],
            "out": self.local_tensors["answers"][: rows.stop * g.returned],
            "peer_out": self.peer_out(bound, packets=packets),
            "per_route": g.per_route,
        }

    def _ids_signals(self) -> tuple[Tensor, ...]:
        """Return `WireIds.ids_ready` and `WireIds.sequence` on GPUs, else nothing."""
        return (self.local_tensors["flags"][IDS_SENT], self.sequence[2:4]) if self.sequence.is_cuda else ()

    def _as_packets(self, rows: PeerRows) -> PeerRows:
        places = tuple(peer["answer_packets"][self.rank, : rows.bound] for peer in self.peers)
        start = self.offsets["answer_packets"] + self.rank * self.local_tensors["answer_packets"][0].nbytes
        return replace(
            rows, offset=start, packets=PeerPackets(places, self.sequence, answer_bytes(self.dispatch_shape) // 4)
        )

    def sums(self, tokens: int) -> Tensor:
        """Return an uninitialized tensor [T, H] for sums of answers."""
        g = self.dispatch_shape
        return torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=self.sequence.device)

    def destroy(self) -> None:
        self._peer_out.clear()
        self._received.clear()
        self.local_tensors.clear()
        self.peers.clear()
        self.memory = None
