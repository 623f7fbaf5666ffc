"""How a checkpoint stores the experts of a block, and how to read one expert's piece of it and nothing more.

A format knows names relative to the block and turns slices into canonical tensors (`w13` gate first, `w2`, biases):
plain numbers, or the very bytes of a quantised checkpoint where a layer is quantised alike.
`inner` is the [start, stop) of the intermediate size that an etp rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.types import dtype_name
from ep_moe.weights.dequantize import FP8_BLOCK, INT4_GROUP
from ep_moe.weights.microscale import MX_BLOCK, dequantize_int4, dequantize_mxfp4

Inner = tuple[int, int]
Codes = Mapping[str, torch.dtype]  # by how a name ends
ALL = slice(None)
NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NONE: Codes = MappingProxyType({})


class Source(Protocol):
    """Named tensors that can be read in part: a checkpoint on disk, or a module in memory."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Of what `read` gives; None for one that torch has no name for."""

    def read(self, name: str, *index: int | slice) -> Tensor:
        """The part at `index` (all of it without one), dequantised where the source stores block scales."""

    def raw(self, name: str, *index: int | slice) -> Tensor:
        """As `read`, but as it is stored."""

    def under(self, block: str) -> list[str]:
        """The names of a block's tensors."""

    def companions(self, name: str) -> tuple[str, ...]:
        """The tensors that `read` takes besides a tensor: the factors of its codes."""

    def fp8_scales(self, name: str) -> str:
        """Of a float8 matrix, what has a factor of its own: "blocks" of 128 x 128, in `{name}_scale_inv`, or "rows" or
        the "matrix", in `{name}_scale`. "" for other tensors."""


class ExpertFormat(ABC):
    """One way to store a block's experts. Names are relative to the block, without a leading dot.

    codes, stored_codes: the dtypes of those tensors of `shapes` and `stored_shapes` that are no numbers, or must not be
        rounded; bias: the experts have biases; remedy: where `stored_shapes` are not there
    """

    codes: ClassVar[Codes] = _NONE
    stored_codes: ClassVar[Codes] = _NONE
    bias: bool = False
    remedy: ClassVar[str] = "choose another quantization"

    @abstractmethod
    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that must be there, with its shape."""

    @abstractmethod
    def marker(self) -> str:
        """The tensor by which a checkpoint in this format is known."""

    @abstractmethod
    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        """One expert's canonical plain tensors, cut to `inner`."""

    def stored_shapes(self, config: MoEConfig, scheme: str) -> dict[str, tuple[int, ...]]:
        """What `read_stored` needs besides `shapes`."""
        return {}

    def unread(self, config: MoEConfig) -> list[str]:
        """Tensors that would change what the others mean, and are not read."""
        return []

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        """Whether the checkpoint's bytes are those of a quantisation scheme, so that `read_stored` can take them."""
        return False

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        """One expert's canonical tensors in a scheme that it `holds`, cut to `inner`; no number is changed."""
        raise NotImplementedError(f"{type(self).__name__} stores plain numbers")


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

    def stored_shapes(self, config: MoEConfig, scheme: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}_scale_inv": (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            for name, (rows, columns) in self.shapes(config).items()
        }

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        return scheme == "fp8_block" and source.fp8_scales(f"{block}.{self.marker()}") == "blocks"

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        gate, up, down = (f"{block}.{name.format(e=expert)}" for name in (self.gate, self.up, self.down))
        span, blocks = slice(*inner), slice(inner[0] // FP8_BLOCK, inner[1] // FP8_BLOCK)
        return {
            "w13": concatenate(source.raw(gate, span, ALL), source.raw(up, span, ALL)),
            "w13_scale": torch.cat([source.raw(f"{name}_scale_inv", blocks, ALL) for name in (gate, up)]),
            "w2": source.raw(down, ALL, span),
            "w2_scale": source.raw(f"{down}_scale_inv", ALL, blocks),
        }


@dataclass(frozen=True)
class PackedInt4(ExpertFormat):
    """compressed-tensors' `pack-quantized` with 4 bits, symmetric, groups of 128: per projection `weight_packed` int32
    [rows, columns / 8], eight numbers + 8 to a word from the low bits up, and `weight_scale` [rows, columns / 128]."""

    gate: str
    up: str
    down: str
    codes: ClassVar[Codes] = MappingProxyType({"_packed": torch.int32})
    stored_codes: ClassVar[Codes] = MappingProxyType({"_scale": torch.bfloat16})

    def unread(self, config: MoEConfig) -> list[str]:
        ends, names = ("_zero_point", "_g_idx"), (self.gate, self.up, self.down)
        return [f"{name.format(e=e)}{end}" for e in range(config.num_experts) for name in names for end in ends]

    def stored_shapes(self, config: MoEConfig, scheme: str) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes(config).items() if name.endswith("_scale")}

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        inner, hidden = config.intermediate_size, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(config.num_experts):
            for name, rows, columns in (
                (self.gate, inner, hidden),
                (self.up, inner, hidden),
                (self.down, hidden, inner),
            ):
                shapes[f"{name.format(e=expert)}_packed"] = (rows, columns // 8)
                shapes[f"{name.format(e=expert)}_scale"] = (rows, columns // INT4_GROUP)
        return shapes

    def marker(self) -> str:
        return f"{self.gate.format(e=0)}_packed"

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        return scheme == "int4_fp8"

    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        # an etp piece may begin inside a group of 128: read whole groups, then cut
        first, last = inner[0] // INT4_GROUP, -(-inner[1] // INT4_GROUP)
        gate, up = (self._parts(source, block, name, expert, slice(*inner), ALL) for name in (self.gate, self.up))
        down = dequantize_int4(*self._parts(source, block, self.down, expert, ALL, slice(first, last)))
        start = first * INT4_GROUP
        return {
            "w13": torch.cat([dequantize_int4(*gate), dequantize_int4(*up)]),
            "w2": down[:, inner[0] - start : inner[1] - start],
        }

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        span, groups = slice(*inner), slice(inner[0] // INT4_GROUP, inner[1] // INT4_GROUP)
        gate, up = (self._parts(source, block, name, expert, span, ALL) for name in (self.gate, self.up))
        w2, w2_scale = self._parts(source, block, self.down, expert, ALL, groups)
        return {
            "w13": torch.cat([gate[0], up[0]]),
            "w13_scale": torch.cat([gate[1], up[1]]),
            "w2": w2,
            "w2_scale": w2_scale,
        }

    def _parts(
        self, source: Source, block: str, name: str, expert: int, rows: slice, groups: slice
    ) -> tuple[Tensor, Tensor]:
        """Two's complement nibbles uint8 [rows, columns / 2], and scales, of whole groups of columns."""
        full, words = f"{block}.{name.format(e=expert)}", INT4_GROUP // 8
        columns = ALL if groups == ALL else slice(groups.start * words, groups.stop * words)
        packed = source.raw(f"{full}_packed", rows, columns).contiguous().view(torch.uint8)
        return packed ^ 0x88, source.raw(f"{full}_scale", rows, groups)


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
    bias: bool = True
    codes: ClassVar[Codes] = MappingProxyType({"_blocks": torch.uint8, "_scales": torch.uint8})

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        experts, rows, inner, hidden = config.num_experts, config.w13_rows, config.intermediate_size, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, out, contracted in ((self.gate_up, rows, hidden), (self.down, hidden, inner)):
            blocks = contracted // MX_BLOCK
            shapes |= {
                f"{name}_blocks": (experts, out, blocks, MX_BLOCK // 2),
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
        first, last = inner[0] // MX_BLOCK, -(-inner[1] // MX_BLOCK)
        columns = slice(first, last)
        w2 = dequantize_mxfp4(
            source.read(f"{down}_blocks", expert, ALL, columns), source.read(f"{down}_scales", expert, ALL, columns)
        )
        bias = source.read(f"{gate_up}_bias", expert, rows)
        return {
            "w13": torch.cat([both[0::2], both[1::2]]),
            "w2": w2[:, inner[0] - first * MX_BLOCK : inner[1] - first * MX_BLOCK],
            "w13_bias": torch.cat([bias[0::2], bias[1::2]]),
            "w2_bias": source.read(f"{down}_bias", expert),
        }

    def holds(self, source: Source, block: str, scheme: str) -> bool:
        return scheme in ("mxfp4", "mxfp4_fp8", "mxfp4_mxfp8")

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        gate_up, down = f"{block}.{self.gate_up}", f"{block}.{self.down}"
        rows, columns = slice(2 * inner[0], 2 * inner[1]), slice(inner[0] // MX_BLOCK, inner[1] // MX_BLOCK)

        def gate_first(part: str) -> Tensor:
            both = source.raw(f"{gate_up}{part}", expert, rows)
            return torch.cat([both[0::2], both[1::2]])

        return {
            "w13": gate_first("_blocks").flatten(1),
            "w13_scale": gate_first("_scales"),
            "w2": source.raw(f"{down}_blocks", expert, ALL, columns).flatten(1),
            "w2_scale": source.raw(f"{down}_scales", expert, ALL, columns),
            "w13_bias": gate_first("_bias"),
            "w2_bias": source.raw(f"{down}_bias", expert),
        }


def concatenate(*parts: Tensor) -> Tensor:
    """torch.cat, also of float8, which some versions cannot."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def scalar(source: Source, name: str) -> Tensor:
    return source.raw(name).reshape(()).float()


def input_scale(weight: str) -> str:
    """The name of a projection's calibrated scale, by that of its weight."""
    return f"{weight.removesuffix('weight')}input_scale"


def find_format(source: Source, block: str, formats: tuple[ExpertFormat, ...]) -> ExpertFormat | None:
    """The first format whose marker the source has."""
    return next((known for known in formats if source.has(f"{block}.{known.marker()}")), None)


def wrong_tensors(
    source: Source, block: str, expected: Mapping[str, tuple[int, ...]], codes: Codes = _NONE
) -> str | None:
    """None, or by name the first tensor that is missing, has another shape, or is neither numbers nor of its code's
    dtype. A scalar may have the shape [1]."""
    for name, shape in expected.items():
        full = f"{block}.{name}"
        if not source.has(full):
            return f"{full} is missing; expected shape {list(shape)}"
        if source.shape(full) != shape and (shape or source.shape(full) != (1,)):
            return f"{full} must have shape {list(shape)}, got {list(source.shape(full))}"
        code = next((dtype for end, dtype in codes.items() if name.endswith(end)), None)
        allowed, dtype = NUMBERS if code is None else (code,), source.dtype(full)
        if dtype not in allowed:
            got = "a dtype that torch has not" if dtype is None else dtype_name(dtype)
            return f"{full} must be {' or '.join(map(dtype_name, allowed))}, got {got}"
    return None
