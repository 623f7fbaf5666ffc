"""Plans one ExpertMap per layer from load. Pure functions of numpy arrays, without randomness.

For each layer the planner compares three maps:

    current    the map in force. It stays if it is balanced already
    adapted    the current map with few changes that bring every rank to the goal
    fresh      the published algorithm of DeepSeek's EPLB (groups to nodes, number of copies, copies to ranks, each
               greedily). Its ranks are renamed to match the current map, and then it is refined

It takes the first of them that is good enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ep_moe.checks import check_divides, check_not_negative, check_share, shown
from ep_moe.eplb.planner.candidates import (
    SLACK,
    Fresh,
    Problem,
    adapted,
    fullest_rank,
    legal_layers,
    make_fresh,
    occupied,
    refined,
)
from ep_moe.eplb.planner.packing import ABSENT, Bools, Floats, Ints, relabel_slots
from ep_moe.eplb.planner.score import checked_loads, dead_of
from ep_moe.errors import ConfigError, NoRoom
from ep_moe.placement.expert_map import EMPTY, ExpertMap

_PASSES = 4  # the most passes over layers that are still above the goal


def plan(
    load: Any,
    current: Sequence[ExpertMap],
    *,
    groups: int = 1,
    nodes: int = 1,
    dead_ranks: Collection[int] = (),
    slots: Any = None,
    tolerance: float = 0.01,
    enough: float = 1.0,
) -> list[ExpertMap]:
    """Plan one map per layer for a load.

    No rank holds an expert twice. A layer that changes is at least as balanced as under the published algorithm
    (DeepSeek's EPLB), or as balanced as `enough` requires. With tolerance=0 and enough=1 this holds for every layer.

    Exception: the published algorithm may put an expert twice on a rank. Then there may be no legal map that is as
    balanced, and the result is the best map that the search finds. It is optimal if one node's ranks can be filled in
    at most 30,000 ways (`search.FEW`).

    Args:
        load: [layers, E], routes per logical expert in any unit, not negative.
        current: The maps in force, one per layer, all with the same E and R.
        groups: Number of expert groups. Group g is experts [g * E / groups, (g + 1) * E / groups). All copies of a
            group are on one node if groups % nodes == 0 and every node has room for groups / nodes groups. Otherwise
            nodes are ignored.
        nodes: Number of nodes. Node n is ranks [n * R / nodes, (n + 1) * R / nodes).
        dead_ranks: Ranks that get no experts.
        slots: [R] or [layers, R], number of experts that a rank has memory for. Default: the slots in use in `current`.
        tolerance: A layer is left unchanged if its largest rank load exceeds the mean by at most this fraction. It is
            also left unchanged if it is as balanced as under the published algorithm, and the new map would reduce the
            largest rank load by less than this fraction.
        enough: Balancedness (mean rank load / largest rank load) at which a layer is not changed further. A smaller
            value moves fewer experts.

    Returns:
        One map per layer; `current[l]` itself if layer l is unchanged.

    Raises:
        ConfigError: An argument has a wrong type, is out of range or does not fit the others.
        NoRoom: The ranks that are alive have too few slots for all experts.
    """
    current = _checked_maps(current)
    loads = _checked_load(load, current)
    room = _checked_room(current, slots, dead_ranks)
    groups = check_divides("plan: groups", groups, loads.shape[1], "experts")
    nodes = check_divides("plan: nodes", nodes, current[0].num_ranks, "ranks")
    tolerance, enough = check_not_negative("plan: tolerance", tolerance), check_share("plan: enough", enough)
    now = _tables(current, int(room.max()))
    now[(now == EMPTY) & (np.arange(now.shape[2]) >= room[:, :, None])] = ABSENT
    if groups % nodes or not _fits(room, loads.shape[1], nodes):
        groups = nodes = 1
    planned = _plan(Problem(loads, now, room, groups, nodes, tolerance, enough))
    return [_map(table, held, int(own.max())) for table, held, own in zip(planned, current, room, strict=True)]


def _plan(problem: Problem) -> Ints:
    """Return the new tables, int64 [L, R, S]. Unchanged layers are equal to `now`."""
    before, legal = fullest_rank(problem, problem.now), legal_layers(problem)
    peace = np.maximum(problem.mean * (1 + problem.tolerance), problem.mean / problem.enough) * SLACK
    layers = np.flatnonzero(~legal | (before > peace))
    planned = problem.now.copy()
    for _ in range(_PASSES):
        if not layers.size:
            break
        part = replace(problem.only(layers), now=planned[layers])
        found, done = _improved(part)
        changed = np.flatnonzero((found != part.now).any((1, 2)))
        found, old = occupied(part.only(changed), found[changed]), problem.now[layers[changed]]
        planned[layers[changed]] = relabel_slots(old, found, problem.load.shape[1])
        layers = layers[~done]
    return planned


def _improved(problem: Problem) -> tuple[Ints, Bools]:
    """Run one pass. Return the tables, and bool [L]: a further pass cannot improve the layer."""
    before, legal = fullest_rank(problem, problem.now), legal_layers(problem)
    fresh = make_fresh(problem)
    enough = problem.mean / problem.enough
    goal = np.maximum(np.minimum(fresh.published, fresh.bound * (1 + problem.tolerance)), enough) * SLACK
    stays = legal & (before <= goal)
    tables, after = problem.now.copy(), before.copy()
    layers = np.flatnonzero(~stays)
    if layers.size:
        tables[layers], after[layers] = _best(problem.only(layers), fresh.only(layers), goal[layers])
        gain = after[layers] * SLACK < before[layers] * (1 - problem.tolerance)
        stays[layers] = legal[layers] & (before <= fresh.published * SLACK)[layers] & ~gain
        tables[stays], after[stays] = problem.now[stays], before[stays]
    return tables, stays | (after <= goal)


def _best(problem: Problem, fresh: Fresh, goal: Floats) -> tuple[Ints, Floats]:
    """Return the adapted tables, or the refined fresh ones in layers that need them, and the largest loads [L]."""
    tables = adapted(problem, goal, fresh)
    full = fullest_rank(problem, tables)
    short = np.flatnonzero(full > goal)
    if short.size:
        other = refined(problem.only(short), fresh.only(short), goal[short])
        less = fullest_rank(problem.only(short), other)
        better = (full > fresh.published * SLACK)[short] & (less < full[short])
        better |= less * (1 + problem.tolerance) * SLACK < full[short]
        tables[short[better]], full[short[better]] = other[better], less[better]
    return tables, full


def _fits(room: Ints, experts: int, nodes: int) -> bool:
    """Return whether every node of every layer has slots for its share of the experts."""
    return bool((room.reshape(len(room), nodes, -1).sum(2) >= experts // nodes).all())


def _tables(current: Sequence[ExpertMap], least: int) -> Ints:
    """Convert maps to a table int64 [L, R, S], EMPTY where a map has no slot.

    S is the largest `slots_per_rank`, at least `least`.
    """
    ranks = current[0].num_ranks
    width = max(least, *(held.slots_per_rank for held in current))
    tables = np.full((len(current), ranks, width), EMPTY)
    for slots_per_rank in {held.slots_per_rank for held in current}:
        alike = [layer for layer, held in enumerate(current) if held.slots_per_rank == slots_per_rank]
        flat = [current[layer].physical_to_logical for layer in alike]
        tables[alike, :, :slots_per_rank] = np.array(flat).reshape(-1, ranks, slots_per_rank)
    return tables


def _map(table: Ints, held: ExpertMap, room: int) -> ExpertMap:
    """Convert a table to a map; return the current map itself if they are equal.

    The map has the current one's `slots_per_rank`, or `room` if that is larger.
    """
    slots_per_rank = max(held.slots_per_rank, room)
    flat = tuple(np.maximum(table[:, :slots_per_rank], EMPTY).ravel().tolist())
    return held if flat == held.physical_to_logical else ExpertMap(held.num_experts, held.num_ranks, flat)


def _checked_maps(current: object) -> list[ExpertMap]:
    if not isinstance(current, Sequence) or not all(isinstance(held, ExpertMap) for held in current):
        raise ConfigError(f"plan: current must be a sequence of ExpertMaps, one per layer, got {shown(current)}")
    return list(current)


def _checked_load(load: Any, current: Sequence[ExpertMap]) -> Floats:
    loads = checked_loads("plan: load", load)
    if not len(current) or loads.shape != (len(current), current[0].num_experts):
        raise ConfigError(
            f"plan needs load [layers, E] for the maps given, got shape {list(loads.shape)} and {len(current)} maps"
            + (f" of {current[0].num_experts} experts" if len(current) else "")
        )
    for layer, held in enumerate(current):
        if (held.num_experts, held.num_ranks) != (current[0].num_experts, current[0].num_ranks):
            raise ConfigError(f"plan needs maps alike in E and R, got {current[0]} and, in layer {layer}, {held}")
    return loads


def _checked_room(current: Sequence[ExpertMap], slots: Any, dead_ranks: Collection[int]) -> Ints:
    """Return the slots of each rank, int64 [L, R]; 0 for dead ranks. Raise if they are too few."""
    ranks, experts = current[0].num_ranks, current[0].num_experts
    if slots is None:
        taken = _tables(current, 1) != EMPTY
        room = np.where(taken.any(2), taken.shape[2] - taken[:, :, ::-1].argmax(2), 0)
    else:
        try:
            given = np.asarray(slots)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"plan: slots must be an array of integers, got {type(slots).__name__}") from error
        if given.shape not in ((ranks,), (len(current), ranks)) or given.dtype.kind not in "iu" or (given < 0).any():
            raise ConfigError(f"plan needs slots as integers of at least 0, [{ranks}] or [{len(current)}, {ranks}]")
        room = np.broadcast_to(given, (len(current), ranks)).astype(np.int64)
    room[:, dead_of(ranks, dead_ranks)] = 0
    layer = int(np.minimum(room, experts).sum(1).argmin())
    have = int(room[layer].sum())
    if have < experts:
        raise NoRoom(
            f"plan: the {ranks - len(set(dead_ranks))} ranks alive have {have} slots for {experts} experts in layer "
            f"{layer}; bring ranks back or give the rest more slots"
        )
    return room
