"""Everything for Blackwell GPUs, on such a GPU, in one command:

python -m pytest tests/gpu/test_blackwell.py tests/gpu/test_flashinfer_quantisers_gpu.py

Each kernel runs through the public contract in each scheme that it offers there, against float64 on the dequantized
weights. A combination that fails here is not supported, whatever the documents say. docs/reference/blackwell.md says
what was run.
"""

from __future__ import annotations

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer, RoutingConfig, registry
from ep_moe.config import RoutingMethod
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import check_experts
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.weights.initial import random_expert

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
FOUND = torch.cuda.get_device_capability()
if FOUND[0] != 10:
    pytest.skip(f"needs a GPU of compute capability 10.x, this one has {FOUND[0]}.{FOUND[1]}", allow_module_level=True)

# the first call may compile FlashInfer's module
pytestmark = [pytest.mark.timeout(7200), pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")]
GPU, SIZE = torch.device("cuda"), 512


def offered() -> list[tuple[str, str]]:
    """Return the (kernel, scheme) pairs that run on this GPU, of FlashInfer's kernels."""
    found = []
    for name in ("flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cutedsl"):
        kind = registry.load("experts", name)
        for scheme in sorted(kind.capabilities.schemes):
            lowest, highest = kind.compute_capability(scheme)
            if lowest <= FOUND <= highest:
                found.append((name, scheme))
    return found


@pytest.mark.parametrize(("name", "scheme"), offered())
def test_the_contract(name, scheme):
    if reason := registry.unsupported_reason("experts", name):
        pytest.skip(reason)
    assert check_experts(registry.load("experts", name), device=GPU, schemes=[scheme], hidden=SIZE, inner=SIZE)


ROUTING = {
    "DeepSeekV3": RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, renormalize=True, correction_bias=True),
    "RenormalizeNaive": RoutingConfig(method=RoutingMethod.SOFTMAX_TOPK, renormalize=True),
    "Renormalize": RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX),
}


@pytest.mark.parametrize("routing", ROUTING.values(), ids=ROUTING)
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "nvfp4"])
def test_routing_inside(scheme, routing):
    """The monolithic kernel, which routes itself, equals the layer's own router with float64 experts."""
    if reason := registry.unsupported_reason("fused", "flashinfer_trtllm_monolithic"):
        pytest.skip(reason)
    config = MoEConfig(hidden_size=SIZE, intermediate_size=SIZE, num_experts=16, top_k=4, routing=routing)
    with EPContext.local(GPU) as context:
        names = {"experts": "flashinfer_trtllm_monolithic", "quantization": scheme, "dtype": torch.bfloat16}
        layer = MoELayer(config, context, **names)
        tensors = [random_expert(config, SCHEMES[scheme], expert, torch.bfloat16, GPU) for expert in range(16)]
        for expert, one in enumerate(tensors):
            layer.update_expert(expert, **one)
        x = torch.randn(33, SIZE, device=GPU, generator=torch.Generator(GPU).manual_seed(0)).bfloat16()
        with torch.no_grad():
            y, routing = layer(x), layer.router(x)
        weights = routing.weights.bfloat16().float()  # rounded as in the kernel
        found = max_error_ratio(
            y, *expected_and_limit(config, SCHEMES[scheme], tensors, x, routing.ids, weights, torch.bfloat16)
        )
        assert found <= 1, f"off by {found:.3g} times what rounding may cause"
