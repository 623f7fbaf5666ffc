"""Local search for balanced tables, and a wider search for the few rows on which it fails.

The local search exchanges experts between ranks, then adds and drops copies, until no rank is above the goal. Each step
lowers the load of one rank, and keeps all ranks that it changes below that rank's former load. So the largest load of a
row never grows. Shapes and letters are those of `packing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ep_moe.eplb.planner import packing
from ep_moe.eplb.planner.packing import ABSENT, Bools, Floats, Ints, copy_loads, count_copies, holders
from ep_moe.placement.expert_map import EMPTY

_ROUNDS = 64
_CELLS = 1_000_000  # limit of rounds * ranks * experts: rows larger than 60 ranks of 256 experts get fewer rounds
_FEWEST = 4
_LESS = 1 - 1e-9  # an improvement by a smaller factor counts as rounding


@dataclass
class _Search:
    """A table that is being changed, and arrays derived from it that are kept up to date."""

    load: Floats
    goal: Floats
    table: Ints
    counts: Ints
    held: Bools
    copies: Floats  # [X, R, S], load of the copy in each slot
    ranks: Floats  # [X, R], load of each rank

    def exchange(self, rows: Ints, rank: Ints, slot: Ints, other: Ints, place: Ints) -> None:
        """Swap the contents of (rank, slot) and (other, place) in each row. A rank of a row occurs in one swap only."""
        here, there = (rows, rank, slot), (rows, other, place)
        mine, theirs = self.table[here], self.table[there]
        self.table[here], self.table[there] = theirs, mine
        given, taken = self.copies[here], self.copies[there]
        self.copies[here], self.copies[there] = taken, given
        self.ranks[rows, rank] += taken - given
        self.ranks[rows, other] += given - taken
        for expert, source, target in ((mine, rank, other), (theirs, other, rank)):
            real = expert >= 0
            self.held[rows[real], source[real], expert[real]] = False
            self.held[rows[real], target[real], expert[real]] = True

    def recount(self, rows: Ints) -> None:
        """Recompute the derived arrays after copies were added or dropped."""
        self.counts[rows] = count_copies(self.table[rows], self.load.shape[1])
        self.held[rows] = holders(self.table[rows], self.load.shape[1])
        self.copies[rows] = copy_loads(self.load[rows], self.counts[rows], self.table[rows])
        self.ranks[rows] = self.copies[rows].sum(2)


def refine(load: Floats, table: Ints, goal: Floats) -> Ints:
    """Return a table with the largest rank load lowered to `goal` [X] if the search succeeds, and never raised.

    Ranks below the goal change only in exchanges with a rank above it.
    """
    counts = count_copies(table, load.shape[1])
    copies, held = copy_loads(load, counts, table), holders(table, load.shape[1])
    search = _Search(load, goal * (1 + 1e-12), table.copy(), counts, held, copies, copies.sum(2))
    rows = np.flatnonzero(search.ranks.max(1) > search.goal)
    if table.shape[1] > 1:
        rounds = max(_FEWEST, min(_ROUNDS, _CELLS // (table.shape[1] * load.shape[1])))
        rows = _exhaust(_swap_pairs, search, rows, _ROUNDS)
        for _ in range(rounds):
            rows = _exhaust(_swap_fullest, search, rows, rounds)
            if not rows.size:
                break
            rows = rows[_change_copies(search, rows)]
    return search.table


def _exhaust(step: Callable[[_Search, Ints], Bools], search: _Search, rows: Ints, rounds: int) -> Ints:
    """Repeat a step on the rows above the goal until it changes none of them. Return the rows that are still above."""
    busy = rows
    for _ in range(rounds):
        busy = busy[search.ranks[busy].max(1) > search.goal[busy]]
        if not busy.size:
            break
        busy = busy[step(search, busy)]
    above: Ints = rows[search.ranks[rows].max(1) > search.goal[rows]]
    return above


def _swap_pairs(search: _Search, rows: Ints) -> Bools:
    """Pair the fullest rank with the emptiest, the second fullest with the second emptiest, and so on.

    Make the best swap in each pair whose fuller rank is above the goal. Return which rows changed.
    """
    order = np.argsort(search.ranks[rows], axis=1, kind="stable")
    pairs = order.shape[1] // 2
    low, high = order[:, :pairs], order[:, ::-1][:, :pairs]
    row = rows[:, None]
    full, gap = search.ranks[row, high], search.ranks[row, high] - search.ranks[row, low]
    mine, theirs = search.table[row, high], search.table[row, low]
    give = _give(search, row, low, mine, search.copies[row, high]) - gap[..., None] / 2
    take = _take(search, row, high, theirs, search.copies[row, low])
    off = give[..., :, None] - take[..., None, :]
    off = np.abs(off, out=off).reshape(*gap.shape, math.prod(off.shape[2:]))
    best = off.argmin(2)
    wanted = (np.take_along_axis(off, best[..., None], 2)[..., 0] < gap / 2 * _LESS) & (full > search.goal[row])
    at, pair = np.nonzero(wanted)
    slot, place = np.divmod(best[at, pair], mine.shape[2])
    search.exchange(rows[at], high[at, pair], slot, low[at, pair], place)
    return np.asarray(wanted.any(1))


def _swap_fullest(search: _Search, rows: Ints) -> Bools:
    """Make the best swap of the fullest rank with any other rank. Return which rows changed."""
    row, local = rows[:, None], np.arange(len(rows))
    every = np.arange(search.table.shape[1])[None, :]
    high = search.ranks[rows].argmax(1)
    full = search.ranks[rows, high]
    copies, mine = search.copies[rows], search.table[rows, high]
    give = _give(search, row, every, mine[:, None].repeat(copies.shape[1], 1), copies[local, high][:, None])
    take = _take(search, row, high[:, None], search.table[rows], copies)
    moved = give[..., :, None] - take[..., None, :]
    worst = np.maximum(full[:, None, None, None] - moved, search.ranks[rows][..., None, None] + moved)
    worst = worst.reshape(len(rows), -1)
    best = worst.argmin(1)
    wanted = worst[local, best] < full * _LESS
    slots = mine.shape[1]
    other, rest = np.divmod(best[wanted], slots * slots)
    slot, place = np.divmod(rest, slots)
    search.exchange(rows[wanted], high[wanted], slot, other, place)
    return np.asarray(wanted)


def _give(search: _Search, row: Ints, target: Ints, experts: Ints, copies: Floats) -> Floats:
    """Return the load of each expert that could go to `target`; infinity if it cannot."""
    bad = (experts < 0) | search.held[row[..., None], target[..., None], np.maximum(experts, 0)]
    return np.where(bad, np.inf, copies)


def _take(search: _Search, row: Ints, target: Ints, experts: Ints, copies: Floats) -> Floats:
    """Return the load of each slot that `target` could take in exchange, EMPTY ones too; -infinity if it cannot."""
    bad = (experts == ABSENT) | (experts >= 0) & search.held[row[..., None], target[..., None], np.maximum(experts, 0)]
    return np.where(bad, -np.inf, copies)


def _change_copies(search: _Search, rows: Ints) -> Bools:
    """Make the best change of copies for the fullest rank. Return which rows changed.

    Either drop a copy from this rank. Or put a further copy of one of its experts on another rank, into an EMPTY slot
    or replacing an expert that has other copies.
    """
    local = np.arange(len(rows))
    high = search.ranks[rows].argmax(1)
    full = search.ranks[rows, high]
    dropped = _drop_scores(search, rows, high)
    put = _put_scores(search, rows, high)
    drop, best = dropped.argmin(1), put.argmin(1)
    drops = dropped[local, drop] <= put[local, best]
    wanted = np.minimum(dropped[local, drop], put[local, best]) < full * _LESS
    at = np.flatnonzero(wanted & drops)
    search.table[rows[at], high[at], drop[at]] = EMPTY
    at = np.flatnonzero(wanted & ~drops)
    slots = search.table.shape[2]
    slot, place = np.divmod(best[at], search.table.shape[1] * slots)
    other, place = np.divmod(place, slots)
    search.table[rows[at], other, place] = search.table[rows[at], high[at], slot]
    search.recount(rows[wanted])
    return np.asarray(wanted)


def _drop_scores(search: _Search, rows: Ints, high: Ints) -> Floats:
    """Return the largest load of the ranks concerned after the fullest rank drops the copy in a slot, [X, S]."""
    local = np.arange(len(rows))
    experts = search.table[rows, high]
    safe = np.maximum(experts, 0)
    load, counts = search.load[rows[:, None], safe], search.counts[rows[:, None], safe]
    hosts = search.held[rows].transpose(0, 2, 1)[local[:, None], safe].copy()  # [X, S, R]
    hosts[local, :, high] = False
    step = load / (counts * np.maximum(counts - 1, 1))
    others = np.where(hosts, search.ranks[rows][:, None, :] + step[..., None], -np.inf).max(2)
    mine = search.ranks[rows, high][:, None] - load / counts
    return np.where((experts >= 0) & (counts > 1), np.maximum(others, mine), np.inf)


def _put_scores(search: _Search, rows: Ints, high: Ints) -> Floats:
    """Return the largest load of the ranks concerned after a copy is added, float64 [X, S * R * S].

    The copy is of the expert in a slot of the fullest rank, and goes to a slot (R, S) of another rank.
    """
    table, ranks, held = search.table[rows], search.ranks[rows], search.held[rows]
    local, shape = np.arange(len(rows)), table.shape
    copy = search.load[rows] / search.counts[rows]
    mine = table[local, high]  # [X, S]
    one = np.maximum(mine, 0)
    counts = np.take_along_axis(search.counts[rows], one, 1)
    weight = np.take_along_axis(search.load[rows], one, 1)
    lighter = weight / (counts * (counts + 1))
    placed = weight / (counts + 1)

    flat = np.maximum(table, 0).reshape(len(rows), -1)
    freed = np.where(table >= 0, np.take_along_axis(copy, flat, 1).reshape(shape), 0.0)
    given = np.take_along_axis(search.counts[rows], flat, 1).reshape(shape)
    # by how much the load grows on each other rank that has the replaced expert
    heavier = np.where(table >= 0, freed / np.maximum(given - 1, 1), 0.0)
    others = _fullest_host(ranks, held, high, table) + heavier
    here = np.take_along_axis(held[local, high], flat, 1).reshape(shape) & (table >= 0)
    usable = (table == EMPTY) | (table >= 0) & (given > 1)
    usable[local, high] = False

    barred = held.transpose(0, 2, 1)[local[:, None], one] | (mine < 0)[..., None]  # [X, S, R]
    top = ranks[local, high][:, None, None, None] - lighter[..., None, None] + np.where(here, heavier, 0.0)[:, None]
    target = ranks[:, None, :, None] + placed[..., None, None] - freed[:, None]
    score = np.maximum(np.maximum(top, target), others[:, None])
    score[barred[..., None] | ~usable[:, None]] = np.inf
    every: Floats = score.reshape(len(rows), -1)
    return every


def _fullest_host(ranks: Floats, held: Bools, high: Ints, table: Ints) -> Floats:
    """Return the largest load of the ranks that share a slot's expert, float64 [X, R, S].

    The slot's own rank and the rank `high` do not count.
    """
    local = np.arange(len(ranks))
    loads = np.where(held, ranks[..., None], -np.inf)  # [X, R, E]
    loads[local, high] = -np.inf
    first = loads.argmax(1)
    most = np.take_along_axis(loads, first[:, None], 1)[:, 0]
    np.put_along_axis(loads, first[:, None], -np.inf, 1)
    second = loads.max(1)
    flat = np.maximum(table, 0).reshape(len(ranks), -1)
    pick = [np.take_along_axis(array, flat, 1).reshape(table.shape) for array in (first, most, second)]
    own = np.arange(table.shape[1])[None, :, None]
    return np.where(table >= 0, np.where(pick[0] == own, pick[2], pick[1]), -np.inf)


# --- a wider search ---------------------------------------------------------------------------------------------------
# A wider search for the few rows that `refine` cannot bring to the balance of the published algorithm, because that one
# puts an expert twice on a rank. It takes milliseconds a row, and is exact for rows with few possible maps.

FEW = 30_000  # a row with at most so many possible maps is solved by trying all of them
_STARTS = 128
_WIDER_CELLS = 400_000  # limit of starts * ranks * experts: large rows get fewer starts
_WORTHWHILE = 8  # with fewer starts the search is skipped
_DEPTH = 6
_ROOM = 2_000_000  # limit of the slots in all neighbors that are evaluated at once


def exhaustive_search(load: Floats, room: Ints, table: Ints, goal: Floats) -> Ints:
    """Return tables that are no worse than `table`, with the largest load at most `goal` [X] if such are found.

    room: int64 [X, R], slots of each rank
    """
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
    """Return the number of ways to give each rank a set of experts. Ranks with equal room are interchangeable."""
    many = 1
    for slots, ranks in zip(*np.unique(room, return_counts=True), strict=True):
        sets = sum(math.comb(experts, size) for size in range(min(int(slots), experts) + 1))
        many *= math.comb(sets + int(ranks) - 1, int(ranks))
    return many


def _best_of_all(load: Floats, room: Ints, table: Ints) -> Ints:
    """Return the table of one row with the smallest possible largest load, int64 [1, R, S]. load [E], room [R]."""
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
    """Return the best table of one row that a search with many starts finds, int64 [1, R, S].

    The first starts have different numbers of copies. All later ones are one move away from the best table so far.
    """
    width = min(_STARTS, _WIDER_CELLS // (room.size * load.shape[1]))
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
    """Return the best legal tables that are one move away, int64 [at most _STARTS, R, S].

    A move is a swap with the fullest rank, a further copy of one of its experts elsewhere, or one copy less on it.
    """
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
