"""Test which PEFT configurations a model checks, and when."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import ConfigError
from ep_moe.integrations import lora_guard


@pytest.fixture
def looked(monkeypatch):
    """Return the names of checked configurations, in order."""
    names = []

    def check_modules(config, model, asked):
        names.append(config.name)
        if config.name == "bad":
            raise ConfigError("no such module")

    monkeypatch.setattr(lora_guard, "check_modules", check_modules)
    return names


def adapter(name):
    return SimpleNamespace(name=name)


def test_an_adapter_is_looked_at_once(looked):
    """An adapter is checked once, so the host time of a call does not grow.

    Configurations of this package are not checked.
    """
    model, x = nn.Identity(), torch.zeros(1)
    lora_guard.guard_adapters(model)
    model(x)
    assert looked == []
    model.peft_config = {"first": adapter("first")}
    model(x), model(x)
    model.load_state_dict({})
    assert looked == ["first"]
    model.peft_config["ours"] = adapter("ours")
    lora_guard.accept_adapter(model, model.peft_config["ours"])
    model.peft_config["read"] = adapter("read")
    model.load_state_dict({})
    assert looked == ["first", "read"], "before its tensors are read"
    model(x)
    assert looked == ["first", "read"]


def test_an_adapter_that_is_refused_is_refused_again(looked):
    model = nn.Identity()
    lora_guard.guard_adapters(model)
    model.peft_config = {"bad": adapter("bad")}
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"PEFT leaves out a part of this adapter: no such module\. .*load_lora"):
            model(torch.zeros(1))
    assert looked == ["bad", "bad"]


class Rescaled(nn.Identity):
    def __init__(self, scale):
        super().__init__()
        self.scaling = {"default": scale}


class Model(nn.Sequential):
    def get_base_model(self):
        return self


def test_scales_of_all_layers_are_not_changed_while_experts_have_factors():
    experts, first, second = SimpleNamespace(lora="factors"), Rescaled(1.0), Rescaled(2.0)
    model, x = Model(first, nn.Identity(), second), torch.zeros(1)
    lora_guard.guard_scales(model, Rescaled, [SimpleNamespace(lora=None), experts])
    model(x)
    first.scaling["default"] = 3.0
    model(x)
    second.scaling["default"] = 6.0
    with pytest.raises(ConfigError, match=r"from {'default': 1.0} to {'default': 3.0} in the first"):
        model(x)
    with pytest.raises(ConfigError, match="the scale of all LoRA layers of PEFT was changed"):
        model.ep_moe_scales()  # also checked before merging
    experts.lora = None
    model(x)
