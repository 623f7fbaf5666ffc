"""Expert formats: how a checkpoint names the experts of a block, and how to read one expert's part of its tensors.

A format knows names relative to the block, and converts slices to canonical tensors (`w13` gate first, `w2`, biases).
Values are floating point, or the unchanged codes of a checkpoint that has the layer's own scheme. `checkpoint.stored`
detects how each matrix of each expert is stored.
`inner` is the [start, stop) of the intermediate size that an etp rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ep_moe.checkpoint.halves import join_halves
from ep_moe.checkpoint.stored import ALL, StoredMatrix, check_finite, span
from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import SCHEMES
from ep_moe.types import dtype_name

Inner = tuple[int, int]
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Source(Protocol):
    """Named tensors that can be read in part: a checkpoint on disk, or a module in memory."""

    def has(self, name: str) -> bool:
        """Return whether a tensor of that name can be read, quantized or not."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of `read`'s result, None for a dtype that torch does not have."""

    def read(self, name: str, *index: int | slice) -> Tensor:
        """Read the part of a tensor at `index` (default: all of it), dequantized if it is quantized."""

    def raw(self, name: str, *index: int | slice) -> Tensor:
        """Read the part of a tensor at `index`, as it is stored."""

    def under(self, block: str) -> list[str]:
        """Return the names of a block's tensors."""

    def matrix(self, name: str, *, transposed: bool = False, stacked: int = 1) -> StoredMatrix:
        """Find a matrix, or the matrices of all experts, and how it is stored. Raises CheckpointError."""

    def companions(self, name: str) -> tuple[str, ...]:
        """Return the tensors that `read` and `matrix` use in addition to a tensor or instead of it, such as scales."""

    def location(self, name: str) -> str:
        """Return the tensor's name and file, for messages."""


@dataclass(frozen=True)
class Projection:
    """One projection of one expert: `rows` rows of a stored matrix, starting at row `first`, every `step`-th row."""

    matrix: StoredMatrix
    rows: int
    expert: int | None = None
    first: int = 0
    step: int = 1

    def matches_scheme(self, scheme: str) -> bool:
        return self.matrix.matches_scheme(scheme) and (self.step == 1 or self.matrix.row_block == 1)

    def read_values(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.matrix.read_values(self._at(rows), columns, self.expert)[:: self.step]

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> dict[str, Tensor]:
        found = self.matrix.codes(self._at(rows), columns, self.expert)
        return {part: tensor[:: self.step] if tensor.dim() else tensor for part, tensor in found.items()}

    def _at(self, rows: slice) -> slice:
        start, stop = span(rows, self.rows)
        if (start, stop, self.first, self.step) == (0, self.matrix.shape[-2], 0, 1):
            return ALL
        return slice(self.first + self.step * start, self.step * stop + (self.first if self.step == 1 else 0))


class Projections(NamedTuple):
    """The three matrices of one expert in the checkpoint."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class Matrix:
    """A tensor that a format expects: one matrix, or those of all experts. shape: in a file that is not quantized"""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    stacked: int = 1

    def of(self, source: Source, block: str) -> StoredMatrix:
        return source.matrix(f"{block}.{self.name}", transposed=self.transposed, stacked=self.stacked)

    def fits(self, source: Source, block: str) -> bool:
        """Return whether the source has it with this shape."""
        if not source.has(f"{block}.{self.name}"):
            return False
        found = self.of(source, block).shape
        return self._in_file(found) == self.shape

    def _in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed and len(shape) > 1 else shape

    def unreadable_reason(self, source: Source, block: str) -> str | None:
        """Return why the tensor cannot be read, with its name, or None if it can."""
        full = f"{block}.{self.name}"
        if not source.has(full):
            return f"{full} is missing; expected shape {list(self.shape)}"
        stored = self.of(source, block)
        wrong = stored.unreadable_reason()
        if wrong is not None:
            return wrong
        found = self._in_file(stored.shape)
        if found != self.shape:
            kind = f", {stored.description}" if stored.quantized else ""
            return f"{source.location(full)} must have shape {list(self.shape)}, got {list(found)}{kind}"
        return None if stored.quantized else _wrong_dtype(source, full)


class ExpertFormat(ABC):
    """A naming scheme of a block's experts. Names are relative to the block, without a leading dot.

    bias: whether the experts have biases
    """

    bias: bool = False

    @abstractmethod
    def matrices(self, config: MoEConfig) -> list[Matrix]:
        """Return all matrices that the checkpoint must have."""

    def vectors(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        """Return all other tensors that the checkpoint must have, with their shapes."""
        return {}

    @abstractmethod
    def marker(self) -> str:
        """Return the name of the tensor whose presence identifies this format."""

    @abstractmethod
    def projections(self, source: Source, block: str, config: MoEConfig, expert: int) -> Projections: ...

    def biases(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        return {}

    def shapes(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        """Return all tensors that the checkpoint must have, with their shapes if it is not quantized."""
        return {one.name: one.shape for one in self.matrices(config)} | self.vectors(config)

    def unreadable_reason(self, source: Source, block: str, config: MoEConfig) -> str | None:
        """Return an error for the first tensor that is missing, has a wrong shape or cannot be read, or None."""
        wrong = next(
            (wrong for one in self.matrices(config) if (wrong := one.unreadable_reason(source, block)) is not None),
            None,
        )
        return wrong or wrong_tensors(source, block, self.vectors(config))

    def read(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        """Read one expert's canonical tensors in floating point, cut to `inner`."""
        gate, up, down = self.projections(source, block, config, expert)
        rows = slice(*inner)
        if gate.step == 2:  # gate and up are interleaved: read both at once
            both = gate.matrix.read_values(slice(2 * inner[0], 2 * inner[1]), ALL, expert)
            halves = [both[0::2], both[1::2]]
        else:
            halves = [gate.read_values(rows), up.read_values(rows)]
        w2 = down.read_values(ALL, rows)
        return {"w13": torch.cat(halves), "w2": w2} | self.biases(source, block, config, expert, inner)

    def read_stored(
        self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner, scheme: str
    ) -> dict[str, Tensor]:
        """Read one expert's canonical tensors in `scheme`, cut to `inner`, without requantizing them.

        `matches_scheme(scheme)` must be true for all three projections. Values change only if gate and up have
        different scales in a scheme that has one scale for both (see `join_halves`). The larger of their two input
        scales is used.
        """
        gate, up, down = self.projections(source, block, config, expert)
        rows = slice(*inner)
        if gate.step == 2:
            both = gate.matrix.codes(slice(2 * inner[0], 2 * inner[1]), ALL, expert)
            halves = [{part: t[start::2] if t.dim() else t for part, t in both.items()} for start in (0, 1)]
        else:
            halves = [gate.codes(rows), up.codes(rows)]
        found = named("w13", join_halves(*halves)) | named("w2", down.codes(ALL, rows))
        if SCHEMES[scheme].activations.calibrated:
            inputs = [one.matrix.input_scale(one.expert) for one in (gate, up, down)]
            found |= {"w13_input_scale": torch.maximum(inputs[0], inputs[1]), "w2_input_scale": inputs[2]}
        return found | self.biases(source, block, config, expert, inner)


@dataclass(frozen=True)
class PerExpert(ExpertFormat):
    """One tensor per expert and projection: gate and up [I, H], down [H, I].

    Args:
        gate: Name of the gate projection, in which `{e}` stands for the expert.
        up: Name of the up projection, in which `{e}` stands for the expert.
        down: Name of the down projection, in which `{e}` stands for the expert.
    """

    gate: str
    up: str
    down: str

    def matrices(self, config: MoEConfig) -> list[Matrix]:
        wide, tall = _sizes(config)
        shapes = {self.gate: wide, self.up: wide, self.down: tall}
        return [Matrix(n.format(e=e), shape) for e in range(config.num_experts) for n, shape in shapes.items()]

    def marker(self) -> str:
        return self.gate.format(e=0)

    def projections(self, source: Source, block: str, config: MoEConfig, expert: int) -> Projections:
        (wide, _), (tall, _) = _sizes(config)
        names = ((self.gate, wide), (self.up, wide), (self.down, tall))
        return Projections(*(Projection(source.matrix(f"{block}.{n.format(e=expert)}"), rows) for n, rows in names))


@dataclass(frozen=True)
class Stacked(ExpertFormat):
    """All experts in one tensor per projection: gate and up [E, I, H], down [E, H, I].

    Args:
        gate: Name of the gate projection.
        up: Name of the up projection.
        down: Name of the down projection.
    """

    gate: str
    up: str
    down: str

    def matrices(self, config: MoEConfig) -> list[Matrix]:
        wide, tall = ((config.num_experts, *size) for size in _sizes(config))
        return [Matrix(self.gate, wide), Matrix(self.up, wide), Matrix(self.down, tall)]

    def marker(self) -> str:
        return self.gate

    def projections(self, source: Source, block: str, config: MoEConfig, expert: int) -> Projections:
        found = (one.of(source, block) for one in self.matrices(config))
        return Projections(*(Projection(one, one.shape[-2], expert) for one in found))


@dataclass(frozen=True)
class Fused(ExpertFormat):
    """All experts in one tensor per matrix.

    Args:
        gate_up: Name of the gate and up matrices.
        down: Name of the down matrices.
        transposed: gate_up is [E, H, 2I] and down [E, I, H]; otherwise [E, 2I, H] and [E, H, I]. If the other
            orientation fits the file's shapes, it is used.
        interleaved: Gate and up alternate along 2I; otherwise all of gate, then all of up.
        bias: The checkpoint has gate_up + "_bias" [E, 2I] and down + "_bias" [E, H].
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False

    def matrices(self, config: MoEConfig) -> list[Matrix]:
        (inner, hidden), count = _sizes(config)[0], config.num_experts
        shapes = [(count, config.w13_rows, hidden), (count, hidden, inner)]
        seen = [(count, columns, rows) if self.transposed else (count, rows, columns) for _, rows, columns in shapes]
        stacked = 1 if self.interleaved else 2
        gate_up = Matrix(self.gate_up, seen[0], self.transposed, stacked)
        return [gate_up, Matrix(self.down, seen[1], self.transposed)]

    def vectors(self, config: MoEConfig) -> dict[str, tuple[int, ...]]:
        if not self.bias:
            return {}
        count = config.num_experts
        return {f"{self.gate_up}_bias": (count, config.w13_rows), f"{self.down}_bias": (count, config.hidden_size)}

    def marker(self) -> str:
        return self.gate_up

    def projections(self, source: Source, block: str, config: MoEConfig, expert: int) -> Projections:
        both, down = (one.of(source, block) for one in self._turned(source, block, config).matrices(config))
        inner = config.intermediate_size
        first, step = (1, 2) if self.interleaved else (inner, 1)
        return Projections(
            Projection(both, inner, expert, 0, step),
            Projection(both, inner, expert, first, step),
            Projection(down, config.hidden_size, expert),
        )

    def unreadable_reason(self, source: Source, block: str, config: MoEConfig) -> str | None:
        return super(Fused, self._turned(source, block, config)).unreadable_reason(source, block, config)

    def _turned(self, source: Source, block: str, config: MoEConfig) -> Fused:
        """Return this format with the file's orientation. Unquantized, both matrices never fit both orientations."""
        other = replace(self, transposed=not self.transposed)
        fits = [all(each.fits(source, block) for each in one.matrices(config)) for one in (self, other)]
        return other if fits == [False, True] else self  # the packed words of AWQ and GPTQ fit both orientations

    def biases(self, source: Source, block: str, config: MoEConfig, expert: int, inner: Inner) -> dict[str, Tensor]:
        if not self.bias:
            return {}
        name, down = f"{block}.{self.gate_up}_bias", f"{block}.{self.down}_bias"
        if self.interleaved:
            both = source.read(name, expert, slice(2 * inner[0], 2 * inner[1]))
            both = torch.cat([both[0::2], both[1::2]])
        else:
            up = config.intermediate_size
            both = torch.cat([source.read(name, expert, slice(s + inner[0], s + inner[1])) for s in (0, up)])
        return {
            "w13_bias": check_finite(source.location(name), both),
            "w2_bias": check_finite(source.location(down), source.read(down, expert)),
        }


def named(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix the parts of a matrix ("", "_scale") with its name, as in an expert's canonical tensors."""
    return {f"{name}{part}": tensor for part, tensor in parts.items()}


def find_format(source: Source, block: str, formats: tuple[ExpertFormat, ...]) -> ExpertFormat | None:
    """Return the first format whose marker the source has, or None."""
    return next((known for known in formats if source.has(f"{block}.{known.marker()}")), None)


def wrong_tensors(source: Source, block: str, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return an error for the first tensor that is missing, or has a wrong shape or dtype, or None."""
    for name, shape in expected.items():
        full = f"{block}.{name}"
        if not source.has(full):
            return f"{full} is missing; expected shape {list(shape)}"
        if source.shape(full) != shape:
            return f"{source.location(full)} must have shape {list(shape)}, got {list(source.shape(full))}"
        if (wrong := _wrong_dtype(source, full)) is not None:
            return wrong
    return None


def _wrong_dtype(source: Source, full: str) -> str | None:
    dtype = source.dtype(full)
    if dtype in PLAIN_DTYPES:
        return None
    got = "a dtype that torch has not" if dtype is None else dtype_name(dtype)
    return f"{source.location(full)} must be {' or '.join(map(dtype_name, PLAIN_DTYPES))}, got {got}"


def _sizes(config: MoEConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (rows, columns) of gate and up, and of down."""
    inner, hidden = config.intermediate_size, config.hidden_size
    return (inner, hidden), (hidden, inner)
