"""Models, contexts and paths of a wrong kind, which are named by their argument."""

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext
from ep_moe.integrations.transformers import (
    expert_parallel,
    export_weights,
    idle_step,
    load_pretrained,
    load_weights,
    moe_layers,
    read_moe_config,
    save_pretrained,
)
from tests.fixtures.transformers_models import tiny_transformers_model


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (moe_layers, "moe_layers: model"),
        (idle_step, "idle_step: model"),
        (lambda given: load_weights(given, {}), "model"),
        (lambda given: list(export_weights(given)), "model"),
        (lambda given: save_pretrained(given, "folder"), "model"),
        (lambda given: load_pretrained("folder", given), "load_pretrained: context"),
        (lambda given: read_moe_config("folder", given), "read_moe_config: context"),
        (lambda given: expert_parallel(nn.Linear(1, 1), given), "expert_parallel: context"),
    ],
)
@pytest.mark.parametrize("given", [None, "path"])
def test_an_argument_of_a_wrong_kind_is_named(call, name, given):
    with pytest.raises(ConfigError, match=rf"^{name} must be an? \w+, got {given!r}$"):
        call(given)


def test_a_module_that_is_no_model_of_transformers():
    with EPContext.local(torch.device("cpu")) as context:
        with pytest.raises(ConfigError, match=r"^expert_parallel: model must be a Module, got None$"):
            expert_parallel(None, context)
        with pytest.raises(ConfigError, match=r"model must be a model of transformers, got Sequential, which has no"):
            expert_parallel(nn.Sequential(tiny_transformers_model("olmoe")), context)
        model = expert_parallel(tiny_transformers_model("olmoe"), context)
        with pytest.raises(ConfigError, match=r"^save_pretrained: folder must be"):
            save_pretrained(model, None)
