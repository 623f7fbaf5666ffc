"""`reference`: experts in plain torch, on CPU and GPU, differentiable. Tests compare every other kernel with it.

Quantized weights are dequantized, and activations are not rounded.

Compiled graphs call `grouped_mm` through an operator (`grouped`), for two reasons. Under torch.compile torch infers the
result of `grouped_mm` only for bf16, although it computes float32 and float16 too. And a compiled graph may have rows
after the last group: `grouped_mm` leaves them uninitialized, and the operator sets them to zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.layouts import GroupedRows, group_rows, reduce_rows
from ep_moe.experts.shared_experts import activate, activate_exact
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime import batch_invariant
from ep_moe.types import Activation, Received, RowLayout, Weighting


@torch.library.custom_op("ep_moe::grouped_mm", mutates_args=())
def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x [M, in], sorted by group, by weight [L, out, in]: [M, out], zero from row ends[-1] on."""
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
    """Return the gradient of weight, [L, out, in], from x [M, in] and grad [M, out]. Sums over each group's rows."""
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


class ReferenceExperts(Experts):
    """Experts in plain torch, on CPU and GPU, differentiable. Tests compare every other kernel with it."""

    name = "reference"
    tested_machines = "CPU; 1 and 4 H200"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(Activation),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        schemes=frozenset(SCHEMES),
        biases=True,
        etp=True,
        alignment_bytes=16,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=True,
        exact=True,
        per_route=True,
    )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        y = self._compute(received)
        return y if out is None else out.copy_(y)

    def _compute(self, received: Received) -> Tensor:
        weights = self.weights
        grouped = group_rows(received, weights.num_slots)
        if received.per_route:
            grouped = replace(grouped, slots=grouped.slots.view(-1, 1))
        if not torch.compiler.is_compiling() and not len(grouped.expert):
            return reduce_rows(grouped.x, grouped)
        w13_bias, w2_bias = weights.stored_tensors().get("w13_bias"), weights.stored_tensors().get("w2_bias")
        if self.options.exact:
            return reduce_rows(self._exact(grouped, w13_bias, w2_bias), grouped)
        h = _linear(grouped.x, weights.dense("w13"), grouped.ends)
        if w13_bias is not None:
            h = h + w13_bias[grouped.expert]
        y = _linear(activate(h, self.config), weights.dense("w2"), grouped.ends)
        if w2_bias is not None and weights.adds_output_bias:
            y = y + w2_bias[grouped.expert]
        return reduce_rows(y, grouped)

    def _exact(self, grouped: GroupedRows, w13_bias: Tensor | None, w2_bias: Tensor | None) -> Tensor:
        """Return each row's result, with bits that depend only on that row and its expert."""
        ends = grouped.ends.tolist()
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        h = batch_invariant.grouped_linear(grouped.x, self.weights.dense("w13"), w13_bias, counts)
        return batch_invariant.grouped_linear(activate_exact(h, self.config), self.weights.dense("w2"), w2_bias, counts)


def _linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x [M, in], sorted by expert, by weight [L, out, in]: [M, out]."""
    if torch.compiler.is_compiling():
        y: Tensor = grouped(x, weight, ends)
        return y
    return grouped_mm(x, weight.transpose(1, 2), offs=ends)
