"""Checkpoints in E4M3 with a scale for each matrix, or each of its rows: NVIDIA's Model Optimizer (quant_algo FP8) and
compressed-tensors (format float-quantized) write them, and AutoFP8 did.

Per expert and projection: `weight` float8_e4m3fn [rows, columns], `weight_scale` of any float dtype, [] or [1], or
[rows] or [rows, 1], value = number * scale; where activations were calibrated `input_scale`, [] or [1], too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.weights.dequantize import FP8
from ep_moe.weights.formats import ALL, Inner, PerExpert, Source, concatenate, input_scale, scalar

STATIC, DYNAMIC = "fp8_static", "fp8_dynamic"


@dataclass(frozen=True)
class ScaledFp8(PerExpert):
    """Names as in `PerExpert`; `gate`, `up` and `down` end in "weight". The source gives its numbers; its bytes are
    those of a scheme where a matrix has one scale."""

    # calibration leaves out what it never reached
    remedy: ClassVar[str] = f"calibrate with more data, or choose {DYNAMIC}"

    def marker(self) -> str:
        return f"{super().marker()}_scale"

    def stored_shapes(self, config: MoEConfig, scheme: str) -> dict[str, tuple[int, ...]]:
        names = self.shapes(config)
        scales = [f"{name}_scale" for name in names] + [input_scale(n) for n in names if scheme == STATIC]
        return dict.fromkeys(scales, ())

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        name = f"{block}.{self.gate.format(e=0)}"
        if scheme not in (STATIC, DYNAMIC) or source.fp8_scales(name) != "matrix":
            return False
        return scheme == DYNAMIC or source.has(input_scale(name))

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        """w13 has one scale and one input scale, the larger of gate's and up's. Where their scales differ, the half
        with the smaller is rounded anew, and the rest keeps its bytes."""
        gate, up, down = (f"{block}.{name.format(e=expert)}" for name in (self.gate, self.up, self.down))
        scales = {name: scalar(source, f"{name}_scale") for name in (gate, up, down)}
        w13_scale = torch.maximum(scales[gate], scales[up])
        halves = [_under(w13_scale, source.raw(name, slice(*inner), ALL), scales[name]) for name in (gate, up)]
        found = {
            "w13": concatenate(*halves),
            "w13_scale": w13_scale,
            "w2": source.raw(down, ALL, slice(*inner)),
            "w2_scale": scales[down],
        }
        if scheme == STATIC:
            inputs = {name: scalar(source, input_scale(name)) for name in (gate, up, down)}
            found |= {"w13_input_scale": torch.maximum(inputs[gate], inputs[up]), "w2_input_scale": inputs[down]}
        return found


def _under(scale: Tensor, data: Tensor, own: Tensor) -> Tensor:
    """The same numbers under another scale, which is no smaller: the same bytes if it is its own."""
    return data if torch.equal(own, scale) else (data.float() * (own / scale)).to(FP8)
