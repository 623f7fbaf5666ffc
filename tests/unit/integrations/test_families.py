"""Test families of models: their configurations, and which of their blocks are refused."""

import pytest
import torch

from ep_moe import Activation, EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.families import FAMILIES as BLOCKS
from ep_moe.integrations.transformers import expert_parallel
from tests.fixtures.checkpoint_files import CONFIGS, FAMILIES, tiny_config, tiny_model

pytest.importorskip("transformers")


def test_configurations_are_read():
    assert {family: BLOCKS[family].config(tiny_config(family)) for family in FAMILIES} == CONFIGS
    assert BLOCKS.keys() == CONFIGS.keys()


@pytest.mark.parametrize(
    ("stated", "found"), [({}, (1.702, 7.0)), ({"swiglu_alpha": 1.5, "swiglu_limit": 3.0}, (1.5, 3.0))]
)
def test_constants_of_gpt_oss_are_those_that_its_configuration_states(stated, found):
    config = tiny_config("gpt_oss")
    for name, value in stated.items():
        setattr(config, name, value)
    ours = BLOCKS["gpt_oss"].config(config)
    assert (ours.activation_alpha, ours.activation_limit) == found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_weights_are_renormalized_where_the_configuration_says_so(family):
    config = tiny_config(family)
    for stated in (True, False):
        config.norm_topk_prob = stated
        assert BLOCKS[family].config(config).routing.renormalize is stated


@pytest.mark.parametrize(
    ("name", "found"), [("silu", Activation.SWIGLU), ("swish", Activation.SWIGLU), ("gelu", Activation.GEGLU)]
)
def test_activations_are_known_by_transformers_names(name, found):
    assert BLOCKS["mixtral"].config(tiny_config("mixtral", hidden_act=name)).activation is found


def local():
    return EPContext.local(torch.device("cpu"))


def test_replaced_model_is_refused():
    model = expert_parallel(tiny_model("mixtral"), local())
    with pytest.raises(
        ConfigError, match="no block of class MixtralSparseMoeBlock: it was replaced already, or its configuration"
    ):
        expert_parallel(model, local())


def test_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match=r"hidden_act must be one of silu, .*, got 'relu'"):
        expert_parallel(tiny_model("mixtral", hidden_act="relu"), local())
