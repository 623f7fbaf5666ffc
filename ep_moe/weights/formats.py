"""How a checkpoint stores the experts of a block, and how to read one expert's piece of it and nothing more.

A format knows names relative to the block and turns slices into canonical tensors (`w13` gate first, `w2`, biases).
`inner` is the [start, stop) of the intermediate size that an etp rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.weights.dequantize import MXFP4_BLOCK, dequantize_mxfp4

Inner = tuple[int, int]
ALL = slice(None)


class Source(Protocol):
    """Named tensors that can be read in part: a checkpoint on disk, or a module in memory."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, *index: int | slice) -> Tensor:
        """The part at `index` (all of it without one), dequantised where the source stores block scales."""


class ExpertFormat(ABC):
    """One way to store a block's experts. Names are relative to the block, without a leading dot."""

    @abstractmethod
    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that must be there, with its shape."""

    @abstractmethod
    def marker(self) -> str:
        """The tensor by which a checkpoint in this format is known."""

    @abstractmethod
    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        """One expert's canonical tensors, cut to `inner`."""


@dataclass(frozen=True)
class PerExpert(ExpertFormat):
    """A matrix per expert and projection: gate and up [I, H], down [H, I]. `{e}` stands for the expert."""

    gate: str
    up: str
    down: str

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        inner, hidden = config.intermediate_size, config.hidden_size
        return {
            name.format(e=expert): shape
            for expert in range(config.num_experts)
            for name, shape in ((self.gate, (inner, hidden)), (self.up, (inner, hidden)), (self.down, (hidden, inner)))
        }

    def marker(self) -> str:
        return self.gate.format(e=0)

    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        def part(name: str, *index: slice) -> Tensor:
            return source.read(f"{block}.{name.format(e=expert)}", *index)

        span = slice(*inner)
        w13 = torch.cat([part(self.gate, span, ALL), part(self.up, span, ALL)])
        return {"w13": w13, "w2": part(self.down, ALL, span)}


@dataclass(frozen=True)
class Fused(ExpertFormat):
    """All experts in one tensor per matrix.

    transposed: gate_up [E, H, 2I] and down [E, I, H], else [E, 2I, H] and [E, H, I]
    interleaved: gate and up alternate along 2I, else all of gate, then all of up
    bias: gate_up + "_bias" [E, 2I] and down + "_bias" [E, H] belong to it
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        experts, rows, inner, hidden = config.num_experts, config.w13_rows, config.intermediate_size, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            self.gate_up: (experts, hidden, rows) if self.transposed else (experts, rows, hidden),
            self.down: (experts, inner, hidden) if self.transposed else (experts, hidden, inner),
        }
        if self.bias:
            shapes |= {f"{self.gate_up}_bias": (experts, rows), f"{self.down}_bias": (experts, hidden)}
        return shapes

    def marker(self) -> str:
        return self.gate_up

    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        def rows(name: str, start: int, stop: int) -> Tensor:
            """Rows of the canonical (untransposed) matrix or vector."""
            full = f"{block}.{name}"
            if len(source.shape(full)) == 2 or not self.transposed:
                return source.read(full, expert, slice(start, stop))
            return source.read(full, expert, ALL, slice(start, stop)).t()

        def gate_first(name: str) -> Tensor:
            if self.interleaved:
                both = rows(name, 2 * inner[0], 2 * inner[1])
                return torch.cat([both[0::2], both[1::2]])
            up = config.intermediate_size
            return torch.cat([rows(name, *inner), rows(name, up + inner[0], up + inner[1])])

        down, span = f"{block}.{self.down}", slice(*inner)
        w2 = source.read(down, expert, span).t() if self.transposed else source.read(down, expert, ALL, span)
        tensors = {"w13": gate_first(self.gate_up), "w2": w2}
        if self.bias:
            tensors["w13_bias"] = gate_first(f"{self.gate_up}_bias")
            tensors["w2_bias"] = source.read(f"{down}_bias", expert)
        return tensors


@dataclass(frozen=True)
class FusedMxfp4(ExpertFormat):
    """GPT-OSS as published: `_blocks` [E, rows, columns / 32, 16] and `_scales` [E, rows, columns / 32] of MXFP4, gate
    and up rows alternating, and biases."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        experts, rows, inner, hidden = config.num_experts, config.w13_rows, config.intermediate_size, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, out, contracted in ((self.gate_up, rows, hidden), (self.down, hidden, inner)):
            blocks = contracted // MXFP4_BLOCK
            shapes |= {
                f"{name}_blocks": (experts, out, blocks, MXFP4_BLOCK // 2),
                f"{name}_scales": (experts, out, blocks),
                f"{name}_bias": (experts, out),
            }
        return shapes

    def marker(self) -> str:
        return f"{self.gate_up}_blocks"

    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        gate_up, down = f"{block}.{self.gate_up}", f"{block}.{self.down}"
        rows = slice(2 * inner[0], 2 * inner[1])
        both = dequantize_mxfp4(
            source.read(f"{gate_up}_blocks", expert, rows), source.read(f"{gate_up}_scales", expert, rows)
        )
        # an etp piece may begin inside a block of 32: read whole blocks, then cut
        first, last = inner[0] // MXFP4_BLOCK, -(-inner[1] // MXFP4_BLOCK)
        columns = slice(first, last)
        w2 = dequantize_mxfp4(
            source.read(f"{down}_blocks", expert, ALL, columns), source.read(f"{down}_scales", expert, ALL, columns)
        )
        bias = source.read(f"{gate_up}_bias", expert, rows)
        return {
            "w13": torch.cat([both[0::2], both[1::2]]),
            "w2": w2[:, inner[0] - first * MXFP4_BLOCK : inner[1] - first * MXFP4_BLOCK],
            "w13_bias": torch.cat([bias[0::2], bias[1::2]]),
            "w2_bias": source.read(f"{down}_bias", expert),
        }


def find_format(source: Source, block: str, formats: tuple[ExpertFormat, ...]) -> ExpertFormat | None:
    """The first format whose marker the source has."""
    return next((known for known in formats if source.has(f"{block}.{known.marker()}")), None)


def wrong_shapes(source: Source, block: str, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """None, or the first missing or misshapen tensor by name."""
    for name, shape in expected.items():
        full = f"{block}.{name}"
        if not source.has(full):
            return f"{full} is missing; expected shape {list(shape)}"
        if source.shape(full) != shape:
            return f"{full} must have shape {list(shape)}, got {list(source.shape(full))}"
    return None
