"""Ids for transports that take them on trust: any id sends its row to some rank, or into memory outside the buffers.

On the wire every route names an expert; one that named none has weight 0, and a route of weight 0 has no expert on
arrival. The torch forms are the definition, and what runs on a CPU; the Triton forms (GPUs) are one launch each."""

from __future__ import annotations

import torch
from torch import Tensor


def to_wire(ids: Tensor, weights: Tensor, home: int, num_physical: int, out_ids: Tensor, out_weights: Tensor) -> None:
    """Physical ids with -1 (or anything out of range) to ids that all name an expert: where a route has none, or
    W > K leaves room, the row's first valid id, so that no further rank is involved; `home` in a row without any.

    ids: int [T, K]; weights: float32 [T, K]; home: an expert of this rank; out_ids: int32 [T, W]; out_weights: float32
    [T, W], 0 where a route named no expert; all contiguous
    """
    if ids.is_cuda:
        _triton().to_wire(ids, weights, home, num_physical, out_ids, out_weights)
        return
    top_k = ids.shape[1]
    valid = (ids >= 0) & (ids < num_physical)
    first = ids.gather(1, valid.int().argmax(1, keepdim=True))
    first = torch.where(valid.any(1, keepdim=True), first, home)
    out_ids.copy_(first.expand_as(out_ids))
    out_ids[:, :top_k] = torch.where(valid, ids, first)
    out_weights.zero_()
    out_weights[:, :top_k] = torch.where(valid, weights, 0.0)


def to_distinct(
    ids: Tensor, weights: Tensor, home: int, num_physical: int, out_ids: Tensor, out_weights: Tensor
) -> None:
    """As `to_wire`, for transports with room for one copy of a row per expert: all ids of a row differ. Picks without
    an expert name the next ones from `home` on that the row does not; of a repeated id the first has all its weight.

    out_ids: int32 [T, K]; out_weights: float32 [T, K]; K at most num_physical
    """
    if ids.is_cuda:
        _triton().to_distinct(ids, weights, home, num_physical, out_ids, out_weights)
        return
    top_k = ids.shape[1]
    valid = (ids >= 0) & (ids < num_physical)
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(1)  # [T, K, K]
    keep = valid & ~(same & ids.new_ones(top_k, top_k, dtype=torch.bool).tril(-1)).any(2)
    others = (home + torch.arange(top_k, device=ids.device)) % num_physical
    free = ~((others.unsqueeze(1) == ids.unsqueeze(1)) & valid.unsqueeze(1)).any(2)  # [T, K] of `others`
    nth_free, nth_wanted = free.cumsum(1), (~keep).cumsum(1)
    mine = (nth_wanted.unsqueeze(2) == nth_free.unsqueeze(1)) & free.unsqueeze(1)
    out_ids.copy_(torch.where(keep, ids, torch.where(mine, others, 0).sum(2)))
    merged = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    out_weights.copy_(torch.where(keep, merged, 0.0))


def to_local(ids: Tensor, weights: Tensor, base: int, slots_per_rank: int, out: Tensor) -> None:
    """Received wire ids to local ones: -1 for other ranks' experts, for routes of weight 0, and for empty rows.

    ids: int32 [N, W]; weights: float32 [N, W]; base: this rank's first physical id; out: int32 [N, W]; all contiguous
    """
    if ids.is_cuda:
        _triton().to_local(ids, weights, base, slots_per_rank, out)
        return
    local = ids - base
    out.copy_(torch.where((local >= 0) & (local < slots_per_rank) & (weights != 0), local, -1))


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.all2all import wire_ids_triton

    return wire_ids_triton
