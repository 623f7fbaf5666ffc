"""Test sub-plans: every intermediate map is complete, and no step is larger than cycles of experts require."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ExpertMap, Placement
from ep_moe.eplb.migration.schedule import changed_slots, sub_plans, transfer_schedule
from ep_moe.placement.expert_map import EMPTY
from tests.fixtures.sub_plans import pairs

unhurried = settings(deadline=None)


def writes(old: ExpertMap, new: ExpertMap) -> int:
    return max(len(changed_slots(old, new, rank)) for rank in range(old.num_ranks))


@unhurried
@given(pairs(), st.integers(1, 8))
def test_every_map_on_the_way_is_whole(maps, most):
    old, new = maps
    way = sub_plans(old, new, most)
    assert (way[-1] is new) if old != new else way == []
    for before, after in pairwise([old, *way]):
        assert before != after
        for expert in range(old.num_experts):
            # either all slots of an expert change or none, if it gives up any to another expert
            counts = {one.replica_count[expert] for one in (old, new)}
            assert after.replica_count[expert] >= min(counts)
            assert after.replica_count[expert] <= max(counts)
        for slot, expert in enumerate(after.physical_to_logical):
            assert expert in (old.physical_to_logical[slot], new.physical_to_logical[slot])
    assert sum(writes(a, b) for a, b in pairwise([old, *way])) >= writes(old, new)


@unhurried
@given(pairs())
def test_pieces_are_as_small_as_cycles_allow(maps):
    """With room for one slot, a sub-plan holds one group that cannot be cut, because an expert would have no slot."""
    old, new = maps
    way = sub_plans(old, new, 1)
    for before, after in pairwise([old, *way]):
        changed = [
            i
            for i, (a, b) in enumerate(zip(before.physical_to_logical, after.physical_to_logical, strict=True))
            if a != b
        ]
        if writes(before, after) > 1:
            moved = {after.physical_to_logical[slot] for slot in changed} - {EMPTY}
            assert moved & {before.physical_to_logical[slot] for slot in changed}, "nothing held them together"


def test_a_rotation_comes_in_pieces_of_the_size_asked_for():
    old = ExpertMap.linear(32, 4)
    new = ExpertMap(32, 4, old.physical_to_logical[-8:] + old.physical_to_logical[:-8])
    for most, count in ((1, 8), (2, 4), (3, 3), (8, 1), (100, 1)):
        way = sub_plans(old, new, most)
        assert len(way) == count
        assert all(writes(a, b) <= most for a, b in pairwise([old, *way]))
    placement = Placement(old)
    for placed in sub_plans(old, new, 2):
        placement.update(placed)


def test_a_cycle_stays_whole():
    old, new = ExpertMap.linear(6, 2), ExpertMap.from_ranks([[1, 2, 3], [4, 5, 0]], 6)
    assert sub_plans(old, new, 1) == [new]


def test_pieces_move_no_byte_twice():
    old = ExpertMap.linear(32, 4)
    new = ExpertMap(32, 4, old.physical_to_logical[-8:] + old.physical_to_logical[:-8])
    way = [old, *sub_plans(old, new, 3)]
    parts = [transfer_schedule(a, b, 0, row_bytes=64, budget=1 << 20) for a, b in pairwise(way)]
    assert sum(len(part.moves.transfers) for part in parts) == len(
        transfer_schedule(old, new, 0, row_bytes=64, budget=1 << 20).moves.transfers
    )


def test_beside_a_cycle_that_is_too_large_only_other_ranks_write():
    old = [[0, 1, 5], [2, 3, 5], [2, 4, 5]]
    new = [[1, 0, 4], [2, 3, 5], [3, 4, 5]]
    between = [[1, 0, 5], [2, 3, 5], [3, 4, 5]]
    for way in (1, -1):  # the cycle comes before the other ranks' writes, or after them
        first, middle, last = (ExpertMap.from_ranks(ranks[::way], 6) for ranks in (old, between, new))
        assert sub_plans(first, last, 1) == sub_plans(first, last, 2) == [middle, last]
        assert sub_plans(first, last, 3) == [last]


def test_a_rank_may_hold_an_expert_twice_until_it_does_no_more():
    old = ExpertMap.from_ranks([[0, 0, 1, 1], [2, 3, 4, 5]], 6, allow_duplicates=True)
    new = ExpertMap.from_ranks([[0, 2, 1, 3], [2, 3, 4, 5]], 6)
    assert [placed.local(0) for placed in sub_plans(old, new, 1)] == [(0, 2, 1, 1), (0, 2, 1, 3)]


@st.composite
def replaced(draw):
    """Draw two maps that differ only in their replicas. The first slots of each rank are the same."""
    ranks, own, spare = draw(st.integers(2, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    experts = st.lists(st.integers(0, ranks * own - 1), min_size=spare, max_size=spare)
    flats = [[e for r in range(ranks) for e in [*range(r * own, (r + 1) * own), *draw(experts)]] for _ in range(2)]
    return [ExpertMap(ranks * own, ranks, tuple(flat), allow_duplicates=True) for flat in flats]


@unhurried
@given(pairs() | replaced(), st.integers(1, 8))
def test_no_two_pieces_could_be_one(maps, most):
    old, new = maps
    way = [old, *sub_plans(old, new, most)]
    written = [[len(changed_slots(a, b, rank)) for rank in range(old.num_ranks)] for a, b in pairwise(way)]
    for one, other in combinations(written, 2):
        assert any(a and b and a + b > most for a, b in zip(one, other, strict=True)), (one, other)
