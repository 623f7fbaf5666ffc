"""Matrices stored in 4 bits: NVFP4 and MXFP4 with two values per byte, INT4 with eight per int32."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from ep_moe.checkpoint.stored import (
    ALL,
    StoredMatrix,
    Tensors,
    check_lost,
    check_products,
    check_scales,
    companion_names,
    read_scalar_scale,
    span,
    wrong_dtype,
)
from ep_moe.errors import CheckpointError
from ep_moe.quant.microscale import (
    E2M1_MAX,
    INT4_GROUP,
    MX_BLOCK,
    NVFP4_BLOCK,
    NVFP4_RANGE,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_nvfp4,
    e8m0_values,
)

INT4_MAX = 8  # the largest magnitude of a code
_WORD = 8  # INT4 codes of an int32
_GROUPS = {"int4_fp8": INT4_GROUP, "int4": INT4_GROUP, "mxint4": MX_BLOCK, "mxint4_fp8": MX_BLOCK}
_SCALES_ROUNDED = (
    "scales of INT4 groups are rounded to bfloat16, in which layers hold them: weights change by at most 2**-8 of "
    "each, and codes are kept; quantization='none' reads the file's own numbers"
)


class _Packed(StoredMatrix):
    """Codes packed along columns, with one scale for each `block` columns of a row.

    scale: the name of the scales
    """

    scale: str
    block: int
    per_element = 2  # codes in an element of the stored tensor

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, packed = self._seen(self.tensors.header(self.data)[1])
        return (*lead, rows, packed * self.per_element)

    def parts(self) -> tuple[str, ...]:
        return self.data, self.scale

    def _wrong_blocks(self) -> str | None:
        """Return why the shape of the scales does not fit the codes, or None."""
        shape, location = self.shape, self.tensors.location(self.data)
        wanted = [*shape[:-1], shape[-1] // self.block]
        found = list(self._seen(self.tensors.header(self.scale)[1])) if self.tensors.holds(self.scale) else "nothing"
        if shape[-1] % self.block or found != wanted:
            return (
                f"{location} is {self.description} of shape {list(self.tensors.header(self.data)[1])}; only matrices "
                f"with {self.scale} of shape {wanted}, one factor per {self.block} columns, can be "
                f"read, got {found} there"
            )
        return None

    def read_values(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        start, stop = span(columns, self.shape[-1])
        # the part may start inside a block: read whole blocks, then cut
        first, last = start // self.block, -(-stop // self.block)
        whole = self._decoded(rows, slice(first * self.block, last * self.block), expert)
        return whole[..., start - first * self.block : stop - first * self.block]

    def _decoded(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        """Read whole blocks, dequantized."""
        raise NotImplementedError

    def _data(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        start, stop = span(columns, self.shape[-1])
        within = slice(start // self.per_element, stop // self.per_element)
        return self._raw(self.data, rows, within, expert).contiguous()

    def _blocks(self, columns: slice) -> slice:
        start, stop = span(columns, self.shape[-1])
        return slice(start // self.block, stop // self.block)


class Nvfp4Matrix(_Packed):
    """E2M1, an E4M3 scale per 16 columns and a global float32 scale.

    NVIDIA's Model Optimizer writes `weight` uint8 [rows, columns / 2], `weight_scale`, and the global dequantization
    scale `weight_scale_2`, amax / (448 * 6). compressed-tensors (nvfp4-pack-quantized) writes `weight_packed`,
    `weight_scale`, and the reciprocal `weight_global_scale`.
    """

    description = "NVFP4"
    block = NVFP4_BLOCK
    input_range = NVFP4_RANGE

    def __init__(self, tensors: Tensors, name: str, *, packed: bool, transposed: bool, stacked: int) -> None:
        super().__init__(tensors, name, f"{name}_packed" if packed else name, transposed=transposed, stacked=stacked)
        self.scale = _present(tensors, name, "_scale")
        self.reciprocal = packed
        self.global_scale = _present(tensors, name, "_global_scale" if packed else "_scale_2")

    def parts(self) -> tuple[str, ...]:
        return self.data, self.scale, self.global_scale

    def unreadable_reason(self) -> str | None:
        wrong = self._wrong_blocks()
        if wrong is not None:
            return wrong
        dtype, _ = self.tensors.header(self.scale)
        if dtype != "F8_E4M3":
            return f"{self.tensors.location(self.scale)} must be float8_e4m3fn, got {dtype}"
        _, shape = self.tensors.header(self.global_scale)
        if torch.Size(shape).numel() != 1 and (len(self.shape) == 2 or torch.Size(shape).numel() != self.shape[0]):
            return f"{self.tensors.location(self.global_scale)} must have shape [], got {list(shape)}"
        smoothing = f"{self.name.removesuffix('weight')}pre_quant_scale"
        if self.tensors.holds(smoothing):
            return (
                f"{self.tensors.location(smoothing)} is a factor of the layer's input (NVFP4_AWQ), which is not "
                f"supported; export the model with the algorithm NVFP4"
            )
        return wrong_dtype(self.tensors, self.global_scale, exponents=False)

    def matches_scheme(self, scheme: str) -> bool:
        return scheme in ("nvfp4", "nvfp4a16")

    def _decoded(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        data, scale, number = self._found(rows, columns, expert)
        return dequantize_nvfp4(data, self._factor(scale, number), 1.0)

    def _factor(self, scale: Tensor, number: Tensor) -> Tensor:
        """Return the scale of each block. Divides by a reciprocal, to round as compressed-tensors does."""
        return scale.float() / number if self.reciprocal else scale.float() * number

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        data, scale, number = self._found(rows, columns, expert)
        return {"": data, "_scale": scale, "_global_scale": 1 / number if self.reciprocal else number}

    def _found(self, rows: slice, columns: slice, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        scale = self._raw(self.scale, rows, self._blocks(columns), expert).contiguous()
        check_scales(self.tensors, self.scale, scale.float())
        number = read_scalar_scale(self.tensors, self.global_scale, expert, positive=self.reciprocal)
        data = self._data(rows, columns, expert)
        # the scale of a block of small values may round to 0, but not those of a whole matrix
        if number == 0 or not scale.float().any():
            lost = int((dequantize_nvfp4(data, torch.ones_like(scale), 1.0) != 0).sum())
            check_lost(self.tensors, self.global_scale if number == 0 else self.scale, self.data, lost)
        factor = self._factor(scale, number)
        made = partial(dequantize_nvfp4, data, factor, 1.0)
        check_products(self.tensors, self.global_scale, self.data, factor, E2M1_MAX, made)
        return data, scale, number


class Mxfp4Matrix(_Packed):
    """E2M1 with an E8M0 scale per 32 columns.

    compressed-tensors (mxfp4-pack-quantized) writes `weight_packed` uint8 [rows, columns / 2] and `weight_scale`.
    GPT-OSS has `_blocks` [E, rows, columns / 32, 16] and `_scales` [E, rows, columns / 32], which are never transposed,
    unlike its unquantized weights.
    """

    description = "MXFP4"
    block = MX_BLOCK

    def __init__(self, tensors: Tensors, name: str, *, blocks: bool, transposed: bool, stacked: int) -> None:
        data, transposed = (f"{name}_blocks", False) if blocks else (f"{name}_packed", transposed)
        super().__init__(tensors, name, data, transposed=transposed, stacked=stacked)
        self.blocks = blocks
        self.scale = f"{name}_scales" if blocks else _present(tensors, name, "_scale")

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.blocks:
            return super().shape
        *lead, blocks, _ = self.tensors.header(self.data)[1]
        return (*lead, blocks * MX_BLOCK)

    def unreadable_reason(self) -> str | None:
        for name in self.parts():
            if not self.tensors.holds(name):
                return f"{name} is missing; {self.tensors.location(self.data)} is {self.description}"
        dtype, shape = self.tensors.header(self.data)
        if dtype != "U8" or (self.blocks and (len(shape) != 4 or shape[-1] != MX_BLOCK // 2)):
            wanted = f"[..., {MX_BLOCK // 2}]" if self.blocks else "[rows, columns / 2]"
            return f"{self.tensors.location(self.data)} must be uint8 of shape {wanted}, got {dtype} {list(shape)}"
        scales = self.tensors.header(self.scale)[0]
        if scales not in ("U8", "F8_E8M0"):
            location = self.tensors.location(self.scale)
            return f"{location} must be exponents (E8M0), as uint8 or float8_e8m0fnu, got {scales}"
        return self._wrong_blocks() or wrong_dtype(self.tensors, self.scale, bytes_too=self.blocks)

    def matches_scheme(self, scheme: str) -> bool:
        return scheme in ("mxfp4", "mxfp4_fp8", "mxfp4_mxfp8")

    def _decoded(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        found = self.codes(rows, columns, expert)
        return dequantize_mxfp4(found[""], found["_scale"])

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        scale = self._raw(self.scale, rows, self._blocks(columns), expert).contiguous()
        if (scale == 0xFF).any():
            raise CheckpointError(
                f"{self.tensors.location(self.scale)} has the exponent 255 (NaN) at {int((scale == 0xFF).sum())} of "
                f"{scale.numel()} places that were read; the checkpoint is damaged: fetch or export it again"
            )
        data = self._data(rows, columns, expert)
        made = partial(dequantize_mxfp4, data, scale)
        check_products(self.tensors, self.scale, self.data, e8m0_values(scale), E2M1_MAX, made)
        return {"": data, "_scale": scale}

    def _data(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        if not self.blocks:
            return super()._data(rows, columns, expert)
        return self._raw(self.data, rows, self._blocks(columns), expert).flatten(-2)


class Int4Matrix(_Packed):
    """compressed-tensors' `pack-quantized` with 4 bits, symmetric, in groups of columns.

    `weight_packed` int32 [rows, columns / 8] holds eight codes + 8 per word, the first in the low bits.
    `weight_scale` is [rows, columns / group], and `weight_shape` holds the unpacked shape.
    """

    per_element = _WORD

    def __init__(self, tensors: Tensors, name: str, *, transposed: bool = False, stacked: int = 1) -> None:
        super().__init__(tensors, name, f"{name}_packed", transposed=transposed, stacked=stacked)
        self.scale = _present(tensors, name, "_scale")
        columns, found = self.shape[-1], self._seen(tensors.header(self.scale)[1]) if tensors.holds(self.scale) else ()
        groups = found[-1] if found else 0
        self.block = columns // groups if groups and columns % groups == 0 else INT4_GROUP

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"INT4 in groups of {self.block} (compressed-tensors pack-quantized)"

    def parts(self) -> tuple[str, ...]:
        shape = f"{self.name}_shape"
        return (*super().parts(), *([shape] if self.tensors.holds(shape) else []))

    def unreadable_reason(self) -> str | None:
        for end in ("_zero_point", "_g_idx"):
            if self.tensors.holds(f"{self.name}{end}"):
                return (
                    f"{self.tensors.location(self.name + end)} changes what the numbers mean; of compressed-tensors "
                    f"pack-quantized only symmetric groups, in order, can be read"
                )
        bits, location = self._stated.bits, self.tensors.location(self.data)
        rows, columns = self.shape[-2:]
        shape = f"{self.name}_shape"
        stated = self.tensors.raw(shape).tolist() if self.tensors.holds(shape) and len(self.shape) == 2 else None
        if (bits and 4 not in bits) or (stated is not None and stated != [rows, columns]):
            what = f"{', '.join(map(str, sorted(bits)))} bits" if bits and 4 not in bits else f"the shape {stated}"
            return (
                f"{location} is compressed-tensors pack-quantized with {what}, which is not read: only 4 bits, eight "
                f"to a word, are; dequantize the checkpoint to bf16 first"
            )
        return self._wrong_blocks() or self._wrong_stated() or wrong_dtype(self.tensors, self.scale, exponents=False)

    def _wrong_stated(self) -> str | None:
        """Return a contradiction between config.json and the tensors, or None."""
        declared, location = self._stated, self.tensors.location(self.data)
        if declared.asymmetric:
            return f"{location} has no zero points, and config.json states symmetric: false; fetch the checkpoint again"
        if declared.reordered:
            return (
                f"{location} has no {self.name}_g_idx, and config.json states an actorder that puts columns in another "
                f"order; fetch the checkpoint again"
            )
        groups = {size or self.shape[-1] for size in declared.groups}
        if groups and self.block not in groups:
            return (
                f"{self.tensors.location(self.scale)} has a factor for each {self.block} columns, and config.json "
                f"states group_size {' and '.join(map(str, sorted(groups)))}; fetch the checkpoint again"
            )
        return None

    def matches_scheme(self, scheme: str) -> bool:
        return int4_matches_scheme(scheme, self.block)

    def _decoded(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        return dequantize_int4(*self._found(rows, columns, expert))

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        data, scale = self._found(rows, columns, expert)
        rounded = int4_scales(scale)
        made = partial(dequantize_int4, data, rounded)
        check_products(self.tensors, self.scale, self.data, rounded.float(), INT4_MAX, made)
        return {"": data, "_scale": rounded}

    def _found(self, rows: slice, columns: slice, expert: int | None) -> tuple[Tensor, Tensor]:
        """Read codes in two's complement, uint8 with two per byte, and the scales as they are stored."""
        scale = self._raw(self.scale, rows, self._blocks(columns), expert)
        check_scales(self.tensors, self.scale, scale.float())
        data = self._data(rows, columns, expert).view(torch.uint8) ^ 0x88
        if (scale == 0).any():
            check_lost(self.tensors, self.scale, self.data, int((dequantize_int4(data, scale == 0) != 0).sum()))
        made = partial(dequantize_int4, data, scale)
        check_products(self.tensors, self.scale, self.data, scale.float(), INT4_MAX, made)
        return data, scale


def int4_matches_scheme(scheme: str, group: int) -> bool:
    """Return whether a scheme has INT4 weights in groups of `group` columns."""
    return _GROUPS.get(scheme) == group


def int4_scales(scale: Tensor) -> Tensor:
    """Convert scales to bfloat16, in which layers hold them. Warn if this rounds."""
    rounded = scale.to(torch.bfloat16)
    if scale.dtype != torch.bfloat16 and not torch.equal(rounded.to(scale.dtype), scale):
        warnings.warn(_SCALES_ROUNDED, stacklevel=2)
    return rounded


def _present(tensors: Tensors, name: str, end: str) -> str:
    names = companion_names(name, end)
    return next((each for each in names if tensors.holds(each)), names[-1])
