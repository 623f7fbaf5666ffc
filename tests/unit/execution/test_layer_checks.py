"""A gradient that no kernel can give is refused, whatever wants it."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from ep_moe import EPContext, InputError, MoEConfig, MoELayer, Routing, Wire, registry
from ep_moe.experts.reference import ReferenceExperts

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


@pytest.mark.parametrize("wanting", ["x", "routing.weights"])
def test_gradients_of_a_kernel_without_a_backward_are_refused(wanting, monkeypatch):
    can = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)
    monkeypatch.setattr(ReferenceExperts, "capabilities", can)
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), experts="reference")
    x = torch.ones(3, 16, requires_grad=wanting == "x")
    routing = Routing(torch.tensor([[0, 1]] * 3), torch.ones(3, 2, requires_grad=wanting != "x"))
    with pytest.raises(InputError, match=f"^{wanting} requires a gradient, and experts=reference has no back"):
        layer.forward_routed(x, routing)
    with torch.no_grad():
        assert layer.forward_routed(x, routing).shape == x.shape


def test_a_kernel_that_serves_other_numbers_of_tokens_needs_a_backward_too():
    """A tuned layer's next call may be its own."""
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), experts="reference")
    without = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)
    layer._others = {"fewer": SimpleNamespace(name="fewer", capabilities=without)}
    with pytest.raises(InputError, match=r"^x requires a gradient, and experts=fewer has no backward"):
        layer(torch.ones(3, 16, requires_grad=True))


def test_the_refusal_names_every_backend_with_a_backward():
    config, wire = dataclasses.replace(CONFIG, hidden_size=128), Wire(dispatch="fp8_block")
    layer = MoELayer(config, EPContext.local(torch.device("cpu")), wire=wire, experts="reference")
    with pytest.raises(InputError, match="has no backward") as caught:
        layer(torch.ones(3, 128, requires_grad=True))
    kinds = {name: registry.load("dispatchers", name).capabilities for name in registry.built_in("dispatchers")}
    trained = {name for name, can in kinds.items() if can.differentiable or can.adjoint}
    assert "hierarchical_static" in trained
    named = re.search(r"all2all= one of ([\w, ]+);", str(caught.value))[1].split(", ")
    assert set(named) == trained
