"""Test each check of a transport on one rank: a sound transport passes, and one with a single fault fails."""

import dataclasses
import inspect

import pytest
import torch

from ep_moe import EPContext, Wire
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.testing import fused_contract as fused
from ep_moe.testing import transport_contract as contract
from ep_moe.testing import transport_promises as promises
from ep_moe.testing.transport_case import MAX_TOKENS, SLOTS, dispatch_shape, run
from ep_moe.types import LocalIds, Pending, PhysicalIds, PhysicalRouting

CPU = torch.device("cpu")
EVERYTHING = {"host_sync": True, "static": True, "returns_weights": True}


def transport(*, sends=None, arrives=None, back=None, numbers=None, out=None, **can):
    """Return a transport class for one rank, with a fault.

    sends: changes the arguments of `_dispatch`; arrives: its result; back: the result of combine; numbers: the route
    weights' gradients that return; out: whether results are written into the requested tensor.
    """

    class Transport(LocalDispatcher):
        capabilities = dataclasses.replace(LocalDispatcher.capabilities, **EVERYTHING | can)
        calls = 0

        def _dispatch(self, x, x_scale, routing, problem, max_tokens):
            type(self).calls += 1
            given = {"x": x, "x_scale": x_scale, "routing": routing, "problem": problem, "max_tokens": max_tokens}
            if x.dtype != self.dispatch_shape.row_dtype and x_scale is None:
                given["x"], given["x_scale"] = quantize_for_wire(x, self.dispatch_shape.wire)
            given |= {} if sends is None else sends(self, **given)
            received = super()._dispatch(**given).wait()
            return Pending.of(received if arrives is None else arrives(self, received))

        def _combine(self, y, handle, out):
            return Pending.of(y if back is None else back(self, y))

        def combine_with_weights(self, y, by_route, handle, out=None, weights_out=None):
            found = by_route.nan_to_num() if numbers is None else numbers(by_route)
            if out is None or not wanted:
                return y, found
            return out.copy_(y), weights_out.copy_(found)

    wanted = out is None
    return Transport


def checked(check, kind, **shape):
    top_k = 3 if check is contract.nan_stays_with_its_owner else 2  # some tokens then have no expert
    with EPContext.local(CPU) as context:
        made = kind(dispatch_shape(1, top_k, torch.bfloat16, **shape), context.rank_groups["ep"])
        run(check, made, CPU)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_transport_passes(check, monkeypatch):
    monkeypatch.setattr(contract, "barrier", lambda device: None)  # a collective over ranks
    checked(check, transport())


def writes(what):
    """Return faults that overwrite an argument after its last use."""

    def sends(self, x, routing, **given):
        self.given = {"x": x, "ids": routing.ids, "weights": routing.weights}[what]
        return {}

    def back(self, y):
        found = y.clone()
        self.given.zero_()
        return found

    return {"sends": sends, "back": back}


def at_none(_, routing, x, **given):
    """Fail if no token has an expert."""
    return {"problem": "nothing to send"} if len(x) and bool((routing.ids < 0).all()) else {}


def where_all_are_one(_, routing, x, **given):
    one = len(x) and bool(((routing.ids >= 0).sum(1) == 1).all())
    return {"x": x + 1} if one else {}


def needs(fits):
    def sends(_, x, routing, **given):
        return {} if fits(x, routing) else {"problem": "laid out otherwise"}

    return sends


def changed(**fields):
    """Return a fault that replaces fields of what arrived, by functions of it."""
    return lambda _, received: dataclasses.replace(received, **{name: make(received) for name, make in fields.items()})


def twice(received):
    ids = received.local_ids.clone()
    several = (ids >= 0).all(1)
    ids[several] = ids[several, :1].expand(-1, ids.shape[1])
    return LocalIds(ids)


def beyond(number):
    return lambda received: LocalIds(received.local_ids.where(received.local_ids >= 0, number))


def in_one_buffer(self, y):
    """Write the results of all calls to the same memory."""
    self.kept = getattr(self, "kept", torch.zeros(MAX_TOKENS, y.shape[1], dtype=y.dtype))
    self.kept[: len(y)] = y.detach()
    return self.kept[: len(y)]


def arriving_in_one_buffer(self, received):
    return dataclasses.replace(received, x=in_one_buffer(self, received.x))


def bound_of(tokens):
    """Return a fault that loses the last row of calls under this token limit."""

    def sends(self, x, max_tokens, **given):
        return {"x": x * (torch.arange(len(x)) < len(x) - 1).unsqueeze(1)} if max_tokens == tokens else {}

    return sends


def without_checks(_, problem, routing, **given):
    known = (routing.ids >= 0) & (routing.ids < SLOTS)
    return {"routing": PhysicalRouting(PhysicalIds(routing.ids.where(known, -1)), routing.weights)}


def but_negative(_, problem, routing, **given):
    return {"routing": PhysicalRouting(PhysicalIds(routing.ids.where(routing.ids >= 0, -1)), routing.weights)}


def once_wrong_after_a_refusal(self, problem, routing, x, **given):
    self.refused = getattr(self, "refused", False) or problem is not None
    return {"x": x + 1} if self.refused and problem is None else {}


def drifting(self, y):
    return y + self.calls


FAULTS = [
    (contract.uneven_and_empty_ranks, transport(**writes("x")), "x must be left as they were"),
    (contract.uneven_and_empty_ranks, transport(**writes("ids")), "ids must be left as they were"),
    (contract.uneven_and_empty_ranks, transport(**writes("weights")), "weights must be left as they were"),
    (contract.uneven_and_empty_ranks, transport(arrives=changed(local_ids=twice)), "a local id comes twice in a row"),
    (contract.uneven_and_empty_ranks, transport(arrives=changed(local_ids=beyond(SLOTS))), "local ids out of range"),
    (contract.uneven_and_empty_ranks, transport(arrives=changed(local_ids=beyond(-2))), "local ids out of range"),
    (contract.rows_go_where_they_belong, transport(sends=at_none), "nothing to send"),
    (contract.rows_go_where_they_belong, transport(sends=where_all_are_one), "one expert"),
    (contract.views_are_taken, transport(sends=needs(lambda x, to: x.is_contiguous())), "laid out otherwise"),
    (contract.views_are_taken, transport(sends=needs(lambda x, to: to.ids.is_contiguous())), "laid out otherwise"),
    (contract.views_are_taken, transport(sends=needs(lambda x, to: to.weights.is_contiguous())), "laid out otherwise"),
    (contract.views_are_taken, transport(sends=needs(lambda x, to: to.ids.dtype == torch.int64)), "laid out otherwise"),
    (promises.what_is_wrong_on_one_rank_is_raised_on_all, transport(sends=lambda *_, **__: {"problem": None}),
     "rank 0's problem was not raised"),
    (promises.what_is_wrong_on_one_rank_is_raised_on_all, transport(sends=without_checks), "id 4 was not refused"),
    (promises.what_is_wrong_on_one_rank_is_raised_on_all, transport(sends=but_negative), "id -2 was not refused"),
    (promises.what_is_wrong_on_one_rank_is_raised_on_all, transport(sends=once_wrong_after_a_refusal),
     "after a refusal"),
    (promises.gradients_flow, transport(back=lambda _, y: y.detach().requires_grad_(y.requires_grad)), "gradient of x"),
    (promises.gradients_flow, transport(arrives=changed(weights=lambda received: received.weights.detach())),
     "gradient of the weights"),
    (promises.equal_calls_give_equal_bits, transport(back=drifting), "again"),
    (promises.single_rows_keep_their_order_and_bits,
     transport(arrives=changed(**{name: lambda r, name=name: getattr(r, name).flip(0)
                                  for name in ("x", "local_ids", "weights")}), back=lambda _, y: y.flip(0)),
     "arrive in another order"),
    (promises.single_rows_keep_their_order_and_bits,
     transport(arrives=changed(weights=lambda received: received.weights.bfloat16().float())),
     "weights arrive with other bits"),
    (promises.single_rows_keep_their_order_and_bits, transport(back=lambda _, y: y * (1 + 2**-7)),
     "come back with other bits"),
    (contract.two_in_flight, transport(arrives=arriving_in_one_buffer), "first call"),
    (contract.nan_stays_with_its_owner, transport(back=lambda _, y: y.nan_to_num()), "NaN rows came back as numbers"),
    (contract.nan_stays_with_its_owner, transport(back=lambda _, y: torch.full_like(y, torch.nan)),
     "rows without an expert must be zero"),
    (contract.random_delays, transport(back=in_one_buffer), "turn 0"),
    (contract.bounds_that_change, transport(sends=bound_of(4)), "turn"),
    (contract.bounds_that_change, transport(sends=bound_of(9)), "turn"),
    (contract.bounds_that_change, transport(sends=bound_of(1)), "turn"),
    (contract.numbers_of_routes_come_back, transport(numbers=lambda by_route: by_route), "numbers of routes"),
    (contract.numbers_of_routes_come_back, transport(numbers=lambda by_route: by_route.nan_to_num().flip(1)),
     "numbers of routes"),
    (contract.numbers_of_routes_come_back, transport(back=in_one_buffer, out=False), "not where they were wanted"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "wrong", "sentence"), FAULTS)
def test_a_fault_is_seen_by_the_check_that_is_for_it(check, wrong, sentence):
    with pytest.raises(AssertionError, match=f"local: {check.__name__.replace('_', ' ')} .*{sentence}"):
        checked(check, wrong)


def coarse(self, x, x_scale, **given):
    """Round the scales of plain rows to fewer bits."""
    return {} if self.given_scales else {"x_scale": x_scale.bfloat16().float()}


@pytest.mark.parametrize("way", ["alone", "beside other work"])
def test_both_ways_to_send_round_rows_alike(way):
    """`dispatch` and `dispatch_start` must both round plain rows as they are rounded before the wire."""

    class Rounds(transport(sends=coarse, rounds=frozenset({"fp8_block"}))):
        given_scales = True

        def dispatch(self, x, routing, x_scale=None, **more):
            self.given_scales = x_scale is not None or way != "alone"
            return super().dispatch(x, routing, x_scale, **more)

        def dispatch_start(self, x, routing, problem=None, *, x_scale=None, **more):
            self.given_scales = x_scale is not None or way == "alone"
            return super().dispatch_start(x, routing, problem, x_scale=x_scale, **more)

    check, wire = contract.rows_that_come_plain_are_rounded_as_before_the_wire, Wire(dispatch="fp8_block")
    checked(check, transport(rounds=frozenset({"fp8_block"})), wire=wire)
    with pytest.raises(AssertionError, match=f"rounded before, {way}$"):
        checked(check, Rounds, wire=wire)


@pytest.mark.parametrize(
    ("check", "wrong", "can"),
    [
        (contract.bounds_that_change, {"sends": bound_of(4)}, {"static": False}),
        (contract.numbers_of_routes_come_back, {"numbers": lambda by_route: by_route}, {"returns_weights": False}),
        (promises.gradients_flow, {"back": lambda _, y: y.detach()}, {"differentiable": False}),
        (promises.equal_calls_give_equal_bits, {"back": drifting}, {"deterministic": False}),
        (promises.what_is_wrong_on_one_rank_is_raised_on_all, {"sends": without_checks}, {"host_sync": False}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_transport_does_not_promise_is_not_asked(check, wrong, can):
    checked(check, transport(**wrong, **can))


@pytest.mark.parametrize(("modules", "checks"), [((contract, promises), contract.CHECKS), ((fused,), fused.CHECKS)])
def test_every_check_that_is_written_is_made(modules, checks):
    """CHECKS contains every check that is defined, for transports and for fused kernels."""
    written = {
        one
        for module in modules
        for name, one in vars(module).items()
        if inspect.isfunction(one) and not name.startswith("_") and [*inspect.signature(one).parameters] == ["case"]
    }
    assert len(checks) == len(set(checks))
    assert set(checks) == written
