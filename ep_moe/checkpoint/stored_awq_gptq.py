"""Matrices as stored by AWQ and GPTQ: INT4 in int32 words, with a zero point for each group of inputs and each output.

`X.qweight`, `X.qzeros` and `X.scales` replace `X.weight`. Tensors in the file are [inputs, outputs], which are
[columns, rows] of a layer's matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ep_moe.checkpoint.quantization_config import unsupported_message
from ep_moe.checkpoint.stored import (
    ALL,
    StoredMatrix,
    Tensors,
    check_lost,
    check_products,
    read_scales,
    span,
    wrong_dtype,
)
from ep_moe.checkpoint.stored_4bit import INT4_MAX, int4_matches_scheme, int4_scales
from ep_moe.errors import CheckpointError
from ep_moe.quant.microscale import dequantize_int4

_WORD = 8  # codes of a word
_MIDDLE = 8  # the zero point of symmetric codes
_LARGEST = 15  # code and zero point
_MANY = 2**16  # numbers whose mean is near zero in a trained matrix: within a quarter of a step
_DEQUANTISE = "dequantize the checkpoint to bf16 first"


class _Words(StoredMatrix):
    """Eight codes per word, packed along rows or columns. Zero points are always packed along rows.

    method: the name in config.json; packings: supported packing formats in config.json, "" if it states none
    order: the position in a word of each of eight consecutive codes
    """

    method: str
    packings: frozenset[str]
    order: tuple[int, ...] = tuple(range(_WORD))

    def __init__(self, tensors: Tensors, name: str, *, transposed: bool = False, stacked: int = 1) -> None:
        stem = name.removesuffix("weight")
        super().__init__(tensors, name, f"{stem}qweight", transposed=transposed, stacked=stacked)
        self.zeros, self.scale, self.groups_of = f"{stem}qzeros", f"{stem}scales", f"{stem}g_idx"

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"INT4 in groups of {self.group} ({self.method.upper()})"

    @property
    def group(self) -> int:
        """The number of columns that share a zero point and a scale."""
        groups = self._header(self.scale)[-2:-1]
        return max(self.shape[-1] // groups[0], 1) if groups and groups[0] else 1

    def parts(self) -> tuple[str, ...]:
        found = (self.data, self.zeros, self.scale, self.groups_of)
        return tuple(each for each in found if self.tensors.holds(each))

    def unreadable_reason(self) -> str | None:
        return self._wrong_stated() or self._wrong_tensors()

    def _wrong_stated(self) -> str | None:
        """Return why the quantization that config.json states cannot be read, or None."""
        declared, location = self._stated, self.tensors.location(self.data)
        if self.method not in declared.method.split():
            if declared.method:
                return unsupported_message(self.name, self.data, declared.called("AWQ or GPTQ"))
            return (
                f"{location} is quantized by AWQ or GPTQ, and config.json does not state which; set quant_method, bits "
                f"and group_size of its quantization_config, or dequantize weights that are pushed"
            )
        if declared.bits != {4}:
            bits = ", ".join(map(str, sorted(declared.bits))) or "no number of"
            return f"{location} is {self.method.upper()} with {bits} bits, and 4 bits alone are read; {_DEQUANTISE}"
        if " and " in declared.packing:
            return (
                f"{location} is {self.method.upper()}, and config.json states the packings {declared.packing}; leave "
                f"the one that it is in"
            )
        if declared.packing not in self.packings:
            return (
                f"{location} is {self.method.upper()} in the packing {declared.packing!r}, which is not read; "
                f"{_DEQUANTISE}"
            )
        return None

    def _wrong_tensors(self) -> str | None:
        location = self.tensors.location(self.data)
        if self.transposed:
            return f"{location} is {self.description} of a matrix that the model holds transposed; {_DEQUANTISE}"
        for name in (self.zeros, self.scale):
            if not self.tensors.holds(name):
                return f"{name} is missing; {location} is {self.description}"
        for name in (self.data, self.zeros, self.groups_of):
            if self.tensors.holds(name) and self.tensors.header(name)[0] != "I32":
                return f"{self.tensors.location(name)} must be int32, got {self.tensors.header(name)[0]}"
        *lead, rows, columns = self.shape
        groups = columns // self.group
        wanted = {self.scale: (*lead, groups, rows), self.zeros: (*lead, groups, rows // _WORD)}
        if self.tensors.holds(self.groups_of):
            wanted[self.groups_of] = (*lead, columns)
        for name, shape in wanted.items():
            if self._header(name) != shape or columns % self.group or rows % _WORD:
                return (
                    f"{self.tensors.location(name)} must have shape {list(shape)} beside {self.data} of shape "
                    f"{list(self._header(self.data))}, got {list(self._header(name))}"
                )
        stated = {size or columns for size in self._stated.groups}
        if stated and self.group not in stated:
            return (
                f"{self.tensors.location(self.scale)} has a factor for each {self.group} columns, and config.json "
                f"states group_size {' and '.join(map(str, sorted(stated)))}; fetch the checkpoint again"
            )
        if self._stated.reordered and not self.tensors.holds(self.groups_of):
            return f"{self.groups_of} is missing, and config.json states desc_act: true; fetch the checkpoint again"
        return wrong_dtype(self.tensors, self.scale, exponents=False)

    def read_values(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        if expert is None and len(self.shape) == 3:
            return torch.stack([self.read_values(rows, columns, each) for each in range(self.shape[0])])
        lead = () if expert is None else (expert,)
        (top, bottom), (left, right) = span(rows, self.shape[-2]), span(columns, self.shape[-1])
        group = self._groups(lead, left, right)
        scale = read_scales(self.tensors, self.scale, *lead, ALL, slice(top, bottom))
        zeros = self._zeros(lead, top, bottom)
        codes = self._codes(lead, slice(top, bottom), slice(left, right))
        numbers = (codes - zeros[group]).float()
        self._check_mean(numbers)
        scale = scale[group]
        self._check_lost(scale, numbers)
        made = (numbers * scale).T.contiguous()
        check_products(self.tensors, self.scale, self.data, scale, 2 * INT4_MAX, lambda: made)
        return made

    def _check_lost(self, scale: Tensor, numbers: Tensor) -> None:
        if (scale == 0).any():
            check_lost(self.tensors, self.scale, self.data, int(((scale == 0) & (numbers != 0)).sum()))

    def _groups(self, lead: tuple[int, ...], left: int, right: int) -> Tensor:
        """Return the group of each column, int64 [columns]."""
        if not self.tensors.holds(self.groups_of):
            return torch.arange(left, right, device="cpu") // self.group
        found = self.tensors.raw(self.groups_of, *lead, slice(left, right)).long()
        count = self.shape[-1] // self.group
        if ((found < 0) | (found >= count)).any():
            raise CheckpointError(
                f"{self.tensors.location(self.groups_of)} must be groups of columns in [0, {count}), got "
                f"{int(found.min())} to {int(found.max())}; fetch the checkpoint again"
            )
        return found

    def _zeros(self, lead: tuple[int, ...], top: int, bottom: int) -> Tensor:
        """Read zero points, int32 [groups, rows]."""
        words = slice(top // _WORD, -(-bottom // _WORD))
        start = top - words.start * _WORD
        raw = self.tensors.raw(self.zeros, *lead, ALL, words)
        return self._offset(_unpacked(raw, self.order)[:, start : start + bottom - top])

    def _offset(self, stored: Tensor) -> Tensor:
        """Convert stored zero points to actual ones."""
        return stored

    def _check_mean(self, numbers: Tensor) -> None:
        """Warn if the differences of codes and zero points look like those under another format of zero points."""

    def _codes(self, lead: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        """Read codes, int32 [columns, rows]."""
        raise NotImplementedError

    def _header(self, name: str) -> tuple[int, ...]:
        return self.tensors.header(name)[1] if self.tensors.holds(name) else ()


class AwqMatrix(_Words):
    """AWQ of AutoAWQ's version "gemm": `qweight` [columns, rows / 8], codes 0, 2, 4, 6, 1, 3, 5, 7 from low bits up."""

    method = "awq"
    packings = frozenset({"", "gemm"})
    order = (0, 4, 1, 5, 2, 6, 3, 7)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, columns, words = self._header(self.data)
        return (*lead, words * _WORD, columns)

    def _wrong_stated(self) -> str | None:
        wrong = super()._wrong_stated()
        if wrong is None and self._stated.symmetric:
            location = self.tensors.location(self.data)
            return f"{location} is AWQ without zero points (zero_point: false), which is not read; {_DEQUANTISE}"
        return wrong

    def _codes(self, lead: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        words = slice(rows.start // _WORD, -(-rows.stop // _WORD))
        start = rows.start - words.start * _WORD
        raw = self.tensors.raw(self.data, *lead, columns, words)
        return _unpacked(raw, self.order)[:, start : start + rows.stop - rows.start]


class GptqMatrix(_Words):
    """GPTQ: `qweight` [columns / 8, rows], the first code in the low bits. `g_idx` has the group of each column.

    The format "gptq" stores zero points minus one, "gptq_v2" stores them directly. Those of symmetric codes are 8. A
    file that states the wrong format is found by zero points that no quantizer makes, and else by the weights' mean.
    """

    method = "gptq"
    packings = frozenset({"", "gptq", "gptq_v2"})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, words, rows = self._header(self.data)
        return (*lead, rows, words * _WORD)

    def matches_scheme(self, scheme: str) -> bool:
        declared = self._stated
        return int4_matches_scheme(scheme, self.group) and declared.symmetric is True and not declared.reordered

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        if expert is None and len(self.shape) == 3:
            each = [self.codes(rows, columns, one) for one in range(self.shape[0])]
            return {part: torch.stack([one[part] for one in each]) for part in each[0]}
        lead = () if expert is None else (expert,)
        (top, bottom), (left, right) = span(rows, self.shape[-2]), span(columns, self.shape[-1])
        self._check_order(lead, left, right)
        self._zeros(lead, top, bottom)  # raises unless all are the middle
        groups = slice(left // self.group, right // self.group)
        scale = read_scales(self.tensors, self.scale, *lead, groups, slice(top, bottom))
        numbers = self._codes(lead, slice(top, bottom), slice(left, right)) - _MIDDLE
        self._check_lost(scale.repeat_interleave(self.group, 0), numbers)
        nibbles = (numbers & 0xF).T.to(torch.uint8)
        data = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        rounded = int4_scales(scale).T.contiguous()
        made = partial(dequantize_int4, data, rounded)
        check_products(self.tensors, self.scale, self.data, rounded.float(), INT4_MAX, made)
        return {"": data.contiguous(), "_scale": rounded}

    def _check_order(self, lead: tuple[int, ...], left: int, right: int) -> None:
        """Raise CheckpointError if columns of a group are not adjacent, contrary to config.json."""
        found = self._groups(lead, left, right)
        if not torch.equal(found, torch.arange(left, right, device="cpu") // self.group):
            raise CheckpointError(
                f"{self.tensors.location(self.groups_of)} puts columns in another order, and config.json does not "
                f"state desc_act: true; state it in quantization_config, and choose quantization none"
            )

    def _offset(self, stored: Tensor) -> Tensor:
        zeros = stored if self._direct else stored + 1
        if not zeros.numel():
            return zeros
        least, most, location = int(zeros.min()), int(zeros.max()), self.tensors.location(self.zeros)
        if self._stated.symmetric and not least == most == _MIDDLE:
            raise CheckpointError(
                f"{location} has zero points {least} to {most}, and config.json states sym: true, whose zero points "
                f"are {_MIDDLE}, and {self._format}; correct config.json, or fetch the checkpoint again"
            )
        one_off = _MIDDLE - 1 if self._direct else _MIDDLE + 1
        if most > _LARGEST or (zeros.numel() >= _WORD and least == most == one_off):
            raise CheckpointError(
                f"{location} has zero points {least} to {most} in {self._format}, and zero points of 4 bits are at "
                f"most {_LARGEST}, and {_MIDDLE} if all are equal; set checkpoint_format {self._other_format!r} in "
                f"config.json if the file is in it, else {_DEQUANTISE}"
            )
        return zeros

    @property
    def _direct(self) -> bool:
        """Whether zero points are stored directly."""
        return self._stated.packing == "gptq_v2"

    @property
    def _format(self) -> str:
        return f"checkpoint_format {self._stated.packing or 'gptq'!r}"

    @property
    def _other_format(self) -> str:
        return "gptq" if self._direct else "gptq_v2"

    def _check_mean(self, numbers: Tensor) -> None:
        if self._stated.symmetric or numbers.numel() < _MANY:
            return
        mean = float(numbers.mean()) * (1 if self._direct else -1)  # 1 step too large, or too small
        if abs(mean - 1) < 0.25:
            warnings.warn(
                f"{self.tensors.origin}: weights of GPTQ matrices are one step of their scale from zero on average, as "
                f"if {self._format} were {self._other_format!r}; correct checkpoint_format in config.json, or compare "
                f"outputs with those of the tool that wrote the checkpoint",
                stacklevel=2,
            )

    def _codes(self, lead: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        words = slice(columns.start // _WORD, -(-columns.stop // _WORD))
        start = columns.start - words.start * _WORD
        raw = self.tensors.raw(self.data, *lead, words, rows)
        return _unpacked(raw.T, self.order).T[start : start + columns.stop - columns.start]


def _unpacked(words: Tensor, order: Sequence[int]) -> Tensor:
    """Unpack words, int32 [..., n], to codes [..., 8n]. order: the position in a word of each of its eight codes"""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
    return ((words.unsqueeze(-1) >> shifts) & 0xF).flatten(-2)
