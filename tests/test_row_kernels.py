"""The Triton forms of `row_kernels` against the torch forms, which define them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.experts import row_kernels
from tests.test_fp8_block_kernels import DEVICE

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts import row_kernels_triton

SLOTS = 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_clean_ids(rows, top_k, weighted, dtype):
    generator = torch.Generator().manual_seed(rows + top_k)
    ids = torch.randint(-2, SLOTS + 2, (rows, top_k), generator=generator).to(dtype)
    ids[0, 0] = 2**31 - 1 if dtype == torch.int32 else 2**32 + 1
    weights = torch.rand(rows, top_k, generator=generator) if weighted else None
    expected = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
    row_kernels.clean_ids(ids, weights, SLOTS, expected[0], expected[1] if weighted else None)
    found = [torch.full_like(tensor, 99, device=DEVICE) for tensor in expected]
    row_kernels_triton.clean_ids(
        ids.to(DEVICE), None if weights is None else weights.to(DEVICE), SLOTS, found[0], found[1] if weighted else None
    )
    assert torch.equal(found[0].cpu(), expected[0])
    if weighted:
        torch.testing.assert_close(found[1].cpu(), expected[1])
        valid = (ids >= 0) & (ids < SLOTS)
        torch.testing.assert_close(found[1].sum(1).cpu(), (weights * valid).sum(1))
    for row in expected[0].tolist():
        kept = [number for number in row if number >= 0]
        assert len(kept) == len(set(kept))


def test_row_extremes_and_rounding():
    x = torch.randn(9, 1500, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[4], x[7] = 1000, torch.nan
    ids = torch.zeros(9, 3, dtype=torch.int32)
    ids[4], ids[7] = -1, -1
    expected, found = torch.zeros(2), torch.zeros(2, device=DEVICE)
    row_kernels.row_extremes(x, ids, expected)
    row_kernels_triton.row_extremes(x.to(DEVICE), ids.to(DEVICE), found)
    torch.testing.assert_close(found.cpu(), expected)
    if DEVICE == "cpu":  # the interpreter (3.6) loses the carry when a mantissa rounds up to the next power of two
        return
    scale = torch.tensor(0.003)
    rounded = torch.empty(9, 1500, dtype=torch.float8_e4m3fn)
    on_device = torch.empty_like(rounded, device=DEVICE)
    row_kernels.round_rows(x[:4], scale, rounded[:4])
    row_kernels_triton.round_rows(x[:4].to(DEVICE), scale.to(DEVICE), on_device[:4])
    assert torch.equal(on_device[:4].cpu().view(torch.uint8), rounded[:4].view(torch.uint8))
