"""How block scales lie in memory for Blackwell's kernels, one scale per row and block of columns.

LINEAR         [..., rows, blocks], row-major: how scales are quantised, stored in checkpoints, and sent
SWIZZLED_128X4 tiles of 128 rows x 4 blocks, row-major among tiles, and in a tile row r % 32, then r // 32, then block
SWIZZLED_8X4   tiles of 8 rows x 4 blocks, row-major, for few rows
MMA            the bytes of SWIZZLED_128X4 seen as (32, 4, rows / 128, 4, blocks / 4, groups), for CuteDSL

Rows and blocks are filled up with zeros to whole tiles. Any dtype of one byte. CUDA's cuBLAS manual ("1D block scaling
factors layout") defines the first tile; FlashInfer's quantisers write both swizzles.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCKS = 4


class ScaleLayout(enum.Enum):
    LINEAR = "linear"
    SWIZZLED_128X4 = "swizzled_128x4"
    SWIZZLED_8X4 = "swizzled_8x4"
    MMA = "mma"


def arrange(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """scales: LINEAR [..., rows, blocks]. Returns them in `layout`, [..., whole tiles of rows, of blocks] for the
    swizzled ones; MMA takes [groups, rows, blocks] and is a view that is not contiguous."""
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


def linear(stored: Tensor, layout: ScaleLayout, rows: int, blocks: int) -> Tensor:
    """The inverse of `arrange`: [..., rows, blocks]."""
    if layout is ScaleLayout.LINEAR:
        return stored
    if layout is ScaleLayout.MMA:
        swizzled = stored.permute(5, 2, 4, 0, 1, 3).contiguous()
        groups, row_tiles, block_tiles = swizzled.shape[:3]
        shape = (groups, 128 * row_tiles, _BLOCKS * block_tiles)
        return linear(swizzled.view(shape), ScaleLayout.SWIZZLED_128X4, rows, blocks)
    tile = _tile(layout)
    tiles = stored.view(*stored.shape[:-2], stored.shape[-2] // tile, stored.shape[-1] // _BLOCKS, tile, _BLOCKS)
    whole = _turned(tiles, layout, back=True).transpose(-3, -2).reshape(stored.shape)
    return whole[..., :rows, :blocks].contiguous()


def _tile(layout: ScaleLayout) -> int:
    return 128 if layout is ScaleLayout.SWIZZLED_128X4 else 8


def _turned(tiles: Tensor, layout: ScaleLayout, *, back: bool = False) -> Tensor:
    """Rows within each tile [..., 128, 4] from their order to r % 32, then r // 32, or back."""
    if layout is ScaleLayout.SWIZZLED_8X4:
        return tiles
    sizes = (32, 4) if back else (4, 32)
    turned: Tensor = tiles.unflatten(-2, sizes).transpose(-3, -2).flatten(-3, -2)
    return turned


def _filled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Padding of bytes, which torch does not do for float8."""
    return pad(scales.contiguous().view(torch.uint8), (0, blocks, 0, rows)).view(scales.dtype)
