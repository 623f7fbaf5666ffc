"""Test which gradients of a first backward cause a warning."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import Function

from ep_moe.weights.first_backward import FirstBackward


class Noted(Function):
    """An autograd function like a layer's call. It notes the gradient that it gives to a parameter."""

    @staticmethod
    def forward(ctx, parameter, first):
        ctx.parameter, ctx.first = parameter, first
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        ctx.first.note([ctx.parameter], [gradient])
        return gradient, None


def added(loss, parameter):
    (loss + parameter.square().sum()).backward()


@pytest.mark.parametrize(
    ("backward", "warned"),
    [
        (lambda loss, parameter: loss.backward(), False),
        (lambda loss, parameter: torch.autograd.grad(loss, parameter), False),
        (lambda loss, parameter: loss.backward(inputs=[parameter]), False),
        (added, True),
    ],
)
def test_gradients_that_are_not_accumulated_are_not_missed(backward, warned):
    """Gradients that are not accumulated cause no warning. `torch.autograd.grad` returns them to its caller only."""
    parameter, first = nn.Parameter(torch.ones(3)), FirstBackward()
    backward(Noted.apply(parameter, first).sum(), parameter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ranks in (2, 4):  # the warning comes once
            first.warn(ranks)
    assert ["wrote or read them" in str(one.message) for one in caught] == [True] * warned
