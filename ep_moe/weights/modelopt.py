"""NVFP4 checkpoints as NVIDIA's Model Optimizer exports them (`hf_quant_config.json`: quant_algo NVFP4, group_size 16).

Per expert and projection: `weight` uint8 [rows, columns / 2], `weight_scale` float8_e4m3fn [rows, columns / 16], and
float32 scalars `weight_scale_2` and `input_scale` (decode factors: amax / (448 * 6)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.weights.formats import ALL, Inner, PerExpert, Source, concatenate, input_scale, scalar
from ep_moe.weights.microscale import NVFP4_BLOCK, dequantize_nvfp4, quantize_nvfp4


@dataclass(frozen=True)
class ModelOptNvfp4(PerExpert):
    """Names as in `PerExpert`; `gate`, `up` and `down` end in "weight". The source gives its numbers."""

    # ModelOpt leaves out what its calibration never reached
    remedy: ClassVar[str] = "calibrate with more data, or choose another quantization"

    def marker(self) -> str:
        return f"{super().marker()}_scale_2"

    def stored_shapes(self, config: MoEConfig, scheme: str) -> dict[str, tuple[int, ...]]:
        return {
            input_scale(name.format(e=expert)): ()
            for expert in range(config.num_experts)
            for name in (self.gate, self.up, self.down)
        }

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        return scheme == "nvfp4"

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        """w13 has one global scale and one input scale, the larger of gate's and up's. An export has equal ones; where
        the global scales differ, the half with the smaller is rounded anew, and the rest keeps its bytes."""
        gate, up, down = (f"{block}.{name.format(e=expert)}" for name in (self.gate, self.up, self.down))
        span = slice(*inner)
        halves = [(*_parts(source, name, span, ALL), scalar(source, f"{name}_scale_2")) for name in (gate, up)]
        global_scale = torch.maximum(halves[0][2], halves[1][2])
        (gate_data, gate_scale), (up_data, up_scale) = (_under(global_scale, *half) for half in halves)
        w2, w2_scale = _parts(source, down, ALL, slice(inner[0] // NVFP4_BLOCK, inner[1] // NVFP4_BLOCK))
        inputs = {name: scalar(source, input_scale(name)) for name in (gate, up, down)}
        return {
            "w13": concatenate(gate_data, up_data),
            "w13_scale": concatenate(gate_scale, up_scale),
            "w13_global_scale": global_scale,
            "w13_input_scale": torch.maximum(inputs[gate], inputs[up]),
            "w2": w2,
            "w2_scale": w2_scale,
            "w2_global_scale": scalar(source, f"{down}_scale_2"),
            "w2_input_scale": inputs[down],
        }


def _parts(source: Source, name: str, rows: slice, blocks: slice) -> tuple[Tensor, Tensor]:
    """Data and scales of whole blocks of columns."""
    half = NVFP4_BLOCK // 2
    columns = ALL if blocks == ALL else slice(blocks.start * half, blocks.stop * half)
    return source.raw(name, rows, columns), source.raw(f"{name}_scale", rows, blocks)


def _under(global_scale: Tensor, data: Tensor, scale: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scales of the same numbers under another global scale: the same bytes if it is its own."""
    if torch.equal(own, global_scale):
        return data, scale
    return quantize_nvfp4(dequantize_nvfp4(data, scale, own), global_scale)
