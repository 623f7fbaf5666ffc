"""Test a router's kernels against its methods in torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.router import Router, route, routing_weights
from ep_moe.router.kernels import MOST, RouterKernels
from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.types import Routing
from tests.fixtures.interpreter import interpreter_problem

PROBLEM = interpreter_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter does not multiply bfloat16
M = RoutingMethod
SOFTMAX = RoutingConfig(method=M.SOFTMAX_TOPK)
METHODS = {
    "softmax": SOFTMAX,
    "renormalized": RoutingConfig(method=M.SOFTMAX_TOPK, renormalize=True, scaling_factor=2.5),
    "top-k first": RoutingConfig(method=M.TOPK_SOFTMAX, bias=True),
    "sigmoid of top-k": RoutingConfig(method=M.TOPK_SIGMOID),
    "sigmoid": RoutingConfig(method=M.SIGMOID_TOPK, correction_bias=True, renormalize=True),
    "groups": RoutingConfig(
        method=M.SIGMOID_TOPK, correction_bias=True, renormalize=True, num_groups=4, top_groups=2, scaling_factor=2.5
    ),
    "float32": RoutingConfig(method=M.SOFTMAX_TOPK, float32_logits=True, bias=True),
}


def config_of(routing: RoutingConfig, experts: int = 16, top_k: int = 3, hidden: int = 272) -> MoEConfig:
    return MoEConfig(hidden_size=hidden, intermediate_size=16, num_experts=experts, top_k=top_k, routing=routing)


class Case:
    """Rows and parameters of small integers, whose sums are exact in any order and in 16 bits."""

    def __init__(self, config: MoEConfig, tokens: int, dtype: torch.dtype = HALF) -> None:
        r, generator = config.routing, torch.Generator().manual_seed(tokens)

        def numbers(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=generator).to(DEVICE, of)

        own = torch.float32 if r.float32_logits else dtype
        self.config, self.x = config, numbers(tokens, config.hidden_size, of=dtype)
        self.weight = numbers(config.num_experts, config.hidden_size, of=own)
        self.weight[torch.rand(self.weight.shape, generator=generator).to(DEVICE) < 0.9] = 0
        self.bias = numbers(config.num_experts, of=own) if r.bias else None
        self.correction = None
        if r.correction_bias:
            self.correction = torch.rand(config.num_experts, generator=generator).to(DEVICE)

    def logits(self) -> torch.Tensor:
        bias = 0 if self.bias is None else self.bias.double()
        logits = self.x.double() @ self.weight.double().T + bias
        return logits.to(torch.float32 if self.config.routing.float32_logits else self.x.dtype)

    def wanted(self) -> Routing:
        """Return the routing by torch. Of equal scores the lower id comes first, as in the kernels."""
        c = self.config
        return route(self.logits(), c.top_k, c.routing, self.correction, exact=True)

    def found(self) -> Routing:
        kernels = RouterKernels(self.config)
        if len(self.x) <= MOST:
            return kernels.route(self.x, self.weight, self.bias, self.correction)
        return kernels.choose(self.logits(), self.correction)


def assert_chosen(found: Routing, wanted: Routing) -> None:
    """Assert equal experts, and weights within a few roundings of exp and a division, or one step in 16 bits."""
    order, other = found.ids.argsort(-1), wanted.ids.argsort(-1)
    assert torch.equal(found.ids.gather(-1, order), wanted.ids.gather(-1, other))
    found_weights, wanted_weights = found.weights.gather(-1, order), wanted.weights.gather(-1, other)
    torch.testing.assert_close(
        found_weights, wanted_weights, rtol=torch.finfo(HALF).eps if _rounded(wanted) else 2**-20, atol=0
    )


def _rounded(routing: Routing) -> bool:
    return torch.equal(routing.weights.to(HALF).float(), routing.weights)


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("name", METHODS)
def test_as_torch(name, tokens):
    case = Case(config_of(METHODS[name]), tokens)
    assert_chosen(case.found(), case.wanted())


@pytest.mark.parametrize("name", ["renormalized", "top-k first", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (6, 6), (60, 4), (160, 6)])
def test_numbers_of_experts(name, experts, top_k):
    case = Case(config_of(METHODS[name], experts, top_k), 3)
    assert_chosen(case.found(), case.wanted())


@pytest.mark.parametrize("name", ["softmax", "groups", "top-k first"])
def test_by_logits(name):
    case = Case(config_of(METHODS[name], hidden=16), MOST + 1)
    assert_chosen(case.found(), case.wanted())


def test_no_rows():
    found = Case(config_of(SOFTMAX), 0).found()
    assert found.ids.shape == found.weights.shape == (0, 3)


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    case = Case(config_of(METHODS["groups"]), 40)
    case.x, case.weight = (
        torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).to(t) for t in (case.x, case.weight)
    )
    together = case.found()
    x = case.x
    for row in (0, 17, 39):
        case.x = x[row : row + 1]
        alone = case.found()
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.weights[0], together.weights[row])


def test_float32_logits_have_every_bit_of_the_weight():
    """Float32 logits use every bit of the weight.

    On a GPU, bfloat16 rows are multiplied by the weight in three parts.
    """
    config = config_of(METHODS["float32"])
    case, kernels = Case(config, config.hidden_size), RouterKernels(config)
    case.x = torch.eye(config.hidden_size, device=DEVICE, dtype=HALF)
    case.weight = torch.randn(case.weight.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    parts = kernels.parts(len(case.x), DEVICE)
    chosen = case.found()
    kernels.launch_fixed(case.x, case.weight, case.bias, None, parts, chosen, launch_directly)
    assert torch.equal(parts.sum(0), case.weight.T)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_what_is_no_number_is_chosen_and_seen(name):
    case = Case(config_of(METHODS[name]), 2)
    case.x[1, 0], case.weight[:, 0] = float("nan"), 1
    found, wanted = case.found(), case.wanted()
    assert torch.equal(found.weights.isnan(), wanted.weights.isnan())
    assert found.weights[1].isnan().all()


def test_infinite_logits_keep_ids_distinct():
    routing = RoutingConfig(method=M.TOPK_SOFTMAX, bias=True)
    case = Case(config_of(routing, experts=8, top_k=4), 2, torch.float32)
    case.bias = torch.full((8,), -float("inf"), device=DEVICE)
    case.bias[5] = 0
    assert case.found().ids.tolist() == [[5, 0, 1, 2]] * 2


def test_into_fixed_memory_as_by_a_call():
    case = Case(config_of(METHODS["groups"]), 5)
    kernels, room = RouterKernels(case.config), 20
    parts = kernels.parts(room, DEVICE)
    chosen = Routing(torch.empty(room, 3, dtype=torch.int64, device=DEVICE), torch.empty(room, 3, device=DEVICE))
    kernels.launch_fixed(case.x, case.weight, case.bias, case.correction, parts, chosen, launch_directly)
    found = case.found()
    assert torch.equal(chosen.ids[:5], found.ids)
    assert torch.equal(chosen.weights[:5], found.weights)


@pytest.mark.parametrize(
    ("experts", "groups", "reason"),
    [(1025, 1, "1025 experts are more than 1024"), (48, 4, "48 experts in 4 groups"), (64, 1, None)],
)
def test_what_is_not_served(experts, groups, reason):
    routing = dataclasses.replace(METHODS["groups"], num_groups=groups, top_groups=1)
    found = RouterKernels.unsupported_reason(config_of(routing, experts))
    assert found is reason if reason is None else reason in found


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a router on a CPU has torch's operators")
@pytest.mark.parametrize("tokens", [3, MOST + 1])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_choose_alike(name, tokens):
    case = Case(config_of(METHODS[name]), tokens)
    router = Router(case.config, device=DEVICE, dtype=HALF)
    for own, given in ((router.weight, case.weight), (router.bias, case.bias)):
        if given is not None:
            own.data.copy_(given)
    if case.correction is not None:
        router.e_score_correction_bias.copy_(case.correction)
    with torch.no_grad():
        chosen = router(case.x)
    found = router(case.x)
    assert torch.equal(found.ids, chosen.ids)
    assert_chosen(Routing(found.ids, found.weights.detach()), case.wanted())
    found.weights.square().sum().backward()
    weight = case.weight.detach().requires_grad_()
    bias = None if case.bias is None else case.bias.detach().requires_grad_()
    logits = torch.nn.functional.linear(case.x.to(weight.dtype), weight, bias)
    routing_weights(logits, found.ids, case.config.routing).square().sum().backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=0, atol=0)
