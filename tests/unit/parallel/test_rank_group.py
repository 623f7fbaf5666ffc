"""Test a group that does not start at the job's first rank, without other processes."""

import logging
from types import SimpleNamespace

import pytest
import torch

from ep_moe import InputError
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup

CPU = torch.device("cpu")
HEADER = ("problem", "name", "call_facts", "gradients")  # what each rank exchanges before a call's integers


def group_with(monkeypatch, rank=0, **peers_header):
    """Return the group of ranks 4 and 6. Their headers differ in the given fields.

    A rank's shared text is "that of" its number, unless `texts` has another.
    """
    recorder = FlightRecorder()
    texts = peers_header.pop("texts", {})
    monkeypatch.setattr(recorder, "broadcast_text", lambda text, *, owner, group: texts.get(owner, f"that of {owner}"))

    def exchange(self, own):
        row = own.tolist()
        return [row, [peers_header.get(name, found) for name, found in zip(HEADER, row, strict=False)] + row[4:]]

    monkeypatch.setattr(RankGroup, "exchange", exchange)
    return RankGroup(None, (4, 6), rank, recorder)


def test_a_problem_is_told_by_the_rank_that_has_it(monkeypatch):
    recorder, asked = FlightRecorder(), []

    def broadcast_text(text, *, owner, group):
        asked.append((owner, group))
        return "x is wrong"

    monkeypatch.setattr(recorder, "broadcast_text", broadcast_text)
    monkeypatch.setattr(RankGroup, "exchange", lambda self, own: [own.tolist(), [1, *own.tolist()[1:]]])
    with pytest.raises(InputError, match=r"^rank 6: x is wrong$"):
        RankGroup(None, (4, 6), 0, recorder).agree([0], None, torch.device("cpu"))
    assert asked == [(6, (4, 6))]


def test_ranks_of_the_job_are_named_with_their_layers(monkeypatch):
    with pytest.raises(InputError, match=r"rank 4 is in 'that of 4', rank 6 in 'that of 6'; call the layers"):
        group_with(monkeypatch, name=1).agree([0], None, CPU)


@pytest.mark.parametrize("loads", [4, 6])
def test_whichever_rank_loaded_a_state_alone_is_named(loads, monkeypatch):
    texts = {4: "hidden_size=16", 6: "hidden_size=16"}
    texts[loads] += ", loaded=77"
    found = {rank: "loaded=77" if rank == loads else "none" for rank in texts}
    with pytest.raises(InputError, match=rf"since the last call: rank 4 {found[4]}, rank 6 {found[6]} \(a checksum"):
        group_with(monkeypatch, call_facts=1, texts=texts).agree([0], None, CPU)


@pytest.mark.parametrize(("asked", "name"), [(0b10, "x"), (0b01, "routing.weights")])
def test_the_tensor_whose_gradient_one_rank_wants_is_named(asked, name, monkeypatch):
    gradients = {one: torch.ones(1, requires_grad=True) for one in ("x", "routing.weights")}
    with pytest.raises(InputError, match=rf"^{name} requires a gradient on rank 4 and not on rank 6,"):
        group_with(monkeypatch, gradients=asked).agree([0], None, CPU, gradients=gradients)


def test_without_grad_mode_no_gradient_is_wanted(monkeypatch):
    with torch.no_grad():
        group_with(monkeypatch, gradients=0).agree([0], None, CPU, gradients={"x": torch.ones(1, requires_grad=True)})


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("peer", ["alike", "a problem", "other facts"])
def test_numbers_in_the_hosts_memory_serve_ranks_that_are_alike(peer, grad, monkeypatch):
    """Numbers exchanged through the host's memory suffice if ranks agree.

    Otherwise the ranks meet in a collective, which reports what is wrong.
    """
    rank_group, posted = group_with(monkeypatch), []
    answer = 5 << 1 | (peer == "a problem")
    rank_group.known.agreed_exchange = SimpleNamespace(
        post=lambda *pair: posted.append(pair),
        collect=lambda recorder, late: [(answer, posted[0][1] + (peer == "other facts"))],
    )
    rank_group.known.asked = rank_group.known.decided = True
    monkeypatch.setattr(RankGroup, "agree", lambda *_, **__: [[True, 7], [True, 9]])
    with torch.set_grad_enabled(grad):
        asked = {"x": torch.ones(1, requires_grad=True)}
        assert rank_group.most_tokens(3, None, CPU, "nvlink_p2p", gradients=asked) == (5 if peer == "alike" else 9)
        rank_group.most_tokens(3, None, CPU, "nvlink_p2p", gradients={"x": torch.ones(1)})
    (first, facts), (_, without) = posted
    assert first == 3 << 1
    assert (facts != without) is grad, "a rank that wants no gradient is another"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("peer_sees", [True, False])
def test_hosts_memory_serves_where_all_ranks_see_it(peer_sees, rank, monkeypatch, caplog):
    rank_group, own = group_with(monkeypatch, rank), SimpleNamespace()
    monkeypatch.setattr(rank_group.flight_recorder, "host_exchange", lambda ranks: own)
    monkeypatch.setattr(RankGroup, "agree", lambda *_, **__: [[True, 3], [peer_sees, 5]])
    with caplog.at_level(logging.WARNING, "ep_moe.parallel"):
        assert rank_group.most_tokens(3, None, CPU, "nvlink_p2p") == 5
    assert rank_group.known.agreed_exchange is (own if peer_sees else None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not peer_sees and rank == 0), "one rank says it for all"
    assert all("ranks 4, 6 cannot read each other's memory" in text for text in said)
