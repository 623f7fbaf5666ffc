"""The torch forms of `nvlink_p2p`, which define the kernels: all ranks in one process, a thread for each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p import reference
from ep_moe.all2all.nvlink_p2p.buffers import ANSWERS_READY, IDS_SENT, ROWS_SENT, Workspace
from ep_moe.config import Wire
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.p2p_kernels import until, workspaces

SLOTS, MOST = 3, 6


@pytest.fixture(autouse=True)
def _no_endless_waits(monkeypatch):
    monkeypatch.setattr(reference, "_until", until)


def batch(shape: DispatchShape, rank: int, tokens: int, call: int) -> tuple[torch.Tensor, PhysicalRouting]:
    """Numbers whose sums are exact in E4M3 too; ids below and above those of experts."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randint(-1, 2, (tokens, shape.hidden_size), generator=generator).to(shape.dtype)
    ids = torch.randint(-1, shape.num_physical + 1, (tokens, shape.top_k), generator=generator)
    weights = torch.randint(0, 2, ids.shape, generator=generator) * 2.0 - 1.0
    return x, PhysicalRouting(PhysicalIds(ids), weights)


def factor(ids: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies its rows by."""
    return ids % SLOTS + 1.0


def expected(shape: DispatchShape, x: torch.Tensor, routing: PhysicalRouting) -> torch.Tensor:
    ids = routing.materialize().ids
    valid = (ids >= 0) & (ids < shape.num_physical)
    return x * (factor(ids) * routing.weights * valid).sum(1, keepdim=True)


def call(workspace: Workspace, x, routing, bound: int, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Dispatch, experts and combine of one rank. Returns the sums, and what came back for each route."""
    g, packets = workspace.dispatch_shape, way.startswith("packets")
    if way == "copied":
        reference.send_copies(workspace, x, None, routing, bound)
    else:
        reference.send(workspace, x, None, routing, bound, 1, packets=packets)
    received = workspace.received(bound, packets=packets)
    ids = workspace.local_tensors["ids"][: g.num_ranks * bound].long()
    weights = workspace.local_tensors["weights"][: g.num_ranks * bound]
    assert received["x"].shape == (g.num_ranks * bound, g.hidden_size)
    assert (received["weights"] is None) == g.per_route
    here = (ids >= 0) & (ids // SLOTS == workspace.rank)
    by_route = received["x"].unsqueeze(1).float() * (factor(ids) if g.per_route else factor(ids) * weights).unsqueeze(2)
    by_route = by_route.where(here.unsqueeze(2), torch.nan if g.per_route else 0.0)
    answers = by_route.flatten(0, 1) if g.per_route else by_route.sum(1)
    reference.send_route_values(workspace, torch.where(here, -100.0 * workspace.rank - ids, torch.nan), bound)
    if way.endswith("by experts"):
        assert received["peer_out"].packets is None, "which are of GPUs"
        received["peer_out"].write(answers)
    else:
        received["out"].copy_(answers)
    if way == "copied":
        reference.copy_answers(workspace, bound)
        reference.signal_answers_written(workspace)
    signal_first, send_first = way != "copied", way in ("sent", "packets")
    out = reference.receive(workspace, len(x), bound, signal_first=signal_first, send_first=send_first, packets=packets)
    numbers = torch.full((len(x), g.top_k), torch.nan)
    reference.receive_route_values(workspace, numbers)
    return out, numbers


@pytest.mark.parametrize("way", ["sent", "by experts", "copied", "packets", "packets by experts"])
@pytest.mark.parametrize("per_route", [False, True], ids=["per rank", "per route"])
@pytest.mark.parametrize("wire", [Wire(), Wire(combine="fp8")], ids=["plain", "fp8"])
@pytest.mark.parametrize(("ranks", "top_k"), [(1, 2), (2, 1), (3, 3), (4, 3)])
def test_each_token_gets_the_sum_of_what_its_experts_give(ranks, top_k, wire, per_route, way):
    """In several calls of other bounds over one memory, which begins as NaN."""
    shape = DispatchShape(
        hidden_size=8, top_k=top_k, slots_per_rank=SLOTS, num_ranks=ranks, dtype=torch.float32, max_tokens=MOST,
        wire=wire, per_route=per_route,
    )  # fmt: skip
    made = workspaces(shape, "cpu")
    for workspace in made:
        for name in ("rows", "answers", "arrived", "rounded"):
            workspace.local_tensors[name].view(torch.uint8).fill_(255)
    with ThreadPoolExecutor(ranks) as threads:
        for number, bound in enumerate((MOST, 4, MOST - 1)):
            tokens = [(bound, 0, 3, 1)[(rank + number) % 4] for rank in range(ranks)]
            given = [batch(shape, rank, count, number) for rank, count in enumerate(tokens)]
            running = [
                threads.submit(call, workspace, *mine, bound, way) for workspace, mine in zip(made, given, strict=True)
            ]
            for workspace, (x, routing), done in zip(made, given, running, strict=True):
                out, numbers = done.result(timeout=20)
                assert torch.equal(out, expected(shape, x, routing)), (number, workspace.rank)
                ids = routing.materialize().ids
                valid = (ids >= 0) & (ids < shape.num_physical)
                assert torch.equal(numbers, torch.where(valid, -100.0 * (ids // SLOTS) - ids, 0.0))
                assert workspace.sequence.tolist() == [number + 1, 0, number + 1, 0, 0]
            for workspace in made:
                for phase in (ROWS_SENT, IDS_SENT, ANSWERS_READY):
                    flag = 0 if way.startswith("packets") else number + 1
                    assert workspace.local_tensors["flags"][phase].tolist() == [flag] * ranks


@pytest.mark.parametrize("per_route", [False, True], ids=["per rank", "per route"])
def test_answers_go_where_each_peer_awaits_those_of_this_rank(per_route):
    """Tensors for the host and addresses for kernels name the same memory."""
    shape = DispatchShape(
        hidden_size=24, top_k=3, slots_per_rank=SLOTS, num_ranks=3, dtype=torch.bfloat16, max_tokens=MOST,
        wire=Wire(combine="fp8"), per_route=per_route,
    )  # fmt: skip
    made, bound = workspaces(shape, "cpu"), 5
    rows = bound * (3 if per_route else 1)
    for workspace in made:
        out = workspace.peer_out(bound)
        packets = workspace._as_packets(out)
        assert packets.packets.words == 24 // 4
        for rank, peer in enumerate(made):
            first = int(workspace.memory.addresses[rank])
            wanted = peer.local_tensors["arrived"][workspace.rank * rows :][:rows]
            assert (out.blocks[rank].data_ptr(), out.blocks[rank].shape) == (wanted.data_ptr(), wanted.shape)
            assert first + out.offset == wanted.data_ptr()
            wanted = peer.local_tensors["answer_packets"][workspace.rank]
            assert packets.packets.blocks[rank].data_ptr() == wanted.data_ptr() == first + packets.offset
            assert len(packets.packets.blocks[rank]) == rows
