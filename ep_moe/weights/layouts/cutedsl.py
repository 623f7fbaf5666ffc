"""The layout that FlashInfer's CuteDSL MoE reads on Blackwell (NVFP4).

The layout is that of `prepare_cute_dsl_weights` in FlashInfer 0.7.2 (fused_moe/prepare.py):

- Rows of w13 alternate: 64 rows of up, then 64 rows of gate. One tile of the first GEMM then holds both operands of the
  activation.
- Block scales are in the 128 x 4 swizzle. The kernel reads those of all experts as one tensor of six dimensions,
  (32, 4, rows / 128, 4, blocks / 4, experts). This is a view of the swizzled bytes, which are stored contiguously as
  [L, rows, blocks], so that an expert can move to another slot. `mma_view` creates the view at the call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import Scheme
from ep_moe.quant.weight_formats import TensorSpec
from ep_moe.weights.layouts.base import ScaleLayout, WeightLayout, arrange, linearize_scales, swap_halves

GROUP = 64  # rows of up, then as many of gate
_SCALES = ("w13_scale", "w2_scale")


class CuteDsl(WeightLayout):
    """Interleaves the rows of a gated w13, and swizzles scales padded to whole tiles.

    Global and input scales stay as in the checkpoint.
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self._specs = dict(self.canonical)
        for name in _SCALES:
            (rows, blocks), stored = self.canonical[name].shape, self.canonical[name].dtype
            self._specs[name] = TensorSpec((-(-rows // 128) * 128, -(-blocks // 4) * 4), stored)

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = dict(tensors)
        if self.config.activation.gated:
            stored |= {name: interleave(swap_halves(stored[name])) for name in ("w13", "w13_scale")}
        return stored | {name: arrange(stored[name], ScaleLayout.SWIZZLED_128X4) for name in _SCALES}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = dict(stored)
        for name in _SCALES:
            tensors[name] = linearize_scales(stored[name], ScaleLayout.SWIZZLED_128X4, *self.canonical[name].shape)
        if self.config.activation.gated:
            tensors |= {name: swap_halves(deinterleave(tensors[name])) for name in ("w13", "w13_scale")}
        return tensors


def interleave(rows: Tensor) -> Tensor:
    """Reorder rows [2I, ...] from two halves to alternating groups of `GROUP` rows of each half."""
    return _turned(rows, (2, -1))


def deinterleave(rows: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    return _turned(rows, (-1, 2))


def _turned(rows: Tensor, groups: tuple[int, int]) -> Tensor:
    turned: Tensor = rows.unflatten(0, (*groups, GROUP)).transpose(0, 1).contiguous().view(rows.shape)
    return turned


def mma_view(swizzled: Tensor) -> Tensor:
    """View stored scales [L, rows, blocks] as uint8 (32, 4, rows / 128, 4, blocks / 4, L).

    rows is a multiple of 128 and blocks is a multiple of 4.
    """
    slots, rows, blocks = swizzled.shape
    tiles = swizzled.view(torch.uint8).view(slots, rows // 128, blocks // 4, 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)
