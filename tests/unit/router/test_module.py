"""Test which tensors a router has, and on which device."""

import pytest
import torch
from torch import nn

from ep_moe import InputError, MoEConfig, Router, RoutingConfig, RoutingMethod


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_tensors_lie_where_they_are_asked_to(device, wide, dtype):
    """All tensors are on the requested device, in the layer's dtype.

    With float32 logits, weight and bias have at least float32.
    """
    routing = {"bias": RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True, float32_logits=wide)}
    routing["correction"] = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, float32_logits=wide)
    wanted = dtype or torch.get_default_dtype()
    if wide:
        wanted = torch.promote_types(wanted, torch.float32)
    held = {"bias": {"weight": wanted, "bias": wanted}}
    held["correction"] = {"weight": wanted, "e_score_correction_bias": torch.float32}
    for kind, one in routing.items():
        config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, routing=one)
        router = Router(config, device=torch.device(device), dtype=dtype)
        tensors = router.state_dict()
        assert {name: tensor.dtype for name, tensor in tensors.items()} == held[kind]
        assert {tensor.device.type for tensor in tensors.values()} == {device}
        assert all(tensor.shape == ((4, 16) if name == "weight" else (4,)) for name, tensor in tensors.items())
        if device == "cpu":
            assert not any(tensor.any() for name, tensor in tensors.items() if name != "weight")


@pytest.mark.parametrize("name", ["weight", "bias", "e_score_correction_bias"])
@pytest.mark.parametrize("way", ["assigned", "data", "functional_call"])
def test_a_tensor_of_another_shape_is_refused(name, way):
    """A router with fewer rows than experts would send no token to the others, without an error."""
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, bias=True, correction_bias=True)
    router = Router(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, routing=routing))
    x, odd = torch.ones(3, 16), torch.ones(2, 16) if name == "weight" else torch.ones(1)
    given = {}
    if way == "functional_call":
        given = {name: odd}
    elif way == "data":
        getattr(router, name).data = odd
    else:
        setattr(router, name, nn.Parameter(odd) if isinstance(getattr(router, name), nn.Parameter) else odd)
    with pytest.raises(InputError, match=rf"router\.{name} must be \[4.*got \[\d+.*MoEConfig"):
        torch.func.functional_call(router, given, (x,))
