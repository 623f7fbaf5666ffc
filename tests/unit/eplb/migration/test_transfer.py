"""Test one rank's part of a migration: what is prepared for a commit, and when."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig, Placement
from ep_moe.eplb.migration.schedule import transfer_schedule
from ep_moe.eplb.migration.slots import SlotStore
from ep_moe.eplb.migration.transfer import Migration, Mover, Staging, StagingSize
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.weights.expert_weights import ExpertWeights

OLD, NEW = ExpertMap.from_ranks([[0, 1, 2, 3]], 4), ExpertMap.from_ranks([[3, 1, 0, 2]], 4)
OTHER = ExpertMap.from_ranks([[1, 0, 2, 3]], 4)


def start():
    """Return a layer, its slots by expert, and a migration of it that takes three steps."""
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=1)
    weights = ExpertWeights(config, OLD).requires_grad_(False)
    layer = SimpleNamespace(name="layers.0", placement=Placement(OLD), expert_weights=weights)
    mover = Mover(RankGroup.alone(), Staging(StagingSize(), 4, torch.device("cpu")), 10.0)
    size = mover.store(layer).row_bytes
    part = transfer_schedule(OLD, NEW, 0, row_bytes=size, budget=size)
    assert len(part.batches) == 3
    mover.staging.reserve(StagingSize((size,) * 3, size))
    return layer, held(layer), Migration(layer, part, mover)


def held(layer):
    """Return the contents of each expert's slot under the current map."""
    tensors = layer.expert_weights.slot_tensors()
    placed = layer.placement.expert_map.local(0)
    return {expert: [tensor[slot].clone() for tensor in tensors.values()] for slot, expert in enumerate(placed)}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for expert in one for a, b in zip(one[expert], other[expert], strict=True)
    )


def state(layer):
    tensors = (*layer.expert_weights.slot_tensors().values(), *layer.placement.buffers())
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_commit_is_the_same_prepared_or_not(ahead):
    layer, rows, migration = start()
    before = state(layer)
    with mock.patch.object(Migration, "_prepare", Migration._prepare if ahead else mock.Mock(return_value=None)):
        for _ in range(5):
            migration.advance()
        assert migration.done
        assert migration.damage() == ""
    assert (migration._rows is not None) == ahead
    assert all(torch.equal(a, b) for a, b in zip(before, state(layer), strict=True)), "written before the commit"
    migration.commit()
    assert layer.placement.expert_map is layer.expert_weights.expert_map is NEW
    assert same(held(layer), rows)
    assert layer.placement.logical_to_physical[:, 0].tolist() == [2, 1, 3, 0]


def test_prepared_once_and_after_the_last_batch_has_set_out():
    layer, _, migration = start()
    with (
        mock.patch.object(SlotStore, "address", autospec=True, side_effect=SlotStore.address) as address,
        mock.patch.object(layer.placement, "prepare", wraps=layer.placement.prepare) as prepare,
    ):
        calls = []
        for _ in range(6):
            migration.advance()
            calls.append((address.call_count, prepare.call_count))
        migration.commit()
    assert calls == [(0, 0)] * 3 + [(1, 1)] * 3
    assert (address.call_count, prepare.call_count) == (1, 1)


def test_another_map_that_came_after_the_preparation_stays():
    layer, _, migration = start()
    for _ in range(5):
        migration.advance()
    layer.placement.update(OTHER)
    assert migration.outdated() == "map"
    assert layer.placement.logical_to_physical[:, 0].tolist() == [1, 0, 2, 3]


def test_a_mover_keeps_a_layers_store_until_its_rows_change():
    layer, _, migration = start()
    mover = migration._mover
    store = mover.store(layer)
    assert mover.store(layer) is store is migration._store
    layer.expert_weights.to(torch.bfloat16)
    assert mover.store(layer) is not store
    assert mover.store(layer).row_bytes < store.row_bytes
    assert mover.store(layer) is mover.store(layer)


def test_slots_after_a_warm_up_are_as_they_were():
    layer, rows, migration = start()
    migration._mover.warm_up(layer)
    assert same(held(layer), rows)
    assert migration._mover.staging.damage.tolist() == [0] * 4


def test_a_damaged_row_is_named_by_the_rank_of_the_job_that_it_came_from():
    _, _, migration = start()
    migration._mover = SimpleNamespace(rank_group=SimpleNamespace(ranks=(5,)))
    migration._damage_on_host = torch.zeros_like(migration._damage_on_host)
    migration._damage_on_host[0] = 1
    assert f"expert {migration._staged[0]} from rank 5 does not match its checksum" in migration.damage()


def test_a_damaged_row_that_travelled_is_named_by_its_sender():
    _, _, migration = start()
    part = transfer_schedule(ExpertMap.linear(2, 2), ExpertMap.from_ranks([[1], [0]], 2), 1, row_bytes=8, budget=8)
    migration.transfer_schedule, migration._staged, migration._rank = part, part.staged, 1
    migration._mover = SimpleNamespace(rank_group=SimpleNamespace(ranks=(5, 7)))
    migration._damage_on_host = torch.ones(1, dtype=torch.int64)
    assert "expert 0 from rank 5 does not match its checksum (1 of 1 experts)" in migration.damage()
