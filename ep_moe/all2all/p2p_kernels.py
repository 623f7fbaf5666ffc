"""What `nvlink_p2p` does with its peers' memory. The torch forms are the definition, and run where ranks share a CPU's
memory; the Triton forms (GPUs) are one launch each.

Rows go in one of two ways. Written by a kernel, a row goes only where it is wanted. Copied by the GPU's copy engines,
all rows go to all ranks: a little more on the wire, and no multiprocessor is busy with it. Answers go in the same two,
and may be written by the experts' own last kernel. Few rows, and their answers, go by cells on GPUs
(`p2p_cells_triton`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.base import Geometry
from ep_moe.fp8_rows import round_by, round_fp8
from ep_moe.launches import Forms
from ep_moe.types import PeerCells, PeerRows, PhysicalIds, PhysicalRouting, RowLayout, Weighting, WireIds
from ep_moe.workspace import Shapes, carve

_SENT, _ANSWERED, _CHOSEN = 0, 1, 2  # rows of flags
_CELL_PLACES = ("row_cells", "answer_cells")
PIECE = 512  # words of a row that one program by cells has


def pieces(row_bytes: int) -> int:
    """Programs by cells for a row to one rank."""
    return -(-row_bytes // (4 * PIECE))


def answer_dtype(geometry: Geometry) -> torch.dtype:
    """Of an answer as it travels."""
    return torch.float8_e4m3fn if geometry.wire.combine == "fp8" else geometry.dtype


def answer_bytes(geometry: Geometry) -> int:
    return geometry.hidden_size * answer_dtype(geometry).itemsize


def place_shapes(geometry: Geometry, few: int) -> Shapes:
    """Each rank's memory, N = R * max_tokens; token t of rank s has place s * bound + t in all of them.

    rows [N, H / packed], scales [N, H / block], ids and weights [N, K]: written by peers
    answers [N, H]: left by the experts here, where they do not write to peers; arrived [N, H]: written by peers
    rounded [N, H]: answers as they travel, for copies of those that are rounded; else none
    row_cells, answer_cells [R, few, cells of a token]: written by peers, for calls of at most `few` tokens
    flags [3, R]: the number of the call whose dispatch, whose combine, and whose ids and weights each peer told of last
    """
    g = geometry
    assert g.max_tokens is not None
    places, few = g.num_ranks * g.max_tokens, min(few, g.max_tokens)
    row = 2 * g.top_k + (g.row_bytes + g.scale_bytes) // 4
    answer = answer_bytes(g) // 4 + 1
    return {
        "rows": ((places, g.columns), g.row_dtype),
        "scales": ((places, g.scales), g.row_format.scale),
        "ids": ((places, g.top_k), torch.int32),
        "weights": ((places, g.top_k), torch.float32),
        "answers": ((places, g.hidden_size), g.dtype),
        "arrived": ((places, g.hidden_size), answer_dtype(g)),
        "rounded": ((0 if answer_dtype(g) == g.dtype else places, g.hidden_size), answer_dtype(g)),
        "row_cells": ((g.num_ranks, few, _even(row)), torch.int64),
        "answer_cells": ((g.num_ranks, few, _even(answer)), torch.int64),
        "flags": ((3, g.num_ranks), torch.int32),
    }


def _even(cells: int) -> int:
    """Two cells are stored at once."""
    return cells + cells % 2


class Workspace:
    """One call's memory, here and on the peers.

    places: this rank's tensors by name; peers: those of all ranks; offsets: bytes from the beginning, equal on all
    sent: int32 [max_tokens, K], the ids of this rank's tokens; those among `places` may be the next call's already,
        which peers lay out by another bound
    forms: of this memory's launches
    calls: int32 [5], the number of the call under way; blocks of its dispatch that have written; the number of the last
        call, and what `WireIds.calls` has behind it; blocks that have written ids. Dispatch makes the first out of the
        third, and combine the third out of the first, so that no kernel changes what its later blocks have yet to read
    """

    def __init__(self, geometry: Geometry, rank: int, shapes: Shapes, memory: Any) -> None:
        self.geometry, self.rank, self.memory = geometry, rank, memory
        self.places = carve(memory.local, shapes)
        self.peers = [carve(peer, shapes) for peer in memory.peers]
        start = memory.local.data_ptr()
        self.offsets = {name: self.places[name].data_ptr() - start for name in shapes}
        self.sent = torch.empty(geometry.max_tokens or 0, geometry.top_k, dtype=torch.int32, device=memory.local.device)
        self.calls = torch.zeros(5, dtype=torch.int32, device=memory.local.device)
        self._peer_out: dict[tuple[int, bool], PeerRows] = {}  # few, and made once
        self._received: dict[tuple[int, bool, bool], dict[str, Any]] = {}
        self.forms = Forms()

    def peer_out(self, bound: int, *, cells: bool = False) -> PeerRows:
        """Where the peers await this rank's answers. cells: by which they go on GPUs"""
        if (bound, cells) not in self._peer_out:
            part = slice(self.rank * bound, (self.rank + 1) * bound)
            blocks = tuple(peer["arrived"][part] for peer in self.peers)
            start = self.offsets["arrived"] + part.start * answer_bytes(self.geometry)
            made = PeerRows(blocks, self.memory.addresses, start, self.rank)
            self._peer_out[bound, cells] = self._by_cells(made) if cells and self.calls.is_cuda else made
        return self._peer_out[bound, cells]

    def received(self, bound: int, *, cells: bool = False, alone: bool = False) -> dict[str, Any]:
        """Of a call, all of `Received` but its handle: where its rows are. cells, alone: as `send` has them"""
        if (bound, cells, alone) not in self._received:
            with torch.inference_mode(False):  # views made within it could not be written outside
                self._received[bound, cells, alone] = self._rows_received(bound, cells, alone)
        return self._received[bound, cells, alone]

    def _rows_received(self, bound: int, cells: bool, alone: bool) -> dict[str, Any]:
        g, rows = self.geometry, slice(0, self.geometry.num_ranks * bound)
        told = self._told() if alone and not cells else ()  # beside other work nothing starts early
        at = {name: self.places[name][rows] for name in ("rows", "scales", "ids", "weights", "answers")}
        return {
            "x": at["rows"],
            "x_scale": at["scales"] if g.scales else None,
            "format": g.wire.dispatch,
            "input_scale": g.wire.input_scale,
            "layout": RowLayout.RANK_MAJOR,
            "weighting": Weighting.EXPERTS,
            "wire_ids": WireIds(PhysicalIds(at["ids"]), self.rank * g.cap, *told),
            "weights": at["weights"],
            "out": at["answers"],
            "peer_out": self.peer_out(bound, cells=cells),
        }

    def _told(self) -> tuple[Tensor, ...]:
        """`WireIds.told` and `calls`, of what runs on GPUs."""
        return (self.places["flags"][_CHOSEN], self.calls[2:4]) if self.calls.is_cuda else ()

    def _by_cells(self, rows: PeerRows) -> PeerRows:
        places = tuple(peer["answer_cells"][self.rank, : rows.bound] for peer in self.peers)
        start = self.offsets["answer_cells"] + self.rank * self.places["answer_cells"][0].nbytes
        return replace(rows, offset=start, cells=PeerCells(places, self.calls, answer_bytes(self.geometry) // 4))

    def sums(self, tokens: int) -> Tensor:
        """Room for sums of answers, [T, H], undefined."""
        g = self.geometry
        return torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=self.calls.device)

    def destroy(self) -> None:
        self._peer_out.clear()
        self._received.clear()
        self.places.clear()
        self.peers.clear()
        self.memory = None


def send(
    workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, blocks: int, *,
    cells: bool = False, alone: bool = False,
) -> None:  # fmt: skip
    """Write x [T, H], T at most `bound`, with x_scale, ids and weights to the peers, and wait for theirs. An id out of
    range travels as -1 with weight 0, and so do those of the tokens that are missing up to `bound`.

    x, x_scale: as they travel; or plain rows of E4M3 wires, which are rounded as `fp8_rows` does: each once, between
        the read and the writes
    blocks: of the GPU's kernel that send rows, at most, and an eighth as many send ids
    cells: the few tokens go by cells there. All ranks send alike, and receive as they send
    alone: nothing runs beside this call's kernels, and the next one may start early
    """
    if x.is_cuda:
        if cells:
            _cells_triton().send(workspace, x, x_scale, routing, bound, alone=alone)
        else:
            _triton().send(workspace, x, x_scale, routing, bound, blocks, alone=alone)
        return
    x, x_scale = _rounded(workspace, x, x_scale)
    for rank, peer in enumerate(workspace.peers):
        wanted = ((routing.ids >= 0) & (routing.ids // workspace.geometry.cap == rank)).any(1).nonzero().flatten()
        peer["rows"][workspace.rank * bound + wanted] = x[wanted]
    _announce(workspace, x_scale, routing, bound, cells=cells)


def send_copies(workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int) -> None:
    """As `send`, with rows by copy engines, and few multiprocessors for what belongs to them; plain rows are rounded
    before."""
    x, x_scale = _rounded(workspace, x, x_scale)
    first = workspace.rank * bound
    for peer in _turn(workspace):
        workspace.peers[peer]["rows"][first : first + len(x)].copy_(x)
    if x.is_cuda:
        _triton().announce(workspace, x_scale, routing, bound)
    else:
        _announce(workspace, x_scale, routing, bound)


def _rounded(workspace: Workspace, x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    g = workspace.geometry
    return (x, x_scale) if x.dtype == g.row_dtype else round_fp8(x, g.wire)


def _announce(
    workspace: Workspace, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, *, cells: bool = False
) -> None:
    g, first, tokens = workspace.geometry, workspace.rank * bound, len(routing.ids)
    valid = (routing.ids >= 0) & (routing.ids < g.num_physical)
    ids, weights = torch.full((bound, g.top_k), -1, dtype=torch.int32), torch.zeros(bound, g.top_k)
    ids[:tokens], weights[:tokens] = torch.where(valid, routing.ids, -1).int(), routing.weights.where(valid, 0.0)
    workspace.sent[:bound] = ids
    for peer in workspace.peers:
        peer["ids"][first : first + bound], peer["weights"][first : first + bound] = ids, weights
        if x_scale is not None:
            peer["scales"][first : first + tokens] = x_scale
    workspace.calls[0] = workspace.calls[2] + 1
    if not cells:
        _tell(workspace, _CHOSEN)
    _tell(workspace, _SENT, cells=cells)
    _wait(workspace, _SENT, cells=cells)


def give(workspace: Workspace, bound: int) -> None:
    """Write the answers that peers want to where they await them."""
    if workspace.calls.is_cuda:
        _triton().give(workspace, bound)
        return
    ids, answers = workspace.places["ids"], _as_they_travel(workspace, len(workspace.places["answers"]))
    wanted = ((ids >= 0) & (ids // workspace.geometry.cap == workspace.rank)).any(1)
    for rank, block in enumerate(workspace.peer_out(bound).blocks):
        part = slice(rank * bound, (rank + 1) * bound)
        block[wanted[part]] = answers[part][wanted[part]]


def give_copies(workspace: Workspace, bound: int) -> None:
    """Copy the answers to where the peers await them, by copy engines."""
    blocks = workspace.peer_out(bound).blocks
    answers = _as_they_travel(workspace, len(blocks) * bound)
    for rank in _turn(workspace):
        blocks[rank].copy_(answers[rank * bound : (rank + 1) * bound])


def _as_they_travel(workspace: Workspace, rows: int) -> Tensor:
    g, answers = workspace.geometry, workspace.places["answers"][:rows]
    return answers if answer_dtype(g) == g.dtype else round_by(answers, 1.0, workspace.places["rounded"][:rows])


def tell_given(workspace: Workspace) -> None:
    """This rank's answers are with the peers."""
    if workspace.calls.is_cuda:
        _triton().tell_given(workspace)
    else:
        _tell(workspace, _ANSWERED)


def receive(
    workspace: Workspace, tokens: int, bound: int, *, tell: bool, giving: bool = False, cells: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Wait until the peers' answers are here, and sum those of this rank's tokens in the order of ranks, in float32:
    [T, H]. out: where to, contiguous; default a new tensor

    tell: do what `tell_given` does first; cells tell by themselves
    giving: do what `give` does before, which by cells is part of the same launch
    """
    out = workspace.sums(tokens) if out is None else out
    assert out.is_contiguous(), "kernels write it as they would a new one"
    if workspace.calls.is_cuda and cells:
        _cells_triton().receive(workspace, out, bound, put=giving)
        return out
    if giving:
        give(workspace, bound)
    if workspace.calls.is_cuda:
        _triton().receive(workspace, out, bound, tell=tell)
        return out
    if tell:
        _tell(workspace, _ANSWERED, cells=cells)
    _wait(workspace, _ANSWERED, cells=cells)
    return _sum(workspace, out, bound)


def _sum(workspace: Workspace, out: Tensor, bound: int) -> Tensor:
    g, tokens = workspace.geometry, len(out)
    ids, total = workspace.sent[:tokens], torch.zeros(tokens, g.hidden_size)
    for rank in range(g.num_ranks):
        here = ((ids // g.cap == rank) & (ids >= 0)).any(1, keepdim=True)
        rows = workspace.places["arrived"][rank * bound : rank * bound + tokens]
        total += rows.float().where(here, 0.0)
    workspace.calls[2] = workspace.calls[0]
    return out.copy_(total)


def _tell(workspace: Workspace, phase: int, *, cells: bool = False) -> None:
    """cells: by one cell in the place of all: who waits for a flag sees nothing of it."""
    for peer in workspace.peers:
        place = peer[_CELL_PLACES[phase]][workspace.rank, 0, :1] if cells else peer["flags"][phase, workspace.rank]
        place.copy_(workspace.calls[0])


def _wait(workspace: Workspace, phase: int, *, cells: bool = False) -> None:
    places = workspace.places
    told = places[_CELL_PLACES[phase]][:, 0, 0] if cells else places["flags"][phase]
    while (told != workspace.calls[0]).any():  # nobody is a call ahead, since all wait for all twice a call
        time.sleep(2e-5)


def _turn(workspace: Workspace) -> list[int]:
    """All ranks, each rank's own list beginning with itself, so that no two copy to one at once."""
    ranks = len(workspace.peers)
    return [(workspace.rank + step) % ranks for step in range(ranks)]


def _cells_triton():  # type: ignore[no-untyped-def]
    from ep_moe.all2all import p2p_cells_triton

    return p2p_cells_triton


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.all2all import p2p_kernels_triton

    return p2p_kernels_triton
