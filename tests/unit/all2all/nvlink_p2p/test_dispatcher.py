"""Test which calls of `nvlink_p2p` use LL packets, kernels and copies, and how many are in flight at once."""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p import dispatcher, reference
from ep_moe.all2all.nvlink_p2p.buffers import pieces
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.config import Wire
from ep_moe.errors import InputError
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.p2p_kernels import until


@pytest.fixture(autouse=True)
def _no_endless_waits(monkeypatch):
    monkeypatch.setattr(reference, "_until", until)


@pytest.mark.parametrize(("hidden", "ranks", "most"), [(2048, 2, 64), (2048, 4, 64), (7168, 4, 18), (2048, 8, 32)])
def test_few_tokens_go_by_packets(hidden, ranks, most):
    assert NVLinkP2PDispatcher._low_latency_tokens(dispatch_shape(hidden, ranks)) == most


@pytest.mark.parametrize("hidden", [8, 64, 1000, 1024, 1032, 7168, 1 << 17, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_programs_of_a_call_by_packets_run_at_once(hidden, ranks):
    """All programs of the largest low-latency call fit on the GPU at once.

    Each program waits for programs of other ranks, so a program that waits for a free multiprocessor would deadlock.
    """
    most = NVLinkP2PDispatcher._low_latency_tokens(dispatch_shape(hidden, ranks))
    assert most * ranks * pieces(2 * hidden) <= 512
    assert pieces(2 * hidden) * 512 * 4 >= 2 * hidden


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dtype": torch.float32}, 32),  # 8192 bytes a row, of 256 KiB
        ({"per_route": True, "top_k": 3}, 42),  # 512 programs: 2 ranks, 2 pieces of an answer, 3 answers
        ({"per_route": True, "top_k": 1}, 64),
        ({"top_k": 3}, 64),
    ],
    ids=str,
)
def test_a_token_with_several_answers_has_several_programs(options, most):
    assert NVLinkP2PDispatcher._low_latency_tokens(dispatch_shape(2048, 2, **options)) == most


@pytest.mark.parametrize(("hidden", "calls"), [(1024, 2), (4096, 2), (8192, 3)])
def test_answers_that_come_by_copies_take_a_third_call(hidden, calls):
    """Results that copy engines carry keep their workspace longer, so a call in parts needs a third call in flight.

    64 tokens are 1 MiB of the widest rows. Copy engines carry results of that size beside other work.
    """
    assert NVLinkP2PDispatcher.calls_in_parts(dispatch_shape(hidden, 8)) == calls


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("bound", [1, 32, 33, 128])
@pytest.mark.parametrize("grows", [False, True])
def test_large_calls_beside_other_work_go_by_copies(grows, bound, beside, monkeypatch):
    """Of a bound of their own, in buffers for 128 tokens, which are 1 MiB; up to 32 tokens go by packets. Buffers that
    grow are of the call's size, and 33 tokens are too few of these for copies."""
    sent = []
    for name in ("send", "send_copies"):
        monkeypatch.setattr(dispatcher, name, noted(sent, name, getattr(dispatcher, name)))
    shape = dispatch_shape(2048, 1, dtype=torch.float32, max_tokens=None if grows else 128)
    transport, x = NVLinkP2PDispatcher(shape, RankGroup.alone()), torch.ones(bound - 1, 2048)
    routing = PhysicalRouting(PhysicalIds(torch.tensor([[1, -1]]).expand(len(x), 2)), torch.ones(len(x), 2))
    transport._side.active = beside
    received = transport.dispatch(x, routing, max_tokens=bound)
    received.out.copy_(2 * received.x)
    assert torch.equal(transport.combine(received.out, received.handle), 2 * x)
    by_copies = beside and (bound == 128 or (bound == 33 and not grows))
    assert sent == ["send_copies" if by_copies else "packets" if bound <= 32 else "send"]


@pytest.mark.parametrize("bound", [3, 300])
def test_a_refused_call_answers_every_place_with_nan(bound):
    """Peers have started, and would take what an earlier call left."""
    transport = NVLinkP2PDispatcher(dispatch_shape(16, 1, max_tokens=300), RankGroup.alone())
    x = torch.ones(bound, 16, dtype=torch.bfloat16)
    routing = PhysicalRouting(PhysicalIds(torch.tensor([[1, 3]]).expand(bound, 2)), torch.ones(bound, 2))
    received = transport.dispatch(x, routing, max_tokens=bound)
    transport.combine(received.out.zero_(), received.handle)
    with pytest.raises(InputError, match="no such rows"):
        transport.dispatch_start(x, routing, "no such rows", max_tokens=bound)
    workspace = transport.buffer_pool.buffer_slots[0].workspace
    assert (workspace.local_tensors["ids"][:bound] == -1).all()
    assert workspace.local_tensors["answers"].isnan().all()
    assert workspace.sequence.tolist() == [2, 0, 2, 0, 0], "a call like any other"


def noted(sent: list[str], name: str, function):
    def call(*args, **options):
        sent.append("packets" if options.get("packets") else name)
        return function(*args, **options)

    return call


@pytest.mark.parametrize("wire", [Wire(), Wire(dispatch="fp8_row"), Wire(dispatch="mxfp8")], ids=lambda w: w.dispatch)
def test_a_call_is_recorded_in_buffers_that_are_made(wire):
    """Not before the first call, not for more tokens than they hold, and only of rows that are rounded on their way."""
    shape = dispatch_shape(128, 1, max_tokens=None, wire=wire)
    transport = NVLinkP2PDispatcher(shape, RankGroup.alone())
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    rows, scale = quantize_for_wire(x, wire)
    routing = PhysicalRouting(PhysicalIds(torch.tensor([[1, 3]])), torch.ones(1, 2))
    assert transport.recordable_call(1) is None
    received = transport.dispatch(rows, routing, scale)
    transport.combine(received.out.zero_(), received.handle)
    if wire.dispatch == "mxfp8":
        assert transport.recordable_call(1) is None
        return
    assert transport.recordable_call(257) is None
    call = transport.recordable_call(256)
    call.send(x, routing)
    ids = transport.buffer_pool.buffer_slots[0].workspace.local_tensors["ids"]
    assert torch.equal(ids[0], torch.tensor([1, 3], dtype=torch.int32))
    call.received.out.fill_(3)
    out = torch.full_like(x, torch.nan)
    call.receive(call.received.out, out)
    assert torch.equal(out, 3 * x)


def dispatch_shape(hidden: int, ranks: int, **options) -> DispatchShape:
    given = {"top_k": 2, "dtype": torch.bfloat16, "max_tokens": 64} | options
    return DispatchShape(hidden_size=hidden, slots_per_rank=4, num_ranks=ranks, **given)
