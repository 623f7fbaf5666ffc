"""Test the autograd node of a kernel's own backward."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe.experts.differentiable import SavedForBackward, StepGradients, _DifferentiableStep


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
