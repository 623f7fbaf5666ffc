"""`reference`: plain torch on `grouped_mm`, on CPU and GPU, differentiable. The oracle of every other kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ep_moe.experts.activations import activate
from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.layouts import group_rows, reduce_rows
from ep_moe.types import Activation, Received, RowLayout, Weighting


class ReferenceExperts(Experts):
    name = "reference"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset({Weighting.EXPERTS}),
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

    def __call__(self, received: Received) -> Tensor:
        weights = self.weights
        grouped = group_rows(received, weights.num_slots)
        if not len(grouped.expert):
            return reduce_rows(grouped.x, grouped)  # nothing for us; stays in the autograd graph, as peers' rows do
        h = _linear(grouped.x, weights.w13, grouped.ends)
        if weights.w13_bias is not None:
            h = h + weights.w13_bias[grouped.expert]
        y = _linear(activate(h, self.config), weights.w2, grouped.ends)
        if weights.w2_bias is not None and weights.adds_output_bias:
            y = y + weights.w2_bias[grouped.expert]
        return reduce_rows(y, grouped)


def _linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, in], sorted by expert, times weight [L, out, in]: [M, out]."""
    y = grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)  # grouped_mm's backward refuses expanded gradients
    return y
