"""Test MoELayer in one process: what a forward computes and counts."""

# ruff: noqa: F811

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.profiler import ProfilerActivity, profile

from ep_moe import Activation, EPContext, ExpertMap, ExpertsOptions, InputError, MoEConfig, MoELayer, Routing
from ep_moe.placement.placement import balancedness
from ep_moe.runtime.profiling import StageTimes
from tests.fixtures.helpers import assert_same, fill, integer_rows
from tests.fixtures.single_layer import CPU, EXPERTS, HIDDEN, IDS, INNER, STAGES, WEIGHTS, context, full, routing, shape  # noqa: F401 (a fixture)

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, shared_intermediate_size=16)


def by_hand(layer: MoELayer, x: Tensor, chosen: Routing) -> Tensor:
    """Compute SwiGLU experts, one token and one expert at a time."""
    state, out = layer.state_dict(), torch.zeros_like(x)
    for row, (ids, weights) in enumerate(zip(chosen.ids.tolist(), chosen.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                gate, up, down = (state[f"expert_weights.{expert}.{name}"] for name in ("w1", "w3", "w2"))
                out[row] += weight * (down @ (silu(gate @ x[row]) * (up @ x[row])))
    return out


@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_forward_is_the_experts_of_the_routing(context, all2all):
    layer = MoELayer(shape(), context, all2all=all2all)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(layer.forward_routed(x, routing(20)), by_hand(layer, x, routing(20)))
        torch.testing.assert_close(layer(x), by_hand(layer, x, layer.router(x)))


@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
@pytest.mark.parametrize(
    "size", [(HIDDEN,), (5, HIDDEN), (2, 3, HIDDEN), (2, 1, 3, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN)], ids=str
)
def test_leading_sizes_come_back(context, size, all2all):
    layer = MoELayer(full(), context, all2all=all2all)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = layer(x)
        rows = layer(x.reshape(-1, HIDDEN))
    assert y.shape == x.shape
    assert torch.equal(y.reshape(-1, HIDDEN), rows)


def test_input_need_not_be_contiguous(context):
    layer = MoELayer(full(), context)
    x = torch.randn(3, 2, HIDDEN, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_input_may_begin_anywhere(context):
    """The input may have any address. Some kernels read 16 bytes at once, so unaligned rows are copied.

    Their gradients are right too.
    """
    layer = MoELayer(full(), context)
    x = torch.randn(3, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    room = torch.empty(x.numel() + 4)
    start = -room.data_ptr() % 16 // 4 + 1
    odd = room[start : start + x.numel()].view(x.shape).copy_(x).requires_grad_()
    assert odd.data_ptr() % 16 == 4
    seen, start_of = [], type(layer._dispatcher())._begin_dispatch

    def noted(self, x, *rest):
        seen.append(x.data_ptr() % 16)
        return start_of(self, x, *rest)

    with mock.patch.object(type(layer._dispatcher()), "_begin_dispatch", noted):
        y = layer(odd)
    assert seen == [0]
    x.requires_grad_()
    assert torch.equal(y, layer(x))
    y.sum().backward()
    layer(x).sum().backward()
    assert torch.equal(odd.grad, x.grad)


def test_routing_of_int32_ids(context):
    layer = fill(MoELayer(shape(), context))
    x, chosen = integer_rows(9, HIDDEN, 0), routing(9)
    with torch.no_grad():
        narrow = layer.forward_routed(x, Routing(chosen.ids.int(), chosen.weights))
        assert torch.equal(narrow, layer.forward_routed(x, chosen))


def test_replicas_on_one_rank_give_the_same(context):
    config = shape(activation=Activation.RELU2)
    twice = ExpertMap.from_ranks([[5, 0, 1, 2, 3, 4, 5, 0]], EXPERTS, allow_duplicates=True)
    x, chosen = integer_rows(50, HIDDEN, 0), routing(50)
    plain, doubled = fill(MoELayer(config, context)), fill(MoELayer(config, context, expert_map=twice))
    with torch.no_grad():
        assert torch.equal(plain.forward_routed(x, chosen), doubled.forward_routed(x, chosen))
    assert (doubled.placement.slot_load[[0, 1, 6, 7]] > 0).all()


def test_gradients_reach_everything(context):
    layer = MoELayer(full(), context)
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad.abs().max() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# --- shared experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_shared_experts_are_added(context, gate):
    layer = MoELayer(shape(shared_intermediate_size=12, shared_gate=gate), context)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))
    p = {name.removesuffix(".weight"): weight for name, weight in layer.shared_experts.named_parameters()}
    assert set(p) == {"gate_proj", "up_proj", "down_proj"} | ({"shared_gate"} if gate else set())
    with torch.no_grad():
        shared = (silu(x @ p["gate_proj"].t()) * (x @ p["up_proj"].t())) @ p["down_proj"].t()
        if gate:
            shared = shared / (1 + torch.exp(-x @ p["shared_gate"].t()))
        torch.testing.assert_close(layer(x), by_hand(layer, x, layer.router(x)) + shared)
    assert shared.abs().max() > 0.01


def test_shared_experts_without_a_gated_activation(context):
    layer = MoELayer(shape(shared_intermediate_size=12, activation=Activation.RELU2), context)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))
    shared = layer.shared_experts
    assert shared.gate_proj is None
    with torch.no_grad():
        expected = (x @ shared.up_proj.weight.t()).clamp(min=0).square() @ shared.down_proj.weight.t()
        torch.testing.assert_close(shared(x), expected)


def test_any_module_is_a_shared_expert(context):
    shared = nn.Linear(HIDDEN, HIDDEN)
    layer, plain = MoELayer(shape(), context, shared_experts=shared), MoELayer(shape(), context)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("shared_experts")})
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x) + shared(x))
    assert layer.plan()["shared_experts"] == 4 * HIDDEN * (HIDDEN + 1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda y: y[:, :1], r"must return \[T, H\] = \[4, 16\] for x of that shape, got \[4, 1\]"),
        (lambda y: y[:1], r"got \[1, 16\]"),
        (lambda y: y[0], r"got \[16\]"),
        (lambda y: y.sum(), r"got \[\]"),
        (lambda y: None, r"must return a Tensor \[T, H\] for x \[T, H\], got NoneType"),
        (lambda y: 1.0, "got float"),
        (lambda y: (y, y), "got tuple"),
    ],
)
def test_what_shared_experts_return_is_not_broadcast(context, made, words):
    class Odd(nn.Module):
        def forward(self, x):
            return made(x)

    layer = MoELayer(shape(), context, shared_experts=Odd())
    with pytest.raises(InputError, match=f"shared_experts {words}" if words.startswith("must") else words):
        layer(torch.ones(4, HIDDEN))


def test_shared_experts_have_padding_as_it_is(context):
    """Shared experts get padding rows unchanged. Routed experts get zeros, so padding adds no gradient and no NaN."""
    layer, mask = MoELayer(full(), context), torch.tensor([True, False, True, False])
    x = torch.randn(4, HIDDEN, requires_grad=True)
    y = layer(x, mask)
    torch.testing.assert_close(y[~mask], layer.shared_experts(x)[~mask])
    y.sum().backward()
    assert x.grad[~mask].any()


@pytest.mark.parametrize("exact", [False, True])
def test_a_router_has_zeros_for_padding(exact, context):
    """A router gets zeros for padding, so padding cannot affect a user's router that mixes rows."""
    layer, seen = MoELayer(shape(), context, options=ExpertsOptions(exact=exact)), []
    layer.router.register_forward_pre_hook(lambda router, given: seen.append(given[0].detach()))
    mask, x = torch.tensor([True, False, True, False]), torch.randn(4, HIDDEN)
    layer(x.masked_fill(~mask.unsqueeze(1), torch.nan), mask)
    assert_same(seen[0], x.masked_fill(~mask.unsqueeze(1), 0))


@pytest.mark.parametrize("grad", [False, True])
def test_padding_that_is_sent_is_computed_as_tokens_are(context, grad):
    layer, mask = MoELayer(full(), context), torch.tensor([True, False, True, False])
    x = torch.randn(4, HIDDEN, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        assert_same(layer(x, mask, send_masked=True), layer(x))


# --- what can be seen -----------------------------------------------------------------------------------------------


def test_profiler_shows_the_stages_in_order(context):
    layer = MoELayer(full(), context)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(torch.ones(3, HIDDEN))
    events = sorted((e for e in seen.events() if e.name.startswith("ep_moe::")), key=lambda e: e.time_range.start)
    assert [event.name for event in events] == [f"ep_moe::{stage}" for stage in STAGES]


def test_stage_times_add_up_over_calls_and_layers(context):
    layers = [MoELayer(full(), context), MoELayer(shape(), context)]
    layers[0](torch.ones(3, HIDDEN))  # not timed
    context._stage_times = StageTimes(CPU)
    for layer in layers:
        layer(torch.ones(3, HIDDEN))
    first = context._stage_times.milliseconds()
    assert tuple(first) == STAGES
    assert all(spent > 0 for spent in first.values())
    layers[0](torch.ones(3, HIDDEN))
    second = context._stage_times.milliseconds()
    assert all(second[stage] > first[stage] for stage in STAGES)
    with profile(activities=[ProfilerActivity.CPU]):
        layers[0](torch.ones(3, HIDDEN))
    third = context._stage_times.milliseconds()
    assert all(third[stage] > second[stage] for stage in STAGES), "a profiler takes no times away"
    context._stage_times = None
    layers[0](torch.ones(3, HIDDEN))


@pytest.mark.parametrize(
    ("load", "expected"), [([4, 4], 1.0), ([8, 0], 0.5), ([3, 1, 2, 2], 2 / 3), ([0, 0], 1.0), ([], 1.0)]
)
def test_balancedness_is_mean_over_maximum(load, expected):
    assert balancedness(load) == pytest.approx(expected)


def test_load_is_counted_by_forward(context):
    layer = MoELayer(shape(), context)
    layer.forward_routed(torch.ones(3, HIDDEN), Routing(IDS, WEIGHTS))
    assert layer.placement.expert_load.tolist() == [1, 1, 1, 1, 0, 1]


def test_update_expert_takes_whole_tensors_by_name(context):
    layer = MoELayer(shape(), context)
    assert layer.update_expert(2, w2=torch.ones(HIDDEN, INNER)) == 1
    assert (layer.expert_weights.w2[2] == 1).all()
    with pytest.raises(InputError) as error:
        layer.update_expert(2, w3=torch.ones(1))
    assert "expert 2 has no tensor 'w3'" in str(error.value)


def test_a_mask_of_a_layer_that_was_given_ids():
    """A mask in `forward` equals ids of -1 in `forward_routed`."""
    layer = fill(MoELayer(CONFIG, EPContext.local(torch.device("cpu"))))
    x = integer_rows(3, 16, 0)
    with torch.no_grad():
        routing = layer.router(x)
        ids = routing.ids.masked_fill(torch.tensor([[True], [False], [False]]), -1)
        found = layer.forward_routed(x, Routing(ids, routing.weights))
        want = layer(x, torch.tensor([False, True, True]))
    assert_same(found, want)
