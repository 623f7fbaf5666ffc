"""Codes and scales that no scheme writes are refused wherever a user gives them."""

import pytest
import torch

from ep_moe import EPContext, InputError, MoEConfig, MoELayer
from ep_moe.quant.schemes import SCHEMES

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=2, top_k=1)
QUANTIZED = [name for name, scheme in SCHEMES.items() if not scheme.plain]


def expert(quantization):
    scheme, generator = SCHEMES[quantization], torch.Generator().manual_seed(0)
    numbers = {"w13": torch.randn(256, 256, generator=generator), "w2": torch.randn(256, 128, generator=generator)}
    found = scheme.quantize(numbers, torch.bfloat16)
    calibrated = {f"{name}_input_scale": torch.tensor(0.1) for name in numbers}
    return found | (calibrated if scheme.activations.calibrated else {})


def damages(tensors):
    """(name, value, what the sentence says of it) of each tensor that can be damaged."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn or (name.endswith("_scale") and tensor.is_floating_point()):
            yield name, float("nan")
        if name.endswith("_scale") and tensor.is_floating_point():
            yield name, -1.0
            if tensor.dtype != torch.float8_e4m3fn:
                yield name, float("inf")
        if name.endswith("_input_scale"):
            yield name, 0.0
        if name.endswith("_scale") and tensor.dtype == torch.uint8:
            yield name, 255


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_damaged_codes_and_scales_are_refused(quantization):
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=torch.bfloat16)
    whole = expert(quantization)
    layer.update_expert(1, **whole)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    found = list(damages(whole))
    assert {name for name, _ in found} >= {"w13_scale", "w2_scale"}
    for name, value in found:
        one = whole[name].float().flatten() if whole[name].is_floating_point() else whole[name].flatten()
        one = torch.cat([one[:-1], one.new_full((1,), value)]).view(whole[name].shape).to(whole[name].dtype)
        with pytest.raises(InputError, match=rf"expert 1: {name} must be .*, and 1 of \d+ are not"):
            layer.update_expert(1, **(whole | {name: one}))
        with pytest.raises(RuntimeError, match=rf"expert 1: {name} must be .*, and 1 of \d+ are not"):
            layer.load_state_dict(before | {f"expert_weights.1.{name}": one})
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_zeros_are_whole(quantization):
    """Scales of 0, and of fresh layers."""
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=torch.bfloat16)
    layer.load_state_dict(layer.state_dict())
    zeros = SCHEMES[quantization].quantize({"w13": torch.zeros(256, 256), "w2": torch.zeros(256, 128)}, torch.bfloat16)
    layer.update_expert(0, **zeros)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(before)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8)), name
