"""A matrix's one scale where a kernel reads one for each 128 x 128 of it: the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ep_moe.quant.fp8 import FP8_BLOCK
from ep_moe.quant.schemes import TensorSpec
from ep_moe.weights.layouts.base import WeightLayout

_MATRICES = ("w13", "w2")


class PerBlock(WeightLayout):
    """Of a scheme with one scale per matrix, sizes multiples of 128: each `_scale` is [rows / 128, columns / 128]."""

    def specs(self) -> dict[str, TensorSpec]:
        return dict(self.canonical) | {f"{name}_scale": self._scale(name) for name in _MATRICES}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        spread = {n: tensors[f"{n}_scale"].expand(self._scale(n).shape).contiguous() for n in _MATRICES}
        return dict(tensors) | {f"{name}_scale": scale for name, scale in spread.items()}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(stored) | {f"{name}_scale": stored[f"{name}_scale"][0, 0] for name in _MATRICES}

    def _scale(self, name: str) -> TensorSpec:
        rows, columns = self.canonical[name].shape
        return TensorSpec((rows // FP8_BLOCK, columns // FP8_BLOCK), self.canonical[f"{name}_scale"].dtype)
