"""A small layer in one process, for tests that look at one side of it."""

import pytest
import torch

from ep_moe import EPContext, MoEConfig, Routing, RoutingConfig, RoutingMethod
from tests.helpers import integer_routing

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 6, 2
IDS, WEIGHTS = torch.tensor([[0, 1], [2, -1], [5, 3]]), torch.ones(3, 2)
STAGES = ("route", "place", "dispatch", "shared", "dispatch wait", "experts", "combine", "leave")  # with shared experts


def shape(**fields) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoEConfig(**(sizes | fields))


def full() -> MoEConfig:
    """A layer with every kind of parameter and buffer."""
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, bias=True)
    return shape(expert_bias=True, shared_intermediate_size=12, shared_gate=True, routing=routing)


@pytest.fixture
def context():
    with EPContext.local(CPU) as made:
        yield made


def routing(tokens: int, seed: int = 0) -> Routing:
    return integer_routing(tokens, shape(), seed)
