"""Test `ExpertsOptions(recompute=True)`: forward keeps its rows, and backward recomputes the intermediate results."""

import dataclasses

import pytest
import torch

from ep_moe import ConfigError, EPContext, ExpertsOptions, MoEConfig, MoELayer
from ep_moe.experts.reference import ReferenceExperts
from tests.fixtures.helpers import assert_same

CONFIG = MoEConfig(hidden_size=16, intermediate_size=64, num_experts=6, top_k=2, expert_bias=True)


def trained(layer, x):
    """Return the gradients, and the number of elements that autograd keeps for the experts' step."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    y.square().sum().backward()
    parameters = dict(layer.named_parameters())
    return {name: p.grad for name, p in parameters.items()} | {"x": x.grad, "y": y.detach()}, sum(kept.values())


def test_gradients_are_the_same_and_less_is_kept(monkeypatch):
    runs = []
    compute = ReferenceExperts.compute
    monkeypatch.setattr(ReferenceExperts, "compute", lambda *given: runs.append(1) or compute(*given))
    routes = []
    with EPContext.local() as context:
        found = []
        for recompute in (False, True):
            torch.manual_seed(0)
            layer = MoELayer(CONFIG, context, experts="reference", options=ExpertsOptions(recompute=recompute))
            layer.router.register_forward_hook(lambda *_: routes.append(1))
            found.append(trained(layer, torch.randn(40, 16, generator=torch.Generator().manual_seed(0))))
    (plain, much), (again, little) = found
    for name, wanted in plain.items():
        assert_same(again[name], wanted, name)
    assert len(runs) == 3, "once, then once in forward and once in backward"
    assert len(routes) == 2, "backward routes nothing"
    assert much - little >= 40 * 2 * 2 * 64, "rows of gate and up"


def test_kernels_without_a_backward_are_refused():
    can = ReferenceExperts.capabilities
    assert ReferenceExperts.unsupported_reason(CONFIG, torch.float32, 1, options=ExpertsOptions(recompute=True)) is None

    class Forward(ReferenceExperts):
        capabilities = dataclasses.replace(can, differentiable=False)

    reason = Forward.unsupported_reason(CONFIG, torch.float32, 1, options=ExpertsOptions(recompute=True))
    assert reason == "it has no backward (recompute=True)"
    with pytest.raises(ConfigError, match="recompute must be"):
        ExpertsOptions(recompute=1)
