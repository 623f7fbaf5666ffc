"""The reference kernel and the one-rank layer on a GPU against the CPU."""

import pytest
import torch

from ep_moe import Activation, EPContext, MoEConfig, MoELayer, Routing
from tests.helpers import fill, integer_routing, integer_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

# relative rounding of one operation
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _layers(config: MoEConfig, dtype: torch.dtype) -> tuple[MoELayer, MoELayer]:
    torch.manual_seed(0)
    cpu = MoELayer(config, EPContext.local(torch.device("cpu")))
    gpu = MoELayer(config, EPContext.local(torch.device("cuda", 0)), dtype=dtype)
    gpu.load_state_dict(cpu.state_dict())
    # both sides start from the rounded weights, so that only arithmetic differs
    cpu.load_state_dict({name: tensor.float().cpu() for name, tensor in gpu.state_dict().items()})
    return cpu, gpu


@pytest.mark.parametrize("tokens", [1, 7, 255, 256, 257, 4099])
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_layer_on_gpu_equals_cpu(activation, dtype, tokens):
    config = MoEConfig(
        hidden_size=64, intermediate_size=48, num_experts=8, top_k=2, activation=activation, expert_bias=True
    )
    cpu, gpu = _layers(config, dtype)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    routing = integer_routing(tokens, config, seed=tokens)
    with torch.no_grad():
        expected = cpu.forward_routed(x.float(), routing)
        y = gpu.forward_routed(x.cuda(), Routing(routing.ids.cuda(), routing.weights.cuda()))
    # each of the two sums rounds its inputs once to dtype and accumulates H (then I) products in float32; the result
    # is rounded once more. |h| <= H/8 * |x|max and |y| is bounded by its own scale, hence the factor on the maximum
    bound = 16 * EPS[dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(y.float().cpu(), expected, rtol=0, atol=bound)
    without = (routing.ids < 0).all(1)
    assert torch.count_nonzero(y[without.cuda()]) == 0


def test_exact_with_integers_and_repeatable():
    config = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=8, top_k=3, activation=Activation.RELU2)
    cpu = fill(MoELayer(config, EPContext.local(torch.device("cpu"))))
    gpu = fill(MoELayer(config, EPContext.local(torch.device("cuda", 0))))
    x, routing = integer_rows(500, 32, 0), integer_routing(500, config, 0)
    on_gpu = Routing(routing.ids.cuda(), routing.weights.cuda())
    with torch.no_grad():
        expected = cpu.forward_routed(x, routing)
        for _ in range(20):
            torch.testing.assert_close(gpu.forward_routed(x.cuda(), on_gpu).cpu(), expected, rtol=0, atol=0)


def test_gradients_on_gpu_equal_cpu():
    config = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2, activation=Activation.RELU2)
    grads = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        layer = fill(MoELayer(config, EPContext.local(device)))
        x = integer_rows(64, 32, 1).to(device).requires_grad_()
        routing = integer_routing(64, config, 1)
        layer.forward_routed(x, Routing(routing.ids.to(device), routing.weights.to(device))).sum().backward()
        grads.append([x.grad.cpu(), layer.expert_weights.w13.grad.cpu(), layer.expert_weights.w2.grad.cpu()])
    for cpu, gpu in zip(*grads, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=0, atol=0)
