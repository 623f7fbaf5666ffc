"""An expert kernel: two matrix products per expert, summed per row in float32."""

import torch
from torch.nn.functional import linear

from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.shared_experts import activate
from ep_moe.types import Activation, Weighting


class ExpertLoop(Experts):
    name = "expert_loop"
    capabilities = ExpertsCapabilities(
        activations=frozenset(Activation), weightings=frozenset(Weighting), etp=True,
        dtypes=frozenset({torch.float32, torch.bfloat16}), deterministic=True, differentiable=True,
    )  # fmt: skip

    def compute(self, received, out):
        total = torch.zeros_like(received.x, dtype=torch.float32)
        for slot, matrices in enumerate(zip(self.weights.dense("w13"), self.weights.dense("w2"), strict=True)):
            row, column = (received.local_ids == slot).nonzero(as_tuple=True)
            y = linear(activate(linear(received.x[row], matrices[0]), self.config), matrices[1]).float()
            weight = 1 if received.weights is None else received.weights[row, column].unsqueeze(1)
            total = total.index_add(0, row, y * weight)
        return total.to(received.x.dtype) if out is None else out.copy_(total)
