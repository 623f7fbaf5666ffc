"""Test what ranks exchange about their parameters."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer, training
from ep_moe.training import parameters
from ep_moe.training.parameters import first_text


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([None, "w of an \u00e9xpert", "a longer text than that"], "w of an \u00e9xpert"),
        (["a longer text than that", "w"], "a longer text than that"),
        ([None, ""], None),
    ],
)
def test_a_text_is_that_of_the_first_rank_that_has_one(texts, wanted):
    """All ranks get the whole text of the first rank that has one."""
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

        assert first_text(SimpleNamespace(exchange=exchange), own, torch.device("cpu")) == wanted


@pytest.mark.parametrize(
    ("function", "error"),
    [("mesh_problem", ConfigError), ("sparse_problem", ConfigError), ("_difference", InputError)],
)
def test_what_cannot_be_compared_and_what_differs_are_errors_of_their_own(function, error, monkeypatch):
    """Incomparable parameters and different parameters raise different errors.

    A comparison that raised is repeated in the next call.
    """
    with EPContext.local(torch.device("cpu")) as context:
        model = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), context)
        monkeypatch.setattr(parameters, function, lambda *_: "w is wrong")
        for _ in range(2):
            with pytest.raises(error, match=r"^sync_gradients: w is wrong$"):
                parameters.compare_ranks(model, context, "sync_gradients")
        monkeypatch.undo()
        parameters.compare_ranks(model, context, "sync_gradients")
        monkeypatch.setattr(parameters, function, lambda *_: "w is wrong")
        parameters.compare_ranks(model, context, "sync_gradients")  # after success it is not repeated


@pytest.mark.parametrize("flat", [False, True])
def test_a_model_that_fsdp1_has_flattened_is_refused(flat):
    """Wherever it holds a piece: FSDP1 marks parameters."""
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), context)
        model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16))
        model[1].bias._fsdp_flattened = flat
        for call in (training.sync_gradients, lambda *given: training.clip_grad_norm_(*given, 1.0)):
            with pytest.raises(ConfigError, match="FullyShardedDataParallel") if flat else contextlib.nullcontext():
                call(model, context)


def test_a_pipeline_stage_without_experts_has_nothing_to_remember():
    """However often it is compared."""
    with EPContext.local(torch.device("cpu")) as context:
        for _ in range(2):
            parameters.compare_ranks(torch.nn.Linear(2, 2), context, "sync_gradients")
