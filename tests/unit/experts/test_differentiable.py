"""Test the autograd node of a kernel's own backward."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_moe.experts.differentiable import SavedForBackward, StepGradients, _DifferentiableStep, graph_is_kept


@pytest.mark.parametrize("absent", [False, True])
def test_a_rank_whose_experts_do_not_learn_takes_part_in_the_sums_of_peers(absent):
    """It adds zeros before its backward: peers wait for it in the node after this one."""
    called, x = [], torch.ones(2, 3)
    found = StepGradients(x, None, {"w13": None})

    def gradients(*_):
        called.append("backward")
        return found

    saved = SimpleNamespace(
        begin_backward=lambda *_: ({"w13": False}, absent), gradients=gradients, of_stored=lambda given: given.values(),
        experts=SimpleNamespace(
            weights=SimpleNamespace(gradient_sum=SimpleNamespace(contribute_zeros=lambda: called.append("zeros")))
        ),
    )  # fmt: skip
    ctx = SimpleNamespace(saved=saved, saved_tensors=(), needs_input_grad=())
    assert _DifferentiableStep.backward.__wrapped__(ctx, x) == (None, None, None, None, x, None, None)
    assert called == ["zeros"] * absent + ["backward"]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_tensor_without_a_product_has_a_gradient_of_zeros(wanted):
    stored = {"w13": torch.ones(2, 3), "w2": torch.ones(2)}
    saved = SimpleNamespace(_targets=lambda asked: (dict.fromkeys(stored, wanted), {}))
    products = {"w2": lambda target: target.out.fill_(5)}
    found = SavedForBackward.written(saved, products, stored, dict.fromkeys(stored, wanted))
    if wanted:
        assert (found["w13"].tolist(), found["w2"].tolist()) == ([[0.0] * 3] * 2, [5.0, 5.0])
    else:
        assert found == {"w13": None}


class Asked(torch.autograd.Function):
    """The identity, whose backward appends what `graph_is_kept` returns."""

    @staticmethod
    def forward(ctx, x, answers):
        ctx.answers = answers
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.answers.append(graph_is_kept())
        return grad, None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_graph_is_kept_for_another_backward(reentrant):
    answers, x = [], torch.ones(2, requires_grad=True)

    def call(x):
        if reentrant is None:
            return Asked.apply(x, answers)
        return checkpoint(Asked.apply, x, answers, use_reentrant=reentrant)

    y = call(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    if not reentrant:  # which torch.autograd.grad cannot run through
        torch.autograd.grad(call(x).sum(), x, create_graph=True)
    assert answers == ([False, False] if reentrant else [True, False, True]), "each reentrant one makes its own graph"
    assert graph_is_kept(), "outside of backward nothing may be overwritten"
