"""Test how the three uses of an exact layer's rows are joined in backward."""

import torch

from ep_moe.execution.exact_exchange import combined, fan_out_in_order


def test_gradients_of_a_fan_out_are_added_in_float32():
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.full((2, 4), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    torch.autograd.backward(fan_out_in_order(x, None), grads)
    # adding one by one in bfloat16 would give 256
    assert torch.equal(x.grad, torch.full((2, 4), 258.0, dtype=torch.bfloat16))


def test_gradients_of_a_fan_out_are_added_in_one_order():
    x = torch.zeros(1, requires_grad=True)
    torch.autograd.backward(fan_out_in_order(x, None), [torch.tensor([value]) for value in (1.0, 1e8, -1e8)])
    assert x.grad.tolist() == [0.0]  # the opposite order would give 1.0


def test_padding_is_seen_by_shared_experts_alone():
    """Padding rows reach only the shared experts.

    The router and the experts get zeros, because padding may hold NaN, which would enter their gradients.
    """
    x, padding = torch.tensor([[1.0, 2.0], [torch.nan, 3.0]], requires_grad=True), torch.tensor([[False], [True]])
    to_router, to_experts, to_shared = fan_out_in_order(x, padding)
    hidden = [[1.0, 2.0], [0.0, 0.0]]
    assert to_router.tolist() == to_experts.tolist() == hidden
    assert to_shared.nan_to_num(7).tolist() == [[1.0, 2.0], [7.0, 3.0]]
    torch.autograd.backward((to_router, to_experts, to_shared), [torch.ones(2, 2)] * 3)
    assert x.grad.tolist() == [[3.0, 3.0], [1.0, 1.0]]


def test_gradients_of_weighted_sums_are_those_of_torch():
    """Gradients of rows and weights equal those of the same sum in float64. A route without an expert has none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 3], [-1, 1], [2, -1]])
    rows, weights = torch.randn(6, 4, generator=generator), torch.rand(3, 2, generator=generator)
    found = [rows.requires_grad_(), weights.requires_grad_()]
    wanted = [tensor.detach().double().requires_grad_() for tensor in found]
    grad = torch.randn(3, 4, generator=generator)
    combined(*found[:1], ids, *found[1:]).backward(grad)
    known = wanted[1].masked_fill(ids < 0, 0.0)
    (wanted[0].view(3, 2, 4) * known.unsqueeze(2)).sum(1).backward(grad.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-6, atol=1e-6)
