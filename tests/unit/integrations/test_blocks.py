"""Test layers that replace whole blocks: names and dtypes, frozen parameters, and blocks that are refused."""

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext
from ep_moe.integrations.transformers import expert_parallel, moe_layers
from tests.fixtures.checkpoint_files import LAYERS, quiet, tiny_model

pytest.importorskip("transformers")


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def blocks_of(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_layer_has_the_name_of_the_block(family, context):
    """A layer is named after its block. Errors and metrics contain the name."""
    model = expert_parallel(tiny_model(family), context)
    assert [layer.name for layer in moe_layers(model)] == [f"model.layers.{n}.mlp" for n in LAYERS[family]]


def test_a_layer_has_the_dtype_of_the_experts(context):
    """A layer has the dtype of the experts, and not of a float32 router, which comes first in Mixtral's block."""
    model = tiny_model("mixtral").bfloat16()
    for block in blocks_of(model):
        block.gate.float()
    assert {layer.dtype for layer in moe_layers(expert_parallel(model, context))} == {torch.bfloat16}


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
    """Parameters of a block that are frozen stay frozen, and all others require gradients."""
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


@pytest.mark.parametrize("where", ["gate", ""])
def test_a_buffer_that_no_file_has_is_named(where, context):
    model = tiny_model("qwen3_moe")
    model.model.layers[0].mlp.get_submodule(where).register_buffer("scale", torch.ones(8), persistent=False)
    name = f"model.layers.0.mlp.{where}.scale".replace("..", ".")
    with pytest.raises(ConfigError, match=f"^{name} of Qwen3MoeSparseMoeBlock is computed and in no checkpoint"):
        expert_parallel(model, context)


@pytest.mark.parametrize("codes", [True, False])
def test_the_way_to_load_codes_is_told_where_there_are_codes(codes, context):
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    dtype = torch.float8_e4m3fn if codes else torch.float32
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:, :-1].to(dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=r"down_proj must have shape") as error:
        expert_parallel(model, context)
    assert ("a model that is quantized is loaded with load_pretrained" in str(error.value)) is codes
