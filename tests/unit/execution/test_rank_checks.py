"""Test the checks of wrappers such as DistributedDataParallel around a layer, on one rank."""

import warnings
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from ep_moe import RankLayout
from ep_moe.execution.layer_checks import RankChecks
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.weights.gradient_sum import GradientSum


class Layer(SimpleNamespace):
    __slots__ = ("__weakref__",)


class Wrapper(SimpleNamespace):
    __slots__ = ("__weakref__",)


@pytest.fixture
def layer():
    weights = nn.Linear(2, 2)
    weights.gradients = list
    weights.gradient_sum = GradientSum(weights, *[RankGroup.alone()] * 3)
    layout = RankLayout(world=4, rank=0, dp=2, tp=2, ep=4)
    return Layer(name="layer", context=SimpleNamespace(layout=layout), expert_weights=weights)


def test_each_wrapper_of_a_layer_is_looked_at(layer, monkeypatch):
    """Each new wrapper of a layer is checked.

    A model may be wrapped again in another way. The second wrapper here averages over a part of the ranks.
    """
    ranks = {"all": [0, 1, 2, 3], "half": [0, 1]}
    monkeypatch.setattr(dist, "get_process_group_ranks", ranks.get)

    checks = RankChecks(layer)
    found = []
    kept = [Wrapper(process_group="all"), Wrapper(process_group="half")]
    for one in kept:
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", one)
        found.append(checks.wrapper_problem(layer))
    assert found[0] is None
    assert layer.expert_weights.gradient_sum.divisor == 2, "ranks with tokens of their own, as dense gradients"
    assert "averages over ranks 0, 1, and this layer's experts get gradients of ranks 0, 1, 2, 3" in found[1]


def test_a_wrapper_may_average_over_the_ranks_with_tokens_of_their_own(layer, monkeypatch):
    """A wrapper may average over the ranks with different tokens only, because tp ranks have equal dense gradients."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 0])
    wrapper = Wrapper(process_group=None)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", wrapper)
    assert RankChecks(layer).wrapper_problem(layer) is None


def sums(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def averages(state, bucket):
    return sums(state, bucket.div_(4))


averages.averages_gradients = True
half = default_hooks.fp16_compress_wrapper(averages)
half.averages_gradients = False
KNOWN = {
    "torch's": default_hooks.bf16_compress_hook,
    "torch's around torch's": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "one that says so": averages,
}
UNKNOWN = {
    "a sum": sums,
    "torch's that says it does not": half,
    "torch's around a sum": default_hooks.fp16_compress_wrapper(sums),
    "nothing over ranks": noop_hook,
    "over a part of the ranks": post_localSGD_hook.post_localSGD_hook,
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_hooks_that_may_leave_sums_are_named(name, layer, monkeypatch):
    """A communication hook that is not known to average gets a warning, once per wrapper.

    With such a hook, dense gradients could be sums while expert gradients are means.
    """
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    hook = (KNOWN | UNKNOWN)[name]
    wrapper = Wrapper(_comm_hooks=[(hook, None)], process_group=None, _module_parameters=())
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", wrapper)
    checks = RankChecks(layer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert checks.wrapper_problem(layer) is None
    assert len(caught) == (name in UNKNOWN), "once for a wrapper"
    assert all("may sum gradients over ranks" in str(one.message) for one in caught)
