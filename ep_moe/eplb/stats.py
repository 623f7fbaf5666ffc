"""What a balancer has done. `ep_moe.metrics` exports it."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.eplb.cost import Price
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.planner.score import critical_path
from ep_moe.placement.placement import LayerStats


@dataclass(frozen=True)
class BalancerStats:
    """What a balancer has done, as the host knows it; asking waits for nothing.

    Args:
        state: What is under way.
        steps: Calls of `step`.
        rebalances: Plans that were begun.
        commits: Of layers, or sub-plans of them.
        rollbacks: Rebalances that were rolled back.
        skipped: Windows that ended while a rebalance was still under way.
        restarts: Layers begun anew because their weights were updated on the way.
        received_bytes: By this rank from others, of committed layers.
        staging_bytes: Device memory held for experts on their way.
        layers: The last window's load under the maps then in force; () before the first. The first to ask after a
            window has them made.
        price: Of the last plan, as a sentence; "" where none was asked for.
        error: The last one, "" for none.
        predicted: The price in numbers; None where none was asked for.
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
    predicted: Price | None = None

    @property
    def balancedness(self) -> float:
        """The balancedness of all layers: sum of the mean ranks / sum of the fullest ranks."""
        return critical_path([layer.rank_load for layer in self.layers]) if self.layers else 1.0
