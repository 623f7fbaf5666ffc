"""Heads that a checkpoint does not have."""

import pytest
import torch

from tests.fixtures.checkpoint_files import quiet, tiny_model

pytest.importorskip("transformers")

from ep_moe.integrations.load import draw_head, head_names


def test_a_head_that_is_drawn_is_alike_on_all_ranks_and_leaves_the_random_state():
    quiet()
    model = tiny_model("mixtral")
    drawn = []
    for seed in (1, 2):  # ranks are seeded as they please
        torch.manual_seed(seed)
        wanted = torch.rand(3)
        torch.manual_seed(seed)
        draw_head(model, head_names(model))
        assert torch.equal(torch.rand(3), wanted)
        drawn.append(model.lm_head.weight.clone())
    assert torch.equal(*drawn)
