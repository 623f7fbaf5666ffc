"""Test the schedule of transfers between two maps, in a simulation without ranks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ExpertMap
from ep_moe.eplb.migration.schedule import MAX_ROUNDS, Transfer, batches, changed_slots, moves, rounds

unhurried = settings(deadline=None)


@st.composite
def two_maps(draw):
    """Draw two maps with equal E, R and slots per rank, with empty slots and replicas."""
    ranks, slots_per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * slots_per_rank))
    found = []
    for _ in range(2):
        slots = draw(st.permutations([*range(experts), *[-1] * (ranks * slots_per_rank - experts)]))
        table = [list(slots[rank * slots_per_rank : (rank + 1) * slots_per_rank]) for rank in range(ranks)]
        for held in table:
            for slot in range(slots_per_rank):
                if held[slot] == -1:
                    held[slot] = draw(st.sampled_from([-1, *[e for e in range(experts) if e not in held]]))
        found.append(ExpertMap(experts, ranks, tuple(expert for held in table for expert in held)))
    return found


@unhurried
@given(two_maps(), st.integers(1, 3), st.integers(1, 40), st.integers(1, 200))
def test_batches_bring_every_rank_what_it_lacks(maps, nodes, row_bytes, budget):
    """The batches bring each rank every byte of the experts that it lacks, from a rank that holds them.

    The simulation marks each byte that arrives.
    """
    old, new = maps
    per_node = old.num_ranks // nodes if old.num_ranks % nodes == 0 else old.num_ranks
    planned = moves(old, new, ranks_per_node=per_node)
    steps = [batches(planned, rank, row_bytes, budget) for rank in range(old.num_ranks)]
    assert len({len(mine) for mine in steps}) == 1
    arrived = [Counter() for _ in steps]
    for parts in zip(*steps, strict=True):
        for rank, batch in enumerate(parts):
            assert len(batch.rounds) <= MAX_ROUNDS
            assert set(batch.copies) <= set(old.local(rank))
            arrived[rank].update((expert, byte) for expert in batch.copies for byte in range(row_bytes))
            for number, (sent, received) in enumerate(batch.rounds):
                if sent is not None:
                    assert sent.expert in old.local(rank)
                    there = parts[sent.peer].rounds[number][1]
                    assert (there.expert, there.peer, there.start, there.stop) == (
                        sent.expert, rank, sent.start, sent.stop,
                    )  # fmt: skip
                if received is not None:
                    assert parts[received.peer].rounds[number][0].peer == rank
                    arrived[rank].update((received.expert, byte) for byte in range(received.start, received.stop))
            for side in (0, 1):
                size = sum(part[side].stop - part[side].start for part in batch.rounds if part[side])
                assert size <= max(budget, 8)
    for rank, found in enumerate(arrived):
        needed = {expert for _, expert in changed_slots(old, new, rank)}
        assert found == Counter((expert, byte) for expert in needed for byte in range(row_bytes)), "once each"
        assert sorted(planned.staged(rank)) == sorted(needed)


@unhurried
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_rounds_are_matchings_and_as_few_as_can_be(ranks, pairs):
    transfers = [Transfer(e, a % ranks, b % ranks) for e, (a, b) in enumerate(pairs)]
    found = rounds(transfers, ranks)
    assert sorted(t for step in found for t in step) == sorted(transfers)
    for step in found:
        assert len({t.source for t in step}) == len({t.target for t in step}) == len(step)
    degrees = Counter(("to", t.target) for t in transfers) + Counter(("from", t.source) for t in transfers)
    assert len(found) == max(degrees.values(), default=0)


@pytest.mark.parametrize(("per_node", "expected"), [(2, [Transfer(0, 2, 3)]), (4, [Transfer(0, 0, 3)])])
def test_sources_of_the_same_node_come_first(per_node, expected):
    old = ExpertMap.from_ranks([[0], [1], [0], [2]], 3)
    new = ExpertMap.from_ranks([[2], [1], [0], [0]], 3)
    found = moves(old, new, ranks_per_node=per_node).transfers
    assert [t for t in found if t.expert == 0] == expected


def test_holders_send_evenly():
    """Transfers of an expert are spread evenly over its holders.

    Expert 0 goes to four ranks, so both holders send two. A rank that is the only holder of another expert sends that
    one,
    and the other holder sends more of expert 0.
    """
    old = ExpertMap.from_ranks([[0, 1], [0, 2], [3, 4], [5, 6], [7, 8], [9, 10]], 11)
    new = ExpertMap.from_ranks([[0, 1], [0, 2], [3, 4, 0], [5, 6, 0], [7, 8, 0], [9, 10, 0]], 11)
    wide = ExpertMap.from_ranks([[*old.local(rank), -1] for rank in range(6)], 11)
    found = moves(wide, new).transfers
    assert Counter(t.source for t in found) == {0: 2, 1: 2}
    new = ExpertMap.from_ranks([[0, 1], [0, 2], [3, 4, 0], [5, 6, 1], [7, 8, 1], [9, 10, 0]], 11)
    assert Counter(t.source for t in moves(wide, new).transfers) == {0: 2, 1: 2}


@pytest.mark.parametrize("budget", [1, 8, 9, 20, 39])
def test_pieces_of_a_row_are_of_whole_words(budget):
    """A row is cut at multiples of 8 bytes, because kernels read and check rows as int64."""
    old, new = ExpertMap.linear(2, 2), ExpertMap.from_ranks([[1], [0]], 2)
    pieces = [part for batch in batches(moves(old, new), 0, 40, budget) for pair in batch.rounds for part in pair]
    assert len(pieces) > 2
    assert all(piece.start % 8 == piece.stop % 8 == 0 for piece in pieces)


def test_an_expert_that_stays_does_not_move():
    held = ExpertMap.redundant(6, 3, 3)
    assert moves(held, held).transfers == ()
    assert batches(moves(held, held), 0, 100, 10) == []
