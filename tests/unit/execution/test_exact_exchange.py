"""Test how the three uses of an exact layer's rows are joined in backward."""

import torch

from ep_moe.execution.exact_exchange import fan_out_in_order


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
