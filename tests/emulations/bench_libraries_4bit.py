"""The functions of vLLM 0.26 that `ep_moe.bench.libraries_4bit` calls, in plain torch.

Layouts of Marlin and of `matmul_ogs` have the real shapes and dtypes, but another order. Tests check the arguments of
the functions that make these layouts, and of the kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.emulations.bench_libraries import dense, module

INT4, MXFP4 = 17, 23  # ids of types
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
UTILS = "vllm.model_executor.layers.quantization.utils"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def gptq(packed: Tensor) -> Tensor:
    """Unpack int32 [L, columns / 8, rows] to codes [L, rows, columns]."""
    codes = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], 2)
    return codes.flatten(1, 2).transpose(1, 2)


def e2m1(codes: Tensor) -> Tensor:
    return torch.where(codes > 7, -1.0, 1.0) * E2M1[(codes & 7).long()]


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply by group scales. `scale` is [L, rows, columns / group]."""
    return values * scale.float().repeat_interleave(values.shape[2] // scale.shape[2], 2)


def marlin() -> None:
    def tiled(packed: Tensor) -> Tensor:
        return packed.flip(2).reshape(len(packed), packed.shape[1] // 2, -1)

    def decoded(tiles: Tensor, scale: Tensor, kind: int) -> Tensor:
        rows = tiles.shape[2] // 2
        assert (tiles.dtype, tiles.is_contiguous()) == (torch.int32, True)
        codes = gptq(tiles.reshape(len(tiles), -1, rows).flip(2))
        assert scale.dtype == (torch.bfloat16 if kind == INT4 else torch.float8_e8m0fnu)
        return scaled(codes - 8.0 if kind == INT4 else e2m1(codes), scale.float().flip(2).transpose(1, 2))

    def gptq_marlin_moe_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
        assert (num_bits, is_a_8bit, b_q_weight.dtype) == (4, False, torch.int32)
        assert b_q_weight.shape == (len(perm), size_k // 8, size_n)
        assert b_q_weight.is_contiguous()
        assert perm.shape[1] == 0, "columns are in order"
        return tiled(b_q_weight)

    def marlin_moe_permute_scales(s, size_k, size_n, group_size, is_a_8bit=False):
        assert s.shape[1:] == (size_k // group_size, size_n)
        return s.flip(2)

    def prepare(layer, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias):
        assert (layer.params_dtype, w13_bias, w2_bias) == (torch.bfloat16, None, None)
        packed = [tiled(w.view(torch.int32).transpose(1, 2).contiguous()) for w in (w13, w2)]
        exponents = [s.transpose(1, 2).flip(2).contiguous().view(torch.float8_e8m0fnu) for s in (w13_scale, w2_scale)]
        return *packed, *exponents, None, None

    def fused_marlin_moe(
        hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids, quant_type_id, *,
        global_num_experts, expert_map,
    ):  # fmt: skip
        assert (bias1, bias2, topk_weights.dtype) == (None, None, torch.float32)
        assert w1.size(1) * 16 == w2.size(2) // 2 == hidden_states.shape[1]
        assert len(expert_map) == global_num_experts
        assert int(topk_ids.min()) >= 0, "ids are global"
        first, second = (decoded(w, s, quant_type_id) for w, s in ((w1, w1_scale), (w2, w2_scale)))
        return dense(hidden_states, first, second, expert_map[topk_ids.long()], topk_weights).to(hidden_states.dtype)

    types = SimpleNamespace(uint4b8=SimpleNamespace(id=INT4), float4_e2m1f=SimpleNamespace(id=MXFP4))
    module("vllm.scalar_type", scalar_types=types)
    module("vllm._custom_ops", gptq_marlin_moe_repack=gptq_marlin_moe_repack)
    module(f"{UTILS}.marlin_utils", marlin_moe_permute_scales=marlin_moe_permute_scales)
    module(f"{UTILS}.marlin_utils_fp4", prepare_moe_mxfp4_layer_for_marlin=prepare)
    module(f"{FUSED_MOE}.experts.marlin_moe", fused_marlin_moe=fused_marlin_moe)


def triton_kernels() -> None:
    def swizzle(quant_tensor, scale):
        return SimpleNamespace(codes=quant_tensor.transpose(1, 2)), "flex", scale.transpose(1, 2)

    def decoded(w: SimpleNamespace, precision: SimpleNamespace) -> Tensor:
        assert precision.flex_ctx.rhs_data == "flex"
        packed = w.codes.transpose(1, 2)
        codes = torch.stack([packed & 15, packed >> 4], 3).flatten(2)
        return scaled(e2m1(codes), precision.weight_scale.transpose(1, 2).contiguous().view(torch.float8_e8m0fnu))

    class Unfused:
        activation, clamped = "silu", False

        def __init__(self, moe_config, quant_config):
            self.quant_config = quant_config

        def workspace_shapes(self, m, n, k, topk, global_num_experts, local_num_experts, meta, activation):
            assert local_num_experts < global_num_experts
            return (m * topk, n // 2), (m * topk, max(n, k)), (m, k)

        def apply(
            self, *, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
            a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        ):  # fmt: skip
            assert (activation, len(expert_map)) == (self.activation, global_num_experts)
            assert (a1q_scale, a2_scale, expert_tokens_meta, apply_router_weight_on_input) == (None, None, None, False)
            assert (workspace13.dtype, workspace2.dtype) == (torch.bfloat16, torch.bfloat16)
            config, slots = self.quant_config, expert_map[topk_ids.long()]
            first, second = decoded(w1, config.w1_scale), decoded(w2, config.w2_scale)
            assert workspace2.numel() >= topk_ids.numel() * second.shape[2]
            if not self.clamped:
                assert (config.w1_bias, config.w2_bias) == (None, None)
                output.copy_(dense(hidden_states, first, second, slots, topk_weights))
                return
            assert (config.w1_bias.dtype, config.w2_bias.dtype) == (torch.float32, torch.float32)
            total = torch.zeros(output.shape)
            for slot in range(len(second)):
                row, column = (slots == slot).nonzero(as_tuple=True)
                both = hidden_states[row].float() @ first[slot].T + config.w1_bias[slot]
                gate, up = both[:, 0::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)  # rows of gate and up in turns
                y = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ second[slot].T + config.w2_bias[slot]
                total.index_add_(0, row, topk_weights[row, column, None] * y)
            output.copy_(total)

    class Fused(Unfused):
        activation, clamped = "swigluoai", True

        def workspace_shapes(self, m, n, k, topk, global_num_experts, local_num_experts, meta, activation):
            return (0, 0), (m * topk, n // 2), (m, k)

    def quantized(w1_scale, w2_scale, w1_bias=None, w2_bias=None):
        return SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias)

    module(f"{UTILS}.mxfp4_utils", _swizzle_mxfp4=swizzle)
    module(f"{FUSED_MOE}.config", mxfp4_w4a16_moe_quant_config=quantized)
    module(f"{FUSED_MOE}.activation", MoEActivation=SimpleNamespace(SILU="silu", SWIGLUOAI="swigluoai"))
    own = {"UnfusedOAITritonExperts": Unfused, "OAITritonExperts": Fused}
    module(f"{FUSED_MOE}.experts.gpt_oss_triton_kernels_moe", **own)
    module("triton_kernels.matmul_ogs", PrecisionConfig=SimpleNamespace, FlexCtx=SimpleNamespace)
