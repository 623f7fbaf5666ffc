"""Prices a new map: milliseconds gained per step, against the milliseconds that moving the weights takes."""

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
    """Rates of one rank's hardware.

    Args:
        hbm_bytes_per_s: Bytes per second of its memory, read or written.
        flops: Floating-point operations per second of its matrix products.
        link_bytes_per_s: Bytes per second to and from ranks of its node, each way.
        node_link_bytes_per_s: Bytes per second to and from ranks of other nodes, each way.

    Raises:
        ConfigError: A rate is not a positive number.
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
    """A model of the time of one MoE layer, which is the time of its slowest rank. The time of a rank is

        max(weight bytes of experts with tokens / memory rate, operations / matmul rate) + row bytes / link rate

    The model omits launches, the router, attention and overlap. Use it to compare maps, not to predict latency.

    Args:
        expert_bytes: Bytes of one expert's weights and scales.
        row_bytes: Bytes of one token, sent and returned.
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
        """Make the model of a layer from its configuration.

        Args:
            config: The layer's configuration.
            machine: The rates.
            bytes_per_weight: Bytes of a weight, with its share of scales.
            bytes_per_value: Bytes of one hidden value, dispatch and combine together.

        Returns:
            The layer's model.
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

        It assumes that tokens come evenly from all ranks, and that each route is sent as a row of its own. An expert
        with a load of less than one route per step is read in that fraction of the steps.

        Args:
            load: [layers, E], routes per step of all ranks together.
            maps: One per layer.
            ranks_per_node: Number of consecutive ranks that share a node. Default: all ranks.

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
        """Return the number of experts that each rank reads in a step, float64 [layers, R]."""
        found = []
        for one, held in zip(np.asarray(load, np.float64)[:, None], maps, strict=True):
            table = table_of(held)[None]
            copies = copy_loads(one, count_copies(table, held.num_experts), table)[0]
            found.append(np.minimum(copies, 1.0).sum(1))
        return np.stack(found)


def cost_ms(traffic: Traffic, machine: Machine) -> float:
    """Estimate the time to move experts: that of the rank which takes longest to receive its own.

    It assumes that local copies and each kind of link run one after another. A local copy reads and writes memory. A
    lost expert arrives at the rate between nodes.

    Args:
        traffic: The experts to move.
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
    """Gain and cost of a new map, in milliseconds.

    Args:
        before_ms: Time of one step of all layers under the old maps.
        after_ms: Time of one step of all layers under the new maps.
        cost_ms: Time of moving the weights once.
        within_steps: The limit for `steps_to_pay`.
    """

    before_ms: float
    after_ms: float
    cost_ms: float
    within_steps: int

    @property
    def gain_ms(self) -> float:
        """Milliseconds gained per step; negative for a loss."""
        return self.before_ms - self.after_ms

    @property
    def steps_to_pay(self) -> float:
        """Steps after which the gain has paid the cost; infinite without a gain."""
        return self.cost_ms / self.gain_ms if self.gain_ms > 0 else float("inf")

    @property
    def accepted(self) -> bool:
        """Whether the gain pays the cost within `within_steps` steps."""
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
    """Compare the gain of new maps with the cost of moving to them.

    After the loss of a rank no price is needed, because the old maps can no longer be used.

    Args:
        load: [layers, E], routes per step.
        old: The maps in force, one per layer.
        new: The planned maps.
        moved: The result of `traffic` for these maps.
        time: The model of a layer's time.
        within_steps: Steps for which the new maps are expected to stay.
        ranks_per_node: Number of consecutive ranks that share a node. Default: all ranks.

    Returns:
        The price.

    Raises:
        ConfigError: An argument is out of range or does not fit the others.
    """
    check_count("within_steps", within_steps, at_least=1)
    before, after = (float(time.ms(load, maps, ranks_per_node=ranks_per_node).sum()) for maps in (old, new))
    return Price(before, after, cost_ms(moved, time.machine), within_steps)
