"""What wrappers do to a layer's experts, as one rank sees it."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ep_moe import RankLayout
from ep_moe.execution.layer_checks import RankChecks
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.weights.trained import GradientSum


class Layer(SimpleNamespace):
    __slots__ = ("__weakref__",)


@pytest.fixture
def layer():
    weights = nn.Linear(2, 2)
    weights.gradients = list
    weights.gradient_sum = GradientSum(weights, *[RankGroup.alone()] * 3)
    layout = RankLayout(world=4, rank=0, dp=2, tp=2, ep=4)
    return Layer(context=SimpleNamespace(layout=layout), expert_weights=weights)


def test_each_wrapper_of_a_layer_is_looked_at(layer, monkeypatch):
    """A model may be wrapped anew, and otherwise: the second one averages over a part of the ranks."""
    ranks = {"all": [0, 1, 2, 3], "half": [0, 1]}
    monkeypatch.setattr(dist, "get_process_group_ranks", ranks.get)

    class Wrapper:
        def __init__(self, group, *parameters):
            self.process_group, self._module_parameters = group, parameters

    checks = RankChecks(layer)
    found = []
    kept = [Wrapper("all"), Wrapper("half"), Wrapper("all", layer.expert_weights.weight)]
    for wrapper in kept:
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", wrapper)
        found.append(checks.wrapper_problem(layer))
    assert found[0] is None
    assert layer.expert_weights.gradient_sum.divisor == 2, "ranks with tokens of their own, as dense gradients"
    assert "averages over ranks 0, 1, and this layer's experts get gradients of ranks 0, 1, 2, 3" in found[1]
    assert "overwritten the experts of each rank" in found[2]
