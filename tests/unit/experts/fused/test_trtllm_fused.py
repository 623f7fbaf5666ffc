"""Test `flashinfer_trtllm_monolithic` in a layer, without a GPU. FlashInfer's entries and routing are emulated."""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import BackendUnavailable, EPContext, ExpertMap, MoEConfig, MoELayer, RankLayout
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.errors import InputError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.fused import flashinfer_trtllm as monolithic
from ep_moe.experts.fused.base import RouterLogits
from ep_moe.experts.fused.flashinfer_trtllm import FlashInferTrtllmMonolithic, routing_method
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import choose
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import Activation
from ep_moe.weights.initial import random_expert
from tests.fixtures.trtllm_experts import before_call, emulated  # noqa: F401 (a fixture)

NAME, CPU, BF16 = "flashinfer_trtllm_monolithic", torch.device("cpu"), torch.bfloat16
EXPERTS, TOKENS = 8, 20
DEEPSEEK = RoutingConfig(
    method=RoutingMethod.SIGMOID_TOPK,
    renormalize=True,
    scaling_factor=2.5,
    num_groups=4,
    top_groups=2,
    correction_bias=True,
    float32_logits=True,
)
ROUTING = {
    "DeepSeekV3": DEEPSEEK,
    "DeepSeekV3 without groups": dataclasses.replace(DEEPSEEK, num_groups=1, top_groups=1, float32_logits=False),
    "DeepSeekV3 without bias": dataclasses.replace(DEEPSEEK, correction_bias=False),
    "Renormalize": RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True),
    "RenormalizeNaive": RoutingConfig(method=RoutingMethod.SOFTMAX_TOPK, renormalize=True),
    "Llama4": RoutingConfig(method=RoutingMethod.TOPK_SIGMOID),
}
ON_INPUT = RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, emulated) -> None:
    """Make the kernel available on this CPU, over the emulation."""
    can = dataclasses.replace(
        FlashInferTrtllmMonolithic.capabilities,
        devices=frozenset({"cpu"}),
        min_compute_capability=None,
        max_compute_capability=None,
    )
    monkeypatch.setattr(FlashInferTrtllmMonolithic, "capabilities", can)
    monkeypatch.setattr(FlashInferTrtllmMonolithic, "available", classmethod(lambda cls: None))


def shape(routing: RoutingConfig = DEEPSEEK, scheme: str = "none", **fields) -> MoEConfig:
    sizes = {
        "hidden_size": 512 if scheme == "nvfp4" else 256,
        "intermediate_size": 256 if scheme == "mxint4" else 128,
        "num_experts": EXPERTS,
        "top_k": 1 if routing.method is RoutingMethod.TOPK_SIGMOID else 3,
    }
    return MoEConfig(routing=routing, **sizes | fields)


def build(config: MoEConfig, scheme: str = "none", **options) -> tuple[MoELayer, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    layer = MoELayer(
        config,
        EPContext.local(CPU),
        experts=NAME,
        quantization=scheme,
        dtype=BF16,
        options=ExpertsOptions(**options),
    )
    bias = layer.router.e_score_correction_bias
    if bias is not None:
        bias.uniform_(-0.5, 0.5)
    if layer.router.bias is not None:
        torch.nn.init.normal_(layer.router.bias)
    tensors = [random_expert(config, SCHEMES[scheme], expert, BF16) for expert in range(EXPERTS)]
    for expert, own in enumerate(tensors):
        layer.update_expert(expert, **own)
    return layer.requires_grad_(False), tensors


def ratio(layer: MoELayer, tensors: list[dict[str, Tensor]], tokens: int = TOKENS) -> float:
    """Return the largest error divided by the rounding bound, with the router's own ids and weights."""
    config = layer.config
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(BF16)
    routing = layer.router(x)
    weights, rows = routing.weights, x
    if config.routing.weight_on_input:
        rows, weights = x.float() * weights, torch.ones_like(weights)
    scheme = layer.expert_weights.scheme
    return max_error_ratio(layer(x), *expected_and_limit(config, scheme, tensors, rows, routing.ids, weights, BF16))


# --- what it gives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTING.values(), ids=ROUTING)
def test_every_way_to_route(routing, emulated):
    layer, tensors = build(shape(routing))
    assert layer.choice.all2all == "inside"
    assert ratio(layer, tensors) <= 1
    (call,) = emulated
    name = monolithic.NAMES[call["routing_method_type"]]
    assert name == next(key for key, value in ROUTING.items() if value == routing).split(" ")[0]


@pytest.mark.parametrize("scheme", monolithic.ENTRIES)
def test_every_scheme(scheme):
    routing = ON_INPUT if scheme == "fp8_static" else ROUTING["Renormalize"]
    bias = scheme in trtllm_op.FP4
    assert ratio(*build(shape(routing, scheme, expert_bias=bias), scheme)) <= 1


def test_weights_of_fp8_on_the_output():
    assert ratio(*build(shape(scheme="fp8_static"), "fp8_static")) <= 1


def test_clamped(emulated):
    config = shape(scheme="nvfp4", activation=Activation.SWIGLU_CLAMPED, activation_limit=1.0)
    assert ratio(*build(config, "nvfp4")) <= 1
    assert emulated[-1]["gemm1_clamp_limit"] is not None


def test_no_tokens(emulated):
    layer, _ = build(shape())
    assert layer(torch.empty(0, 256, dtype=BF16)).shape == (0, 256)
    assert not emulated


def test_in_chunks(emulated):
    layer, tensors = build(shape(scheme="mxfp8"), "mxfp8", chunk_rows=7)
    assert ratio(layer, tensors) <= 1
    assert [len(call["output"]) for call in emulated] == [7, 7, 6]


def test_the_correction_bias_goes_in_as_it_is(emulated):
    """The correction bias is passed in float32. In bf16 it would choose other experts than the router does."""
    layer, tensors = build(shape())
    bias = layer.router.e_score_correction_bias
    bias.copy_(1.0 + torch.linspace(0, 0.003, EXPERTS))  # equal numbers in bf16
    layer.router.weight.data.zero_()  # all scores are equal, so only the bias decides
    assert ratio(layer, tensors) <= 1
    assert emulated[-1]["routing_bias"].dtype == torch.float32
    assert bias.to(BF16).unique().numel() < 3


# --- what it would be wrong to hand over ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"routing_bias": None},
        {"routed_scaling_factor": None},
        {"n_group": 1, "topk_group": 1},
        {"topk_group": 4},
        {"routing_method_type": monolithic.RENORMALIZE, "n_group": None, "routing_bias": None}
        | {"routed_scaling_factor": None},
    ],
    ids=str,
)
def test_wrong_routing_is_seen(change, monkeypatch):
    layer, tensors = build(shape())
    assert ratio(layer, tensors) <= 1
    before_call(monkeypatch, lambda given: given.update(change))
    assert ratio(layer, tensors) > 1


@pytest.mark.parametrize("change", [{"local_expert_offset": 1}, {"n_group": None}], ids=str)
def test_routing_that_the_launcher_refuses_is_refused(change, monkeypatch):
    layer, tensors = build(shape())
    before_call(monkeypatch, lambda given: given.update(change))
    with pytest.raises(AssertionError, match=r"expert offset|n_group"):
        ratio(layer, tensors)


def test_a_weight_left_on_the_output_is_seen(monkeypatch):
    layer, tensors = build(shape(ON_INPUT), "fp8_static")
    before_call(monkeypatch, lambda given: given.update(use_routing_scales_on_input=False))
    assert ratio(layer, tensors) > 1


def test_logits_of_the_next_token_are_seen(monkeypatch):
    layer, tensors = build(shape())
    before_call(monkeypatch, lambda given: given.update(routing_logits=given["routing_logits"].roll(1, 0)))
    assert ratio(layer, tensors) > 1


# --- what it refuses ------------------------------------------------------------------------------------------------


def reason(routing: RoutingConfig = DEEPSEEK, *, scheme: str = "none", ep: int = 1, expert_map=None, **fields) -> str:
    config = shape(routing, scheme, **fields)
    layout = RankLayout(world=ep, rank=0, dp=ep, ep=ep)
    why = FlashInferTrtllmMonolithic.unsupported_reason(config, layout, BF16, SCHEMES[scheme], expert_map=expert_map)
    return why or "serves"


@pytest.mark.parametrize(
    ("routing", "fields", "words"),
    [
        (DEEPSEEK, {}, "serves"),
        (ROUTING["Llama4"], {}, "serves"),
        (RoutingConfig(), {}, "routing softmax_topk with renormalize=False, top_k=3 is none of DeepSeekV3, Llama4,"),
        (dataclasses.replace(DEEPSEEK, renormalize=False), {}, "sigmoid_topk with renormalize=False"),
        (ROUTING["Llama4"], {"top_k": 2}, "topk_sigmoid with renormalize=False, top_k=2 is none of"),
        (
            dataclasses.replace(ROUTING["Renormalize"], scaling_factor=2.0),
            {},
            "Renormalize has no scaling factor (scaling_factor=2.0)",
        ),
        (
            dataclasses.replace(ROUTING["Renormalize"], float32_logits=True),
            {},
            "router logits in float32 go with DeepSeekV3 alone, not with Renormalize (float32_logits=True)",
        ),
        (
            RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, weight_on_input=True),
            {"top_k": 1},
            "weight_on_input goes with Llama4 and quantization fp8_static, not with Renormalize and none",
        ),
        (ON_INPUT, {}, "weight_on_input goes with Llama4 and quantization fp8_static, not with Llama4 and none"),
        (ROUTING["Llama4"], {"scheme": "fp8_static"}, "Llama4 with quantization fp8_static needs weight_on_input=True"),
        (ROUTING["Llama4"], {"num_experts": 132}, "num_experts must be at most 128 with Llama4, got 132"),
        (ROUTING["Renormalize"], {"num_experts": 18}, "num_experts must be a multiple of 4 and exceed top_k=3, got 18"),
        (DEEPSEEK, {"num_experts": 1024}, "num_experts must be at most 512 with DeepSeekV3, got 1024"),
        (DEEPSEEK, {"top_k": 9, "num_experts": 128}, "top_k must be at most 8 with DeepSeekV3, got 9"),
        (
            dataclasses.replace(DEEPSEEK, num_groups=16, top_groups=4),
            {"num_experts": 64},
            "num_groups must be at most 8 with DeepSeekV3, got 16",
        ),
        (
            dataclasses.replace(DEEPSEEK, num_groups=8, top_groups=5),
            {"num_experts": 64},
            "top_groups must be at most 4 with DeepSeekV3, got 5",
        ),
        (DEEPSEEK, {"num_experts": 256}, "num_experts / num_groups must be at most 32 with DeepSeekV3, got 64"),
        (DEEPSEEK, {"top_k": 4}, "top_k must be less than the 2 x 2 experts of its groups"),
        (DEEPSEEK, {"ep": 2}, "it has no built-in all2all and needs ep=1, got ep=2"),
        (DEEPSEEK, {"expert_map": ExpertMap.redundant(EXPERTS, 1, 0)}, "serves"),
        (
            DEEPSEEK,
            {"expert_map": ExpertMap.from_ranks([[*reversed(range(EXPERTS))]], EXPERTS)},
            "it supports only the linear expert map without replicas",
        ),
        (DEEPSEEK, {"scheme": "nvfp4", "hidden_size": 768}, "hidden_size must be a multiple of 512"),
        (DEEPSEEK, {"expert_bias": True}, "it has expert biases with quantization nvfp4, mxfp4, mxfp4_mxfp8 alone"),
    ],
)
def test_rules(routing, fields, words):
    assert words in reason(routing, **fields)


def test_the_reason_reaches_the_user():
    with pytest.raises(BackendUnavailable, match="it has no built-in all2all and needs ep=1, got ep=2"):
        choose(shape(), RankLayout(world=2, rank=0, dp=2, ep=2), CPU, BF16, experts=NAME)


def test_a_plan_of_eplb_is_refused():
    layer, _ = build(shape())
    layer.placement.update(ExpertMap.from_ranks([[*reversed(range(EXPERTS))]], EXPERTS))
    with pytest.raises(InputError, match="has a built-in router: call forward, with the expert map of construction"):
        layer(torch.randn(3, 256).to(BF16))


@pytest.mark.parametrize(
    ("routing", "dtype", "words"),
    [
        (DEEPSEEK, torch.float32, None),
        (DEEPSEEK, BF16, None),
        (ROUTING["Renormalize"], BF16, None),
        (ROUTING["Renormalize"], torch.float32, "router logits must be bfloat16 for Renormalize, got float32"),
        (DEEPSEEK, torch.float16, "router logits must be bfloat16 or float32 for DeepSeekV3, got float16"),
    ],
)
def test_dtypes_of_logits(routing, dtype, words, emulated):
    layer, _ = build(shape(routing))
    x, logits = torch.randn(3, 256).to(BF16), torch.randn(3, EXPERTS).to(dtype)
    routed = RouterLogits(logits, layer.router.e_score_correction_bias)
    if words is not None:
        with pytest.raises(InputError, match=words):
            layer.experts(x, routed)
        return
    layer.experts(x, routed)
    assert emulated[-1]["routing_logits"].dtype == (torch.float32 if routing is DEEPSEEK else BF16)


def test_methods():
    found = {name: monolithic.NAMES[routing_method(shape(routing))] for name, routing in ROUTING.items()}
    assert found == {name: name.split(" ")[0] for name in ROUTING}
