"""The layouts of 4-bit weights for ep_moe's own Hopper kernels.

These are `fused_4bit`, `gemm_4bit`, `gemm_skinny_4bit` and `gemm_grouped_4bit`. A matrix [rows, columns] is stored in
blocks of 128 columns, the last block padded with zeros:

    data: int32 [blocks, rows, 16]
    scales: int32 [blocks, words, rows]; if a group has 128 columns, two blocks share a word

A tile of any number of rows is then contiguous in memory. A thread of the tensor core instruction reads 16 bytes of a
row. With activations in bf16, word 4 t + g of a block's row holds columns 32 g + 8 i + 2 t + h for i in 0 .. 3 and h in
0 .. 1, the columns of thread t of four. Its half h (16 bits) holds the code of each i:

    INT4    code + 8 at bit 4 i; in the lowest bits, it is a bf16 that is 2**-133 times this integer
    E2M1    bits placed so that a shift and masks give a bf16 that is 2**-126 times the value (`_E2M1_BITS`)

With activations in E4M3, the word holds columns 32 g + 16 i + 4 t + h for i in 0 .. 1 and h in 0 .. 3. The three low
bits of a code are at bit 16 i + 4 h, where one PRMT instruction looks up four codes. Its sign is at bit
8 h + 7 - 4 i, where one shift moves four signs into their bytes. MXFP4 also has

    row_scale: float32 [rows]; 2 ** (e - 133), where e is the largest exponent of a row's groups that are not all zero

A code times 2 ** (its group's exponent - e + 6) is then an E4M3 number. It is exact if the exponent is at least e - 14,
and rounded to a multiple of 2 ** -9 below.
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
LARGEST_EXPONENT = 160  # of MXFP4, 2 ** 33: with larger ones, the kernel's factors overflow bf16
LARGEST_SCALE = 2.0**26  # of INT4, for the same reason
ROW_SCALE = 133  # the bias of `row_scale`: 127 of E8M0, and 6 for E4M3's range
SMALLEST_EXPONENT = ROW_SCALE - 126  # the smallest exponent whose `row_scale` is a normal float32
# for each i: (mask of a code's bits, left shift in a half of a word) pairs
_E2M1_BITS = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 11), (6, 9), (1, 13)))
_INT4_BITS = tuple(((15, 4 * i),) for i in range(4))
_MATRICES = ("w13", "w2")


class Hopper4Bit(WeightLayout):
    """The layout of schemes with 4-bit weights, for bf16 activations. Columns are a multiple of the scheme's group."""

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
        """Return the first two sizes of the stored scales: blocks (or pairs of blocks), and words of each per row."""
        blocks, size = -(-columns // BLOCK), 2 if self._int4 else 1
        held = BLOCK // self._group * size  # bytes of a block's scales in a row
        return (blocks, held // 4) if held >= 4 else (-(-blocks * held // 4), 1)

    def _check(self, name: str, scale: Tensor) -> None:
        """Raise InputError for scales that the kernel would silently compute with wrongly."""
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
    """The layout of schemes with 4-bit weights, for E4M3 activations."""

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
        """Do nothing: exponents relative to the row's largest are representable in E4M3, whatever their size."""


def row_scale(data: Tensor, scale: Tensor) -> Tensor:
    """Return the factor of each row of an MXFP4 matrix that the kernel converts to E4M3.

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
    """Reorder the codes of a matrix for kernels that convert them to E4M3.

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
    """Restore the codes of a matrix: the inverse of `pack_for_e4m3`.

    Args:
        words: int32 [blocks, rows, 16].
        columns: The columns of the matrix.

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
    """Reorder the codes of a matrix for kernels that convert them to bf16.

    Args:
        data: uint8 [rows, columns / 2], the even column in the low nibble.
        int4: Codes are INT4 in two's complement, otherwise E2M1.

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
    """Restore the codes of a matrix: the inverse of `pack`.

    Args:
        words: int32 [blocks, rows, 16].
        columns: The columns of the matrix.
        int4: See `pack`.

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
    """View scales as integers of the same size: torch does not pad float8."""
    return scale.view(torch.int16 if scale.element_size() == 2 else torch.uint8)
