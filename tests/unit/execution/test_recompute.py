"""Test activation checkpointing: recomputation counts no load, and gradients equal those of a run without it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ep_moe import MoELayer
from ep_moe.placement.deferred import DeferredRouting
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from tests.fixtures.helpers import fill
from tests.fixtures.single_layer import context, routing, shape  # noqa: F401  (a fixture)


def run(layer: MoELayer, how: dict | None):
    layer.zero_grad()
    layer.placement.reset_load()
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    h = x
    for _ in range(2):  # the layer occurs twice in a model; blocks are checkpointed one by one
        h = h + (layer(h) if how is None else checkpoint(layer, h, **how))
    h.square().sum().backward()
    loads = [layer.placement.expert_load.clone(), layer.placement.slot_load.clone()]
    return loads, [x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
def test_load_is_counted_once_and_gradients_are_equal(reentrant, context):  # noqa: F811
    layer = fill(MoELayer(shape(shared_intermediate_size=12), context, dtype=torch.float32))
    loads, gradients = run(layer, None)
    assert loads[0].sum() == 2 * 7 * 2
    again, found = run(layer, {"use_reentrant": reentrant})
    for actual, expected in zip([*again, *found], [*loads, *gradients], strict=True):
        assert torch.equal(actual, expected)


def test_selective_checkpointing_saves_products(context):  # noqa: F811
    layer = fill(MoELayer(shape(shared_intermediate_size=12), context, dtype=torch.float32))
    saved = {torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default}

    def policy(_, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    loads, gradients = run(layer, None)
    how = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}
    again, found = run(layer, how)
    for actual, expected in zip([*again, *found], [*loads, *gradients], strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", [MoELayer, Router])
def test_checkpoints_around_submodules(kind, context):  # noqa: F811
    """Checkpoint wrappers around submodules change no load and no gradient. torch reassigns each submodule."""
    layer = fill(MoELayer(shape(), context, dtype=torch.float32))
    loads, gradients = run(layer, None)
    model = nn.Sequential(layer)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 1
    again, found = run(model[0], None)
    for actual, expected in zip([*again, *found], [*loads, *gradients], strict=True):
        assert torch.equal(actual, expected)


class _OnGpu(torch.Tensor):
    """Ids that claim to be on a GPU, so that placement is deferred to kernels."""

    is_cuda = True


def test_kernels_are_handed_a_zero(context):  # noqa: F811
    """In recomputation, kernels get a `counting` tensor of zero, and the layer's own stays 1.

    On a GPU the send kernel counts load if `counting` is 1. Captured graphs read the layer's own tensor.
    """
    layer = MoELayer(shape(), context, dtype=torch.float32)
    seen = []

    def place(x):
        given = routing(3)
        placed = layer.placement(type(given)(given.ids.as_subclass(_OnGpu), given.weights))
        assert isinstance(placed, DeferredRouting)
        seen.append((placed.tables.counting, layer.placement.counting))
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(place, x, use_reentrant=False).sum().backward()
    (first, own), (again, _) = seen
    assert first is own
    assert int(own) == 1, "what captured graphs read stays"
    assert int(again) == 0
    assert again.device == own.device


def test_no_stats_stays_in_force_within_backward(context):  # noqa: F811
    layer = MoELayer(shape(), context, dtype=torch.float32)
    x = torch.ones(3, 16, requires_grad=True)
    with layer.no_stats():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert not layer.placement.expert_load.any()
    assert isinstance(layer.placement, Placement)
    layer(x)
    assert int(layer.placement.expert_load.sum()) == 6
