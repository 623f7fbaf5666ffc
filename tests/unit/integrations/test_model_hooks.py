"""Test hooks on transformers models, and the state after a call that raises."""

from unittest import mock

import pytest
import torch

from ep_moe import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.transformers import expert_parallel, moe_layers
from tests.fixtures.checkpoint_files import quiet, tiny_config, tiny_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_call_that_raises_records_no_logits_of_later_ones(error):
    """torch calls no hooks after an interrupt. The next call then ends the recording."""
    quiet()
    model, ids = tiny_model("mixtral"), torch.arange(6).view(1, 6)
    with EPContext.local(torch.device("cpu")) as context:
        model = expert_parallel(model, context)
        fails = [True]

        def once(*_):
            if fails:
                raise error(fails.pop())

        model.model.norm.register_forward_pre_hook(once)
        with pytest.raises(error):
            model(ids, output_router_logits=True)
        assert any(layer._logit_taps for layer in moe_layers(model)) is (error is KeyboardInterrupt)
        found = model(ids, output_router_logits=True).router_logits
        assert len(found) == len(moe_layers(model))
        assert not any(layer._logit_taps for layer in moe_layers(model))


def test_a_model_that_has_no_such_output_says_so():
    context = EPContext.local(torch.device("cpu"))
    model = expert_parallel(tiny_model("mixtral"), context)
    ids = torch.arange(4).view(1, 4)
    kind = type(model.model)
    with mock.patch.object(kind, "_can_record_outputs", {"hidden_states": None}):
        assert model(input_ids=ids).router_logits is None
        with pytest.raises(
            ConfigError, match=r"MixtralModel of transformers returns no router logits; set it to False"
        ):
            model(input_ids=ids, output_router_logits=True)
    assert tiny_config("mixtral").output_router_logits is False
