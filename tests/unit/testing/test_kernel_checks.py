"""Test each check of an expert kernel: a sound kernel passes, and one with a single fault fails."""

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import kernel_contract as contract
from ep_moe.testing.kernel_case import WITH_AN_EMPTY_SLOT, KernelCase
from ep_moe.types import RowLayout, Weighting

CONFIG = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=8, top_k=3, activation=Activation.RELU2)


def kernel(given=None, before=None, after=None, own_out=False):
    """Return a kernel class with a fault.

    given: changes its arguments; before: writes to its arguments; after: changes its result.
    """

    class Kernel(ReferenceExperts):
        calls = 0

        def __call__(self, received, out=None):
            type(self).calls += 1
            y = super().__call__(received if given is None else given(received))
            if after is not None:
                y = after(self, y, received)
            if before is not None:
                before(received)
            return y if out is None or own_out else out.copy_(y)

    return Kernel


def kernel_case(kind, **how):
    return KernelCase(kind, CONFIG, SCHEMES["none"], torch.float32, torch.device("cpu"), **how)


def rank_major(made):
    contract._rank_major(made, made.rows(33))


def weighted_by_the_sender(made):
    contract._rank_major(made, made.rows(33, Weighting.COMBINE))


def without_experts(made):
    contract._rank_without_experts(kernel_case(made.kind, held=()))


def with_an_empty_slot(made):
    contract._rank_major(kernel_case(made.kind, held=WITH_AN_EMPTY_SLOT), made.rows(33))


def other_layouts(made):
    for grouped, ids in contract._grouped(made):
        contract._other_layout(made, grouped, ids)


def written_after_a_call(made):
    rank_major(made)
    made.rewrite()
    rank_major(made)


SOUND = [
    rank_major, weighted_by_the_sender, without_experts, other_layouts, written_after_a_call,
    contract._a_row_for_each_route, contract._rows_without_expert, contract._as_it_travelled,
    contract._slots_of_wider_ranks, contract._pieces_sum_to_the_whole, contract._equal_bits, contract._gradients,
    contract._many_rows,
]  # fmt: skip


@pytest.mark.parametrize("check", SOUND, ids=lambda check: check.__name__)
def test_a_sound_kernel_passes(check):
    check(kernel_case(kernel()))


def without_an_expert(received):
    return (received.local_ids < 0).all(1) if received.local_ids is not None else torch.zeros(0, dtype=torch.int64)


def kept_where_none_is(self, y, received):
    y = y.clone()
    y[without_an_expert(received)] = 1.0
    return y


def routes_without_an_expert_kept(self, y, received):
    return y.masked_fill((received.local_ids < 0).view(-1, 1), 1.0) if received.per_route else y


def beyond_its_slots_kept(self, y, received):
    y = y.clone()
    if received.layout is RowLayout.BATCHED:
        y[len(self.weights.local_experts) :] = 1.0
    return y


def of_the_scale(number):
    return lambda self, y, received: y * number


def of_layout(layout, change):
    return lambda self, y, received: change(y) if received.layout is layout else y


def zeroed(name):
    def before(received):
        tensor = (
            received.wire_ids.ids if name == "ids" and received.wire_ids is not None else getattr(received, name, None)
        )
        if tensor is not None:
            tensor.view(torch.uint8).zero_()

    return before


def of_checked_ids_alone(self, y, received):
    return y * 2 if received.wire_ids is not None else y


def weighted_anyway(received):
    """Treat a route of weight 0 with an id of this rank as a route."""
    if received.wire_ids is None:
        return received
    return dataclasses.replace(received, weights=received.weights.masked_fill(received.weights == 0, 1.0))


def all_rows_added(self, y, received):
    return y + 0 * received.x.sum() if received.layout is RowLayout.BATCHED else y


def of_format(name):
    return lambda self, y, received: y * 2 if received.format == name else y


def wide_where_it_travelled(self, y, received):
    return y.double() if received.format != "plain" else y


def drifting(self, y, received):
    return y * (1 + 2.0**-20 * self.calls) if self.options.deterministic else y


FAULTS = [
    (rank_major, kernel(own_out=True), "it must write into `out` and return it"),
    (rank_major, kernel(after=of_the_scale(1.01)), "33 rows, experts: off by"),
    (weighted_by_the_sender, kernel(after=of_the_scale(1.01)), "33 rows, combine: off by"),
    (rank_major, kernel(after=kept_where_none_is), "rows without an expert must be zero"),
    (rank_major, kernel(before=zeroed("x")), "rank_major: x must be left as it was"),
    (rank_major, kernel(before=zeroed("weights")), "rank_major: weights must be left as it was"),
    (rank_major, kernel(before=zeroed("local_ids")), "rank_major: local_ids must be left as it was"),
    (other_layouts, kernel(before=zeroed("expert_counts")), "batched: expert_counts must be left as it was"),
    (other_layouts, kernel(before=zeroed("expert_offsets")), "contiguous: expert_offsets must be left as it was"),
    (contract._as_it_travelled, kernel(before=zeroed("ids")), "rank_major: ids must be left as it was"),
    (contract._as_it_travelled, kernel(before=zeroed("x_scale")), "rank_major: x_scale must be left as it was"),
    (without_experts, kernel(after=lambda self, y, received: y + 1), "with no slots all rows must be zero"),
    (without_experts, kernel(after=lambda self, y, received: y[:, 1:]), r"with no slots rows must be \[33, 128\]"),
    (contract._slots_of_wider_ranks, kernel(after=beyond_its_slots_kept), "slots that the rank does not have"),
    (without_experts, kernel(after=beyond_its_slots_kept), "slots that the rank does not have"),
    (contract._a_row_for_each_route, kernel(after=routes_without_an_expert_kept),
     "a route without an expert must have a zero row"),
    (contract._a_row_for_each_route, kernel(after=lambda self, y, received: y[::3]), "with per_route rows must be"),
    (contract._a_row_for_each_route, kernel(after=of_the_scale(1.01)), "with per_route: off by"),
    (contract._rows_without_expert, kernel(after=lambda self, y, received: y + 0 * received.x), "NaN in rows without"),
    (contract._as_it_travelled, kernel(after=of_checked_ids_alone), "wire ids: off by"),
    (contract._as_it_travelled, kernel(given=weighted_anyway), "wire ids: off by"),
    (other_layouts, kernel(after=all_rows_added), "batched, .*: off by"),
    *((contract._as_it_travelled, kernel(after=of_format(wire.dispatch)), f"rows in {wire.dispatch}: off by")
      for wire in contract.WIRES),
    (contract._as_it_travelled, kernel(after=wide_where_it_travelled),
     "the output of rows in fp8_block must be torch.float32"),
    (other_layouts, kernel(after=of_layout(RowLayout.BATCHED, lambda y: y * 2)), "batched, .*: off by"),
    (other_layouts, kernel(after=of_layout(RowLayout.CONTIGUOUS, lambda y: y * 2)), "contiguous, .*: off by"),
    (other_layouts, kernel(after=of_layout(RowLayout.CONTIGUOUS, lambda y: y[:-1])), "must have the rows' shape"),
    (contract._equal_bits, kernel(after=drifting), "equal calls must give equal bits"),
    (contract._pieces_sum_to_the_whole, kernel(after=of_the_scale(1.01)), "etp = 2: the pieces' sum is off by"),
    (contract._many_rows, kernel(after=lambda self, y, received: y * (torch.arange(len(y)) < 4096).unsqueeze(1)),
     "4369 rows: off by"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "wrong", "sentence"), FAULTS)
def test_a_fault_is_seen_by_the_check_that_is_for_it(check, wrong, sentence):
    with pytest.raises(AssertionError, match=rf"^reference \(none, torch\.float32, relu2\): .*({sentence})"):
        check(kernel_case(wrong))


def test_rows_of_every_format_are_compared():
    assert {wire.dispatch for wire in contract.WIRES} == ROW_FORMATS.keys() - {"plain"}


def test_what_a_kernel_raises_is_said_of_its_layer_once():
    """An error in a kernel names its layer and call once. An error that names the layer already is unchanged."""
    with (
        pytest.raises(AssertionError, match=r"^a layer: a call: ValueError: boom$"),
        contract.named("a layer", "a call"),
    ):
        raise ValueError("boom")
    with pytest.raises(AssertionError, match=r"^a layer: off by 2$"), contract.named("a layer", "a call"):
        raise AssertionError("a layer: off by 2")
    sentence = r"^a layer: a call: AssertionError: of the kernel's own$"
    with pytest.raises(AssertionError, match=sentence), contract.named("a layer", "a call"):
        raise AssertionError("of the kernel's own")


@pytest.mark.parametrize("promise", ["deterministic", "differentiable", "per_route", "etp"])
def test_what_a_kernel_does_not_promise_is_not_asked(promise, monkeypatch):
    checks = {
        "deterministic": "_equal_bits", "differentiable": "_gradients", "per_route": "_a_row_for_each_route",
        "etp": "_pieces_sum_to_the_whole",
    }  # fmt: skip
    called = []
    for name in (*checks.values(), "_rank_major", "_rows_without_expert", "_as_it_travelled", "_slots_of_wider_ranks"):
        monkeypatch.setattr(contract, name, lambda *_, name=name: called.append(name))
    for promised in (True, False):
        kind = kernel()
        kind.capabilities = dataclasses.replace(kind.capabilities, **{promise: promised})
        called.clear()
        contract._check_layer(kernel_case(kind))
        assert (checks[promise] in called) is promised
        others = set(checks.values()) - {checks[promise]}
        assert others <= set(called)


@pytest.mark.parametrize("weightings", [frozenset({Weighting.EXPERTS}), frozenset(Weighting)], ids=len)
def test_rows_are_weighted_where_a_kernel_says(weightings, monkeypatch):
    asked = set()
    kind = kernel()
    kind.capabilities = dataclasses.replace(kind.capabilities, weightings=weightings)
    monkeypatch.setattr(contract, "_rank_major", lambda made, received, *_: asked.add(received.weighting))
    for name in ("_other_layout", "_a_row_for_each_route", "_rows_without_expert", "_as_it_travelled", "_gradients"):
        monkeypatch.setattr(contract, name, lambda *_: None)
    contract._check_layer(kernel_case(kind))
    assert asked == weightings
