"""An expert's tensors cut over etp ranks, and joined again."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import MoEConfig


def cut_dim(name: str, dims: int) -> int | None:
    """Which dimension of an expert's tensor is cut over etp; None: not at all."""
    if not name.startswith("w2"):
        return 0 if dims else None
    return 1 if dims > 1 else None  # columns; what w2 has once for a row, a bias or a scale, is every rank's


def cut(config: MoEConfig, name: str, tensor: Tensor, etp: int, etp_rank: int) -> Tensor:
    """The etp rank's piece of a whole expert's tensor; gate and up are cut alike, so that a piece has both."""
    dim = cut_dim(name, tensor.dim())
    if etp == 1 or dim is None:
        return tensor
    halves = tensor.chunk(2, dim) if _has_halves(config, name) else (tensor,)
    return torch.cat([half.chunk(etp, dim)[etp_rank] for half in halves], dim)


def join(config: MoEConfig, name: str, pieces: list[Tensor]) -> Tensor:
    """The inverse of `cut`: all etp ranks' pieces in order to the whole tensor. What is not cut is etp rank 0's: it
    alone uses w2_bias, and alone trains it."""
    dim = cut_dim(name, pieces[0].dim())
    if len(pieces) == 1 or dim is None:
        return pieces[0]
    if _has_halves(config, name):
        gates, ups = zip(*(piece.chunk(2, dim) for piece in pieces), strict=True)
        return torch.cat([*gates, *ups], dim)
    return torch.cat(pieces, dim)


def _has_halves(config: MoEConfig, name: str) -> bool:
    return name.startswith("w13") and config.activation.gated
