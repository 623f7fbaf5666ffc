"""Test ExpertMap: constructors, invariants, derived tables, and files."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap
from ep_moe.checks import MOST_EXPERTS
from tests.fixtures.expert_map import EMPTY, maps

unhurried = settings(deadline=None)


# --- constructors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "ranks"),
    [
        (ExpertMap.linear(8, 2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (ExpertMap.linear(7, 3), [(0, 1, 2), (3, 4, -1), (5, 6, -1)]),
        (ExpertMap.linear(2, 4), [(0,), (1,), (-1,), (-1,)]),
        (ExpertMap.linear(3, 1), [(0, 1, 2)]),
        (ExpertMap.round_robin(8, 2), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (ExpertMap.round_robin(7, 3), [(0, 3, 6), (1, 4, -1), (2, 5, -1)]),
        (ExpertMap.round_robin(2, 3), [(0,), (1,), (-1,)]),
        (ExpertMap.uneven([1, 3, 2]), [(0, -1, -1), (1, 2, 3), (4, 5, -1)]),
        (ExpertMap.uneven([0, 2, 0, 1]), [(-1, -1), (0, 1), (-1, -1), (2, -1)]),
        (ExpertMap.uneven([4]), [(0, 1, 2, 3)]),
        (ExpertMap.redundant(6, 2, 2), [(0, 1, 2, 3), (4, 5, 0, 1)]),
        (ExpertMap.redundant(6, 4, 1), [(0, 1), (2, 3), (4, 5), (0, -1)]),
        (ExpertMap.redundant(3, 3, 6), [(0, 1, 2), (0, 1, 2), (0, 1, 2)]),
        (ExpertMap.redundant(6, 2, 0), [(0, 1, 2), (3, 4, 5)]),
        (ExpertMap.from_ranks([[2, 0], [1], []], 3), [(2, 0), (1, -1), (-1, -1)]),
        (ExpertMap.from_ranks([[-1, 0, 1], [1, -1]], 2), [(-1, 0, 1), (1, -1, -1)]),
        (ExpertMap.from_ranks([[0, 0], [1, 0]], 2, allow_duplicates=True), [(0, 0), (1, 0)]),
    ],
)
def test_constructor(made, ranks):
    assert [made.local(rank) for rank in range(made.num_ranks)] == ranks
    assert made.physical_to_logical == tuple(expert for slots in ranks for expert in slots)
    assert made.slots_per_rank == len(ranks[0])
    assert made.num_physical == len(ranks) * made.slots_per_rank
    assert made.num_redundant == sum(e >= 0 for slots in ranks for e in slots) - made.num_experts


@unhurried
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_redundant_holds_each_expert_as_often_as_the_others_or_once_more(experts, ranks, data):
    extra = data.draw(st.integers(0, experts * (ranks - 1)))
    made = ExpertMap.redundant(experts, ranks, extra)
    assert made.num_redundant == extra
    assert max(made.replica_count) - min(made.replica_count) <= 1
    held = [sum(e >= 0 for e in made.local(rank)) for rank in range(ranks)]
    assert max(held) - min(held) <= 1
    assert made.slots_per_rank == max(held)


def test_equal_maps_compare_equal_whoever_made_them():
    assert ExpertMap.linear(6, 2) == ExpertMap.uneven([3, 3]) == ExpertMap.from_ranks([[0, 1, 2], [3, 4, 5]], 6)
    assert ExpertMap.linear(6, 2) != ExpertMap.round_robin(6, 2)
    assert hash(ExpertMap.linear(6, 2)) == hash(ExpertMap.redundant(6, 2, 0))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda row: [np.int64(one) for one in row]])
def test_integers_of_any_library_make_the_same_map(kind):
    made = ExpertMap.from_ranks([kind([2, 0]), kind([1, 2])], 3)
    assert made == ExpertMap(3, 2, (2, 0, 1, 2)) == ExpertMap(3, 2, kind([2, 0, 1, 2]))
    assert hash(made) == hash(ExpertMap(3, 2, kind([2, 0, 1, 2])))
    assert ExpertMap.from_json(made.to_json()) == made


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertMap(2, 2, (0, 1, 0)), "num_ranks=2 ranks, got 3 slots; fill up with -1"),
        (lambda: ExpertMap(2, 2, ()), "num_ranks=2 ranks, got 0 slots"),
        (lambda: ExpertMap(2, 0, (0, 1)), "ExpertMap.num_ranks must be an integer of at least 1, got 0"),
        (lambda: ExpertMap(2, 2.0, (0, 1)), "num_ranks must be an integer of at least 1, got 2.0"),
        (lambda: ExpertMap(3, 1, (0, 1, 3)), "physical_to_logical[2] must be -1 or an integer in [0, 3), got 3"),
        (lambda: ExpertMap(3, 1, (0, -2, 1)), "physical_to_logical[1] must be -1 or an integer in [0, 3), got -2"),
        (
            lambda: ExpertMap.from_ranks([[0, 1.0]], 2),
            "physical_to_logical[1] must be -1 or an integer in [0, 2), got 1.0",
        ),
        (lambda: ExpertMap(2, 1, (0, True)), "physical_to_logical[1] must be -1 or an integer in [0, 2), got True"),
        (
            lambda: ExpertMap.from_ranks([0, 1], 2),
            "ExpertMap.from_ranks: ranks[0] must be a sequence of experts, got 0",
        ),
        (
            lambda: ExpertMap.from_ranks([[0, [1]]], 2),
            "physical_to_logical[1] must be -1 or an integer in [0, 2), got [1]",
        ),
        (
            lambda: ExpertMap.from_ranks(np.array(2), 2),
            "from_ranks: ranks must be a sequence for each rank, got array(2)",
        ),
        (lambda: ExpertMap.uneven(np.array(2)), "uneven: counts must be a sequence of integers, got array(2)"),
        (lambda: ExpertMap(2, 1, 5), "ExpertMap.physical_to_logical must be a sequence of experts, got 5"),
        (lambda: ExpertMap(4, 2, (0, -1, 2, -1)), "no slot for logical expert 1 (2 missing in all)"),
        (lambda: ExpertMap(2, 2, (0, -1, 1, 1)), "logical expert 1 twice on rank 1"),
        (lambda: ExpertMap.from_ranks([[0, 0], [1]], 2), "logical expert 0 twice on rank 0"),
        (lambda: ExpertMap.from_ranks([], 2), "num_ranks must be an integer of at least 1, got 0"),
        (lambda: ExpertMap.round_robin(4, 2.0), "num_ranks must be an integer of at least 1, got 2.0"),
        (lambda: ExpertMap.uneven([2, -1]), "counts[1] must be an integer of at least 0, got -1"),
        (lambda: ExpertMap.redundant(4, 2, -1), "num_redundant must be an integer of at least 0, got -1"),
        (lambda: ExpertMap.redundant(4, 2, 0.5), "num_redundant must be an integer of at least 0, got 0.5"),
        (
            lambda: ExpertMap.redundant(4, 2, 5),
            "num_redundant=5 gives a rank 5 slots for 4 experts; at most 4 redundant experts make sense on 2 ranks",
        ),
    ],
)
def test_refusal_names_the_value(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ExpertMap.linear(4, 0), "num_ranks"),
        (lambda: ExpertMap.round_robin(4, 0), "num_ranks"),
        (lambda: ExpertMap.redundant(4, 0, 2), "num_ranks"),
        (lambda: ExpertMap.linear(0, 2), "num_experts"),
        (lambda: ExpertMap.uneven([]), "num_experts (the sum of counts)"),
        (lambda: ExpertMap.uneven([0, 0]), "num_experts (the sum of counts)"),
    ],
    ids=["linear, no ranks", "round_robin, no ranks", "redundant, no ranks", "no experts", "no counts", "zero counts"],
)
def test_a_map_needs_ranks_and_experts(make, field):
    with pytest.raises(ConfigError, match=re.escape(f"ExpertMap.{field} must be an integer of at least 1, got 0")):
        make()


def test_a_map_cannot_be_changed():
    with pytest.raises(AttributeError):
        ExpertMap.linear(4, 2).num_ranks = 3


# --- derived tables -------------------------------------------------------------------------------------------------


def test_tables_of_a_redundant_map():
    made = ExpertMap.from_ranks([[2, 0], [1, 2], [-1, 0]], 3)
    assert made.logical_to_physical == ((1, 5), (2,), (0, 3))
    assert made.replica_count == (2, 1, 2)
    assert [made.global_to_local(rank) for rank in range(3)] == [(1, -1, 0), (-1, 0, 1), (1, -1, -1)]
    assert [made.num_slots(rank) for rank in range(3)] == [2, 2, 2]
    assert [made.primary_owner(expert) for expert in range(3)] == [0, 1, 0]


def test_empty_slots_at_the_end_need_no_memory():
    made = ExpertMap.from_ranks([[0, 1, 2], [3, -1, -1], [-1, 4, -1], []], 5)
    assert [made.num_slots(rank) for rank in range(4)] == [3, 1, 2, 0]


@unhurried
@given(maps())
def test_wire_id_is_owner_times_cap_plus_local(made):
    for rank in range(made.num_ranks):
        for slot, expert in enumerate(made.local(rank)):
            if expert != EMPTY:
                assert rank * made.slots_per_rank + slot in made.logical_to_physical[expert]
    for expert, physical in enumerate(made.logical_to_physical):
        owners = [divmod(p, made.slots_per_rank) for p in physical]
        assert all(made.local(rank)[slot] == expert for rank, slot in owners)
        assert made.primary_owner(expert) == owners[0][0]


@unhurried
@given(maps())
def test_both_directions_are_inverse(made):
    pairs = {(p, e) for p, e in enumerate(made.physical_to_logical) if e != EMPTY}
    assert pairs == {(p, e) for e, found in enumerate(made.logical_to_physical) for p in found}
    assert all(list(found) == sorted(set(found)) for found in made.logical_to_physical)
    assert made.replica_count == tuple(made.physical_to_logical.count(e) for e in range(made.num_experts))
    assert sum(made.replica_count) == made.num_experts + made.num_redundant == len(pairs)


@unhurried
@given(maps())
def test_global_to_local_finds_what_a_rank_holds(made):
    for rank in range(made.num_ranks):
        table, local = made.global_to_local(rank), made.local(rank)
        assert len(table) == made.num_experts
        assert {e: table[e] for e in range(made.num_experts) if table[e] != EMPTY} == {
            e: slot for slot, e in enumerate(local) if e != EMPTY
        }


@unhurried
@given(maps())
def test_num_slots_reaches_the_last_expert(made):
    for rank in range(made.num_ranks):
        slots, local = made.num_slots(rank), made.local(rank)
        assert set(local[slots:]) <= {EMPTY}
        assert slots == 0 or local[slots - 1] != EMPTY


# --- on disk --------------------------------------------------------------------------------------------------------


@unhurried
@given(maps())
def test_json_returns_the_same_map(made):
    assert ExpertMap.from_json(made.to_json()) == made


def test_file_returns_the_same_map(tmp_path):
    made = ExpertMap.from_ranks([[0, 0], [1, -1]], 2, allow_duplicates=True)
    made.save(tmp_path / "map.json")
    assert ExpertMap.load(tmp_path / "map.json") == made
    assert ExpertMap.load(str(tmp_path / "map.json")).allow_duplicates


def test_file_is_written_rank_by_rank(tmp_path):
    ExpertMap.uneven([2, 1]).save(tmp_path / "map.json")
    assert json.loads((tmp_path / "map.json").read_text()) == {
        "format": 1,
        "num_experts": 3,
        "ranks": [[0, 1], [2, -1]],
        "allow_duplicates": False,
    }


GOOD = {"format": 1, "num_experts": 3, "ranks": [[0, 1], [2]], "allow_duplicates": False}


def test_hand_written_file_may_leave_out_empty_slots_at_the_end():
    assert ExpertMap.from_json(json.dumps(GOOD)) == ExpertMap.uneven([2, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an ExpertMap file"),
        ("{", "not an ExpertMap file"),
        ("[]", "not an ExpertMap file"),
        ("null", "not an ExpertMap file"),
        ("{}", "format"),
        (json.dumps(GOOD | {"format": 2}), "format 2, this version reads 1"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "ranks"}), "ranks"),
        (json.dumps(GOOD | {"ranks": None}), "not an ExpertMap file"),
        (json.dumps(GOOD | {"ranks": [["a", "b"], ["c"]]}), "got 'a'"),
        (json.dumps(GOOD | {"ranks": [[0.0, 1], [2]]}), "0.0"),
        (json.dumps(GOOD | {"num_experts": "3"}), "num_experts must be an integer"),
        (json.dumps(GOOD | {"num_experts": 4}), "no slot for logical expert 3"),
        (json.dumps(GOOD | {"ranks": [[0, 1], [7]]}), "must be -1 or an integer in [0, 3), got 7"),
        (json.dumps(GOOD | {"ranks": [[0, 1], [[2]]]}), "must be -1 or an integer in [0, 3), got [2]"),
    ],
)
def test_bad_file_is_refused(tmp_path, text, message):
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        ExpertMap.load(path)
    assert message in str(error.value)


def test_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "map.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"map.json is not an ExpertMap file: 'utf-8' codec can't decode"):
        ExpertMap.load(tmp_path / "map.json")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        ExpertMap.load(tmp_path / "nowhere.json")
    assert "nowhere.json does not exist" in str(error.value)


def test_repr_has_the_sizes():
    assert repr(ExpertMap.redundant(6, 2, 2)) == "ExpertMap(E=6, R=2, slots_per_rank=4, redundant=2)"


def test_text_that_is_nested_without_end_is_no_map():
    with pytest.raises(ConfigError, match="not an ExpertMap file"):
        ExpertMap.from_json("[" * 100_000)


@pytest.mark.parametrize("name", ["num_experts", "num_ranks"])
@pytest.mark.parametrize("value", [0, MOST_EXPERTS + 1, 1.5, True])
def test_numbers_of_a_map_are_counts(name, value):
    fields = {"num_experts": 2, "num_ranks": 1, "physical_to_logical": (0, 1)} | {name: value}
    with pytest.raises(ConfigError, match=rf"ExpertMap\.{name} must be an integer "):
        ExpertMap(**fields)
