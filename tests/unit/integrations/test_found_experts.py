"""Test which modules are recognized as experts by what they compute, and how experts per token are found."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers import JetMoeConfig, PretrainedConfig, PreTrainedModel
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

from ep_moe import Activation, ConfigError, MoEConfig
from ep_moe.integrations.activation_probe import computes, is_experts
from ep_moe.integrations.find_experts import (
    experts_apart,
    find_experts,
    interface_layout,
    numbers_of,
    top_k_of,
)


class Experts(nn.Module):
    """An expert layer that may have buffers besides its matrices."""

    def __init__(self, **buffers):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 48, 40))
        self.second = nn.Parameter(torch.randn(4, 40, 24))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, rows, ids, weights):
        gate, up = torch.einsum("tkrh,th->tkr", self.first[ids], rows).chunk(2, -1)
        out = torch.einsum("tkhi,tki->tkh", self.second[ids], silu(gate) * up)
        return (out * weights[..., None]).sum(1)


@pytest.mark.parametrize(("buffers", "taken"), [({}, True), ({"scale": torch.ones(4)}, False)], ids=["none", "one"])
def test_a_module_with_a_buffer_is_not_taken_for_experts(buffers, taken):
    """A module with a buffer is not recognized as experts, because a layer has no place for the buffer."""
    assert bool(find_experts(nn.ModuleDict({"experts": Experts(**buffers)}))) is taken


def test_a_single_expert_a_token_is_a_number_and_none_is_not():
    assert numbers_of([SimpleNamespace(top_k=1, moe_k=0)]) == [1]


@pytest.mark.parametrize("beside", ["none", "router", "block"])
def test_a_block_that_holds_more_than_experts_a_router_and_a_bias_is_not_taken(beside):
    """A layer in its place would lose the rest without a word. What the router holds stays with it."""
    config = JetMoeConfig(hidden_size=40, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    block = JetMoeMoE(config)
    if beside != "none":
        holder = block.router if beside == "router" else block
        holder.register_parameter("unused", nn.Parameter(torch.ones(3)))
    found = find_experts(nn.ModuleDict({"moe": block}))
    assert [one.block for one in found.values()] == ([] if beside == "block" else [True])


class Flat(nn.Module):
    """Experts whose rows are stacked in one matrix for each projection."""

    def __init__(self, order):
        super().__init__()
        self.num_experts = 4
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.randn(4 * 24, 40)))

    def forward(self, rows, ids, weights):
        gate, up, down = (getattr(self, name).view(self.num_experts, -1, rows.shape[1])[ids] for name in MATRICES)
        hidden = silu(torch.einsum("tkih,th->tki", gate, rows)) * torch.einsum("tkih,th->tki", up, rows)
        return (torch.einsum("tkih,tki->tkh", down, hidden) * weights[..., None]).sum(1)


MATRICES = ("gate", "up", "down")


@pytest.mark.parametrize("order", [MATRICES, ("gate", "down", "up"), ("up", "gate", "down")], ids=" ".join)
def test_flat_matrices_are_told_apart_in_any_order_that_models_have(order):
    (found,) = find_experts(nn.ModuleDict({"experts": Flat(order)})).values()
    assert {one.name: one.part for one in found.layout.tensors} == {"gate": "w1", "up": "w3", "down": "w2"}
    assert (found.layout.experts, found.sizes) == (4, (40, 24))


def test_matrices_of_several_sizes_are_no_flat_experts():
    module = Flat(MATRICES)
    module.down = nn.Parameter(torch.randn(4 * 40, 24))
    assert find_experts(nn.ModuleDict({"experts": module})) == {}


class SeesConfig(PretrainedConfig):
    model_type = "sees"


class Sees(PreTrainedModel):
    """A part of a model that is not its text model."""

    config_class = SeesConfig

    def __init__(self, config):
        super().__init__(config)
        self.experts = Experts()


def test_experts_of_a_part_that_sees_images_are_apart():
    """Experts of a part that reads images are listed separately, even if they are not on transformers' interface."""
    model = nn.ModuleDict({"experts": Experts(), "visual": Sees(SeesConfig())})
    model.config = PretrainedConfig()
    assert experts_apart(model) == ["visual.experts"]
    assert [*find_experts(model)] == ["experts"]


@pytest.mark.parametrize(
    "name", ["top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"]
)
def test_a_number_of_experts_is_read_under_each_name_that_models_have(name):
    assert numbers_of([SimpleNamespace(**{name: 3})]) == [3]


def on_interface(**flags):
    """Return a module on transformers' experts interface: gated, not transposed, gate first."""
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}

    class OnInterface(nn.Module):
        down_proj = torch.zeros(4, 8, 8)

        def _apply_gate(self, h):
            return h

    module = OnInterface()
    vars(module).update(usual | flags)
    return module


@pytest.mark.parametrize(
    ("flags", "interleaved"),
    [
        ({}, False),
        ({"is_concatenated": False}, True),
        ({"is_concatenated": False, "has_bias": True}, True),
        ({"is_concatenated": False, "has_gate": False}, False),
        ({"has_gate": False, "has_bias": True}, False),
        ({"is_transposed": True}, False),
    ],
    ids=str,
)
def test_the_flags_of_a_module_say_how_it_holds_experts(flags, interleaved):
    module = on_interface(**flags)
    layout = interface_layout(module)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    biases = [f"{name}_bias", "down_proj_bias"] if module.has_bias else []
    assert [one.name for one in layout.tensors] == [name, "down_proj", *biases]
    assert [one.part for one in layout.tensors] == ["w13", "w2", "w13_bias", "w2_bias"][: 2 + len(biases)]
    assert [one.transposed for one in layout.tensors] == [module.is_transposed] * 2 + [False] * len(biases)
    assert [one.interleaved for one in layout.tensors] == [interleaved, False, interleaved, False][: 2 + len(biases)]
    assert (layout.experts, layout.gated) == (4, module.has_gate)


@pytest.mark.parametrize("flag", ["has_gate", "has_bias", "is_transposed", "is_concatenated"])
def test_a_module_without_a_flag_of_the_interface_is_not_on_it(flag):
    module = on_interface()
    assert is_experts(module)
    delattr(module, flag)
    assert not is_experts(module)


def test_the_nearest_statement_says_how_many_experts_a_token_takes():
    """The closest field decides how many experts a token takes.

    The experts' own field is first, then their neighbours', then outer modules', then the configuration's.
    """
    model = nn.ModuleDict({"layer": nn.ModuleDict({"experts": Experts(), "router": nn.Identity()})})
    with pytest.raises(
        ConfigError, match=r"ModuleDict does not say how many .* set model\.config\.num_experts_per_tok$"
    ):
        top_k_of(model, model["layer"]["experts"], "layer.experts")
    model.config = PretrainedConfig(num_experts_per_tok=5)
    found = []
    for holder in (model.config, model, model["layer"]["router"], model["layer"]["experts"]):
        holder.num_experts_per_tok = 5 - len(found)
        found.append(top_k_of(model, model["layer"]["experts"], "layer.experts"))
    assert found == [5, 4, 3, 2]


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2])
def test_an_activation_with_a_gate_is_none_without(activation, has_gate):
    module = on_interface(has_gate=has_gate, act_fn=lambda h: h.relu().square())
    module._apply_gate = lambda h: silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=1, activation=activation)
    assert computes(module, config) is (activation.gated == has_gate)
