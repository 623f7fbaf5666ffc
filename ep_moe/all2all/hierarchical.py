"""`hierarchical`: a token travels once to each node that holds one of its experts, and there once to each such rank.

exchange   row counts between all pairs of ranks, at both levels (the host waits for them once)
rail       rows, ids and weights go to the rank with the sender's local rank on each node
node       that rank passes them on to the ranks of its node that hold their experts
combine    the way back: each node sums a token's rows in the order of its ranks, and sends one row per (token, node)
           over the rail. The token's rank sums these in the order of nodes. Both sums are in float32, then rounded to
           the dtype of the rows

A rank's node-major number is node * (ranks of a node) + local rank. On one node this is `torch_a2a` with another
order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.fan_out import FanOut, RowExchange, Rows, wanted_places
from ep_moe.parallel.collectives import all_to_all_rows, as_bytes
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import Levels, RankGroup
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.types import Pending, PhysicalRouting, Received, RowLayout, Weighting

# GB/s per GPU and direction: nominal for a 400 Gbit/s network card; measured on an H200 by `bench.all2all`
_NETWORK, _NVLINK = 50, 366
_HIGH = 32  # bits of a count; two counts are packed into one int64


@dataclass(frozen=True)
class Counts:
    """Rows of one call, to and from each node of the rail and each rank of the node."""

    to_nodes: list[int]
    from_nodes: list[int]
    to_ranks: list[int]
    from_ranks: list[int]


@dataclass(frozen=True)
class _Handle:
    """State of a call. rail: this rank's tokens to nodes; node: the rows that this rank passes on to ranks."""

    counts: Counts
    rail: FanOut
    node: FanOut


class HierarchicalDispatcher(Dispatcher):
    """Sends a token once to each node that has one of its experts, and there once to each such rank."""

    name = "hierarchical"
    once_per_node = True
    tested_machines = "CPU, gloo, 2 nodes of 2 and 4 ranks, 4 nodes of 2; 2 and 4 H100, 4 H200 as two nodes"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=True,
        dispatch_formats=frozenset(ROW_FORMATS),
    )

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        levels = levels_of(rank_group)
        self._levels, self._nodes, self._locals = levels, levels.rail.size, levels.node.size
        self._over_rail: RowExchange = partial(all_to_all_rows, rank_group=levels.rail)
        # replaceable by another exchange within a host: no other code depends on how rows move within a node
        self._within_node: RowExchange = partial(all_to_all_rows, rank_group=levels.node)
        self._node_major_ids = NodeMajorIds(levels, dispatch_shape.slots_per_rank)

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        nodes = layout.ep_node_count
        if nodes == 1 or layout.ep == nodes:
            return 45, "a row per node that needs it, and there one per rank; the EP group has no such nodes"
        flat, by_node = (_reached(places, top_k) * (1 - 1 / nodes) for places in (layout.ep, nodes))
        passed_on = _reached(layout.ep, top_k) * (1 - nodes / layout.ep)
        if (flat - by_node) / _NETWORK < passed_on / _NVLINK:
            rows = f"{by_node:.1f} rows of a token to other nodes for {flat:.1f}"
            return 45, f"{rows}, which save less time on the network than passing rows on takes of NVLink"
        return (
            25,
            f"ranks of the EP group are on {nodes} nodes: a token travels once to a node, not once to each rank",
        )

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        return without_rails(cls.name, layout)

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        ranks, slots_per_rank = self.rank_group.size, self.dispatch_shape.slots_per_rank
        if problem is not None:
            self.rank_group.agree([0] * (ranks + 1), problem, x.device)
        ids = self._node_major(routing.ids.long())
        wanted = wanted_places(ids, slots_per_rank, ranks)  # [T, R], node-major
        per_node = wanted.view(len(ids), self._nodes, self._locals)
        by_node = per_node.any(2)
        packed = per_node.sum(0)
        packed[:, 0] += by_node.sum(0) << _HIGH
        gradients = {"x": x, "routing.weights": routing.weights}
        bad = self._out_of_range(routing)
        facts = self.rank_group.agree([bad, packed.flatten()], None, x.device, gradients=gradients)
        self._check_ids([row[0] for row in facts])
        counts = self._counts([row[1:] for row in facts])

        rail = FanOut.of(by_node, sum(counts.to_nodes), self.dispatch_shape.top_k)
        rows = Rows(as_bytes(x), None if x_scale is None else as_bytes(x_scale), ids, routing.weights)
        over_rail = rows.start(rail, self._locals * slots_per_rank, self._over_rail, counts.to_nodes, counts.from_nodes)

        def finish() -> Received:
            arrived = over_rail.wait()  # ids counted from the node's first
            wanted = wanted_places(arrived.ids, slots_per_rank, self._locals)
            node = FanOut.of(wanted, sum(counts.to_ranks), self.dispatch_shape.top_k)
            here = arrived.start(node, slots_per_rank, self._within_node, counts.to_ranks, counts.from_ranks).wait()
            return here.received(self.dispatch_shape, x.dtype, _Handle(counts, rail, node))

        return Pending(finish)

    def _combine(self, y: Tensor, handle: _Handle, out: Tensor | None) -> Pending[Tensor]:
        counts = handle.counts
        pending = self._within_node(y, counts.from_ranks, counts.to_ranks)

        def finish() -> Tensor:
            sums = handle.node.sums(pending.wait())
            return handle.rail.sums(self._over_rail(sums, counts.from_nodes, counts.to_nodes).wait())

        return Pending(finish)

    def _node_major(self, ids: Tensor) -> Tensor:
        return self._node_major_ids.of(ids)

    def _counts(self, rows: list[list[int]]) -> Counts:
        """Unpack the row counts of this rank.

        rows: for each rank, an int64 for each destination rank (node-major). The low `_HIGH` bits count its rows to
            that rank. The high bits of each node's first entry count its rows to that node
        """
        levels, locals_ = self._levels, self._locals
        sender = dict(zip(levels.node_major_ranks, rows, strict=True))
        here, local = levels.rail.rank, levels.node.rank
        low = (1 << _HIGH) - 1

        def passed(through: int, to: int) -> int:
            """Count the rows that arrive from all nodes at local rank `through` of this node, for local rank `to`."""
            return sum(sender[node * locals_ + through][here * locals_ + to] & low for node in range(self._nodes))

        own = sender[here * locals_ + local]
        return Counts(
            to_nodes=[own[node * locals_] >> _HIGH for node in range(self._nodes)],
            from_nodes=[sender[node * locals_ + local][here * locals_] >> _HIGH for node in range(self._nodes)],
            to_ranks=[passed(local, to) for to in range(locals_)],
            from_ranks=[passed(through, local) for through in range(locals_)],
        )


class NodeMajorIds:
    """Renumber physical ids by node-major rank, so that the experts of a node are consecutive."""

    def __init__(self, levels: Levels, slots_per_rank: int) -> None:
        self._ranks, self._slots_per_rank = levels.node_major_ranks, slots_per_rank
        self._shifts: dict[torch.device, Tensor] = {}

    def of(self, ids: Tensor) -> Tensor:
        """Return node-major ids. ids: int [T, K]; ids out of range are returned unchanged"""
        ranks, slots_per_rank = self._ranks, self._slots_per_rank
        if ranks == tuple(range(len(ranks))):
            return ids
        if ids.device not in self._shifts:
            shifts = [(place - rank) * slots_per_rank for rank, place in enumerate(ranks)]
            self._shifts[ids.device] = torch.tensor([*shifts, 0], dtype=ids.dtype, device=ids.device)
        valid = (ids >= 0) & (ids < len(ranks) * slots_per_rank)
        return ids + self._shifts[ids.device][(ids // slots_per_rank).where(valid, len(ranks))]


def _reached(places: int, top_k: int) -> float:
    """Return the expected number of places (ranks or nodes) that hold an expert of a token, under uniform routing."""
    return places * (1 - (1 - 1 / places) ** top_k)


def without_rails(name: str, layout: RankLayout) -> str | None:
    """Return why EP groups cannot be divided into nodes and rails, or None."""
    if layout.without_rails is None:
        return None
    return f"{name} needs the same number of ranks of an EP group on each node, and {layout.without_rails}"


def levels_of(rank_group: RankGroup) -> Levels:
    """Return the node and rail groups of an EP group. On one node each rail has one rank."""
    if rank_group.levels is not None:
        return rank_group.levels
    alone = RankGroup(None, (rank_group.ranks[rank_group.rank],), 0, rank_group.flight_recorder)
    return Levels(rank_group, alone, tuple(range(rank_group.size)))
