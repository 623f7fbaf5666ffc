"""Gradients of a layer's router: one with a parametrization, and one of the user's."""

import pytest
import torch
from torch.nn.utils import parametrize

from ep_moe import EPContext, InputError, MoELayer, Routing
from ep_moe.testing import distributed, rank_device
from tests.fixtures.gradient_cases import BOUND, FLOAT, P
from tests.fixtures.helpers import fill, integer_rows


class Counted(torch.nn.Module):
    """A parametrization whose state changes with each access, as that of spectral_norm."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


@distributed(1, 2)
def test_a_call_runs_the_parametrization_of_a_router_once(world_size):
    for sizes in [{"dp": 2}, {"tp": 2}] if world_size == 2 else [{}]:
        with EPContext.from_groups(P(**sizes), device=rank_device(), deadline_s=20) as context:
            layer, counted = fill(MoELayer(FLOAT, context)), Counted()
            parametrize.register_parametrization(layer.router, "weight", counted)
            x = integer_rows(3, 16, 0).to(context.device)
            layer(x)
            for number in range(2):
                counted.calls = 0
                with torch.set_grad_enabled(bool(number)):
                    layer(x)
                assert counted.calls == 1, sizes


class OwnRouter(torch.nn.Module):
    """A custom router whose parameters are its own, or another module's."""

    def __init__(self, gate, *, owned):
        super().__init__()
        self.gates = [gate]
        if owned:
            self.gate = gate

    def forward(self, x):
        weights, ids = self.gates[0](x).softmax(-1).topk(FLOAT.top_k)
        return Routing(ids, weights)


@distributed(2)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_router_trains_what_it_holds(sizes, world_size):
    """A custom router under tp that trains tensors other than its parameters is refused.

    Under tp each rank routes a share of the rows, and the layer sums the gradients of the router's parameters only.
    """
    torch.manual_seed(0)
    gate = torch.nn.Linear(16, FLOAT.num_experts, bias=False)
    x = integer_rows(6, 16, 0) / 8
    with EPContext.local(torch.device("cpu")) as alone:
        layer = fill(MoELayer(FLOAT, alone, router=OwnRouter(gate, owned=True)))
        layer(x).sum().backward()
    wanted = gate.weight.grad.clone()
    with EPContext.from_groups(P(**sizes), device=rank_device(), deadline_s=20) as context:
        gate, x = gate.to(context.device), x.to(context.device)
        for router in (OwnRouter(gate, owned=False), OwnRouter(gate, owned=False).forward):
            layer = fill(MoELayer(FLOAT, context, router=router))
            with torch.no_grad():
                layer(x)
            given = x + torch.zeros_like(x, requires_grad=True)  # what precedes the rows is no part of it
            if "tp" in sizes:
                with pytest.raises(
                    InputError, match=r"router= trains a tensor of shape \[\d+, 16\] that is not one of its parameters"
                ):
                    layer(given)
            else:
                layer(given).sum().backward()
            fixed = OwnRouter(lambda x: x @ gate.weight.detach().T, owned=False)
            fill(MoELayer(FLOAT, context, router=fixed))(given).sum().backward()
        gate.weight.grad = None
        fill(MoELayer(FLOAT, context, router=OwnRouter(gate, owned=True)))(x).sum().backward()
        torch.testing.assert_close(gate.weight.grad.cpu(), wanted, rtol=0, atol=BOUND * float(wanted.abs().max()))
