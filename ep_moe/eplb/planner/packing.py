"""Greedy packing: how many copies each expert gets, and which rank takes each copy. Vectorized over rows.

A row is one balancing problem: a layer, or one node's share of a layer. Arrays have these shapes and letters:

    X  rows      E  experts of a row      R  ranks of a row      S  slots of a rank (the largest)

    load    float64 [X, E]     load of an expert
    counts  int64 [X, E]       its copies; each carries load / counts
    table   int64 [X, R, S]    the expert in each slot, EMPTY, or ABSENT where the rank has no such slot
    held    bool [X, R, E]     the rank has a copy
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ep_moe.placement.expert_map import EMPTY

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ABSENT = -2


def greedy_counts(load: Floats, slots: Ints, most: Ints | None = None) -> Ints:
    """Return `counts`: one copy of each expert; each further slot goes to the expert with the heaviest copies so far.

    slots: int64 [X], slots of all ranks together, at least E
    most: int64 [X], the most copies of an expert: the number of ranks, if copies must be on different ranks; None: no
        limit
    """
    counts = np.ones(load.shape, np.int64)
    heaviest = load.copy()
    if most is not None:
        heaviest[most <= 1] = -1.0
    extra = slots - load.shape[1]
    for step in range(int(extra.max(initial=0))):
        rows = np.flatnonzero(extra > step)
        expert = heaviest[rows].argmax(1)
        if most is not None:
            able = heaviest[rows, expert] >= 0
            rows, expert = rows[able], expert[able]
        counts[rows, expert] += 1
        heaviest[rows, expert] = load[rows, expert] / counts[rows, expert]
        if most is not None:
            full = counts[rows, expert] == most[rows]
            heaviest[rows[full], expert[full]] = -1.0
    return counts


def adapted_counts(load: Floats, counts: Ints, slots: Ints, most: Ints, limit: Floats) -> Ints:
    """Return `counts` with few changes, so that no copy's load exceeds `limit`, or by as little as possible.

    counts: those in force, 0 for an expert that was lost
    slots, most: as for `greedy_counts`
    limit: float64 [X]
    """
    counts = np.maximum(counts, 1)
    rows = np.flatnonzero(counts.sum(1) > slots)
    while rows.size:
        _take(load, counts, rows)
        rows = rows[counts[rows].sum(1) > slots[rows]]
    rows = np.arange(len(load))
    for _ in range(int(slots.max(initial=0))):
        copy = np.where(counts[rows] < most[rows, None], load[rows] / counts[rows], -1.0)
        expert = copy.argmax(1)
        weight = copy[np.arange(len(rows)), expert]
        free = counts[rows].sum(1) < slots[rows]
        wanted = (weight > limit[rows]) & (free | (_cheapest(load, counts, rows)[1] < weight * (1 - 1e-9)))
        rows, expert, free = rows[wanted], expert[wanted], free[wanted]
        if not rows.size:
            break
        _take(load, counts, rows[~free])
        counts[rows, expert] += 1
    return counts


def _cheapest(load: Floats, counts: Ints, rows: Ints) -> tuple[Ints, Floats]:
    """Return the expert that can best lose a copy, and the load of its other copies then; infinity if none has two."""
    without = np.where(counts[rows] > 1, load[rows] / np.maximum(counts[rows] - 1, 1), np.inf)
    expert = without.argmin(1)
    return expert, without[np.arange(len(rows)), expert]


def _take(load: Floats, counts: Ints, rows: Ints) -> None:
    counts[rows, _cheapest(load, counts, rows)[0]] -= 1


def holders(table: Ints, experts: int) -> Bools:
    """Return `held` of a table."""
    rows, ranks = table.shape[:2]
    held = np.zeros((rows * ranks, experts + 2), bool)  # the first two columns are ABSENT and EMPTY
    held[np.arange(rows * ranks)[:, None], table.reshape(rows * ranks, table.shape[2]) + 2] = True
    return np.ascontiguousarray(held[:, 2:]).reshape(rows, ranks, experts)


def rank_loads(load: Floats, table: Ints) -> Floats:
    """Return the load of each rank, float64 [X, R]. Two copies of an expert on a rank both count."""
    return np.asarray(copy_loads(load, count_copies(table, load.shape[1]), table).sum(2))


def copy_loads(load: Floats, counts: Ints, table: Ints) -> Floats:
    """Return the load of the copy in each slot, float64 in the shape of `table`; 0 for a slot without one."""
    copy = load / np.maximum(counts, 1)
    flat = np.take_along_axis(copy, np.maximum(table, 0).reshape(len(table), math.prod(table.shape[1:])), 1)
    return np.where(table >= 0, flat.reshape(table.shape), 0.0)


def count_copies(table: Ints, experts: int) -> Ints:
    """Return `counts` of a table."""
    wide = experts + 2  # the first two columns are ABSENT and EMPTY
    place = table + (2 + np.arange(len(table)) * wide)[:, None, None]
    return np.bincount(place.ravel(), minlength=len(table) * wide).reshape(len(table), wide)[:, 2:]


def has_twice(table: Ints) -> Bools:
    """Return whether some rank of a row holds an expert twice, bool [X]."""
    ordered = np.sort(table, axis=2)
    return np.asarray(((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any((1, 2)))


def move_second_copies(load: Floats, table: Ints) -> Ints:
    """Return the table with no expert twice on a rank.

    If the rank has all copies of the expert, the second copy is dropped, which changes no load. Otherwise it is swapped
    with the slot of another rank that minimizes the larger load of the two ranks. If no swap is legal, it is dropped.
    """
    table = table.copy()
    rows = np.flatnonzero(has_twice(table))
    while rows.size:
        local, part = np.arange(len(rows)), table[rows]
        rank, slot = np.divmod(second_copies(part).reshape(len(rows), -1).argmax(1), table.shape[2])
        expert = part[local, rank, slot]
        counts = count_copies(part, load.shape[1])
        copies, ranks, held = (
            copy_loads(load[rows], counts, part),
            rank_loads(load[rows], part),
            holders(part, load.shape[1]),
        )
        taken = np.take_along_axis(held[local, rank], np.maximum(part, 0).reshape(len(rows), -1), 1).reshape(part.shape)
        barred = (part == ABSENT) | (part >= 0) & taken | held[local, :, expert][..., None]
        less = copies[local, rank, slot][:, None, None] - copies
        worst = np.maximum(ranks[local, rank][:, None, None] - less, ranks[..., None] + less)
        worst = np.where(barred, np.inf, worst).reshape(len(rows), -1)
        best = worst.argmin(1)
        alone = (part[local, rank] == expert[:, None]).sum(1) == counts[local, expert]
        able = (worst[local, best] < np.inf) & ~alone
        other, place = np.divmod(best, table.shape[2])
        table[rows, rank, slot] = np.where(able, part[local, other, place], EMPTY)
        table[rows[able], other[able], place[able]] = expert[able]
        rows = rows[has_twice(table[rows])]
    return table


def second_copies(table: Ints) -> Bools:
    """Return which slots repeat an expert of an earlier slot of the same rank, bool in the shape of `table`."""
    order = np.argsort(table, axis=2, kind="stable")
    ordered = np.take_along_axis(table, order, 2)
    again = np.zeros(table.shape, bool)
    again[:, :, 1:] = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    second = np.empty_like(again)
    np.put_along_axis(second, order, again, 2)
    return second


def empty_table(slots: Ints) -> Ints:
    """Return a table of EMPTY slots, ABSENT beyond `slots`, int64 [X, R]."""
    place = np.arange(int(slots.max(initial=1)))
    return np.where(place < slots[:, :, None], EMPTY, ABSENT)


def drop_surplus(load: Floats, counts: Ints, table: Ints) -> Ints:
    """Return the table without copies in excess of `counts`. Those on the fullest ranks are removed first."""
    table = table.copy()
    surplus = count_copies(table, load.shape[1]) - counts
    rows = np.flatnonzero((surplus > 0).any(1))
    while rows.size:
        expert = (surplus[rows] > 0).argmax(1)
        full = rank_loads(load[rows], table[rows])
        here = table[rows] == expert[:, None, None]
        rank = np.where(here.any(2), full, -1.0).argmax(1)
        row = np.arange(len(rows))
        table[rows, rank, here[row, rank].argmax(1)] = EMPTY
        surplus[rows, expert] -= 1
        rows = rows[(surplus[rows] > 0).any(1)]
    return table


def fill(load: Floats, counts: Ints, table: Ints, *, distinct: bool = True) -> Ints:
    """Put the copies that `table` lacks into EMPTY slots: heaviest first, each on the least loaded rank with a slot.

    distinct: never put two copies of an expert on one rank. A copy for which no rank is left is omitted. An expert's
        only copy is never omitted if the slots suffice for `counts`. False is the published algorithm.
    """
    table = -np.sort(-table, axis=2)  # experts, EMPTY, ABSENT
    items, lengths = _missing(load / counts, counts - count_copies(table, load.shape[1]))
    weights = np.take_along_axis(load / counts, np.maximum(items, 0).T, 1).T
    ranks, slots = table.shape[1:]
    key = copy_loads(load, counts, table).sum(2)
    left, place = (table == EMPTY).sum(2).ravel(), (table >= 0).sum(2).ravel() + np.arange(key.size) * slots
    key.ravel()[left == 0] = np.inf
    held = np.ascontiguousarray(holders(table, load.shape[1]).transpose(0, 2, 1)) if distinct else None
    flat_key, flat_table = key.ravel(), table.ravel()
    shortest, every = int(lengths.min(initial=0)), np.arange(len(load))
    for step in range(len(items)):
        rows = every if step < shortest else np.flatnonzero(lengths > step)
        expert, weight = items[step, rows], weights[step, rows]
        open_to = key[rows] if held is None else np.where(held[rows, expert], np.inf, key[rows])
        rank = open_to.argmin(1)
        if held is not None:
            able = open_to[np.arange(len(rows)), rank] < np.inf
            rows, rank, expert, weight = rows[able], rank[able], expert[able], weight[able]
            held[rows, expert, rank] = True
        at = rows * ranks + rank
        flat_table[place[at]] = expert
        place[at] += 1
        left[at] -= 1
        flat_key[at] += weight
        flat_key[at[left[at] == 0]] = np.inf
    return table


def _missing(copy: Floats, missing: Ints) -> tuple[Ints, Ints]:
    """Return the copies to place, as expert ids int64 [most, X], and their number [X].

    They are ordered heaviest first, and filled up with EMPTY.
    """
    missing = np.maximum(missing, 0)
    order = np.argsort(-copy, axis=1, kind="stable")
    lengths = missing.sum(1)
    items = np.full((len(copy), int(lengths.max(initial=0))), EMPTY, np.int64)
    times = np.take_along_axis(missing, order, 1)
    items[np.arange(items.shape[1]) < lengths[:, None]] = np.repeat(order.ravel(), times.ravel())
    return np.ascontiguousarray(items.T), lengths


# --- labels -----------------------------------------------------------------------------------------------------------
# Relabel a plan so that fewer experts move: choose which rank takes which set of experts, and which slot each expert
# gets. Sets of experts stay together, so the loads of the ranks are only permuted.

_SWEEPS = 32


def relabel_ranks(old: Ints, new: Ints, experts: int) -> Ints:
    """Return `new` with its ranks permuted, so that ranks keep many of the experts they have in `old`.

    Only ranks with equal numbers of slots are exchanged.
    """
    mine, theirs = holders(new, experts).astype(np.float32), holders(old, experts).astype(np.float32)
    common = mine @ theirs.transpose(0, 2, 1)  # [X, new rank, old rank]
    slots = (new != ABSENT).sum(2)
    return np.take_along_axis(new, assign(common, slots)[..., None], 1)


def assign(common: np.ndarray, kind: Ints) -> Ints:
    """Assign a new set of experts to each old rank so that the sum of `common` is large: greedily, then by exchanges.

    common: [X, new set, old rank], experts that both hold
    kind: int64 [X, R]; a set goes to a rank of its own kind only

    Returns int64 [X, R], the new set of each old rank.
    """
    rows = np.arange(len(common))
    ranks = common.shape[1]
    common = np.where(kind[:, :, None] == kind[:, None, :], common, -np.inf)
    name = np.tile(np.arange(ranks), (len(common), 1))  # the old rank of each new set
    order = np.argsort(-common.max(2), axis=1, kind="stable")
    free = np.zeros((len(common), ranks), common.dtype)
    for step in range(ranks):
        group = order[:, step]
        best = (common[rows, group] + free).argmax(1)
        name[rows, group] = best
        free[rows, best] = -np.inf
    for _ in range(_SWEEPS if ranks <= 64 else 0):
        now = np.take_along_axis(common, name[:, :, None], 2)  # [X, R, 1]
        then = np.take_along_axis(common, np.repeat(name[:, None, :], ranks, 1), 2)  # set i on the rank of set j
        gain = (then + then.transpose(0, 2, 1) - now - now.transpose(0, 2, 1)).reshape(len(common), -1)
        best = gain.argmax(1)
        rows = np.flatnonzero(gain[np.arange(len(common)), best] > 0)
        if not rows.size:
            break
        one, two = np.divmod(best[rows], ranks)
        name[rows, one], name[rows, two] = name[rows, two], name[rows, one]
    return np.argsort(name, axis=1, kind="stable")


def relabel_slots(old: Ints, new: Ints, experts: int) -> Ints:
    """Return `new` with slots reordered so that an expert that stays on its rank keeps its slot.

    New experts of a rank take its last free slots. If a rank's last slot would be EMPTY, an expert is moved into it:
    `ExpertMap.num_slots` counts slots up to the last one in use. old: int64 [X, R, S], as wide as `new`.
    """
    rows, ranks = np.arange(len(old))[:, None, None], np.arange(old.shape[1])[:, None]
    stays = (old >= 0) & ~second_copies(old) & holders(new, experts)[rows, ranks, np.maximum(old, 0)]
    stays &= new != ABSENT
    comes = (new >= 0) & ~holders(old, experts)[rows, ranks, np.maximum(new, 0)]
    out = np.where(stays, old, np.where(new == ABSENT, ABSENT, EMPTY))
    free = np.argsort(out != EMPTY, axis=2, kind="stable")
    spare = (out == EMPTY).sum(2)
    coming = np.where(comes, new, experts)
    coming.sort(axis=2)
    row, rank, place = np.nonzero(coming < experts)
    out[row, rank, free[row, rank, spare[row, rank] - 1 - place]] = coming[row, rank, place]
    return _last_slot_used(out)


def _last_slot_used(table: Ints) -> Ints:
    slots = table.shape[2]
    last = (table != ABSENT).sum(2) - 1
    top = slots - 1 - (table >= 0)[:, :, ::-1].argmax(2)  # the slot of the last expert
    row, rank = np.nonzero((table >= 0).any(2) & (top < last))
    start, end = top[row, rank], last[row, rank]
    table[row, rank, end], table[row, rank, start] = table[row, rank, start], EMPTY
    return table
