"""Test `execution.memory_plan` in one process: bytes of a layer by kind, computed from shapes alone."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace as Some

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.all2all.dispatch_shape import DispatchShape
from ep_moe.execution import memory_plan
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.reference import ReferenceExperts

CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2, shared_intermediate_size=32)
EXPERT = 3 * 16 * 8 * 4  # bytes of gate, up and down in float32
SHARED = 3 * 16 * 32 * 4
ROUTER = 6 * 16 * 4


@pytest.fixture
def layer():
    with EPContext.local("cpu") as context:
        yield MoELayer(CONFIG, context)


@pytest.fixture
def recomputing():
    """A layer with recomputation, whose memory for backward follows from shapes."""
    with EPContext.local("cpu") as context:
        yield MoELayer(CONFIG, context, options=ExpertsOptions(recompute=True))


def test_what_a_layer_holds(layer):
    found = memory_plan.layer_bytes(layer, None)
    assert found.keys() == {"experts", "router", "placement", "shared_experts", "workspace", "transport"}
    assert (found["experts"], found["router"], found["shared_experts"]) == (6 * EXPERT, ROUTER, SHARED)
    tables = sum(tensor.numel() * tensor.itemsize for tensor in layer.placement.buffers())
    assert found["placement"] == tables > 0
    assert (found["workspace"], found["transport"]) == (0, 0), "the reference kernel and local hold nothing"


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4, 5, 0], [0, -1, 1, 2, 3, 4, 5]], ids=["twice", "empty"])
def test_slots_without_parameters_count(slots):
    """A slot of an expert that the rank holds twice has memory and no parameters, as has an empty one."""
    with EPContext.local("cpu") as context:
        expert_map = ExpertMap.from_ranks([slots], 6, allow_duplicates=True)
        layer = MoELayer(CONFIG, context, expert_map=expert_map)
        assert memory_plan.layer_bytes(layer, None)["experts"] == 7 * EXPERT
        found = layer.expert_weights.stored_tensors().values()
        assert sum(tensor.untyped_storage().nbytes() for tensor in found) == 7 * EXPERT


def test_what_is_no_module_counts_nothing():
    found = memory_plan.held_bytes(router=None, experts=nn.Linear(4, 3), load=print)
    assert found == {"experts": (4 * 3 + 3) * 4}


def test_gradients_of_what_is_trained_alone(recomputing):
    def gradients() -> int:
        return memory_plan.layer_bytes(recomputing, 1)["gradients"]

    assert gradients() == 6 * EXPERT + ROUTER + SHARED
    recomputing.router.requires_grad_(False)
    assert gradients() == 6 * EXPERT + SHARED


def test_what_is_kept_for_backward_grows_with_the_tokens(recomputing):
    saved = [memory_plan.layer_bytes(recomputing, tokens)["saved"] for tokens in (1, 2, 8)]
    assert saved[0] > 0
    assert saved == [saved[0], 2 * saved[0], 8 * saved[0]]
    row = 16 * 4 + CONFIG.top_k * (4 + 4)  # a row in float32; ids and weights of its routes
    assert saved[0] >= row


def test_what_a_step_needs_for_a_moment_counts_once(monkeypatch):
    """Layers need it one after another. `reference` cannot tell it."""
    with EPContext.local("cpu") as context:
        layers = [MoELayer(CONFIG, context, options=ExpertsOptions(recompute=True)) for _ in range(3)]
        assert "temporary" not in layers[0].plan(4) | context.plan(4)
        needed = {id(layer._kernel): 10 * number for number, layer in enumerate(layers)}
        asked = []

        def temporary_bytes(self, rows, *, recorded):
            asked.append((rows, recorded))
            return needed[id(self)]

        monkeypatch.setattr(ReferenceExperts, "temporary_bytes", temporary_bytes)
        assert [layer.plan(4)["temporary"] for layer in layers] == [0, 10, 20]
        assert context.plan(4)["temporary"] == 20
        assert set(asked) == {(4, False)}
        assert "temporary" not in layers[0].plan()


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "8"])
def test_train_tokens_is_a_count(tokens, recomputing):
    with pytest.raises(ConfigError, match="train_tokens must be an integer of at least 1"):
        memory_plan.layer_bytes(recomputing, tokens)


def test_what_does_not_follow_from_shapes_is_refused(layer):
    with pytest.raises(
        ConfigError,
        match="train_tokens=4: the bytes that experts=reference over all2all=local saves for backward do not",
    ):
        memory_plan.layer_bytes(layer, 4)


def test_no_plan_of_training_where_there_is_no_backward(recomputing, monkeypatch):
    can = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)
    monkeypatch.setattr(ReferenceExperts, "capabilities", can)
    with pytest.raises(ConfigError, match="train_tokens=4: experts=reference has no backward"):
        memory_plan.layer_bytes(recomputing, 4)


def test_the_plan_is_the_layers_own(layer):
    before = layer.plan()
    assert before == memory_plan.layer_bytes(layer, None)
    layer(torch.zeros(3, 16))
    assert layer.plan() == before, "a call changes nothing"


@pytest.mark.parametrize(("grown", "trained"), [(1000, 10), (10, 1000)])
def test_buffers_that_grew_further_than_a_training_call_needs_count_as_they_are(grown, trained, monkeypatch):
    shape = DispatchShape(hidden_size=8, top_k=1, slots_per_rank=1, num_ranks=1, dtype=torch.float32, max_tokens=4)
    kind = Some(name="mine", capabilities=Some(adjoint=False), buffer_bytes=lambda shape: trained)
    monkeypatch.setattr(memory_plan, "_trained", lambda layer, tokens: (kind, shape, 4))
    pool = {("mine", shape): Some(grows=True, held_bytes=lambda: grown)}
    table = Some(transport_bytes=lambda shape_of: {("mine", shape): 0})
    layer = Some(experts=None, _table=table, _shape_of=None, context=Some(_pool=pool))
    assert memory_plan.transport_bytes(layer, None) == {("mine", shape): grown}
    assert memory_plan.transport_bytes(layer, 4) == {("mine", shape): 1000}
