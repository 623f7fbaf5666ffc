"""Which gradients of a first backward a warning is about."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import Function

from ep_moe.weights.first_backward import FirstBackward


class Noted(Function):
    """As a layer's call, which notes what it gives to a parameter."""

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
    """`torch.autograd.grad` gives them to its caller alone."""
    parameter, first = nn.Parameter(torch.ones(3)), FirstBackward()
    backward(Noted.apply(parameter, first).sum(), parameter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ranks in (2, 4):  # once
            first.warn(ranks)
    assert ["wrote or took them" in str(one.message) for one in caught] == [True] * warned
