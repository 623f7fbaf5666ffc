"""Test Placement: logical to physical ids, the choice of replicas, load counts, and in-place updates of tables."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap, Placement, Routing
from ep_moe.placement.deferred import InvalidIds
from ep_moe.placement.placement import Replicas
from ep_moe.types import PhysicalRouting, TokenMask
from tests.fixtures.expert_map import maps

unhurried = settings(deadline=None)
TABLES = ("logical_to_physical", "replica_count", "expert_load", "slot_load")


def routing(ids: torch.Tensor) -> Routing:
    return Routing(ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)))


def tables_of(expert_map: ExpertMap, width: int) -> tuple[list[list[int]], list[int]]:
    rows = [[*found, *[-1] * (width - len(found))] for found in expert_map.logical_to_physical]
    return rows, list(expert_map.replica_count)


def assert_tables(placement: Placement, expert_map: ExpertMap) -> None:
    rows, counts = tables_of(expert_map, placement.logical_to_physical.shape[1])
    assert placement.logical_to_physical.tolist() == rows
    assert placement.replica_count.tolist() == counts


@pytest.fixture
def noise(monkeypatch):
    """Make `to_empty` fill tensors with 77, so that no test passes by what memory happens to hold."""

    def empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
        return torch.full(tensor.shape, 77, dtype=tensor.dtype, device=device)

    monkeypatch.setattr(torch, "empty_like", empty_like)


# --- the ids that leave ---------------------------------------------------------------------------------------------


@unhurried
@given(maps(), st.data())
def test_every_id_goes_to_a_replica_of_its_expert(expert_map, data):
    tokens, top_k = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    experts = st.integers(-1, expert_map.num_experts - 1)
    flat = data.draw(st.lists(experts, min_size=tokens * top_k, max_size=tokens * top_k))
    ids = torch.tensor(flat, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).view(tokens, top_k)
    placement = Placement(expert_map, ep_rank=data.draw(st.integers(0, expert_map.num_ranks - 1)))
    given_routing = routing(ids)
    placed = placement(given_routing)
    assert isinstance(placed, PhysicalRouting)
    assert placed.materialize().ids.shape == ids.shape
    assert placed.weights is given_routing.weights
    for logical, physical in zip(flat, placed.materialize().ids.flatten().tolist(), strict=True):
        if logical == -1:
            assert physical == -1
        else:
            assert expert_map.physical_to_logical[physical] == logical


def test_without_replicas_the_ids_are_the_maps():
    placement = Placement(ExpertMap.from_ranks([[2, -1, 0], [1, 3]], 4))
    placed = placement(routing(torch.tensor([[0, 1], [2, -1], [3, 0]])))
    assert placed.materialize().ids.tolist() == [[2, 3], [0, -1], [4, 2]]


def test_minus_one_stays_and_counts_nothing():
    placement = Placement(ExpertMap.redundant(4, 2, 2))
    assert (placement(routing(torch.full((5, 3), -1))).materialize().ids == -1).all()
    assert placement.expert_load.sum() == placement.slot_load.sum() == 0


@pytest.mark.parametrize("bad", [-2, -100, 4, 5, 6, 2**31 - 1])
def test_id_out_of_range_leaves_out_of_range(bad):
    placement = Placement(ExpertMap.redundant(4, 2, 2))  # 6 slots: ids 4 and 5 are valid slots, but not experts
    placed = placement(routing(torch.tensor([[0, bad], [-1, 3]])))
    physical = placed.materialize().ids[0, 1].item()
    assert physical < -1 or physical >= 6
    assert placed.materialize().ids[1, 0] == -1
    assert placement.expert_load.tolist() == [1, 0, 0, 1]
    assert placement.slot_load.sum() == 2


# --- the choice among replicas --------------------------------------------------------------------------------------

TOKENS = 4096


@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("stride", [1, 2, 3, 64])
def test_replicas_are_used_alike(replicas, stride):
    """Tokens are spread evenly over replicas, if every stride-th token chooses the expert.

    Each replica's share is within 3 standard deviations of a fair die with that many faces, thrown 4096 times.
    """
    expert_map = ExpertMap.redundant(8, replicas, 8 * replicas - 8)
    placement = Placement(expert_map, ep_rank=1)
    ids = torch.full((TOKENS * stride, 1), -1)
    even, deviation = TOKENS / replicas, math.sqrt(TOKENS / replicas * (1 - 1 / replicas))
    for expert in range(8):
        ids[::stride] = expert
        placement.reset_load()
        placement(routing(ids)).materialize()
        used = placement.slot_load[list(expert_map.logical_to_physical[expert])]
        assert used.sum() == TOKENS
        assert (used - even).abs().max() <= 3 * deviation


@pytest.mark.parametrize("replicas", [2, 3, 5, 6, 7, 16])
def test_few_rows_use_replicas_alike_too(replicas):
    """Few rows are spread evenly too, as decode batches need.

    For any number of consecutive rows that choose an expert, each replica's share is within the bound for multiples of
    the
    golden ratio.
    """
    expert_map = ExpertMap.redundant(8, replicas, 8 * replicas - 8)
    rows = torch.arange(1, TOKENS + 1)
    bound = 2 + rows.log() / math.log((1 + math.sqrt(5)) / 2)
    for ep_rank in range(replicas):
        physical = Placement(expert_map, ep_rank=ep_rank)(routing(torch.arange(8).expand(TOKENS, 8))).materialize().ids
        for expert in range(8):
            for slot in expert_map.logical_to_physical[expert]:
                used = (physical[:, expert] == slot).cumsum(0)
                assert ((used - rows / replicas).abs() <= bound).all()


def test_choice_depends_on_row_expert_and_ep_rank_alone():
    expert_map = ExpertMap.redundant(6, 4, 18)
    every = torch.arange(6).expand(500, 6)
    all_experts = Placement(expert_map, ep_rank=2)(routing(every)).materialize().ids
    order = torch.rand(500, 6, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :3]
    other = Placement(expert_map, ep_rank=2)
    other(routing(every[:7]))  # an earlier call must not matter
    placed = other(Routing(every.gather(1, order), torch.ones(500, 3))).materialize().ids
    assert torch.equal(placed, all_experts.gather(1, order))


@pytest.mark.parametrize("replicas", [2, 4])
def test_ranks_with_a_few_tokens_each_spread_over_the_replicas(replicas):
    """Ranks with few tokens each use all replicas evenly, as in decoding.

    With 16 ranks of 4 tokens, no replica gets more than 1.5 times its share.
    """
    expert_map = ExpertMap.redundant(16, replicas, 16 * replicas - 16)
    total = torch.zeros(expert_map.num_physical, dtype=torch.int64)
    for rank in range(16):
        placement = Placement(expert_map, ep_rank=rank)
        placement(routing(torch.arange(16).expand(4, 16))).materialize()
        total += placement.slot_load
    assert total.max() <= 1.5 * 64 / replicas


@pytest.mark.parametrize("replicas", [2, 4])
def test_experts_of_a_token_spread_over_the_replicas(replicas):
    """The experts of a token are spread over the replicas.

    Every rank holds all experts in order, so the rank is the replica's number. Two experts of a token share a rank as
    often
    as by chance, on average over the pairs, within a tenth.
    """
    placement = Placement(ExpertMap.redundant(32, replicas, 32 * replicas - 32))
    rank = placement(routing(torch.arange(32).expand(512, 32))).materialize().ids // 32
    alike = (rank.unsqueeze(2) == rank.unsqueeze(1)).float().mean(0)
    average = (alike.sum() - 32) / (32 * 31)
    assert abs(average * replicas - 1) < 0.1


# --- load -----------------------------------------------------------------------------------------------------------


@unhurried
@given(maps(), st.integers(0, 30), st.integers(0, 2**16))
def test_load_counts_valid_rows(expert_map, tokens, seed):
    experts = expert_map.num_experts
    ids = torch.randint(-2, experts + 2, (tokens, 3), generator=torch.Generator().manual_seed(seed))
    placement = Placement(expert_map)
    placed = placement(routing(ids)).materialize().ids
    valid = (ids >= 0) & (ids < experts)
    assert torch.equal(placement.expert_load, ids[valid].bincount(minlength=experts))
    assert torch.equal(placement.slot_load, placed[valid].bincount(minlength=expert_map.num_physical))
    owners = placed[valid] // expert_map.slots_per_rank
    assert torch.equal(placement.rank_load(), owners.bincount(minlength=expert_map.num_ranks))


def test_load_adds_up_over_calls_until_reset():
    placement = Placement(ExpertMap.linear(4, 2))
    for _ in range(3):
        placement(routing(torch.tensor([[0, 1], [1, -1]]))).materialize()
    assert placement.expert_load.tolist() == placement.slot_load.tolist() == [3, 6, 0, 0]
    placement.reset_load()
    assert placement.expert_load.tolist() == placement.slot_load.tolist() == [0, 0, 0, 0]


def test_load_is_counted_without_gradients():
    placement = Placement(ExpertMap.linear(4, 2))
    weights = torch.rand(2, 2, requires_grad=True)
    placed = placement(Routing(torch.tensor([[0, 1], [1, 2]]), weights)).materialize()
    placed.weights.sum().backward()
    assert weights.grad is not None
    assert not placement.expert_load.requires_grad


def test_an_id_that_kernels_dropped_is_told_of_once():
    dropped = InvalidIds(torch.device("cpu"))
    assert dropped.problem("moe0", 4) is None
    dropped.word.value = 7  # as kernels write it
    assert "routing.ids must be -1 or in [0, 4), got 7 in an earlier call of moe0" in dropped.problem("moe0", 4)
    assert dropped.problem("moe0", 4) is None


# --- tables ---------------------------------------------------------------------------------------------------------


@unhurried
@given(maps())
def test_tables_are_the_maps(expert_map):
    assert_tables(Placement(expert_map), expert_map)


def test_update_rewrites_in_place():
    old, new = ExpertMap.redundant(6, 2, 2), ExpertMap.from_ranks([[5, 4, 3, 2], [1, 0, 5, 4]], 6)
    placement = Placement(old)
    before = {name: getattr(placement, name) for name in TABLES}
    pointers = {name: tensor.data_ptr() for name, tensor in before.items()}
    placement(routing(torch.tensor([[0], [5]]))).materialize()
    placement.update(new)
    for name in TABLES:
        assert getattr(placement, name) is before[name]
        assert getattr(placement, name).data_ptr() == pointers[name]
    assert placement.expert_map == new
    assert_tables(placement, new)
    assert new.physical_to_logical[placement(routing(torch.tensor([[5]]))).materialize().ids.item()] == 5


def test_update_keeps_the_experts_load_and_drops_the_slots():
    placement = Placement(ExpertMap.redundant(6, 2, 2))
    placement(routing(torch.tensor([[0], [5]]))).materialize()
    placement.update(ExpertMap.from_ranks([[5, 4, 3, 2], [1, 0, 5, 4]], 6))
    assert placement.expert_load.tolist() == [1, 0, 0, 0, 0, 1]
    assert placement.slot_load.sum() == 0


def test_update_has_room_for_any_later_plan():
    """`update` has room for any later map, also if all spare slots move from different experts to one."""
    placement = Placement(ExpertMap.from_ranks([[0, 1, 2], [3, 4, 5], [0, 1, -1], [2, 3, -1]], 6))
    one_hot = ExpertMap.from_ranks([[0, 1, 2], [0, 3, 4], [0, 5, -1], [0, -1, -1]], 6)
    placement.update(one_hot)
    assert_tables(placement, one_hot)
    placement = Placement(ExpertMap.redundant(6, 4, 2))  # fewer spare slots than ranks, all of them for expert 0
    placement.update(ExpertMap.from_ranks([[0, 1], [0, 2], [0, 3], [4, 5]], 6))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ExpertMap.from_ranks([[0, 1, 2, 3], [4, 0, 1, 2]], 5), "num_experts=6, got 5"),
        (ExpertMap.redundant(6, 4, 10), "num_ranks=2, got 4"),
        (ExpertMap.redundant(6, 2, 4), "slots_per_rank=4, got 5"),
        (
            ExpertMap.from_ranks([[0, 0, 0, 1], [2, 3, 4, 5]], 6, allow_duplicates=True),
            "room for 2 replicas of an expert, got 3",
        ),
    ],
)
def test_update_refuses_another_geometry_and_changes_nothing(other, message):
    old = ExpertMap.redundant(6, 2, 2)
    placement = Placement(old)
    with pytest.raises(ConfigError) as error:
        placement.update(other)
    assert message in str(error.value)
    assert placement.expert_map == old
    assert_tables(placement, old)


def test_update_refuses_more_slots_than_a_rank_has_memory_for():
    placement = Placement(ExpertMap.redundant(6, 2, 1))  # 4 and 3 slots
    with pytest.raises(ConfigError, match="at most 3 slots on rank 1, as at construction, got 4"):
        placement.update(ExpertMap.from_ranks([[0, 1, 2, -1], [3, 4, 5, 0]], 6))
    placement.update(ExpertMap.from_ranks([[3, 4, 5, 0], [0, 1, 2, -1]], 6))


def test_tables_are_right_after_to_empty_from_meta(noise):
    expert_map = ExpertMap.redundant(6, 4, 3)
    with torch.device("meta"):
        placement = Placement(expert_map)
    assert all(getattr(placement, name).is_meta for name in TABLES)
    placement.to_empty(device="cpu")
    assert_tables(placement, expert_map)
    assert placement.expert_load.tolist() == [0] * 6
    assert placement.slot_load.tolist() == [0] * expert_map.num_physical


def test_loads_are_counted_after_to_empty(noise):
    placement = Placement(ExpertMap.linear(4, 2))
    placement.to_empty(device="cpu")
    placement(routing(torch.tensor([[0, 3], [3, -1]]))).materialize()
    assert placement.expert_load.tolist() == [1, 0, 0, 2]


def test_padding_that_is_sent_is_placed_and_not_counted():
    placement, ids = Placement(ExpertMap.linear(4, 2)), torch.tensor([[0, 3], [3, -1], [1, 2]])
    tokens = torch.tensor([True, False, True])
    for sent, wanted in ((True, ids), (False, ids.masked_fill(~tokens[:, None], -1))):
        placement.reset_load()
        assert placement(routing(ids), TokenMask(tokens, sent)).materialize().ids.tolist() == wanted.tolist()
        assert placement.expert_load.tolist() == [1, 1, 1, 1], "tokens once, and padding never"


def test_map_given_while_on_meta_is_in_force_after_to_empty(noise):
    new = ExpertMap.from_ranks([[5, 4, 3], [2, 1, 0]], 6)
    with torch.device("meta"):
        placement = Placement(ExpertMap.linear(6, 2))
    placement.update(new)
    placement.to_empty(device="cpu")
    assert_tables(placement, new)


def test_tables_are_right_after_to_empty_from_memory(noise):
    """Tables are right after `to_empty`, which leaves random memory. They are rebuilt from the map on the host."""
    expert_map = ExpertMap.redundant(6, 4, 3)
    placement = Placement(expert_map)
    placement.to_empty(device="cpu")
    assert_tables(placement, expert_map)


def test_tables_stay_integers_when_the_model_changes_dtype():
    placement = Placement(ExpertMap.redundant(6, 4, 3)).to(torch.bfloat16)
    assert all(getattr(placement, name).dtype == torch.int64 for name in TABLES)


def test_nothing_is_saved():
    placement = Placement(ExpertMap.redundant(6, 4, 3))
    assert placement.state_dict() == {}
    assert not list(placement.parameters())
    assert {name for name, _ in placement.named_buffers()} == {*TABLES, "counting"}
    placement.load_state_dict({})


def test_repr_is_the_maps():
    assert "ExpertMap(E=6, R=4, slots_per_rank=3, redundant=3)" in repr(Placement(ExpertMap.redundant(6, 4, 3)))


# --- counting and choosing ------------------------------------------------------------------------------------------


def test_within_no_stats_nothing_is_counted():
    placement = Placement(ExpertMap.redundant(6, 2, 2))
    some = routing(torch.tensor([[0, 1], [2, -1]]))
    with placement.no_stats():
        with placement.no_stats():
            placement(some).materialize()
        placement(some).materialize()
    assert placement.expert_load.sum() == placement.slot_load.sum() == 0
    placement(some).materialize()
    assert placement.expert_load.tolist() == [1, 1, 1, 0, 0, 0]


def test_what_is_counted_is_asked_of_the_device():
    """`counting` is read on the device, from the same address in every call, so a captured graph observes changes."""
    placement = Placement(ExpertMap.redundant(6, 2, 2))
    address = placement.counting.data_ptr()
    with placement.no_stats():
        assert (placement.counting.data_ptr(), int(placement.counting)) == (address, 0)
    assert (placement.counting.data_ptr(), int(placement.counting)) == (address, 1)


def test_nearest_replicas():
    """NEAREST chooses replicas on the rank, then on its node, else any.

    Ranks 0 and 1 are one node, and 2 and 3 another.
    """
    expert_map = ExpertMap.from_ranks([[0, 1], [2, 0], [0, 3], [4, 5]], 6)
    tables = []
    for rank in range(4):
        placement = Placement(expert_map, ep_rank=rank)
        address = placement.logical_to_physical.data_ptr()
        placement.choose(Replicas.NEAREST, ranks_per_node=2)
        assert placement.logical_to_physical.data_ptr() == address
        count = int(placement.replica_count[0])
        tables.append(placement.logical_to_physical[0, :count].tolist())
    assert tables == [[0], [3], [4], [4]]
    placement = Placement(expert_map, ep_rank=3)
    placement.choose(Replicas.NEAREST, ranks_per_node=1)
    assert placement.logical_to_physical[0].tolist() == [0, 3, 4], "none near: all"
    placement.choose(Replicas.SPREAD)
    assert_tables(placement, expert_map)
    placement = Placement(expert_map, ep_rank=3, ranks_per_node=2)
    # the default is that of construction
    for nodes, nearest in (({"ranks_per_node": 4}, [0, 3, 4]), ({}, [4, -1, -1])):
        placement.choose(Replicas.NEAREST, **nodes)
        assert placement.logical_to_physical[0].tolist() == nearest


def test_a_choice_outlives_an_update():
    placement = Placement(ExpertMap.from_ranks([[0, 1], [2, 0]], 3), ep_rank=1)
    placement.choose(Replicas.NEAREST)
    placement.update(ExpertMap.from_ranks([[0, 2], [1, 0]], 3))
    assert placement.logical_to_physical[0].tolist() == [3, -1]
    with pytest.raises(ConfigError, match="ranks_per_node must divide the 2 ranks of the EP group, got 3"):
        placement.choose(Replicas.NEAREST, ranks_per_node=3)


def test_a_map_that_does_not_fit_is_refused_before_it_is_tried():
    placement = Placement(ExpertMap.linear(6, 2))
    placement.check(ExpertMap.round_robin(6, 2))
    with pytest.raises(ConfigError, match="num_experts=6, got 4"):
        placement.check(ExpertMap.linear(4, 2))
    assert_tables(placement, ExpertMap.linear(6, 2))


# --- prepared updates -----------------------------------------------------------------------------------------------

OLD = ExpertMap.from_ranks([[0, 1], [2, 0], [1, 2]], 3)
NEW = ExpertMap.from_ranks([[2, 1], [0, 2], [1, 0]], 3)
OTHER = ExpertMap.from_ranks([[1, 2], [0, 1], [2, 0]], 3)


def by_update(expert_map: ExpertMap, replicas: Replicas) -> Placement:
    fresh = Placement(OLD, ep_rank=1)
    fresh.choose(replicas)
    fresh.update(expert_map)
    return fresh


def same_tables(one: Placement, other: Placement) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TABLES)


@pytest.mark.parametrize("replicas", Replicas)
def test_a_prepared_update_is_an_update(replicas):
    placement = Placement(OLD, ep_rank=1)
    placement.choose(replicas)
    before = {name: getattr(placement, name).clone() for name in TABLES}
    placement.prepare(NEW)
    assert placement.expert_map is OLD
    assert all(torch.equal(getattr(placement, name), before[name]) for name in TABLES), "in force before it was put"
    with mock.patch.object(Placement, "_tables", side_effect=AssertionError("computed again")):
        placement.update(NEW)
    assert same_tables(placement, by_update(NEW, replicas))
    placement.update(OLD)
    assert same_tables(placement, by_update(OLD, replicas))


def test_what_was_prepared_for_another_map_is_not_used():
    placement = Placement(OLD, ep_rank=1)
    placement.prepare(NEW)
    placement.update(OTHER)
    assert same_tables(placement, by_update(OTHER, Replicas.SPREAD))
    placement.update(NEW)
    assert same_tables(placement, by_update(NEW, Replicas.SPREAD))


def test_what_was_prepared_for_another_choice_is_not_used():
    placement = Placement(OLD, ep_rank=1)
    placement.prepare(NEW)
    placement.choose(Replicas.NEAREST)
    assert same_tables(placement, by_update(OLD, Replicas.NEAREST))
    placement.update(NEW)
    assert same_tables(placement, by_update(NEW, Replicas.NEAREST))
    assert not same_tables(placement, by_update(NEW, Replicas.SPREAD))


def test_what_does_not_fit_is_refused_when_it_is_prepared():
    placement = Placement(OLD)
    large = ExpertMap.linear(4, 3)
    for call in (placement.prepare, placement.update):
        with pytest.raises(ConfigError, match="needs a map with num_experts=3"):
            call(large)
    assert placement.expert_map is OLD


def test_prepared_before_the_buffers_were_made_anew(noise):
    placement = Placement(OLD, ep_rank=1)
    placement.prepare(NEW)
    placement.to_empty(device="cpu")
    assert_tables(placement, OLD)
    placement.update(NEW)
    assert_tables(placement, NEW)
