"""The layouts of 4-bit weights that this project's Hopper kernels read (`gemm_4bit`, `gemm_skinny_4bit`,
`gemm_grouped_4bit`).

A matrix [rows, columns] lies in blocks of 128 columns, filled up with zeros to whole ones:

    data: int32 [blocks, rows, 16]
    scales: int32 [blocks, words, rows]; of groups of 128 columns two blocks share a word

A tile of any number of rows is then one piece of memory, and 16 bytes of it are what a thread of the tensor cores'
instruction holds of a row. Under rows of bf16, word 4 t + g of a block's row holds columns 32 g + 8 i + 2 t + h for i
in 0 .. 3 and h in 0 .. 1: those that thread t of four has. Its half h, 16 bits, holds the code of each i:

    INT4    code + 8 at bit 4 i: where it ends, a bf16 that is 2**-133 times as large
    E2M1    where shifts and masks leave the bits of a bf16 that is 2**-126 times the number (`_E2M1_BITS`)

Under rows of E4M3 it holds columns 32 g + 16 i + 4 t + h for i in 0 .. 1 and h in 0 .. 3. A code's three low bits lie
at bit 16 i + 4 h, where one instruction (PRMT) looks four of them up, and its sign at bit 8 h + 7 - 4 i, where one
shift brings four signs to their bytes. MXFP4 has besides

    row_scale: float32 [rows]; 2 ** (e - 133), where e is the largest exponent of a row's groups that are not all zero

so that codes times 2 ** (their exponent - e + 6) are E4M3 numbers: exact where the exponent is at least e - 14, and
rounded to multiples of 2 ** -9 below.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ep_moe.config import MoEConfig
from ep_moe.errors import InputError
from ep_moe.quant.microscale import MX_BLOCK, pack_nibbles, unpack_nibbles
from ep_moe.quant.schemes import Scheme
from ep_moe.quant.weight_formats import Int4Groups, Mxfp4, TensorSpec
from ep_moe.weights.layouts.base import WeightLayout

BLOCK, WORDS = 128, 16  # columns, and words of a row, in a block
LARGEST_EXPONENT = 160  # of MXFP4: beyond it, 2 ** 33, the kernel's factors are no numbers of bf16
LARGEST_SCALE = 2.0**26  # of INT4, for the same reason
ROW_SCALE = 133  # of `row_scale`: 127 of E8M0, and 6 for E4M3's range
SMALLEST_EXPONENT = ROW_SCALE - 126  # whose `row_scale` is a normal number
# of each i, masks of a code's bits and how far they move left in a half of a word
_E2M1_BITS = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 11), (6, 9), (1, 13)))
_INT4_BITS = tuple(((15, 4 * i),) for i in range(4))
_MATRICES = ("w13", "w2")


class Hopper4Bit(WeightLayout):
    """Of a scheme with weights of 4 bits. Column sizes are multiples of the scheme's group."""

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self._int4 = isinstance(scheme.weights, Int4Groups)
        self._group = scheme.weights.unit[1]
        self._specs = dict(self.canonical)
        for name in _MATRICES:
            rows, columns = self._sizes(name)
            blocks, words = -(-columns // BLOCK), self._scale_words(columns)
            self._specs[name] = TensorSpec((blocks, rows, WORDS), torch.int32)
            self._specs[f"{name}_scale"] = TensorSpec((*words, rows), torch.int32)

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = dict(tensors)
        for name in _MATRICES:
            scale = tensors[f"{name}_scale"]
            self._check(name, scale)
            stored[name] = self._pack(tensors[name])
            words = self._scale_words(self._sizes(name)[1])
            per_word = 4 // scale.element_size()
            whole = words[0] * words[1] * per_word
            filled = _bits(pad(_bits(scale), (0, whole - scale.shape[-1]))).contiguous()
            stored[f"{name}_scale"] = filled.view(torch.int32).unflatten(-1, words).permute(1, 2, 0).contiguous()
        return stored

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = dict(stored)
        for name in _MATRICES:
            rows, columns = self._sizes(name)
            scale = self.canonical[f"{name}_scale"]
            tensors[name] = self._unpack(stored[name], columns)
            words = stored[f"{name}_scale"].permute(2, 0, 1).flatten()
            tensors[f"{name}_scale"] = words.view(scale.dtype).view(rows, -1)[:, : scale.shape[1]].contiguous()
        return tensors

    def _pack(self, data: Tensor) -> Tensor:
        return pack(data, int4=self._int4)

    def _unpack(self, words: Tensor, columns: int) -> Tensor:
        return unpack(words, columns, int4=self._int4)

    def _sizes(self, name: str) -> tuple[int, int]:
        rows, packed = self.canonical[name].shape
        return rows, 2 * packed

    def _scale_words(self, columns: int) -> tuple[int, int]:
        """Blocks, or pairs of them, and words of each for a row."""
        blocks, size = -(-columns // BLOCK), 2 if self._int4 else 1
        held = BLOCK // self._group * size  # bytes of a block's scales in a row
        return (blocks, held // 4) if held >= 4 else (-(-blocks * held // 4), 1)

    def _check(self, name: str, scale: Tensor) -> None:
        """What the kernel would compute otherwise without a word."""
        if isinstance(self.scheme.weights, Mxfp4):
            wrong, what = scale > LARGEST_EXPONENT, f"exponents of at most {LARGEST_EXPONENT} (2 ** 33)"
        elif self._int4:
            wrong, what = ~(scale.float().abs() <= LARGEST_SCALE), "scales of at most 2 ** 26"
        else:
            wrong, what = scale.float().isnan(), "scales that are numbers"
        if count := int(wrong.sum()):
            raise InputError(
                f"{name}_scale must have {what} under the kernels of 4-bit weights for Hopper, got others at {count} "
                f"of {scale.numel()} places; name experts='reference' for such weights"
            )


class Hopper4BitFp8(Hopper4Bit):
    """The same under rows of E4M3."""

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self._scaled = isinstance(scheme.weights, Mxfp4)
        if self._scaled:
            for name in _MATRICES:
                self._specs[f"{name}_row_scale"] = TensorSpec((self._sizes(name)[0],), torch.float32)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = super().prepare(tensors)
        if self._scaled:
            for name in _MATRICES:
                stored[f"{name}_row_scale"] = row_scale(tensors[name], tensors[f"{name}_scale"])
        return stored

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().restore({name: tensor for name, tensor in stored.items() if not name.endswith("_row_scale")})

    def _pack(self, data: Tensor) -> Tensor:
        return pack_for_e4m3(data)

    def _unpack(self, words: Tensor, columns: int) -> Tensor:
        return unpack_from_e4m3(words, columns)

    def _check(self, name: str, scale: Tensor) -> None:
        """Nothing: E4M3 holds what all exponents give, relative to the row's."""


def row_scale(data: Tensor, scale: Tensor) -> Tensor:
    """Find the factor of each row of MXFP4 that becomes E4M3.

    Args:
        data: uint8 [rows, columns / 2].
        scale: uint8 [rows, columns / 32], exponents.

    Returns:
        float32 [rows], powers of two.
    """
    used = (data & 0x77 != 0).unflatten(1, (-1, MX_BLOCK // 2)).any(2)
    largest = torch.where(used, scale, 0).amax(1).int().clamp(min=SMALLEST_EXPONENT)
    found: Tensor = torch.exp2((largest - ROW_SCALE).float())
    return found


def pack_for_e4m3(data: Tensor) -> Tensor:
    """Put codes of a matrix into the order of kernels that make E4M3 of them.

    Args:
        data: uint8 [rows, columns / 2], the even column in the low nibble.

    Returns:
        int32 [blocks, rows, 16].
    """
    codes = unpack_nibbles(data)
    codes = pad(codes, (0, -codes.shape[-1] % BLOCK)).int()
    parts = codes.unflatten(-1, (-1, 4, 2, 4, 4))  # [rows, block, g, i, t, h]
    word = torch.zeros_like(parts[:, :, :, 0, :, 0])
    for i in range(2):
        for h in range(4):
            code = parts[:, :, :, i, :, h]
            word |= (code & 7) << (16 * i + 4 * h) | (code >> 3) << (8 * h + 7 - 4 * i)
    packed: Tensor = word.permute(1, 0, 3, 2).flatten(2).contiguous()
    return packed


def unpack_from_e4m3(words: Tensor, columns: int) -> Tensor:
    """Undo `pack_for_e4m3`.

    Args:
        words: int32 [blocks, rows, 16].
        columns: Of the matrix.

    Returns:
        uint8 [rows, columns / 2].
    """
    word = words.unflatten(-1, (4, 4)).permute(1, 0, 3, 2)  # [rows, block, g, t]
    halves = []
    for i in range(2):
        codes = [word >> (16 * i + 4 * h) & 7 | (word >> (8 * h + 7 - 4 * i) & 1) << 3 for h in range(4)]
        halves.append(torch.stack(codes, dim=-1))
    return pack_nibbles(torch.stack(halves, dim=3).flatten(1)[:, :columns].to(torch.uint8))


def pack(data: Tensor, *, int4: bool) -> Tensor:
    """Put codes of a matrix into the kernel's order.

    Args:
        data: uint8 [rows, columns / 2], the even column in the low nibble.
        int4: Codes are two's complement; else E2M1.

    Returns:
        int32 [blocks, rows, 16].
    """
    codes = unpack_nibbles(data)
    codes = pad(codes, (0, -codes.shape[-1] % BLOCK)).int()
    codes = codes ^ 8 if int4 else codes
    parts = codes.unflatten(-1, (-1, 4, 4, 4, 2))  # [rows, block, g, i, t, h]
    half = torch.zeros_like(parts[:, :, :, 0])
    for i, bits in enumerate(_INT4_BITS if int4 else _E2M1_BITS):
        for mask, shift in bits:
            half |= (parts[:, :, :, i] & mask) << shift
    word = half[..., 0] | half[..., 1] << 16  # [rows, block, g, t]
    packed: Tensor = word.permute(1, 0, 3, 2).flatten(2).contiguous()
    return packed


def unpack(words: Tensor, columns: int, *, int4: bool) -> Tensor:
    """Undo `pack`.

    Args:
        words: int32 [blocks, rows, 16].
        columns: Of the matrix.
        int4: As for `pack`.

    Returns:
        uint8 [rows, columns / 2].
    """
    word = words.unflatten(-1, (4, 4)).permute(1, 0, 3, 2)  # [rows, block, g, t]
    half = torch.stack([word & 0xFFFF, word >> 16 & 0xFFFF], dim=-1)
    parts = []
    for bits in _INT4_BITS if int4 else _E2M1_BITS:
        code = torch.zeros_like(half)
        for mask, shift in bits:
            code |= half >> shift & mask
        parts.append(code)
    codes = torch.stack(parts, dim=3).flatten(1)[:, :columns]  # [rows, block, g, i, t, h]
    return pack_nibbles((codes ^ 8 if int4 else codes).to(torch.uint8))


def _bits(scale: Tensor) -> Tensor:
    """Integers of the same size: torch pads no float8."""
    return scale.view(torch.int16 if scale.element_size() == 2 else torch.uint8)
