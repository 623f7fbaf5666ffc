"""Test experts' LoRA factors with tools that treat them as ordinary parameters."""

# ruff: noqa: F811

import contextlib
import dataclasses

import pytest
import torch

from ep_moe import ConfigError, EPLBConfig, ExpertBalancer, ExpertMap, InputError, MoELayer
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.lora import LowRank, add_lora, merge_lora
from tests.fixtures.expert_weights import shape
from tests.fixtures.helpers import same_bits
from tests.fixtures.single_layer import EXPERTS, context, full, rows_of  # noqa: F401 (a fixture)


@pytest.fixture
def layer(context):
    torch.manual_seed(0)
    layer = MoELayer(full(), context)
    lora = add_lora(layer.expert_weights, {"w13": LowRank(2, 1.5), "w2": LowRank(2, 1.5)}, seed=0)
    with torch.no_grad():
        for factor in lora.parameters():
            factor.uniform_(-1, 1)
    return layer


def test_functional_call_computes_with_given_factors(layer):
    x, own = rows_of(9), layer(rows_of(9)).detach()
    given = {name: (2 * parameter.detach()).requires_grad_() for name, parameter in layer.named_parameters()}
    found = torch.func.functional_call(layer, given, (x,))
    found.sum().backward()
    assert given["expert_weights.lora.0.lora_A_w2"].grad.abs().max() > 0
    assert same_bits(layer(x).detach(), own)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(found, layer(x))


def test_matrices_that_are_to_learn_beside_factors_are_refused(layer):
    """Matrices that require gradients are refused beside factors, because they would get none."""
    layer.requires_grad_(True)
    with pytest.raises(
        InputError, match=r"LoRA factors.*some matrices require gradients; call requires_grad_\(False\)"
    ):
        layer(rows_of(9))
    with torch.no_grad():
        layer(rows_of(9))


def test_factors_are_converted_with_their_layer(layer):
    layer.double()
    assert {factor.dtype for factor in layer.expert_weights.lora.parameters()} == {torch.float64}


def test_factors_that_are_switched_off_are_merged_all_the_same(layer):
    x = rows_of(9)
    wanted = layer(x).detach()
    layer.expert_weights.lora.enabled = False
    assert not torch.allclose(layer(x), wanted, atol=1e-2)
    merge_lora(layer.expert_weights)
    torch.testing.assert_close(layer(x).detach(), wanted)


def test_a_merge_is_seen_by_what_asks_whether_weights_were_written(layer):
    """A merge counts as an update, for a rebalance under way and for the backward of an earlier call."""
    before = layer.expert_weights.updates
    merge_lora(layer.expert_weights)
    assert layer.expert_weights.updates == before + 1
    merge_lora(layer.expert_weights)
    assert layer.expert_weights.updates == before + 1, "there was nothing to merge"


def test_autocast_rounds_no_updated_matrix(layer):
    weights = layer.expert_weights
    with torch.no_grad():
        wanted = weights.lora(weights.stored_tensors())
        with torch.autocast("cpu", torch.bfloat16):
            found = weights.lora(weights.stored_tensors())
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), name


def test_a_balancer_of_layers_with_factors_is_refused(layer, context):
    layer.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"have LoRA factors, which do not move with them; call merge_lora"):
        ExpertBalancer([layer], context, EPLBConfig())


@pytest.mark.parametrize(("ranks", "empty"), [([[0, -1, 1, 2, 3, 4]], [1]), ([[0, 1, 2, 3, 4], []], [])])
def test_slots_without_an_expert_have_no_factors(ranks, empty):
    """Slots without an expert have no factors, and a rank without slots computes."""
    expert_map = ExpertMap.from_ranks(ranks, 5)
    weights = ExpertWeights(shape(bias=False), expert_map, ep_rank=len(ranks) - 1, dtype=torch.bfloat16)
    lora = add_lora(weights, {"w2": LowRank(2, 1.0)}, seed=0)
    assert {factor.dtype for factor in lora.parameters()} <= {torch.float32}
    with torch.no_grad():
        for factor in lora.parameters():
            factor.fill_(1)
        before = weights.stored_tensors()["w2"].clone()
        found = weights(lambda: weights.stored_tensors()["w2"])
    assert (found.shape, found.dtype) == (before.shape, torch.bfloat16)
    same = [slot for slot in range(len(found)) if torch.equal(found[slot], before[slot])]
    assert same == empty


TWICE = ExpertMap.from_ranks([[*range(EXPERTS), 0]], EXPERTS, allow_duplicates=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantization": "fp8_block"}, "the experts are quantized, or their kernel has no backward"),
        ({}, None),
        ({"device": "meta"}, "the layer is on the meta device, or its experts are sharded by FSDP"),
        ({"expert_map": TWICE}, "the expert map has redundant experts; choose one without"),
    ],
)
def test_experts_that_can_have_no_factors_are_refused_by_the_reason(context, options, why):
    config = dataclasses.replace(full(), hidden_size=128, intermediate_size=128)
    with torch.device(options.pop("device", "cpu")):
        weights = MoELayer(config, context, **options).expert_weights
    with contextlib.nullcontext() if why is None else pytest.raises(ConfigError, match=f"cannot be added: {why}"):
        add_lora(weights, {"w2": LowRank(2, 1.5)}, seed=0)
    if why is None:
        with pytest.raises(ConfigError, match="cannot be added: they have LoRA factors already; merge these first"):
            add_lora(weights, {"w2": LowRank(2, 1.5)}, seed=0)


def test_experts_that_fsdp_has_cut_get_no_factors(context):
    cut = MoELayer(full(), context).expert_weights
    cut.unstack()
    with pytest.raises(ConfigError, match=r"cannot be added: .* its experts are sharded by FSDP"):
        add_lora(cut, {"w2": LowRank(2, 1.5)}, seed=0)


def test_factors_of_layers_whose_seeds_are_neighbors_are_not_those_of_neighboring_experts(context):
    drawn = []
    for seed in range(3):
        lora = add_lora(MoELayer(full(), context).expert_weights, {"w2": LowRank(2, 1.5)}, seed=seed)
        drawn += [factor.detach() for name, factor in lora.named_parameters() if "lora_A" in name]
    assert len({tuple(factor.flatten().tolist()) for factor in drawn}) == len(drawn)


def test_factors_of_an_experts_matrices_are_drawn_one_after_the_other(context):
    lora = add_lora(MoELayer(full(), context).expert_weights, {"w13": LowRank(2, 1.5), "w2": LowRank(2, 1.5)}, seed=0)
    for expert in range(EXPERTS):
        drawn = [lora.get_parameter(f"{expert}.lora_A_{name}").detach().flatten() for name in ("w13", "w2")]
        first, second = (own[: min(map(len, drawn))] / own.abs().max() for own in drawn)
        assert torch.cosine_similarity(first, second, 0) < 0.9
