"""`flashinfer_trtllm_monolithic`: FlashInfer's TRTLLM kernels that include routing, from the router's logits. One EP
rank.

The kernels support four of this project's routing methods, under the names of FlashInfer's `RoutingMethodType`. They
choose the same experts as `ep_moe.router`, and round routing weights to bf16. DeepSeekV3 takes logits in float32, all
other methods in bf16 (flashinfer-ai/flashinfer#2469). The correction bias is float32, which the launcher of 0.7.2
accepts with logits of either dtype. With a bf16 bias the kernels could choose other experts than the router.

Not run on a GPU yet. Tests use an emulation of the kernels, and FlashInfer's own signatures and index tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig, RoutingMethod
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.flashinfer.base import clamp_constants
from ep_moe.experts.flashinfer.trtllm import (
    ACTIVATIONS,
    FlashInferTrtllmExperts,
    largest_call,
    shape_problem,
)
from ep_moe.experts.fused.base import FusedCapabilities, FusedExperts, Routed, RouterLogits
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.types import dtype_name
from ep_moe.weights.layouts.trtllm import Trtllm

# flashinfer.tllm_enums.RoutingMethodType
DEEPSEEK_V3, LLAMA4, RENORMALIZE_NAIVE = 2, 3, 4
RENORMALIZE = trtllm_op.RENORMALIZE
LLAMA4_EXPERTS = 128
NAMES = {DEEPSEEK_V3: "DeepSeekV3", LLAMA4: "Llama4", RENORMALIZE_NAIVE: "RenormalizeNaive", RENORMALIZE: "Renormalize"}

ENTRIES = {scheme: entry.replace("_routed_moe", "_moe") for scheme, entry in trtllm_op.ENTRIES.items()}


class FlashInferTrtllmMonolithic(FusedExperts):
    """FlashInfer's TRTLLM kernels on Blackwell that include routing, from the router's logits. One EP rank."""

    name = "flashinfer_trtllm_monolithic"
    tested_machines = "NOT RUN on a GPU; on CPU over an emulation of FlashInfer's layouts"
    capabilities = FusedCapabilities(
        travels=False,
        routes=True,
        any_map=False,
        static=False,
        schemes=frozenset(ENTRIES),
        activations=frozenset(ACTIVATIONS),
        dtypes=frozenset({torch.bfloat16}),
        biases=True,
        etp=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=False,
        min_compute_capability=(10, 0),
        max_compute_capability=(10, 9),
        tested_capabilities=frozenset(),
    )
    weight_layout = Trtllm
    _clamp: list[Tensor] | None = None

    @classmethod
    def available(cls) -> str | None:
        return FlashInferTrtllmExperts.available()

    @classmethod
    def unsupported_reason(
        cls,
        config: MoEConfig,
        layout: RankLayout,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        *,
        expert_map: ExpertMap | None = None,
        max_tokens: int | None = None,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        rest: dict[str, Any] = {"expert_map": expert_map, "max_tokens": max_tokens, "options": options}
        reason = super().unsupported_reason(config, layout, dtype, scheme, **rest)
        return reason or shape_problem(config, layout.etp, scheme) or routing_problem(config, scheme)

    def compute(self, x: Tensor, routed: Routed) -> Tensor:
        assert isinstance(routed, RouterLogits)
        out, weights, config = torch.empty_like(x), self.weights, self.config
        scheme, slots = weights.scheme.name, weights.num_slots
        stored = {name: weights.get_parameter(name).detach() for name in trtllm_op.scale_names(scheme)}
        input_scale = stored["w13_input_scale"].amax(0) if "w13_input_scale" in stored else None
        if self._clamp is None:
            self._clamp = clamp_constants(config, slots, weights.device)
        matrices = {name: weights.stored_tensors().get(name) for name in ("w13", "w2", "w13_bias", "w2_bias")}
        if not weights.adds_output_bias:
            matrices["w2_bias"] = None
        chunk = min(self.options.chunk_rows, largest_call(config, config.num_experts, weights.etp.size))
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            data, scale = self._rounded(x[part].detach().contiguous(), input_scale)
            given = trtllm_op.arguments(
                scheme,
                routing=routing_arguments(config, routed.logits[part].detach().contiguous(), routed.correction_bias),
                x=data,
                x_scale=scale,
                weights={name: None if tensor is None else tensor.detach() for name, tensor in matrices.items()},
                scales=stored,
                clamp=self._clamp,
                activation=ACTIVATIONS[config.activation],
                inner=config.intermediate_size // weights.etp.size,
                output=out[part],
                on_input=config.routing.weight_on_input,
            )
            trtllm_op.call(ENTRIES[scheme], **given)
        return out

    def _rounded(self, x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scheme = self.weights.scheme.name
        shapes = trtllm_op.row_shapes(scheme, len(x), x.shape[1])
        scratch = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (size, dtype) in shapes.items()}
        return trtllm_op.quantize_rows(x, scheme, input_scale, scratch)

    def _problem(self, x: Tensor, routed: Routed, max_tokens: int | None) -> str | None:
        problem = super()._problem(x, routed, max_tokens)
        if problem is not None or not isinstance(routed, RouterLogits):
            return problem
        method, dtype = routing_method(self.config), routed.logits.dtype
        if dtype == torch.bfloat16 or (dtype == torch.float32 and method == DEEPSEEK_V3):
            return None
        wanted = "bfloat16 or float32" if method == DEEPSEEK_V3 else "bfloat16"
        return f"router logits must be {wanted} for {NAMES[method or 0]}, got {dtype_name(dtype)}"


def routing_method(config: MoEConfig) -> int | None:
    """Return FlashInfer's number of the configured routing method, None for an unsupported method."""
    routing = config.routing
    match routing.method:
        case RoutingMethod.SIGMOID_TOPK if routing.renormalize:
            return DEEPSEEK_V3
        case RoutingMethod.SOFTMAX_TOPK if routing.renormalize:
            return RENORMALIZE_NAIVE
        case RoutingMethod.TOPK_SOFTMAX:
            return RENORMALIZE
        case RoutingMethod.TOPK_SIGMOID if config.top_k == 1:
            return LLAMA4
    return None


def routing_problem(config: MoEConfig, scheme: Scheme) -> str | None:
    """Return why no kernel supports the routing of a layer, or None.

    The limits are those of the launcher and routing kernels of FlashInfer 0.7.2. For weight_on_input: only the
    per-tensor entry can multiply its input by routing weights (`use_routing_scales_on_input`). With Llama4 it always
    does, and with other methods never. The other entries multiply the output, with any method.
    """
    routing, experts, method = config.routing, config.num_experts, routing_method(config)
    if method is None:
        how = f"{routing.method.value} with renormalize={routing.renormalize}, top_k={config.top_k}"
        return f"routing {how} is none of {', '.join(sorted(NAMES.values()))}"
    name = NAMES[method]
    if routing.scaling_factor != 1.0 and method != DEEPSEEK_V3:
        return f"{name} has no scaling factor (scaling_factor={routing.scaling_factor})"
    if routing.float32_logits and method != DEEPSEEK_V3:
        return f"router logits in float32 go with DeepSeekV3 alone, not with {name} (float32_logits=True)"
    on_input = method == LLAMA4 and scheme.name == "fp8_static"
    if routing.weight_on_input != on_input:
        if on_input:
            return "Llama4 with quantization fp8_static needs weight_on_input=True"
        return f"weight_on_input goes with Llama4 and quantization fp8_static, not with {name} and {scheme.name}"
    if experts % 4 or experts <= config.top_k:
        return f"num_experts must be a multiple of 4 and exceed top_k={config.top_k}, got {experts}"
    if method == LLAMA4 and experts > LLAMA4_EXPERTS:
        return f"num_experts must be at most {LLAMA4_EXPERTS} with {name}, got {experts}"
    return _deepseek_problem(config) if method == DEEPSEEK_V3 else None


def _deepseek_problem(config: MoEConfig) -> str | None:
    routing, experts = config.routing, config.num_experts
    groups, top_groups = routing.num_groups, routing.top_groups
    for name, size, most in (
        ("num_experts", experts, 512),
        ("top_k", config.top_k, 8 if experts <= 384 else 22),
        ("num_groups", groups, 8),
        ("top_groups", top_groups, 4),
        ("num_experts / num_groups", experts // groups, 32 if groups > 1 else experts),
    ):
        if size > most:
            return f"{name} must be at most {most} with DeepSeekV3, got {size}"
    if config.top_k >= top_groups * (experts // groups):
        return f"top_k must be less than the {top_groups} x {experts // groups} experts of its groups"
    return None


def routing_arguments(config: MoEConfig, logits: Tensor, correction_bias: Tensor | None) -> dict[str, Any]:
    """Return the routing arguments of an entry; all experts are local. logits: [T, E]; correction_bias: float32 [E]"""
    routing, method = config.routing, routing_method(config)
    deepseek = method == DEEPSEEK_V3
    return {
        "routing_logits": logits.float() if deepseek else logits,
        "routing_bias": correction_bias,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "n_group": routing.num_groups if deepseek else None,
        "topk_group": routing.top_groups if deepseek else None,
        "local_expert_offset": 0,
        "routed_scaling_factor": routing.scaling_factor if deepseek else None,
        "routing_method_type": method,
    }
