"""Test the Triton kernels of `nvlink_p2p` against the torch functions of `nvlink_p2p.reference`, which define them.

One process runs all ranks in turn. No rank waits, because the tests set the flags of all other ranks beforehand.
"""

from __future__ import annotations

import threading

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p import reference
from ep_moe.all2all.nvlink_p2p.buffers import Workspace
from ep_moe.config import Wire
from ep_moe.quant.fp8 import round_by
from ep_moe.quant.row_format import ROW_FORMATS, quantize_for_wire
from ep_moe.testing.transport_case import FP8_TENSOR, NVFP4, SLOTS, moved, routes, rows
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.fp8_block_kernels import DEVICE

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.all2all.nvlink_p2p import bulk, low_latency, low_latency_answers
from ep_moe.quant import fp8
from tests.fixtures.p2p_kernels import FEW, signal_all_others, workspaces


def signalled(made: list[Workspace], rank: int, phase: int) -> bool:
    return all(int(workspace.local_tensors["flags"][phase, rank]) == int(made[rank].sequence[0]) for workspace in made)


def batch(shape: DispatchShape, rank: int, tokens: int, ids_dtype: torch.dtype):
    """Return a rank's rows, scales and routing.

    The memory behind the ids and weights holds those of an earlier, larger call, and they name experts too.
    """
    generator = torch.Generator().manual_seed(17 * rank + tokens)
    x = torch.randn(tokens, shape.hidden_size, generator=generator).to(shape.dtype)
    ids = torch.randint(-2, shape.num_physical + 2, (tokens + 9, shape.top_k), generator=generator).to(ids_dtype)
    ids[tokens:] = shape.num_physical - 1
    weights = torch.rand(ids.shape, generator=generator)
    routing = PhysicalRouting(PhysicalIds(ids[:tokens]), weights[:tokens])
    return (*quantize_for_wire(x, shape.wire), routing)


@pytest.mark.parametrize("way", ["sent", "written", "copied"])  # how the results travel
@pytest.mark.parametrize("blocks", [2, 16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "wire",
    [Wire(), Wire(dispatch="fp8_block"), Wire(dispatch="fp8_row"), FP8_TENSOR, NVFP4, Wire(combine="fp8")],
    ids=lambda wire: f"{wire.dispatch}, {wire.combine}",
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "top_k", "hidden", "dtype"), [
    (2, 1, 128, torch.bfloat16), (3, 3, 384, torch.float16), (4, 8, 256, torch.float32), (4, 2, 2304, torch.bfloat16),
])  # fmt: skip
def test_same_as_torch(ranks, top_k, hidden, dtype, wire, ids_dtype, blocks, way, monkeypatch):
    monkeypatch.setattr(bulk, "_TILE", 2)  # several programs send ids
    shape = DispatchShape(
        hidden_size=hidden, top_k=top_k, slots_per_rank=3, num_ranks=ranks, dtype=dtype, max_tokens=9, wire=wire
    )
    bound = 7
    found, wanted, copy = workspaces(shape, DEVICE), workspaces(shape, "cpu"), way == "copied"
    for rank in range(ranks):
        x, scale, routing = batch(shape, rank, (7, 0, 3, 5)[rank], ids_dtype)
        for made in (found, wanted):
            signal_all_others(made, rank, 0)
        if copy:
            reference.send_copies(wanted[rank], x, scale, routing, bound)
        else:
            reference.send(wanted[rank], x, scale, routing, bound, blocks)
        there = PhysicalRouting(PhysicalIds(routing.ids.to(DEVICE)), routing.weights.to(DEVICE))
        scale = None if scale is None else scale.to(DEVICE)
        if copy:
            for ours, theirs in zip(found, wanted, strict=True):  # as the copy engines do
                ours.local_tensors["rows"].copy_(theirs.local_tensors["rows"])
            bulk.announce(found[rank], scale, there, bound)
        else:
            bulk.send(found[rank], x.to(DEVICE), scale, there, bound, blocks)
        assert all(signalled(made, rank, phase) for made in (found, wanted) for phase in (0, 2))
    for ours, theirs in zip(found, wanted, strict=True):
        ids = theirs.local_tensors["ids"]
        sent = ((ids >= 0) & (ids // shape.slots_per_rank == theirs.rank)).any(1)
        for name in ("rows", "ids", "weights", "scales"):
            mine, wished = ours.local_tensors[name].cpu().float(), theirs.local_tensors[name].float()
            chosen = slice(None) if name != "scales" else sent  # the scales of rows that did not travel are undefined
            assert torch.equal(mine[chosen], wished[chosen]), name
        assert ours.sequence.tolist() == [1, 0, 0, 0, 0], "one call, and the count is ready for the next"
        generator = torch.Generator().manual_seed(theirs.rank)
        theirs.local_tensors["answers"].copy_(answers(theirs, generator))
        ours.local_tensors["answers"].copy_(theirs.local_tensors["answers"])
    for ours, theirs in zip(found, wanted, strict=True):
        if way == "sent":
            reference.send_answers(theirs, bound)
            bulk.send_answers(ours, bound)
        else:
            reference.copy_answers(theirs, bound)
        if way == "copied":
            reference.signal_answers_written(theirs)
            bulk.signal_answers_written(ours)
            assert signalled(found, ours.rank, 1)
    for rank, tokens in enumerate((7, 0, 3, 5)[:ranks]):
        if way == "sent":  # rows that no rank wants are not written
            both = (each.local_tensors["arrived"].cpu().float() for each in (found[rank], wanted[rank]))
            mine, wished = (arrived.nan_to_num(99.0) for arrived in both)
            assert torch.equal(mine, wished)
            assert not mine[-2:].any(), "beyond the bound"
        else:
            found[rank].local_tensors["arrived"].copy_(wanted[rank].local_tensors["arrived"])
        if way != "copied":
            signal_all_others(wanted, rank, 1)
            signal_all_others(found, rank, 1)
        expected = reference.receive(wanted[rank], tokens, bound, signal_first=way != "copied")
        out = found[rank].sums(tokens)
        bulk.receive(found[rank], out, bound, signal_first=way != "copied")
        assert all(signalled(made, rank, 1) for made in (found, wanted))
        assert torch.equal(out.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))
        assert out.dtype == dtype
    for ours in found:
        assert ours.sequence.tolist() == [1, 0, 1, 0, 0], "it is the last one"


def answers(workspace: Workspace, generator: torch.Generator) -> torch.Tensor:
    """Return small integers as results, whose sums are exact.

    The interpreter loses a carry when it rounds (`tests/unit/quant/test_fp8_rows_triton.py`). Plain results include a
    row
    of NaN. E4M3 results include larger and smaller numbers instead, because the interpreter has no NaN in E4M3.
    """
    made = torch.randint(-8, 9, workspace.local_tensors["answers"].shape, generator=generator).float()
    if workspace.dispatch_shape.wire.combine == "plain":
        made[2] = torch.nan if workspace.rank else -0.0
    else:
        made[:, 3:6] = torch.tensor([1000.0, -2000.0, 2.0**-9])
    return made


def stale_cells(workspace: Workspace) -> None:
    """Fill the packets as call number 7 left them."""
    for name in ("row_packets", "answer_packets"):
        workspace.local_tensors[name].fill_(7 << 32)
    workspace.sequence[2] = 7


@pytest.mark.parametrize(
    "wire",
    [Wire(), Wire(dispatch="fp8_block"), Wire(dispatch="fp8_row"), FP8_TENSOR, NVFP4, Wire(combine="fp8")],
    ids=lambda wire: f"{wire.dispatch}, {wire.combine}",
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "top_k", "hidden", "dtype", "ids_dtype"), [
    (2, 1, 128, torch.bfloat16, torch.int64), (3, 3, 384, torch.float16, torch.int32),
    (4, 8, 256, torch.float32, torch.int64), (2, 2, 2304, torch.bfloat16, torch.int32),
])  # fmt: skip
def test_by_packets_as_torch(ranks, top_k, hidden, dtype, ids_dtype, wire):
    """Low-latency sends and receives give the bytes of the torch functions.

    Each half runs on all ranks before the next half starts, so no rank waits for packets that have not been sent. In
    the
    second call, fp8 wires get plain rows, and results are written to the peers.
    """
    shape = DispatchShape(
        hidden_size=hidden, top_k=top_k, slots_per_rank=3, num_ranks=ranks, dtype=dtype, max_tokens=9, wire=wire
    )
    found, wanted = workspaces(shape, DEVICE), workspaces(shape, "cpu")
    for ours in found:
        stale_cells(ours)
    for call in range(2):
        bound = FEW - call
        sent = []
        for rank, theirs in enumerate(wanted):
            x, scale, routing = batch(shape, rank, (bound, 0, 3, 5)[rank], ids_dtype)
            there = PhysicalRouting(PhysicalIds(routing.ids.to(DEVICE)), routing.weights.to(DEVICE))
            sent.append((x.to(DEVICE), None if scale is None else scale.to(DEVICE), there))
            if call and wire in FP8_WIRES:
                plain = torch.randn(len(x), hidden, generator=torch.Generator().manual_seed(rank)).to(dtype).to(DEVICE)
                sent[-1] = (plain, None, there)
                x, scale = (None if part is None else part.cpu() for part in rounded(plain, wire))
            signal_all_others(wanted, rank, 0)
            reference.send(theirs, x, scale, routing, bound, 1)
        for rank, ours in enumerate(found):
            low_latency.send(ours, *sent[rank], bound, take=False)
            assert ours.sequence.tolist() == [8 + call, 0, 7 + call, 0, 0]
        for rank, ours in enumerate(found):
            low_latency.send(ours, *sent[rank], bound, put=False)
        for ours, theirs in zip(found, wanted, strict=True):
            ids = theirs.local_tensors["ids"]
            here = ((ids >= 0) & (ids // shape.slots_per_rank == theirs.rank)).any(1)[: ranks * bound]
            for name in ("rows", "ids", "weights", "scales"):
                mine, wished = (
                    ours.local_tensors[name][: ranks * bound].cpu(),
                    theirs.local_tensors[name][: ranks * bound],
                )
                chosen = here if name in ("rows", "scales") else slice(None)
                assert torch.equal(mine[chosen].view(torch.uint8), wished[chosen].view(torch.uint8)), name
            assert torch.equal(ours.sent_ids[:bound].cpu(), theirs.sent_ids[:bound])
            beyond = ours.local_tensors["row_packets"][:, bound:] >> 32
            assert beyond.shape[1] == call
            assert not (beyond == 8 + call).any(), "tokens beyond the bound"
            generator = torch.Generator().manual_seed(theirs.rank)
            theirs.local_tensors["answers"].copy_(answers(theirs, generator))
            ours.local_tensors["answers"].copy_(theirs.local_tensors["answers"])
        results = []
        for theirs in wanted:
            reference.send_answers(theirs, bound)
        for rank, ours in enumerate(found):
            tokens = (bound, 0, 3, 5)[rank]
            out = torch.full((tokens, hidden), 9.0, dtype=dtype, device=DEVICE)
            if call:  # the expert kernel writes the results, so `receive` does not send them
                rows = ours.local_tensors["answers"][: ranks * bound]
                travelling = rows if wire.combine == "plain" else round_by(rows, 1.0)
                ours._as_packets(ours.peer_out(bound)).write(travelling)
            else:
                low_latency_answers.receive(ours, out, bound, take=False)
            results.append(out)
            assert bool((results[-1] == 9).all())
        for rank, ours in enumerate(found):
            signal_all_others(wanted, rank, 1)
            expected = reference.receive(wanted[rank], len(results[rank]), bound, signal_first=True)
            out = results[rank]
            low_latency_answers.receive(ours, out, bound, put=False)
            assert torch.equal(out.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))
            assert ours.sequence.tolist() == [8 + call, 0, 8 + call, 0, 0]


PER_ROUTE = [
    (2, 1, 128, torch.bfloat16), (3, 3, 256, torch.float16), (2, 4, 128, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("way", ["written", "sent", "packets", "packets sent"])
@pytest.mark.parametrize(("ranks", "top_k", "hidden", "dtype"), PER_ROUTE)
def test_a_row_for_each_route(ranks, top_k, hidden, dtype, way):
    """With `per_route`, one row returns for each route, and the token's rank weights and adds the rows.

    In float32, products and sums are each rounded. In other dtypes the numbers are small, because the interpreter
    rounds to
    few bits in its own way.
    """
    shape = DispatchShape(
        hidden_size=hidden, top_k=top_k, slots_per_rank=3, num_ranks=ranks, dtype=dtype, max_tokens=9, per_route=True
    )
    found, wanted, packets = workspaces(shape, DEVICE), workspaces(shape, "cpu"), "packets" in way
    counts, bound = (3, 0, 2)[:ranks], 3
    sent = [batch(shape, rank, tokens, torch.int64) for rank, tokens in enumerate(counts)]
    if dtype != torch.float32:
        for _, _, routing in sent:
            routing.weights.mul_(3).floor_().exp2_()
    for half in ("put", "take") if packets else ("both",):
        for rank, (x, _, routing) in enumerate(sent):
            there = PhysicalRouting(PhysicalIds(routing.ids.to(DEVICE)), routing.weights.to(DEVICE))
            for made in (found, wanted):
                signal_all_others(made, rank, 0)
            if half != "take":
                reference.send(wanted[rank], x, None, routing, bound, 4)
            if packets:
                low_latency.send(found[rank], x.to(DEVICE), None, there, bound, put=half == "put", take=half == "take")
            else:
                bulk.send(found[rank], x.to(DEVICE), None, there, bound, 4)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.sent_ids.cpu()[:bound], theirs.sent_ids[:bound])
        assert torch.equal(ours.sent_weights.cpu()[:bound], theirs.sent_weights[:bound])
        answers = theirs.local_tensors["answers"]
        assert len(answers) == 9 * ranks * top_k
        made = torch.randn(answers.shape, generator=torch.Generator().manual_seed(theirs.rank))
        made = made.round().clamp(-4, 4).to(dtype) if dtype != torch.float32 else made
        answers.copy_(made)
        ours.local_tensors["answers"].copy_(made)
        assert theirs.received(bound)["out"].shape == (bound * ranks * top_k, hidden)
        assert theirs.received(bound)["per_route"]
    for ours, theirs in zip(found, wanted, strict=True):
        reference.send_answers(theirs, bound)
        if way == "sent":
            bulk.send_answers(ours, bound)
        elif way == "written":
            reference.send_answers(ours, bound) if DEVICE == "cpu" else bulk.send_answers(ours, bound)
        elif way == "packets":
            rows = ours.local_tensors["answers"][: ranks * bound * top_k]
            ours._as_packets(ours.peer_out(bound)).write(rows)
    outs = [torch.full((tokens, hidden), 9.0, dtype=dtype, device=DEVICE) for tokens in counts]
    if way == "packets sent":
        for ours, out in zip(found, outs, strict=True):
            low_latency_answers.receive(ours, out, bound, take=False)
    for rank, tokens in enumerate(counts):
        for made in (found, wanted):
            signal_all_others(made, rank, 1)
        expected = reference.receive(wanted[rank], tokens, bound, signal_first=True)
        if packets:
            low_latency_answers.receive(found[rank], outs[rank], bound, put=False)
        else:
            bulk.receive(found[rank], outs[rank], bound, signal_first=True)
        assert torch.equal(outs[rank].cpu(), expected)
        x, _, routing = sent[rank]
        total = torch.zeros(tokens, hidden)
        for k in range(top_k):
            for token, place in enumerate(routing.ids[:, k].tolist()):
                if 0 <= place < shape.num_physical:
                    owner = wanted[place // 3].local_tensors["answers"].float()
                    total[token] += owner[(rank * bound + token) * top_k + k] * routing.weights[token, k]
        assert torch.equal(expected, total.to(dtype))


FP8_WIRES = [Wire(dispatch="fp8_block"), Wire(dispatch="fp8_row"), FP8_TENSOR]
TOKENS = (7, 0, 3)  # tokens of each rank, with a token limit of 7


def routed(shape: DispatchShape, rank: int, tokens: int) -> PhysicalRouting:
    """Return a routing in which some routes have no expert, and one token has no route."""
    there = routes(rank, tokens, shape.num_ranks, shape.top_k)
    there.ids[2:3] = -1
    return moved(there, torch.device(DEVICE))


def rounded(x: torch.Tensor, wire: Wire) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round rows by kernels in a separate launch. On GPUs this is what `quantize_for_wire` does."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    if wire.input_scale is not None:
        fp8.launch_round_by(x, wire.input_scale, out)
        return out, None
    scale = torch.empty(len(x), ROW_FORMATS[wire.dispatch].scales(x.shape[1]), device=DEVICE)
    fp8.launch_round_blocks(x, out, scale)
    return out, scale


@pytest.mark.parametrize("wire", FP8_WIRES, ids=lambda wire: wire.dispatch)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [128, 384, 2304])
@pytest.mark.parametrize("blocks", [2, 16])
def test_rounded_on_the_way_as_before_it(blocks, hidden, dtype, wire):
    """Rows rounded inside `send` leave the same bytes in all workspaces as rows rounded before it."""
    shape = DispatchShape(
        hidden_size=hidden, top_k=2, slots_per_rank=SLOTS, num_ranks=3, dtype=dtype, max_tokens=9, wire=wire
    )
    found, wanted = workspaces(shape, DEVICE), workspaces(shape, DEVICE)
    for rank, tokens in enumerate(TOKENS):
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(rank))
        x = x.mul(torch.logspace(-4, 2, hidden)).to(dtype)
        x[3:4], x[4:5, 100], x[1:2, 60], x[6:7] = 0, torch.nan, torch.inf, 6e4
        x, routing = x.to(DEVICE), routed(shape, rank, tokens)
        for made in (found, wanted):
            signal_all_others(made, rank, 0)
        bulk.send(found[rank], x, None, routing, 7, blocks)
        bulk.send(wanted[rank], *rounded(x, wire), routing, 7, blocks)
    for ours, theirs in zip(found, wanted, strict=True):
        for name, tensor in theirs.local_tensors.items():
            assert torch.equal(ours.local_tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert torch.equal(ours.memory.local, theirs.memory.local), "nothing between the tensors"
        assert ours.sequence.tolist() == [1, 0, 0, 0, 0]
        assert ours.local_tensors["rows"].view(torch.uint8).any()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("wire", FP8_WIRES, ids=lambda wire: wire.dispatch)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounded_on_the_way_as_torch_does(dtype, wire, copies):
    """Rows rounded inside `send` equal those that torch rounds.

    The numbers are exact in all dtypes. The torch functions get plain rows in one run and rounded rows in another.
    """
    shape = DispatchShape(
        hidden_size=512, top_k=2, slots_per_rank=SLOTS, num_ranks=3, dtype=dtype, max_tokens=9, wire=wire
    )
    made = found, plain, before = [workspaces(shape, device) for device in (DEVICE, "cpu", "cpu")]
    for rank, tokens in enumerate(TOKENS):
        x, there = rows(rank, tokens, dtype, wire), routed(shape, rank, tokens)
        routing = PhysicalRouting(PhysicalIds(there.ids.cpu()), there.weights.cpu())
        for each in made:
            signal_all_others(each, rank, 0)
        bulk.send(found[rank], x.to(DEVICE), None, there, 7, 4)
        for workspace, given in ((plain[rank], (x, None)), (before[rank], quantize_for_wire(x, wire))):
            if copies:
                reference.send_copies(workspace, *given, routing, 7)
            else:
                reference.send(workspace, *given, routing, 7, 4)
    for ours, theirs, third in zip(*made, strict=True):
        assert torch.equal(theirs.memory.local, third.memory.local)
        ids = theirs.local_tensors["ids"]
        here = ((ids >= 0) & (ids // shape.slots_per_rank == theirs.rank)).any(1)
        assert here.any()
        for name in ("rows", "scales"):
            mine, wished = ours.local_tensors[name].cpu()[here], theirs.local_tensors[name][here]
            assert torch.equal(mine.view(torch.uint8), wished.view(torch.uint8)), name


def test_numbers_may_overflow():
    """Sequence numbers wrap around at 2**31, and calls go on.

    A busy server makes 2**31 calls in four days.
    """
    shape = DispatchShape(hidden_size=128, top_k=1, slots_per_rank=1, num_ranks=2, dtype=torch.bfloat16, max_tokens=1)
    for workspace in (made := workspaces(shape, DEVICE)):
        workspace.sequence[2] = 2**31 - 1
    x, _, routing = batch(shape, 0, 1, torch.int64)
    there = PhysicalRouting(PhysicalIds(routing.ids.to(DEVICE)), routing.weights.to(DEVICE))
    for _ in range(2):
        signal_all_others(made, 0, 0)
        bulk.send(made[0], x.to(DEVICE), None, there, 1, 1)
        signal_all_others(made, 0, 1)
        bulk.receive(made[0], made[0].sums(1), 1, signal_first=True)
    assert made[0].sequence.tolist() == [-(2**31) + 1, 0, -(2**31) + 1, 0, 0]


@pytest.mark.skipif(DEVICE != "cpu", reason="what is written while a kernel runs: in the interpreter alone")
@pytest.mark.parametrize("form", [reference, bulk], ids=["torch", "triton"])
def test_numbers_of_old_calls_are_awaited_no_less(form):
    """`receive` waits for a peer whose flag holds the number of a very old call.

    Low-latency calls increase the sequence number but set no flag. After 2**31 of them, a wrapped difference would make
    an
    old flag look newer than this call. A server that only decodes makes that many calls in a day.
    """
    shape = DispatchShape(hidden_size=128, top_k=1, slots_per_rank=1, num_ranks=2, dtype=torch.bfloat16, max_tokens=1)
    ours = workspaces(shape, DEVICE)[0]
    ours.sent_ids.fill_(-1)
    ours.sequence.copy_(torch.tensor([6 - 2**31, 0, 5 - 2**31, 0, 0]))
    ours.local_tensors["flags"][1] = torch.tensor([6 - 2**31, 5])
    out = ours.sums(1)
    given = (ours, out, 1) if form is bulk else (ours, 1, 1)
    waiting = threading.Thread(target=form.receive, args=given, kwargs={"signal_first": False}, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "for the peer, whose number is of an old call"
    ours.local_tensors["flags"][1, 1] = 6 - 2**31
    waiting.join(60)
    assert not waiting.is_alive()
