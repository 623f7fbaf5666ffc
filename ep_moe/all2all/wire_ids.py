"""Ids for transports that take them on trust: any id sends its row to some rank, or into memory that is nobody's.

On the wire every pick names an expert; one that names none has weight 0, and a pick of weight 0 is nobody's on arrival.
The torch forms are the definition, and what runs on a CPU; the Triton forms (GPUs) are one launch each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_wire(ids: Tensor, weights: Tensor, home: int, num_physical: int, out_ids: Tensor, out_weights: Tensor) -> None:
    """Physical ids with -1 (or anything out of range) to ids that all name an expert: where a pick has none, or
    W > K leaves room, the row's first valid id, so that no further rank is involved; `home` in a row without any.

    ids: int [T, K]; weights: float32 [T, K]; home: an expert of this rank; out_ids: int32 [T, W]; out_weights: float32
    [T, W], 0 where a pick named no expert; all contiguous
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


def to_local(ids: Tensor, weights: Tensor, base: int, cap: int, out: Tensor) -> None:
    """Received wire ids to local ones: -1 for other ranks' experts, for picks of weight 0, and for empty rows.

    ids: int32 [N, W]; weights: float32 [N, W]; base: this rank's first physical id; out: int32 [N, W]; all contiguous
    """
    if ids.is_cuda:
        _triton().to_local(ids, weights, base, cap, out)
        return
    local = ids - base
    out.copy_(torch.where((local >= 0) & (local < cap) & (weights != 0), local, -1))


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.all2all import wire_ids_triton

    return wire_ids_triton
