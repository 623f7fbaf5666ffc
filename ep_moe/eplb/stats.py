"""What a balancer has done, for exporters."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.planner.score import critical_path
from ep_moe.placement.stats import LayerStats


@dataclass(frozen=True)
class BalancerStats:
    """A snapshot of the host's; asking waits for nothing. The first to ask after a window has `layers` made.

    steps: calls of `step`; rebalances, commits (of layers, or pieces of them), rollbacks: since the beginning
    skipped: windows that ended while a rebalance was still under way
    restarts: layers begun anew because their weights were updated on the way
    received_bytes: by this rank from others, of committed layers
    staging_bytes: device memory held for experts on their way
    layers: the last window's load under the maps then in force; () before the first
    price: of the last plan, as a sentence; "" where none was asked for
    error: the last one, "" for none
    """

    state: State
    steps: int
    rebalances: int
    commits: int
    rollbacks: int
    skipped: int
    restarts: int
    received_bytes: int
    staging_bytes: int
    layers: tuple[LayerStats, ...]
    price: str
    error: str

    @property
    def balancedness(self) -> float:
        """Of all layers: sum of the mean rank / sum of the fullest."""
        return critical_path([layer.rank_load for layer in self.layers]) if self.layers else 1.0
