"""Test a layer under `torch.autocast`: dtypes in and out are those of `nn.Linear`, and it computes in its own dtype."""

import pytest
import torch

from ep_moe import InputError, MoELayer, Routing, RoutingConfig
from ep_moe.training import router_logits
from tests.fixtures.helpers import fill
from tests.fixtures.single_layer import context, shape  # noqa: F401  (a fixture)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def made(context, dtype, **fields) -> MoELayer:  # noqa: F811
    config = shape(shared_intermediate_size=12, **fields)
    return fill(MoELayer(config, context, dtype=dtype))


def rows(dtype=F32) -> torch.Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(3)).to(BF16).to(dtype)


def given(layer: MoELayer, dtype=F32) -> Routing:
    ids = torch.tensor([[0, 1], [2, -1], [5, 3], [4, 0], [1, 2]])
    return Routing(ids, torch.full(ids.shape, 0.5, dtype=dtype))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("cast", [BF16, F16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("of_x", [F32, BF16, F16])
def test_dtypes_of_a_linear_and_numbers_of_the_layer(of_x, dtype, cast, routed, context):  # noqa: F811
    layer, linear = made(context, dtype), torch.nn.Linear(16, 16, dtype=dtype)

    def call(x, weights):
        return layer.forward_routed(x, Routing(given(layer).ids, weights)) if routed else layer(x)

    inside = rows(of_x).to(dtype).requires_grad_()
    want = call(inside, given(layer).weights)
    want.to(cast).float().sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()

    x, weights = rows(of_x).requires_grad_(), given(layer, cast).weights  # a model's own router runs under autocast
    with torch.autocast("cpu", dtype=cast):
        y, like = call(x, weights), linear(x)
    assert y.dtype == like.dtype == cast
    assert torch.equal(y, want.to(cast))
    y.float().sum().backward()
    assert x.grad.dtype == of_x
    assert torch.equal(x.grad, inside.grad.to(of_x))
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("float32_logits", [True, False])
def test_the_router_keeps_its_precision(float32_logits, context):  # noqa: F811
    layer = made(context, F32, routing=RoutingConfig(float32_logits=float32_logits))
    seen = []
    layer.router.register_forward_hook(lambda module, args, out: seen.append(out.weights))
    with torch.no_grad():
        layer(rows())
        with torch.autocast("cpu", dtype=BF16):
            layer(rows())
    assert torch.equal(*seen)


def test_logits_that_a_model_gives_are_recorded(context):  # noqa: F811
    layer, logits = made(context, F32), torch.randn(5, 6)
    routing = given(layer, BF16)
    with torch.autocast("cpu", dtype=BF16), router_logits(layer) as recorded:
        layer.forward_routed(rows(), Routing(routing.ids, routing.weights, logits))
    assert [one.tolist() for one in recorded] == [logits.tolist()]


def test_autocast_is_off_for_modules_inside_and_on_again_behind(context):  # noqa: F811
    class Looks(torch.nn.Module):
        def forward(self, x):
            assert not torch.is_autocast_enabled("cpu")
            assert x.dtype == F32
            return x * 0

    layer = MoELayer(shape(), context, shared_experts=Looks(), dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        assert layer(rows(BF16)).dtype == BF16
        assert torch.is_autocast_enabled("cpu")


def test_without_autocast_the_refusal_names_it(context):  # noqa: F811
    layer = made(context, F32)
    with pytest.raises(InputError, match=r"x must be float32 as the layer is, got bfloat16; .*torch.autocast"):
        layer(rows(BF16))
    with pytest.raises(InputError, match=r"got float64$"):
        layer(rows(torch.float64))
    with torch.autocast("cpu", dtype=BF16), pytest.raises(InputError, match=r"got float64$"):
        layer(rows(torch.float64))
    with torch.autocast("cpu", enabled=False), pytest.raises(InputError, match=r"torch.autocast"):
        layer(rows(BF16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_weights_that_autocast_leaves_alone_are_refused_as_without_it(dtype, context):  # noqa: F811
    layer = made(context, F32)
    with torch.autocast("cpu", dtype=BF16), pytest.raises(InputError, match=r"routing\.weights must be float32, got"):
        layer.forward_routed(rows(), given(layer, dtype))
