"""Test one call without ranks: what `Exchange` passes to its dispatcher, and the token limit that a dispatcher uses."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer, Wire, registry
from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.execution import exchange as exchange_module
from ep_moe.execution import graphs, trained_exchange
from ep_moe.execution.exchange import Exchange, check_pipeline, wants_gradients
from ep_moe.execution.recorded_calls import CallerInputs
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.runtime.devices import SideStream
from ep_moe.testing.transport_case import dispatch_shape
from ep_moe.types import (
    LocalIds,
    PeerRows,
    Pending,
    PhysicalIds,
    PhysicalRouting,
    Received,
    RowLayout,
    Weighting,
    WireIds,
)

FORMAT = Wire(dispatch="fp8_row")


class Refused(Exception):
    """Raised by the stand-in dispatcher with the problem that it is given."""


def exchange(tokens: int, *, most: int | None, bound: int | None, rows_per_token: int = 1, rounds=()):
    """Return an exchange whose dispatcher notes its arguments and raises, and the list of notes."""
    given = []

    def note(x, routing, problem=None, *, x_scale=None, max_tokens=None):
        given.append((x, routing, x_scale, max_tokens))
        raise Refused(problem)

    dispatcher = SimpleNamespace(
        dispatch_shape=SimpleNamespace(max_tokens=most, wire=FORMAT, hidden_size=16, dtype=torch.float32),
        capabilities=SimpleNamespace(places=False, adjoint=False, rounds=rounds),
        dispatch_start=note,
        dispatch=lambda x, routing, x_scale=None, max_tokens=None: note(
            x, routing, None, x_scale=x_scale, max_tokens=max_tokens
        ),
        refuse=lambda problem: None,
    )
    context = SimpleNamespace(_call_limit=bound, _stage_times=None)
    experts = SimpleNamespace(capabilities=SimpleNamespace(peer_out=False, cuda_graph=True))
    routing = PhysicalRouting(PhysicalIds(torch.zeros(tokens, 2, dtype=torch.int64)), torch.ones(tokens, 2))
    return Exchange(context, dispatcher, experts, torch.ones(tokens, 16), routing, rows_per_token), given


@pytest.mark.parametrize(("most", "bound", "width"), [(8, 8, 8), (4, 8, 4)], ids=["in one part", "in parts"])
def test_a_refused_call_sends_no_rows_and_no_scales(most, bound, width):
    """A refused call sends no rows and no scales, in one part and in several.

    In parts, the rows are replaced by none before they are cut. Scales of fp8 rows are replaced too.
    """
    call, given = exchange(6, most=most, bound=bound)
    assert call.x_scale is not None
    with pytest.raises(Refused):
        call.refuse("planted")
    ((x, routing, x_scale, max_tokens),) = given
    assert (len(x), len(routing.ids), len(routing.weights)) == (0, 0, 0)
    assert x_scale is None or len(x_scale) == 0
    assert max_tokens == width


def test_a_problem_within_a_capture_is_raised_at_once(monkeypatch):
    """In a capture a problem is raised at once, because no peers wait for this rank's parts."""
    call, given = exchange(6, most=4, bound=8)
    monkeypatch.setattr(exchange_module, "capturing", lambda device: True)
    with pytest.raises(Refused, match="planted"):
        call.refuse("planted")
    assert [len(x) for x, *_ in given] == [0]


@pytest.mark.parametrize("rounds", [False, True])
def test_rows_are_rounded_once(rounds):
    """Rows are rounded once: by the transport if it can, otherwise by the exchange."""
    call, given = exchange(6, most=8, bound=8, rounds={FORMAT.dispatch} if rounds else set())
    with pytest.raises(Refused):
        call.run()
    ((x, _, x_scale, _),) = given
    assert (x.dtype, x_scale is None) == (torch.float32 if rounds else torch.float8_e4m3fn, rounds)


@pytest.mark.parametrize("capable", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("x", "weights", "slots_of_expert", "any_requires_grad", "wanted"),
    [
        (False, False, True, False, False),
        (True, False, True, False, True),
        (False, True, True, False, True),
        (False, False, True, True, True),
        (False, False, False, False, True),  # peers hold experts, which may be trained
    ],
)
def test_a_call_is_trained_where_anything_wants_a_gradient(
    x, weights, slots_of_expert, any_requires_grad, wanted, grad, capable
):
    """A call records gradients if any input or expert wants one and the kernel is differentiable.

    With a kernel that is not, the call computes without gradients even if parameters want them.
    """
    experts = SimpleNamespace(
        capabilities=SimpleNamespace(differentiable=capable),
        weights=SimpleNamespace(slots_of_expert=slots_of_expert, any_requires_grad=any_requires_grad),
    )
    rows, factors = (torch.ones(2, 2, requires_grad=wants) for wants in (x, weights))
    with torch.set_grad_enabled(grad):
        assert wants_gradients(experts, rows, factors) is (wanted and grad and capable)


def test_rows_in_parts_go_with_their_scales_and_routing():
    call, given = exchange(6, most=4, bound=8)
    with pytest.raises(Refused):
        call._start(slice(4, 8))
    ((x, routing, x_scale, max_tokens),) = given
    assert torch.equal(x.view(torch.uint8), call.x[4:6].view(torch.uint8))
    assert torch.equal(x_scale, call.x_scale[4:6])
    assert (len(routing.ids), len(routing.weights), max_tokens) == (2, 2, 4)


def test_a_bound_of_tokens_is_one_of_the_rows_that_travel_for_each():
    """A token limit is multiplied by the rows per token. An exact call sends a row for each route."""
    call, given = exchange(6, most=8, bound=4, rows_per_token=2)
    with pytest.raises(Refused):
        call.run()
    assert [max_tokens for *_, max_tokens in given] == [8]


def test_ranks_agree_on_a_bound_for_calls_that_want_gradients_alike():
    """Without a token limit, ranks agree on one, and pass the names of the inputs that want gradients."""
    call, given = exchange(6, most=None, bound=None)
    asked = []
    call.dispatcher.grows = True
    call.dispatcher.call_bound = lambda *sizes, gradients: asked.append((*sizes, list(gradients))) or 8
    with pytest.raises(Refused):
        call.run()
    assert asked == [(6, torch.device("cpu"), ["x", "routing.weights"])]
    assert [max_tokens for *_, max_tokens in given] == [8]


@pytest.mark.parametrize(("top_k", "columns"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_gradients_of_routing_weights_travel_in_rows_of_whole_words(top_k, columns):
    """Gradients of routing weights travel in float32 rows of a multiple of 16 bytes, whatever the layer's dtype."""
    rows = dispatch_shape(2, top_k, torch.bfloat16)
    assert rows.of_weights == dataclasses.replace(rows, hidden_size=columns, dtype=torch.float32)


def in_parts(tokens: int):
    """Return an exchange of three parts over a transport that logs its events.

    Also return the events, the outputs of the experts for each part, and the tensors where the sums were wanted.
    """
    events, given, outs = [], [], []

    def wait(event, value=None):
        return Pending(lambda: (events.append(event), value)[1])

    def dispatch(x, *_, **__):
        number = len([event for event in events if event.startswith("send")])
        events.append(f"send {number}")
        return SimpleNamespace(x=torch.zeros(5, 16), handle=number, out=None, peer_out="peers", per_route=False)

    def give(y, handle, out):
        events.append(f"give {handle}")
        given.append(y)
        outs.append(out.fill_(handle))
        return wait(f"given {handle}")

    def experts(arrived, out):
        events.append(f"experts {arrived.handle} {out}")
        return arrived.x

    def refuse(problem):
        raise Refused(problem)

    call, _ = exchange(tokens, most=4, bound=12)
    experts.capabilities = SimpleNamespace(peer_out=True, cuda_graph=True)
    dispatcher = SimpleNamespace(
        dispatch_shape=call.dispatcher.dispatch_shape,
        capabilities=call.dispatcher.capabilities,
        dispatch=dispatch,
        dispatch_start=lambda *args, **how: wait("sent", dispatch(*args, **how)),
        combine_start=give,
        combine=lambda *args: give(*args).wait(),
        refuse=refuse,
    )
    context = SimpleNamespace(_call_limit=12, _stage_times=None, _compute=SideStream())
    routing = PhysicalRouting(PhysicalIds(torch.zeros(tokens, 2, dtype=torch.int64)), torch.ones(tokens, 2))
    return Exchange(context, dispatcher, experts, torch.ones(tokens, 16), routing), events, given, outs


def test_parts_are_computed_while_others_travel():
    """Parts overlap in a fixed order: the last part is sent once the one before it has returned.

    The order is the same on all ranks, because kernels wait for peers.
    """
    call, events, _, outs = in_parts(10)
    out, _ = call.run()
    assert [event for event in events if event != "sent"] == [
        "send 0", "send 1", "experts 0 None", "give 0", "send 2", "experts 1 None", "give 1", "given 0",
        "experts 2 peers", "given 1", "give 2", "given 2",
    ]  # fmt: skip
    assert [len(part) for part in outs] == [4, 4, 2]
    assert out.dtype == torch.float32, "of the layer, whatever travels"
    assert torch.equal(out[:, 0], torch.tensor([0.0] * 4 + [1] * 4 + [2] * 2))


def test_a_refused_call_in_parts_takes_part_in_all_and_gives_nan():
    call, events, given, outs = in_parts(10)
    call.to_peers = False
    with pytest.raises(Refused, match="planted"):
        call.refuse("planted")
    assert [event for event in events if event.startswith("send")] == ["send 0", "send 1", "send 2"]
    assert [event for event in events if event.startswith("given")] == ["given 0", "given 1", "given 2"]
    assert all(y.shape == (5, 16) and y.isnan().all() for y in given), "no number passes for a peer's result"
    assert [len(part) for part in outs] == [0, 0, 0]


def test_a_rank_with_too_many_tokens_for_its_bound_takes_part_in_all_parts():
    call, events, given, outs = in_parts(13)
    call.to_peers = False
    with pytest.raises(Refused, match=r"^x has 13 tokens .* max_tokens=12"):
        call.run()
    assert [event for event in events if event.startswith("send")] == ["send 0", "send 1", "send 2"]
    assert all(y.isnan().all() for y in given)
    assert [len(part) for part in outs] == [0, 0, 0]


def test_beside_other_work_is_while_a_call_is_given_alone():
    side, cpu = SideStream(), torch.device("cpu")

    def fails():
        raise KeyError(side.active)

    assert side.start(cpu, lambda: Pending.of(side.active)).wait() is True
    assert not side.active
    with pytest.raises(KeyError, match="True"):
        side.start(cpu, fails)
    assert not side.active


class Noting(LocalDispatcher):
    """A dispatcher that notes the token limit and problem of each call."""

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        self.given = problem, max_tokens
        return super()._dispatch(x, x_scale, routing, problem, max_tokens)


@pytest.mark.parametrize(
    ("asked", "rows", "taken"),
    [(None, 3, 8), (5, 3, 5), (8, 3, 8), (5, 6, 5), (None, 9, 8), (9, 3, 8), (0, 0, 8), (-1, 3, 8)],
)
def test_the_bound_that_a_transport_is_given(asked, rows, taken, monkeypatch):
    """A dispatcher uses the call's token limit, or the shape's `max_tokens` if the call's limit is wrong.

    In that case this rank does not know which limit its peers use.
    """
    dispatcher: Dispatcher = Noting(
        dataclasses.replace(dispatch_shape(1, 2, torch.float32), max_tokens=8), RankGroup.alone()
    )
    monkeypatch.setattr(
        type(dispatcher), "capabilities", dataclasses.replace(LocalDispatcher.capabilities, static=True)
    )
    hidden = dispatcher.dispatch_shape.hidden_size
    routing = PhysicalRouting(PhysicalIds(torch.zeros(rows, 2, dtype=torch.int64)), torch.ones(rows, 2))
    wrong = rows > taken or (asked is not None and not 1 <= asked <= 8)
    try:
        dispatcher.dispatch(torch.ones(rows, hidden), routing, max_tokens=asked)
        assert not wrong
    except InputError:
        assert wrong
    problem, bound = dispatcher.given
    assert (problem is not None, bound) == (wrong, taken)


def test_a_sum_is_wanted_where_it_cannot_be_written_at_once(monkeypatch):
    """`combine` returns its result in `out`. The transport writes there only if it is contiguous."""
    given = []
    dispatcher = LocalDispatcher(dispatch_shape(1, 2, torch.float32), RankGroup.alone())
    monkeypatch.setattr(dispatcher, "_combine", lambda y, handle, out: (given.append(out), Pending.of(y + 1))[1])
    hidden = dispatcher.dispatch_shape.hidden_size
    wide = torch.zeros(3, 2 * hidden)
    for out in (None, torch.zeros(3, hidden), wide[:, ::2]):
        found = dispatcher.combine(torch.ones(3, hidden), None, out)
        assert (found == 2).all()
        assert out is None or found is out
    assert [out is None for out in given] == [True, False, True]


def test_parts_have_from_one_token_to_all_that_a_rank_sends(monkeypatch):
    fixed = SimpleNamespace(capabilities=SimpleNamespace(static=True))
    monkeypatch.setattr(registry, "load", lambda kind, name: fixed)
    for tokens in (None, 1, 8):
        check_pipeline(tokens, 8, "fixed")
    for tokens in (0, 9, True, 2.0):
        with pytest.raises(ConfigError, match=r"pipeline must be an integer in \[1, 8\]"):
            check_pipeline(tokens, 8, "fixed")
    with pytest.raises(ConfigError, match="needs a transport with fixed buffers"):
        check_pipeline(4, None, "fixed")


@pytest.mark.parametrize(("per_route", "rows"), [(False, 3), (True, 6)])
def test_a_refused_call_returns_as_many_rows_as_its_transport_expects(per_route, rows):
    """A refused call returns rows of NaN, as many as the transport expects: one per row, or one per route."""
    shape = SimpleNamespace(hidden_size=4, returned=2, dtype=torch.float32)
    of = SimpleNamespace(dispatcher=SimpleNamespace(dispatch_shape=shape))
    received = SimpleNamespace(x=torch.zeros(3, 8), per_route=per_route)
    found = Exchange._nan(of, received, None)
    assert found.shape == (rows, 4)
    assert found.isnan().all()


def test_a_refused_call_leaves_no_number_in_peers_memory():
    blocks = tuple(torch.zeros(3, 4) for _ in range(2))
    out = PeerRows(blocks, torch.zeros(2, dtype=torch.int64), 0, 0)
    assert Exchange._nan(SimpleNamespace(), None, out) is out
    assert all(block.isnan().all() for block in blocks)


@pytest.mark.parametrize("noted", [0, 3])
def test_recorded_calls_make_room_for_others(noted):
    """If too many calls are kept, those that were only noted are dropped first.

    If all are recorded, all automatic ones are dropped. The user's captured calls stay.
    """
    calls = graphs.CallGraphs.__new__(graphs.CallGraphs)
    keys = [(CallerInputs, number) for number in range(graphs._AUTOMATIC)]
    calls._calls = {key: None if at < noted else graphs.Sizes() for at, key in enumerate(keys)}
    calls._calls["of the user"] = None
    calls._make_room()
    assert list(calls._calls) == (keys[noted:] if noted else []) + ["of the user"]


@pytest.mark.parametrize("train", [False, True])
def test_a_capture_with_a_kernel_that_waits_is_refused(train, monkeypatch):
    """A capture refuses a kernel that waits for the device before it sends a row, and names the kernel.

    The layer serves later calls.
    """
    with EPContext.local("cpu") as context, torch.set_grad_enabled(train):
        layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2), context)
        x = torch.randn(3, 16)
        before = layer(x)
        with monkeypatch.context() as capture:
            capture.setattr(exchange_module, "capturing", lambda device: True)
            with pytest.raises(InputError, match="experts=reference cannot be captured in a CUDA graph; choose"):
                layer(x)
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("wired", [False, True])
def test_rows_that_backward_reads_are_no_memory_of_the_transport(wired, allocated):
    """Rows kept for backward are private copies, because the next call overwrites the transport's memory.

    Routing weights that were sent as a tiny number are zero again.
    """
    ids, given = torch.tensor([[4, 5], [-1, 6]], dtype=torch.int32), {}
    weights = torch.tensor([[0.5, trained_exchange._TINY], [1.0, 2.0]])
    own = {"wire_ids": WireIds(ids, 4)} if wired else {"local_ids": LocalIds(ids - 4)}
    received = Received(torch.ones(2, 8), RowLayout.RANK_MAJOR, Weighting.EXPERTS, None, weights=weights, **own)

    def allocate(name, shape, dtype):
        given[name] = torch.empty(shape, dtype=dtype)
        return given[name]

    there = [received.x, weights, ids if wired else received.local_ids]
    found = trained_exchange._private_copy(received, 3, allocate if allocated else None)
    for tensor in there:
        tensor.zero_()
    assert (found.x == 1).all()
    assert found.weights.tolist() == [[0.5, 0.0], [1.0, 2.0]]
    assert found.local_ids[0].tolist() == [0, 1]
    assert found.local_ids[1, 1] == 2
    if allocated:
        assert given == {"rows": found.x, "weights": found.weights, "ids": found.local_ids}
