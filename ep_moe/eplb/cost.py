"""Whether a new map pays: milliseconds gained per step against milliseconds that moving the weights takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep_moe.checks import check_count, set_positive
from ep_moe.config import MoEConfig
from ep_moe.eplb.planner.packing import Floats, copy_loads, count_copies
from ep_moe.eplb.planner.score import Traffic, loads_by_rank, table_of
from ep_moe.placement.expert_map import ExpertMap


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank.

    Args:
        hbm_bytes_per_s: Bytes per second of its memory, read or written.
        flops: Floating-point operations per second of its matrix products.
        link_bytes_per_s: Bytes per second to and from ranks of its node, each way.
        node_link_bytes_per_s: Bytes per second to and from ranks of other nodes, each way.

    Raises:
        ConfigError: a rate is no positive number.
    """

    hbm_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    node_link_bytes_per_s: float

    def __post_init__(self) -> None:
        set_positive(self, "hbm_bytes_per_s", "flops", "link_bytes_per_s", "node_link_bytes_per_s")


H200 = Machine(hbm_bytes_per_s=4.24e12, flops=798e12, link_bytes_per_s=366e9, node_link_bytes_per_s=50e9)
"""One H200 of a host with NVLink: copy and bf16 matmul rates as `bench.experts` measured them, peer to peer as
`bench.all2all` did (docs/reference/benchmarks/transports.md). Between nodes nothing was measured: 50 GB/s is the
nominal rate of one 400 Gbit/s card per GPU."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """What one MoE layer takes. On each rank it is

        max(weight bytes of experts with tokens / memory rate, operations / matmul rate) + row bytes / link rate

    and the slowest rank counts. Launches, the router, attention and overlap are left out: good for comparing maps, not
    for predicting latency.

    Args:
        expert_bytes: Bytes of one expert's weights and scales.
        row_bytes: Bytes of one token on its way out and back.
        flop_per_row: Operations per row; multiply and add count as two.
        machine: The rates.
    """

    expert_bytes: int
    row_bytes: int
    flop_per_row: int
    machine: Machine

    @classmethod
    def of(
        cls, config: MoEConfig, machine: Machine, *, bytes_per_weight: float = 2.0, bytes_per_value: float = 4.0
    ) -> LayerTime:
        """Compute the numbers of a layer.

        Args:
            config: The layer.
            machine: The rates.
            bytes_per_weight: Bytes of a weight, with its share of scales.
            bytes_per_value: Bytes of a hidden value, out and back together.

        Returns:
            The layer's times.
        """
        weights = config.hidden_size * (config.w13_rows + config.intermediate_size)
        return cls(
            expert_bytes=round(weights * bytes_per_weight),
            row_bytes=round(config.hidden_size * bytes_per_value),
            flop_per_row=2 * weights,
            machine=machine,
        )

    def ms(self, load: Any, maps: Sequence[ExpertMap], *, ranks_per_node: int | None = None) -> Floats:
        """Estimate the time of each layer under a map.

        Tokens come evenly from all ranks, and each route is a row of its own on the wire. An expert with less than one
        route per step is read in that share of the steps.

        Args:
            load: [layers, E], routes per step of all ranks together.
            maps: One per layer.
            ranks_per_node: Consecutive ranks share a node. Default: one node.

        Returns:
            float64 [layers], milliseconds of the slowest rank.

        Raises:
            ConfigError: `load` and `maps` do not fit each other.
        """
        rows = loads_by_rank(load, maps)
        ranks, machine = rows.shape[1], self.machine
        per_node = ranks_per_node or ranks
        near, far = (per_node - 1) / ranks, (ranks - per_node) / ranks
        compute = np.maximum(
            self._read(load, maps) * self.expert_bytes / machine.hbm_bytes_per_s,
            rows * self.flop_per_row / machine.flops,
        )
        wire = rows * self.row_bytes * (near / machine.link_bytes_per_s + far / machine.node_link_bytes_per_s)
        return np.asarray((compute + wire).max(1) * 1e3)

    def _read(self, load: Any, maps: Sequence[ExpertMap]) -> Floats:
        """float64 [layers, R]: experts that a rank reads in a step."""
        found = []
        for one, held in zip(np.asarray(load, np.float64)[:, None], maps, strict=True):
            table = table_of(held)[None]
            copies = copy_loads(one, count_copies(table, held.num_experts), table)[0]
            found.append(np.minimum(copies, 1.0).sum(1))
        return np.stack(found)


def cost_ms(traffic: Traffic, machine: Machine) -> float:
    """Estimate how long moving experts takes: until the rank that receives most has its experts.

    Links and local copies follow one after the other. A local copy reads and writes memory; what is lost comes in at
    the rate between nodes.

    Args:
        traffic: What is moved.
        machine: The rates.

    Returns:
        Milliseconds.
    """
    per_rank = (
        traffic.local.sum(0) * 2 / machine.hbm_bytes_per_s
        + traffic.same_node.sum(0) / machine.link_bytes_per_s
        + (traffic.other_node + traffic.lost).sum(0) / machine.node_link_bytes_per_s
    )
    return float(per_rank.max() * traffic.expert_bytes * 1e3)


@dataclass(frozen=True)
class Price:
    """What a new map gains and costs, in milliseconds.

    Args:
        before_ms: One step of all layers under the old maps.
        after_ms: One step of all layers under the new maps.
        cost_ms: Moving the weights, once.
        within_steps: The limit for `steps_to_pay`.
    """

    before_ms: float
    after_ms: float
    cost_ms: float
    within_steps: int

    @property
    def gain_ms(self) -> float:
        """Per step; negative for a loss."""
        return self.before_ms - self.after_ms

    @property
    def steps_to_pay(self) -> float:
        """Steps after which the gain has paid the cost; infinite where there is no gain."""
        return self.cost_ms / self.gain_ms if self.gain_ms > 0 else float("inf")

    @property
    def accepted(self) -> bool:
        """Whether the gain pays the cost within the limit."""
        return self.steps_to_pay <= self.within_steps

    def __str__(self) -> str:
        change = f"{self.before_ms:.4g} -> {self.after_ms:.4g} ms a step, moving costs {self.cost_ms:.4g} ms"
        if self.gain_ms <= 0:
            return f"refused: {change}: no gain"
        word = "accepted" if self.accepted else "refused"
        return f"{word}: {change}: paid back after {self.steps_to_pay:.0f} steps, limit {self.within_steps}"


def verdict(
    load: Any,
    old: Sequence[ExpertMap],
    new: Sequence[ExpertMap],
    *,
    moved: Traffic,
    time: LayerTime,
    within_steps: int,
    ranks_per_node: int | None = None,
) -> Price:
    """Weigh going from `old` to `new`. Lost ranks need no price: without them `old` is no choice.

    Args:
        load: [layers, E], routes per step.
        old: The maps in force, one per layer.
        new: The planned maps.
        moved: What `traffic` says of them.
        time: What a layer takes.
        within_steps: How long the new maps are expected to stay.
        ranks_per_node: Consecutive ranks share a node. Default: one node.

    Returns:
        The price.

    Raises:
        ConfigError: an argument is out of range or does not fit the others.
    """
    check_count("within_steps", within_steps, at_least=1)
    before, after = (float(time.ms(load, maps, ranks_per_node=ranks_per_node).sum()) for maps in (old, new))
    return Price(before, after, cost_ms(moved, time.machine), within_steps)
