"""A small layer in one process, for tests that look at one side of it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, MoEConfig, MoELayer, Routing, RoutingConfig, RoutingMethod
from tests.helpers import fill, integer_routing

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


class Model(nn.Module):
    """Layers one behind the other, each added to its input."""

    def __init__(self, context, layers=2, checkpointed=None, **options):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(fill(MoELayer(shape(**options), context)) for _ in range(layers))
        self.checkpointed = checkpointed  # use_reentrant, None without checkpoints

    def forward(self, x):
        for layer in self.layers:
            step = lambda rows, layer=layer: rows + layer(rows) / 64  # noqa: E731
            x = step(x) if self.checkpointed is None else checkpoint(step, x, use_reentrant=self.checkpointed)
        return x


def rows_of(tokens, seed=0):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
