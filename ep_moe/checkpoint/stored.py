"""How a checkpoint stores a matrix: its tensors, its dequantized values, and the schemes that can keep its codes.

A matrix has the shape [rows, columns], with one row per output of the layer, independent of the order in the file. From
a tensor of all experts [E, rows, columns], one expert's matrix is read. Scales are read as float32, and refused if they
are not valid.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ep_moe.checkpoint.quantization_config import DeclaredQuantization
from ep_moe.errors import CheckpointError
from ep_moe.quant.fp8 import FP8_MAX
from ep_moe.quant.microscale import e8m0_values

ALL = slice(None)
# suffix of a calibrated input scale, and whether it is the reciprocal of the dequantization scale
_INPUT_SCALES = (("input_scale", False), ("activation_scale", False), ("input_global_scale", True))


class StoredMatrix(ABC):
    """One matrix of a checkpoint, or one matrix of each expert.

    name: the name of the matrix, also if its codes are stored under another name
    data: the name of the tensor with the codes or values
    transposed: the file has [columns, rows]
    stacked: number of matrices concatenated along rows: 2 for gate and up in one tensor
    """

    description: str
    quantized = True
    row_block = 1  # rows that share a scale
    input_range = FP8_MAX  # the largest calibrated input divided by `input_scale`

    def __init__(self, tensors: Tensors, name: str, data: str, *, transposed: bool = False, stacked: int = 1) -> None:
        self.tensors, self.name, self.data = tensors, name, data
        self.transposed, self.stacked = transposed, stacked

    # --- headers ---

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized matrix, [rows, columns] or [E, rows, columns]."""

    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """Return the names of all tensors that the matrix consists of."""

    @abstractmethod
    def unreadable_reason(self) -> str | None:
        """Return why the matrix cannot be read, or None. Reads headers only."""

    def matches_scheme(self, scheme: str) -> bool:
        """Return whether `codes` returns codes of a scheme, so that a layer can keep them."""
        return False

    def differs(self, scheme: str) -> str:
        """Return why `codes` does not return codes of a scheme that other matrices of the block have."""
        return f"{self.tensors.location(self.name)} is {self.description}"

    # --- tensors ---

    @abstractmethod
    def read_values(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        """Read a part of the matrix, dequantized to float32 if it is quantized.

        Args:
            rows: The rows. They must be in one of the `stacked` matrices.
            columns: The columns.
            expert: The expert, if the tensor has all experts.
        """

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        """Read a part of the matrix as codes and scales, by the names of `WeightFormat.parts`.

        Args:
            rows: The rows.
            columns: The columns, in whole blocks.
            expert: The expert, if the tensor has all experts.
        """
        raise NotImplementedError(f"{self.description} is no scheme's")

    def input_scale(self, expert: int | None = None) -> Tensor:
        """Return the calibrated dequantization scale of the inputs, a float32 scalar."""
        name, reciprocal = self._input_scale()
        number = read_scalar_scale(self.tensors, name, expert, positive=True)
        return 1 / number if reciprocal else number

    def has_input_scale(self) -> bool:
        return self.tensors.holds(self._input_scale()[0])

    @property
    def input_scale_name(self) -> str:
        return self._input_scale()[0]

    def wrong_input_scale(self) -> str | None:
        """Return why the calibrated input scale cannot be read, or None. Requires `has_input_scale`."""
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
    def _stated(self) -> DeclaredQuantization:
        """The quantization that config.json declares for this matrix."""
        return self.tensors.declared.of(self.tensors.location(self.data).rpartition(": ")[2])

    def _seen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Convert a shape in the file to [..., rows, columns]."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed and len(shape) > 1 else shape

    def _raw(self, name: str, rows: slice, columns: slice, expert: int | None) -> Tensor:
        """Read a part of a tensor with rows and columns, as it is stored, transposed to [..., rows, columns]."""
        lead = () if expert is None else (expert,)
        index = (columns, rows) if self.transposed else (rows, columns)
        whole = not lead and index == (ALL, ALL)
        part = self.tensors.raw(name) if whole else self.tensors.raw(name, *lead, *index)
        return part.transpose(-1, -2) if self.transposed else part

    def _read_scales(self, name: str, rows: slice, columns: slice, expert: int | None) -> Tensor:
        lead = () if expert is None else (expert,)
        index = (columns, rows) if self.transposed else (rows, columns)
        part = read_scales(self.tensors, name, *lead, *index)
        return part.transpose(-1, -2) if self.transposed else part


def span(axis: slice, size: int) -> tuple[int, int]:
    start, stop, _ = axis.indices(size)
    return start, stop


def companion_names(name: str, end: str) -> list[str]:
    """Return the possible names of a companion of a matrix.

    These are `X.weight_scale` for `X.weight`, and `X_weight_scale` or `X_scale` for a tensor of all experts `X`.
    """
    return [f"{name}{end}"] if name.endswith("weight") else [f"{name}_weight{end}", f"{name}{end}"]


_CODES = {
    "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F4": "float4_e2m1fn",
}  # fmt: skip


class PlainMatrix(StoredMatrix):
    """An unquantized matrix of a floating-point dtype."""

    description = "of plain numbers"
    quantized = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._seen(self.tensors.header(self.data)[1])

    def parts(self) -> tuple[str, ...]:
        return (self.data,)

    def unreadable_reason(self) -> str | None:
        dtype, shape = self.tensors.header(self.data)
        if dtype in _CODES and len(shape) > 1 and self.name.endswith(("weight", "_proj")):
            return (
                f"{self.tensors.location(self.data)} must be bfloat16 or float16 or float32 or float64, got "
                f"{_CODES[dtype]}, codes of a quantization that is not read{self.tensors.declared.said}; dequantize "
                f"the checkpoint to bf16 first"
            )
        ends = ("_scale_inv", "_scale", "_scale_2", "_zero_point", "_global_scale")
        companions = [scale for end in ends for scale in companion_names(self.name, end) if self.tensors.holds(scale)]
        if companions and dtype in FLOATS:
            return (
                f"{self.tensors.location(self.data)} has plain numbers ({dtype}), and {companions[0]} beside it would "
                f"scale them; remove what does not belong to the checkpoint"
            )
        return None

    def read_values(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        return self._raw(self.data, rows, columns, expert)


def input_scales(
    names: Iterable[str], block: str, projections: Iterable[str]
) -> Iterator[tuple[str, str, bool, int, int | None]]:
    """Find the calibrated input scales of projections.

    Args:
        names: The names of all tensors.
        block: The prefix of a block, in which `{layer}` stands for its number.
        projections: Names of weights in a block, in which `{e}` stands for the expert.

    Yields:
        (name of the scale, name of the weight, whether the scale is a reciprocal, layer, expert or None).
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
    """The tensors of a checkpoint by their common names, as they are stored. origin: where they are from"""

    origin: str

    @property
    def declared(self) -> DeclaredQuantization: ...

    def holds(self, name: str) -> bool:
        """Return whether a tensor has exactly this name."""

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype, as safetensors names it, and the shape."""

    def raw(self, name: str, *index: int | slice) -> Tensor: ...

    def location(self, name: str) -> str:
        """Return the tensor's name and file, for messages."""


def wrong_dtype(tensors: Tensors, name: str, *, exponents: bool = True, bytes_too: bool = False) -> str | None:
    """Return why a tensor's dtype is not allowed for scales, or None.

    Args:
        tensors: The tensors of the checkpoint.
        name: The name of the scales.
        exponents: Whether E8M0 is allowed.
        bytes_too: Whether uint8 is E8M0 in this format even if config.json does not state it.
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


def read_scales(tensors: Tensors, name: str, *index: int | slice, positive: bool = False) -> Tensor:
    """Read a part of scales in float32. E8M0 is converted to powers of two.

    Args:
        tensors: The tensors of the checkpoint.
        name: The name of the scales.
        index: The index of the part.
        positive: Refuse scales of 0.

    Raises:
        CheckpointError: A scale is negative or not finite, or its dtype is not allowed for scales.
    """
    wrong = wrong_dtype(tensors, name, bytes_too=True)
    if wrong is not None:
        raise CheckpointError(wrong)
    part = tensors.raw(name, *index)
    numbers = e8m0_values(part.contiguous()) if part.dtype == torch.uint8 else part.float()
    check_scales(tensors, name, numbers, positive=positive)
    return numbers


def read_scalar_scale(tensors: Tensors, name: str, expert: int | None = None, *, positive: bool = False) -> Tensor:
    """Read a scale as a float32 scalar: the only one of the tensor, or that of an expert."""
    _, shape = tensors.header(name)
    count = int(torch.Size(shape).numel())
    if count == 1:
        return read_scales(tensors, name, positive=positive).reshape(())
    if expert is None or not shape or count != shape[0]:
        raise CheckpointError(f"{tensors.location(name)} must have shape [], got {list(shape)}")
    return read_scales(tensors, name, expert, positive=positive).reshape(())


def check_scales(tensors: Tensors, name: str, numbers: Tensor, *, positive: bool = False) -> None:
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
    """Raise CheckpointError if scales of 0 would lose values that are not 0. lost: the number of such values"""
    if lost:
        raise CheckpointError(
            f"{tensors.location(name)} has factors of 0 for {lost} numbers of {data} that are not 0; the checkpoint is "
            f"damaged: fetch or export it again"
        )


def check_finite(location: str, numbers: Tensor) -> Tensor:
    """Return the tensor. Raise CheckpointError if a value is not finite."""
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
    """Raise CheckpointError if codes times scales are not finite in float32.

    Args:
        tensors: The tensors of the checkpoint.
        name: The name of the scales.
        data: The name of the codes.
        scale: The scales.
        top: The largest magnitude of a code.
        numbers: Returns the products. Called only if a scale is large enough to overflow.
    """
    if scale.numel() and not scale.amax() <= torch.finfo(torch.float32).max / top:
        check_finite(f"{tensors.location(data)} times {name}", numbers())


def check_fits(location: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor. Raise CheckpointError if a value exceeds the range of `dtype`, such as 65504 of float16."""
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
    """Raise CheckpointError if an E4M3 code is NaN."""
    wrong = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if wrong.any():
        raise CheckpointError(
            f"{tensors.location(name)} must be finite, got NaN at {int(wrong.sum())} of {codes.numel()} places that "
            f"were read; the checkpoint is damaged, or was quantized wrongly: fetch or export it again"
        )
