"""The layouts that FlashInfer's CUTLASS MoE reads on Hopper and Blackwell, per scheme.

On Blackwell data are as they are, up rows first (`flashinfer.fused_moe.cutlass_fused_moe`: fc1 is [up; gate]), and
block scales swizzled as the tensor cores load them, filled up with zeros to whole tiles of 128 rows x 4 blocks. The
binding reads data of 4 bits as int64 and scales as int32 (flashinfer_cutlass_fused_moe_binding.cu of 0.7.2,
getQuantParams): views, made at the call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import Scheme, TensorSpec
from ep_moe.weights.layouts.cutlass_sm90 import CutlassSm90
from ep_moe.weights.layouts.scale_swizzle import ScaleLayout, arrange, linear

SM100_SCHEMES = ("nvfp4", "mxfp4_mxfp8", "mxfp8")


class CutlassSm100(CutlassSm90):
    """Every scheme of `CutlassSm90`, and those of Blackwell: a scheme has one layout, whatever the GPU.

    Global and input scales stay the checkpoint's. What the kernel wants to know of them depends on which experts a rank
    holds, so it is computed at the call.
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self._swizzled = ("w13_scale", "w2_scale") if scheme.name in SM100_SCHEMES else ()
        for name in self._swizzled:
            (rows, blocks), stored = self.canonical[name].shape, self.canonical[name].dtype
            self._specs[name] = TensorSpec((-(-rows // 128) * 128, -(-blocks // 4) * 4), stored)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = super().prepare(tensors)
        return stored | {name: arrange(stored[name], ScaleLayout.SWIZZLED_128X4) for name in self._swizzled}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = {
            name: linear(stored[name], ScaleLayout.SWIZZLED_128X4, *self.canonical[name].shape)
            for name in self._swizzled
        }
        return super().restore({**stored, **scales})
