"""Say the same plan with fewer moves: which rank takes which set of experts, and which slot each expert.

Shapes and letters as in `packing`. Neither changes a rank's set of experts but by renaming ranks, so loads stay.
"""

from __future__ import annotations

import numpy as np

from ep_moe.eplb.planner.packing import ABSENT, Ints, holders
from ep_moe.placement.expert_map import EMPTY

_SWEEPS = 32


def relabel_ranks(old: Ints, new: Ints, experts: int) -> Ints:
    """`new` with its ranks renamed so that ranks hold many experts they have in `old`. Only ranks with equally many
    slots take each other's names."""
    mine, theirs = holders(new, experts).astype(np.float32), holders(old, experts).astype(np.float32)
    common = mine @ theirs.transpose(0, 2, 1)  # [X, new rank, old rank]
    slots = (new != ABSENT).sum(2)
    return np.take_along_axis(new, assign(common, slots)[..., None], 1)


def assign(common: np.ndarray, kind: Ints) -> Ints:
    """int64 [X, R]: for each old name the new set that takes it, so that the sum of `common` is large: greedy, then
    exchanges in pairs. kind: int64 [X, R]; only names of one kind are exchanged."""
    rows = np.arange(len(common))
    ranks = common.shape[1]
    common = np.where(kind[:, :, None] == kind[:, None, :], common, -np.inf)
    name = np.tile(np.arange(ranks), (len(common), 1))  # of each new set
    order = np.argsort(-common.max(2), axis=1, kind="stable")
    free = np.zeros((len(common), ranks), common.dtype)
    for step in range(ranks):
        group = order[:, step]
        best = (common[rows, group] + free).argmax(1)
        name[rows, group] = best
        free[rows, best] = -np.inf
    for _ in range(_SWEEPS if ranks <= 64 else 0):
        now = np.take_along_axis(common, name[:, :, None], 2)  # [X, R, 1]
        then = np.take_along_axis(common, np.repeat(name[:, None, :], ranks, 1), 2)  # set i under the name of j
        gain = (then + then.transpose(0, 2, 1) - now - now.transpose(0, 2, 1)).reshape(len(common), -1)
        best = gain.argmax(1)
        rows = np.flatnonzero(gain[np.arange(len(common)), best] > 0)
        if not rows.size:
            break
        one, two = np.divmod(best[rows], ranks)
        name[rows, one], name[rows, two] = name[rows, two], name[rows, one]
    return np.argsort(name, axis=1, kind="stable")


def relabel_slots(old: Ints, new: Ints, experts: int) -> Ints:
    """`new` with each rank's experts ordered so that one which stays on its rank keeps its slot; newcomers take the
    last free ones. Where a rank's last slot would be EMPTY, an expert moves there, or `ExpertMap.num_slots` would
    forget the slot. old: int64 [X, R, S], as wide as `new`."""
    rows, ranks = np.arange(len(old))[:, None, None], np.arange(old.shape[1])[:, None]
    stays = (old >= 0) & holders(new, experts)[rows, ranks, np.maximum(old, 0)]
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
    top = slots - 1 - (table >= 0)[:, :, ::-1].argmax(2)  # of the last expert
    row, rank = np.nonzero((table >= 0).any(2) & (top < last))
    start, end = top[row, rank], last[row, rank]
    table[row, rank, end], table[row, rank, start] = table[row, rank, start], EMPTY
    return table
