"""Test how ranks compare what they hold of a layer, on one rank."""

import contextlib
import warnings
import zlib
from types import SimpleNamespace as Some
from unittest.mock import Mock

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer, RoutingConfig, RoutingMethod
from ep_moe.errors import InputError
from ep_moe.execution import rank_comparison
from ep_moe.execution.rank_comparison import (
    BackwardComparison,
    Drift,
    _dense,
    _dense_params_in_sync,
    _drifted_ranks,
    _name_dense,
    dense_digest,
)
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup, SumOrder

SIGMOID = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)
CONFIG = MoEConfig(
    hidden_size=8, intermediate_size=8, num_experts=4, top_k=2, routing=SIGMOID, shared_intermediate_size=8
)


def test_all_that_ranks_hold_alike_is_compared():
    """All replicated parameters and buffers are compared. The correction bias is a buffer that affects routing."""
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(CONFIG, context)
        held = {name for name in layer.state_dict() if name.startswith(("router.", "shared_experts."))}
        assert "router.e_score_correction_bias" in held
        assert dict(_dense(layer)).keys() == held


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([[1, 9], [1, 2], [1, 2]], "router.bias on rank 4"),
        ([[1, 2], [7, 9], [1, 2]], "router.weight on rank 6"),
        ([[1, 2], [1, 2], [1, 8], [1, 9], [1, 2]], "router.bias on ranks 8, 10"),
    ],
    ids=str,
)
def test_the_ranks_that_differ_from_most_are_named(rows, named, monkeypatch):
    dense = {"router.weight": torch.zeros(1), "router.bias": torch.zeros(1)}
    exchanged = iter([[[2]] * len(rows), rows])
    monkeypatch.setattr(RankGroup, "exchange", lambda *_: next(exchanged))
    rank_group = RankGroup(None, (4, 6, 8, 10, 12)[: len(rows)], 0, FlightRecorder())
    assert _name_dense(rank_group, dense, [torch.tensor(1)] * 2, torch.device("cpu")) == named


@pytest.mark.parametrize(
    ("rows", "odd", "steps"),
    [
        ([[0, 5, 7], [0, 5, 7]], [], True),
        ([[0, 5, 5], [0, 5, 5]], [], False),
        ([[0, 0, 0], [0, 0, 0]], [], False),
        ([[0, 5, 7], [0, 5, 8], [0, 5, 7]], [1], True),
        ([[0, 5, 7], [0, 6, 8]], [], False),  # the ranks differ from the first step on
        ([[0, 0, 0], [0, 5, 7]], [], False),  # one rank has no expert
        ([[0, 5, 7], [1, 5, 8], [0, 5, 7], [1, 5, 8]], [], True),  # tp ranks that differ by rounding
        ([[0, 5, 7], [1, 5, 8], [0, 5, 7], [1, 5, 9], [1, 5, 8]], [3], True),
        ([[0, 5, 7], [1, 5, 8]], [], False),  # tp ranks only
    ],
    ids=str,
)
def test_what_was_alike_ahead_of_the_first_step_is_to_stay_so(rows, odd, steps):
    assert _drifted_ranks(rows) == odd
    assert _dense_params_in_sync(rows) == steps


class ComparedLayer(Some):
    __slots__ = ("__weakref__",)


@pytest.fixture
def compared(monkeypatch):
    """Return a layer in two kinds of rank group, and the results that `_drifted` returns in each comparison."""
    found = {"drifts": None, "buffer": None, "steps": False, "asked": [], "agreed": [], "met": [], "met on host": []}
    layout = Some(lockstep=2, replicas=2, token_ranks=1)
    recorder = Some(step=lambda *_, **__: contextlib.nullcontext())

    def meet(where, number, tensor):
        found["met"].append((where, number))

    groups = {
        kind: Some(
            kind=kind,
            flight_recorder=recorder,
            meet_in_backward=meet,
            meet_on_host=found["met on host"].append,
            sum_order=SumOrder(),
            agree=lambda *_, call_facts, kind=kind, **__: found["agreed"].append((kind, call_facts)),
        )
        for kind in ("lockstep", "expert_data")
    }
    weights = Some(
        each_backward=None, gradient_sum=Some(each_sum=None), updates=0, sharded=False, has_expert_parameters=True,
        parameters=lambda: [Some(requires_grad=flag) for flag in (True, False)],
    )  # fmt: skip
    context = Some(device=torch.device("cpu"), layout=layout, rank_groups=groups)

    def drifted(layer, rank_group, step):
        found["asked"].append((rank_group.kind, step))
        return Drift(found["drifts"], found["buffer"], found["steps"])

    monkeypatch.setattr(rank_comparison, "_drifted", drifted)
    monkeypatch.setattr(BackwardComparison, "_mixed", lambda self, layer: None)
    return ComparedLayer(name="moe0", context=context, expert_weights=weights), found


def test_backward_compares_ranks_ever_more_seldom(compared):
    """Backward calls compare ranks at growing intervals.

    Ranks also compare how far the call's number is from that of the previous backward, which is equal on all ranks.
    """
    layer, found = compared
    comparison = BackwardComparison(layer)
    for call in (1, 2, 3, 5, 6, 7, 8, 11, 12):
        layer.expert_weights.each_backward(call)
        layer.expert_weights.gradient_sum.each_sum()
    assert [step for kind, step in found["asked"] if kind == "lockstep"] == [1, 2, 3]
    of_sums = [step for kind, step in found["asked"] if kind == "expert_data"]
    assert of_sums == [zlib.crc32(b"moe0" * sums) for sums in (2, 4, 8)], "GPUs compare the layers of all sums so far"
    assert found["met"] == [("moe0", 0)] * 9, "before each sum"
    assert found["met on host"] == []
    assert comparison.mixed is None


@pytest.mark.parametrize(("on_cpu", "compared_calls"), [(True, 9), (False, 4)])
def test_backward_compares_which_experts_learn(on_cpu, compared_calls, compared, monkeypatch):
    """CPUs compare in each backward, GPUs in calls 1, 2, 4 and 8 of nine: first replicas, then the ranks of a call."""
    layer, found = compared
    monkeypatch.setattr(rank_comparison, "meets_before_sums", lambda device: on_cpu)
    _comparison = BackwardComparison(layer)
    for call in range(1, 10):
        layer.expert_weights.each_backward(call)
    assert found["agreed"] == [("expert_data", "requires_grad=10"), ("lockstep", "")] * compared_calls


def test_gpus_compare_the_first_sum_on_the_host(compared, monkeypatch):
    layer, found = compared
    monkeypatch.setattr(rank_comparison, "meets_before_sums", lambda device: False)
    for comparison in (BackwardComparison(layer), BackwardComparison(layer)):  # each layer has a first sum
        for _ in range(3):
            comparison.on_sum()
    assert found["met on host"] == ["the backward of moe0"] * 2
    assert found["met"] == []


def test_sums_that_were_refused_do_not_count(compared, monkeypatch):
    """After an error that all ranks raise, later sums are compared without those before it."""
    layer, found = compared
    comparison = BackwardComparison(layer)
    order = layer.context.rank_groups["expert_data"].sum_order
    comparison.on_sum()
    with monkeypatch.context() as patch:
        patch.setattr(rank_comparison, "_drifted", Mock(side_effect=InputError("other calls")))
        with pytest.raises(InputError, match="other calls"):
            comparison.on_sum()
    assert order.digest == 0
    for _ in range(2):
        comparison.on_sum()
    assert found["asked"] == [("expert_data", zlib.crc32(b"moe0moe0"))]


def test_ranks_that_drift_apart_are_named_once(compared, monkeypatch):
    """Ranks that drift apart are named once. The group that found it compares experts only from then on."""
    layer, found = compared
    monkeypatch.setattr(BackwardComparison, "_mixed", lambda self, layer: "mixed" if len(found["asked"]) > 1 else None)
    comparison, weights = BackwardComparison(layer), layer.expert_weights
    found["drifts"] = "router.weight"
    weights.each_backward(1)
    with pytest.warns(UserWarning, match=r"^moe0: router.weight differs from the other ranks' after 2 backward calls"):
        weights.each_backward(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            weights.gradient_sum.each_sum()
        assert comparison.mixed is None
        for call in (3, 4):
            weights.each_backward(call)
    assert [kind for kind, _ in found["asked"]] == ["lockstep", "expert_data"]
    assert comparison.mixed == ("mixed", 0)


def test_a_buffer_is_named_once_and_parameters_are_watched_all_the_same(compared):
    layer, found = compared
    _, weights = BackwardComparison(layer), layer.expert_weights
    found["buffer"] = "shared_experts.running_mean on rank 1"
    weights.each_backward(1)
    with pytest.warns(UserWarning, match=r"^moe0: the buffer shared_experts.running_mean on rank 1 differs.*broadcast"):
        weights.each_backward(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (3, 4):
            weights.each_backward(call)
    found["drifts"] = "router.weight"
    for call in (5, 6, 7):
        weights.each_backward(call)
    with pytest.warns(UserWarning, match="router.weight differs from the other ranks' after 8 backward calls"):
        weights.each_backward(8)


def test_a_capture_compares_no_ranks(compared, monkeypatch):
    """A capture does not compare ranks, because the comparison would wait for the device."""
    layer, found = compared
    comparison = BackwardComparison(layer)
    monkeypatch.setattr(rank_comparison, "capturing", lambda device: True)
    for call in range(1, 9):
        comparison.on_backward(call)
        comparison.on_sum()
    assert found["asked"] == found["met"] == []


@torch.no_grad()
def test_a_models_own_router_is_compared_too():
    """A model's own router is compared too. It is not part of the layer, but of the block that holds the experts."""
    pytest.importorskip("transformers")
    from ep_moe.integrations.generic import replace_experts
    from tests.fixtures.transformers_models import tiny_transformers_model

    model = tiny_transformers_model("olmoe")
    with EPContext.local(torch.device("cpu")) as context:
        layer, weight = next(iter(replace_experts(model, context).values())).moe, model.model.layers[0].mlp.gate.weight
        before, kept = dense_digest(layer), weight.clone()
        weight[0, 0] += 1
        assert dense_digest(layer) != before
        weight.copy_(kept)
        next(layer.expert_weights.parameters()).add_(1)
        assert dense_digest(layer) == before, "what a rank holds alone"
