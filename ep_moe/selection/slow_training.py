"""A warning where a GPU is trained with the kernel in plain torch, though one with a backward of its own is there."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ep_moe import registry
from ep_moe.selection import explain


class SlowTraining:
    """Of one layer; it warns once. Alike on all ranks, which have one choice of backends."""

    def __init__(self) -> None:
        self._looked = False

    def look(self, layer: Any) -> None:
        """Warn at the first call with gradients, if "auto" chose `reference` on a GPU. layer: a MoELayer"""
        if self._looked or torch.compiler.is_compiling():
            return
        self._looked = True
        if layer.context.device.type != "cuda" or layer.choice.experts != "reference":
            return
        if layer._asked["experts"] != explain.AUTO:
            return
        kernels = {name for name in registry.targets("experts") if registry.load("experts", name).own_backward}
        refused = {row.experts: row.reason for row in layer.explain() if row.experts in kernels}
        if refused:
            text = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            warnings.warn(
                f"{layer.name} is trained with experts=reference, in plain torch, several times slower than a kernel "
                f"with a backward of its own ({text}); name experts='reference' to be asked no more",
                stacklevel=2,
            )
