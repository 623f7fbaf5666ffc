"""Test that second-order gradients of functions with an own backward are refused, and first-order ones are not."""

import pytest
import torch
from torch.autograd import Function

from ep_moe import EPContext, ExpertsOptions, InputError, MoEConfig, MoELayer
from ep_moe.runtime.first_order import first_order_only
from ep_moe.training import use_main_grads


class Square(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return factor * x * x

    @staticmethod
    @first_order_only
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x, None


@pytest.mark.parametrize("arrives", [torch.ones(3), torch.ones(3, requires_grad=True)], ids=["constant", "learns"])
def test_a_graph_of_the_backward_is_refused_whatever_arrives(arrives):
    """The gradient that arrives may be a constant, as that of a sum: the result still depends on x."""
    x = torch.arange(3.0).requires_grad_()
    with pytest.raises(InputError, match=r"second-order gradients \(create_graph=True.*without create_graph=True"):
        torch.autograd.grad(Square.apply(x, 1), x, arrives, create_graph=True)
    (first,) = torch.autograd.grad(Square.apply(x, 1), x, arrives)
    assert torch.equal(first, 2 * x.detach())
    assert not first.requires_grad


CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
OWN_BACKWARD = {
    "recompute": lambda context: MoELayer(CONFIG, context, options=ExpertsOptions(recompute=True)),
    "main_grads": lambda context: use_main_grads(layer := MoELayer(CONFIG, context)) or layer,
}


@pytest.mark.parametrize("kind", OWN_BACKWARD)
def test_a_gradient_penalty_of_a_layer_with_its_own_backward_is_refused(kind):
    with EPContext.local("cpu") as context:
        layer = OWN_BACKWARD[kind](context)
        x = torch.randn(5, 16).requires_grad_()
        with pytest.raises(InputError, match="second-order gradients"):
            layer(x).sum().backward(create_graph=True)
        layer.zero_grad()
        layer(x).sum().backward()
        assert x.grad is not None
