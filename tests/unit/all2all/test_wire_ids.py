"""Test the ids for transports that do not check them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.wire_ids import (
    launch_to_distinct,
    launch_to_local,
    launch_to_wire,
    to_distinct,
    to_local,
    to_wire,
)
from tests.fixtures.interpreter import interpreter_problem

PHYSICAL, SLOTS = 12, 3


def wired(ids: list[list[int]], width: int, dtype: torch.dtype = torch.int64, device="cpu", form=to_wire):
    given = torch.tensor(ids, dtype=dtype, device=device)
    weights = torch.arange(1, given.numel() + 1, device=device).float().view(given.shape)
    out = torch.full((len(ids), width), 99, dtype=torch.int32, device=device)
    out_weights = torch.full((len(ids), width), torch.nan, device=device)
    form(given, weights, 6, PHYSICAL, out, out_weights)
    return out.cpu().tolist(), out_weights.cpu().tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_pick_names_an_expert(dtype):
    ids, weights = wired([[4, -1, 7], [-1, 12, 5], [-1, -1, -1], [0, 11, -9]], 4, dtype=dtype)
    assert ids == [[4, 4, 7, 4], [5, 5, 5, 5], [6, 6, 6, 6], [0, 11, 0, 0]]
    assert weights == [[1, 0, 3, 0], [0, 0, 6, 0], [0, 0, 0, 0], [10, 11, 0, 0]]


def test_numbers_beyond_int32_are_out_of_range():
    ids, weights = wired([[2**32 + 1, 3]], 2)
    assert (ids, weights) == ([[3, 3]], [[0, 2]])


def test_nan_weights_of_absent_picks_stay_behind():
    out, out_weights = torch.empty(1, 2, dtype=torch.int32), torch.empty(1, 2)
    to_wire(torch.tensor([[-1, 3]]), torch.tensor([[torch.nan, 2.0]]), 0, PHYSICAL, out, out_weights)
    assert (out.tolist(), out_weights.tolist()) == ([[3, 3]], [[0, 2]])


def localized(
    ids: list[list[int]], weights: list[list[float]], base: int, device="cpu", form=to_local
) -> list[list[int]]:
    given = torch.tensor(ids, dtype=torch.int32, device=device)
    out = torch.full(given.shape, 99, dtype=torch.int32, device=device)
    form(given, torch.tensor(weights, device=device), base, SLOTS, out)
    return out.cpu().tolist()


def test_what_is_mine_on_arrival():
    nan = torch.nan
    found = localized([[3, 5, 6, 2], [4, 4, 3, 5], [-1, -1, -1, -1]], [[1, 2, 3, 4], [0, 5, 6, 7], [nan] * 4], 3)
    assert found == [[0, 2, -1, -1], [-1, 1, 0, 2], [-1, -1, -1, -1]]


@pytest.mark.parametrize("width", [2, 3, 4, 6, 8])
def test_there_and_back_is_the_routing(width):
    """Each route arrives once, at its owner and with its weight; nothing else arrives."""
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(-2, PHYSICAL + 1, (50, 2), generator=generator)
    weights = torch.randn(50, 2, generator=generator)
    wire, wire_weights = torch.empty(50, width, dtype=torch.int32), torch.empty(50, width)
    to_wire(ids, weights, 3, PHYSICAL, wire, wire_weights)
    total = torch.zeros(50, PHYSICAL)
    for base in range(0, PHYSICAL, SLOTS):
        local = torch.empty_like(wire)
        to_local(wire, wire_weights, base, SLOTS, local)
        row, column = (local >= 0).nonzero(as_tuple=True)
        total.index_put_((row, local[row, column].long() + base), wire_weights[row, column], accumulate=True)
    valid = (ids >= 0) & (ids < PHYSICAL)
    row, column = valid.nonzero(as_tuple=True)
    wanted = torch.zeros(50, PHYSICAL)
    wanted.index_put_((row, ids[row, column]), weights[row, column], accumulate=True)
    assert torch.equal(total, wanted)


def distinct(ids: list[list[int]], own_expert: int, num_physical: int = PHYSICAL, device="cpu", form=to_distinct):
    given = torch.tensor(ids, dtype=torch.int64, device=device)
    weights = torch.arange(1, given.numel() + 1, device=device).float().view(given.shape)
    out, out_weights = torch.full_like(given, 99, dtype=torch.int32), torch.full_like(weights, torch.nan)
    form(given, weights, own_expert, num_physical, out, out_weights)
    return out.cpu().tolist(), out_weights.cpu().tolist()


def test_distinct_picks():
    ids, weights = distinct([[4, -1, 7], [6, 12, -1], [-1, -1, -1], [5, 2**32, 5], [11, 11, 11]], 5)
    assert ids == [[4, 5, 7], [6, 5, 7], [5, 6, 7], [5, 6, 7], [11, 5, 6]]
    assert weights == [[1, 0, 3], [4, 0, 0], [0, 0, 0], [10 + 12, 0, 0], [13 + 14 + 15, 0, 0]]
    assert distinct([[-1, 0, -1], [2, 1, 0]], 2, 3)[0] == [[2, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_distinct_picks_are_the_routing(top_k):
    ids = torch.randint(-2, PHYSICAL + 1, (200, top_k), generator=torch.Generator().manual_seed(top_k))
    weights = torch.arange(1, ids.numel() + 1).float().view(ids.shape)
    out, out_weights = (torch.tensor(value) for value in distinct(ids.tolist(), 9))
    assert ((out >= 0) & (out < PHYSICAL)).all()
    assert (out.sort(1).values.diff(dim=1) > 0).all()
    wanted, total = torch.zeros(2, 200, PHYSICAL + 1)
    wanted.scatter_add_(1, torch.where((ids < 0) | (ids >= PHYSICAL), PHYSICAL, ids), weights)
    total.scatter_add_(1, out.long(), out_weights)
    assert torch.equal(total[:, :PHYSICAL], wanted[:, :PHYSICAL])


@pytest.mark.parametrize(
    ("rows", "top_k", "width"), [(1, 1, 1), (7, 3, 4), (300, 8, 8), (2000, 5, 6), (40, 21, 22), (3, 50, 50)]
)
def test_the_triton_forms_give_the_same(rows, top_k, width):
    """The Triton kernels give the results of torch, on a GPU or in the interpreter."""
    if problem := interpreter_problem():
        pytest.skip(problem)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, PHYSICAL + 2, (rows, top_k), generator=generator).tolist()
    weights = torch.randint(0, 3, (rows, top_k), generator=generator).float().tolist()
    assert localized(ids, weights, 3, on, launch_to_local) == localized(ids, weights, 3)
    for dtype in (torch.int64, torch.int32):
        assert wired(ids, width, dtype, on, launch_to_wire) == wired(ids, width, dtype)
    assert distinct(ids, 7, 60, on, launch_to_distinct) == distinct(ids, 7, 60)
