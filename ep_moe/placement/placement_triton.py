"""The Triton form of `Placement.forward`: one launch in the place of some twenty."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WIDE_BLOCK = 256, 1024  # picks of a program
_MANY = 4096  # picks from which on each program counts its own first: they are many for few counters


def place(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    out: Tensor, seed: int,
) -> None:  # fmt: skip
    """ids: int [T, K], contiguous; replicas: int64 [E, most]; counts: int64 [E]; expert_load: int64 [E]; slot_load:
    int64 [P]; counting: int64 []; out: int64 [T, K]; seed: what the hash adds to all"""
    pairs, top_k = ids.numel(), ids.shape[1]
    if not pairs:
        return
    many = pairs >= _MANY
    block = _WIDE_BLOCK if many else _BLOCK
    _place[(triton.cdiv(pairs, block),)](
        ids, replicas, counts, expert_load, slot_load, counting, out, seed, pairs, len(counts), replicas.shape[1],
        len(slot_load), top_k, BLOCK=block, EXPERT_BINS=_bins(expert_load) if many else 0,
        SLOT_BINS=_bins(slot_load) if many else 0,
    )  # fmt: skip


def _bins(load: Tensor) -> int:
    return max(128, int(triton.next_power_of_2(len(load))))


@triton.jit
def _place(
    ids, replicas, counts, expert_load, slot_load, counting, out, seed, pairs, experts, most, slots, top_k,
    BLOCK: tl.constexpr, EXPERT_BINS: tl.constexpr, SLOT_BINS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    given = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    valid = (given >= 0) & (given < experts)
    safe = tl.where(valid, given, 0)
    row = (at // top_k).to(tl.int64)
    mixed = row * 2654435761 + safe * 2246822519 + seed
    replica = ((mixed & 0xFFFFFFFF) >> 16) % tl.load(counts + safe)
    physical = tl.load(replicas + safe * most + replica, mask=inside, other=0)
    tl.store(out + at, tl.where(valid, physical, tl.where(given == -1, given, slots)), mask=inside)
    if tl.load(counting) != 0:
        # sums of whole numbers are the same in any order
        if EXPERT_BINS:
            _count(expert_load, safe, valid & inside, experts, EXPERT_BINS)
            _count(slot_load, physical, valid & inside, slots, SLOT_BINS)
        else:
            one = tl.full([BLOCK], 1, tl.int64)
            tl.atomic_add(expert_load + safe, one, mask=valid & inside, sem="relaxed")
            tl.atomic_add(slot_load + physical, one, mask=valid & inside, sem="relaxed")


@triton.jit
def _count(load, found, mask, most, BINS: tl.constexpr):
    lane = tl.arange(0, BINS)
    count = tl.histogram(found.to(tl.int32), BINS, mask=mask)
    tl.atomic_add(load + lane, count.to(tl.int64), mask=(count > 0) & (lane < most), sem="relaxed")
