"""What `nvlink_p2p` does with its peers' memory. The torch forms are the definition, and run where ranks share a CPU's
memory; the Triton forms (GPUs) are one launch each.

Rows go in one of two ways. Written by a kernel, a row goes only where it is wanted. Copied by the GPU's copy engines,
all rows go to all ranks: a little more on the wire, and no multiprocessor is busy with it. Answers go in the same two,
and may be written by the experts' own last kernel. Few rows, and their answers, go by packets on GPUs
(`low_latency`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import ANSWERED, CHOSEN, SENT, Workspace, answer_dtype
from ep_moe.quant.fp8 import round_by, round_fp8
from ep_moe.types import PhysicalRouting

_PACKET_PLACES = ("row_packets", "answer_packets")


def send(
    workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, blocks: int, *,
    packets: bool = False, alone: bool = False,
) -> None:  # fmt: skip
    """Write x [T, H], T at most `bound`, with x_scale, ids and weights to the peers, and wait for theirs. An id out of
    range travels as -1 with weight 0, and so do those of the tokens that are missing up to `bound`.

    x, x_scale: as they travel; or plain rows of E4M3 wires, which are rounded as `quant.fp8.round_fp8` does: each once,
        between the read and the writes
    blocks: of the GPU's kernel that send rows, at most, and an eighth as many send ids
    packets: the few tokens go by packets there. All ranks send alike, and receive as they send
    alone: nothing runs beside this call's kernels, and the next one may start early
    """
    if x.is_cuda:
        if packets:
            _low_latency().send(workspace, x, x_scale, routing, bound, alone=alone)
        else:
            _triton().send(workspace, x, x_scale, routing, bound, blocks, alone=alone)
        return
    x, x_scale = _rounded(workspace, x, x_scale)
    routing = routing.materialize()
    for rank, peer in enumerate(workspace.peers):
        wanted = (
            ((routing.ids >= 0) & (routing.ids // workspace.dispatch_shape.slots_per_rank == rank))
            .any(1)
            .nonzero()
            .flatten()
        )
        peer["rows"][workspace.rank * bound + wanted] = x[wanted]
    _announce(workspace, x_scale, routing, bound, packets=packets)


def send_copies(workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int) -> None:
    """As `send`, with rows by copy engines, and few multiprocessors for what belongs to them; plain rows are rounded
    before."""
    x, x_scale = _rounded(workspace, x, x_scale)
    first = workspace.rank * bound
    for peer in _rotated_ranks(workspace):
        workspace.peers[peer]["rows"][first : first + len(x)].copy_(x)
    if x.is_cuda:
        _triton().announce(workspace, x_scale, routing, bound)
    else:
        _announce(workspace, x_scale, routing, bound)


def _rounded(workspace: Workspace, x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    g = workspace.dispatch_shape
    return (x, x_scale) if x.dtype == g.row_dtype else round_fp8(x, g.wire)


def _announce(
    workspace: Workspace, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, *, packets: bool = False
) -> None:
    routing = routing.materialize()
    g, first, tokens = workspace.dispatch_shape, workspace.rank * bound, len(routing.ids)
    valid = (routing.ids >= 0) & (routing.ids < g.num_physical)
    ids = routing.ids.new_full((bound, g.top_k), -1, dtype=torch.int32)
    weights = routing.weights.new_zeros(bound, g.top_k)
    ids[:tokens], weights[:tokens] = torch.where(valid, routing.ids, -1).int(), routing.weights.where(valid, 0.0)
    workspace.sent[:bound] = ids
    if workspace.sent_weights is not None:
        workspace.sent_weights[:bound] = weights
    for peer in workspace.peers:
        peer["ids"][first : first + bound], peer["weights"][first : first + bound] = ids, weights
        if x_scale is not None:
            peer["scales"][first : first + tokens] = x_scale
    workspace.sequence[0] = workspace.sequence[2] + 1
    if not packets:
        _tell(workspace, CHOSEN)
    _tell(workspace, SENT, packets=packets)
    _wait(workspace, SENT, packets=packets)


def give(workspace: Workspace, bound: int) -> None:
    """Write the answers that peers want to where they await them."""
    if workspace.sequence.is_cuda:
        _triton().give(workspace, bound)
        return
    g, rows = workspace.dispatch_shape, bound * workspace.dispatch_shape.returned
    ids, answers = workspace.places["ids"], _as_they_travel(workspace, len(workspace.places["answers"]))
    ids = ids.view(-1, g.top_k // g.returned)
    wanted = ((ids >= 0) & (ids // g.slots_per_rank == workspace.rank)).any(1)
    for rank, block in enumerate(workspace.peer_out(bound).blocks):
        part = slice(rank * rows, (rank + 1) * rows)
        block[wanted[part]] = answers[part][wanted[part]]


def give_copies(workspace: Workspace, bound: int) -> None:
    """Copy the answers to where the peers await them, by copy engines."""
    blocks, rows = workspace.peer_out(bound).blocks, bound * workspace.dispatch_shape.returned
    answers = _as_they_travel(workspace, len(blocks) * rows)
    for rank in _rotated_ranks(workspace):
        blocks[rank].copy_(answers[rank * rows : (rank + 1) * rows])


def _as_they_travel(workspace: Workspace, rows: int) -> Tensor:
    g, answers = workspace.dispatch_shape, workspace.places["answers"][:rows]
    return answers if answer_dtype(g) == g.dtype else round_by(answers, 1.0, workspace.places["rounded"][:rows])


def tell_given(workspace: Workspace) -> None:
    """This rank's answers are with the peers."""
    if workspace.sequence.is_cuda:
        _triton().tell_given(workspace)
    else:
        _tell(workspace, ANSWERED)


def receive(
    workspace: Workspace, tokens: int, bound: int, *, tell: bool, giving: bool = False, packets: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Wait until the peers' answers are here, and sum those of this rank's tokens in the order of ranks, in float32:
    [T, H]; of a shape with `per_route` in the order of routes, times their weights. out: where to, contiguous; default
    a new tensor

    tell: do what `tell_given` does first; packets tell by themselves
    giving: do what `give` does before, which by packets is part of the same launch
    """
    out = workspace.sums(tokens) if out is None else out
    assert out.is_contiguous(), "kernels write it as they would a new one"
    if workspace.sequence.is_cuda and packets:
        _low_latency_answers().receive(workspace, out, bound, put=giving)
        return out
    if giving:
        give(workspace, bound)
    if workspace.sequence.is_cuda:
        _triton().receive(workspace, out, bound, tell=tell)
        return out
    if tell:
        _tell(workspace, ANSWERED, packets=packets)
    _wait(workspace, ANSWERED, packets=packets)
    return _sum(workspace, out, bound)


def give_weights(workspace: Workspace, by_route: Tensor, bound: int) -> None:
    """Write a number for each received route whose expert is here to the rank that it came from. by_route: float32
    [R * bound, K]"""
    by_route = by_route.contiguous()
    if workspace.sequence.is_cuda:
        _route_weights().give(workspace, by_route, bound)
        return
    ids = workspace.places["ids"][: len(by_route)]
    mine = (ids >= 0) & (ids // workspace.dispatch_shape.slots_per_rank == workspace.rank)
    packets = (by_route.view(torch.int32).long() & 0xFFFFFFFF) | (workspace.sequence[:1].long() << 32)
    for peer, own, wanted in zip(workspace.peers, packets.split(bound), mine.split(bound), strict=True):
        peer["weight_packets"][:bound][wanted] = own[wanted]


def take_weights(workspace: Workspace, out: Tensor) -> None:
    """Wait for what `give_weights` of all ranks writes here. out: float32 [T, K], contiguous; 0 for a route that went
    nowhere"""
    if workspace.sequence.is_cuda:
        _route_weights().take(workspace, out)
        return
    asked, packets = workspace.sent[: len(out)] >= 0, workspace.places["weight_packets"][: len(out)]
    _until(lambda: not bool(((packets >> 32 != workspace.sequence[0]) & asked).any()))
    out.copy_(packets.int().view(torch.float32).where(asked, 0.0))


def _sum(workspace: Workspace, out: Tensor, bound: int) -> Tensor:
    g, tokens = workspace.dispatch_shape, len(out)
    total = out.new_zeros(tokens, g.hidden_size, dtype=torch.float32)
    for rows, weight in _routes(workspace, tokens, bound) if g.per_route else _ranks(workspace, tokens, bound):
        total += rows if weight is None else rows * weight
    workspace.sequence[2] = workspace.sequence[0]
    return out.copy_(total)


def _ranks(workspace: Workspace, tokens: int, bound: int) -> Iterator[tuple[Tensor, None]]:
    """What each rank answered: float32 [T, H]."""
    g, ids = workspace.dispatch_shape, workspace.sent[:tokens]
    for rank in range(g.num_ranks):
        here = ((ids // g.slots_per_rank == rank) & (ids >= 0)).any(1, keepdim=True)
        rows = workspace.places["arrived"][rank * bound : rank * bound + tokens]
        yield rows.float().where(here, 0.0), None


def _routes(workspace: Workspace, tokens: int, bound: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What came for each route, and its weight: float32 [T, H] and [T, 1]."""
    g, ids = workspace.dispatch_shape, workspace.sent[:tokens]
    assert workspace.sent_weights is not None
    first = torch.arange(tokens, device=ids.device) * g.top_k
    for route in range(g.top_k):
        id = ids[:, route].long()  # noqa: A001
        place = (id.clamp_min(0) // g.slots_per_rank) * bound * g.top_k + first + route
        rows = workspace.places["arrived"][place].float().where((id >= 0).unsqueeze(1), 0.0)
        yield rows, workspace.sent_weights[:tokens, route : route + 1]


def _tell(workspace: Workspace, phase: int, *, packets: bool = False) -> None:
    """packets: by one packet instead of all; the waiting side sees no difference."""
    for peer in workspace.peers:
        place = peer[_PACKET_PLACES[phase]][workspace.rank, 0, :1] if packets else peer["flags"][phase, workspace.rank]
        place.copy_(workspace.sequence[0])


def _wait(workspace: Workspace, phase: int, *, packets: bool = False) -> None:
    places = workspace.places
    ready = places[_PACKET_PLACES[phase]][:, 0, 0] if packets else places["flags"][phase]
    # no rank is a call ahead: each call waits for all ranks twice
    _until(lambda: not bool((ready != workspace.sequence[0]).any()))


def _until(ready: Callable[[], bool]) -> None:
    pause_s = 2e-5
    while not ready():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-4)  # leaves the cores to the ranks that it waits for


def _rotated_ranks(workspace: Workspace) -> list[int]:
    """All ranks, each rank's own list beginning with itself, so that no two copy to one at once."""
    ranks = len(workspace.peers)
    return [(workspace.rank + step) % ranks for step in range(ranks)]


def _low_latency():  # type: ignore[no-untyped-def]
    from ep_moe.all2all.nvlink_p2p import low_latency

    return low_latency


def _low_latency_answers():  # type: ignore[no-untyped-def]
    from ep_moe.all2all.nvlink_p2p import low_latency_answers

    return low_latency_answers


def _route_weights():  # type: ignore[no-untyped-def]
    from ep_moe.all2all.nvlink_p2p import route_weights

    return route_weights


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.all2all.nvlink_p2p import bulk

    return bulk
