"""`reference`: plain torch on `grouped_mm`, on CPU and GPU, differentiable. The oracle of every other kernel: quantised
weights are dequantised, activations are not rounded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ep_moe.experts.activations import activate
from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.layouts import group_rows, reduce_rows
from ep_moe.quant.schemes import SCHEMES
from ep_moe.types import Activation, Received, RowLayout, Weighting


class ReferenceExperts(Experts):
    name = "reference"
    run_on = "CPU; 1 and 4 H200"
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
    )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        y = self._compute(received)
        return y if out is None else out.copy_(y)

    def _compute(self, received: Received) -> Tensor:
        weights = self.weights
        grouped = group_rows(received, weights.num_slots)
        if not torch.compiler.is_compiling() and not len(grouped.expert):
            return reduce_rows(grouped.x, grouped)
        w13_bias, w2_bias = weights.stored("w13_bias"), weights.stored("w2_bias")
        h = _linear(grouped.x, weights.dense("w13"), grouped.ends)
        if w13_bias is not None:
            h = h + w13_bias[grouped.expert]
        y = _linear(activate(h, self.config), weights.dense("w2"), grouped.ends)
        if w2_bias is not None and weights.adds_output_bias:
            y = y + w2_bias[grouped.expert]
        return reduce_rows(y, grouped)


def _linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, in], sorted by expert, times weight [L, out, in]: [M, out]."""
    if torch.compiler.is_compiling():
        from ep_moe.experts.grouped_mm_op import grouped

        y: Tensor = grouped(x, weight, ends)
        return y
    return grouped_mm(x, weight.transpose(1, 2), offs=ends)
