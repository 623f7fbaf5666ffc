"""From canonical tensors to those a kernel reads, one expert at a time, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
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
