"""Test derivatives of activations and bias gradients (sums over rows of an expert) against float64.

They run on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)
from ep_moe.config import MoEConfig
from ep_moe.experts.hopper.gradients_triton import Float8Rows, activate_rows, add_dots, differentiate, sum_rows
from ep_moe.experts.shared_experts import activate
from ep_moe.quant.kernels import round_rows
from ep_moe.types import Activation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = [0, 1, 70, 0, 33]  # rows of each expert
STEP = 2**-8 if DEVICE.type == "cuda" else 2**-7  # the interpreter's casts truncate


def sorted_rows(size: int):
    """Return sorted rows, two more rows of NaN after the last expert's, ends, experts, shuffled routes and weights."""
    generator = torch.Generator().manual_seed(size)
    count = sum(COUNTS)
    rows = torch.randn(count + 2, size, generator=generator).bfloat16().to(DEVICE)
    rows[count:] = torch.nan
    ends = torch.tensor(COUNTS).cumsum(0).int().to(DEVICE)
    expert = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS)).to(DEVICE)
    routes = torch.randperm(2 * count, generator=generator)[: count + 2].int().to(DEVICE)
    return rows, ends, expert, routes, torch.rand(2 * count, generator=generator).to(DEVICE)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("size", [64, 200])
def test_sums_of_rows(size, weighed):
    rows, ends, expert, routes, weights = sorted_rows(size)
    out = torch.full((len(COUNTS), size), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    sum_rows(rows, ends, out, routes, weights if weighed else None)
    each = rows[: len(expert)].double()
    if weighed:
        each = each * weights.double()[routes[: len(expert)].long()].unsqueeze(1)
    wanted = torch.zeros(len(COUNTS), size, dtype=torch.float64, device=DEVICE).index_add(0, expert, each)
    terms = torch.zeros_like(wanted).index_add(0, expert, each.abs())
    assert ((out.double() - wanted).abs() <= STEP * wanted.abs() + 2**-16 * terms).all()


@pytest.mark.parametrize("size", [64, 200])
def test_dots_with_the_experts_bias(size):
    rows, ends, expert, routes, out = sorted_rows(size)
    bias = torch.randn(len(COUNTS), size, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    before = out.double()
    add_dots(rows, bias, routes, out, ends)
    products = bias.double()[expert] * rows[: len(expert)].double()
    at = routes[: len(expert)].long()
    wanted = before.index_add(0, at, products.sum(1))
    terms = before.abs().index_add(0, at, products.abs().sum(1))
    assert ((out.double() - wanted).abs() <= 2**-16 * terms).all()
    untouched = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    untouched[at] = False
    assert torch.equal(out[untouched], before.float()[untouched])


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_clamped", "relu2"])
def test_derivatives_of_an_activation(activation, weighed):
    """Derivatives are right, also where gate and up are clamped from above and from below."""
    activation, size, limit = Activation(activation), 72, 1.0
    config = MoEConfig(
        num_experts=5, top_k=1, hidden_size=8, intermediate_size=size, activation=activation, activation_alpha=1.7,
        activation_limit=limit,
    )  # fmt: skip
    given, ends, _, routes, weights = sorted_rows(size)
    count, generator = len(given) - 2, torch.Generator().manual_seed(3)
    h = torch.randn(count, size * (2 if activation.gated else 1), generator=generator).mul(1.5).bfloat16().to(DEVICE)
    at, x = routes[:count].long(), h.double().requires_grad_()
    value = activate(x, config)
    factor = weights.double()[at].unsqueeze(1) if weighed else torch.ones(count, 1, dtype=torch.float64, device=DEVICE)
    (slope,) = torch.autograd.grad(value, x, factor * given[:count].double())
    dots, wanted = (value * given[:count].double()).sum(1), (factor * value).detach()
    terms = (value * given[:count].double()).abs().sum(1)
    grad, grad_h, out = given[:count].clone(), torch.full_like(h, torch.nan), torch.zeros_like(weights)
    differentiate(
        h, grad, routes, weights if weighed else None, ends, activation, 1.7, limit, grad_weights=out, weighted=grad,
        grad_h=grad_h,
    )  # fmt: skip
    small = 2**-16  # error of float32 functions where a result is the difference of larger numbers
    assert ((grad.double() - wanted).abs() <= STEP * wanted.abs() + small * 8).all()
    assert ((grad_h.double() - slope).abs() <= STEP * slope.abs() + small * 8).all()
    assert ((out.double()[at] - dots).abs() <= 2**-16 * terms).all()


@pytest.mark.parametrize(("activation", "size"), [("swiglu", 1032), ("relu2", 72)])
def test_rows_rounded_beside_the_activation_have_the_bits_of_rounded_rows(activation, size):
    """Rows rounded by the activation kernel have the bits of rows rounded afterwards, in forward and backward.

    Rows after the count are not written.
    """
    activation, count = Activation(activation), 9
    given, _, _, routes, weights = sorted_rows(size)
    given, ends, form = given[: count + 2], torch.tensor([4, 4, count], device=DEVICE).int(), (activation, 1.7, 1.0)
    width = size * (2 if activation.gated else 1)
    h = torch.randn(len(given), width, generator=torch.Generator().manual_seed(4)).bfloat16().to(DEVICE)
    act = torch.zeros_like(given)
    activate_rows(h, act, ends[-1:], *form)
    found = Float8Rows(*(tensor.zero_() for tensor in Float8Rows.empty(h, len(h), size)))
    activate_rows(h, found, ends[-1:], *form)
    assert_rounded(found, act, count)
    plain, dots, grad_h = given.clone(), torch.zeros_like(weights), torch.zeros_like(h)
    differentiate(h, plain, routes, weights, ends, *form, grad_weights=dots, weighted=plain, grad_h=grad_h)
    for keeps in (True, False):
        grad, again, apart = given.clone(), torch.zeros_like(dots), torch.zeros_like(h) if keeps else None
        found = Float8Rows(*(tensor.zero_() for tensor in Float8Rows.empty(h, len(h), width)))
        differentiate(
            h, grad, routes, weights, ends, *form, grad_weights=again, weighted=grad if keeps else None, grad_h=apart,
            rounded=found,
        )  # fmt: skip
        assert_rounded(found, grad_h, count)
        assert torch.allclose(again, dots, rtol=2**-16, atol=2**-16 * size), "another order of summing"
        assert torch.equal(grad[:count], (plain if keeps else given)[:count])
        assert apart is None or torch.equal(apart, grad_h)


def assert_rounded(found: Float8Rows, rows: torch.Tensor, count: int) -> None:
    wanted = Float8Rows.empty(rows, *rows.shape)
    round_rows(rows, *wanted)
    assert torch.equal(found.scale[:count], wanted.scale[:count])
    assert torch.equal(found.numbers[:count].view(torch.uint8), wanted.numbers[:count].view(torch.uint8))
    assert not found.scale[count:].any()
    assert not found.numbers[count:].view(torch.uint8).any()
