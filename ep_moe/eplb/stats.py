"""BalancerStats: a snapshot of a balancer's counters. `ep_moe.metrics` exports it."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.eplb.cost import Price
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.planner.score import critical_path
from ep_moe.placement.placement import LayerStats


@dataclass(frozen=True)
class BalancerStats:
    """What a balancer has done so far, from data on the host. A snapshot does not synchronize with the device.

    Args:
        state: The current stage of a rebalance.
        steps: Calls of `step`.
        rebalances: Rebalances that began to move experts.
        commits: Commits of layers or of their sub-plans.
        rollbacks: Rebalances that were rolled back.
        skipped: Windows that ended during a rebalance and were discarded.
        restarts: Layers that were sent again, because their weights were updated during the transfer.
        received_bytes: Bytes that this rank received from others, for committed layers.
        staging_bytes: Device memory held for experts in transfer.
        layers: The last window's load under the maps then in force; () before the first window. It is computed at the
            first request after a window.
        price: The price of the last plan, as a sentence; "" if it had none, as without `EPLBConfig.machine`.
        error: The last error, "" for none.
        predicted: The price of the last plan; None if it had none.
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
        """The balancedness of all layers: sum of the mean rank loads / sum of the largest rank loads."""
        return critical_path([layer.rank_load for layer in self.layers]) if self.layers else 1.0
