"""`reference`: plain torch on `grouped_mm`, on CPU and GPU, differentiable. The oracle of every other kernel: quantised
weights are dequantised, activations are not rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from ep_moe.experts.activations import activate
from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.layouts import group_rows, reduce_rows
from ep_moe.types import Activation, Received, RowLayout, Weighting


class ReferenceExperts(Experts):
    name = "reference"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(Activation),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        biases=True,
        etp=True,
        alignment_bytes=16,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=True,
    )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        y = self._compute(received)
        return y if out is None else out.copy_(y)

    def _compute(self, received: Received) -> Tensor:
        weights = self.weights
        grouped = group_rows(received, weights.num_slots)
        if not torch.compiler.is_compiling() and not len(grouped.expert):  # compiled layers have no peers
            stored = [*weights.tensors.values(), *([] if weights.anchor is None else [weights.anchor])]
            nothing: Tensor = _Attached.apply(reduce_rows(grouped.x, grouped), *stored)
            return nothing
        w13_bias, w2_bias = weights.stored("w13_bias"), weights.stored("w2_bias")
        h = _linear(grouped.x, weights.dense("w13"), grouped.ends)
        if w13_bias is not None:
            h = h + w13_bias[grouped.expert]
        y = _linear(activate(h, self.config), weights.dense("w2"), grouped.ends)
        if w2_bias is not None and weights.adds_output_bias:
            y = y + w2_bias[grouped.expert]
        return reduce_rows(y, grouped)


class _Attached(Function):
    """The identity on y, which keeps it in the graph of parameters that no row used: backward then enters the same
    collectives on a rank without rows as on its peers."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad, *[None] * ctx.parameters)


def _linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, in], sorted by expert, times weight [L, out, in]: [M, out]."""
    if torch.compiler.is_compiling():
        from ep_moe.experts.grouped_mm_op import grouped

        y: Tensor = grouped(x, weight, ends)
        return y
    return grouped_mm(x, weight.transpose(1, 2), offs=ends)
