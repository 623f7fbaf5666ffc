"""Test the Triton kernels of `call_scales` against the torch functions, which define them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.experts.flashinfer import call_scales
from ep_moe.experts.flashinfer.call_scales import Inputs, TensorScales
from tests.fixtures.fp8_block_kernels import DEVICE

pytest.importorskip("triton", reason="Triton is not installed")


SLOTS = 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("base", [0, 12])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_clean_ids(rows, top_k, weighted, dtype, base):
    generator = torch.Generator().manual_seed(rows + top_k)
    ids = base + torch.randint(-2, SLOTS + 2, (rows, top_k), generator=generator).to(dtype)
    ids[0, 0] = 2**31 - 1 if dtype == torch.int32 else 2**32 + 1
    weights = (2 * torch.rand(rows, top_k, generator=generator) - 0.5).relu() if weighted else None
    expected = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
    call_scales.clean_ids(ids, weights, base, SLOTS, expected[0], expected[1] if weighted else None)
    found = [torch.full_like(tensor, 99, device=DEVICE) for tensor in expected]
    call_scales.launch_clean_ids(
        ids.to(DEVICE),
        None if weights is None else weights.to(DEVICE),
        base,
        SLOTS,
        found[0],
        found[1] if weighted else None,
    )
    assert torch.equal(found[0].cpu(), expected[0])
    if weighted:
        torch.testing.assert_close(found[1].cpu(), expected[1])
        valid = (ids >= base) & (ids < base + SLOTS)
        torch.testing.assert_close(found[1].sum(1).cpu(), (weights * valid).sum(1))
    for row in expected[0].tolist():
        kept = [number for number in row if number >= 0]
        assert len(kept) == len(set(kept))


def test_row_extremes():
    x = torch.randn(9, 1500, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[4], x[7] = 1000, torch.nan
    ids = torch.zeros(9, 3, dtype=torch.int32)
    ids[4], ids[7] = -1, -1
    expected, found = torch.zeros(2), torch.zeros(2, device=DEVICE)
    call_scales.row_extremes(x, ids, expected)
    call_scales.launch_row_extremes(x.to(DEVICE), ids.to(DEVICE), found)
    torch.testing.assert_close(found.cpu(), expected)


def inputs_of(dynamic, bound, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    first = torch.tensor([7.0, 90.0]) if dynamic else torch.rand(SLOTS, generator=generator) / 10
    return Inputs(first.to(device), torch.rand(SLOTS, generator=generator).to(device), dynamic, bound)


@pytest.mark.parametrize(("dynamic", "bound"), [(False, 0.0), (True, 0.0), (True, 20.0)])
def test_rounding_and_its_scales(dynamic, bound):
    x = 5 * torch.randn(4, 1500, generator=torch.Generator().manual_seed(0)).bfloat16()
    w13, w2 = torch.rand(2, SLOTS, generator=torch.Generator().manual_seed(1))
    found = []
    for device, call in (("cpu", call_scales.round_rows), (DEVICE, call_scales.launch_round_rows)):
        out = torch.empty(4, 1500, dtype=torch.float8_e4m3fn, device=device)
        scales = TensorScales(*torch.full((3, SLOTS), 99.0, device=device), torch.empty((), device=device))
        arguments = (x.to(device), w13.to(device), w2.to(device), inputs_of(dynamic, bound, device), out, scales)
        call(*arguments)
        found.append((out.cpu().view(torch.uint8), *(value.cpu() for value in vars(scales).values())))
    expected, on_device = found
    for one, other in zip(expected[1:], on_device[1:], strict=True):
        assert torch.equal(one, other)
    # the interpreter (Triton 3.6) loses the carry when a mantissa rounds up to the next power of two
    if DEVICE != "cpu":
        assert torch.equal(expected[0], on_device[0])
    values = expected[0].view(torch.float8_e4m3fn).float() * expected[4]
    torch.testing.assert_close(values, x.float().clamp(-448 * expected[4], 448 * expected[4]), rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiny", [False, True])
def test_column_scales(dtype, tiny):
    found = []
    for device, call in (("cpu", call_scales.column_scales), (DEVICE, call_scales.launch_column_scales)):
        inputs = inputs_of(True, 0.0, device)
        if tiny:
            inputs.first.zero_()
            inputs.second.zero_()
        acts = [torch.empty(size, dtype=dtype, device=device) for size in (1500, 700)]
        alphas = [torch.empty(SLOTS, device=device) for _ in range(2)]
        call(inputs, *acts, *alphas)
        found.append([tensor.cpu() for tensor in (*acts, *alphas)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    for act, alpha in zip(found[0][:2], found[0][2:], strict=True):
        assert (act[0].float() * alpha == 1).all()
