"""What a fused kernel is given and compared with, and each check of its contract by itself, on one rank."""

import pytest

from ep_moe.placement.expert_map import EMPTY
from ep_moe.testing.fused_case import EXPERTS, maps


def slots_of(expert_map):
    return [expert_map.local(rank) for rank in range(expert_map.num_ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_map_holds_every_expert(ranks):
    for name, expert_map in maps(ranks).items():
        held = slots_of(expert_map)
        assert {expert for row in held for expert in row} - {EMPTY} == set(range(EXPERTS)), name
        assert len({len(row) for row in held}) == 1, f"{name}: a kernel needs as many slots on each rank"
