"""Small steps on received rows: ids a kernel can take, and extremes. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms allocate nothing and never wait.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clean_ids(
    ids: Tensor, weights: Tensor | None, base: int, num_slots: int, out_ids: Tensor, out_weights: Tensor | None
) -> None:
    """Local ids as kernels want them: int32, distinct within a row, -1 for whatever is no slot and for routes of weight
    0; a repeated id's weight goes to its first place.

    ids: int [N, K], counted from `base`; weights: float32 [N, K] or None; out_ids: int32 [N, K]; out_weights: float32
    [N, K], None with weights None; all contiguous
    """
    if ids.is_cuda:
        _triton().clean_ids(ids, weights, base, num_slots, out_ids, out_weights)
        return
    ids = ids - base
    valid = (ids >= 0) & (ids < num_slots)
    if weights is not None:
        valid = valid & (weights != 0)
    top_k = ids.shape[1]
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)  # [N, K, K]
    repeated = (same & ids.new_ones(top_k, top_k, dtype=torch.bool).tril(-1)).any(2)
    out_ids.copy_(torch.where(valid & ~repeated, ids, -1))
    if weights is not None and out_weights is not None:
        merged = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
        out_weights.copy_(torch.where(out_ids >= 0, merged, 0.0))


def row_extremes(x: Tensor, ids: Tensor, out: Tensor) -> None:
    """Raise `out` to the largest magnitude and the largest squared length among rows that have a local expert; other
    rows may hold anything. x: [N, H]; ids: int32 [N, K]; out: float32 [2], zero to begin with."""
    if x.is_cuda:
        _triton().row_extremes(x, ids, out)
        return
    rows = torch.where((ids >= 0).any(1, keepdim=True), x.float(), 0.0)
    torch.maximum(out, torch.stack([rows.abs().max(), rows.square().sum(1).max()]), out=out)


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.experts.flashinfer import row_kernels_triton

    return row_kernels_triton
