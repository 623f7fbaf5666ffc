"""Test each step of the planner: replicas, packing, local search, relabelling."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe.eplb.planner import packing, search
from ep_moe.eplb.planner.candidates import Problem, occupied
from ep_moe.eplb.planner.packing import ABSENT, relabel_ranks, relabel_slots
from ep_moe.eplb.planner.search import _Search, _swap_pairs, exhaustive_search, refine
from ep_moe.placement.expert_map import EMPTY
from tests.fixtures.published import pack, replicate


def test_the_mean_is_of_ranks_with_slots():
    load, now = np.array([[3.0, 5.0], [1.0, 1.0]]), np.zeros((2, 3, 2), int)
    problem = Problem(load, now, np.array([[2, 0, 2], [1, 1, 2]]), groups=1, nodes=1)
    assert problem.mean.tolist() == [4.0, 2 / 3]


bounded = settings(deadline=None, max_examples=150)


def packed_at_random(seed: int):
    """Return loads [X, E] and a legal table [X, R, S] of rows that differ, with EMPTY and ABSENT slots."""
    rng = np.random.default_rng(seed)
    rows, experts, ranks = int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.integers(1, 5))
    room = rng.integers(-(-experts // ranks), experts + 2, (rows, ranks))
    load = rng.random((rows, experts)) ** rng.integers(0, 6)
    counts = rng.integers(1, ranks + 1, (rows, experts))
    while (over := counts.sum(1) > room.sum(1)).any():
        counts[over] = np.maximum(counts[over] - 1, 1)
    return load, packing.fill(rng.random(load.shape), counts, packing.empty_table(room))


def fullest(load, table):
    return packing.rank_loads(load, table).max(1)


@bounded
@given(st.integers(0, 2**32))
def test_copies_are_those_of_the_published_algorithm(seed):
    rng = np.random.default_rng(seed)
    load = rng.random((3, int(rng.integers(1, 12)))) ** 3
    slots = load.shape[1] + rng.integers(0, 20, 3)
    found = packing.greedy_counts(load, slots)
    assert found.tolist() == [replicate(one, total) for one, total in zip(load.tolist(), slots.tolist(), strict=True)]


@bounded
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_packing_is_that_of_the_published_algorithm(seed, packs, size):
    load = np.random.default_rng(seed).random((3, packs * size)) ** 3
    table = packing.fill(
        load, np.ones_like(load, np.int64), packing.empty_table(np.full((3, packs), size)), distinct=False
    )
    assert table.tolist() == [pack(one, packs) for one in load.tolist()]


@bounded
@given(st.integers(0, 2**32))
def test_no_expert_has_more_copies_than_ranks(seed):
    rng = np.random.default_rng(seed)
    load, slots, most = rng.random((4, 5)) ** 9, rng.integers(5, 30, 4), rng.integers(1, 5, 4)
    found = packing.greedy_counts(load, slots, most)
    assert (found >= 1).all()
    assert (found <= most[:, None]).all()
    assert (found.sum(1) == np.minimum(slots, 5 * most)).all()


@bounded
@given(st.integers(0, 2**32))
def test_a_swap_leaves_both_ranks_below_the_fuller_one(seed):
    load, table = packed_at_random(seed)
    counts = packing.count_copies(table, load.shape[1])
    copies, held = packing.copy_loads(load, counts, table), packing.holders(table, load.shape[1])
    found = _Search(load, np.zeros(len(load)), table.copy(), counts, held, copies, copies.sum(2))
    before = found.ranks.copy()
    _swap_pairs(found, np.arange(len(load)))
    order = np.argsort(before, axis=1, kind="stable")
    for low in range(order.shape[1] // 2):
        pair = order[:, [low, -1 - low]]
        was, now = (np.take_along_axis(ranks, pair, 1).max(1) for ranks in (before, found.ranks))
        assert (now <= was * (1 + 1e-9)).all()


@bounded
@given(st.integers(0, 2**32))
def test_the_local_search_never_makes_the_fullest_rank_fuller(seed):
    load, table = packed_at_random(seed)
    found = refine(load, table, np.zeros(len(load)))
    assert (fullest(load, found) <= fullest(load, table) * (1 + 1e-9)).all()
    assert not packing.has_twice(found).any()
    assert (packing.count_copies(found, load.shape[1]) > 0).all()
    assert ((found == ABSENT) == (table == ABSENT)).all()


@bounded
@given(st.integers(0, 2**32))
def test_the_wider_search_is_never_worse_either(seed):
    load, table = packed_at_random(seed)
    room = (table != ABSENT).sum(2)
    found = exhaustive_search(load, room, table, np.zeros(len(load)))
    assert (fullest(load, found) <= fullest(load, table) * (1 + 1e-9)).all()
    assert not packing.has_twice(found).any()
    assert (packing.count_copies(found, load.shape[1]) > 0).all()
    assert ((found == ABSENT) == (table == ABSENT)).all()


def test_a_row_too_large_for_the_wider_search_keeps_its_table(monkeypatch):
    load, table = np.array([[8.0, 1.0, 1.0]]), np.array([[[0, 1], [2, EMPTY]]])
    room, goal = (table != ABSENT).sum(2), np.zeros(1)
    monkeypatch.setattr(search, "FEW", 0)
    assert fullest(load, exhaustive_search(load, room, table, goal)) < fullest(load, table)
    monkeypatch.setattr(search, "_WIDER_CELLS", search._WORTHWHILE * room.size * load.size - 1)
    assert (exhaustive_search(load, room, table, goal) == table).all()


def test_a_row_below_the_goal_is_left_alone():
    load, table = np.array([[4.0, 1.0, 1.0]]), np.array([[[0], [1], [2]]])
    assert (refine(load, table, np.array([4.0])) == table).all()


def test_a_copy_is_added_where_no_swap_helps():
    load, table = np.array([[8.0, 1.0, 1.0]]), np.array([[[0, EMPTY, EMPTY], [1, 2, EMPTY]]])
    assert fullest(load, refine(load, table, np.array([5.0]))).tolist() == [5.0]


def test_a_copy_takes_the_place_of_one_that_is_not_needed():
    load, table = np.array([[8.0, 1.0, 1.0]]), np.array([[[0, 1], [1, 2]]])
    assert fullest(load, refine(load, table, np.array([5.0]))).tolist() == [5.0]


def test_a_copy_is_dropped_from_the_fullest_rank():
    load, table = np.array([[4.0, 3.0]]), np.array([[[0, 1], [0, ABSENT]]])
    assert refine(load, table, np.array([4.0])).tolist() == [[[EMPTY, 1], [0, ABSENT]]]


def test_copies_that_are_all_on_one_rank_become_one_and_no_load_changes():
    load, table = np.array([[6.0, 4.0, 2.0, 5.0]]), np.array([[[0, 0, 0], [1, 2, 3]]])
    found = packing.move_second_copies(load, table)
    assert packing.count_copies(found, 4).tolist() == [[1, 1, 1, 1]]
    assert packing.rank_loads(load, found).tolist() == packing.rank_loads(load, table).tolist()


def test_a_second_copy_with_a_copy_elsewhere_is_swapped_for_what_fits_best():
    load, table = np.array([[6.0, 2.5, 1.0, 1.0]]), np.array([[[0, 0], [0, 1], [2, 3]]])
    found = packing.move_second_copies(load, table)
    assert not packing.has_twice(found).any()
    assert packing.rank_loads(load, found).tolist() == [[3.0, 4.5, 3.0]]


def test_ranks_get_back_the_names_under_which_they_hold_the_same():
    rng = np.random.default_rng(0)
    old = np.stack([rng.permutation(48).reshape(16, 3) for _ in range(3)])
    new = np.stack([one[rng.permutation(16)] for one in old])
    assert (relabel_ranks(old, new, 48) == old).all()


def test_only_ranks_with_equally_many_slots_change_names():
    old = np.array([[[0, 1], [2, ABSENT], [3, 4]]])
    new = np.array([[[3, 4], [0, ABSENT], [2, 1]]])
    assert relabel_ranks(old, new, 5).tolist() == [[[2, 1], [0, ABSENT], [3, 4]]]


def test_slots():
    old = np.array([[[5, 1, 2], [3, 4, EMPTY], [0, EMPTY, ABSENT]]])
    new = np.array([[[2, 0, 5], [4, EMPTY, EMPTY], [3, 1, ABSENT]]])
    assert relabel_slots(old, new, 6).tolist() == [[[5, 0, 2], [EMPTY, EMPTY, 4], [3, 1, ABSENT]]]


def test_a_rank_with_slots_gets_an_expert_of_its_node():
    load = np.array([[9.0, 1.0, 4.0, 2.0]])
    table = np.array([[[0, 1], [EMPTY, EMPTY], [2, 3], [EMPTY, ABSENT]]])
    problem = Problem(load, table, np.array([[2, 2, 2, 1]]), groups=2, nodes=2)
    assert occupied(problem, table).tolist() == [[[0, 1], [EMPTY, 0], [2, 3], [2, ABSENT]]]
