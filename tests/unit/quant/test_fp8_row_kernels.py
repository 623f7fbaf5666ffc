"""Test rows rounded with a scale each against torch; on a CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe.quant import kernels
from ep_moe.quant.kernels import round_columns, round_rows

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "TILE", 2048)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)  # so that each program has several rows


def rows(count: int, size: int) -> torch.Tensor:
    """Return values that E4M3 represents with a power of two as the row's scale.

    The interpreter's casts differ from torch's.
    """
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randn(count, size, generator=generator).mul(60).clamp(-400, 400).to(FP8).float()
    numbers[:, 0], numbers[1::2, 0] = 448, -448
    scale = 2.0 ** torch.randint(-9, 5, (count, 1), generator=generator)
    return (numbers * scale).bfloat16().to(DEVICE)


def made(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, size, dtype=FP8, device=DEVICE), torch.full((count,), -1.0, device=DEVICE)


@pytest.mark.parametrize(("count", "size"), [(1, 128), (11, 384), (7, 2048), (2, 5120), (40, 640)])
def test_a_scale_for_each_row(count, size):
    x, (out, scale) = rows(count, size), made(count, size)
    round_rows(x, out, scale)
    assert torch.equal(scale, x.float().abs().amax(1) / 448)
    assert torch.equal(out.float() * scale[:, None], x.float())


@pytest.mark.parametrize(("experts", "depth", "size"), [(1, 128, 64), (3, 200, 144), (2, 64, 320)])
def test_columns_are_rounded_as_rows_of_the_turned_matrix(experts, depth, size):
    turned = rows(experts * size, depth).view(experts, size, depth)
    turned[0, 1] = 0
    turned[-1, 2, 1] = torch.nan
    wanted, of_rows = made(experts * size, depth)
    round_rows(turned.view(-1, depth), wanted, of_rows)
    out, scale = made(experts * size, depth)
    w = turned.mT.contiguous()
    round_columns(w, out.view(turned.shape), scale.view(experts, size))
    assert torch.equal(scale, of_rows)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_only_the_first_rows():
    x, (out, scale) = rows(11, 256), made(11, 256)
    round_rows(x, out, scale, counts=torch.tensor([4], dtype=torch.int32, device=DEVICE))
    assert torch.equal(out[:4].float() * scale[:4, None], x[:4].float())
    assert bool((scale[4:] == -1).all())
    assert not bool(out[4:].float().any())


def test_rows_go_where_their_slots_say():
    """Each row is written to all its slots: two, one or none. A row without a slot may hold anything."""
    x, (out, scale) = rows(4, 256), made(6, 256)
    x[2] = torch.nan
    slots = torch.tensor([[5, 0], [-1, 2], [-1, 6], [3, -1]], dtype=torch.int32, device=DEVICE)
    round_rows(x, out, scale, slots=slots)
    for slot, row in {5: 0, 0: 0, 2: 1, 3: 3}.items():
        assert torch.equal(out[slot].float() * scale[slot], x[row].float())
    assert [float(scale[slot]) for slot in (1, 4)] == [-1, -1]


def test_rows_that_were_rounded_before_are_copied():
    x, (out, scale) = rows(4, 384), made(6, 384)
    (came, of_rows), slots = made(4, 384), torch.tensor([[5, 0], [-1, 2], [-1, 6], [3, -1]], dtype=torch.int32)
    round_rows(x, came, of_rows)
    round_rows(came, out, scale, x_scale=of_rows.unsqueeze(1), slots=slots.to(DEVICE))
    for slot, row in {5: 0, 0: 0, 2: 1, 3: 3}.items():
        assert torch.equal(out[slot].view(torch.uint8), came[row].view(torch.uint8))
        assert scale[slot] == of_rows[row]
    assert [float(scale[slot]) for slot in (1, 4)] == [-1, -1]


def test_zeros_have_a_scale():
    x, (out, scale) = rows(3, 128), made(3, 128)
    x[1] = 0
    round_rows(x, out, scale)
    assert float(scale[1]) == pytest.approx(1e-10 / 448)
    assert not bool(out[1].float().any())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's E4M3 has no NaN")
def test_what_is_no_number_stays_none():
    x, (out, scale) = rows(3, 128), made(3, 128)
    x[2, 5] = torch.nan
    round_rows(x, out, scale)
    assert out.float().isnan().nonzero().tolist() == [[2, 5]]
