"""Test that codes and scales which no scheme writes are refused wherever a user passes them."""

import pytest
import torch

from ep_moe import EPContext, InputError, MoEConfig, MoELayer
from ep_moe.quant.damaged import damaged, damaged_products
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
    """Yield (name, value) for each damage that a tensor can have."""
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


def same_bytes(layer, before):
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8)), name


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
    same_bytes(layer, before)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_zeros_are_whole(quantization):
    """Zeros are valid: with scales of 0, and in new layers."""
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=torch.bfloat16)
    layer.load_state_dict(layer.state_dict())
    zeros = SCHEMES[quantization].quantize({"w13": torch.zeros(256, 256), "w2": torch.zeros(256, 128)}, torch.bfloat16)
    layer.update_expert(0, **zeros)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(before)
    same_bytes(layer, before)


def refused(layer, tensors, match):
    """Assert that `update_expert` and `load_state_dict` refuse the tensors before they write anything."""
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(InputError, match=match):
        layer.update_expert(1, **tensors)
    with pytest.raises(RuntimeError, match=match):
        layer.load_state_dict(before | {f"expert_weights.1.{name}": tensor for name, tensor in tensors.items()})
    same_bytes(layer, before)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_scales_that_lose_codes_are_refused(quantization):
    """A scale of 0 for nonzero codes is refused, because the expert would compute zeros.

    An E8M0 exponent of 0 is valid, and means 2 ** -127.
    """
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=torch.bfloat16)
    whole = expert(quantization)
    layer.update_expert(1, **whole)
    scales = [
        name
        for name, tensor in whole.items()
        if name.endswith("_scale") and "input" not in name and tensor.is_floating_point()
    ]
    for name in scales:
        match = rf"expert 1: {name} must not be 0 for \d+ codes of {name.partition('_')[0]} that are not"
        refused(layer, whole | {name: torch.zeros_like(whole[name])}, match)
    assert bool(scales) == (not quantization.startswith("mxfp"))


@pytest.mark.parametrize("quantization", ["fp8_channel", "fp8_block", "int4", "int4_fp8", "mxint4", "mxint4_fp8"])
def test_a_scale_loses_the_codes_that_it_is_of(quantization):
    """Others are not counted, and a scale of 0 for codes of 0 loses none."""
    scheme, numbers = SCHEMES[quantization], torch.ones(256, 256)
    numbers[:128] = 0.0  # with the first two scales in each format
    numbers[0, :5] = 1.0  # under the first one
    tensors = scheme.quantize({"w13": numbers, "w2": torch.ones(256, 128)}, torch.bfloat16)
    found = []
    for place in (0, 1):
        scale = tensors["w13_scale"].clone()
        scale.view(-1)[place] = 0.0
        found.append(damaged_products("w13", tensors | {"w13_scale": scale}, scheme.weights))
    assert found == ["w13_scale must not be 0 for 5 codes of w13 that are not; quantize the numbers again", None]


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_scales_that_make_codes_infinite_are_refused(quantization):
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=torch.bfloat16)
    whole = expert(quantization)
    layer.update_expert(1, **whole)
    for matrix in ("w13", "w2"):
        name = f"{matrix}_global_scale" if f"{matrix}_global_scale" in whole else f"{matrix}_scale"
        largest = 254 if whole[name].dtype == torch.uint8 else 2.0**127
        match = rf"expert 1: {matrix} times its scales must be finite in float32, and \d+ of \d+ are not"
        refused(layer, whole | {name: torch.full_like(whole[name], largest)}, match)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_has_two_codes_that_are_no_number(code):
    codes = torch.zeros(4, dtype=torch.uint8)
    assert damaged("w13", codes.view(torch.float8_e4m3fn)) is None
    codes[1] = code
    assert "w13" in damaged("w13", codes.view(torch.float8_e4m3fn))
