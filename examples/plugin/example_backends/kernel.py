"""An expert kernel: two matrix products per expert, summed per row in float32."""

import torch
from torch.nn.functional import linear

from ep_moe.experts.activations import activate
from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.types import Activation, RowLayout, Weighting


class ExpertLoop(Experts):
    name = "expert_loop"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(Activation),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        biases=False,
        etp=True,
        alignment_bytes=1,
        cuda_graph=False,
        host_sync=True,
        deterministic=True,
        differentiable=True,
    )

    def compute(self, received, out):
        w13, w2 = self.weights.dense("w13"), self.weights.dense("w2")
        total = torch.zeros_like(received.x, dtype=torch.float32)
        for slot in range(self.weights.num_slots):
            row, column = (received.local_ids == slot).nonzero(as_tuple=True)
            y = linear(activate(linear(received.x[row], w13[slot]), self.config), w2[slot]).float()
            if received.weights is not None:
                y = y * received.weights[row, column].unsqueeze(1)
            total = total.index_add(0, row, y)
        y = total.to(received.x.dtype)
        return y if out is None else out.copy_(y)
