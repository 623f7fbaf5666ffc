"""Test recording and replay of routes with a layer in one process."""

import contextlib
from types import SimpleNamespace as Some

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from ep_moe import (
    ConfigError,
    EPContext,
    ExpertsOptions,
    InputError,
    MoELayer,
    Routing,
    RoutingBuffer,
    RoutingConfig,
    RoutingMethod,
)
from ep_moe.router import CHOOSE_BY_ROUTER, route, routing_weights
from ep_moe.training import load_routing, record_routing, replay_routing
from tests.fixtures.helpers import same_bits
from tests.fixtures.single_layer import CPU, EXPERTS, HIDDEN, TOP_K, Model, context, rows_of, shape

__all__ = ["context"]
METHODS = [
    RoutingConfig(),
    RoutingConfig(renormalize=True, scaling_factor=2.5),
    RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True),
    RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, renormalize=True, num_groups=3, top_groups=2),
    RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, scaling_factor=0.5),
]


@pytest.fixture(params=METHODS, ids=lambda routing: f"{routing.method.value}-{routing.renormalize}")
def layer(request, context):
    return MoELayer(shape(routing=request.param), context)


def recorded(layer, x, weights=False):
    buffer = RoutingBuffer(len(x), TOP_K, weights=weights)
    with layer.record_routing(buffer), torch.no_grad():
        layer(x)
    return buffer.read()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("routing", METHODS, ids=lambda routing: f"{routing.method.value}-{routing.renormalize}")
def test_weights_of_the_chosen_experts_are_those_of_the_choice(routing, exact):
    logits = torch.randn(50, EXPERTS)
    bias = torch.randn(EXPERTS) if routing.correction_bias else None
    chosen = route(logits, TOP_K, routing, bias, exact=exact)
    assert same_bits(routing_weights(logits, chosen.ids, routing, exact=exact), chosen.weights)


@pytest.mark.parametrize("routing", METHODS, ids=lambda routing: f"{routing.method.value}-{routing.renormalize}")
def test_no_expert_has_no_weight_and_spoils_no_gradient(routing):
    logits = torch.randn(3, EXPERTS, requires_grad=True)
    weights = routing_weights(logits, torch.tensor([[2, -1], [-1, -1], [0, 5]]), routing)
    assert (weights == 0).tolist() == [[False, True], [True, True], [False, False]]
    with torch.autograd.set_detect_anomaly(True):  # raises for a NaN in an intermediate gradient too
        weights.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[1].any()


@pytest.mark.parametrize("weights", [False, True])
def test_a_buffer_shows_all_of_its_rows(weights):
    buffer = RoutingBuffer(5, TOP_K, weights=weights)
    assert buffer.ids.tolist() == [[-1] * TOP_K] * 5
    assert buffer.weights is None if not weights else buffer.weights.tolist() == [[0.0] * TOP_K] * 5


def test_calls_are_recorded_in_their_order(layer):
    x = rows_of(7)
    routing = layer.router(x)
    buffer = RoutingBuffer(20, TOP_K, weights=True)
    with layer.record_routing(buffer):
        layer(x[:3])
        layer(x[:0])
        layer.forward_routed(x[:1], Routing(torch.tensor([[4, -1]]), torch.ones(1, 2)))
        layer(x[3:])
    layer(x)  # outside the block
    ids, weights = buffer.read()
    assert ids.dtype == torch.int32
    assert ids.tolist() == [*routing.ids[:3].tolist(), [4, -1], *routing.ids[3:].tolist()]
    assert torch.allclose(weights[[0, 1, 2, 4, 5, 6, 7]], routing.weights)
    buffer.reset()
    with layer.record_routing(buffer):
        layer(x[5:])
    assert buffer.read()[0].tolist() == routing.ids[5:].tolist()


def test_a_block_within_another_gives_back_its_record_and_its_ids(context):
    layer, x = MoELayer(shape(), context), rows_of(4)
    outer, inner = RoutingBuffer(8, TOP_K), RoutingBuffer(8, TOP_K)
    ids, others = torch.tensor([[0, 1]] * 4), torch.tensor([[2, 3]] * 4)
    with layer.record_routing(outer), layer.replay_routing(ids):
        with layer.record_routing(inner), layer.replay_routing(others):
            layer(x)
        layer(x)
    assert torch.equal(inner.read()[0], others)
    assert torch.equal(outer.read()[0], ids)


def test_an_idle_step_within_a_block_leaves_its_record_and_its_ids(context):
    layer, x, ids = MoELayer(shape(), context), rows_of(4), torch.tensor([[0, 1]] * 4)
    buffer = RoutingBuffer(8, TOP_K)
    with layer.record_routing(buffer), layer.replay_routing(ids):
        for _ in range(2):
            with contextlib.suppress(KeyError), layer._routes.idle():
                layer(rows_of(3))  # another number of rows: an idle step has no tokens
                raise KeyError
        layer(x)
    assert torch.equal(buffer.read()[0], ids)


def test_what_is_made_in_inference_mode_serves_outside_too(context):
    x = rows_of(4)
    with torch.inference_mode():
        layer, buffer = MoELayer(shape(), context), RoutingBuffer(20, TOP_K)
        layer.to(torch.bfloat16).to(torch.float32)
        with layer.record_routing(buffer):
            layer(x)
        ids = layer.router(x).ids
    with layer.record_routing(buffer), layer.replay_routing(ids):
        layer(x).sum().backward()
    buffer.reset()
    assert layer.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_given_routes_that_are_computed_again_are_recorded_once(context, reentrant):
    layer, x = MoELayer(shape(), context), rows_of(4).requires_grad_()
    buffer, routing = RoutingBuffer(8, TOP_K), Routing(torch.tensor([[0, 1]] * 4), torch.ones(4, 2))
    with layer.record_routing(buffer):
        checkpoint(layer.forward_routed, x, routing, use_reentrant=reentrant).sum().backward()
    assert torch.equal(buffer.read()[0], routing.ids)


def test_rows_without_room_are_counted_and_named(context):
    layer, buffer = MoELayer(shape(), context), RoutingBuffer(4, TOP_K)
    with layer.record_routing(buffer):
        layer(rows_of(3))
        layer(rows_of(3, seed=1))
    assert buffer.ids[:3].tolist() == layer.router(rows_of(3)).ids.tolist()
    assert buffer.ids[3].tolist() == layer.router(rows_of(3, seed=1)).ids[0].tolist()
    with pytest.raises(InputError, match=r"room for 4 rows, and 6 were recorded; make it with rows=6"):
        buffer.read()


def test_a_replay_of_its_own_record_changes_no_bit(layer):
    x = rows_of(9)
    ids, _ = recorded(layer, x)
    wanted = layer(x)
    with layer.replay_routing(ids):
        assert same_bits(layer(x), wanted)


def test_a_replay_takes_ids_from_the_record_and_weights_from_live_logits(layer):
    x = rows_of(9)
    ids, _ = recorded(layer, x)
    with torch.no_grad():
        layer.router.weight.add_(torch.randn_like(layer.router.weight))
    assert not torch.equal(layer.router(x).ids, ids)
    with layer.replay_routing(ids):
        found = layer(x)
    logits = layer.router.logits(x)
    wanted = layer.forward_routed(x, Routing(ids.long(), routing_weights(logits, ids.long(), layer.config.routing)))
    assert same_bits(found, wanted)
    grads = [torch.autograd.grad(out.square().sum(), layer.router.weight)[0] for out in (found, wanted)]
    assert grads[0].abs().max() > 0
    assert same_bits(*grads)


def test_rows_outside_the_mask_are_routed(layer):
    x = rows_of(8)
    ids, _ = recorded(layer, rows_of(8, seed=5))
    assert not torch.equal(layer.router(x).ids, ids)
    mask = torch.tensor([[True] * 4, [False] * 4])
    ids[4:] = 0  # not recorded, so neither distinct nor checked
    with layer.replay_routing(ids.view(2, 4, TOP_K), mask):
        found = layer(x.view(2, 4, HIDDEN)).view(8, HIDDEN)
    live = layer(x)
    with layer.replay_routing(ids[:4]):
        replayed = layer(x[:4])
    assert torch.allclose(found[:4], replayed, atol=1e-6)
    assert torch.allclose(found[4:], live[4:], atol=1e-6)


def test_ids_are_read_in_each_call(context):
    layer, x = MoELayer(shape(), context), rows_of(4)
    ids = torch.tensor([[0, 1]] * 4)
    with layer.replay_routing(ids):
        first = layer(x)
        ids.copy_(torch.tensor([[2, 3]] * 4))
        second = layer(x)
    assert same_bits(second, layer.forward_routed(x, layer.router(x, ids)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_that_is_computed_again_gets_the_same_ids_and_is_recorded_once(context, reentrant):
    layer, x = MoELayer(shape(), context), rows_of(6).requires_grad_()
    ids, buffer = recorded(layer, rows_of(6, seed=3))[0].clone(), RoutingBuffer(12, TOP_K)
    with layer.replay_routing(ids):
        wanted = torch.autograd.grad(layer(x).square().sum(), (x, layer.router.weight))
        with layer.record_routing(buffer):
            out = checkpoint(layer, x, use_reentrant=reentrant)
            out.square().sum().backward()
    assert same_bits(x.grad, wanted[0])
    assert same_bits(layer.router.weight.grad, wanted[1])
    assert buffer.read()[0].tolist() == ids.tolist()


# a reentrant checkpoint records no graph of its call, so only the newest call is known
@pytest.mark.parametrize(("later", "reentrant"), [(False, False), (True, False), (False, True)])
def test_computing_again_outside_of_the_block_is_refused(context, later, reentrant):
    layer, x = MoELayer(shape(), context), rows_of(6).requires_grad_()
    ids = recorded(layer, rows_of(6, seed=3))[0]
    with layer.replay_routing(ids):
        out = checkpoint(layer, x, use_reentrant=reentrant)
    if later:
        layer(x)  # the newest call has other routes
    with pytest.raises(InputError, match="call backward inside replay_routing"):
        out.sum().backward()
    del out
    checkpoint(layer, x, use_reentrant=False).sum().backward()  # another graph


WRONG = {
    "no tensor": ([[0, 1]], None, "ids must be a Tensor, got list"),
    "dtype": (torch.zeros(4, TOP_K), None, "int16, int32 or int64, got float32"),
    "rows": (torch.zeros(3, TOP_K).long(), None, r"\[4, 2\] for a call of 4 rows, got \[3, 2\]"),
    "top_k": (torch.zeros(4, 3).long(), None, r"\[4, 2\] for a call of 4 rows, got \[4, 3\]"),
    "device": (torch.zeros(4, TOP_K, dtype=torch.int64, device="meta"), None, "on cpu as the layer is, got meta"),
    "too large": (torch.tensor([[0, 1]] * 3 + [[2, EXPERTS]]), None, rf"in \[0, {EXPERTS}\), got {EXPERTS}"),
    "too small": (torch.tensor([[0, 1]] * 3 + [[2, -3]]), None, "got -3"),
    "chosen by the router": (torch.tensor([[0, 1]] * 3 + [[CHOOSE_BY_ROUTER, CHOOSE_BY_ROUTER]]), None, "got -2"),
    "twice": (torch.tensor([[0, 1]] * 3 + [[2, 2]]), None, "must be distinct"),
    "the first one twice": (torch.tensor([[0, 1]] * 3 + [[0, 0]]), None, "must be distinct"),
    "mask's dtype": (torch.tensor([[0, 1]] * 4), torch.ones(4), "mask must be a bool Tensor.*got float32"),
    "mask's rows": (torch.tensor([[0, 1]] * 4), torch.ones(5).bool(), r"mask must be \[4\] on cpu"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_replays_are_refused(context, what):
    ids, mask, problem = WRONG[what]
    layer = MoELayer(shape(), context)
    with layer.replay_routing(ids, mask), pytest.raises(InputError, match=problem):
        layer(rows_of(4))
    layer(rows_of(4))


@pytest.mark.parametrize("wrong", [[0, EXPERTS], [CHOOSE_BY_ROUTER, 1], [3, 3]])
def test_ids_that_are_written_later_are_refused_too(context, wrong):
    layer, ids = MoELayer(shape(), context), torch.tensor([[0, 1]] * 4)
    with layer.replay_routing(ids):
        layer(rows_of(4))
        ids[2] = torch.tensor(wrong)
        with pytest.raises(InputError, match="replay_routing: "):
            layer(rows_of(4))
        ids[2] = torch.tensor([2, 1])
        layer(rows_of(4))


@pytest.mark.parametrize("routing", METHODS, ids=lambda routing: f"{routing.method.value}-{routing.renormalize}")
def test_an_id_of_no_expert_has_no_weight(routing):
    """An id beyond the experts has weight 0, as -1 does.

    Ids on a GPU are not checked in each call, so they must not index memory.
    """
    logits = torch.randn(2, EXPERTS)
    named, none = (routing_weights(logits, torch.tensor([[2, last], [0, 5]]), routing) for last in (-1, EXPERTS + 90))
    assert same_bits(named, none)


def test_a_row_of_no_experts_is_replayed_as_none(context):
    layer = MoELayer(shape(), context)
    with torch.no_grad(), layer.replay_routing(torch.tensor([[-1, -1], [0, 1]])):
        out = layer(rows_of(2))
    assert out[0].count_nonzero() == 0
    assert out[1].count_nonzero() > 0


def test_what_has_weights_of_its_own_is_not_replayed(context):
    x, ids = rows_of(2), torch.tensor([[0, 1], [2, 3]])
    layer = MoELayer(shape(), context)
    with layer.replay_routing(ids), pytest.raises(InputError, match="forward_routed was given routes"):
        layer.forward_routed(x, Routing(ids, torch.ones(2, 2)))
    own = MoELayer(shape(), context, router=lambda x: Routing(ids, torch.ones(2, 2)))
    with own.replay_routing(ids), pytest.raises(InputError, match="layer has a custom router"):
        own(x)


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        (torch.zeros(3), "buffer must be a RoutingBuffer, got Tensor"),
        (RoutingBuffer(4, 3), "top_k=2 as .* has, got 3"),
        (RoutingBuffer(4, 2, device="meta"), "on cpu as .* is, got meta"),
    ],
)
def test_wrong_buffers_are_refused(context, buffer, problem):
    layer = MoELayer(shape(), context)
    with layer.record_routing(buffer), pytest.raises(InputError, match=problem):
        layer(rows_of(2))


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"top_k": -1}, {"rows": 2.5}, {"weights": 1}])
def test_wrong_sizes_of_a_buffer_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoutingBuffer(**({"rows": 3, "top_k": 2} | wrong))


# --- whole models -----------------------------------------------------------------------------------------------------


def test_a_models_record_is_replayed_from_a_file(context, tmp_path):
    model, x = Model(context), rows_of(6)
    with record_routing(model, rows=6, weights=True) as record, torch.no_grad():
        wanted = model(x)
    assert list(record.ids()) == ["layers.0", "layers.1"]
    record.save(tmp_path / "routing.safetensors")
    ids = load_routing(tmp_path / "routing.safetensors")
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight.neg_()
        routed = model(x)
        for layer in model.layers:
            layer.router.weight.neg_()
    assert not torch.equal(routed, wanted)
    wrapped = model  # the wrapper names of FSDP, checkpoint_wrapper, torch.compile and DistributedDataParallel
    for name in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"):
        wrapped = nn.ModuleDict({name: wrapped})
    with replay_routing(wrapped, ids | {"layers.7": ids["layers.0"]}):
        assert same_bits(model(x).detach(), wanted)
    with replay_routing(model, {"layers.0": ids["layers.0"]}), pytest.raises(InputError, match="no ids were given"):
        model(x)


def test_a_models_replay_has_a_mask(context):
    model, x = Model(context), rows_of(6)
    with record_routing(model, rows=6) as record, torch.no_grad():
        own = model(x)
    others = {name: (ids + 1) % EXPERTS for name, ids in record.ids().items()}
    with torch.no_grad(), replay_routing(model, others, mask=torch.arange(6) < 2):
        found = model(x)
    assert torch.allclose(found[2:], own[2:], atol=1e-5)
    assert not torch.allclose(found[:2], own[:2], atol=1e-3)


def test_a_record_that_is_too_long_names_its_layer(context):
    model = Model(context)
    with record_routing(model, rows=2) as record:
        model(rows_of(3))
    with pytest.raises(InputError, match=r"layers\.0: RoutingBuffer has room for 2 rows"):
        record.ids()
    record.reset()
    assert [len(ids) for ids in record.ids().values()] == [0, 0]


def test_other_files_and_models_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "no.safetensors").write_text("no")
    save_file({"0.ids": torch.zeros(2), "x": torch.zeros(2)}, tmp_path / "mixed.safetensors")
    for name in ("other", "no", "absent", "mixed"):
        with pytest.raises(ConfigError, match=f"{name}.safetensors"):
            load_routing(tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="got Linear without any"), record_routing(nn.Linear(2, 2), 3):
        pass


def test_an_exact_replay_is_the_record_bit_for_bit():
    with EPContext.local(CPU) as context:
        layer, x = MoELayer(shape(), context, options=ExpertsOptions(exact=True)), rows_of(6)
        alone = torch.cat([layer(row) for row in x.split(1)])
        ids, _ = recorded(layer, x)
        with layer.replay_routing(ids):
            assert same_bits(layer(x), alone)


@pytest.mark.parametrize("local", [True, False], ids=["its etp peers' rows too", "its own tokens"])
def test_a_router_is_given_the_ids_of_the_rows_that_it_sees(local):
    """A router gets the replayed ids of the rows that it routes.

    If the etp group is part of a tp group, a rank also routes the rows of its etp peers.
    """
    ids, given = torch.arange(12).view(6, 2), []
    flow = Some(etp_rows_are_local=local, etp_gather=lambda x, call: x[:4], local_tokens=lambda x, call: x[2:4])

    def replicated(router, rows, cut, *, partial):
        given.append(cut)
        return Routing(cut, torch.ones(cut.shape))

    routes = Some(replayed=Some(ids=ids, partial=False), seen=lambda weights: weights)
    layer = Some(context=Some(_token_flow=flow), _replayed=routes.replayed, _replicated=replicated, _routes=routes)
    layer.router = None
    MoELayer._chosen(layer, torch.zeros(4 if local else 2, HIDDEN), None)
    assert torch.equal(given[0], ids[:4] if local else ids[2:4])


@pytest.mark.parametrize("options", [{}, {"weights": False}, {"weights": True}], ids=str)
def test_a_models_record_has_weights_where_they_are_asked_for(options, tmp_path):
    with EPContext.local("cpu") as context:
        model = nn.Sequential(MoELayer(shape(), context))
        with record_routing(model, 8, **options) as record:
            model(rows_of(3))
        record.save(tmp_path / "routes.safetensors")
    names = ["0.ids", "0.weights"] if options.get("weights") else ["0.ids"]
    assert sorted(load_file(tmp_path / "routes.safetensors")) == names
