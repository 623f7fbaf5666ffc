"""What ranks tell each other of their parameters."""

from types import SimpleNamespace

import pytest
import torch

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
