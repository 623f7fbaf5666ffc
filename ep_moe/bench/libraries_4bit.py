"""Kernels of other libraries for 4-bit weights and bf16 rows, for `bench.experts`: Marlin, and OpenAI's
`triton_kernels`.

Both are called as vLLM 0.26 calls them, on the codes and scales of our layers, converted to the libraries' layouts.
Canonical codes are uint8 [L, rows, columns / 2], two to a byte, the even column in the low nibble. Scales are
[L, rows, columns / group], bf16 for INT4 and E8M0 bytes for MXFP4.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ep_moe.bench.libraries import DTYPE, RankExperts, Step, imported, interleaved
from ep_moe.config import MoEConfig
from ep_moe.types import Activation

MARLIN_SCHEMES = ("int4", "mxint4", "mxfp4")
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
UTILS = "vllm.model_executor.layers.quantization.utils"


def is_gpt_oss(config: MoEConfig) -> bool:
    """Return whether experts have what `triton_kernels` fuses: GPT-OSS's activation with its constants, and biases."""
    constants = (config.activation_alpha, config.activation_limit)
    return config.activation is Activation.SWIGLU_CLAMPED and config.expert_bias and constants == (1.702, 7.0)


# --- Marlin, which vLLM runs on Hopper by default ---------------------------------------------------------------------


def marlin(rank_experts: RankExperts, scheme: str) -> Step:
    """Return the call of vLLM's `fused_marlin_moe`, which sorts, multiplies twice and sums.

    Args:
        rank_experts: SwiGLU experts without biases.
        scheme: One of `MARLIN_SCHEMES`.

    Returns:
        The call.

    Raises:
        BackendUnavailable: vLLM cannot be imported.
    """
    fused = imported(f"{FUSED_MOE}.experts.marlin_moe").fused_marlin_moe
    types = imported("vllm.scalar_type").scalar_types
    if scheme == "mxfp4":
        kind, prepare = types.float4_e2m1f, imported(f"{UTILS}.marlin_utils_fp4").prepare_moe_mxfp4_layer_for_marlin
        (w13, w13_scale), (w2, w2_scale) = rank_experts.codes
        layer = SimpleNamespace(params_dtype=DTYPE)  # the only attribute that is read
        w13, w2, w13_scale, w2_scale, _, _ = prepare(layer, w13, w2, w13_scale, w2_scale, None, None)
    else:
        kind = types.uint4b8
        (w13, w13_scale), (w2, w2_scale) = (_marlin_int4(*matrix) for matrix in rank_experts.codes)
    how = {"global_num_experts": len(rank_experts.slots), "expert_map": rank_experts.slots}

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = fused(x, w13, w2, None, None, w13_scale, w2_scale, weights, ids, kind.id, **how)
        return out

    return call


def gptq_codes(codes: Tensor) -> Tensor:
    """Pack canonical INT4 as GPTQ does: code + 8, eight consecutive columns in an int32, the first in the lowest bits.

    Args:
        codes: uint8 [L, rows, columns / 2], two's complement.

    Returns:
        int32 [L, columns / 8, rows].
    """
    return (codes ^ 0x88).view(torch.int32).transpose(1, 2).contiguous()


def _marlin_int4(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert codes and scales as vLLM's oracle `int_wna16` does for GPTQ checkpoints without reordered columns."""
    repack = imported("vllm._custom_ops").gptq_marlin_moe_repack
    permute = imported(f"{UTILS}.marlin_utils").marlin_moe_permute_scales
    experts, rows, columns = len(codes), codes.shape[1], 2 * codes.shape[2]
    in_order = torch.empty(experts, 0, dtype=torch.int32, device=codes.device)
    packed = repack(gptq_codes(codes), in_order, columns, rows, 4)
    return packed, permute(scale.transpose(1, 2).contiguous(), columns, rows, columns // scale.shape[2])


# --- triton_kernels ---------------------------------------------------------------------------------------------------


def triton_kernels(rank_experts: RankExperts) -> Step:
    """Return the call of vLLM's MXFP4 experts over `matmul_ogs`, which compute the routing data and multiply twice.

    GPT-OSS's experts run on `OAITritonExperts`: the first product applies the activation, the second one sums. For
    SwiGLU, vLLM has `UnfusedOAITritonExperts`, with separate kernels for the activation and the sum.

    Args:
        rank_experts: SwiGLU experts, or GPT-OSS's experts if they have biases.

    Returns:
        The call.

    Raises:
        BackendUnavailable: vLLM cannot be imported.
    """
    library = imported(f"{FUSED_MOE}.experts.gpt_oss_triton_kernels_moe")
    activations = imported(f"{FUSED_MOE}.activation").MoEActivation
    matrices, biases = rank_experts.codes, dict[str, Tensor]()
    kind, activation = library.UnfusedOAITritonExperts, activations.SILU
    if rank_experts.w13_bias is not None and rank_experts.w2_bias is not None:
        kind, activation = library.OAITritonExperts, activations.SWIGLUOAI
        matrices = (interleaved(matrices[0][0]), interleaved(matrices[0][1])), matrices[1]
        biases = {"w1_bias": interleaved(rank_experts.w13_bias).float(), "w2_bias": rank_experts.w2_bias.float()}
    (w13, first), (w2, second) = (_swizzled(*matrix) for matrix in matrices)
    configs = imported(f"{FUSED_MOE}.config")
    quantized = configs.mxfp4_w4a16_moe_quant_config(w1_scale=first, w2_scale=second, **biases)
    experts = kind(moe_config=None, quant_config=quantized)  # a call reads nothing of the layer's configuration
    slots, hidden, rows = len(rank_experts.w2), rank_experts.w2.shape[1], rank_experts.w13.shape[1]

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sizes = (len(x), rows, hidden, ids.shape[1], len(rank_experts.slots), slots)
        own13, own2, _ = experts.workspace_shapes(*sizes, None, activation)
        out = torch.empty_like(x)
        experts.apply(
            output=out, hidden_states=x, w1=w13, w2=w2, topk_weights=weights, topk_ids=ids, activation=activation,
            global_num_experts=len(rank_experts.slots), expert_map=rank_experts.slots, a1q_scale=None, a2_scale=None,
            workspace13=x.new_empty(own13), workspace2=x.new_empty(own2), expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    return call


def _swizzled(codes: Tensor, scale: Tensor) -> tuple[Any, Any]:
    """Return the matrix and the precision config with its scales for `matmul_ogs`, as vLLM's oracle `mxfp4` does."""
    swizzle = imported(f"{UTILS}.mxfp4_utils")._swizzle_mxfp4
    matmul = imported("triton_kernels.matmul_ogs")  # vLLM's own copy, which it registers under this name
    matrix, flex, scales = swizzle(codes, scale)
    return matrix, matmul.PrecisionConfig(weight_scale=scales, flex_ctx=matmul.FlexCtx(rhs_data=flex))
