"""Expert kernels of other libraries for `bench.experts` and `bench.layer`, called as their users call them.

No library is a dependency. It is imported when its line is measured, and an import error is reported as the reason why
it is left out. Sizes are those of a rank: L experts, gate rows of w13 first.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ep_moe.config import MoEConfig
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.quant.fp8 import FP8, FP8_BLOCK
from ep_moe.types import Activation

DTYPE = torch.bfloat16
Step = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows [N, H], global ids [N, K], weights [N, K] to [N, H]
TILES = {(1024, 4, 4), (2048, 4, 8), (2048, 8, 8)}  # BLOCK_H, BLOCK_K, warps: a few of SonicMoE's hundreds for its sum


@dataclass(frozen=True)
class RankExperts:
    """The experts of a rank.

    w13: [L, 2 * I, H]; w2: [L, H, I]; both bf16, or E4M3 with a float32 scale for each block of 128 x 128, or 4-bit
        codes with scales (`libraries_4bit`)
    slots: int32 [E], the slot of each expert, -1 for those of other ranks
    w13_bias: [L, 2 * I]; w2_bias: [L, H]; for GPT-OSS's experts
    """

    w13: Tensor
    w2: Tensor
    slots: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        return None if self.w13_scale is None or self.w2_scale is None else (self.w13_scale, self.w2_scale)

    @property
    def codes(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(codes, scales) of w13 and of w2."""
        assert self.scales is not None
        return (self.w13, self.scales[0]), (self.w2, self.scales[1])


def require_plain_swiglu(config: MoEConfig, who: str) -> None:
    """Raise ConfigError for experts with another activation than SwiGLU, or with biases: peers are not run on these."""
    if config.activation is not Activation.SWIGLU or config.expert_bias:
        raise ConfigError(f"{who}: called for experts of SwiGLU without biases; name another model")


def imported(name: str) -> Any:
    """Import a module of a library. Raise BackendUnavailable, with the reason, if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailable(
            f"{name} cannot be imported ({error}); put the library and what it needs on PYTHONPATH"
        ) from error


# --- Triton's fused_moe, which vLLM and SGLang run on Hopper by default ---------------------------------------------


def vllm(rank_experts: RankExperts) -> Step:
    """Return the call of vLLM's `fused_experts`, which sorts, multiplies twice and sums."""
    fused = imported("vllm.model_executor.layers.fused_moe.fused_moe").fused_experts
    how: dict[str, Any] = {"global_num_experts": len(rank_experts.slots), "expert_map": rank_experts.slots}
    if rank_experts.scales is not None:
        scales: dict[str, Any] = dict(zip(("w1_scale", "w2_scale"), rank_experts.scales, strict=True))
        scales["block_shape"] = [FP8_BLOCK, FP8_BLOCK]
        if "quant_config" in inspect.signature(fused).parameters:
            configs = imported("vllm.model_executor.layers.fused_moe.config")
            how["quant_config"] = configs.fp8_w8a8_moe_quant_config(**scales)
        else:  # before 0.11
            how |= scales | {"use_fp8_w8a8": True}

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = fused(x, rank_experts.w13, rank_experts.w2, weights, ids, **how)
        return out

    return call


def sglang(rank_experts: RankExperts) -> Step:
    """Return the call of SGLang's `fused_experts`. As from its dispatcher, ids are this rank's slots, -1 for others."""
    fused = imported("sglang.srt.layers.moe.fused_moe_triton.fused_moe").fused_experts
    routed = imported("sglang.srt.layers.moe.topk").StandardTopKOutput
    settings = imported("sglang.srt.layers.moe.moe_runner").MoeRunnerConfig(
        num_experts=len(rank_experts.slots), num_local_experts=len(rank_experts.w2), activation="silu", inplace=False
    )
    server = imported("sglang.srt.server_args")
    if hasattr(server, "set_global_server_args_for_scheduler"):  # its kernels look options up there
        server.set_global_server_args_for_scheduler(server.ServerArgs(model_path="dummy"))
    how: dict[str, Any] = {}
    if rank_experts.scales is not None:
        how = {"use_fp8_w8a8": True, "block_shape": [FP8_BLOCK, FP8_BLOCK]}
        how |= dict(zip(("w1_scale", "w2_scale"), rank_experts.scales, strict=True))

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = fused(
            x, rank_experts.w13, rank_experts.w2, routed(weights, rank_experts.slots[ids.long()], None), settings, **how
        )
        return out

    return call


FUSED_MOE: dict[str, Callable[[RankExperts], Step]] = {"vLLM": vllm, "SGLang": sglang}


# --- DeepGEMM -------------------------------------------------------------------------------------------------------


def deepgemm_products(rank_experts: RankExperts, ids: Tensor) -> Callable[[], Any]:
    """Return the call of DeepGEMM's contiguous grouped GEMM for both matrices, and nothing else.

    Rows are not gathered, activated, rounded or summed, which favors it. ids: int [N, K], global
    """
    library = imported("deep_gemm")
    slot = rank_experts.slots[ids.long()].flatten()
    counts = torch.bincount(slot[slot >= 0].long(), minlength=len(rank_experts.w2)).tolist()
    step, parts = library.get_mk_alignment_for_contiguous_layout(), []
    for expert, count in enumerate(counts):  # each expert's rows, padded to the alignment
        padding = -count % step
        parts.append(torch.tensor([expert] * count + [-1] * padding, dtype=torch.int32, device=ids.device))
    experts = torch.cat(parts)

    def operands(w: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        n, k = w.shape[1:]
        rows = torch.randn(len(experts), k, device=w.device).to(FP8)
        scale = library.get_mn_major_tma_aligned_tensor(torch.ones(len(experts), k // FP8_BLOCK, device=w.device))
        return (rows, scale), torch.empty(len(experts), n, dtype=DTYPE, device=w.device)

    products = [(*operands(codes[0]), codes) for codes in rank_experts.codes]

    def call() -> None:
        for rows, out, codes in products:
            library.m_grouped_fp8_gemm_nt_contiguous(rows, codes, out, experts)

    return call


def deepgemm_mega(rank_experts: RankExperts, config: MoEConfig, group: Any, tokens: int) -> Step:
    """Return the call of DeepGEMM's fused layer for Hopper, with the kernel that rounds rows into its buffer.

    tokens: the most tokens of a call
    """
    library = imported("deep_gemm")
    first, second = library.transform_weights_for_mega_moe_sm90(*rank_experts.codes)
    sizes = (tokens, config.top_k, config.hidden_size, config.intermediate_size)
    buffer = library.get_symm_buffer_for_mega_moe(group, len(rank_experts.slots), *sizes)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, places = torch.empty_like(x), (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        library.mega_moe_pre_dispatch_sm90(x, ids, weights, *places, num_tokens=len(x), group_size=FP8_BLOCK)
        recipe = (FP8_BLOCK, FP8_BLOCK, FP8_BLOCK)
        library.fp8_mega_moe(out, first, second, buffer, recipe=recipe, activation="swiglu", fast_math=True)
        return out

    return call


# --- SonicMoE -------------------------------------------------------------------------------------------------------


def sonic(rank_experts: RankExperts, ids: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the call of SonicMoE's forward on routes listed beforehand. Tiles are defaults: tuning takes minutes."""
    functional, kinds = imported("sonicmoe.functional"), imported("sonicmoe.enums").ActivationType
    default_tiles(rank_experts.w2.device)
    slot = rank_experts.slots[ids.long()]
    token, column = (slot >= 0).nonzero(as_tuple=True)  # tokens ascend
    routes = (weights[token, column].contiguous(), token.int(), slot[token, column].contiguous())
    w13, w2 = interleaved(rank_experts.w13).permute(1, 2, 0), rank_experts.w2.permute(1, 2, 0)

    def call(x: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        found = functional.moe_general_routing_inputs(
            x, *routes, w13, None, w2, None, len(rank_experts.w2), stream, kinds.SWIGLU, True
        )  # fmt: skip
        out: Tensor = found[0]
        return out

    return call


def interleaved(w13: Tensor) -> Tensor:
    """Return w13 [L, 2 * I, H], given with gate first, with the rows of gate and up interleaved."""
    return torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)


def default_tiles(device: torch.device) -> None:
    """Restrict SonicMoE to the tiles that its GEMMs use untuned, and to `TILES` for its sum."""
    gemms, tuning = imported("quack.gemm_interface"), imported("quack.autotuner")
    for tuner in vars(gemms).values():
        if isinstance(tuner, tuning.Autotuner):
            tuner.configs = [tuning.AutotuneConfig(config=gemms.default_config(device))]
    total = imported("sonicmoe.functional.reduction_over_k_gather").token_gather_sum_kernel
    few = [one for one in total.configs if (one.kwargs["BLOCK_H"], one.kwargs["BLOCK_K"], one.num_warps) in TILES]
    total.configs = few or total.configs


# --- transformers ---------------------------------------------------------------------------------------------------


def transformers_all_to_all(w13: nn.Parameter, w2: nn.Parameter, config: MoEConfig, device: torch.device) -> Step:
    """Return the call of transformers' experts over its `all_to_all`, for forward and backward. Collective.

    It sends a row for each route, and the host reads their numbers. The EP group is all ranks.
    """
    modeling = imported("transformers.models.qwen3_moe.modeling_qwen3_moe")
    parallel = imported("transformers.distributed.expert_parallel")
    settings = imported("transformers").Qwen3MoeConfig(
        hidden_size=config.hidden_size, moe_intermediate_size=config.intermediate_size, num_experts=len(w2),
        num_experts_per_tok=config.top_k, hidden_act="silu", num_hidden_layers=1,
    )  # fmt: skip
    settings._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = modeling.Qwen3MoeExperts(settings)
    experts.gate_up_proj, experts.down_proj = w13, w2
    experts._is_expert_parallel = True
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    how = {"tp_mesh": mesh["tp"], "ep_implementation": "all_to_all"}
    parallel.EpDispatchExpertsParallel().install_forward(experts, mesh["ep"], **how)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = experts(x, ids.long(), weights)
        return out

    return call
