"""What ranks tell each other of their parameters."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.training import parameters
from ep_moe.training.parameters import _first_text


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([None, "w of an \u00e9xpert", "a longer text than that"], "w of an \u00e9xpert"),
        (["a longer text than that", "w"], "a longer text than that"),
        ([None, ""], None),
    ],
)
def test_a_text_is_that_of_the_first_rank_that_has_one(texts, wanted):
    """On all ranks, and whole."""
    for rank, own in enumerate(texts):
        codes = [list((text or "").encode()) for text in texts]
        rows = (
            [[len(text)] for text in codes],
            [text + [0] * (max(map(len, codes)) - len(text)) for text in codes],
        )
        exchanged = iter(rows)

        def exchange(tensor, rank=rank, exchanged=exchanged):
            found = next(exchanged)
            assert tensor.tolist() == found[rank]
            return found

        assert _first_text(SimpleNamespace(exchange=exchange), own, torch.device("cpu")) == wanted


@pytest.mark.parametrize(
    ("function", "error"),
    [("mesh_problem", ConfigError), ("sparse_problem", ConfigError), ("_difference", InputError)],
)
def test_what_cannot_be_compared_and_what_differs_are_errors_of_their_own(function, error, monkeypatch):
    """A comparison that raised is made again by the next call."""
    with EPContext.local(torch.device("cpu")) as context:
        model = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), context)
        monkeypatch.setattr(parameters, function, lambda *_: "w is wrong")
        for _ in range(2):
            with pytest.raises(error, match=r"^sync_gradients: w is wrong$"):
                parameters.compare_ranks(model, context, "sync_gradients")
        monkeypatch.undo()
        parameters.compare_ranks(model, context, "sync_gradients")
        monkeypatch.setattr(parameters, function, lambda *_: "w is wrong")
        parameters.compare_ranks(model, context, "sync_gradients")  # once is enough
