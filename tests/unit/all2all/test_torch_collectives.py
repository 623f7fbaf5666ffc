"""Test transports over torch's collectives on one rank, with identity experts."""

import pytest
import torch

from ep_moe import EPContext
from ep_moe.all2all import torch_collectives
from ep_moe.errors import InputError
from ep_moe.testing.transport_case import SLOTS, dispatch_shape, expected, routes, rows
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing
from tests.fixtures.helpers import assert_same
from tests.fixtures.identity_experts import dispatch_and_combine

TOP_K = 4
F32 = torch.float32
TRANSPORTS = ["allgather", "torch_a2a"]


@pytest.mark.parametrize("name", ["local", *TRANSPORTS])
@pytest.mark.parametrize("tokens", [0, 5])
def test_one_rank(name, tokens):
    context = EPContext.local(torch.device("cpu"))
    dispatcher = context._dispatcher(name, dispatch_shape(1, TOP_K, F32))
    x, routing = rows(0, tokens, F32), routes(0, tokens, 1, TOP_K)
    y, received = dispatch_and_combine(dispatcher, x, routing)
    assert_same(y, expected(x, routing))
    assert len(received.x) <= tokens
    wrong = PhysicalRouting(PhysicalIds(routing.ids + SLOTS), routing.weights)
    if tokens:
        with pytest.raises(InputError, match=r"routing\.ids must be -1 or an expert id in range"):
            dispatcher.dispatch(x, wrong)
    with pytest.raises(InputError, match="must be a PhysicalRouting"):
        dispatcher.dispatch(x, Routing(routing.ids, routing.weights))


def test_a_capture_takes_ids_on_trust(monkeypatch):
    """A capture does not check ids, because a check would wait for the device."""
    dispatcher = EPContext.local(torch.device("cpu"))._dispatcher("local", dispatch_shape(1, TOP_K, F32))
    monkeypatch.setattr(torch_collectives, "capturing", lambda device: True)
    routing = routes(0, 3, 1, TOP_K)
    dispatcher.dispatch(rows(0, 3, F32), PhysicalRouting(PhysicalIds(routing.ids + SLOTS), routing.weights))
    with pytest.raises(InputError, match="planted"):
        dispatcher.dispatch_start(rows(0, 3, F32), routing, "planted")
