"""Test layers that replace only the experts: names, calls without rows, masks, and what remains of a module."""

import pytest
import torch

from ep_moe import EPContext
from ep_moe.integrations.find_experts import find_experts
from ep_moe.integrations.generic import replace_experts
from ep_moe.types import TokenMask
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.interface_models import MODELS, interface_model


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


@pytest.fixture
def experts(context):
    """Return the first replaced module of a model in bfloat16."""
    return next(iter(replace_experts(interface_model("olmoe").bfloat16(), context).values()))


def test_a_layer_has_the_name_of_the_module(context):
    """A layer is named after its module. Errors and metrics contain the name."""
    model = interface_model("olmoe")
    names = list(find_experts(model))
    made = replace_experts(model, context)
    assert [one.moe.name for one in made.values()] == names == list(made)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_without_rows_is_one_of_the_layers_dtype(gradients, experts):
    """A call without rows has the layer's dtype, and a backward for rows and weights if the peers' calls have one."""
    given = []
    forward = experts._routed

    def routed(x, routing):
        given.append((x, routing))
        return forward(x, routing)

    experts._routed = routed
    with torch.set_grad_enabled(gradients):
        out = experts.without_rows(gradients=gradients)
    ((x, routing),) = given
    assert (x.shape, x.dtype, out.dtype) == ((0, experts.moe.config.hidden_size), torch.bfloat16, torch.bfloat16)
    assert (x.requires_grad, routing.weights.requires_grad, out.requires_grad) == (gradients,) * 3
    assert experts.calls == 1, "a block's own calls are counted apart from these"


@pytest.mark.parametrize("sent", [False, True])
def test_rows_that_are_no_tokens_are_told_to_the_layer(sent, experts):
    tokens, given = torch.tensor([True, False, True, True, False, True]), []
    experts.masks.of_rows = lambda rows: TokenMask(tokens, sent) if rows == 6 else None
    experts.moe.forward_routed = lambda x, routing, *mask, **how: given.append((mask, how)) or x
    x = torch.zeros(2, 3, 32, dtype=torch.bfloat16)
    ids = torch.zeros(6, 2, dtype=torch.int64)
    experts(x, ids, torch.ones(6, 2))
    (((mask,), how),) = given
    assert torch.equal(mask, tokens.view(2, 3)), "as the rows are"
    assert how == {"send_masked": sent}


@pytest.mark.skipif("jetmoe" not in MODELS, reason="this transformers has another one")
@torch.no_grad()
def test_the_router_and_the_bias_of_a_block_stay(context):
    model = interface_model("jetmoe")
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    name = next(iter(find_experts(model)))
    theirs = model.get_submodule(name)
    assert theirs.bias.abs().max() > 0.01
    wanted = theirs(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    ours = replace_experts(model, context)[name]
    torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=1e-5)
    assert ours.kept.keys() == {"router", "bias"}
