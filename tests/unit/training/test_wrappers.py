"""What a model is told about data-parallel wrappers, in one process."""

import torch
from torch import nn

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.training import exclude_experts

CONFIG = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)


def test_what_a_wrapper_shall_ignore_is_added_to_what_it_ignores():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "moe": MoELayer(CONFIG, EPContext.local(torch.device("cpu")))})
    model._ddp_params_and_buffers_to_ignore = ["a.bias"]
    for _ in range(2):
        exclude_experts(model)
        ignored = set(model._ddp_params_and_buffers_to_ignore)
        assert {"a.bias", "moe.expert_weights.0.w1", "moe.placement.expert_load"} <= ignored
        assert not {"a.weight", "moe.router.weight"} & ignored
