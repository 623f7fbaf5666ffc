"""The reference kernel and the layer on a GPU: within the bound that holds on the CPU, and exact on integers."""

import dataclasses

import pytest
import torch

from ep_moe import Activation, EPContext, MoEConfig, MoELayer
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures.experts import bound, experts, local_ids, loop, parameters, received, shape
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GPU = torch.device("cuda", 0)
EXACT = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=8, top_k=3, activation=Activation.RELU2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_equals_a_loop_over_tokens_and_experts(activation, bias, dtype):
    config = shape(activation, bias)
    run, call = experts(config, dtype), received(local_ids("some of them"), dtype)
    p = parameters(run.weights)
    expected = loop(config, p, call.x.double(), call.local_ids, call.weights.double())
    limit = bound(config, p, call, dtype)
    run.weights.to(GPU)
    tensors = {name: getattr(call, name).to(GPU) for name in ("x", "local_ids", "weights")}
    with torch.no_grad():
        y = run(dataclasses.replace(call, **tensors))
    assert y.dtype == dtype
    error = (y.double().cpu() - expected).abs()
    assert (error <= limit).all(), f"{(error / limit.clamp(min=1e-30)).max():.2f} times the bound"


@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_dynamic", "fp8_channel", "fp8_block", "int4"])
def test_weights_have_the_codes_and_scales_of_a_cpu(scheme):
    """Quantizing on a GPU gives the bytes of quantizing on the CPU.

    A server that quantizes weights pushed from a CPU must hold the bytes of one that loaded them on a GPU.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = {name: torch.randn(256, 256, generator=generator) / 50 for name in ("w13", "w2")}
    if SCHEMES[scheme].activations.calibrated:
        numbers |= {name: torch.tensor(0.02) for name in ("w13_input_scale", "w2_input_scale")}
    found = SCHEMES[scheme].quantize({name: tensor.to(GPU) for name, tensor in numbers.items()}, torch.bfloat16)
    for name, wanted in SCHEMES[scheme].quantize(numbers, torch.bfloat16).items():
        assert same_bits(found[name].cpu(), wanted), name


@pytest.mark.parametrize("tokens", [0, 1, 7, 255, 256, 257, 4099])
def test_layer_is_exact_on_integers_and_repeats_its_bits(tokens):
    cpu = fill(MoELayer(EXACT, EPContext.local(torch.device("cpu"))))
    gpu = fill(MoELayer(EXACT, EPContext.local(GPU)))
    x, routing = integer_rows(tokens, 32, 0), integer_routing(tokens, EXACT, 0)
    with torch.no_grad():
        expected = cpu.forward_routed(x, routing)
        for _ in range(20):
            assert_same(gpu.forward_routed(x.to(GPU), moved(routing, GPU)), expected)


def test_gradients_equal_the_cpus():
    grads = []
    for device in (torch.device("cpu"), GPU):
        layer = fill(MoELayer(EXACT, EPContext.local(device)))
        x = integer_rows(64, 32, 1).to(device).requires_grad_()
        layer.forward_routed(x, moved(integer_routing(64, EXACT, 1), device)).sum().backward()
        grads.append([x.grad, *[parameter.grad for parameter in layer.expert_weights.parameters()]])
    for cpu, gpu in zip(*grads, strict=True):
        assert_same(gpu, cpu)
