"""Test expert weights that are lent for a call."""

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig
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
