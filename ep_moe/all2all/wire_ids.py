"""Ids for transports whose libraries do not check them: an id out of range would write outside the buffers.

On the wire every route names an expert. A route without an expert is sent with weight 0, and a received route of weight
0 is treated as having none. The torch code defines the result and runs on CPU. On GPUs, Triton kernels do each function
in one launch.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.runtime.launch_cache import cdiv, kept_launches, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton


def to_wire(
    ids: Tensor, weights: Tensor, own_expert: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    """Replace ids that name no expert (-1 or out of range), and pad rows from K to W ids.

    The replacement is the first valid id of the row, so that no additional rank receives it. In a row without a valid
    id it is `own_expert`.

    ids: int [T, K]; weights: float32 [T, K]; own_expert: physical id of an expert of this rank; out_ids: int32 [T, W];
    out_weights: float32 [T, W], 0 for replaced and padded routes; all contiguous
    """
    if ids.is_cuda:
        launch_to_wire(ids, weights, own_expert, num_physical, out_ids, out_weights)
        return
    top_k = ids.shape[1]
    valid = (ids >= 0) & (ids < num_physical)
    first = ids.gather(1, valid.int().argmax(1, keepdim=True))
    first = torch.where(valid.any(1, keepdim=True), first, own_expert)
    out_ids.copy_(first.expand_as(out_ids))
    out_ids[:, :top_k] = torch.where(valid, ids, first)
    out_weights.zero_()
    out_weights[:, :top_k] = torch.where(valid, weights, 0.0)


def to_distinct(
    ids: Tensor, weights: Tensor, own_expert: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    """Make all ids of a row valid and distinct, for transports that hold one copy of a row per expert.

    A route without an expert gets the next physical id from `own_expert` on that its row does not use, with weight 0.
    The first of several equal ids gets the sum of their weights, and the others count as routes without an expert.

    ids, weights, own_expert: as of `to_wire`; out_ids: int32 [T, K]; out_weights: float32 [T, K]; K at most
    num_physical
    """
    if ids.is_cuda:
        launch_to_distinct(ids, weights, own_expert, num_physical, out_ids, out_weights)
        return
    top_k = ids.shape[1]
    valid = (ids >= 0) & (ids < num_physical)
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(1)  # [T, K, K]
    keep = valid & ~(same & ids.new_ones(top_k, top_k, dtype=torch.bool).tril(-1)).any(2)
    others = (own_expert + torch.arange(top_k, device=ids.device)) % num_physical
    free = ~((others.unsqueeze(1) == ids.unsqueeze(1)) & valid.unsqueeze(1)).any(2)  # [T, K] of `others`
    nth_free, nth_wanted = free.cumsum(1), (~keep).cumsum(1)
    mine = (nth_wanted.unsqueeze(2) == nth_free.unsqueeze(1)) & free.unsqueeze(1)
    out_ids.copy_(torch.where(keep, ids, torch.where(mine, others, 0).sum(2)))
    merged = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    out_weights.copy_(torch.where(keep, merged, 0.0))


def to_local(ids: Tensor, weights: Tensor, base: int, slots_per_rank: int, out: Tensor) -> None:
    """Convert received ids to local ids: -1 for experts of other ranks, routes of weight 0, and empty rows.

    ids: int32 [N, W]; weights: float32 [N, W]; base: this rank's first physical id; out: int32 [N, W]; all contiguous
    """
    if ids.is_cuda:
        launch_to_local(ids, weights, base, slots_per_rank, out)
        return
    local = ids - base
    out.copy_(torch.where((local >= 0) & (local < slots_per_rank) & (weights != 0), local, -1))


# --- Triton ---------------------------------------------------------------------------------------------------------

_BLOCK = 1024


def launch_to_wire(
    ids: Tensor, weights: Tensor, own_expert: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    (rows, top_k), wire = ids.shape, out_ids.shape[1]
    if not rows:
        return
    width = next_power_of_2(wire)
    block = _BLOCK // width
    _to_wire[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, own_expert, num_physical,
        TOP_K=top_k, WIRE=wire, WIDTH=width, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _to_wire(
    ids, weights, out_ids, out_weights, rows, own_expert, num_physical,
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
    first = tl.where(place < WIDTH, first, own_expert)
    inside = (row < rows) & (column < WIRE)
    tl.store(out_ids + row * WIRE + column, tl.where(valid, id, first).to(tl.int32), mask=inside)
    tl.store(out_weights + row * WIRE + column, tl.where(valid, weight, 0.0), mask=inside)


def launch_to_distinct(
    ids: Tensor, weights: Tensor, own_expert: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    rows, top_k = ids.shape
    if not rows:
        return
    width = next_power_of_2(top_k)
    block = max(1, 2 * _BLOCK // width**2)  # pairs of columns that a program compares at once
    _to_distinct[(cdiv(rows, block),)](
        ids, weights, out_ids, out_weights, rows, own_expert, num_physical, TOP_K=top_k, WIDTH=width, BLOCK=block
    )


@triton.jit
def _to_distinct(
    ids, weights, out_ids, out_weights, rows, own_expert, num_physical,
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
    other = (own_expert + column) % num_physical
    taken = tl.max(((other[None, :, None] == id[:, None, :]) & valid[:, None, :]).to(tl.int32), axis=2)
    free = taken == 0
    nth_free, nth_wanted = tl.cumsum(free.to(tl.int32), axis=1), tl.cumsum((keep == 0).to(tl.int32), axis=1)
    mine = (nth_wanted[:, :, None] == nth_free[:, None, :]) & free[:, None, :]
    filler = tl.sum(tl.where(mine, other[None, None, :], 0), axis=2)
    merged = tl.sum(tl.where(same, weight[:, None, :], 0.0), axis=2)
    tl.store(out_ids + at, tl.where(keep, id, filler).to(tl.int32), mask=inside)
    tl.store(out_weights + at, tl.where(keep, merged, 0.0), mask=inside)


def launch_to_local(ids: Tensor, weights: Tensor, base: int, slots_per_rank: int, out: Tensor) -> None:
    count = ids.numel()
    arguments = ids, weights, out, count, base, slots_per_rank
    kept_launches(ids.device)(_to_local, (cdiv(count, _BLOCK),), *arguments, BLOCK=_BLOCK)


@triton.jit
def _to_local(ids, weights, out, count, base, slots_per_rank, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    local = tl.load(ids + at, mask=inside, other=-1) - base
    weight = tl.load(weights + at, mask=inside, other=0.0)
    tl.store(out + at, tl.where((local >= 0) & (local < slots_per_rank) & (weight != 0.0), local, -1), mask=inside)
