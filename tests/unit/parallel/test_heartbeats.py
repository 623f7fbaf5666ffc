"""Test the diagnosis of peers from their last heartbeats."""

import time

import pytest
from torch.distributed import HashStore

from ep_moe.parallel import heartbeats
from ep_moe.parallel.heartbeats import _FEWER_CALLS, Heartbeats, Step, compare, compare_others, unless_ahead
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.timeout_store import TimeoutStore


def step(number: int, phase: str = "dispatch", call_name: str = "moe3", done: bool = False) -> Step:
    return Step(number, call_name, phase, "torch_a2a", done)


def test_what_a_heartbeat_does_not_know_is_said():
    dead, mine = (5, step(7)), (9, step(9))
    text = compare(step(9), 0, {0: mine, 1: dead}, {0: mine, 1: dead}, {}, {1: time.time() - 3})
    assert text == (
        "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 7) 3 s ago (it may have advanced since)."
    )
    text = compare(step(9), 0, {0: mine, 1: dead}, {0: mine, 1: dead}, {1: step(8)}, {1: 0.0})
    assert text == "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 8)."


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ((5, step(7)), (9, step(7)), ""),
        ((5, step(7)), (5, step(7)), "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 7)."),
        (None, None, "Rank 1 shows no sign of life."),
        (
            (5, step(6)),
            (9, step(6, done=True)),
            f"Rank 1 is alive but behind: finished dispatch of moe3 (step 6). {_FEWER_CALLS}",
        ),
        ((5, step(7, "combine")), (9, step(7, "combine")), "Rank 1 is in another call: in combine of moe3 (step 7)."),
        ((5, step(7, call_name="")), (9, step(7, call_name="")), "Rank 1 is in another call: in dispatch (step 7)."),
        ((5, step(8, "combine")), (9, step(8, "combine")), ""),
    ],
)
def test_comparison_of_heartbeats(before, after, sentence):
    mine = (1, step(7))
    assert compare(step(7), 0, {0: mine, 1: before}, {0: mine, 1: after}) == sentence


def test_comparison_names_every_rank():
    before = {0: (1, step(7)), 1: (1, step(7)), 2: None, 3: (4, step(5))}
    after = {0: (2, step(7)), 1: (2, step(7)), 2: None, 3: (9, step(5))}
    sentence = "Rank 2 shows no sign of life. Rank 3 is alive but behind: in dispatch of moe3 (step 5)."
    assert compare(step(7), 0, before, after) == sentence


def test_a_peer_that_is_further_is_not_in_the_same_step():
    after = {0: (2, step(7)), 1: (2, step(7)), 2: (9, step(6)), 3: None}
    assert unless_ahead(step(7), after) == "Every peer is alive and in the same step."
    after[1] = 2, step(8, "backward by all_gather")
    assert unless_ahead(step(7), after, {2: step(9)}) == (
        "Every peer is alive, and rank 1 is ahead: in backward by all_gather of moe3 (step 8); rank 2 is ahead: in "
        "dispatch of moe3 (step 9)."
    )


def test_ranks_of_other_groups_are_named_where_they_are_silent_or_not_as_far():
    before = {2: (1, step(7)), 3: (4, step(5)), 4: (4, step(5)), 5: None}
    after = {2: (2, step(7)), 3: (9, step(5)), 4: (4, step(5)), 5: None}
    assert compare_others(step(7), before, after, {4: time.time() - 3}) == (
        "Rank 3 of another EP group is alive, and in dispatch of moe3 (step 5). "
        "Rank 4 of another EP group shows no sign of life, last seen in dispatch of moe3 (step 5) 3 s ago (it may have "
        "advanced since). Rank 5 of another EP group shows no sign of life."
    )


def test_a_peer_of_this_host_is_judged_by_the_step_that_is_known():
    """A peer on this host is judged by its current step, because its heartbeat is older."""
    before, after = (5, step(5)), (9, step(5))
    assert compare(step(7), 0, {1: before}, {1: after}, {1: step(7)}) == ""
    assert compare(step(7), 0, {1: before}, {1: after}, {1: step(6)}) == (
        "Rank 1 is alive but behind: in dispatch of moe3 (step 6)."
    )


def test_a_host_is_lost_where_all_its_ranks_are_silent():
    alive, silent = ((5, step(7)), (9, step(7))), ((5, step(7)), (5, step(7)))
    nodes = NodeLayout.from_ranks_per_node(range(6), 3)
    for gone, sentence in (
        ((3, 4), "Host of ranks 3, 4: node 1."),
        (
            (3, 4, 5),
            "Host node 1, or the network to it, is lost: all its ranks in this group are silent (ranks 3, 4, 5).",
        ),
    ):
        readings = {rank: silent if rank in gone else alive for rank in range(6)}
        before, after = ({rank: pair[at] for rank, pair in readings.items()} for at in (0, 1))
        assert compare(step(7), 0, before, after, nodes=nodes).endswith(f"(step 7). {sentence}")


def test_a_rank_that_compares_shows_that_it_lives(monkeypatch):
    """A rank that compares heartbeats sends its own, because a peer may compare at the same time.

    No other heartbeat is sent then.
    """
    store = TimeoutStore(HashStore(), 5.0)
    mine, peer = (Heartbeats([0, 1, 2], rank, lambda at=at: step(at), {}, None) for rank, at in ((0, 9), (1, 7)))
    peer.beat(store)
    read = []
    monkeypatch.setattr(heartbeats.time, "sleep", lambda seconds: (peer.beat(store), read.append(peer._read(store))))
    text, behind = mine.compared(store, step(9), 1.0)
    assert text == "Rank 1 is alive but behind: in dispatch of moe3 (step 7). Rank 2 shows no sign of life."
    assert behind == 7
    assert "Rank 0" not in compare(step(7), 1, read[0], peer._read(store))
