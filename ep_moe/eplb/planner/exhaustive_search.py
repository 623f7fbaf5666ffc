"""A wider search for the few rows in which `refine` stays above what the published algorithm reaches by putting an
expert twice on a rank. Slow (milliseconds a row), and exact where there are few maps.

Shapes and letters as in `packing`.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from ep_moe.eplb.planner import packing
from ep_moe.eplb.planner.local_search import refine
from ep_moe.eplb.planner.packing import ABSENT, Floats, Ints
from ep_moe.placement.expert_map import EMPTY

FEW = 30_000  # a row with so many maps has all of them tried
_STARTS = 128
_CELLS = 400_000  # ranks times experts, over all starts: large rows get few
_WORTHWHILE = 8
_DEPTH = 6
_ROOM = 2_000_000  # slots in all neighbours that are looked at together


def exhaustive_search(load: Floats, room: Ints, table: Ints, goal: Floats) -> Ints:
    """Tables no worse than `table`, at most `goal` [X] where such are found. room: int64 [X, R]."""
    table = table.copy()
    for row in np.flatnonzero(_fullest(load, table) > goal):
        one = slice(row, row + 1)
        if _choices(load.shape[1], room[row]) <= FEW:
            found = _best_of_all(load[row], room[row], table[row])
        else:
            found = _searched(load[one], room[one], table[one], float(goal[row]))
        if _fullest(load[one], found)[0] < _fullest(load[one], table[one])[0]:
            table[one] = found
    return table


def _fullest(load: Floats, table: Ints) -> Floats:
    return np.asarray(packing.rank_loads(np.broadcast_to(load, (len(table), load.shape[1])), table).max(1))


def _choices(experts: int, room: Ints) -> int:
    """How many ways there are to give each rank a set of experts, ranks with equal room not told apart."""
    many = 1
    for slots, ranks in zip(*np.unique(room, return_counts=True), strict=True):
        sets = sum(math.comb(experts, size) for size in range(min(int(slots), experts) + 1))
        many *= math.comb(sets + int(ranks) - 1, int(ranks))
    return many


def _best_of_all(load: Floats, room: Ints, table: Ints) -> Ints:
    """int64 [1, R, S]: the table of one row whose fullest rank is as empty as can be. load [E], room [R]."""
    experts = len(load)
    kinds, ways = np.unique(room), []
    for slots in kinds:
        sets = [c for size in range(min(int(slots), experts) + 1) for c in itertools.combinations(range(experts), size)]
        members = np.array([[expert in chosen for expert in range(experts)] for chosen in sets])
        alike = int((room == slots).sum())
        ways.append(members[list(itertools.combinations_with_replacement(range(len(sets)), alike))])
    pick = np.indices([len(way) for way in ways]).reshape(len(kinds), -1)
    held = np.empty((pick.shape[1], len(room), experts), bool)
    for slots, way, index in zip(kinds, ways, pick, strict=True):
        held[:, room == slots] = way[index]
    copies = held.sum(1)
    held, copies = held[(copies > 0).all(1)], copies[(copies > 0).all(1)]
    best = held[(held * (load / copies)[:, None, :]).sum(2).max(1).argmin()]
    found = np.where(table == ABSENT, ABSENT, EMPTY)
    for rank, chosen in enumerate(best):
        found[rank, : chosen.sum()] = np.flatnonzero(chosen)
    return found[None]


def _searched(load: Floats, room: Ints, table: Ints, goal: float) -> Ints:
    """int64 [1, R, S]: refined, the best of starts with fewer copies, then of what lies one move from the best."""
    width = min(_STARTS, _CELLS // (room.size * load.shape[1]))
    if width < _WORTHWHILE:
        return table
    totals = np.unique(np.linspace(load.shape[1], room.sum(), width).astype(np.int64))
    many = load.repeat(len(totals), 0)
    counts = packing.greedy_counts(many, totals, (room > 0).sum(1).repeat(len(totals)))
    starts = packing.fill(many, counts, np.where(table == ABSENT, ABSENT, EMPTY).repeat(len(totals), 0))
    best = table
    for _ in range(_DEPTH):
        found = refine(load.repeat(len(starts), 0), starts, np.full(len(starts), goal))
        found = np.concatenate([best, found])
        full = _fullest(load, found)
        best = found[full.argmin()][None]
        if full.min() <= goal:
            break
        starts = _one_move_away(load, best)[:width]
    return best


def _one_move_away(load: Floats, table: Ints) -> Ints:
    """int64 [_STARTS at most, R, S]: the best legal tables that differ in a swap with the fullest rank, a copy of one
    of its experts elsewhere, or a copy less on it."""
    flat = table.reshape(-1)
    slot_rank = np.arange(flat.size) // table.shape[2]
    high = packing.rank_loads(load, table)[0].argmax()
    mine = np.flatnonzero((slot_rank == high) & (flat >= 0))
    others = np.flatnonzero((slot_rank != high) & (flat != ABSENT))
    one, two = (index.ravel() for index in np.meshgrid(mine, others, indexing="ij"))
    stride = -(-2 * one.size * flat.size // _ROOM) or 1
    one, two = one[::stride], two[::stride]
    step = np.arange(one.size)
    swaps, puts, drops = (flat[None].repeat(count, 0) for count in (one.size, one.size, mine.size))
    swaps[step, one], swaps[step, two] = flat[two], flat[one]
    puts[step, two] = flat[one]
    drops[np.arange(mine.size), mine] = EMPTY
    found = np.concatenate([swaps, puts, drops]).reshape(-1, *table.shape[1:])
    complete = (packing.count_copies(found, load.shape[1]) > 0).all(1)
    found = found[complete & ~packing.has_twice(found)]
    loads = packing.rank_loads(load.repeat(len(found), 0), found)
    best: Ints = found[np.lexsort(((loads**2).sum(1), loads.max(1)))[:_STARTS]]
    return best
