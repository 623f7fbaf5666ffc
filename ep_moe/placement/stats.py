"""What one layer's experts and ranks were given to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.placement import Placement
from ep_moe.runtime.profiling import balancedness


@dataclass(frozen=True)
class LayerStats:
    """Routes of a whole EP group.

    Args:
        name: The layer's.
        expert_load: [E], routes per logical expert.
        rank_load: [R], routes per EP rank.
    """

    name: str
    expert_load: tuple[int, ...]
    rank_load: tuple[float, ...]

    @property
    def balancedness(self) -> float:
        """Mean over ranks / fullest rank, 1 where there is no load."""
        return balancedness(list(self.rank_load))


def layer_stats(name: str, placement: Placement, ep: RankGroup) -> LayerStats:
    """As counted since the last `reset_load` (per rank also since the last `update`). Collective over the EP group,
    waits for the device."""
    counts = torch.cat([placement.expert_load, placement.rank_load()])
    with ep.flight_recorder.step("stats"):
        rows = ep.exchange(counts)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    experts = placement.expert_map.num_experts
    return LayerStats(name, tuple(sums[:experts]), tuple(map(float, sums[experts:])))
