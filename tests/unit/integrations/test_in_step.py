"""Idle steps: of which models, and what they give on one rank."""

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.integrations import in_step
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


def test_an_idle_step_that_raised_is_over(monkeypatch):
    """The next `generate` of this rank meets its peers again."""
    generation = object.__new__(in_step.Generation)
    generation._models, generation._serving = [lambda: torch.nn.Identity()], False

    def refused(model):
        assert generation._serving
        raise InputError("rank 1: x")

    monkeypatch.setattr(in_step, "idle_step", refused)
    with pytest.raises(InputError):
        generation._idle(0)
    assert not generation._serving
