"""Test times that ranks agree on, and attempts that fail on one rank."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, PeerTimeout
from ep_moe.cli import rank_times


def test_a_time_is_the_slowest_ranks_to_the_nanosecond():
    sent = []

    def exchange(row):
        sent.append(row.tolist())
        return [row.tolist(), [9000, 1]]

    context = SimpleNamespace(device=torch.device("cpu"), rank_groups={"lockstep": SimpleNamespace(exchange=exchange)})
    assert rank_times.slowest(context, [1.0014, 2.5]) == [9.0, 2.5]
    assert sent == [[1001, 2500]]


def consensus(raised=None, heard=None):
    """Return a context whose consensus raises what another rank raised, or this rank's own problem."""

    def raise_on_all_ranks(what, problem):
        if heard is not None:
            heard.append((what, problem))
        if (error := raised or problem) is not None:
            raise error

    return SimpleNamespace(consensus=SimpleNamespace(raise_on_all_ranks=raise_on_all_ranks))


def test_what_fails_on_one_rank_is_left_out_on_all():
    heard, error = [], ValueError("no memory")

    def make():
        raise error

    assert rank_times.attempt(consensus(heard=heard), "making x", make) == (None, "no memory")
    assert heard == [("making x", error)], "the others hear of it"
    assert rank_times.attempt(consensus(ConfigError("rank 1: no memory")), "x", lambda: 5) == (
        None,
        "rank 1: no memory",
    )
    assert rank_times.attempt(consensus(), "x", lambda: 5) == (5, None)


@pytest.mark.parametrize("where", ["made", "agreed"])
def test_a_lost_peer_is_no_candidate_that_failed(where):
    lost = PeerTimeout("rank 1 is gone")

    def make():
        if where == "made":
            raise lost

    with pytest.raises(PeerTimeout, match="rank 1 is gone"):
        rank_times.attempt(consensus(lost if where == "agreed" else None), "x", make)
