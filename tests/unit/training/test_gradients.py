"""Test which of a rank's gradients count in a norm over all ranks, in one process."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.testing import rank_device
from ep_moe.training import gradients
from ep_moe.training.gradients import _buckets, _experts_once
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.expert_weights import etp_link

CONFIG = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=6, top_k=2, expert_bias=True)


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("expert_map", [ExpertMap.linear(6, 2), ExpertMap.redundant(6, 2, 4)])
def test_each_number_counts_once_on_all_ranks_together(etp, expert_map):
    """Each gradient counts once over all ranks, including replicas and biases, which etp ranks hold whole."""
    numbers = {"w1": 6 * 4 * 8, "w2": 6 * 4 * 8, "w3": 6 * 4 * 8, "w13_bias": 6 * 16, "w2_bias": 6 * 4}
    counted = 0.0
    for ep_rank in range(2):
        for etp_rank in range(etp):
            weights = ExpertWeights(CONFIG, expert_map, ep_rank=ep_rank, etp=etp_link(etp, etp_rank))
            for parameter in weights.parameters():
                parameter.grad = torch.ones_like(parameter)
            counted += sum(share * float(gradient.sum()) for gradient, share in _experts_once(weights))
    assert counted == sum(numbers.values())


def test_a_shard_of_experts_counts_as_often_as_there_are_replicas():
    """FSDP2 shards an expert over `replicas`, and the norm divides the sum of powers by their number later."""
    weights = ExpertWeights(CONFIG, ExpertMap.linear(6, 1), replicas=etp_link(3, 0))
    for parameter in weights.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert {share for _, share in _experts_once(weights)} == {1.0}
    weights.gradient_sum.sharded = True
    assert {share for _, share in _experts_once(weights)} == {3.0}


def test_gradients_are_reduced_in_buckets_of_one_dtype_and_a_bounded_size(monkeypatch):
    monkeypatch.setattr(gradients, "_BUCKET", 10)
    sizes = [4, 6, 1, 20, 3]
    given = [torch.empty(n, dtype=dtype) for n in sizes for dtype in (torch.float32, torch.bfloat16)]
    found = [[(len(one), one.dtype) for one in bucket] for bucket in _buckets(given)]
    wanted = [[4, 6], [1], [20], [3]]
    assert found == [[(n, dtype) for n in bucket] for dtype in (torch.float32, torch.bfloat16) for bucket in wanted]


def test_a_bound_of_a_norm_may_exceed_torchs_integers():
    with EPContext.local(rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        layer.router.weight.grad = torch.ones_like(layer.router.weight)
        gradients.clip_grad_norm_(layer, context, 2**70)
        assert layer.router.weight.grad.eq(1).all()


@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
def test_a_tensor_is_no_norm(name):
    """A tensor with several elements is refused by name. Comparing it with a number raises torch's own error."""
    numbers = {"max_norm": 1.0, "norm_type": 2.0} | {name: torch.tensor([1.0, 2.0])}
    with (
        EPContext.local(rank_device()) as context,
        pytest.raises(ConfigError, match=rf"clip_grad_norm_: {name} must be .*, got tensor\(\[1., 2.\]\)"),
    ):
        gradients.clip_grad_norm_(MoELayer(CONFIG, context), context, **numbers)


@pytest.mark.parametrize("norm_type", [1.0, 2, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0, 0.5, 1e6, math.inf])
def test_one_process_clips_as_torch_does(max_norm, norm_type):
    """In one process `clip_grad_norm_` equals torch's, also for gradients that need no clipping."""
    with EPContext.local(rank_device()) as context:
        layers = [MoELayer(CONFIG, context) for _ in range(2)]
        for parameters in zip(*(layer.parameters() for layer in layers), strict=True):
            gradient = torch.randn_like(parameters[0])
            for parameter in parameters:
                parameter.grad = gradient.clone()
        found = gradients.clip_grad_norm_(layers[0], context, max_norm, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(layers[1].parameters(), max_norm, norm_type)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_norm_that_is_no_number_is_raised_where_that_is_asked(number):
    with EPContext.local(rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, number)
        with pytest.raises(RuntimeError, match=r"the gradients' norm is (inf|nan); pass error_if_nonfinite=False"):
            gradients.clip_grad_norm_(layer, context, 1.0, error_if_nonfinite=True)
        assert not gradients.clip_grad_norm_(layer, context, 1.0).isfinite()


@pytest.mark.parametrize("here", [[], [0], [0, 1]], ids=str)
def test_a_gradient_that_no_rank_has_stays_none(here):
    """Parameters without a gradient on any rank keep None, alone in their bucket or beside others."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for number in here:
        parameters[number].grad = torch.full((3,), 4.0)
    context = SimpleNamespace(
        device=torch.device("cpu"),
        flight_recorder=SimpleNamespace(step=lambda *_, **__: nullcontext()),
        rank_groups={"stage": SimpleNamespace(size=2, all_reduce=lambda flat: None)},  # the other rank adds zeros
    )
    gradients._make_means(parameters, context, "stage")
    assert [parameter.grad is not None for parameter in parameters] == [0 in here, 1 in here]
    assert all(parameters[number].grad.eq(2.0).all() for number in here)


@pytest.mark.parametrize(("overflows", "lacks", "dense"), [(0, 0, False), (1, 0, False), (0, 1, False), (1, 1, True)])
def test_an_overflow_is_said_by_a_dense_gradient_where_a_rank_has_none_of_its_kind(overflows, lacks, dense):
    """An overflow is passed on by a dense gradient if a peer has no gradient of its first kind of expert parameter.

    Otherwise that kind of parameter passes it on to all ranks.
    """

    def all_reduce(flags, operation):
        flags[0, 0] = max(float(flags[0, 0]), overflows)
        flags[1, 0] = max(float(flags[1, 0]), lacks)

    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(CONFIG, context)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        seen = SimpleNamespace(
            device=context.device,
            flight_recorder=SimpleNamespace(step=lambda *_, **__: nullcontext()),
            rank_groups={"stage": SimpleNamespace(all_reduce=all_reduce)},
        )
        gradients._share_overflow(layer, seen)
    infinite = {name for name, parameter in layer.named_parameters() if not parameter.grad.isfinite().all()}
    kind = layer.expert_weights.parameter_kinds[0]
    assert {name.rpartition(".")[2] for name in infinite if "expert_weights" in name} == (
        {kind} if overflows else set()
    )
    assert any("router" in name for name in infinite) is dense


def test_a_model_without_experts_shares_no_overflow():
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.full_like(model.weight, math.inf)
    gradients._share_overflow(model, SimpleNamespace())  # a collective would need a context
    assert model.bias.grad is None


def test_a_gpu_publishes_that_its_gradient_is_sparse():
    """On GPUs, an exchange would wait for the device. The peers raise the published error."""
    model, published = torch.nn.Embedding(4, 2, sparse=True), []

    def report(error, call_name, *, users):
        published.append((str(error), call_name, users))

    context = SimpleNamespace(device=torch.device("cuda"), _report_exception=report)
    gradients._refuse_sparse("sync_gradients", model, context, ["stage"])
    assert published == []
    model(torch.arange(2)).sum().backward()
    with pytest.raises(ConfigError, match=r"^sync_gradients: weight must have a dense gradient") as raised:
        gradients._refuse_sparse("sync_gradients", model, context, ["stage"])
    assert published == [(str(raised.value), "sync_gradients", True)]
