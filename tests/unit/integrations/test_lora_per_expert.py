"""Test adapters that were trained where each expert had linear layers of its own, as in transformers 4."""

import pytest
import torch

from ep_moe import ConfigError, EPContext
from ep_moe.integrations.lora import load_lora
from ep_moe.integrations.transformers import load_pretrained
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.lora_models import PER_EXPERT, old_names, plain_twin, write_old

TARGETS = {"target_modules": PER_EXPERT, "target_parameters": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    quiet()
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tiny_model("qwen3_moe").save_pretrained(folder / "qwen3_moe")
    return folder


def loaded(models, folder, context):
    return load_lora(load_pretrained(models / "qwen3_moe", context, experts="reference", progress=False), folder)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 3, "experts.*down_proj": 5}}, 2.0)],
    ids=str,
)
def test_the_scale_is_that_of_the_single_layers(changes, scale, models, tmp_path):
    """lora_alpha is 8 and r is 4. Gate and up are one parameter now, whose factors have rank 8."""
    plain = plain_twin(models, "qwen3_moe", **TARGETS, **changes).eval()
    write_old(old_names(plain, "qwen3_moe"), TARGETS | changes, tmp_path / "old")
    joined = [module for name, module in plain.named_modules() if name.endswith("mlp.experts.base_layer")]
    for module in [each for each in joined if hasattr(each, "scaling")]:
        module.scaling["default"] = scale
    ids = torch.arange(12).view(1, 12)
    with EPContext.local(torch.device("cpu")) as context, torch.no_grad():
        found = loaded(models, tmp_path / "old", context)(input_ids=ids).logits
        torch.testing.assert_close(found, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("pattern", ["gate_proj", ".*proj", r".*experts\.1\.down_proj", r"experts\.\d+\.up_proj"])
def test_patterns_of_layers_that_are_joined_are_refused(pattern, field, models, tmp_path):
    plain = plain_twin(models, "qwen3_moe", **TARGETS)
    write_old(old_names(plain, "qwen3_moe"), TARGETS | {field: {pattern: 3}}, tmp_path / "old")
    words = rf"LoraConfig\.{field} selects model\..*\.experts\..*, and transformers joins the experts"
    with EPContext.local(torch.device("cpu")) as context, pytest.raises(ConfigError, match=words):
        loaded(models, tmp_path / "old", context)
