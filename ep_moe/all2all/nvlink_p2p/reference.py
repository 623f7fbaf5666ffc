"""The steps of `nvlink_p2p` on peer memory, in torch. They define the protocol, and run on CPU over shared memory.

On GPUs each step is one Triton launch (`bulk`, `low_latency`, `low_latency_answers`, `route_weights`).

Rows travel in one of three ways:

- A kernel writes each row only to the ranks that hold one of its experts.
- Copy engines copy all rows to all ranks. This moves a little more data, and occupies no multiprocessor.
- In small calls on GPUs, kernels write packets (`low_latency`).

Results ("answers") return in the same way, or the experts' last kernel writes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import ANSWERS_READY, IDS_SENT, ROWS_SENT, Workspace, answer_dtype
from ep_moe.quant.fp8 import round_by, round_fp8
from ep_moe.types import PhysicalRouting

_PACKET_TENSORS = ("row_packets", "answer_packets")


def send(
    workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, blocks: int, *,
    packets: bool = False, allow_pdl: bool = False,
) -> None:  # fmt: skip
    """Write x [T, H], T at most `bound`, with x_scale, ids and weights to the peers, and wait for the peers' rows.

    An id out of range travels as -1 with weight 0. Ids of the missing tokens T to `bound` travel in the same way.

    x, x_scale: rows in the wire format; or plain rows for an E4M3 wire, which are rounded as by `quant.fp8.round_fp8`,
        once each, between the read and the writes
    blocks: on GPUs, the most programs that send rows (four times as many if they round); an eighth as many send ids
    packets: on GPUs, use packets. The same on all ranks, and the same in `receive`
    allow_pdl: the next kernel may start early (PDL), because no other kernel runs beside this call's
    """
    if x.is_cuda:
        if packets:
            _low_latency().send(workspace, x, x_scale, routing, bound, allow_pdl=allow_pdl)
        else:
            _triton().send(workspace, x, x_scale, routing, bound, blocks, allow_pdl=allow_pdl)
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
    """Do what `send` does, with copy engines for the rows.

    A kernel on few multiprocessors writes scales, ids and weights. Plain rows are rounded before.
    """
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
    workspace.sent_ids[:bound] = ids
    if workspace.sent_weights is not None:
        workspace.sent_weights[:bound] = weights
    for peer in workspace.peers:
        peer["ids"][first : first + bound], peer["weights"][first : first + bound] = ids, weights
        if x_scale is not None:
            peer["scales"][first : first + tokens] = x_scale
    workspace.sequence[0] = workspace.sequence[2] + 1
    if not packets:
        _tell(workspace, IDS_SENT)
    _tell(workspace, ROWS_SENT, packets=packets)
    _wait(workspace, ROWS_SENT, packets=packets)


def send_answers(workspace: Workspace, bound: int) -> None:
    """Write this rank's answers to the peers' memory, only for tokens with an expert on this rank."""
    if workspace.sequence.is_cuda:
        _triton().send_answers(workspace, bound)
        return
    g, rows = workspace.dispatch_shape, bound * workspace.dispatch_shape.returned
    ids, answers = workspace.local_tensors["ids"], _as_they_travel(workspace, len(workspace.local_tensors["answers"]))
    ids = ids.view(-1, g.top_k // g.returned)
    wanted = ((ids >= 0) & (ids // g.slots_per_rank == workspace.rank)).any(1)
    for rank, block in enumerate(workspace.peer_out(bound).blocks):
        part = slice(rank * rows, (rank + 1) * rows)
        block[wanted[part]] = answers[part][wanted[part]]


def copy_answers(workspace: Workspace, bound: int) -> None:
    """Copy all rows of answers to the peers' memory, by copy engines."""
    blocks, rows = workspace.peer_out(bound).blocks, bound * workspace.dispatch_shape.returned
    answers = _as_they_travel(workspace, len(blocks) * rows)
    for rank in _rotated_ranks(workspace):
        blocks[rank].copy_(answers[rank * rows : (rank + 1) * rows])


def _as_they_travel(workspace: Workspace, rows: int) -> Tensor:
    g, answers = workspace.dispatch_shape, workspace.local_tensors["answers"][:rows]
    return answers if answer_dtype(g) == g.dtype else round_by(answers, 1.0, workspace.local_tensors["rounded"][:rows])


def signal_answers_written(workspace: Workspace) -> None:
    """Set the flag on each peer that says that this rank's answers have been written."""
    if workspace.sequence.is_cuda:
        _triton().signal_answers_written(workspace)
    else:
        _tell(workspace, ANSWERS_READY)


def receive(
    workspace: Workspace, tokens: int, bound: int, *, signal_first: bool, send_first: bool = False,
    packets: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Wait for the peers' answers, and return their sum for each token of this rank: [T, H], added in float32.

    Answers are added in the order of ranks. With `per_route` they are multiplied by their weights, and added in the
    order of routes.

    signal_first: first do what `signal_answers_written` does. Packets need no flag
    send_first: first do what `send_answers` does. With packets it is part of the same launch
    out: contiguous, receives the sum. Default: a new tensor
    """
    out = workspace.sums(tokens) if out is None else out
    assert out.is_contiguous(), "kernels write it as they would a new one"
    if workspace.sequence.is_cuda and packets:
        _low_latency_answers().receive(workspace, out, bound, put=send_first)
        return out
    if send_first:
        send_answers(workspace, bound)
    if workspace.sequence.is_cuda:
        _triton().receive(workspace, out, bound, signal_first=signal_first)
        return out
    if signal_first:
        _tell(workspace, ANSWERS_READY, packets=packets)
    _wait(workspace, ANSWERS_READY, packets=packets)
    return _sum(workspace, out, bound)


def send_route_values(workspace: Workspace, by_route: Tensor, bound: int) -> None:
    """Write one number per received route with an expert on this rank to the rank that sent the token.

    by_route: float32 [R * bound, K]
    """
    by_route = by_route.contiguous()
    if workspace.sequence.is_cuda:
        _route_weights().send_route_values(workspace, by_route, bound)
        return
    ids = workspace.local_tensors["ids"][: len(by_route)]
    mine = (ids >= 0) & (ids // workspace.dispatch_shape.slots_per_rank == workspace.rank)
    packets = (by_route.view(torch.int32).long() & 0xFFFFFFFF) | (workspace.sequence[:1].long() << 32)
    for peer, own, wanted in zip(workspace.peers, packets.split(bound), mine.split(bound), strict=True):
        peer["weight_packets"][:bound][wanted] = own[wanted]


def receive_route_values(workspace: Workspace, out: Tensor) -> None:
    """Wait for the numbers that all ranks write by `send_route_values`, and store them in out.

    out: float32 [T, K], contiguous; 0 for a route without an expert
    """
    if workspace.sequence.is_cuda:
        _route_weights().receive_route_values(workspace, out)
        return
    asked, packets = workspace.sent_ids[: len(out)] >= 0, workspace.local_tensors["weight_packets"][: len(out)]
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
    """Yield the answers of each rank, float32 [T, H], 0 for tokens without an expert there; and None as weight."""
    g, ids = workspace.dispatch_shape, workspace.sent_ids[:tokens]
    for rank in range(g.num_ranks):
        here = ((ids // g.slots_per_rank == rank) & (ids >= 0)).any(1, keepdim=True)
        rows = workspace.local_tensors["arrived"][rank * bound : rank * bound + tokens]
        yield rows.float().where(here, 0.0), None


def _routes(workspace: Workspace, tokens: int, bound: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the answers for each route, float32 [T, H], and their weights, [T, 1]."""
    g, ids = workspace.dispatch_shape, workspace.sent_ids[:tokens]
    assert workspace.sent_weights is not None
    first = torch.arange(tokens, device=ids.device) * g.top_k
    for route in range(g.top_k):
        id = ids[:, route].long()  # noqa: A001
        place = (id.clamp_min(0) // g.slots_per_rank) * bound * g.top_k + first + route
        rows = workspace.local_tensors["arrived"][place].float().where((id >= 0).unsqueeze(1), 0.0)
        yield rows, workspace.sent_weights[:tokens, route : route + 1]


def _tell(workspace: Workspace, phase: int, *, packets: bool = False) -> None:
    """Announce this call's sequence number to the peers. packets: in one packet of a row, which stands for all."""
    for peer in workspace.peers:
        place = peer[_PACKET_TENSORS[phase]][workspace.rank, 0, :1] if packets else peer["flags"][phase, workspace.rank]
        place.copy_(workspace.sequence[0])


def _wait(workspace: Workspace, phase: int, *, packets: bool = False) -> None:
    tensors = workspace.local_tensors
    ready = tensors[_PACKET_TENSORS[phase]][:, 0, 0] if packets else tensors["flags"][phase]
    # equality suffices: no rank is a call ahead, because each call waits for all ranks twice
    _until(lambda: not bool((ready != workspace.sequence[0]).any()))


def _until(ready: Callable[[], bool]) -> None:
    pause_s = 2e-5
    while not ready():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-4)  # leaves CPU cores to the ranks that it waits for


def _rotated_ranks(workspace: Workspace) -> list[int]:
    """Return all ranks, starting with this one, so that no two ranks copy to the same peer at once."""
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
