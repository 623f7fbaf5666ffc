"""The library functions that `ep_moe.bench.libraries` calls, in plain torch under the libraries' names.

Each computes by its own contract (layouts of weights, ids, scales) from its arguments alone.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

BLOCK = 128


def module(name: str, **members: object) -> ModuleType:
    """Create a module in sys.modules, with its parent packages, and set its members."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        sys.modules.setdefault(path, ModuleType(path))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def wide(codes: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return codes.float()
    return codes.float() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def dense(x: Tensor, w13: Tensor, w2: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Compute experts densely, as float32 [N, H].

    `slots` are the local experts [N, K]; values below 0 or too large mean none.
    """
    out = torch.zeros(len(x), w2.shape[1])
    for slot in range(len(w2)):
        row, column = (slots == slot).nonzero(as_tuple=True)
        gate, up = (x[row].float() @ w13[slot].T).chunk(2, 1)
        out.index_add_(0, row, weights[row, column, None] * ((silu(gate) * up) @ w2[slot].T))
    return out


def vllm(*, quant_config: bool = True) -> None:
    """Install the functions of vLLM. With `quant_config`, they take scales as vLLM does since 0.11."""

    def compute(x, w1, w2, weights, ids, scales, global_num_experts, expert_map):
        assert len(expert_map) == global_num_experts
        assert ids.dtype == torch.int32
        assert int(ids.min()) >= 0, "ids are global"
        first, second, block = scales
        assert first is None or block == [BLOCK, BLOCK]
        y = dense(x, wide(w1, first), wide(w2, second), expert_map[ids.long()], weights)
        return y.to(x.dtype)

    def fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, *, global_num_experts, expert_map, quant_config=None
    ):  # fmt: skip
        scales = (None, None, None) if quant_config is None else quant_config
        return compute(hidden_states, w1, w2, topk_weights, topk_ids, scales, global_num_experts, expert_map)

    def earlier(
        hidden_states, w1, w2, topk_weights, topk_ids, *, global_num_experts, expert_map, use_fp8_w8a8=False,
        w1_scale=None, w2_scale=None, block_shape=None,
    ):  # fmt: skip
        assert use_fp8_w8a8 == (w1_scale is not None)
        scales = (w1_scale, w2_scale, block_shape)
        return compute(hidden_states, w1, w2, topk_weights, topk_ids, scales, global_num_experts, expert_map)

    base = "vllm.model_executor.layers.fused_moe"
    module(f"{base}.fused_moe", fused_experts=fused_experts if quant_config else earlier)
    made = lambda w1_scale, w2_scale, block_shape: (w1_scale, w2_scale, block_shape)  # noqa: E731
    module(f"{base}.config", fp8_w8a8_moe_quant_config=made)


def sglang() -> None:
    def fused_experts(
        hidden_states, w1, w2, topk_output, moe_runner_config, *, use_fp8_w8a8=False, w1_scale=None, w2_scale=None,
        block_shape=None,
    ):  # fmt: skip
        assert published == ["dummy"], "its options are looked up"
        weights, ids, _ = topk_output
        assert moe_runner_config.num_local_experts == len(w2) < moe_runner_config.num_experts
        assert int(ids.max()) < len(w2), "ids are of slots"
        assert (use_fp8_w8a8, block_shape) == ((False, None) if w1_scale is None else (True, [BLOCK, BLOCK]))
        y = dense(hidden_states, wide(w1, w1_scale), wide(w2, w2_scale), ids, weights)
        return y.to(hidden_states.dtype)

    published: list[str] = []
    moe = "sglang.srt.layers.moe"
    module(f"{moe}.fused_moe_triton.fused_moe", fused_experts=fused_experts)
    module(f"{moe}.topk", StandardTopKOutput=lambda weights, ids, logits: (weights, ids, logits))
    module(f"{moe}.moe_runner", MoeRunnerConfig=SimpleNamespace)

    def publish(args):
        published[:] = [args.model_path]

    module("sglang.srt.server_args", ServerArgs=SimpleNamespace, set_global_server_args_for_scheduler=publish)


def sonic() -> None:
    class Autotuner:
        configs = ("many", "configs")

    def moe_general_routing_inputs(x, scores, token, expert, w1, b1, w2, b2, experts, stream, kind, inference):
        assert (b1, b2, kind, inference) == (None, None, "swiglu", True)
        assert [own.dtype for own in (scores, token, expert)] == [torch.float32, torch.int32, torch.int32]
        assert bool((token.diff() >= 0).all()), "tokens ascend"
        assert experts == w2.shape[2]
        assert tuner.configs == ["the default"], "tuning takes minutes"
        out = torch.zeros_like(x, dtype=torch.float32)
        for row, slot, score in zip(token.tolist(), expert.tolist(), scores, strict=True):
            both = w1[:, :, slot].float() @ x[row].float()
            out[row] += score * (w2[:, :, slot].float() @ (silu(both[0::2]) * both[1::2]))
        return out.to(x.dtype), None

    def metadata(ids, experts, counts, ends, source, sorted_at, pair_at):
        assert ids.dtype == torch.int32
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        counts.copy_(flat.bincount(minlength=experts))
        ends.copy_(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        source.copy_(order // ids.shape[1])
        sorted_at.copy_(order)
        pair_at[order] = torch.arange(len(order), dtype=torch.int32)

    def up(x, w1, b1, ends, pairs, top_k, source, sorted_at, pair_at, offsets, varies, kind, inference, concat):
        assert (b1, offsets, varies, kind, inference, concat) == (None, None, False, "swiglu", False, False)
        assert (pairs, w1.stride(1)) == (len(source), 1), "rows of gate and up are contiguous"
        rows = x[source.long()]
        parts = [rows[ends[e] : ends[e + 1]] @ w1[:, :, e].T for e in range(w1.shape[2])]
        h = torch.cat(parts)
        return (silu(h[:, 0::2]) * h[:, 1::2]).detach(), h

    def down(act, h, w2, b2, scores, ends, tokens, top_k, source, sorted_at, pair_at, offsets, varies, kind):
        assert (b2, offsets, varies, kind) == (None, None, False, "swiglu")
        again = silu(h[:, 0::2]) * h[:, 1::2]  # gradients flow through h only
        assert torch.equal(act, again)
        y = torch.cat([again[ends[e] : ends[e + 1]] @ w2[:, :, e].T for e in range(w2.shape[2])])
        return (y[pair_at.long()].unflatten(0, (tokens, top_k)) * scores.unsqueeze(2)).sum(1).to(y.dtype)

    tuner = Autotuner()
    module(
        "sonicmoe.functional",
        moe_general_routing_inputs=moe_general_routing_inputs,
        TC_topk_router_metadata_triton=metadata,
        _UpProjection=SimpleNamespace(apply=up),
        _DownProjection=SimpleNamespace(apply=down),
    )
    config = lambda h, k, warps: SimpleNamespace(kwargs={"BLOCK_H": h, "BLOCK_K": k}, num_warps=warps)  # noqa: E731
    total = SimpleNamespace(configs=[config(1024, 4, 4), config(512, 64, 16)])
    module("sonicmoe.functional.reduction_over_k_gather", token_gather_sum_kernel=total)
    module("sonicmoe.enums", ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    module("quack.gemm_interface", tuned=tuner, default_config=lambda device: "the default")
    module("quack.autotuner", Autotuner=Autotuner, AutotuneConfig=lambda config: config)


def deepgemm() -> list[tuple[Tensor, Tensor]]:
    """Install the functions of DeepGEMM.

    Returns a list of each grouped GEMM so far: the experts of its rows, and its weights.
    """
    products: list[tuple[Tensor, Tensor]] = []

    def m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout):
        (rows, scale), (codes, of_codes) = a, b
        assert len(rows) == len(scale) == len(d) == len(layout)
        assert len(rows) % 128 == 0
        for expert in layout.unique().tolist():
            if expert >= 0:
                d[layout == expert] = (rows[layout == expert].float() @ wide(codes, of_codes)[expert].T).to(d.dtype)
        products.append((layout, codes))

    class Buffer:
        def __init__(self, group, experts, tokens, top_k, hidden, inner):
            self.group, self.experts, self.tokens, self.inner = group, experts, tokens, inner
            self.x, self.x_sf = torch.zeros(tokens, hidden), torch.zeros(tokens, hidden // BLOCK)
            self.topk_idx, self.topk_weights = torch.full((tokens, top_k), -1), torch.zeros(tokens, top_k)

    def mega_moe_pre_dispatch_sm90(x, ids, weights, to, to_scale, to_ids, to_weights, *, num_tokens, group_size):
        assert (ids.dtype, weights.dtype, group_size) == (torch.int32, torch.float32, BLOCK)
        to[:num_tokens], to_ids[:num_tokens], to_weights[:num_tokens] = x.float(), ids.long(), weights

    def fp8_mega_moe(y, first, second, buffer, *, recipe, activation, fast_math):
        assert (recipe, activation, fast_math) == ((128, 128, 128), "swiglu", True)
        ranks, rank = dist.get_world_size(buffer.group), dist.get_rank(buffer.group)
        whole = []
        for own in (buffer.x, buffer.topk_idx, buffer.topk_weights):
            parts = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(parts, own, group=buffer.group)
            whole.append(torch.cat(parts))
        (w13, w13_scale), (w2, w2_scale) = first, second
        w13 = torch.cat(w13.unflatten(1, (-1, 2, 8)).unbind(2), 1).flatten(1, 2)  # 8 rows of gate, 8 of up
        held = len(w2)
        assert held * ranks == buffer.experts
        out = dense(whole[0], wide(w13, w13_scale), wide(w2, w2_scale), whole[1] - rank * held, whole[2])
        dist.all_reduce(out, group=buffer.group)
        y.copy_(out[rank * buffer.tokens :][: len(y)])

    def transform_weights_for_mega_moe_sm90(first, second):
        gate, up = (half.unflatten(1, (-1, 8)) for half in first[0].chunk(2, 1))
        return (torch.stack([gate, up], 2).flatten(1, 3), first[1]), second

    module(
        "deep_gemm",
        m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: 128,
        get_mn_major_tma_aligned_tensor=lambda scale: scale,
        get_symm_buffer_for_mega_moe=Buffer,
        mega_moe_pre_dispatch_sm90=mega_moe_pre_dispatch_sm90,
        fp8_mega_moe=fp8_mega_moe,
        transform_weights_for_mega_moe_sm90=transform_weights_for_mega_moe_sm90,
    )
    return products
