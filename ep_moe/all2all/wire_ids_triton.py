"""The Triton forms of `wire_ids`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.runtime.grids import cdiv, next_power_of_2

_BLOCK = 1024


def to_wire(ids: Tensor, weights: Tensor, home: int, num_physical: int, out_ids: Tensor, out_weights: Tensor) -> None:
    (rows, top_k), wire = ids.shape, out_ids.shape[1]
    if not rows:
        return
    width = next_power_of_2(wire)
    block = _BLOCK // width
    _to_wire[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, home, num_physical, TOP_K=top_k, WIRE=wire, WIDTH=width, BLOCK=block
    )


@triton.jit
def _to_wire(
    ids, weights, out_ids, out_weights, rows, home, num_physical,
    TOP_K: tl.constexpr, WIRE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    given = (row < rows) & (column < TOP_K)
    id = tl.load(ids + row * TOP_K + column, mask=given, other=-1)  # noqa: A001
    weight = tl.load(weights + row * TOP_K + column, mask=given, other=0.0)
    valid = (id >= 0) & (id < num_physical)
    place = tl.min(tl.where(valid, column, WIDTH), axis=1)[:, None]
    first = tl.sum(tl.where(valid & (column == place), id, 0), axis=1)[:, None]
    first = tl.where(place < WIDTH, first, home)
    inside = (row < rows) & (column < WIRE)
    tl.store(out_ids + row * WIRE + column, tl.where(valid, id, first).to(tl.int32), mask=inside)
    tl.store(out_weights + row * WIRE + column, tl.where(valid, weight, 0.0), mask=inside)


def to_distinct(
    ids: Tensor, weights: Tensor, home: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    rows, top_k = ids.shape
    if not rows:
        return
    width = next_power_of_2(top_k)
    block = max(1, 2 * _BLOCK // width**2)  # pairs of columns that a program compares at once
    _to_distinct[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, home, num_physical, TOP_K=top_k, WIDTH=width, BLOCK=block
    )


@triton.jit
def _to_distinct(
    ids, weights, out_ids, out_weights, rows, home, num_physical,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)
    inside = (row < rows) & (column < TOP_K)[None, :]
    at = row * TOP_K + column[None, :]
    id = tl.load(ids + at, mask=inside, other=-1)  # noqa: A001
    weight = tl.load(weights + at, mask=inside, other=0.0)
    valid = (id >= 0) & (id < num_physical)
    same = (id[:, :, None] == id[:, None, :]) & valid[:, None, :]
    earlier = column[None, None, :] < column[None, :, None]
    repeated = tl.max((same & earlier).to(tl.int32), axis=2) > 0
    keep = valid & (repeated == 0)
    other = (home + column) % num_physical
    taken = tl.max(((other[None, :, None] == id[:, None, :]) & valid[:, None, :]).to(tl.int32), axis=2)
    free = taken == 0
    nth_free, nth_wanted = tl.cumsum(free.to(tl.int32), axis=1), tl.cumsum((keep == 0).to(tl.int32), axis=1)
    mine = (nth_wanted[:, :, None] == nth_free[:, None, :]) & free[:, None, :]
    filler = tl.sum(tl.where(mine, other[None, None, :], 0), axis=2)
    merged = tl.sum(tl.where(same, weight[:, None, :], 0.0), axis=2)
    tl.store(out_ids + at, tl.where(keep, id, filler).to(tl.int32), mask=inside)
    tl.store(out_weights + at, tl.where(keep, merged, 0.0), mask=inside)


def to_local(ids: Tensor, weights: Tensor, base: int, slots_per_rank: int, out: Tensor) -> None:
    count = ids.numel()
    _to_local[(cdiv(count, _BLOCK),)](ids, weights, out, count, base, slots_per_rank, BLOCK=_BLOCK)


@triton.jit
def _to_local(ids, weights, out, count, base, slots_per_rank, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    local = tl.load(ids + at, mask=inside, other=-1) - base
    weight = tl.load(weights + at, mask=inside, other=0.0)
    tl.store(out + at, tl.where((local >= 0) & (local < slots_per_rank) & (weight != 0.0), local, -1), mask=inside)
