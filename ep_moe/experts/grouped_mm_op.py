"""`grouped_mm` as a torch operator, for compiled graphs.

torch knows the shape of `grouped_mm`'s result for bf16 alone, although it computes float32 and float16 too. In a
compiled graph there may also be rows behind the last group, which `grouped_mm` leaves as memory was: here they are
zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


@torch.library.custom_op("ep_moe::grouped_mm", mutates_args=())
def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, in], sorted by group, times weight [L, out, in]: [M, out], zero from row ends[-1] on."""
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    y = grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    behind = torch.arange(len(x), device=x.device) >= ends[-1:]
    return y.masked_fill_(behind.unsqueeze(1), 0)


@grouped.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("ep_moe::grouped_mm_weight", mutates_args=())
def _weight_gradient(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """x [M, in], grad [M, out]: [L, out, in], each group's rows alone."""
    if not len(x):
        return x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    return grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends).contiguous()


@_weight_gradient.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    to_x = grouped(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    to_weight = _weight_gradient(x, grad, ends) if ctx.needs_input_grad[1] else None
    return to_x, to_weight, None


grouped.register_autograd(_backward, setup_context=_keep)
