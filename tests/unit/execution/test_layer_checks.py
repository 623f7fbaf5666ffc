"""Test that a layer refuses inputs that it cannot serve, such as gradients that no kernel can compute."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from ep_moe import EPContext, ExpertMap, InputError, MoEConfig, MoELayer, Routing, Wire, registry
from ep_moe.execution import layer_checks
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.types import TokenMask

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
    """All kernels of a tuned layer need a backward, because any of them may serve the next call."""
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), experts="reference")
    without = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)
    layer._small_batch_kernels = {"fewer": SimpleNamespace(name="fewer", capabilities=without)}
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


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(3, 16), None),
        (torch.ones(2, 3, 16), None),
        (torch.ones(16), None),
        ([[1.0] * 16], "x must be a Tensor, got list"),
        (torch.ones(3, 16).to_sparse(), "x must be dense, got torch.sparse_coo"),
        (torch.ones(()), "x must be [..., 16] (hidden_size), got []"),
        (torch.ones(16, 3), "x must be [..., 16] (hidden_size), got [16, 3]"),
        (torch.ones(3, 16).double(), "x must be float32 as the layer is, got float64"),
        (torch.ones(3, 16).half(), "x must be float32 as the layer is, got float16; convert it, or call the layer"),
        (torch.ones(3, 16, device="meta"), "x must be on cpu as the layer is, got meta"),
    ],
)
def test_what_is_wrong_with_rows_is_said(x, words):
    cpu = torch.device("cpu")
    said = layer_checks.rows_problem(x, 16, torch.float32, cpu, cpu)
    assert said is None if words is None else said.startswith(words)
    if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
        assert said.endswith("float64")  # autocast does not convert float64


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("meta", "the layer is on the meta device; call to_empty(device=...) and load weights first"),
        ("cpu", "the layer is on cpu and its EPContext on cuda:0; move it there with layer.to('cuda:0')"),
    ],
)
def test_a_layer_is_where_its_context_is(device, words):
    x, there = torch.ones(3, 16), torch.device("cuda", 0)
    assert layer_checks.rows_problem(x, 16, torch.float32, torch.device(device), there) == words


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.ones(2, 3, dtype=torch.bool), None),
        ([[True] * 3] * 2, "mask must be a Tensor, got list"),
        (torch.ones(2, 3, dtype=torch.bool).to_sparse(), "mask must be dense, got torch.sparse_coo"),
        (torch.ones(2, 3, dtype=torch.int64), "mask must be bool, True for a token, got int64; pass mask != 0"),
        (torch.ones(6, dtype=torch.bool), "mask must be [2, 3], as x without its last size, got [6]"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), "mask must be on cpu as x is, got meta"),
    ],
)
def test_what_is_wrong_with_a_mask_is_said(tokens, words):
    said = layer_checks.mask_problem(TokenMask(tokens), torch.ones(2, 3, 16))
    assert said is None if words is None else said.startswith(words)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.ones(3, 16), None),
        ((torch.ones(3, 16),), "shared_experts must return a Tensor [T, H] for x [T, H], got tuple"),
        (torch.ones(16), "shared_experts must return [T, H] = [3, 16] for x of that shape, got [16]"),
        (torch.ones(3, 1), "shared_experts must return [T, H] = [3, 16] for x of that shape, got [3, 1]"),
    ],
)
def test_what_shared_experts_return_is_of_the_rows_shape(out, words):
    assert layer_checks.shared_problem(out, torch.ones(3, 16)) == words


def test_a_kernel_that_routes_inside_is_called_by_forward_alone(monkeypatch):
    """A kernel that routes inside serves only `forward`, with the original expert map and without a mask."""
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), experts="reference")
    monkeypatch.setattr(layer, "_routes_inside", True)
    monkeypatch.setitem(layer._asked, "expert_map", layer.placement.expert_map)
    x, routing = torch.ones(3, 16), Routing(torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    where = "experts=reference has a built-in router"
    assert layer_checks.call_problem(layer, x, None, None) is None
    assert (
        layer_checks.call_problem(layer, x, routing, None)
        == f"{where}: call forward, with the expert map of construction"
    )
    mask = TokenMask(torch.ones(3, dtype=torch.bool))
    assert layer_checks.call_problem(layer, x, None, mask) == f"{where} and takes no mask; choose other experts"
    monkeypatch.setitem(layer._asked, "expert_map", ExpertMap.from_ranks([[3, 2, 1, 0]], 4))
    assert (
        layer_checks.call_problem(layer, x, None, None) == f"{where}: call forward, with the expert map of construction"
    )
    monkeypatch.setattr(layer, "_routes_inside", False)
    assert layer_checks.call_problem(layer, x, routing, None) is None
