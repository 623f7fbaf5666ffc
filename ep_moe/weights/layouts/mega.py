"""The layout that FlashInfer's bf16 mega kernel for Hopper reads w13 in.

Its first product has tiles of 256 rows of w13, and its epilogue needs a gate and its up in one tile: rows come in turns
of 32, gate, up, gate, up (`GATE_UP_GROUP` in cake_weights.py, FlashInfer 0.7.2.post1). The fp8 one reads canonical
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ep_moe.weights.layouts.base import WeightLayout

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
