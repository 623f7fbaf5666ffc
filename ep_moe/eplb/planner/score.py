"""Scores maps: load per rank, and the experts that must move from one map to another, by the link they travel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep_moe.checks import as_whole, check_count, check_divides, shown
from ep_moe.eplb.planner.packing import Bools, Floats, Ints, holders, rank_loads
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY, ExpertMap

MOST_LOAD = 1e100  # largest load of one expert, so that sums over experts and their squares stay finite


def loads_by_rank(load: Any, maps: Sequence[ExpertMap]) -> Floats:
    """Sum the load of each rank. The copies of an expert share its load equally.

    Args:
        load: [layers, E], at least 0.
        maps: One per layer.

    Returns:
        float64 [layers, R].

    Raises:
        ConfigError: `load` and `maps` have a wrong type or do not fit each other.
    """
    if not isinstance(maps, Sequence) or not all(isinstance(held, ExpertMap) for held in maps):
        raise ConfigError(f"maps must be a sequence of ExpertMaps, one per layer, got {shown(maps)}")
    loads = checked_loads("load", load)
    if not len(maps) or loads.shape != (len(maps), maps[0].num_experts):
        raise ConfigError(f"load must be [layers, E] for {len(maps)} maps, got shape {list(loads.shape)}")
    for layer, held in enumerate(maps):
        if (held.num_experts, held.num_ranks) != (maps[0].num_experts, maps[0].num_ranks):
            raise ConfigError(f"maps must be alike in E and R, got {maps[0]} and, in layer {layer}, {held}")
    return np.stack([rank_loads(one[None], table_of(held)[None])[0] for one, held in zip(loads, maps, strict=True)])


def checked_loads(name: str, load: Any) -> Floats:
    """Return loads as float64, in the given shape. Raise ConfigError unless they are in [0, MOST_LOAD]."""
    try:
        given = np.asarray(load)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be an array of numbers, got {type(load).__name__}: {error}") from None
    if given.dtype.kind not in "iuf":
        raise ConfigError(f"{name} must be an array of numbers, got dtype {given.dtype}: {shown(load)}")
    loads = given.astype(np.float64)
    if loads.size and not (np.isfinite(loads).all() and (loads >= 0).all() and (loads <= MOST_LOAD).all()):
        limit = f" and at most {MOST_LOAD:g}" if loads.max() > MOST_LOAD else ""
        raise ConfigError(f"{name} must be finite loads of at least 0{limit}, got {loads.min()} to {loads.max()}")
    return loads


def balancedness(ranks: Any, *, dead_ranks: Collection[int] = ()) -> Floats:
    """Compute the balancedness of each layer: mean rank load / largest rank load.

    Args:
        ranks: [layers, R], the load of each rank.
        dead_ranks: Ranks to ignore.

    Returns:
        float64 [layers]; 1 for a layer without load.

    Raises:
        ConfigError: `ranks` are not valid loads, or no rank is left.
    """
    mean, full = _mean_and_fullest(ranks, dead_ranks)
    return np.divide(mean, full, out=np.ones_like(mean), where=full > 0)


def critical_path(ranks: Any, *, dead_ranks: Collection[int] = ()) -> float:
    """Compute the balancedness of all layers together, in which layers with more load weigh more.

    Args:
        ranks: [layers, R], the load of each rank.
        dead_ranks: Ranks to ignore.

    Returns:
        Sum over layers of the mean rank load / sum over layers of the largest rank load; 1 without load.

    Raises:
        ConfigError: `ranks` are not valid loads, or no rank is left.
    """
    mean, full = _mean_and_fullest(ranks, dead_ranks)
    return float(mean.sum() / full.sum()) if full.sum() > 0 else 1.0


def _mean_and_fullest(ranks: Any, dead_ranks: Collection[int]) -> tuple[Floats, Floats]:
    loads = checked_loads("ranks", ranks)
    if loads.ndim != 2:
        raise ConfigError(f"ranks must be loads [layers, R], got shape {list(loads.shape)}")
    alive = np.delete(loads, dead_of(loads.shape[1], dead_ranks), axis=1)
    if not alive.shape[1]:
        raise ConfigError(f"dead_ranks must leave a rank alive, got all {loads.shape[1]}")
    return alive.mean(1), alive.max(1)


def dead_of(ranks: int, dead_ranks: Collection[int]) -> list[int]:
    """Return the dead ranks sorted, without duplicates. Raise ConfigError for one that is out of range."""
    if not isinstance(dead_ranks, Iterable) or isinstance(dead_ranks, str):
        raise ConfigError(f"dead_ranks must be a collection of ranks in [0, {ranks}), got {shown(dead_ranks)}")
    found = [as_whole(rank) for rank in dead_ranks]
    for rank, given in zip(found, dead_ranks, strict=True):
        if rank is None or not 0 <= rank < ranks:
            raise ConfigError(f"dead_ranks must be ranks in [0, {ranks}), got {shown(given)}")
    return sorted({rank for rank in found if rank is not None})


@dataclass(frozen=True, eq=False)
class Traffic:
    """The number of experts that each rank receives in a change from one map to another.

    Args:
        local: int64 [layers, R], experts that the rank has already and that change their slot.
        same_node: int64 [layers, R], experts that come from a rank of the same node.
        other_node: int64 [layers, R], experts that come from another node, because no rank of this node has them.
        lost: int64 [layers, R], experts that no living rank has. They must come from a checkpoint.
        expert_bytes: Bytes of one expert's weights and scales.
    """

    local: Ints
    same_node: Ints
    other_node: Ints
    lost: Ints
    expert_bytes: int

    @property
    def local_bytes(self) -> int:
        """Bytes of `local`, all layers and ranks."""
        return int(self.local.sum()) * self.expert_bytes

    @property
    def same_node_bytes(self) -> int:
        """Bytes of `same_node`, all layers and ranks."""
        return int(self.same_node.sum()) * self.expert_bytes

    @property
    def other_node_bytes(self) -> int:
        """Bytes of `other_node`, all layers and ranks."""
        return int(self.other_node.sum()) * self.expert_bytes

    @property
    def lost_bytes(self) -> int:
        """Bytes of `lost`, all layers and ranks."""
        return int(self.lost.sum()) * self.expert_bytes

    @property
    def moved(self) -> int:
        """Experts that change their rank."""
        return int((self.same_node + self.other_node + self.lost).sum())


def traffic(
    old: Sequence[ExpertMap],
    new: Sequence[ExpertMap],
    *,
    expert_bytes: int,
    ranks_per_node: int | None = None,
    dead_ranks: Collection[int] = (),
) -> Traffic:
    """Count the experts that must move from `old` to `new`. A rank receives an expert once, for all of its slots.

    Args:
        old: The maps in force, one per layer.
        new: The planned maps.
        expert_bytes: Bytes of one expert's weights and scales.
        ranks_per_node: Number of consecutive ranks that share a node. Default: all ranks.
        dead_ranks: Ranks from which nothing can be fetched.

    Returns:
        The number of experts by the link they travel.

    Raises:
        ConfigError: The maps do not fit each other, or a number is out of range.
    """
    if len(old) != len(new) or not old:
        raise ConfigError(f"traffic needs as many old maps as new ones, at least one, got {len(old)} and {len(new)}")
    ranks = old[0].num_ranks
    per_node = ranks if ranks_per_node is None else ranks_per_node
    check_divides("ranks_per_node", per_node, ranks, "ranks of the maps")
    check_count("expert_bytes", expert_bytes, at_least=0)
    found = np.stack([_received(a, b, per_node, dead_ranks) for a, b in zip(old, new, strict=True)], axis=1)
    local, same_node, other_node, lost = found
    return Traffic(local, same_node, other_node, lost, expert_bytes)


def _received(old: ExpertMap, new: ExpertMap, per_node: int, dead_ranks: Collection[int]) -> Ints:
    """Return local, same_node, other_node and lost of one layer, int64 [4, R]."""
    if (old.num_experts, old.num_ranks) != (new.num_experts, new.num_ranks):
        raise ConfigError(f"traffic needs maps alike in E and R, got {old} and {new}")
    has, wants = _held(old), _held(new)
    has[dead_of(old.num_ranks, dead_ranks)] = False
    near = has.reshape(-1, per_node, old.num_experts).any(1).repeat(per_node, 0)
    come = wants & ~has
    within, without, gone = come & near, come & ~near & has.any(0), come & ~has.any(0)
    return np.stack([_shifted(old, new), within.sum(1), without.sum(1), gone.sum(1)])


def _held(held: ExpertMap) -> Bools:
    return np.asarray(holders(table_of(held)[None], held.num_experts)[0])


def _shifted(old: ExpertMap, new: ExpertMap) -> Ints:
    """Return the number of experts that stay on their rank but change their slot, int64 [R]."""
    slots = max(old.slots_per_rank, new.slots_per_rank)
    before, after = table_of(old, slots), table_of(new, slots)
    stays = np.take_along_axis(_held(old), np.maximum(after, 0), 1) & (after != EMPTY)
    return np.asarray((stays & (before != after)).sum(1))


def table_of(held: ExpertMap, slots: int = 0) -> Ints:
    """Return the expert in each slot, int64 [R, S]. S is the map's `slots_per_rank`, at least `slots`."""
    table = np.full((held.num_ranks, max(slots, held.slots_per_rank)), EMPTY)
    table[:, : held.slots_per_rank] = np.reshape(held.physical_to_logical, (held.num_ranks, held.slots_per_rank))
    return table
