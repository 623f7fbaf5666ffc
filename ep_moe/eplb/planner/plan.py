"""From load to one ExpertMap per layer. Pure: numpy arrays in, maps out; nothing is random.

Per layer, three maps are compared:

    current    the one in force. It stays where it is balanced already
    adapted    the current one with as few changes as bring every rank to the goal
    fresh      the published algorithm of DeepSeek's EPLB (groups to nodes, copies, copies to ranks, each greedily), its
               ranks renamed after the current ones, then refined

and the cheapest that is good enough is taken.
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

_PASSES = 4  # over layers that end above the goal


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
    """Plan a map per layer for a load.

    No rank holds an expert twice. A layer that changes is at least as balanced as under the published algorithm
    (DeepSeek's EPLB), or as balanced as `enough` asks for. With tolerance=0 and enough=1 this holds for every layer.

    Exception: the published plan may put an expert twice on a rank, and then no legal map need be as balanced. The
    result is then the best map that the search finds. It is the best there is where one node's ranks can be filled in
    at most 30,000 ways (`search.FEW`).

    Args:
        load: [layers, E], routes per logical expert in any unit, not negative.
        current: The maps in force, one per layer, alike in E and R.
        groups: Experts [g * E / groups, (g + 1) * E / groups) are group g. Where groups % nodes == 0 and every node has
            room for groups / nodes groups, all copies of a group are on one node; else nodes play no part.
        nodes: Ranks [n * R / nodes, (n + 1) * R / nodes) are node n.
        dead_ranks: Ranks that get no experts.
        slots: [R] or [layers, R], experts that a rank has memory for. Default: the slots in use in `current`.
        tolerance: A layer stays as it is where its fullest rank is at most this fraction above the mean rank. It also
            stays where it is as balanced as the published algorithm would make it and the new map would take less than
            this fraction off the fullest rank.
        enough: Balancedness (mean rank / fullest rank) at which a layer is not changed further. A smaller value moves
            fewer experts.

    Returns:
        A map per layer; `current[l]` itself where layer l stays as it is.

    Raises:
        ConfigError: an argument is of a wrong kind, out of range or does not fit the others.
        NoRoom: the living ranks have too few slots for all experts.
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
    """int64 [L, R, S]: the new tables, equal to `now` in layers that stay."""
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
    """The tables after one pass; bool [L], a further pass would be in vain."""
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
    """The adapted tables, or the refined fresh ones where those are needed; and their fullest ranks, float64 [L]."""
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
    """Every node of every layer has room for its share of the experts."""
    return bool((room.reshape(len(room), nodes, -1).sum(2) >= experts // nodes).all())


def _tables(current: Sequence[ExpertMap], least: int) -> Ints:
    """int64 [L, R, S] of the maps, S = the largest `slots_per_rank` or `least`, EMPTY where a map has no slot."""
    ranks = current[0].num_ranks
    width = max(least, *(held.slots_per_rank for held in current))
    tables = np.full((len(current), ranks, width), EMPTY)
    for slots_per_rank in {held.slots_per_rank for held in current}:
        alike = [layer for layer, held in enumerate(current) if held.slots_per_rank == slots_per_rank]
        flat = [current[layer].physical_to_logical for layer in alike]
        tables[alike, :, :slots_per_rank] = np.array(flat).reshape(-1, ranks, slots_per_rank)
    return tables


def _map(table: Ints, held: ExpertMap, room: int) -> ExpertMap:
    """The table as a map of the current one's `slots_per_rank`, or wider where `slots` says so; the current one if it
    is equal."""
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
    """int64 [L, R]: slots of each rank, none on the dead."""
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
