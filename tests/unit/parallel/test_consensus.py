"""Agreements of ranks, on one rank."""

import pytest
import torch.distributed as dist

from ep_moe import InputError
from ep_moe.parallel.consensus import StoreConsensus


def test_an_error_that_ranks_agreed_on_leaves_the_agreement_around_it_as_it_is():
    """To agree on it again would need all ranks once more."""
    consensus, raised = StoreConsensus(None, [0], 0, 1.0), []

    def fails():
        try:
            consensus.healthy("one", InputError("bad"))
        except InputError as error:
            raised.append(error)
            raise

    with pytest.raises(InputError, match="bad") as left, consensus.together("all"):
        fails()
    assert left.value is raised[0]


def test_an_agreement_on_longer_work_has_a_longer_deadline(monkeypatch):
    waited = []
    monkeypatch.setattr(
        StoreConsensus, "_decide", lambda self, key, what, deadline_s: waited.append((what, deadline_s))
    )
    consensus = StoreConsensus(dist.HashStore(), [0, 1], 0, 5.0)
    consensus.healthy("usual", None)
    consensus.healthy("long", None, deadline_s=60.0)
    consensus.healthy("short", None, deadline_s=1.0)
    assert consensus.share("made", lambda: 7, deadline_s=60.0) == 7
    assert waited == [("usual", 5.0), ("long", 60.0), ("short", 5.0), ("made", 60.0)]


def test_an_error_of_fewer_ranks_is_reported_to_all_of_the_agreement_around_it(monkeypatch):
    """The others did not hear of it, and would wait."""
    pair, whole, reported = StoreConsensus(None, [0], 0, 1.0), StoreConsensus(None, [0], 0, 1.0), []
    monkeypatch.setattr(whole, "healthy", lambda what, problem: reported.append((what, str(problem))))
    with pytest.raises(InputError, match="bad"), whole.together("all"):
        pair.healthy("one", InputError("bad"))
    assert [what for what, _ in reported] == ["all"]
    assert "bad" in reported[0][1]
