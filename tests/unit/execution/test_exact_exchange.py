"""How the ways of an exact layer's rows meet again."""

import torch

from ep_moe.execution.exact_exchange import three_ways


def test_gradients_of_the_three_ways_are_added_in_float32():
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.full((2, 4), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    torch.autograd.backward(three_ways(x, None), grads)
    assert torch.equal(x.grad, torch.full((2, 4), 258.0, dtype=torch.bfloat16))  # 256 in bfloat16, one by one
