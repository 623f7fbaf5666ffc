"""Test layouts of block scales, each by its inverse and by a separate index formula."""

from __future__ import annotations

import pytest
import torch

from ep_moe.weights.layouts.base import ScaleLayout, arrange, linearize_scales

SHAPES = [(128, 4), (256, 8), (384, 12), (1, 1), (8, 4), (100, 7), (130, 5), (7, 9)]


def scales(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


def offset_128x4(row: int, block: int, blocks: int) -> int:
    """Return the offset of a scale in its matrix, in bytes, by cuBLAS' formula, tile by tile."""
    tile = (row // 128) * -(-blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


def offset_8x4(row: int, block: int, blocks: int) -> int:
    return ((row // 8) * -(-blocks // 4) + block // 4) * 32 + row % 8 * 4 + block % 4


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
@pytest.mark.parametrize(
    ("layout", "offset", "tile"),
    [(ScaleLayout.SWIZZLED_128X4, offset_128x4, 128), (ScaleLayout.SWIZZLED_8X4, offset_8x4, 8)],
    ids=["128x4", "8x4"],
)
def test_each_scale_is_where_the_formula_says(rows, blocks, layout, offset, tile):
    given = scales(2, rows, blocks)
    stored = arrange(given, layout)
    assert stored.shape == (2, -(-rows // tile) * tile, -(-blocks // 4) * 4)
    assert stored.is_contiguous()
    wanted = torch.zeros(2, stored[0].numel(), dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            wanted[:, offset(row, block, blocks)] = given[:, row, block]
    assert torch.equal(stored.flatten(1), wanted), "and zeros everywhere else"


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_mma_by_its_six_indices(rows, blocks):
    given = scales(3, rows, blocks)
    stored = arrange(given, ScaleLayout.MMA)
    assert stored.shape == (32, 4, -(-rows // 128), 4, -(-blocks // 4), 3)
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    for group in range(3):
        found = stored[row % 32, row % 128 // 32, row // 128, block % 4, block // 4, group]
        assert torch.equal(found, given[group])
    swizzled = arrange(given, ScaleLayout.SWIZZLED_128X4)
    assert stored.data_ptr() != given.data_ptr()
    assert torch.equal(stored.permute(5, 2, 4, 0, 1, 3).reshape(-1), swizzled.flatten()), (
        "the swizzled bytes, seen anew"
    )


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_there_and_back(rows, blocks, layout, dtype):
    given = scales(3, rows, blocks).view(dtype)
    found = linearize_scales(arrange(given, layout), layout, rows, blocks)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))
