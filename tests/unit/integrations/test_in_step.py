"""Idle steps: of which models, and what they give on one rank."""

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.integrations.transformers import expert_parallel, idle_step
from tests.fixtures.checkpoint_files import tiny_model

pytest.importorskip("transformers")


def test_idle_steps_are_for_models_with_blocks():
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), context)
    with pytest.raises(ConfigError, match=r"idle_step needs a model of load_pretrained.*call layer\(x\[:0\]\)"):
        idle_step(torch.nn.Sequential(layer))
    model = expert_parallel(tiny_model("mixtral"), context)
    assert not idle_step(model).any()
    with pytest.raises(InputError, match=r"call ep_moe.integrations.transformers.idle_step\(model\)"):
        model(torch.zeros(0, 4, dtype=torch.int64))
