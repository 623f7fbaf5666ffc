"""Placement: logical ids to physical ids on the device, by tables that are rewritten in place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_moe.checks import check_divides, check_kind
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.deferred import RANK_FACTOR, DeferredRouting, InvalidIds, Tables, place
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.runtime.devices import on_device_of
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing, TokenMask, recomputing, without_rows


class Replicas(enum.Enum):
    """Which of an expert's replicas a rank's tokens go to.

    SPREAD   all of them, evenly
    NEAREST  the one on the own rank, else evenly those of the own node, else all: fewer rows on the wire, less balance
    """

    SPREAD = "spread"
    NEAREST = "nearest"


class Placement(nn.Module):
    """Chooses a replica for every (token, expert) and counts load. Buffers only, none of them saved.

    The choice depends on row, expert and EP rank alone: where ranks hold the same rows (the members of an etp group,
    which share an EP rank) they choose alike.

    Args:
        expert_map: Where experts are.
        ep_rank: This rank in its EP group.
        ranks_per_node: So many consecutive ranks share a node. Default: all.

    Attributes:
        expert_map: The map in force.
        expert_load: int64 [E], routes per logical expert since `reset_load`. Id -1 (padding rows) is not counted.
        slot_load: int64 [P], the same per physical expert since `reset_load` or `update`.
        resets: How often `reset_load` was called.
        invalid_ids: What kernels met among logical ids.
        slots: [R], slots that each rank has memory for; those of the map at construction.
    """

    logical_to_physical: Tensor  # int64 [E, max_replicas], padded with -1; the replicas that this rank uses
    replica_count: Tensor  # int64 [E]
    expert_load: Tensor
    slot_load: Tensor
    counting: Tensor  # int64 [], 1, or 0 within `no_stats`; on the device, so that captured graphs heed it

    def __init__(self, expert_map: ExpertMap, *, ep_rank: int = 0, ranks_per_node: int | None = None) -> None:
        super().__init__()
        self.expert_map = expert_map
        self._ep_rank = ep_rank
        self._found_per_node = expert_map.num_ranks if ranks_per_node is None else ranks_per_node
        self._replicas, self._ranks_per_node = Replicas.SPREAD, self._found_per_node
        self.resets = 0
        self._ahead: tuple[ExpertMap, list[Tensor]] | None = None  # see `prepare`
        self.slots = [expert_map.num_slots(rank) for rank in range(expert_map.num_ranks)]
        experts = expert_map.num_experts
        # room for any later plan: no expert needs more replicas than ranks or than spare slots
        self._max_replicas = max(
            *expert_map.replica_count, min(expert_map.num_ranks, expert_map.num_physical - experts + 1)
        )
        for name, shape in {
            "logical_to_physical": (experts, self._max_replicas),
            "replica_count": (experts,),
            "expert_load": (experts,),
            "slot_load": (expert_map.num_physical,),
            "counting": (),
        }.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64), persistent=False)
        self._write(expert_map)
        self.counting.fill_(1)
        self.invalid_ids = InvalidIds(self.counting.device)

    def forward(self, routing: Routing, mask: TokenMask | None = None) -> PhysicalRouting:
        """Replace logical by physical ids, and count load.

        An id outside [-1, E) leaves as one outside [-1, P): dispatchers that wait for the device refuse it on all ranks
        together, others drop it. On a GPU `invalid_ids` tells of it when the kernels have run.
        Ids are placed when they are needed. Within a backward pass nothing is counted: activation checkpointing runs
        there what was counted before.

        Args:
            routing: Logical ids [T, K]; -1 stays -1.
            mask: Of these rows. Padding is not counted, and is placed where the mask says that it is sent.

        Returns:
            Physical ids [T, K] and the weights, as a `DeferredRouting`.
        """
        tables = self.tables
        if not torch.compiler.is_compiling() and recomputing():  # the operator of graphs asks when it runs
            tables = tables.counting_nothing()
        if mask is not None:
            tokens, sent = without_rows(routing, mask.tokens), mask.sent
            if sent is False:
                return self._placed(tokens, tables)
            self._placed(tokens, tables).materialize()  # counts them
            tables = tables.counting_nothing()
            routing = routing if sent is True else without_rows(routing, sent)
        return self._placed(routing, tables)

    @staticmethod
    def _placed(routing: Routing, tables: Tables) -> PhysicalRouting:
        if torch.compiler.is_compiling():
            placed = place(routing.ids, *tables)
            return PhysicalRouting(cast("PhysicalIds", placed), routing.weights)
        return DeferredRouting(routing.ids, routing.weights, tables)

    @property
    def tables(self) -> Tables:
        """Views of the buffers that calls are placed and counted with."""
        own: Any = self._buffers  # a module's attributes are found by a walk, for which each call of a layer would pay
        return Tables(
            own["logical_to_physical"], own["replica_count"], own["expert_load"], own["slot_load"], own["counting"],
            self.invalid_ids.address, self._ep_rank * RANK_FACTOR,
        )  # fmt: skip

    @contextmanager
    def no_stats(self) -> Iterator[None]:
        """Count no forward within the block, nor replays of captured graphs: for warm-up and idle steps.

        Yields:
            Nothing.
        """
        before = self.counting.clone()
        self.counting.zero_()
        try:
            yield
        finally:
            self.counting.copy_(before)

    def choose(self, replicas: Replicas, *, ranks_per_node: int | None = None) -> None:
        """Use these replicas from now on, in place, as `update`. Call it on all ranks alike.

        Args:
            replicas: Which of an expert's replicas tokens of this rank go to.
            ranks_per_node: For NEAREST; consecutive ranks share a node. Default: as at construction.

        Raises:
            ConfigError: an argument is of a wrong kind, or `ranks_per_node` does not divide R.
        """
        ranks = self.expert_map.num_ranks
        per_node = self._found_per_node if ranks_per_node is None else ranks_per_node
        check_kind("replicas", replicas, Replicas)
        per_node = check_divides("ranks_per_node", per_node, ranks, "ranks of the EP group")
        self._replicas, self._ranks_per_node = replicas, per_node
        self._write(self.expert_map)

    def check(self, expert_map: ExpertMap) -> None:
        """Check that `update` can take a map.

        Args:
            expert_map: Must have the E, R and slots_per_rank of the map in force.

        Raises:
            ConfigError: a size differs, or a rank would need more slots than it has memory for.
        """
        check_kind("Placement.update: expert_map", expert_map, ExpertMap)
        old = self.expert_map
        for name in ("num_experts", "num_ranks", "slots_per_rank"):
            if getattr(expert_map, name) != getattr(old, name):
                raise ConfigError(
                    f"Placement.update needs a map with {name}={getattr(old, name)}, got {getattr(expert_map, name)}; "
                    f"make it for these sizes, or build the layer with expert_map="
                )
        for rank, room in enumerate(self.slots):
            if expert_map.num_slots(rank) > room:
                raise ConfigError(
                    f"Placement.update needs a map with at most {room} slots on rank {rank}, as at construction, got "
                    f"{expert_map.num_slots(rank)}; leave slots of the rank empty, or build the layer with expert_map="
                )
        if max(expert_map.replica_count) > self._max_replicas:
            raise ConfigError(
                f"Placement.update has room for {self._max_replicas} replicas of an expert, got "
                f"{max(expert_map.replica_count)}; take fewer replicas, or build the layer with expert_map="
            )

    def prepare(self, expert_map: ExpertMap) -> None:
        """Compute beforehand what `update` with this very map writes, which forwards would wait for. Changes nothing in
        force.

        Args:
            expert_map: As `check` takes it.

        Raises:
            ConfigError: as `check` raises it.
        """
        self.check(expert_map)
        self._ahead = expert_map, self._tables(expert_map)

    def update(self, expert_map: ExpertMap) -> None:
        """Put another map in force, in place: captured graphs and held references see it.

        Weights are not moved, and a layer refuses calls until they are (`ep_moe.eplb` does both).

        Args:
            expert_map: As `check` takes it.

        Raises:
            ConfigError: as `check` raises it.
        """
        if self._ahead is None or self._ahead[0] is not expert_map:
            self.check(expert_map)
        self.expert_map = expert_map
        self._write(expert_map)
        self.slot_load.zero_()

    def reset_load(self) -> None:
        """Count load from zero again."""
        self.resets += 1
        self.expert_load.zero_()
        self.slot_load.zero_()

    def rank_load(self) -> Tensor:
        """Sum the load of each rank's slots.

        Returns:
            int64 [R], routes per EP rank.
        """
        return self.slot_load.view(self.expert_map.num_ranks, -1).sum(1)

    def _write(self, expert_map: ExpertMap) -> None:
        ahead, self._ahead = self._ahead, None  # of no use to a writer of other tables, nor after them
        if self.replica_count.is_meta:
            return
        tables = ahead[1] if ahead is not None and ahead[0] is expert_map else self._tables(expert_map)
        for table, values in zip((self.logical_to_physical, self.replica_count), tables, strict=True):
            table.copy_(values, non_blocking=True)

    @on_device_of(lambda self, *_: self.replica_count.device)
    def _tables(self, expert_map: ExpertMap) -> list[Tensor]:
        """Of a map, on the host; pinned for a GPU: a map is put in force between two forwards, without a wait."""
        used = [self._used(ids, expert_map.slots_per_rank) for ids in expert_map.logical_to_physical]
        # a layer is made under `torch.device`, where what names no device would be on that one
        how: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
        pinned = self.replica_count.is_cuda
        count = torch.tensor([*map(len, used)], pin_memory=pinned, **how)
        table = torch.full((len(used), self._max_replicas), EMPTY, pin_memory=pinned, **how)
        filled = torch.arange(self._max_replicas, **how) < count.unsqueeze(1)
        table[filled] = torch.tensor([*chain.from_iterable(used)], **how)
        return [table, count]

    def _used(self, ids: tuple[int, ...], slots_per_rank: int) -> tuple[int, ...]:
        """Those of an expert's physical ids that this rank's tokens go to."""
        if self._replicas is Replicas.SPREAD:
            return ids
        node = self._ep_rank // self._ranks_per_node
        own = tuple(slot for slot in ids if slot // slots_per_rank == self._ep_rank)
        return own or tuple(slot for slot in ids if slot // slots_per_rank // self._ranks_per_node == node) or ids

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Placement:
        """After `to_empty` the buffers hold noise, and nothing tells that from a move: the tables are written again
        from the map on the host, and loads begin anew."""
        super()._apply(fn, recurse)
        if self.invalid_ids.device != self.counting.device:
            self.invalid_ids = InvalidIds(self.counting.device)
        if not self.replica_count.is_meta:
            self._write(self.expert_map)
            self.reset_load()
            self.counting.fill_(1)
        return self

    def extra_repr(self) -> str:
        """Describe the map in force, for `print`."""
        return repr(self.expert_map)


# --- what placements counted ------------------------------------------------------------------------------------------


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


def balancedness(load: list[float] | list[int]) -> float:
    """Mean over ranks divided by the maximum: 1 is even, 1 / R is everything on one rank. 1 for no load."""
    most = max(load, default=0)
    return sum(load) / len(load) / most if most else 1.0


def layer_stats(name: str, placement: Placement, ep: RankGroup) -> LayerStats:
    """As counted since the last `reset_load` (per rank also since the last `update`). Collective over the EP group,
    waits for the device."""
    counts = torch.cat([placement.expert_load, placement.rank_load()])
    with ep.flight_recorder.step("stats"):
        rows = ep.exchange(counts)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    experts = placement.expert_map.num_experts
    return LayerStats(name, tuple(sums[:experts]), tuple(map(float, sums[experts:])))


@dataclass(frozen=True)
class NodeLimit:
    """How far groups of experts limit the nodes of a token (node-limited routing; DeepSeek-V3, arXiv:2412.19437, 2.1).

    Args:
        nodes: Of the EP group.
        groups: Groups of experts.
        top_groups: Groups that a token chooses from.
        most: Nodes that the experts of a token are on, at most.
        apart: Groups with experts on several nodes.
    """

    nodes: int
    groups: int
    top_groups: int
    most: int
    apart: tuple[int, ...]

    @classmethod
    def of(cls, config: MoEConfig, layout: RankLayout, expert_map: ExpertMap | None = None) -> NodeLimit | None:
        """Find the nodes of each group.

        Args:
            config: The layer, with groups in `config.routing`.
            layout: Of the ranks.
            expert_map: Where experts are, copies too. Default: the linear map.

        Returns:
            The limit, None where a token may go to every node whatever the map: one node, a router that does not
            choose groups, or as many groups as nodes.
        """
        routing, parts = config.routing, layout.ep_nodes
        if routing.top_groups == routing.num_groups or min(routing.top_groups, config.top_k) >= len(parts):
            return None
        placed = ExpertMap.linear(config.num_experts, layout.ep) if expert_map is None else expert_map
        per_group, group = config.num_experts // routing.num_groups, layout.group("ep")
        found: list[set[int]] = [set() for _ in range(routing.num_groups)]
        for node, ranks in enumerate(parts):
            for rank in ranks:
                for expert in placed.local(group.index(rank)):
                    if expert >= 0:
                        found[expert // per_group].add(node)
        widest = sorted(map(len, found), reverse=True)[: routing.top_groups]
        return cls(
            nodes=len(parts),
            groups=routing.num_groups,
            top_groups=routing.top_groups,
            most=min(sum(widest), config.top_k, len(parts)),
            apart=tuple(number for number, nodes in enumerate(found) if len(nodes) > 1),
        )

    def __str__(self) -> str:
        """A sentence for `explain`."""
        chosen = f"a token chooses {self.top_groups} of {self.groups} groups of experts"
        if not self.apart:
            return f"{chosen}, each on one node, and so goes to {self.most} of {self.nodes} nodes at most"
        names = ", ".join(map(str, self.apart))
        several = f"group {names} is" if len(self.apart) == 1 else f"groups {names} are"
        return (
            f"{chosen}, but {several} on several nodes of this map, and so a token goes to up to {self.most} of "
            f"{self.nodes} nodes"
        )
