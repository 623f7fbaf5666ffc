"""Rows in fp8_block: E4M3 with a float32 scale for each 128 columns, linear. DeepSeek-V3 rounds its activations so."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
_FP8_MAX = 448.0
_SMALLEST = 1e-10  # a smaller largest magnitude counts as this, so that zeros have a scale


def round_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., H] to E4M3 [..., H] and scales [..., H / 128]: value = number * scale, scale = largest value / 448."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // BLOCK, device=x.device)
    if x.is_cuda and x.dtype != torch.float32:
        from ep_moe.experts.fp8_block_kernels import quantize_rows

        quantize_rows(x.contiguous(), out, scale)
        return out, scale
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).clamp(min=_SMALLEST) / _FP8_MAX
    return out.copy_((blocks * (1 / scale).unsqueeze(-1)).flatten(-2)), scale


def widen_blocks(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to `dtype`."""
    wide: Tensor = (x.float().unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(-2)
    return wide.to(dtype)
