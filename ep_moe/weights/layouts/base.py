"""From canonical tensors to those a kernel reads, one expert at a time, and back: the contract, and the layouts of one
rule. Those of FlashInfer's kernels have files of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.fp8 import FP8_BLOCK
from ep_moe.quant.schemes import Scheme, TensorSpec


class WeightLayout:
    """The canonical layout: gate rows first, then up rows, linear scales. Kernels with another derive from this.

    config, scheme, dtype (of the activations), etp: whose piece of an expert is prepared
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        self.config = config
        self.scheme = scheme
        self.dtype = dtype
        self.etp = etp
        self.canonical = scheme.expert(config, dtype, etp)

    def specs(self) -> dict[str, TensorSpec]:
        """What is stored per slot."""
        return self.canonical

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One expert's canonical tensors to the stored ones."""
        return dict(tensors)

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `prepare`."""
        return dict(stored)


def swap_halves(tensor: Tensor) -> Tensor:
    """Gate first to up first along the first dimension, and back."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


# --- a scale for each block -------------------------------------------------------------------------------------------
# A matrix's one scale where a kernel reads one for each 128 x 128 of it: the same numbers.

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


# --- rows in turns ----------------------------------------------------------------------------------------------------
# The layout that FlashInfer's bf16 mega kernel for Hopper reads w13 in.
#
# Its first product has tiles of 256 rows of w13, and its epilogue needs a gate and its up in one tile: rows come in
# turns of 32, gate, up, gate, up (`GATE_UP_GROUP` in cake_weights.py, FlashInfer 0.7.2.post1). The fp8 one reads
# canonical tensors.

GROUP = 32


class MegaBf16(WeightLayout):
    """w13 in turns of 32 rows. I (of the etp piece) must be a multiple of 32."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors) | {"w13": in_turns(tensors["w13"])}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(stored) | {"w13": in_halves(stored["w13"])}


def in_turns(w13: Tensor) -> Tensor:
    """[gate; up] [2I, H] to 32 rows of gate, 32 of up, and so on."""
    turns: Tensor = w13.unflatten(0, (2, -1, GROUP)).transpose(0, 1).flatten(0, 2)
    return turns


def in_halves(w13: Tensor) -> Tensor:
    """The inverse."""
    halves: Tensor = w13.unflatten(0, (-1, 2, GROUP)).transpose(0, 1).flatten(0, 2)
    return halves
