"""Test how tokens move between the attention view and the expert view: masks, and routes for peers' rows."""

import pytest
import torch

from ep_moe import ParallelConfig, RankLayout
from ep_moe.parallel import token_flow as module
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.layout import split_range
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.parallel.row_comparison import argument_bits
from ep_moe.parallel.token_flow import TokenFlow, TokenSplit
from ep_moe.types import Pending, Routing, TokenMask


@pytest.mark.parametrize("sent", [False, True])
def test_etp_ranks_hear_which_rows_are_padding_and_whether_it_is_sent(sent, monkeypatch):
    """etp ranks learn which rows are padding and whether padding is sent. A rank without a mask has only tokens."""
    layout = RankLayout.from_config(ParallelConfig(dp=2, ep=1, etp=2), world=2, rank=0)
    alone = RankGroup.alone()
    flow = TokenFlow(layout, tp=alone, etp=alone, lockstep=alone)
    mask = TokenMask(torch.tensor([True, False, True]), sent)
    peer = flow.mask(None, torch.zeros(2, 4), TokenSplit((0, 2), [2], [2]))
    assert peer is None  # no rank has a mask
    gathered = []

    def gather(codes, call):  # the peer's codes come last
        gathered.append(codes)
        return torch.cat(gathered[::-1])

    monkeypatch.setattr(flow, "etp_gather", gather)
    call = TokenSplit((0, 3), [3, 2], [3], masked=True)
    flow.mask(None, torch.zeros(2, 4), call)
    found = flow.mask(mask, torch.zeros(3, 4), call)
    assert found.tokens.tolist() == [True, False, True, True, True]
    assert found.sent.tolist() == [True, sent, True, True, True]


@pytest.mark.parametrize("name", ["mask", "mask with send_masked"])
@pytest.mark.parametrize("masks", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_joins_in_the_exchange_of_masks_if_an_etp_peer_passes_one(rank, masks, name, monkeypatch):
    layout = RankLayout.from_config(ParallelConfig(dp=2, ep=1, etp=2), world=2, rank=rank)
    both = RankGroup(None, (0, 1), rank, FlightRecorder())
    flow = TokenFlow(layout, tp=RankGroup(None, (rank,), 0, FlightRecorder()), etp=both, lockstep=both)
    passed = [{"x": torch.zeros(2, 4)} | ({name: torch.ones(2, dtype=torch.bool)} if mask else {}) for mask in masks]
    exchanged = [[2, argument_bits(one), 0] for one in passed]
    monkeypatch.setattr(RankGroup, "agree", lambda *_, **__: exchanged)
    assert flow.enter(2, None, torch.device("cpu"), passed[rank]).masked is any(masks)


@pytest.mark.parametrize("tokens", [10, 3, 0])
@pytest.mark.parametrize(("tp", "etp"), [(2, 2), (4, 2), (4, 4), (6, 2)])
def test_a_rank_keeps_its_own_tokens_of_what_was_computed_for_its_etp_peers(tp, etp, tokens, monkeypatch):
    """A rank keeps its own tokens of what it computed for its etp peers.

    These are rows of `etp_gather`, which are adjacent in x if the etp group is part of a tp group.
    """
    gathered = []
    monkeypatch.setattr(module, "gather_replicated", lambda y, counts, rank_group: gathered.append(y) or y)
    counts = [stop - start for start, stop in (split_range(tokens, tp, rank) for rank in range(tp))]
    x = torch.arange(tokens)
    for rank in range(tp):
        layout = RankLayout.from_config(ParallelConfig(tp=tp, etp=etp), world=tp, rank=rank)
        groups = {
            kind: RankGroup(None, tuple(layout.group(kind)), layout.group(kind).index(rank), FlightRecorder())
            for kind in ("tp", "etp", "lockstep")
        }
        flow = TokenFlow(layout, **groups)
        assert flow.etp_rows_are_local
        call = TokenSplit(split_range(tokens, tp, rank), [counts[peer] for peer in groups["etp"].ranks], counts)
        flow.tp_gather_router_results(flow.etp_gather(x, call), call)
        assert torch.equal(gathered.pop(), flow.local_tokens(x, call))


@pytest.mark.parametrize("local", [True, False])
def test_gradients_of_given_routing_weights_are_shared_as_those_of_rows_are(local, monkeypatch):
    layout = RankLayout.from_config(ParallelConfig(tp=2), world=2, rank=0)
    both = RankGroup(None, (0, 1), 0, FlightRecorder())
    flow = TokenFlow(layout, tp=both, etp=RankGroup.alone(), lockstep=both)
    flow.etp_rows_are_local = local
    monkeypatch.setattr(flow, "shared_gradients", lambda weights: 2 * weights)
    monkeypatch.setattr(flow, "etp_gather_routing", lambda ids, weights, call: (ids, weights))
    call = TokenSplit(split_range(4, 2, 0), [2], [2, 2])
    given = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    assert flow.etp_gather_given(given, call).weights.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize(
    ("sizes", "rank", "local"), [({"dp": 2, "ep": 1, "etp": 2}, 0, False), ({"tp": 2, "ep": 1, "etp": 2}, 1, True)]
)
def test_a_capture_exchanges_nothing(sizes, rank, local, monkeypatch):
    """A capture exchanges nothing. Ranks are assumed to pass equally many rows, and etp peers hear of no mask."""
    monkeypatch.setattr(module, "capturing", lambda device: True)
    monkeypatch.setattr(RankGroup, "exchange", lambda *_: pytest.fail("an exchange within a capture"))
    layout = RankLayout.from_config(ParallelConfig(**sizes), world=2, rank=rank)
    both = RankGroup(None, (0, 1), rank, FlightRecorder())
    flow = TokenFlow(layout, tp=both if local else RankGroup.alone(), etp=both, lockstep=both)
    passed = {"x": torch.zeros(3, 4), "mask": torch.ones(3, dtype=torch.bool)}
    call = flow.enter(3, None, torch.device("cpu"), passed)
    assert call == (TokenSplit((2, 3), [2, 1], [2, 1], True) if local else TokenSplit((0, 3), [3, 3], [3], False))
    flow.agree("what a router gave is wrong", torch.device("cpu"))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_routes_of_all_etp_peers_come_in_one_message(top_k, monkeypatch):
    """Routes of all etp peers come in one message, in rank order: ids unchanged, and weights with their gradient."""
    alone = RankGroup.alone()
    layout = RankLayout.from_config(ParallelConfig(dp=2, ep=1, etp=2), world=2, rank=1)
    flow = TokenFlow(layout, tp=alone, etp=RankGroup(None, (0, 1), 1, FlightRecorder()), lockstep=alone)
    own = torch.randint(-1, 2**24, (3, top_k)), torch.rand(3, top_k, requires_grad=True)
    peer = torch.full((2, top_k), 2**24 - 1), torch.rand(2, top_k)
    messages = []

    def gather(rows, counts, rank_group):
        messages.append(counts)
        return Pending(lambda: torch.cat([torch.cat([peer[0].float(), peer[1]], dim=1), rows]))

    monkeypatch.setattr(module, "gather_rows", gather)
    ids, weights = flow.etp_gather_routing(*own, TokenSplit((0, 3), [2, 3], [3]))
    assert messages == [[2, 3]]
    assert ids.dtype == torch.int64
    assert torch.equal(ids, torch.cat([peer[0], own[0]]))
    assert torch.equal(weights, torch.cat([peer[1], own[1]]))
    assert not ids.requires_grad
    weights.sum().backward()
    assert torch.equal(own[1].grad, torch.ones(3, top_k))
