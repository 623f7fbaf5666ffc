"""Test EPContext in one process: what its layers share, and its end."""

# ruff: noqa: F811

import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from ep_moe import (
    ConfigError,
    EPContext,
    ExpertMap,
    InputError,
    MoELayer,
    OutOfMemory,
    PeerTimeout,
    RankFailed,
    Routing,
    RoutingConfig,
    RoutingMethod,
)
from ep_moe import context as context_module
from ep_moe.parallel.layout import RankLayout
from tests.fixtures.helpers import fill, integer_rows
from tests.fixtures.single_layer import CPU, EXPERTS, HIDDEN, IDS, WEIGHTS, context, routing, shape  # noqa: F401 (a fixture)


def test_destroyed_context_refuses_forwards_and_layers():
    context = EPContext.local(CPU)
    layer = MoELayer(shape(), context)
    layer(torch.ones(1, HIDDEN))
    context.destroy()
    context.destroy()
    for call in (
        lambda: layer(torch.ones(1, HIDDEN)),
        lambda: layer.forward_routed(torch.ones(3, HIDDEN), Routing(IDS, WEIGHTS)),
        lambda: MoELayer(shape(), context),
    ):
        with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
            call()


def test_a_bound_ends_with_its_block():
    context = EPContext.local(CPU)
    context.max_tokens = context._current_limit = 9
    with context.token_limit(4):
        assert context._current_limit == 4
        with pytest.raises(KeyError), context.token_limit(2):
            raise KeyError(context._current_limit)
        assert context._current_limit == 4
    assert context._current_limit == 9
    for wrong in (0, 10, 2.5):
        with pytest.raises(ConfigError), context.token_limit(wrong):
            pass
    assert context._current_limit == 9


def test_a_bound_of_tokens_is_one_of_what_ranks_dispatch(monkeypatch):
    """A token limit is converted to rows that a rank dispatches. Each tp rank dispatches a share of a call's tokens."""
    context = EPContext.local(CPU)
    monkeypatch.setattr(context, "layout", RankLayout(world=4, rank=0, dp=1, tp=4, ep=4))
    context.max_tokens = 9
    with context.token_limit(8):
        assert context._current_limit == 2


def test_what_ranks_compare_of_a_call_follows_the_map_in_force(monkeypatch):
    context = EPContext.local(CPU)
    layer, reversed_map = MoELayer(shape(), context), ExpertMap.from_ranks([range(EXPERTS)[::-1]], EXPERTS)
    monkeypatch.setattr(type(context.flight_recorder), "has_no_peers", False)
    before, first = layer._call_facts(), layer.placement.expert_map
    layer.placement.update(reversed_map)
    assert layer._call_facts() != before
    layer.placement.update(first)
    assert layer._call_facts() == before


def test_recorded_calls_end_with_what_they_stand_for():
    """Recorded calls end with the buffers, kernel or context that they use, even if no kernel here can be recorded."""
    for end in (
        lambda layer: layer._release_buffers(),
        lambda layer: layer._use(SimpleNamespace(use=lambda tuned: None), []),
        lambda layer: layer.context.destroy(),
    ):
        layer = MoELayer(shape(), EPContext.local(CPU))
        layer._graphs._calls["seen"] = None
        end(layer)
        assert not layer._graphs._calls


@pytest.mark.parametrize("called", [False, True])
def test_destroyed_context_makes_no_dispatcher(called):
    """A destroyed context makes no dispatcher, and a layer does not use its old one."""
    context = EPContext.local(CPU)
    layer = MoELayer(shape(), context)
    if called:
        layer(torch.ones(1, HIDDEN))
    context.destroy()
    with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
        _ = layer._dispatcher()


def test_destroy_gives_the_dispatchers_back():
    context = EPContext.local(CPU)
    layers = [MoELayer(shape(), context), MoELayer(shape(top_k=3), context)]
    given_back = []
    for layer in layers:
        dispatcher = layer._dispatcher()
        dispatcher.destroy = lambda d=dispatcher: given_back.append(d)
    made = [layer._dispatcher() for layer in layers]
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
    assert inner(torch.ones(3, HIDDEN)).shape == (3, HIDDEN)  # not in a call any more


def test_a_context_is_free_again_whatever_an_error_raises(context, monkeypatch):
    def broken(error):
        raise KeyError

    monkeypatch.setattr(context, "_report_exception", broken)
    with pytest.raises(KeyError), context._begin_call("moe0"):
        raise ValueError
    assert context._idle


@pytest.mark.parametrize("error", [PeerTimeout, KeyboardInterrupt])
def test_a_context_is_free_again_where_a_call_cannot_begin(error, context, monkeypatch):
    """A context is free again if a call cannot start.

    At the start, a failure that the watchdog found is raised, and Ctrl-C may arrive.
    """

    def stopped(*_):
        raise error("x")

    layer = fill(MoELayer(shape(), context))
    monkeypatch.setattr(context.flight_recorder, "begin_call", stopped)
    with pytest.raises(error):
        layer(torch.ones(3, HIDDEN))
    monkeypatch.undo()
    assert layer(torch.ones(3, HIDDEN)).shape == (3, HIDDEN)


def test_a_context_that_was_ended_is_not_named_dropped():
    for end in (EPContext.destroy, lambda context: context.__exit__(KeyError, KeyError(), None)):
        context = EPContext.local(CPU)
        assert context._dropped.alive
        end(context)
        assert not context._dropped.alive


def test_a_context_of_one_process_may_be_dropped():
    """A context of one process may be dropped without a warning, because it holds no groups."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = EPContext.local(CPU)
        watch = context._dropped
        MoELayer(shape(), context)
        del context
        gc.collect()
    assert not watch.alive
    assert not [one for one in caught if "was dropped" in str(one.message)]


def test_between_calls_a_rank_is_in_no_layer(context):
    """Between calls a rank is in no layer, whether calls end or are refused.

    Later failures then do not name the layer.
    """
    layer = fill(MoELayer(shape(), context))
    layer(torch.ones(3, HIDDEN))
    assert context.flight_recorder.call_name == ""
    with pytest.raises(InputError):
        layer(torch.ones(3, HIDDEN + 1))
    assert context.flight_recorder.call_name == ""


def test_peers_learn_of_a_hook_that_raises_before_forward(context, monkeypatch):
    reported = []

    def fails(*_):
        raise ValueError("of a hook")

    layer = MoELayer(shape(), context)
    layer.register_forward_pre_hook(fails)
    monkeypatch.setattr(context, "_report_exception", lambda *what, users: reported.append((*map(str, what), users)))
    with pytest.raises(ValueError, match="of a hook"):
        layer(torch.ones(3, HIDDEN))
    assert reported == [("of a hook", layer.name, True)]


def agreed(error):
    error.agreed_by = (0, 1)
    return error


@pytest.mark.parametrize(
    ("error", "users", "captures", "reported"),
    [
        (InputError("on all ranks"), False, False, False),
        (InputError("of a router of the user's"), True, False, True),
        (ValueError("on one rank"), False, False, True),
        (ValueError("on one rank"), False, True, False),  # a capture exchanges nothing
        # raised at the same operation on all ranks
        (torch.utils.checkpoint._StopRecomputationError(), False, False, False),
        (OutOfMemory("on one rank"), False, False, True),
        (agreed(OutOfMemory("on all ranks")), False, False, False),
    ],
    ids=lambda one: f"{type(one).__name__}" if isinstance(one, BaseException) else str(one),
)
def test_peers_learn_of_what_one_rank_alone_raises(error, users, captures, reported, context, monkeypatch):
    heard = []
    monkeypatch.setattr(type(context.flight_recorder), "has_no_peers", False)
    monkeypatch.setattr(
        context.flight_recorder, "publish_failure", lambda *what: heard.append(what) or RankFailed("reported")
    )
    monkeypatch.setattr(context_module, "capturing", lambda device: captures)
    context._report_exception(error, "moe0", users=users)
    assert heard == ([(error, "moe0")] if reported else [])


def test_no_layer_is_made_once_a_peer_is_lost(context, monkeypatch):
    """No layer is made once a peer is lost, because the other peers would wait in its exchanges."""

    def lost():
        raise PeerTimeout("rank 1 is lost")

    monkeypatch.setattr(context.flight_recorder, "check", lost)
    with pytest.raises(PeerTimeout, match="rank 1 is lost"):
        MoELayer(shape(), context)


def test_two_contexts_in_one_process():
    """Two contexts have separate orders and dispatchers, so a layer of one may run inside a layer of the other."""
    with EPContext.local(CPU) as first, EPContext.local(CPU) as second:
        inner = fill(MoELayer(shape(), first))

        def router(x: Tensor) -> Routing:
            inner(x)
            return routing(len(x))

        outer = fill(MoELayer(shape(), second, router=router))
        x = integer_rows(3, HIDDEN, 0)
        assert torch.equal(outer(x), inner.forward_routed(x, routing(3)))
        assert outer._dispatcher() is not inner._dispatcher()
        assert inner.name == outer.name == "moe0"
        first.destroy()
        assert outer.forward_routed(x, routing(3)).shape == x.shape


def test_equal_layers_share_a_dispatcher_and_others_do_not(context):
    first = MoELayer(shape(), context)
    assert MoELayer(shape(intermediate_size=16), context)._dispatcher() is first._dispatcher()
    spare = ExpertMap.from_ranks([[0, 1, 2, 3, 4, 5, 0]], EXPERTS, allow_duplicates=True)
    others = [
        MoELayer(shape(top_k=3), context),
        MoELayer(shape(hidden_size=24), context),
        MoELayer(shape(num_experts=8), context),
        MoELayer(shape(), context, expert_map=spare),
        MoELayer(shape(), context, dtype=torch.bfloat16),
        MoELayer(shape(), context, all2all="torch_a2a"),
    ]
    assert len({id(layer._dispatcher()) for layer in [first, *others]}) == 7


def test_shared_experts_of_another_dtype_leave_the_layers(context):
    class Wide(torch.nn.Module):
        def forward(self, x):
            return x.float()

    layer = MoELayer(shape(), context, shared_experts=Wide(), dtype=torch.bfloat16)
    assert layer(torch.ones(3, HIDDEN).bfloat16()).dtype == torch.bfloat16


def test_layer_may_change_its_dtype(context):
    layer = fill(MoELayer(shape(), context))
    x, chosen = integer_rows(9, HIDDEN, 0), routing(9)
    wide, before = layer.forward_routed(x, chosen), layer._dispatcher()
    layer.to(torch.bfloat16)
    assert layer._dispatch_shape().dtype == layer.dtype == torch.bfloat16
    assert layer._dispatcher() is not before
    narrow = layer.forward_routed(x.bfloat16(), chosen)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.05 * wide.abs().max().item())
    with pytest.raises(InputError) as error:
        layer(x)
    assert "x must be bfloat16 as the layer is, got float32" in str(error.value)
    assert torch.equal(layer.to(torch.float32).forward_routed(x, chosen), wide)
    assert layer._dispatcher() is before


def test_rows_that_are_weighed_before_they_travel_keep_their_dtype(context):
    """Rows that are multiplied by routing weights before dispatch keep their dtype. Routing weights are float32."""
    weighed = RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True)
    layer = fill(MoELayer(shape(top_k=1, routing=weighed), context, dtype=torch.bfloat16))
    x = integer_rows(3, HIDDEN, 0).bfloat16()
    assert layer(x).dtype == torch.bfloat16


def test_a_layer_keeps_the_dtype_that_all_ranks_have_buffers_for(context):
    """A layer keeps the dtype for which all ranks have buffers.

    A rank that converts its layer alone gets an error, because its peers send rows of the old dtype.
    """
    layer = MoELayer(shape(), context)
    layer._checks.dtype = layer.dtype  # as after a first call of ranks with fixed buffers
    before = layer._dispatcher()
    layer.to(torch.bfloat16)
    with pytest.raises(
        InputError, match="was converted to bfloat16 after its first call in float32, and all2all=local has"
    ):
        layer(torch.ones(3, HIDDEN).bfloat16())
    assert layer._dispatcher() is before
    assert layer._dispatch_shape().dtype == torch.float32


def test_a_layer_that_the_first_rank_never_makes_is_named():
    context = SimpleNamespace(
        layout=SimpleNamespace(rank=1, group=lambda kind: (0, 1)), _seeds=HashStore(), _layer_count=3,
        flight_recorder=SimpleNamespace(deadline_s=0.05),
    )  # fmt: skip
    with pytest.raises(PeerTimeout, match=r"rank 0 made no layer number 3 within 0.05 s; make the layers on all ranks"):
        EPContext._shared_seed(context, 7)
    context._seeds.set("3", "99")
    assert EPContext._shared_seed(context, 7) == 99
