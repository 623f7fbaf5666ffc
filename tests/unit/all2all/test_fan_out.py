"""Test `spread` (rows to several ranks) and `summed` (sums of what returns): each is the other's derivative."""

import torch

from ep_moe.all2all.fan_out import FanOut, spread, summed, wanted_places

TOKENS, RANKS = 7, 3


def routes():
    wanted = torch.rand(TOKENS, RANKS, generator=torch.Generator().manual_seed(1)) < 0.6
    wanted[2] = False  # a token without a destination
    fan_out = FanOut.of(wanted, int(wanted.sum()), RANKS)
    place, token = wanted.t().nonzero(as_tuple=True)
    assert (fan_out.place.tolist(), fan_out.row.tolist()) == (place.tolist(), token.tolist())
    return fan_out.row, fan_out.slots


def integers(*shape, seed):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def test_derivatives_are_those_of_indexing():
    token, slots = routes()
    x, rows = integers(TOKENS, 5, seed=2).requires_grad_(), integers(len(token), 5, seed=3).requires_grad_()
    behind = integers(len(token), 5, seed=4)
    (found,) = torch.autograd.grad(spread(x, token, slots), x, behind)
    assert torch.equal(found, torch.autograd.grad(x[token], x, behind)[0])
    assert not found[2].any()
    behind = integers(TOKENS, 5, seed=5)
    (found,) = torch.autograd.grad(summed(rows, token, slots), rows, behind)
    plain = torch.zeros(TOKENS, 5).index_add(0, token, rows)
    assert torch.equal(summed(rows, token, slots), plain)
    assert torch.equal(found, torch.autograd.grad(plain, rows, behind)[0])


def test_derivatives_of_derivatives():
    token, slots = routes()
    x = integers(TOKENS, 5, seed=2).requires_grad_()

    def second(rows_of):
        (first,) = torch.autograd.grad(rows_of(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.equal(second(lambda x: spread(x, token, slots)), second(lambda x: x[token]))


def test_sums_are_rounded_once():
    """Sums are accumulated in float32 and rounded once.

    In bf16, 256 + 1 rounds to 256, so adding 1 twice gives 256. In float32 it gives 258.
    """
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    token, slots = torch.zeros(3, dtype=torch.int64), torch.tensor([[0, 1, 2]])
    assert summed(rows, token, slots).item() == 258
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    spread(x, token, slots).backward(rows)
    assert x.grad.item() == 258


def test_a_row_is_wanted_where_an_expert_of_it_is():
    """`wanted_places` marks the ranks that own an expert of a row, as a bool tensor. Invalid ids mark no rank."""
    ids = torch.tensor([[0, 1], [5, 2], [-1, 3], [-1, -1], [6, -7], [1, 5]])
    wanted = wanted_places(ids, 2, 3)
    assert wanted.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in wanted] == [[0], [1, 2], [1], [], [], [0, 2]]
