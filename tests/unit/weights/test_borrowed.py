"""Expert weights that are lent for a call."""

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
