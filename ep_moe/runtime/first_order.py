"""Autograd functions without a second derivative.

torch's `once_differentiable` refuses a second derivative only if the gradient that arrives at the function requires a
gradient itself, and the second backward names no inputs. Otherwise the function's part of the derivative is missing
without an error, such as in a gradient penalty after `torch.autograd.grad(layer(x).sum(), x, create_graph=True)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.errors import InputError


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function whose operators autograd cannot differentiate again.

    Args:
        backward: The static method `backward(ctx, *gradients)`.

    Returns:
        The method, which raises InputError in a backward with `create_graph=True`.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        # enabled in a backward by create_graph=True alone
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise InputError(
                "MoELayer does not support second-order gradients (create_graph=True, torch.autograd.functional "
                "hessian, hvp, ...): its backward is in no autograd graph, so its part would be missing; call backward "
                "or torch.autograd.grad without create_graph=True on all ranks"
            )
        return backward(ctx, *gradients)

    return run
