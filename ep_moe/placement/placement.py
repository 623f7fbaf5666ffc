"""Placement: maps logical ids to physical ids on the device, by tables that are rewritten in place."""

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
    """To which replicas of an expert a rank sends its tokens.

    SPREAD   to all replicas, evenly
    NEAREST  to the replica on this rank if there is one, else evenly to those on this node, else to all. Fewer rows are
             sent between ranks, but ranks are balanced less well.
    """

    SPREAD = "spread"
    NEAREST = "nearest"


class Placement(nn.Module):
    """Chooses a replica for every route and counts the load. It has only buffers, and none is in the state dict.

    The choice depends only on the row number, the expert and the EP rank. The members of an etp group have the same
    rows and the same EP rank, so they choose the same replicas.

    Args:
        expert_map: The placement of experts.
        ep_rank: This rank's place in its EP group.
        ranks_per_node: The number of consecutive ranks that share a node. Default: all ranks.

    Attributes:
        expert_map: The current map.
        expert_load: int64 [E], routes per logical expert since `reset_load`. Routes with id -1 are not counted.
        slot_load: int64 [P], routes per physical expert since `reset_load` or `update`.
        resets: The number of calls of `reset_load`.
        invalid_ids: The report of kernels about invalid logical ids.
        slots: [R], the slots that each rank has memory for: those of the map at construction.
    """

    logical_to_physical: Tensor  # int64 [E, max_replicas], padded with -1; the replicas that this rank uses
    replica_count: Tensor  # int64 [E]
    expert_load: Tensor
    slot_load: Tensor
    counting: Tensor  # int64 [], 1, or 0 within `no_stats`; on the device, so that replays of CUDA graphs read it

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
        # room for any later map: an expert has at most one replica per rank, and at most 1 + the redundant slots
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
        """Replace logical by physical ids, and count the load.

        Ids are placed later, when the transport needs them (`DeferredRouting`). In a backward pass nothing is counted,
        because activation checkpointing repeats a forward that was counted before.

        An invalid id, outside [-1, E), becomes an id outside [-1, P). Dispatchers that wait for the device raise an
        error about it on all ranks; others drop the route. On a GPU the kernels also report it to `invalid_ids`.

        Args:
            routing: Logical ids [T, K]; -1 stays -1.
            mask: Which rows are tokens. Padding is not counted. It is placed only if the mask says that it is sent.

        Returns:
            Physical ids [T, K] and the weights, as a `DeferredRouting`.
        """
        tables = self.tables
        if not torch.compiler.is_compiling() and recomputing():  # in compiled graphs the operator checks it at run time
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
        """The buffers that place and count a call."""
        own: Any = self._buffers  # faster than attributes of a Module, and each call of a layer reads them
        return Tables(
            own["logical_to_physical"], own["replica_count"], own["expert_load"], own["slot_load"], own["counting"],
            self.invalid_ids.address, self._ep_rank * RANK_FACTOR,
        )  # fmt: skip

    @contextmanager
    def no_stats(self) -> Iterator[None]:
        """Count no load in the block, neither of forwards nor of CUDA graph replays: for warm-up and idle steps.

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
        """Set which replicas tokens are sent to. CUDA graphs see the change, as with `update`.

        Call it on all ranks with the same arguments.

        Args:
            replicas: To which replicas of an expert a rank sends its tokens.
            ranks_per_node: For NEAREST: the number of consecutive ranks that share a node. Default: as at construction.

        Raises:
            ConfigError: an argument has a wrong type, or `ranks_per_node` does not divide R.
        """
        ranks = self.expert_map.num_ranks
        per_node = self._found_per_node if ranks_per_node is None else ranks_per_node
        check_kind("replicas", replicas, Replicas)
        per_node = check_divides("ranks_per_node", per_node, ranks, "ranks of the EP group")
        self._replicas, self._ranks_per_node = replicas, per_node
        self._write(self.expert_map)

    def check(self, expert_map: ExpertMap) -> None:
        """Raise ConfigError unless `update` can take a map.

        Args:
            expert_map: Must have the E, R and slots_per_rank of the current map.

        Raises:
            ConfigError: a size differs, a rank would need more slots than it has memory for, or an expert has more
                replicas than the tables have room for.
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
        """Compute the tables of a map ahead of `update`, so that `update` with the same object is short.

        The current map stays in use.

        Args:
            expert_map: As in `check`.

        Raises:
            ConfigError: as in `check`.
        """
        self.check(expert_map)
        self._ahead = expert_map, self._tables(expert_map)

    def update(self, expert_map: ExpertMap) -> None:
        """Replace the expert map. The buffers are rewritten in place, so CUDA graphs use the new map.

        Weights are not moved. A layer refuses calls until its weights are moved too (`ep_moe.eplb` does both).

        Args:
            expert_map: As in `check`.

        Raises:
            ConfigError: as in `check`.
        """
        if self._ahead is None or self._ahead[0] is not expert_map:
            self.check(expert_map)
        self.expert_map = expert_map
        self._write(expert_map)
        self.slot_load.zero_()

    def reset_load(self) -> None:
        """Set the load counters to zero."""
        self.resets += 1
        self.expert_load.zero_()
        self.slot_load.zero_()

    def rank_load(self) -> Tensor:
        """Return the load per rank, the sum over its slots.

        Returns:
            int64 [R], routes per EP rank.
        """
        return self.slot_load.view(self.expert_map.num_ranks, -1).sum(1)

    def _write(self, expert_map: ExpertMap) -> None:
        ahead, self._ahead = self._ahead, None  # prepared tables are used once, and only for the same map
        if self.replica_count.is_meta:
            return
        tables = ahead[1] if ahead is not None and ahead[0] is expert_map else self._tables(expert_map)
        for table, values in zip((self.logical_to_physical, self.replica_count), tables, strict=True):
            table.copy_(values, non_blocking=True)

    @on_device_of(lambda self, *_: self.replica_count.device)
    def _tables(self, expert_map: ExpertMap) -> list[Tensor]:
        """Return `logical_to_physical` and `replica_count` of a map, on the host.

        For a GPU the memory is pinned, so that copying it to the device does not wait.
        """
        used = [self._used(ids, expert_map.slots_per_rank) for ids in expert_map.logical_to_physical]
        # names the device: a layer is constructed under `torch.device(...)`, which changes the default
        how: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
        pinned = self.replica_count.is_cuda
        count = torch.tensor([*map(len, used)], pin_memory=pinned, **how)
        table = torch.full((len(used), self._max_replicas), EMPTY, pin_memory=pinned, **how)
        filled = torch.arange(self._max_replicas, **how) < count.unsqueeze(1)
        table[filled] = torch.tensor([*chain.from_iterable(used)], **how)
        return [table, count]

    def _used(self, ids: tuple[int, ...], slots_per_rank: int) -> tuple[int, ...]:
        """Return the physical ids of an expert to which this rank sends its tokens. ids: all of the expert's"""
        if self._replicas is Replicas.SPREAD:
            return ids
        node = self._ep_rank // self._ranks_per_node
        own = tuple(slot for slot in ids if slot // slots_per_rank == self._ep_rank)
        return own or tuple(slot for slot in ids if slot // slots_per_rank // self._ranks_per_node == node) or ids

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Placement:
        """Apply fn (`to`, `to_empty`, ...) to the buffers, then write the tables again and reset the load.

        After `to_empty` the buffers hold arbitrary values, and this method cannot distinguish it from `to`.
        """
        super()._apply(fn, recurse)
        if self.invalid_ids.device != self.counting.device:
            self.invalid_ids = InvalidIds(self.counting.device)
        if not self.replica_count.is_meta:
            self._write(self.expert_map)
            self.reset_load()
            self.counting.fill_(1)
        return self

    def extra_repr(self) -> str:
        """Describe the current map, for `print`."""
        return repr(self.expert_map)


# --- load statistics --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerStats:
    """The load of one layer, summed over the EP group.

    Args:
        name: The layer's name.
        expert_load: [E], routes per logical expert.
        rank_load: [R], routes per EP rank.
    """

    name: str
    expert_load: tuple[int, ...]
    rank_load: tuple[float, ...]

    @property
    def balancedness(self) -> float:
        """Mean over ranks / maximum over ranks of `rank_load`; 1 without load."""
        return balancedness(list(self.rank_load))


def balancedness(load: list[float] | list[int]) -> float:
    """Return the mean load over ranks divided by the maximum.

    1 means an even load (or none), 1 / R means that one rank has all of it.
    """
    most = max(load, default=0)
    return sum(load) / len(load) / most if most else 1.0


def layer_stats(name: str, placement: Placement, ep: RankGroup) -> LayerStats:
    """Return the load since the last `reset_load` (per rank: since the last `reset_load` or `update`).

    Collective over the EP group. Waits for the device.
    """
    counts = torch.cat([placement.expert_load, placement.rank_load()])
    with ep.flight_recorder.step("stats"):
        rows = ep.exchange(counts)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    experts = placement.expert_map.num_experts
    return LayerStats(name, tuple(sums[:experts]), tuple(map(float, sums[experts:])))


@dataclass(frozen=True)
class NodeLimit:
    """The number of nodes that a token can be sent to under group-limited routing.

    If each group of experts is on one node, a token that chooses few groups goes to few nodes (node-limited routing;
    DeepSeek-V3, arXiv:2412.19437, 2.1).

    Args:
        nodes: The number of nodes of the EP group.
        groups: The number of expert groups.
        top_groups: The number of groups that a token chooses from.
        most: The most nodes that the experts of a token are on.
        split_groups: The groups whose experts are on several nodes.
    """

    nodes: int
    groups: int
    top_groups: int
    most: int
    split_groups: tuple[int, ...]

    @classmethod
    def of(cls, config: MoEConfig, layout: RankLayout, expert_map: ExpertMap | None = None) -> NodeLimit | None:
        """Compute the limit for a layer.

        Args:
            config: The layer, with groups in `config.routing`.
            layout: The layout of the ranks.
            expert_map: The placement of experts, including replicas. Default: the linear map.

        Returns:
            The limit. None if routing sets none, whatever the map: the EP group is on one node, the router does not
            choose groups, or a token chooses at least as many groups as there are nodes.
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
            split_groups=tuple(number for number, nodes in enumerate(found) if len(nodes) > 1),
        )

    def __str__(self) -> str:
        """Describe the limit in a sentence, for `MoELayer.explain`."""
        chosen = f"a token chooses {self.top_groups} of {self.groups} groups of experts"
        if not self.split_groups:
            return f"{chosen}, each on one node, and so goes to {self.most} of {self.nodes} nodes at most"
        names = ", ".join(map(str, self.split_groups))
        several = f"group {names} is" if len(self.split_groups) == 1 else f"groups {names} are"
        return (
            f"{chosen}, but {several} on several nodes of this map, and so a token goes to up to {self.most} of "
            f"{self.nodes} nodes"
        )
