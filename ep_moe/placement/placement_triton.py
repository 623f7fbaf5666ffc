"""The Triton form of `Placement.forward`: one launch instead of some twenty; and its arithmetic, for kernels that
place ids as they send them."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.runtime.grids import cdiv, next_power_of_2

_BLOCK, _WIDE_BLOCK = 256, 1024  # routes of a program
_MANY = 4096  # routes from which on each program counts its own first: they are many for few counters


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
    _place[(cdiv(pairs, block),)](
        ids, replicas, counts, expert_load, slot_load, counting, out, seed, pairs, len(counts), len(slot_load), top_k,
        MOST=replicas.shape[1], BLOCK=block, EXPERT_BINS=_bins(expert_load) if many else 0,
        SLOT_BINS=_bins(slot_load) if many else 0,
    )  # fmt: skip


def _bins(load: Tensor) -> int:
    return max(128, next_power_of_2(len(load)))


@triton.jit
def _place(
    ids, replicas, counts, expert_load, slot_load, counting, out, seed, pairs, experts, slots, top_k,
    MOST: tl.constexpr, BLOCK: tl.constexpr, EXPERT_BINS: tl.constexpr, SLOT_BINS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    given = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    physical, valid = place_ids(given, at // top_k, replicas, counts, experts, seed, MOST)
    tl.store(out + at, tl.where(valid, physical, tl.where(given == -1, given, slots)), mask=inside)
    if tl.load(counting) != 0:
        # sums of whole numbers are the same in any order
        if EXPERT_BINS:
            _count(expert_load, given, valid, experts, EXPERT_BINS)
            _count(slot_load, physical, valid, slots, SLOT_BINS)
        else:
            count_ids(given, physical, valid, expert_load, slot_load)


@triton.jit
def place_ids(given, row, replicas, counts, experts, seed, MOST: tl.constexpr):
    """Physical ids of logical ones in these rows of a call, and whether they are: for ids of no expert they are noise.
    MOST: replicas that an expert may have"""
    known = (given >= 0) & (given < experts)
    safe = tl.where(known, given, 0).to(tl.int64)
    at = safe * MOST
    if MOST > 1:
        mixed = tl.cast(row, tl.int64) * 2654435761 + safe * 2246822519 + seed
        at += ((mixed & 0xFFFFFFFF) * tl.load(counts + safe)) >> 32
    return tl.load(replicas + at), known


@triton.jit
def count_ids(given, physical, known, expert_load, slot_load):
    one = tl.full(given.shape, 1, tl.int64)
    tl.atomic_add(expert_load + given, one, mask=known, sem="relaxed")
    tl.atomic_add(slot_load + physical, one, mask=known, sem="relaxed")


@triton.jit
def _count(load, found, mask, most, BINS: tl.constexpr):
    lane = tl.arange(0, BINS)
    count = tl.histogram(found.to(tl.int32), BINS, mask=mask)
    tl.atomic_add(load + lane, count.to(tl.int64), mask=(count > 0) & (lane < most), sem="relaxed")
