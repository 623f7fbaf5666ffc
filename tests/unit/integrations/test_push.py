"""What `load_weights` says of weights for which a model has no place."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from ep_moe import CheckpointError, EPContext
from ep_moe.integrations import push
from ep_moe.integrations.transformers import expert_parallel, export_weights, load_weights
from tests.fixtures.helpers import same_bits
from tests.fixtures.interface_models import interface_model

OTHERS = {"visual.weight": torch.ones(2), "model.layers.0.self_attn.q_proj.bias": torch.ones(3)}


@pytest.mark.parametrize("pairs", [False, True], ids=["a mapping", "pairs"])
@pytest.mark.parametrize("others", [{}, OTHERS], ids=["none", "others"])
def test_what_a_model_has_no_place_for_is_left_out_with_a_warning(others, pairs):
    """All of it, in one warning. The rest is loaded."""
    context = EPContext.local(torch.device("cpu"))
    trainer, server = (expert_parallel(interface_model("olmoe"), context) for _ in range(2))
    with torch.no_grad():
        for parameter in server.parameters():
            parameter.add_(0.25)
    weights = dict(export_weights(trainer))
    given = {name: tensor.clone() for name, tensor in (others | weights).items()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = load_weights(server, iter(given.items()) if pairs else given)
    assert loaded == weights.keys()
    text = " ".join(str(one.message) for one in said)
    assert all(name in text for name in others)
    assert ("is not loaded: OlmoeForCausalLM has no such weights" in text) is bool(others)
    assert len(said) == bool(others)
    found, wanted = server.state_dict(), trainer.state_dict()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


def test_tensors_that_cannot_be_joined_are_named(monkeypatch):
    def join(*_):
        raise RuntimeError("Sizes of tensors must match")

    monkeypatch.setattr(push, "converted", join)
    monkeypatch.setattr(push, "check_dtype", lambda *_: None)
    names = ["q.weight", "k.weight"]
    recipe = SimpleNamespace(target="qk.weight", names=lambda: names, sources={"*": names})
    model = SimpleNamespace(config=None)
    target = SimpleNamespace(_live={"qk.weight": torch.ones(4, 2)}, _model=model)
    words = r"^qk\.weight cannot be made of q\.weight.*k\.weight.*: Sizes of tensors must match$"
    with pytest.raises(CheckpointError, match=words):
        push.ModelTarget._converted(
            target, recipe, push.MemorySource({name: torch.ones(2, 2) for name in names}, "here"), headers=False
        )
