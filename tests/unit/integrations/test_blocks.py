"""Layers in place of whole blocks: what is frozen in them."""

import pytest
import torch

from ep_moe import EPContext
from ep_moe.integrations.transformers import expert_parallel, moe_layers
from tests.fixtures.checkpoint_files import quiet, tiny_model

pytest.importorskip("transformers")


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def blocks_of(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("router.weight", {"router.weight"}),
        ("router.bias", {"router.bias"}),
        ("experts.gate_up_proj", {"w1", "w3"}),
        ("experts.gate_up_proj_bias", {"w1_bias", "w3_bias"}),
        ("experts.down_proj", {"w2"}),
        ("experts", {"w1", "w2", "w3", "w1_bias", "w2_bias", "w3_bias"}),
        ("", {"router.weight", "router.bias", "w1", "w2", "w3", "w1_bias", "w2_bias", "w3_bias"}),
    ],
)
def test_what_is_frozen_of_a_block_stays_frozen(theirs, ours, context):
    """And all else learns."""
    model = tiny_model("gpt_oss")
    for block in blocks_of(model):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not f"{name}.".startswith(theirs and f"{theirs}."))
    for layer in moe_layers(expert_parallel(model, context)):
        frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
        assert {name.rpartition(".")[2] if ".w" in name and "router" not in name else name for name in frozen} == ours


@pytest.mark.parametrize(("frozen", "learns"), [("shared_experts", "gate"), ("gate", "shared_experts")])
def test_shared_experts_are_frozen_by_themselves(frozen, learns, context):
    model = tiny_model("deepseek_v3")
    for block in blocks_of(model):
        block.get_submodule(frozen).requires_grad_(False)
    for layer in moe_layers(expert_parallel(model, context)):
        of = {"shared_experts": layer.shared_experts, "gate": layer.router}
        assert not any(parameter.requires_grad for parameter in of[frozen].parameters())
        assert all(
            parameter.requires_grad for parameter in [*of[learns].parameters(), *layer.expert_weights.parameters()]
        )
