"""Test a routing whose logical ids are placed when they are needed."""

import ctypes

import pytest
import torch

from ep_moe import ExpertMap, InputError
from ep_moe.placement.deferred import DeferredRouting, Placing, ids_for_checks, place, placement_arguments
from ep_moe.placement.placement import Placement
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.deferred_placement import DeferredPlacement
from tests.fixtures.helpers import integer_routing
from tests.fixtures.layer_static import CONFIG

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs on the CPU")


def test_what_is_there_of_a_deferred_routing():
    routing, placement = integer_routing(5, CONFIG, 0), Placement(ExpertMap.redundant(6, 2, 4), ep_rank=1)
    expected = placement(routing).materialize().ids
    placement.reset_load()
    deferred = DeferredPlacement(placement)
    given = placement(routing)
    assert ids_for_checks(given) is routing.ids, "a check of shapes places nothing"
    with pytest.raises(AttributeError, match=r"materialize\(\)"):
        _ = given.ids
    assert deferred.place_calls == 0
    there = given.materialize()
    assert type(there) is PhysicalRouting
    assert torch.equal(there.ids, expected)
    assert given.materialize() is there, "placed and counted once"
    assert deferred.place_calls == 1
    placed_already = (there.ids, (None,) * 6, Placing(0, None, None))
    assert placement_arguments(given) == placed_already, "what is placed and counted is sent as it is"
    there = PhysicalRouting(PhysicalIds(expected), routing.weights)
    assert there.materialize() is there
    assert ids_for_checks(there) is expected
    own = Placement(ExpertMap.redundant(6, 2, 4), ep_rank=1)
    ids, tables, placing = placement_arguments(DeferredRouting(routing.ids, routing.weights, own.tables))
    assert ids is routing.ids
    assert placing == Placing(2, 3266489917, 6)
    assert tables[0] is own.logical_to_physical
    assert tables[1:] == (own.replica_count, own.expert_load, own.slot_load, own.counting, own.invalid_ids.address)


def test_a_compiled_layer_tells_of_an_id_that_a_kernel_dropped():
    """A compiled layer reports an id that a kernel dropped, once, in the next call."""
    word = ctypes.c_int64(9)
    experts = CONFIG.num_experts
    tables = Placement(ExpertMap.linear(experts, 2)).tables._replace(invalid=ctypes.addressof(word))
    ids = torch.zeros(3, CONFIG.top_k, dtype=torch.int64)
    with pytest.raises(InputError, match=rf"must be -1 or in \[0, {experts}\), got 9 in an earlier call of a compiled"):
        place(ids, *tables)
    place(ids, *tables)


@pytest.mark.parametrize("by", ["the layer", "the operator of compiled graphs"])
def test_what_is_placed_within_backward_is_no_load(by):
    """Routes placed within backward do not count as load.

    Activation checkpointing recomputes routes counted in forward.
    """
    routing, placement, placed = integer_routing(5, CONFIG, 0), Placement(ExpertMap.redundant(6, 2, 4)), []

    def call() -> None:
        own = by == "the layer"
        placed.append(placement(routing).materialize().ids if own else place(routing.ids, *placement.tables))

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            call()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            call()
            return grad

    y = Again.apply(torch.zeros(1, requires_grad=True))
    expert_load, slot_load = placement.expert_load.clone(), placement.slot_load.clone()
    assert expert_load.sum() == slot_load.sum() == (routing.ids >= 0).sum() > 0
    y.backward()
    assert torch.equal(*placed)
    assert torch.equal(placement.expert_load, expert_load)
    assert torch.equal(placement.slot_load, slot_load)
