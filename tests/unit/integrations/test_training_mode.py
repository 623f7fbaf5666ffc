"""Test what a model's blocks compute only in training, and the mode of replaced blocks."""

import pytest
import torch

from ep_moe import ConfigError, EPContext
from ep_moe.integrations.blocks import ExpertParallelBlock
from ep_moe.integrations.transformers import expert_parallel
from tests.fixtures.checkpoint_files import FAMILIES, quiet, tiny_model

pytest.importorskip("transformers")
CHANGES = {"mixtral": {"router_jitter_noise": 0.3}}


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def computed(model, ids):
    """Return logits, a gradient, and the random number that comes next."""
    torch.manual_seed(3)  # seed of the noise
    out = model(ids, labels=ids)
    (gradient,) = torch.autograd.grad(out.loss, model.model.embed_tokens.weight)
    return out.logits.detach(), gradient, torch.rand(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_evaluation_are_those_of_the_untouched_model(family, context):
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    changes = CHANGES.get(family, {})
    plain, model = tiny_model(family, **changes), expert_parallel(tiny_model(family, **changes), context)
    assert not any(module.training for module in model.modules()), "as the model that it was made of"
    found = {}
    for training in (False, True):
        found[training] = computed(model.train(training), ids)
        for own, wanted in zip(found[training], computed(plain.train(training), ids), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert torch.equal(found[True][0], found[False][0]) != bool(changes), "noise shows"
    assert any(isinstance(module, ExpertParallelBlock) for module in model.modules())


@pytest.mark.parametrize("attribute", ["gate.jitter_eps", "gate.jitter_noise", "jitter_eps"])
def test_noise_of_another_kind_is_refused(attribute, context):
    """Other kinds of training noise are refused: in the router, or in the block under another name than Mixtral's."""
    model = tiny_model("mixtral")
    where, _, name = attribute.rpartition(".")
    setattr(model.model.layers[0].mlp.get_submodule(where), name, 0.1)
    with pytest.raises(ConfigError, match=rf"layers\.0\.mlp\.{attribute}=0\.1 is noise of training"):
        expert_parallel(model, context)
