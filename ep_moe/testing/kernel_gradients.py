"""What a kernel promises with `differentiable`: the gradients of rows, routing weights and parameters, to the last bit.

Numbers are such that nothing is rounded on the way in any dtype: of each row of a matrix one is not zero, gates are 0
or so large that silu and gelu are the identity there, and sums stay below 256 of their unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.activations import activate
from ep_moe.testing.kernel_case import Layer
from ep_moe.types import Activation, Received, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import parts_of

EXACT = (Activation.SWIGLU, Activation.GEGLU, Activation.GEGLU_TANH, Activation.RELU2)  # clamps have no such numbers
ROWS = 12
LARGE = 64.0  # of a gate


def exact_expert(config: MoEConfig, expert: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Canonical tensors."""
    inner, hidden, gated = config.intermediate_size, config.hidden_size, config.activation.gated
    i, h = torch.arange(inner), torch.arange(hidden)
    own = torch.zeros(inner, hidden)
    own[i, (5 * i + 3 + expert) % hidden] = 1.0 - 2 * (i % 2)
    gate = torch.zeros(inner, hidden)
    gate[i, (7 * i + expert) % hidden] = LARGE
    w2 = torch.zeros(hidden, inner)
    w2[h, (3 * h + expert) % inner] = 1 / LARGE if gated else 1.0
    tensors = {"w13": torch.cat([gate, own]) if gated else own, "w2": w2}
    if config.expert_bias:
        tensors |= {"w13_bias": torch.zeros(config.w13_rows), "w2_bias": h % 3 - 1.0}
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def gradients(layer: Layer) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, what the kernel finds and what it should find. layer: of `exact_expert`s, trainable"""
    weighted = Weighting.EXPERTS in layer.kind.capabilities.weightings
    received = layer.rows(ROWS, Weighting.EXPERTS if weighted else Weighting.COMBINE)
    generator = torch.Generator().manual_seed(2)
    received.x.copy_(torch.randint(0, 3, received.x.shape, generator=generator))
    received.x.requires_grad_()
    if received.weights is not None:
        received.weights.copy_(torch.randint(1, 3, received.weights.shape, generator=generator) / 2)
        received.weights.requires_grad_()
    slope = torch.randint(-1, 2, received.x.shape, generator=generator).to(received.x)
    layer.experts(received).backward(slope)
    wanted = _wanted(layer, received, slope)
    found = {"x": _grad(received.x)}
    if received.weights is not None:
        found["weights"] = _grad(received.weights)
    weights = layer.experts.weights
    for slot in range(len(layer.tensors)):
        if weights.named:
            canonical = _of_expert(weights, weights.local_experts[slot])
        else:
            own = {name: _grad(tensor)[slot] for name, tensor in weights.stored_tensors().items()}
            canonical = weights.weight_layout.restore(own)
        found |= {f"{name} of slot {slot}": tensor for name, tensor in canonical.items()}
    return {name: (found[name], value) for name, value in wanted.items()}


def _wanted(layer: Layer, received: Received, slope: Tensor) -> dict[str, Tensor]:
    """By autograd in float64."""
    assert received.local_ids is not None
    x = received.x.detach().double().requires_grad_()
    weights = None if received.weights is None else received.weights.detach().double().requires_grad_()
    experts = [{n: t.double().requires_grad_() for n, t in tensors.items()} for tensors in layer.tensors]
    y = torch.zeros_like(x)
    for slot, own in enumerate(experts):
        at, column = (received.local_ids == slot).nonzero(as_tuple=True)
        a = activate(x[at] @ own["w13"].T + own.get("w13_bias", 0.0), layer.config)
        part = a @ own["w2"].T + own.get("w2_bias", 0.0)
        y = y.index_add(0, at, part if weights is None else part * weights[at, column].unsqueeze(1))
    y.backward(slope.double())
    given = {"x": x} | ({} if weights is None else {"weights": weights})
    given |= {f"{name} of slot {slot}": t for slot, own in enumerate(experts) for name, t in own.items()}
    return {name: _grad(tensor) for name, tensor in given.items()}


def _of_expert(weights: ExpertWeights, expert: int) -> dict[str, Tensor]:
    """Gradients of an expert's parameters, as canonical tensors."""
    module, gated = weights.get_submodule(str(expert)), weights.config.activation.gated
    return {
        name: torch.cat([_grad(module.get_parameter(part)) for part in parts_of(name, gated)]) for name in weights.names
    }


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
