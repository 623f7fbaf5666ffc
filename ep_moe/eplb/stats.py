"""What a balancer has done, and how those who watch it see it: Prometheus' text format, and any TensorBoard writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        rollbacks: Rebalances that came to nothing.
        skipped: Windows that ended while a rebalance was still under way.
        restarts: Layers begun anew because their weights were updated on the way.
        received_bytes: By this rank from others, of committed layers.
        staging_bytes: Device memory held for experts on their way.
        layers: The last window's load under the maps then in force; () before the first. The first to ask after a
            window has them made.
        price: Of the last plan, as a sentence; "" where none was asked for.
        error: The last one, "" for none.
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


_COUNTERS = ("steps", "rebalances", "commits", "rollbacks", "skipped", "restarts", "received_bytes")


def prometheus_text(stats: BalancerStats, *, prefix: str = "ep_moe_eplb") -> str:
    """One page of metrics: counters, the state, and per layer the balancedness and the fullest rank's load. Load per
    expert is left out: a model has tens of thousands of those."""
    lines = []
    for name in _COUNTERS:
        lines += [f"# TYPE {prefix}_{name}_total counter", f"{prefix}_{name}_total {getattr(stats, name)}"]
    gauges = {"state": int(stats.state), "staging_bytes": stats.staging_bytes, "balancedness": stats.balancedness}
    for name, value in gauges.items():
        lines += [f"# TYPE {prefix}_{name} gauge", f"{prefix}_{name} {value}"]
    for name, values in {
        "layer_balancedness": [layer.balancedness for layer in stats.layers],
        "layer_fullest_rank_routes": [max(layer.rank_load) for layer in stats.layers],
    }.items():
        lines.append(f"# TYPE {prefix}_{name} gauge")
        for layer, value in zip(stats.layers, values, strict=True):
            lines.append(f'{prefix}_{name}{{layer="{_escaped(layer.name)}"}} {value}')
    return "\n".join(lines) + "\n"


def to_tensorboard(writer: Any, stats: BalancerStats, *, prefix: str = "eplb") -> None:
    """writer: a `torch.utils.tensorboard.SummaryWriter`, or whatever has its `add_scalar(name, value, step)`."""
    for name in (*_COUNTERS[1:], "staging_bytes", "balancedness"):
        writer.add_scalar(f"{prefix}/{name}", getattr(stats, name), stats.steps)
    for layer in stats.layers:
        writer.add_scalar(f"{prefix}/balancedness/{layer.name}", layer.balancedness, stats.steps)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
