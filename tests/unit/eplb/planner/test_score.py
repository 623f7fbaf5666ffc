"""Test rank loads, balancedness and bytes by link, each against a count by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap
from ep_moe.eplb import balancedness, critical_path, loads_by_rank, traffic
from ep_moe.placement.expert_map import EMPTY

MAP = ExpertMap.from_ranks([[0, 1], [2, 0], [3, -1]], 4)


def test_a_copy_carries_an_equal_share():
    assert loads_by_rank([[6, 1, 2, 4]], [MAP]).tolist() == [[4.0, 5.0, 4.0]]


def test_an_expert_twice_on_a_rank_carries_two_shares():
    twice = ExpertMap.from_ranks([[0, 0], [1, 0]], 2, allow_duplicates=True)
    assert loads_by_rank([[9, 1]], [twice]).tolist() == [[6.0, 4.0]]


def test_maps_of_different_width():
    wide = ExpertMap.from_ranks([[0, 1, 2], [3], [-1]], 4)
    assert loads_by_rank([[6, 1, 2, 4], [1, 2, 3, 4]], [MAP, wide]).tolist() == [[4, 5, 4], [6, 4, 0]]


def test_balancedness_is_mean_over_fullest_per_layer():
    ranks = [[4.0, 5.0, 3.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]
    assert balancedness(ranks).tolist() == pytest.approx([4 / 5, 1, 1, 1 / 3])
    assert critical_path(ranks) == pytest.approx((4 + 1 + 0 + 3) / (5 + 1 + 0 + 9))
    assert critical_path([[0.0, 0.0]]) == 1.0


def test_the_dead_do_not_count():
    assert balancedness([[4.0, 0.0, 2.0]], dead_ranks=[1]).tolist() == [3 / 4]
    assert critical_path([[4.0, 0.0, 2.0]], dead_ranks=[1]) == 3 / 4


def test_traffic_by_link():
    old = ExpertMap.from_ranks([[0, 1], [2, 3], [4, 5], [6, 7]], 8)
    new = ExpertMap.from_ranks([[1, 2], [3, 0], [4, 7], [6, 5]], 8)
    found = traffic([old], [new], expert_bytes=10, ranks_per_node=2)
    assert found.local.tolist() == [[1, 1, 0, 0]]  # expert 1 on rank 0, expert 3 on rank 1
    assert found.same_node.tolist() == [[1, 1, 1, 1]]
    assert found.other_node.tolist() == [[0, 0, 0, 0]]
    assert (found.local_bytes, found.same_node_bytes, found.other_node_bytes, found.lost_bytes) == (20, 40, 0, 0)
    apart = traffic([old], [new], expert_bytes=10, ranks_per_node=1)
    assert (apart.same_node_bytes, apart.other_node_bytes, apart.moved) == (0, 40, 4)


def test_a_slot_that_is_emptied_moves_nothing():
    old = ExpertMap.from_ranks([[0, 1, 1], [2, 3, 3]], 4, allow_duplicates=True)
    new = ExpertMap.from_ranks([[0, 1, EMPTY], [2, 3, EMPTY]], 4)
    assert traffic([old], [new], expert_bytes=1).local.tolist() == [[0, 0]]


def test_a_copy_on_the_own_node_is_preferred():
    old = ExpertMap.from_ranks([[0], [1], [2], [0]], 3)
    new = ExpertMap.from_ranks([[0], [1], [0], [2]], 3)
    found = traffic([old, old], [new, old], expert_bytes=1, ranks_per_node=2)
    assert found.same_node.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert found.moved == 2


def test_what_only_dead_ranks_held_is_lost():
    old = ExpertMap.from_ranks([[0, 1], [2, 1]], 3)
    new = ExpertMap.from_ranks([[], [2, 1, 0]], 3)
    assert traffic([old], [new], expert_bytes=3, dead_ranks=[0]).lost_bytes == 3
    assert traffic([old], [new], expert_bytes=3).same_node_bytes == 3


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 4]))
def test_every_new_expert_travels_once(seed, per_node):
    rng = np.random.default_rng(seed)
    old, new = (ExpertMap.from_ranks(rng.permutation(12).reshape(4, 3).tolist(), 12) for _ in range(2))
    found = traffic([old], [new], expert_bytes=1, ranks_per_node=per_node)
    for rank in range(4):
        come = set(new.local(rank)) - set(old.local(rank))
        assert found.same_node[0, rank] + found.other_node[0, rank] == len(come)
        shifted = [e for e in set(new.local(rank)) - come if new.local(rank).index(e) != old.local(rank).index(e)]
        assert found.local[0, rank] == len(shifted)
    assert found.lost_bytes == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loads_by_rank([[1, 2]], [MAP]), "got shape [1, 2]"),
        (lambda: loads_by_rank(np.ones((2, 4)), [MAP, ExpertMap.linear(4, 2)]), "alike in E and R, got ExpertMap(E=4"),
        (lambda: traffic([MAP], [], expert_bytes=1), "got 1 and 0"),
        (lambda: traffic([MAP], [ExpertMap.linear(4, 2)], expert_bytes=1), "alike in E and R"),
        (lambda: traffic([MAP], [MAP], expert_bytes=1, ranks_per_node=2), "must divide the 3 ranks of the maps, got 2"),
        (lambda: traffic([MAP], [MAP], expert_bytes=1, dead_ranks=[3]), "must be ranks in [0, 3), got 3"),
        (lambda: balancedness([[1, 2]], dead_ranks=["0"]), "must be ranks in [0, 2), got '0'"),
        (lambda: balancedness([[1, 2]], dead_ranks=[0, 1]), "must leave a rank alive, got all 2"),
    ],
)
def test_refusal_names_the_value(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value)
