"""Test what all ranks decide from their statuses."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ep_moe import PeerTimeout
from ep_moe.eplb.migration import consensus
from ep_moe.eplb.migration.consensus import Action, Connections, RankStatus, State, Trouble, Verdict, reach_verdict
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup

FACTS = RankStatus(7, 31, State.MOVING, 2, True, Trouble.NONE, 0)
RANKS = (4, 5, 6)


def rows(**odd):
    """Return the statuses of ranks 4, 5 and 6. Only rank 5 differs, by `odd`."""
    return [FACTS, dataclasses.replace(FACTS, **odd), FACTS]


@pytest.mark.parametrize(
    ("odd", "verdict"),
    [
        ({}, Verdict(Action.COMMIT)),
        ({"done": False}, Verdict(Action.WAIT)),
        ({"trouble": Trouble.HERE}, Verdict(Action.ROLLBACK, explained_by=1)),
        ({"trouble": Trouble.HERE, "done": False}, Verdict(Action.WAIT)),
        ({"written": True}, Verdict(Action.RESTART)),
        ({"written": True, "done": False}, Verdict(Action.WAIT)),
        ({"written": True, "trouble": Trouble.HERE}, Verdict(Action.RESTART)),
        ({"written": True, "trouble": Trouble.LOST}, Verdict(Action.ABORT, explained_by=1)),
        ({"trouble": Trouble.LOST}, Verdict(Action.ABORT, explained_by=1)),
        ({"trouble": Trouble.LOST, "done": False}, Verdict(Action.ABORT, explained_by=1)),
    ],
)
def test_verdicts(odd, verdict):
    assert reach_verdict(rows(**odd), RANKS) == verdict


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"step": 8}, "step is 7 on rank 4, 8 on rank 5"),
        ({"forward": 33}, "forward is 31 on rank 4, 33 on rank 5"),
        ({"state": State.PLANNING}, "state is 4 on rank 4, 3 on rank 5"),
        ({"epoch": 3}, "epoch is 2 on rank 4, 3 on rank 5"),
    ],
)
@pytest.mark.parametrize("trouble", Trouble)
def test_ranks_out_of_step_are_out_whatever_else_they_say(odd, words, trouble):
    found = reach_verdict(rows(**odd, trouble=trouble), RANKS)
    assert found.action is Action.ABORT
    assert words in found.text


def test_plans_that_differ():
    found = reach_verdict(rows(digest=99), RANKS)
    assert (found.action, found.explained_by) == (Action.ROLLBACK, None)
    assert "different plans: their digest is 0 on rank 4, 99 on rank 5" in found.text


@pytest.mark.parametrize("ranks", [(4,), (4, 6), (4, 6, 7)], ids=str)
def test_statuses_and_load_counts_of_all_ranks_are_exchanged(ranks, monkeypatch):
    """A status exchange of one rank communicates nothing. Others wait for what they began."""
    begun, waited = [], []

    def gathered(every, own, **how):
        every.copy_(torch.cat([own + place for place in range(len(ranks))]))
        begun.append("gather")
        return SimpleNamespace(wait=lambda: waited.append("gather"))

    def summed(counts, **how):
        counts.mul_(len(ranks))
        begun.append("sum")
        return SimpleNamespace(wait=lambda: waited.append("sum"))

    monkeypatch.setattr(consensus, "all_gather_single", gathered)
    monkeypatch.setattr(consensus.dist, "all_reduce", summed)
    exchange = consensus.StatusExchange(RankGroup(None, ranks, 0, FlightRecorder()))
    numbers = dataclasses.replace(FACTS, state=State.IDLE, done=False)
    exchange.post_status(numbers)
    exchange.post_load_counts(torch.tensor([3, 5]))
    assert [facts.step for facts in exchange.wait_for_statuses()] == [7 + place for place in range(len(ranks))]
    assert exchange.wait_for_load_sums().tolist() == [3 * len(ranks), 5 * len(ranks)]
    assert begun == waited == (["gather", "sum"] if len(ranks) > 1 else [])


def test_a_balancer_whose_peer_does_not_come_is_closed():
    def lost(what, problem):
        raise PeerTimeout(f"{what}: rank 1 did not come")

    connections = Connections([], None, None, "balancer", 1.0, SimpleNamespace(raise_on_all_ranks=lost))
    with pytest.raises(PeerTimeout, match=r"ExpertBalancer\.close"):
        connections.close()
    assert connections.closed
