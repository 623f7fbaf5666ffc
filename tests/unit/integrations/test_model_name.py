"""Test which configuration a command reads for the model that it is given."""

from ep_moe.config import load_model_config
from ep_moe.integrations.model_name import layer_config


def test_sizes_of_a_bundled_configuration_need_no_ranks():
    assert layer_config("qwen3-30b-a3b", None) == load_model_config("qwen3-30b-a3b").moe
