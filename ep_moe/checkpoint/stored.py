"""How a checkpoint stores a matrix: the tensors that it is made of, its numbers, and the schemes whose bytes they are.

A matrix is seen as [rows, columns], an output of the layer for each row, however the file has it. Of a tensor of all
experts, [E, rows, columns], one expert's is read. Factors that belong to codes are read as float32, and refused where
they are none.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ep_moe.checkpoint.quantization_config import Declared
from ep_moe.errors import CheckpointError
from ep_moe.quant.fp8 import FP8_MAX
from ep_moe.quant.microscale import e8m0_values

ALL = slice(None)
# names of a calibrated input range: the decode factor itself, or its reciprocal
_INPUT_SCALES = (("input_scale", False), ("activation_scale", False), ("input_global_scale", True))


class StoredMatrix(ABC):
    """One matrix of a checkpoint, or one of each expert.

    name: of the numbers, whatever the tensors are called
    transposed: the file has [columns, rows]
    stacked: number of matrices that lie one below another: gate and up in one tensor are two
    """

    words: str
    quantized = True
    row_block = 1  # rows with a factor in common
    input_range = FP8_MAX  # the largest calibrated input in units of `input_scale`

    def __init__(self, tensors: Tensors, name: str, data: str, *, transposed: bool = False, stacked: int = 1) -> None:
        self.tensors, self.name, self.data = tensors, name, data
        self.transposed, self.stacked = transposed, stacked

    # --- headers ---

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, [rows, columns] or [E, rows, columns]."""

    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The tensors that make the numbers."""

    def wrong(self) -> str | None:
        """None, or why the numbers cannot be read, from headers alone."""
        return None

    def keeps(self, scheme: str) -> bool:
        """Whether `codes` gives the bytes of a scheme."""
        return False

    def differs(self, scheme: str) -> str:
        """Why `codes` does not give the bytes of a scheme that other matrices of the block are in."""
        return f"{self.tensors.location(self.name)} is {self.words}"

    # --- tensors ---

    @abstractmethod
    def numbers(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        """A part, in float32 where it is quantized. rows: of one of the `stacked` matrices."""

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        """A part in the file's own bytes, by the names of `WeightFormat.parts`. columns: whole blocks."""
        raise NotImplementedError(f"{self.words} is no scheme's")

    def input_scale(self, expert: int | None = None) -> Tensor:
        """The calibrated decode factor of the inputs, a float32 scalar."""
        name, reciprocal = self._input_scale()
        number = scalar_factor(self.tensors, name, expert, positive=True)
        return 1 / number if reciprocal else number

    def has_input_scale(self) -> bool:
        return self.tensors.holds(self._input_scale()[0])

    @property
    def input_scale_name(self) -> str:
        return self._input_scale()[0]

    def wrong_input_scale(self) -> str | None:
        """None, or why the calibrated factor cannot be read. One must be there."""
        found = [pair[0] for pair in self._input_scales() if self.tensors.holds(pair[0])]
        if len(found) > 1:
            location = self.tensors.location(found[0])
            return f"{location} is there, and {' and '.join(found[1:])} too; remove what is not meant"
        name = self.input_scale_name
        _, shape = self.tensors.header(name)
        if torch.Size(shape).numel() != 1 and (len(self.shape) == 2 or shape[:1] != self.shape[:1] or len(shape) != 1):
            return f"{self.tensors.location(name)} must have shape [], got {list(shape)}"
        return wrong_dtype(self.tensors, name, exponents=False)

    def _input_scales(self) -> list[tuple[str, bool]]:
        return [(f"{_stem(self.name)}{end}", reciprocal) for end, reciprocal in _INPUT_SCALES]

    def _input_scale(self) -> tuple[str, bool]:
        found = self._input_scales()
        return next((pair for pair in found if self.tensors.holds(pair[0])), found[0])

    # --- for subclasses ---

    @property
    def _stated(self) -> Declared:
        """What config.json states of this matrix."""
        return self.tensors.declared.of(self.tensors.location(self.data).rpartition(": ")[2])

    def _seen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of the file as [..., rows, columns]."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed and len(shape) > 1 else shape

    def _raw(self, name: str, rows: slice, columns: slice, expert: int | None) -> Tensor:
        """A part of a tensor that has rows and columns."""
        lead = () if expert is None else (expert,)
        index = (columns, rows) if self.transposed else (rows, columns)
        whole = not lead and index == (ALL, ALL)
        part = self.tensors.raw(name) if whole else self.tensors.raw(name, *lead, *index)
        return part.transpose(-1, -2) if self.transposed else part

    def _factors(self, name: str, rows: slice, columns: slice, expert: int | None) -> Tensor:
        lead = () if expert is None else (expert,)
        index = (columns, rows) if self.transposed else (rows, columns)
        part = factors(self.tensors, name, *lead, *index)
        return part.transpose(-1, -2) if self.transposed else part


def span(axis: slice, size: int) -> tuple[int, int]:
    start, stop, _ = axis.indices(size)
    return start, stop


def beside_of(name: str, end: str) -> list[str]:
    """Names of a companion: `X.weight_scale`, or of a tensor of all experts `X_weight_scale` or `X_scale`."""
    return [f"{name}{end}"] if name.endswith("weight") else [f"{name}_weight{end}", f"{name}{end}"]


_CODES = {
    "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F4": "float4_e2m1fn",
}  # fmt: skip


class PlainMatrix(StoredMatrix):
    """Numbers of a float dtype."""

    words = "of plain numbers"
    quantized = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._seen(self.tensors.header(self.data)[1])

    def parts(self) -> tuple[str, ...]:
        return (self.data,)

    def wrong(self) -> str | None:
        dtype, shape = self.tensors.header(self.data)
        if dtype in _CODES and len(shape) > 1 and self.name.endswith(("weight", "_proj")):
            return (
                f"{self.tensors.location(self.data)} must be bfloat16 or float16 or float32 or float64, got "
                f"{_CODES[dtype]}, codes of a quantization that is not read{self.tensors.declared.said}; dequantize "
                f"the checkpoint to bf16 first"
            )
        ends = ("_scale_inv", "_scale", "_scale_2", "_zero_point", "_global_scale")
        beside = [scale for end in ends for scale in beside_of(self.name, end) if self.tensors.holds(scale)]
        if beside and dtype in FLOATS:
            return (
                f"{self.tensors.location(self.data)} has plain numbers ({dtype}), and {beside[0]} beside it would "
                f"scale them; remove what does not belong to the checkpoint"
            )
        return None

    def numbers(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        return self._raw(self.data, rows, columns, expert)


def input_scales(
    names: Iterable[str], block: str, projections: Iterable[str]
) -> Iterator[tuple[str, str, bool, int, int | None]]:
    """The calibrated scales of projections among names: name, weight, whether it is a reciprocal, layer, expert.

    block: prefix of a block, `{layer}` stands for its number
    projections: names of weights in a block, `{e}` stands for the expert
    """
    ends = dict(_INPUT_SCALES)
    stems = [re.escape(f"{block}.{_stem(each)}") for each in sorted(projections)]
    form = "|".join(stem.replace(r"\{layer\}", r"(\d+)").replace(r"\{e\}", r"(\d+)") for stem in stems)
    pattern = re.compile(f"(?:{form})({'|'.join(ends)})")
    for name in names:
        if (match := pattern.fullmatch(name)) is not None:
            layer, *expert, end = (group for group in match.groups() if group is not None)
            stem = name.removesuffix(end)
            weight = f"{stem}weight" if stem.endswith(".") else stem[:-1]
            yield name, weight, ends[end], int(layer), int(expert[0]) if expert else None


def _stem(name: str) -> str:
    return name.removesuffix("weight") if name.endswith("weight") else f"{name}_"


FLOATS = ("F32", "BF16", "F16", "F64")
EXPONENTS = "F8_E8M0"
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "F8_E8M0": "float8_e8m0fnu"}


class Tensors(Protocol):
    """The tensors of a checkpoint by our names, as they are stored."""

    @property
    def declared(self) -> Declared: ...

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that very name."""

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype as safetensors calls it, and shape."""

    def raw(self, name: str, *index: int | slice) -> Tensor: ...

    def location(self, name: str) -> str:
        """The tensor's name and file, for a sentence."""


def wrong_dtype(tensors: Tensors, name: str, *, exponents: bool = True, bytes_too: bool = False) -> str | None:
    """None, or why a tensor cannot be factors.

    Args:
        tensors: of the checkpoint.
        name: of the factors.
        exponents: E8M0 may be there.
        bytes_too: a byte is E8M0 in this format, whatever config.json states.
    """
    dtype, _ = tensors.header(name)
    if dtype in FLOATS or (exponents and dtype == EXPONENTS):
        return None
    if dtype == "U8" and exponents:
        if bytes_too or tensors.declared.exponents:
            return None
        return (
            f"{tensors.location(name)} must be factors in float32, bfloat16, float16 or float8_e8m0fnu, got uint8; "
            f'bytes are exponents (E8M0) only where quantization_config in config.json states scale_fmt "ue8m0" or an '
            f"MX format"
        )
    wanted = ", ".join(_NAMES[one] for one in (*FLOATS, EXPONENTS)[: 5 if exponents else 4])
    return f"{tensors.location(name)} must be factors in {wanted}, got {_NAMES.get(dtype, dtype)}"


def factors(tensors: Tensors, name: str, *index: int | slice, positive: bool = False) -> Tensor:
    """The part at `index` in float32, powers of two from E8M0. Raises CheckpointError unless finite and at least 0.

    positive: 0 is refused too
    """
    wrong = wrong_dtype(tensors, name, bytes_too=True)
    if wrong is not None:
        raise CheckpointError(wrong)
    part = tensors.raw(name, *index)
    numbers = e8m0_values(part.contiguous()) if part.dtype == torch.uint8 else part.float()
    check_factors(tensors, name, numbers, positive=positive)
    return numbers


def scalar_factor(tensors: Tensors, name: str, expert: int | None = None, *, positive: bool = False) -> Tensor:
    """A float32 scalar: one number for all, or that of an expert."""
    _, shape = tensors.header(name)
    count = int(torch.Size(shape).numel())
    if count == 1:
        return factors(tensors, name, positive=positive).reshape(())
    if expert is None or not shape or count != shape[0]:
        raise CheckpointError(f"{tensors.location(name)} must have shape [], got {list(shape)}")
    return factors(tensors, name, expert, positive=positive).reshape(())


def check_factors(tensors: Tensors, name: str, numbers: Tensor, *, positive: bool = False) -> None:
    good = torch.isfinite(numbers) & ((numbers > 0) if positive else (numbers >= 0))
    if not good.all():
        found = numbers[~good].flatten()[0].item()
        wanted = "greater than 0" if positive else "at least 0"
        raise CheckpointError(
            f"{tensors.location(name)} must be finite and {wanted}, got {found} at {int((~good).sum())} of "
            f"{numbers.numel()} places that were read; the checkpoint is damaged, or was quantized wrongly: fetch or "
            f"export it again"
        )


def check_lost(tensors: Tensors, name: str, data: str, lost: int) -> None:
    """Raise CheckpointError where factors of 0 would lose numbers that are not 0.

    lost: how many
    """
    if lost:
        raise CheckpointError(
            f"{tensors.location(name)} has factors of 0 for {lost} numbers of {data} that are not 0; the checkpoint is "
            f"damaged: fetch or export it again"
        )


def check_finite(location: str, numbers: Tensor) -> Tensor:
    """Numbers that must be finite. Raises CheckpointError."""
    good = torch.isfinite(numbers)
    if not good.all():
        raise CheckpointError(
            f"{location} must be finite, got {numbers[~good].flatten()[0].item()} at {int((~good).sum())} of "
            f"{numbers.numel()} places that were read; the checkpoint is damaged: fetch or export it again"
        )
    return numbers


def check_products(
    tensors: Tensors, name: str, data: str, scale: Tensor, top: float, numbers: Callable[[], Tensor]
) -> None:
    """Raise CheckpointError where codes times factors are not finite in float32.

    name: of the factors; data: of the codes; top: the largest code; numbers: asked for only where a factor is large
    """
    if scale.numel() and not scale.amax() <= torch.finfo(torch.float32).max / top:
        check_finite(f"{tensors.location(data)} times {name}", numbers())


def check_fits(location: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that a layer's dtype must hold: those of float16 end at 65504. Raises CheckpointError."""
    narrower = dtype == torch.float16 or numbers.dtype == torch.float64
    if not narrower or numbers.dtype == dtype or not numbers.numel():
        return numbers
    largest, top = numbers.abs().nan_to_num(posinf=0.0).amax().item(), torch.finfo(dtype).max
    if largest > top:
        raise CheckpointError(
            f"{location} has numbers up to {largest:.4g}, and {dtype} ends at {top:.4g}; choose another dtype"
        )
    return numbers


def check_codes(tensors: Tensors, name: str, codes: Tensor) -> None:
    """E4M3 codes: none is NaN. Raises CheckpointError."""
    wrong = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if wrong.any():
        raise CheckpointError(
            f"{tensors.location(name)} must be finite, got NaN at {int(wrong.sum())} of {codes.numel()} places that "
            f"were read; the checkpoint is damaged, or was quantized wrongly: fetch or export it again"
        )
