"""Test the Triton kernel of `Placement.forward` against torch; on a CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.host_word import HostWord
from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe import ExpertMap, Placement, Routing
from ep_moe.placement.deferred import RANK_FACTOR
from ep_moe.placement.deferred import place_ids_once as place

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAPS = [
    ExpertMap.linear(12, 4),
    ExpertMap.redundant(10, 4, 6),
    ExpertMap.redundant(4, 3, 8),
    ExpertMap.uneven([7, 1, 3]),
]


@pytest.mark.parametrize("expert_map", MAPS, ids=["linear", "redundant", "replicas3", "uneven"])
@pytest.mark.parametrize("ep_rank", [0, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_same_ids_and_loads(expert_map, ep_rank, dtype):
    for tokens, top_k in ((0, 2), (1, 1), (3, 2), (301, 3), (1500, 3)):
        ids = torch.randint(-2, expert_map.num_experts + 2, (tokens, top_k), dtype=dtype)  # with unknown ids among them
        there = Placement(expert_map, ep_rank=ep_rank)
        expected = there(Routing(ids, torch.ones(ids.shape))).materialize().ids
        here = Placement(expert_map, ep_rank=ep_rank).to(DEVICE)
        out = torch.full(ids.shape, 77, dtype=torch.int64, device=DEVICE)
        tables = (here.logical_to_physical, here.replica_count, here.expert_load, here.slot_load, here.counting)
        invalid = HostWord()
        place(ids.to(DEVICE), *tables, invalid.address, out, ep_rank * RANK_FACTOR)
        unknown = ids[(ids < -1) | (ids >= expert_map.num_experts)].tolist()
        assert invalid.read() in (unknown or [-1]), "the host learns one of the ids that name no expert"
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(here.expert_load.cpu(), there.expert_load)
        assert torch.equal(here.slot_load.cpu(), there.slot_load)
        with here.no_stats():
            place(ids.to(DEVICE), *tables, 0, out, 0)
        assert torch.equal(here.expert_load.cpu(), there.expert_load)


@pytest.mark.skipif(DEVICE == "cpu", reason="torch sees no GPU")
def test_a_placement_on_a_gpu_uses_it():
    expert_map, ids = MAPS[1], torch.randint(-1, 10, (1000, 3))
    expected = Placement(expert_map, ep_rank=3)(Routing(ids, torch.ones(ids.shape))).materialize().ids
    found = Placement(expert_map, ep_rank=3).cuda()(Routing(ids.cuda(), torch.ones(ids.shape).cuda())).materialize().ids
    assert torch.equal(found.cpu(), expected)
