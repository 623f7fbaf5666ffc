"""`ExpertsOptions(exact=True)` on one GPU: a token's bits equal those of the token alone, in any batch, place and
graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, EPContext, ExpertsOptions, MoEConfig, MoELayer, RoutingConfig
from tests.fixtures.helpers import same_bits

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

ROWS = 300
# start and number, around the tile sizes of the GEMMs: 16, 32, 64 and 128 rows
CUTS = [(0, 300), (17, 128), (100, 129), (5, 64), (31, 65), (100, 33), (3, 16), (7, 17), (250, 2)]
CONFIG = MoEConfig(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, shared_intermediate_size=128,
    routing=RoutingConfig(renormalize=True),
)  # fmt: skip
KERNELS = {
    "reference": "none",
    "bf16_triton": "none",
    "fp8_tensor_triton": "fp8_static",
    "fp8_channel_triton": "fp8_channel",
}
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
EACH = [pytest.param(name, marks=() if name == "reference" else HOPPER) for name in KERNELS]


@pytest.fixture
def context():
    with EPContext.local("cuda") as made:
        yield made


def layer_of(context, name, *, exact=True, config=CONFIG):
    torch.manual_seed(0)
    options = ExpertsOptions(exact=exact)
    return MoELayer(
        config, context, experts=name, quantization=KERNELS[name], options=options, dtype=torch.bfloat16
    ).to(context.device)


def rows(context):
    return (
        torch.randn(ROWS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16().to(context.device)
    )


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_clamped", "relu2"])
@torch.no_grad()
def test_any_batch(activation, name, context):
    """Any part of a batch, and its reverse, gives the bits of each token alone.

    Some parts have many rows per expert (75), for the grouped GEMMs, and some have few, for the streaming GEMMs.
    """
    config = dataclasses.replace(CONFIG, activation=Activation(activation))
    layer, x = layer_of(context, name, config=config), rows(context)
    alone = torch.cat([layer(token) for token in x.split(1)])
    assert alone.isfinite().all()
    assert alone.std() > 0
    for start, count in CUTS:
        assert same_bits(layer(x[start : start + count]), alone[start : start + count]), (start, count)
    assert same_bits(layer(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("name", [EACH[0], EACH[1]])
def test_any_batch_backward(name, context):
    layer, x = layer_of(context, name), rows(context)

    def both(part):
        leaf = part.clone().requires_grad_()
        out = layer(leaf)
        return out.detach(), torch.autograd.grad(out, leaf, part.flip(-1))[0]

    outs, gradients = (torch.cat(found) for found in zip(*map(both, x.split(1)), strict=True))
    with torch.no_grad():
        assert same_bits(layer(x), outs), "with and without gradients"
    for start, count in CUTS:
        out, gradient = both(x[start : start + count])
        assert same_bits(out, outs[start : start + count]), (start, count)
        assert same_bits(gradient, gradients[start : start + count]), (start, count)


@pytest.mark.parametrize("name", EACH[1:])
@torch.no_grad()
def test_captured_calls(name, context):
    layer, x = layer_of(context, name), rows(context)
    expected = layer(x[:33])
    layer.capture([64])
    assert same_bits(layer(x[:33]), expected)


@HOPPER
@torch.no_grad()
def test_without_exact_the_bits_differ(context):
    """Without `exact`, some kernel's bits depend on the batch; otherwise the tests above could not fail.

    Some kernels sum a row equally in every batch even without `exact`.
    """
    x, same = rows(context), []
    for name in KERNELS:
        layer = layer_of(context, name, exact=False)
        alone = torch.cat([layer(token) for token in x.split(1)])
        same += [same_bits(layer(x[start : start + count]), alone[start : start + count]) for start, count in CUTS]
    assert not all(same)
