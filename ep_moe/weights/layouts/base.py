"""The interface of weight layouts, and layouts that are short.

A layout converts one expert's canonical tensors to those that a kernel reads, and back. Other modules of this package
hold the layouts of FlashInfer's kernels and of the 4-bit Hopper kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ep_moe.config import MoEConfig
from ep_moe.quant.fp8 import FP8_BLOCK
from ep_moe.quant.schemes import Scheme
from ep_moe.quant.weight_formats import TensorSpec


class WeightLayout:
    """The canonical layout: gate rows first, then up rows, linear scales. Derive from this for other layouts.

    config, scheme: the layer's; dtype: of activations; etp: tensors are an etp rank's shard of an expert
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        self.config = config
        self.scheme = scheme
        self.dtype = dtype
        self.etp = etp
        self.canonical = scheme.expert(config, dtype, etp)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of each stored tensor of one slot."""
        return self.canonical

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one expert's canonical tensors to the stored ones."""
        return dict(tensors)

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one slot's stored tensors to the canonical ones: the inverse of `prepare`."""
        return dict(stored)


def swap_halves(tensor: Tensor) -> Tensor:
    """Swap gate and up, the two halves of the first dimension."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


# --- a scale for each block -------------------------------------------------------------------------------------------
# A per-matrix scale, repeated for kernels that read one scale for each 128 x 128 block. Results are the same.

_MATRICES = ("w13", "w2")


class PerBlock(WeightLayout):
    """Repeats the scale of a matrix as [rows / 128, columns / 128]. Sizes are multiples of 128.

    For schemes with one scale per matrix.
    """

    def specs(self) -> dict[str, TensorSpec]:
        return dict(self.canonical) | {f"{name}_scale": self._scale(name) for name in _MATRICES}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        spread = {n: tensors[f"{n}_scale"].expand(self._scale(n).shape).contiguous() for n in _MATRICES}
        return dict(tensors) | {f"{name}_scale": scale for name, scale in spread.items()}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(stored) | {f"{name}_scale": stored[f"{name}_scale"][0, 0] for name in _MATRICES}

    def _scale(self, name: str) -> TensorSpec:
        rows, columns = self.canonical[name].shape
        return TensorSpec((rows // FP8_BLOCK, columns // FP8_BLOCK), self.canonical[f"{name}_scale"].dtype)


# --- interleaved rows -------------------------------------------------------------------------------------------------
# The layout of w13 for FlashInfer's bf16 mega kernel for Hopper.
#
# Its first GEMM has tiles of 256 rows of w13, and its epilogue needs each gate row and its up row in one tile. Rows are
# therefore stored in groups of 32: gate, up, gate, up (`GATE_UP_GROUP` in cake_weights.py, FlashInfer 0.7.2.post1).
# The fp8 mega kernel reads canonical tensors.

GROUP = 32


class MegaBf16(WeightLayout):
    """Interleaves gate and up of w13 in groups of 32 rows. I of the etp shard must be a multiple of 32."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors) | {"w13": interleave_halves(tensors["w13"])}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(stored) | {"w13": in_halves(stored["w13"])}


def interleave_halves(w13: Tensor) -> Tensor:
    """Reorder the rows of w13 [2I, H] from [gate; up] to 32 rows of gate, 32 rows of up, and so on."""
    rows: Tensor = w13.unflatten(0, (2, -1, GROUP)).transpose(0, 1).flatten(0, 2)
    return rows


def in_halves(w13: Tensor) -> Tensor:
    """Reorder the rows of w13 [2I, H] back to [gate; up]: the inverse of `interleave_halves`."""
    halves: Tensor = w13.unflatten(0, (-1, 2, GROUP)).transpose(0, 1).flatten(0, 2)
    return halves


# --- scales as tensor cores read them ---------------------------------------------------------------------------------
# Memory layouts of block scales (one scale per row and block of columns) for Blackwell's kernels.
#
# LINEAR          [..., rows, blocks], row-major: how scales are quantized, stored in checkpoints, and sent
# SWIZZLED_128X4  tiles of 128 rows x 4 blocks, tiles in row-major order; in a tile: r % 32, then r // 32, then block
# SWIZZLED_8X4    tiles of 8 rows x 4 blocks, row-major, for few rows
# MMA             a view of SWIZZLED_128X4 as (32, 4, rows / 128, 4, blocks / 4, groups), for CuteDSL
#
# Rows and blocks are padded with zeros to whole tiles. Any one-byte dtype is supported. The cuBLAS manual ("1D block
# scaling factors layout") defines the 128 x 4 tile. FlashInfer's quantizers write both swizzles.

_BLOCKS = 4


class ScaleLayout(enum.Enum):
    """The memory layout of a matrix's block scales. `LINEAR` is [rows, blocks]; the others are FlashInfer's."""

    LINEAR = "linear"
    SWIZZLED_128X4 = "swizzled_128x4"
    SWIZZLED_8X4 = "swizzled_8x4"
    MMA = "mma"


def arrange(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """Convert linear scales to another layout.

    Args:
        scales: LINEAR [..., rows, blocks], of a one-byte dtype. For MMA, [groups, rows, blocks].
        layout: The layout to convert to.

    Returns:
        Swizzled scales have the shape [..., rows, blocks], each size rounded up to whole tiles. MMA scales are a
        non-contiguous view of six dimensions.
    """
    if layout is ScaleLayout.LINEAR:
        return scales
    if layout is ScaleLayout.MMA:
        assert scales.dim() == 3, "MMA scales have one leading size, groups"
        swizzled = arrange(scales, ScaleLayout.SWIZZLED_128X4)
        groups, rows, blocks = swizzled.shape
        return swizzled.view(groups, rows // 128, blocks // _BLOCKS, 32, 4, _BLOCKS).permute(3, 4, 1, 5, 2, 0)
    tile = _tile(layout)
    rows, blocks = scales.shape[-2:]
    whole = _filled(scales, -rows % tile, -blocks % _BLOCKS)
    tiles = whole.unflatten(-1, (-1, _BLOCKS)).unflatten(-3, (-1, tile))  # [..., row tile, row, block tile, block]
    swizzled = _turned(tiles.transpose(-3, -2), layout)
    return swizzled.contiguous().view(whole.shape)


def linearize_scales(stored: Tensor, layout: ScaleLayout, rows: int, blocks: int) -> Tensor:
    """Convert scales in `layout` to LINEAR [..., rows, blocks], without padding: the inverse of `arrange`."""
    if layout is ScaleLayout.LINEAR:
        return stored
    if layout is ScaleLayout.MMA:
        swizzled = stored.permute(5, 2, 4, 0, 1, 3).contiguous()
        groups, row_tiles, block_tiles = swizzled.shape[:3]
        shape = (groups, 128 * row_tiles, _BLOCKS * block_tiles)
        return linearize_scales(swizzled.view(shape), ScaleLayout.SWIZZLED_128X4, rows, blocks)
    tile = _tile(layout)
    tiles = stored.view(*stored.shape[:-2], stored.shape[-2] // tile, stored.shape[-1] // _BLOCKS, tile, _BLOCKS)
    whole = _turned(tiles, layout, back=True).transpose(-3, -2).reshape(stored.shape)
    return whole[..., :rows, :blocks].contiguous()


def _tile(layout: ScaleLayout) -> int:
    return 128 if layout is ScaleLayout.SWIZZLED_128X4 else 8


def _turned(tiles: Tensor, layout: ScaleLayout, *, back: bool = False) -> Tensor:
    """Reorder the rows r of each tile [..., 128, 4] by r % 32, then r // 32, or back. 8 x 4 tiles stay as they are."""
    if layout is ScaleLayout.SWIZZLED_8X4:
        return tiles
    sizes = (32, 4) if back else (4, 32)
    turned: Tensor = tiles.unflatten(-2, sizes).transpose(-3, -2).flatten(-3, -2)
    return turned


def _filled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Pad scales with zeros, as bytes: torch does not pad float8."""
    return pad(scales.contiguous().view(torch.uint8), (0, blocks, 0, rows)).view(scales.dtype)
