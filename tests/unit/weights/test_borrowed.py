"""Test expert weights that are lent for a call."""

import pytest
import torch

from ep_moe import ConfigError, ExpertMap, MoEConfig
from ep_moe.weights.borrowed import BorrowedWeights


def test_what_is_lent_ends_with_its_block():
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    weights = BorrowedWeights(config, ExpertMap.linear(2, 1))
    lent = {"w13": torch.ones(2, 8, 4), "w2": torch.ones(2, 4, 4)}
    before = weights.stored_tensors()
    with pytest.raises(KeyError), weights.borrow(lent):
        raise KeyError(weights.stored_tensors() == lent)
    assert weights.stored_tensors() is before


def test_the_dtype_stays_that_of_the_last_loan():
    """The dtype remains that of the last loan, because backward reads it after the call.

    A lender may hold another dtype than it lends.
    """
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    weights = BorrowedWeights(config, ExpertMap.linear(2, 1), dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        with weights.borrow({"w13": torch.ones(2, 8, 4, dtype=dtype), "w2": torch.ones(2, 4, 4, dtype=dtype)}):
            assert weights.dtype == dtype
        assert weights.dtype == dtype


def borrowed():
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    return BorrowedWeights(config, ExpertMap.linear(2, 1))


@pytest.mark.parametrize("learns", [False, True])
def test_what_is_lent_is_what_is_stored(learns):
    weights, lent = borrowed(), {"w13": torch.ones(2, 8, 4), "w2": torch.ones(2, 4, 4, requires_grad=learns)}
    with torch.no_grad(), weights.borrow(lent):
        assert weights.get_parameter("w13") is lent["w13"]
        assert weights.addresses == tuple(tensor.data_ptr() for tensor in lent.values())
        assert weights.any_requires_grad is learns
    assert weights.addresses == ()
    assert not weights.any_requires_grad


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda weights: weights.set_expert_map(ExpertMap.linear(2, 1)), "move between ranks"),
        (lambda weights: weights.update_expert(0, {}), "are written"),
        (lambda weights: weights.state_dict(), "are saved"),
        (lambda weights: weights.load_state_dict({}), "are loaded"),
    ],
    ids=["map", "update", "save", "load"],
)
def test_what_is_lent_is_changed_by_its_owner_alone(call, what):
    with pytest.raises(ConfigError, match=rf"belong to a transformers model and {what} only through it; use the model"):
        call(borrowed())
