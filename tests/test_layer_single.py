"""MoELayer and EPContext in one process."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.profiler import ProfilerActivity, profile

from ep_moe import (
    Activation,
    ConfigError,
    EPContext,
    ExpertMap,
    InputError,
    MoEConfig,
    MoELayer,
    Routing,
    RoutingConfig,
    RoutingMethod,
)
from ep_moe.observe import StageTimes, balancedness
from ep_moe.select import explain
from ep_moe.types import LogicalIds, PhysicalIds, PhysicalRouting
from tests.helpers import fill, integer_routing, integer_rows

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 6, 2
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


# --- construction ---------------------------------------------------------------------------------------------------


def by_device(context: EPContext) -> MoELayer:
    with torch.device("meta"):
        return MoELayer(full(), context)


def by_argument(context: EPContext) -> MoELayer:
    return MoELayer(full(), context, device=torch.device("meta"))


@pytest.mark.parametrize("make", [by_device, by_argument])
def test_meta_then_to_empty_then_load(context, make):
    first = MoELayer(full(), context)
    second = make(context)
    assert all(t.is_meta for t in [*second.parameters(), *second.buffers()])
    second.to_empty(device=CPU)
    for tensor in second.parameters():
        tensor.data.fill_(torch.nan)
    second.load_state_dict(first.state_dict())
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(second(x), first(x))
    assert torch.equal(second.placement.expert_load, first.placement.expert_load)


def test_layer_on_meta_says_what_to_do(context):
    with pytest.raises(InputError) as error:
        by_device(context)(torch.ones(3, HIDDEN))
    assert "meta device; call to_empty(device=...) and load weights first" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plan_is_what_is_allocated(context, dtype):
    on_meta = MoELayer(full(), context, dtype=dtype, device=torch.device("meta"))
    before = on_meta.plan()
    assert all(tensor.is_meta for tensor in on_meta.parameters())
    layer = on_meta.to_empty(device=CPU)
    assert layer.plan() == before
    assert set(before) == {"experts", "router", "placement", "shared_experts", "workspace", "transport"}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*layer.parameters(), *layer.buffers()]}
    assert sum(before.values()) == sum(storage.nbytes() for storage in held.values())
    assert before["experts"] == dtype.itemsize * EXPERTS * (3 * INNER * HIDDEN + 2 * INNER + HIDDEN)


def test_context_sums_the_plans_of_living_layers(context):
    first, second = MoELayer(shape(), context), MoELayer(full(), context)
    assert context.plan()["experts"] == first.plan()["experts"] + second.plan()["experts"]
    assert context.plan()["shared_experts"] == second.plan()["shared_experts"]
    del second
    assert context.plan() == first.plan()


def test_a_layer_that_was_refused_is_not_in_the_plan(context):
    with pytest.raises(ConfigError) as kept:  # its traceback keeps the half-made layer alive, as a notebook does
        MoELayer(shape(), context, expert_map=ExpertMap.linear(EXPERTS, 2))
    assert context.plan() == {}
    del kept


def test_repr_tells_shape_layout_and_backends(context):
    layer = MoELayer(full(), context)
    assert layer.extra_repr() == (
        "moe0: H=16, I=8, E=6, K=2, swiglu, ep=1, etp=1, all2all=local, experts=reference, quantization=none"
    )
    text = repr(layer)
    assert "w13 [6, 16, 16], w2 [6, 16, 8], w13_bias [6, 16], w2_bias [6, 16]" in text
    assert "H=16, E=6, K=2, method=sigmoid_topk" in text
    assert "ExpertMap(E=6, R=1, cap=6, redundant=0)" in text


def test_repr_of_a_context(context):
    layers = [MoELayer(shape(), context) for _ in range(2)]
    for layer in layers:
        layer(torch.ones(1, HIDDEN))
    assert repr(context) == (
        "EPContext(rank 0 of 1 (pp=1 dp=1 tp=1 ep=1 etp=1 replicas=1 tokens=replicated), cpu, 2 layers, 1 transports)"
    )


def test_layers_have_names(context):
    names = [MoELayer(shape(), context, name=name).name for name in (None, "blocks.1.mlp", None)]
    assert names == ["moe0", "blocks.1.mlp", "moe2"]


def test_explain_is_what_runs(context):
    layer = MoELayer(shape(), context)
    assert layer.explain() == explain(shape(), context.layout, CPU, torch.float32)
    assert [row for row in layer.explain() if row.status == "chosen"] == [layer.choice]
    assert (layer.dispatcher.name, layer.experts.name) == (layer.choice.all2all, layer.choice.experts)
    named = MoELayer(shape(), context, all2all="allgather")
    assert [row.all2all for row in named.explain() if row.status == "chosen"] == ["allgather"]
    assert named.dispatcher.name == "allgather"


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        (ExpertMap.linear(5, 1), "expert_map.num_experts must be 6 for this layer and context, got 5"),
        (ExpertMap.linear(6, 2), "expert_map.num_ranks must be 1 for this layer and context, got 2"),
    ],
)
def test_map_of_another_size_is_refused(context, expert_map, message):
    with pytest.raises(ConfigError) as error:
        MoELayer(shape(), context, expert_map=expert_map)
    assert message in str(error.value)


# --- forward --------------------------------------------------------------------------------------------------------


def by_hand(layer: MoELayer, x: Tensor, chosen: Routing) -> Tensor:
    """SwiGLU experts, one token and one expert at a time."""
    state, out = layer.state_dict(), torch.zeros_like(x)
    for row, (ids, weights) in enumerate(zip(chosen.ids.tolist(), chosen.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                gate, up = (state[f"expert_weights.{expert}.w13"] @ x[row]).chunk(2)
                out[row] += weight * (state[f"expert_weights.{expert}.w2"] @ (silu(gate) * up))
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
    """Some kernels read 16 bytes at once: rows that begin between two multiples are copied, and have their gradient."""
    layer = MoELayer(full(), context)
    x = torch.randn(3, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    room = torch.empty(x.numel() + 4)
    start = -room.data_ptr() % 16 // 4 + 1
    odd = room[start : start + x.numel()].view(x.shape).copy_(x).requires_grad_()
    assert odd.data_ptr() % 16 == 4
    seen, start_of = [], type(layer.dispatcher)._begin_dispatch

    def noted(self, x, *rest):
        seen.append(x.data_ptr() % 16)
        return start_of(self, x, *rest)

    with mock.patch.object(type(layer.dispatcher), "_begin_dispatch", noted):
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
        narrow = layer.forward_routed(x, Routing(LogicalIds(chosen.ids.int()), chosen.weights))
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


# --- bad input ------------------------------------------------------------------------------------------------------

IDS, WEIGHTS = torch.tensor([[0, 1], [2, -1], [5, 3]]), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0] * HIDDEN, "x must be a Tensor, got list"),
        (torch.ones(3, 8), "x must be [..., 16] (hidden_size), got [3, 8]"),
        (torch.tensor(1.0), "x must be [..., 16] (hidden_size), got []"),
        (torch.ones(3, HIDDEN).bfloat16(), "x must be float32 as the layer is, got bfloat16"),
        (torch.ones(3, HIDDEN, device="meta"), "x must be on cpu as the layer is, got meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_bad_x_is_refused_by_field_and_value(context, all2all, x, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    for call in (lambda: layer(x), lambda: layer.forward_routed(x, Routing(LogicalIds(IDS), WEIGHTS))):
        with pytest.raises(InputError) as error:
            call()
        assert message in str(error.value)
    assert layer.placement.expert_load.sum() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((IDS, WEIGHTS), "routing must be a Routing of logical ids, got tuple"),
        (PhysicalRouting(PhysicalIds(IDS), WEIGHTS), "routing must be a Routing of logical ids, got PhysicalRouting"),
        (Routing(IDS[:, :1], WEIGHTS), "routing.ids must be [T, K] = [3, 2], got [3, 1]"),
        (Routing(IDS[:2], WEIGHTS), "routing.ids must be [T, K] = [3, 2], got [2, 2]"),
        (Routing(IDS, WEIGHTS[:, 0]), "routing.weights must be [T, K] = [3, 2], got [3]"),
        (Routing(IDS.float(), WEIGHTS), "routing.ids must be int32 or int64, got float32"),
        (Routing(IDS, WEIGHTS.bfloat16()), "routing.weights must be float32, got bfloat16; call .float()"),
        (Routing(IDS, WEIGHTS.to("meta")), "routing.weights must be on cpu as x is, got meta"),
        (Routing(IDS + 1, WEIGHTS), "routing.ids must be -1 or in [0, 6), got 6"),
        (Routing(IDS - 1, WEIGHTS), "routing.ids must be -1 or in [0, 6), got -2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_bad_routing_is_refused_by_field_and_value(context, all2all, given, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    with pytest.raises(InputError) as error:
        layer.forward_routed(torch.ones(3, HIDDEN), given)
    assert message in str(error.value)


@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_layer_works_after_a_refused_call(context, all2all):
    layer = fill(MoELayer(shape(), context, all2all=all2all))
    x, chosen = integer_rows(3, HIDDEN, 0), Routing(LogicalIds(IDS), WEIGHTS)
    before = layer.forward_routed(x, chosen)
    for bad in (torch.ones(3, 8), "x"):
        with pytest.raises(InputError):
            layer(bad)
    assert torch.equal(layer.forward_routed(x, chosen), before)


def test_dispatcher_refuses_logical_ids(context):
    """The mix-up that no shape or range would show: both are integers below E."""
    layer = MoELayer(shape(), context)
    with pytest.raises(InputError) as error:
        layer.dispatcher.dispatch(torch.ones(3, HIDDEN), Routing(LogicalIds(IDS), WEIGHTS))
    assert "routing must be a PhysicalRouting (pass it through Placement), got Routing" in str(error.value)


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (torch.ones(3, 8), IDS, "x must be [T, 16], got [3, 8]"),
        (torch.ones(1, 3, HIDDEN), IDS, "x must be [T, 16], got [1, 3, 16]"),
        (torch.ones(3, HIDDEN).half(), IDS, "x must be float32, got float16"),
        (torch.ones(3, HIDDEN), IDS[:1], "routing.ids must be [T, K] = [3, 2], got [1, 2]"),
        (torch.ones(3, HIDDEN), IDS + 1, "ids out of range: 1 on rank 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_dispatcher_refuses_what_does_not_fit(context, all2all, x, ids, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    with pytest.raises(InputError) as error:
        layer.dispatcher.dispatch(x, PhysicalRouting(PhysicalIds(ids), WEIGHTS))
    assert message in str(error.value)


def test_a_result_is_waited_for_once(context):
    layer = MoELayer(shape(), context)
    pending = layer.dispatcher.dispatch_start(torch.ones(3, HIDDEN), PhysicalRouting(PhysicalIds(IDS), WEIGHTS))
    pending.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


# --- the context ----------------------------------------------------------------------------------------------------


def test_destroyed_context_refuses_forwards_and_layers():
    context = EPContext.local(CPU)
    layer = MoELayer(shape(), context)
    layer(torch.ones(1, HIDDEN))
    context.destroy()
    context.destroy()
    for call in (
        lambda: layer(torch.ones(1, HIDDEN)),
        lambda: layer.forward_routed(torch.ones(3, HIDDEN), Routing(LogicalIds(IDS), WEIGHTS)),
        lambda: MoELayer(shape(), context),
    ):
        with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
            call()


def test_destroyed_context_makes_no_dispatcher():
    context = EPContext.local(CPU)
    layer = MoELayer(shape(), context)
    context.destroy()
    with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
        _ = layer.dispatcher


def test_destroy_gives_the_dispatchers_back():
    context = EPContext.local(CPU)
    layers = [MoELayer(shape(), context), MoELayer(shape(top_k=3), context)]
    given_back = []
    for layer in layers:
        dispatcher = layer.dispatcher
        dispatcher.destroy = lambda d=dispatcher: given_back.append(d)
    made = [layer.dispatcher for layer in layers]
    context.destroy()
    assert given_back == made


def test_context_manager_destroys():
    with EPContext.local(CPU) as context:
        layer = MoELayer(shape(), context)
    with pytest.raises(RuntimeError, match="destroyed"):
        layer(torch.ones(1, HIDDEN))
    context = EPContext.local(CPU)
    layer = MoELayer(shape(), context)
    with pytest.raises(KeyError), context:
        raise KeyError
    with pytest.raises(RuntimeError, match="destroyed"):
        layer(torch.ones(1, HIDDEN))


def test_context_is_not_re_entrant(context):
    inner = fill(MoELayer(shape(), context, name="inner"))

    def router(x: Tensor) -> Routing:
        inner(x)
        return routing(len(x))

    outer = fill(MoELayer(shape(), context, router=router, name="outer"))
    with pytest.raises(RuntimeError, match="not re-entrant: inner was called inside outer"):
        outer(torch.ones(3, HIDDEN))
    assert inner(torch.ones(3, HIDDEN)).shape == (3, HIDDEN)  # and free again


def test_two_contexts_in_one_process():
    """Each has its own order and dispatchers: a layer of one may run inside a layer of the other."""
    with EPContext.local(CPU) as first, EPContext.local(CPU) as second:
        inner = fill(MoELayer(shape(), first))

        def router(x: Tensor) -> Routing:
            inner(x)
            return routing(len(x))

        outer = fill(MoELayer(shape(), second, router=router))
        x = integer_rows(3, HIDDEN, 0)
        assert torch.equal(outer(x), inner.forward_routed(x, routing(3)))
        assert outer.dispatcher is not inner.dispatcher
        assert inner.name == outer.name == "moe0"
        first.destroy()
        assert outer.forward_routed(x, routing(3)).shape == x.shape


def test_equal_layers_share_a_dispatcher_and_others_do_not(context):
    first = MoELayer(shape(), context)
    assert MoELayer(shape(intermediate_size=16), context).dispatcher is first.dispatcher
    spare = ExpertMap.from_ranks([[0, 1, 2, 3, 4, 5, 0]], EXPERTS, allow_duplicates=True)
    others = [
        MoELayer(shape(top_k=3), context),
        MoELayer(shape(hidden_size=24), context),
        MoELayer(shape(num_experts=8), context),
        MoELayer(shape(), context, expert_map=spare),
        MoELayer(shape(), context, dtype=torch.bfloat16),
        MoELayer(shape(), context, all2all="torch_a2a"),
    ]
    assert len({id(layer.dispatcher) for layer in [first, *others]}) == 7


def test_layer_may_change_its_dtype(context):
    layer = fill(MoELayer(shape(), context))
    x, chosen = integer_rows(9, HIDDEN, 0), routing(9)
    wide, before = layer.forward_routed(x, chosen), layer.dispatcher
    layer.to(torch.bfloat16)
    assert layer.geometry.dtype == layer.dtype == torch.bfloat16
    assert layer.dispatcher is not before
    narrow = layer.forward_routed(x.bfloat16(), chosen)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.05 * wide.abs().max().item())
    with pytest.raises(InputError) as error:
        layer(x)
    assert "x must be bfloat16 as the layer is, got float32" in str(error.value)
    assert torch.equal(layer.to(torch.float32).forward_routed(x, chosen), wide)
    assert layer.dispatcher is before


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
    context.stage_times = StageTimes(CPU)
    for layer in layers:
        layer(torch.ones(3, HIDDEN))
    first = context.stage_times.milliseconds()
    assert tuple(first) == STAGES
    assert all(spent > 0 for spent in first.values())
    layers[0](torch.ones(3, HIDDEN))
    second = context.stage_times.milliseconds()
    assert all(second[stage] > first[stage] for stage in STAGES)
    context.stage_times = None
    layers[0](torch.ones(3, HIDDEN))


@pytest.mark.parametrize(
    ("load", "expected"), [([4, 4], 1.0), ([8, 0], 0.5), ([3, 1, 2, 2], 2 / 3), ([0, 0], 1.0), ([], 1.0)]
)
def test_balancedness_is_mean_over_maximum(load, expected):
    assert balancedness(load) == pytest.approx(expected)


def test_load_is_counted_by_forward(context):
    layer = MoELayer(shape(), context)
    layer.forward_routed(torch.ones(3, HIDDEN), Routing(LogicalIds(IDS), WEIGHTS))
    assert layer.placement.expert_load.tolist() == [1, 1, 1, 1, 0, 1]


def test_update_expert_takes_whole_tensors_by_name(context):
    layer = MoELayer(shape(), context)
    assert layer.update_expert(2, w2=torch.ones(HIDDEN, INNER)) == 1
    assert (layer.expert_weights.w2[2] == 1).all()
    with pytest.raises(InputError) as error:
        layer.update_expert(2, w3=torch.ones(1))
    assert "expert 2 has no tensor 'w3'" in str(error.value)
