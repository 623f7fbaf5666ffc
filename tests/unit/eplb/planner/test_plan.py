"""Test `plan`: maps are legal, at least as balanced as the published algorithm's, and move nothing needlessly."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap
from ep_moe.eplb import balancedness, loads_by_rank, plan, traffic
from ep_moe.eplb.planner.packing import drop_surplus
from ep_moe.errors import NoRoom
from tests.fixtures.published import loads, published

bounded = settings(deadline=None, max_examples=150)
EQUAL = 1 + 1e-9


@st.composite
def expert_loads(draw, experts: int) -> list[float]:
    """Draw loads: even, skewed, nearly all in one expert, small integers, partly zero, or all zero."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = rng.random(experts) ** draw(st.sampled_from([0, 1, 4, 12]))
    if draw(st.booleans()):
        load = rng.integers(0, 6, experts).astype(float)
    if draw(st.booleans()):
        load *= rng.random(experts) < draw(st.sampled_from([0.0, 0.5, 0.8]))
    found: list[float] = load.tolist()
    return found


@st.composite
def current_maps(draw, experts: int, room: list[int]) -> ExpertMap:
    """Draw a legal map with these slots, some of them empty."""
    order = draw(st.permutations([rank for rank, slots in enumerate(room) for _ in range(slots)]))
    ranks: list[list[int]] = [[] for _ in room]
    for expert, rank in enumerate(order):
        others = [e for e in range(experts) if e not in ranks[rank]]
        if expert < experts:
            ranks[rank].append(expert)
        elif others and draw(st.booleans()):
            ranks[rank].append(draw(st.sampled_from(others)))
    return ExpertMap.from_ranks(
        [held + [-1] * (slots - len(held)) for held, slots in zip(ranks, room, strict=True)], experts
    )


@st.composite
def even_problems(draw, most_experts: int = 12, most_ranks: int = 6):
    """Draw a load, a current map and a number of slots per rank, equal on all ranks, with room for replicas."""
    experts = draw(st.integers(1, most_experts))
    ranks = draw(st.integers(1, most_ranks))
    slots = draw(st.integers(-(-experts // ranks), experts))
    return draw(expert_loads(experts)), draw(current_maps(experts, [slots] * ranks)), slots


def fullest(load, planned: ExpertMap) -> float:
    return max(loads(load, [[e for e in planned.local(rank) if e >= 0] for rank in range(planned.num_ranks)]))


def check_legal(planned: ExpertMap, room) -> None:
    for rank, slots in enumerate(room):
        held = [expert for expert in planned.local(rank) if expert >= 0]
        assert len(held) == len(set(held)), f"rank {rank} holds an expert twice: {held}"
        assert planned.num_slots(rank) <= slots
    assert set(planned.physical_to_logical) - {-1} == set(range(planned.num_experts))


def moves(old: ExpertMap, new: ExpertMap) -> int:
    return sum(len(set(new.local(rank)) - set(old.local(rank)) - {-1}) for rank in range(old.num_ranks))


@bounded
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_an_expert_twice_on_a_rank_is_there_once_in_the_plan(seed, ranks):
    random = np.random.default_rng(seed)
    slots = [random.integers(0, 6, 4).tolist() for _ in range(ranks)]
    for expert in range(6):  # each expert is on some rank
        slots[expert % ranks][expert // ranks] = expert
    current = ExpertMap.from_ranks(slots, 6, allow_duplicates=True)
    (planned,) = plan(random.integers(0, 100, (1, 6)), [current])
    check_legal(planned, [4] * ranks)


# --- balance --------------------------------------------------------------------------------------------------------


@bounded
@given(even_problems())
def test_at_least_as_balanced_as_the_published_algorithm(problem):
    load, current, slots = problem
    (planned,) = plan([load], [current], slots=[slots] * current.num_ranks, tolerance=0.0)
    check_legal(planned, [slots] * current.num_ranks)
    if planned is not current:
        assert [planned.num_slots(rank) for rank in range(current.num_ranks)] == [slots] * current.num_ranks
    theirs = published(load, slots * current.num_ranks, current.num_ranks)
    if all(len(set(held)) == len(held) for held in theirs):
        assert fullest(load, planned) <= max(loads(load, theirs)) * EQUAL


@bounded
@given(even_problems(most_experts=5, most_ranks=3))
def test_where_the_published_plan_needs_twins_no_legal_map_is_better_than_ours_and_as_good_as_it(problem):
    load, current, slots = problem
    ranks = current.num_ranks
    theirs = max(loads(load, published(load, slots * ranks, ranks)))
    (planned,) = plan([load], [current], slots=[slots] * ranks, tolerance=0.0)
    if fullest(load, planned) > theirs * EQUAL:
        assert best_legal(load, ranks, slots) > theirs * EQUAL


def best_legal(load, ranks: int, slots: int) -> float:
    sets = [c for size in range(slots + 1) for c in itertools.combinations(range(len(load)), size)]
    return min(
        max(loads(load, held))
        for held in itertools.combinations_with_replacement(sets, ranks)
        if set().union(*held) == set(range(len(load)))
    )


@pytest.mark.parametrize(
    ("load", "ranks"),
    [([4, 9, 1, 4, 0, 4], 2), ([8, 9, 2, 0, 4], 2), ([8, 8, 1, 0, 1, 3], 3), ([8, 3, 4, 5, 5], 3)],
)
def test_the_wider_search_finds_a_legal_map_as_good_as_the_published_twins(load, ranks):
    theirs = published(load, 4 * ranks, ranks)
    assert any(len(set(held)) < len(held) for held in theirs)
    (planned,) = plan([load], [ExpertMap.redundant(len(load), ranks, 4 * ranks - len(load))], tolerance=0.0)
    assert fullest(load, planned) <= max(loads(load, theirs)) * EQUAL


def test_twins_can_be_better_than_every_legal_map():
    load = [6.0, 3.0, 2.6, 2.4]
    theirs = published(load, 6, 2)
    assert max(loads(load, theirs)) == pytest.approx(7.0)
    assert sorted(held.count(0) for held in theirs) == [1, 2]
    assert best_legal(load, 2, 3) == pytest.approx(7.1)
    (planned,) = plan([load], [ExpertMap.redundant(4, 2, 2)])
    assert fullest(load, planned) == pytest.approx(7.1)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([(16, 4, 2), (16, 8, 4), (24, 4, 4), (12, 6, 2), (32, 16, 2)]), st.integers(1, 3), st.data())
def test_hierarchical_plans_too_and_groups_stay_on_a_node(sizes, spare, data):
    experts, ranks, nodes = sizes
    groups = nodes * data.draw(st.sampled_from([g for g in (1, 2) if experts % (nodes * g) == 0]))
    slots = min(-(-experts // ranks) + spare, experts // nodes)
    load = data.draw(expert_loads(experts))
    current = data.draw(current_maps(experts, [slots] * ranks))
    (planned,) = plan([load], [current], groups=groups, nodes=nodes, slots=[slots] * ranks, tolerance=0.0)
    check_legal(planned, [slots] * ranks)
    for group in range(groups):
        mine = range(group * experts // groups, (group + 1) * experts // groups)
        found = {
            slot // planned.slots_per_rank // (ranks // nodes) for e in mine for slot in planned.logical_to_physical[e]
        }
        assert len(found) == 1, f"group {group} is on nodes {found}"
    theirs = published(load, slots * ranks, ranks, groups, nodes)
    if all(len(set(held)) == len(held) for held in theirs):
        assert fullest(load, planned) <= max(loads(load, theirs)) * EQUAL


def test_groups_that_nodes_do_not_divide_play_no_part():
    load = np.random.default_rng(0).random((3, 12)) ** 4
    current = [ExpertMap.redundant(12, 4, 4)] * 3
    assert plan(load, current, groups=3, nodes=2) == plan(load, current)


def test_groups_that_a_node_has_no_room_for_play_no_part():
    load, current, slots = [[8, 7, 6, 5, 4, 3, 2, 1]], [ExpertMap.uneven([1, 1, 3, 3])], [1, 1, 3, 3]
    assert plan(load, current, groups=2, nodes=2, slots=slots) == plan(load, current, slots=slots)


@pytest.mark.parametrize("seed", range(3))
def test_layers_of_a_real_size_are_each_as_balanced_and_most_are_better(seed):
    load = np.random.default_rng(seed).random((4, 128)) ** 4 * 1000
    current = [ExpertMap.redundant(128, 32, 32)] * 4
    planned = plan(load, current)
    ours = loads_by_rank(load, planned).max(1)
    theirs = np.array([max(loads(one, published(one, 160, 32))) for one in load.tolist()])
    assert (ours <= theirs * EQUAL).all()
    assert (balancedness(loads_by_rank(load, planned)) > 0.98).all()  # the published algorithm reaches 0.95 to 0.97


def test_layers_do_not_see_each_other():
    load = np.random.default_rng(1).random((5, 24)) ** 3
    current = [ExpertMap.redundant(24, 4, 8), *[ExpertMap.round_robin(24, 4)] * 3, ExpertMap.redundant(24, 4, 4)]
    alone = [plan(load[layer : layer + 1], current[layer : layer + 1])[0] for layer in range(5)]
    together = plan(load, current)
    for one, other in zip(together, alone, strict=True):
        assert [one.local(rank)[: one.num_slots(rank)] for rank in range(4)] == [
            other.local(rank)[: other.num_slots(rank)] for rank in range(4)
        ]


# --- what stays -----------------------------------------------------------------------------------------------------


@bounded
@given(even_problems(), st.sampled_from([0.0, 0.01, 0.2]))
def test_a_plan_planned_again_moves_nothing(problem, tolerance):
    load, current, slots = problem
    asked = {"slots": [slots] * current.num_ranks, "tolerance": tolerance}
    once = plan([load], [current], **asked)
    again = plan([load], once, **asked)
    assert again[0] is once[0]


@pytest.mark.parametrize(
    "load", [[1.0] * 8, [0.0] * 8, [3, 1, 2, 2, 1, 3, 4, 0], [100, 101, 100, 100, 101, 100, 100, 100]]
)
def test_a_balanced_map_is_returned_itself(load):
    current = ExpertMap.linear(8, 4)
    if load[0] == 100:  # ranks have 201 and 200: within one percent
        assert plan([load], [current])[0] is current
        load = [1.0] * 8
    assert plan([load], [current], tolerance=0.0)[0] is current


def test_tolerance_is_measured_from_the_mean_rank():
    load, current = [[104.0, 100.0, 96.0, 100.0]], [ExpertMap.from_ranks([[0, 1], [2, 3]], 4)]
    assert plan(load, current, tolerance=0.0201)[0] is current[0]
    (planned,) = plan(load, current, tolerance=0.019)
    assert fullest(load[0], planned) == 200


def test_a_layer_changes_for_a_reason():
    """A layer's map changes only to match the published algorithm, or to gain at least the tolerance."""
    rng = np.random.default_rng(0)
    load = rng.random((80, 12)) ** 3
    current = plan(load, [ExpertMap.redundant(12, 4, 4)] * 80, tolerance=0.0)
    drifted = load * rng.uniform(0.98, 1.02, load.shape)
    found = {tolerance: plan(drifted, current, tolerance=tolerance) for tolerance in (0.0, 0.03)}
    kept = [sum(a is b for a, b in zip(planned, current, strict=True)) for planned in found.values()]
    assert kept[0] < kept[1] < 80
    for one, old, new in zip(drifted.tolist(), current, found[0.03], strict=True):
        theirs = max(loads(one, published(one, 16, 4)))
        assert new is old or fullest(one, old) * 0.97 > fullest(one, new) or fullest(one, old) > theirs


def test_less_moves_where_less_is_enough():
    load = np.random.default_rng(6).random((6, 64)) ** 3
    current = [ExpertMap.redundant(64, 8, 16)] * 6
    found = {enough: plan(load, current, enough=enough) for enough in (1.0, 0.9, 0.5)}
    moved = [sum(map(moves, current, planned)) for planned in found.values()]
    assert moved[0] > 1.5 * moved[1] > 0
    assert moved[1] > 1.5 * moved[2]
    assert (balancedness(loads_by_rank(load, found[0.9])) >= 0.9 / EQUAL).all()
    assert plan(load, found[0.9], enough=0.9) == found[0.9]


def test_a_layer_that_stays_keeps_its_holes():
    current = ExpertMap.from_ranks([[0, 1, -1], [2, 3, -1]], 4)
    # ranks have 100 and 103: beyond the tolerance, but no better map exists without replicas
    load = [[50.0, 50.0, 51.5, 51.5]]
    for slots in ([2, 2], [3, 3]):
        assert plan(load, [current], slots=slots, tolerance=0.02)[0] is current


def test_one_swap_is_all_that_moves():
    current = ExpertMap.from_ranks([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], 12)
    # ranks have 12, 6, 9, 9: exchanging experts of load 4 and 1 balances them
    load = [[6.0, 4.0, 2.0, 1.0, 1.0, 4.0, 3.0, 3.0, 3.0, 4.0, 2.0, 3.0]]
    (planned,) = plan(load, current=[current])
    assert moves(current, planned) == 2
    assert fullest(load[0], planned) == 9


def test_an_expert_that_stays_on_its_rank_keeps_its_slot():
    rng = np.random.default_rng(3)
    current = [ExpertMap.redundant(32, 8, 16)] * 6
    planned = plan(rng.random((6, 32)) ** 3, current)
    moved = traffic(current, planned, expert_bytes=1)
    assert moved.local_bytes == 0
    assert 0 < moved.moved < 6 * 48


def test_ranks_are_named_after_what_they_hold():
    """Planned ranks are numbered to match what ranks hold, so few experts move.

    The current map is the published plan of the same load, with its ranks renumbered.
    """
    load = np.random.default_rng(4).random((1, 64)) ** 4
    held = published(load[0].tolist(), 64, 16)
    current = ExpertMap.from_ranks([held[(5 * rank) % 16] for rank in range(16)], 64)
    assert moves(current, plan(load, [current], tolerance=0.0)[0]) <= 8


def test_a_copy_on_the_wrong_node_goes_and_nothing_else_moves():
    """A replica on the wrong node is removed, and nothing else moves.

    Experts 0 to 3 belong to node 0, and 4 to 7 to node 1. Rank 2 has a replica of expert 1.
    """
    current = ExpertMap.from_ranks([[0, 3], [1, 2], [4, 7, 1], [5, 6]], 8)
    load = [[4.0, 2.0, 3.0, 1.0, 4.0, 0.0, 5.0, 1.0]]
    (planned,) = plan(load, [current], groups=2, nodes=2)
    assert [planned.local(rank) for rank in range(4)] == [(0, 3, -1), (1, 2, -1), (4, -1, 7), (5, 6, -1)]


def test_drift_moves_less_than_a_fresh_plan_would():
    rng = np.random.default_rng(5)
    load = rng.random((8, 128)) ** 4
    first = plan(load, [ExpertMap.redundant(128, 16, 32)] * 8)
    drifted = load * rng.uniform(0.9, 1.1, load.shape)
    second = plan(drifted, first)
    fresh = [ExpertMap.from_ranks(published(one, 160, 16), 128, allow_duplicates=True) for one in drifted.tolist()]
    assert sum(map(moves, first, second)) < 0.5 * sum(map(moves, first, fresh))
    assert (loads_by_rank(drifted, second).max(1) <= loads_by_rank(drifted, fresh).max(1) * EQUAL).all()


# --- memory and dead ranks ------------------------------------------------------------------------------------------


@bounded
@given(st.data())
def test_uneven_slots_and_dead_ranks(data):
    experts, ranks = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 6))
    room = data.draw(st.lists(st.integers(0, experts), min_size=ranks, max_size=ranks))
    assume(sum(room) >= experts)
    current = data.draw(current_maps(experts, room))
    dead = data.draw(st.sets(st.integers(0, ranks - 1)))
    load = data.draw(expert_loads(experts))
    left = [0 if rank in dead else slots for rank, slots in enumerate(room)]
    if sum(left) < experts:
        with pytest.raises(NoRoom):
            plan([load], [current], dead_ranks=dead, slots=room)
        return
    (planned,) = plan([load], [current], dead_ranks=dead, slots=room)
    check_legal(planned, left)
    (again,) = plan([load], [planned], dead_ranks=dead, slots=room)
    check_legal(again, left)
    assert again is planned


def test_memory_is_what_the_current_map_uses_and_is_not_forgotten():
    current = [ExpertMap.from_ranks([[0, 1, 2, 3], [4, 5], [6], [7, -1, 0]], 8)]
    for seed in range(20):
        current = plan(np.random.default_rng(seed).random((1, 8)) ** 6, current, tolerance=0.0)
        assert [current[0].num_slots(rank) for rank in range(4)] == [4, 2, 1, 3]


def test_no_rank_with_memory_is_left_without_an_expert():
    load = [[36.0, 14.0, 58.0, 56.0, 1.0, 5.0, 5.0, 5.0]]  # node 1 has so little load that one rank would suffice
    (planned,) = plan(load, [ExpertMap.redundant(8, 4, 8)], groups=2, nodes=2)
    assert [planned.num_slots(rank) for rank in range(4)] == [4] * 4


def test_no_room_names_the_numbers():
    current = [ExpertMap.redundant(8, 4, 2)]
    with pytest.raises(NoRoom) as error:
        plan(np.ones((1, 8)), current, dead_ranks=[0])
    assert "the 3 ranks alive have 7 slots for 8 experts in layer 0" in str(error.value)


def test_what_a_dead_rank_held_alone_is_placed_again():
    current = [ExpertMap.redundant(8, 4, 8)] * 2
    planned = plan(np.random.default_rng(0).random((2, 8)), current, dead_ranks=[1, 1])
    for one in planned:
        assert one.local(1) == (-1,) * 4
        check_legal(one, [4, 0, 4, 4])


def test_more_slots_than_the_map_uses():
    load = [8.0, 1.0, 1.0, 2.0]
    (planned,) = plan([load], [ExpertMap.linear(4, 2)], slots=[3, 3])
    assert fullest(load, planned) == 6
    assert planned.slots_per_rank == 3


# --- equal inputs, equal plans --------------------------------------------------------------------------------------


def test_dtype_order_and_scale_of_the_load_do_not_matter():
    load = np.random.default_rng(7).integers(0, 50, (6, 40))
    current = [ExpertMap.redundant(40, 8, 8)] * 6
    found = plan(load, current)
    assert plan(load.tolist(), current) == plan(np.asfortranarray(load.astype(np.float32)), current) == found
    assert plan(load * 4, current) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": np.ones((2, 8))}, "got shape [2, 8] and 1 maps of 8 experts"),
        ({"load": np.ones((1, 7))}, "got shape [1, 7]"),
        ({"load": np.ones((0, 8)), "current": []}, "0 maps"),
        ({"load": -np.ones((1, 8))}, "finite loads of at least 0, got -1.0"),
        ({"load": np.full((1, 8), np.nan)}, "got nan"),
        ({"load": np.ones((2, 8)), "current": [ExpertMap.linear(8, 4), ExpertMap.linear(8, 2)]}, "in layer 1"),
        ({"groups": 3}, "plan: groups must divide the 8 experts, got 3"),
        ({"nodes": 3}, "plan: nodes must divide the 4 ranks, got 3"),
        ({"nodes": 0}, "plan: nodes must divide the 4 ranks, got 0"),
        ({"enough": 0.0}, "plan: enough must be a number above 0 and at most 1, got 0.0"),
        ({"enough": 1.1}, "plan: enough must be a number above 0 and at most 1, got 1.1"),
        ({"tolerance": -0.1}, "plan: tolerance must be a number of at least 0, got -0.1"),
        ({"dead_ranks": [4]}, "dead_ranks must be ranks in [0, 4), got 4"),
        ({"slots": [2, 2, 2]}, "[4] or [1, 4]"),
        ({"slots": [2, 2, 2, -1]}, "integers of at least 0"),
        ({"slots": [2.0, 2.0, 2.0, 2.0]}, "integers of at least 0"),
        ({"slots": [2, [2, 2], 2, 2]}, "plan: slots must be an array of integers, got list"),
    ],
)
def test_refusal_names_the_value(change, message):
    asked = {"load": np.ones((1, 8)), "current": [ExpertMap.linear(8, 4)]} | change
    with pytest.raises(ConfigError) as error:
        plan(asked.pop("load"), asked.pop("current"), **asked)
    assert message in str(error.value)


def test_surplus_copies_leave_the_fullest_ranks():
    """Surplus replicas are removed from the ranks with the most load.

    Expert 0 is on all ranks. Two copies are removed, from ranks 1 and 2, whose other experts have more load.
    """
    table = np.array([[[0, 1], [0, 2], [0, 3]]])
    load = np.array([[3.0, 1.0, 9.0, 5.0]])
    found = drop_surplus(load, np.array([[1, 1, 1, 1]]), table)
    assert found.tolist() == [[[0, 1], [-1, 2], [-1, 3]]]
    assert drop_surplus(load, np.array([[2, 1, 1, 1]]), table).tolist() == [[[0, 1], [-1, 2], [0, 3]]]


def test_each_layer_keeps_its_own_slots():
    """Each layer keeps its number of slots. A balancer's layers may differ in it."""
    maps = [ExpertMap.linear(6, 2), ExpertMap.redundant(6, 2, 4)]
    load = np.array([[9.0, 9.0, 9.0, 1.0, 1.0, 1.0], [30.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    found = plan(load, maps)
    assert [made.slots_per_rank for made in found] == [3, 5]
    assert found[0] != maps[0], "its experts of much load lay on one rank"
    for made, own in zip(found, load, strict=True):
        assert balancedness(loads_by_rank(own[None], [made])) > 0.75
