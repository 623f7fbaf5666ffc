"""Data that every rank can compute for every other, and the single-process oracle."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.types import LogicalIds, Routing
from ep_moe.weights.expert_weights import expert_shapes


def integer_expert(config: MoEConfig, expert: int, seed: int = 0) -> dict[str, Tensor]:
    """An expert's whole tensors, of small integers: sums of their products are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + expert)
    return {
        name: torch.randint(-2, 3, shape, generator=generator).float() for name, shape in expert_shapes(config).items()
    }


def saved_expert(config: MoEConfig, expert: int) -> dict[str, Tensor]:
    """`integer_expert` by the names of parameters, as `state_dict` has them."""
    found = {}
    for name, tensor in integer_expert(config, expert).items():
        if name.startswith("w13") and config.activation.gated:
            found |= dict(zip((name.replace("w13", "w1"), name.replace("w13", "w3")), tensor.chunk(2), strict=True))
        else:
            found[name.replace("w13", "w1")] = tensor
    return found


def integer_rows(tokens: int, hidden: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, (tokens, hidden), generator=torch.Generator().manual_seed(seed)).float()


def integer_routing(tokens: int, config: MoEConfig, seed: int, *, drop: float = 0.2) -> Routing:
    """Distinct ids per row with some -1, and integer weights."""
    generator = torch.Generator().manual_seed(seed + 77)
    ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.top_k).indices
    ids = torch.where(torch.rand(ids.shape, generator=generator) < drop, -1, ids)
    weights = torch.randint(1, 4, ids.shape, generator=generator).float()
    return Routing(LogicalIds(ids), weights)


def fill(layer: MoELayer, make=integer_expert, seed: int = 0) -> MoELayer:
    for expert in range(layer.config.num_experts):
        layer.update_expert(expert, **make(layer.config, expert, seed))
    return layer


@functools.cache
def oracle_layer(config: MoEConfig, seed: int = 0) -> MoELayer:
    """The single-process layer on the CPU, with the weights that `fill` writes."""
    return fill(MoELayer(config, EPContext.local(torch.device("cpu"))), seed=seed)


def oracle(config: MoEConfig, x: Tensor, routing: Routing, seed: int = 0) -> Tensor:
    """The single-process layer on the same weights."""
    with torch.no_grad():
        return oracle_layer(config, seed).forward_routed(x.cpu(), moved(routing, torch.device("cpu")))


def moved(routing: Routing, device: torch.device) -> Routing:
    return Routing(LogicalIds(routing.ids.to(device)), routing.weights.to(device))


def assert_same(actual: Tensor, expected: Tensor, what: object = "", *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal, bit for bit unless bounds are given; a NaN is never equal."""
    found = actual.detach().cpu()
    torch.testing.assert_close(found, expected.detach().cpu(), rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")
