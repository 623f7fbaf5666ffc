"""FlashInfer 0.7.2.post1's `CuteDslMoEWrapper` with NVFP4 rows and weights, in plain torch on the CPU.

It takes the tensors that the kernels take and reads scales as they do, from the bare pointer. It imports nothing from
ep_moe. Sources below flashinfer/fused_moe/cute_dsl: fused_moe.py, moe_utils.py, and the two
blackwell/blockscaled_contiguous_*.py (G for the gather kernel, F for the finalize kernel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.emulations.cutlass import FP8, check, check_tensor
from tests.emulations.cutlass_sm100 import e2m1, e4m3, nearest_e2m1, nibbles

SWIGLU, RELU2 = 3, 6
NAMES = {
    "num_experts", "num_local_experts", "local_expert_offset", "top_k", "hidden_size", "intermediate_size",
    "use_cuda_graph", "output_dtype", "device", "activation_type", "swiglu_alpha", "swiglu_beta", "swiglu_limit",
    "use_fused_finalize", "quant_mode",
}  # fmt: skip


def mma_scales(name: str, view: Tensor, experts: int, rows: int, columns: int) -> Tensor:
    """Read scales [E, rows, columns / 16] as numbers from the storage.

    The storage is (experts, row tiles, block tiles, 32, 4, 4).
    """
    tiles, blocks = rows // 128, columns // 16
    block_tiles = -(-blocks // 4)
    shape = (32, 4, tiles, 4, block_tiles, experts)
    strides = (16, 4, block_tiles * 512, 1, 512, tiles * block_tiles * 512)
    check(rows % 128 == 0, f"{name}: {rows} rows leave a tile of 128 half filled (F:2757)")
    check(view.dtype in (torch.uint8, FP8), f"{name} must be bytes, it is {view.dtype}")
    check(tuple(view.shape) == shape, f"{name} must have shape {shape}, it has {tuple(view.shape)}")
    check(view.stride() == strides, f"{name} must have strides {strides}, it has {view.stride()}")
    check(view.data_ptr() % 16 == 0, f"{name} must start at a multiple of 16 bytes")
    storage = torch.as_strided(view, (view.numel(),), (1,)).view(torch.uint8)
    expert = torch.arange(experts).view(-1, 1, 1) * (tiles * block_tiles * 512)
    row, block = torch.arange(rows).view(-1, 1), torch.arange(blocks)
    tile = row // 128 * block_tiles + block // 4
    return e4m3(storage[expert + tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4])


def weight(name: str, data: Tensor, scales: Tensor, experts: int, rows: int, columns: int) -> Tensor:
    check_tensor(name, data, torch.uint8, (experts, rows, columns // 2), aligned=True)
    check(data.data_ptr() % 32 == 0, f"{name} must start at a multiple of 32 bytes")
    values = e2m1(nibbles(data)) * mma_scales(f"{name}_sf", scales, experts, rows, columns).repeat_interleave(16, -1)
    check(bool(values.isfinite().all()), f"{name} has a scale that is no number")
    return values


def quantised(values: Tensor, norm: Tensor) -> Tensor:
    """Quantize float32 sums, which the kernel does not round to bf16 before (G:3095-3210).

    The result is `norm` times too large.
    """
    blocks = values.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) * (1 / 6) * norm).clamp(max=448).to(FP8).float()
    inverse = (norm / scale).clamp(max=torch.finfo(torch.float32).max)
    return (nearest_e2m1(blocks * inverse) * scale).flatten(-2)


class Wrapper:
    """Emulate the constructor and `run`, with the arguments that ep_moe passes."""

    def __init__(self, **arguments: Any) -> None:
        check(arguments.keys() == NAMES, f"arguments {arguments.keys() ^ NAMES}")
        self.a = arguments
        check(arguments["quant_mode"] == "w4a4", "another mode")
        check(arguments["activation_type"] in (SWIGLU, RELU2), f"activation {arguments['activation_type']}")
        check(0 < arguments["top_k"] <= 32 and arguments["num_experts"] <= 2048, "moe_sort has no such tier")
        check(arguments["use_fused_finalize"] or arguments["output_dtype"] == torch.bfloat16, "moe_finalize.py: bf16")

    def run(
        self,
        x: Tensor,
        x_sf: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor,
        w1_weight_sf: Tensor,
        w1_alpha: Tensor,
        fc2_input_scale: Tensor,
        w2_weight: Tensor,
        w2_weight_sf: Tensor,
        w2_alpha: Tensor,
    ) -> Tensor:
        a, ids = self.a, token_selected_experts
        hidden, inner, slots, top_k = a["hidden_size"], a["intermediate_size"], a["num_local_experts"], a["top_k"]
        gated = a["activation_type"] == SWIGLU
        tokens, rows = len(ids), inner * (2 if gated else 1)
        check(tokens > 0, "0 tokens")
        check(hidden % 128 == 0 and rows % 128 == 0 and inner % 64 == 0, f"H {hidden}, I {inner}")
        check_tensor("x", x, torch.uint8, (tokens, hidden // 2), aligned=True)
        check_tensor("x_sf", x_sf, torch.uint8, (tokens, hidden // 16), aligned=True)
        check(x.data_ptr() % 32 == 0, "x must start at a multiple of 32 bytes")
        check_tensor("token_selected_experts", ids, torch.int32, (tokens, top_k))
        check_tensor("token_final_scales", token_final_scales, torch.float32, (tokens, top_k), aligned=True)
        for name, alpha in (("w1_alpha", w1_alpha), ("w2_alpha", w2_alpha)):
            check_tensor(name, alpha, torch.float32, (slots,))
        check_tensor("fc2_input_scale", fc2_input_scale, torch.float32, (1,))  # G:4087 reads one number
        check(bool(((ids >= 0) & (ids < a["num_experts"])).all()), "ids must be those of experts")
        for row in ids.tolist():
            check(len(set(row)) == top_k, f"a token's experts must differ: {row}")
        first = weight("w1_weight", w1_weight, w1_weight_sf, slots, rows, hidden)
        second = weight("w2_weight", w2_weight, w2_weight_sf, slots, hidden, inner)
        values = e2m1(nibbles(x)) * e4m3(x_sf).repeat_interleave(16, -1)
        return self._experts(values, ids - a["local_expert_offset"], token_final_scales, first, second,
                             (w1_alpha, fc2_input_scale, w2_alpha))  # fmt: skip

    def _experts(
        self, rows: Tensor, local: Tensor, weights: Tensor, first: Tensor, second: Tensor, scales: tuple[Tensor, ...]
    ) -> Tensor:
        alpha1, norm, alpha2 = scales
        dtype, (tokens, top_k) = self.a["output_dtype"], local.shape
        routes = torch.zeros(tokens, top_k, second.shape[1])
        for expert in range(len(first)):
            at, route = (local == expert).nonzero(as_tuple=True)
            h = self._activation(rows[at] @ first[expert].T * alpha1[expert])
            routes[at, route] = quantised(h, norm) @ second[expert].T * alpha2[expert]
        mine = (local >= 0) & (local < len(first))
        if self.a["use_fused_finalize"]:  # atomics: each addition rounds
            out = torch.zeros(tokens, second.shape[1], dtype=dtype)
            for k in range(top_k):
                out += torch.where(mine[:, k, None], routes[:, k] * weights[:, k, None], 0.0).to(dtype)
            return out
        rounded = routes.to(dtype).float()
        return torch.where(mine.unsqueeze(2), rounded * weights.unsqueeze(2), 0.0).sum(1).to(dtype)

    def _activation(self, h: Tensor) -> Tensor:
        """Activate (G:2790-3062). Each 128 columns hold 64 columns of up, then the same 64 of gate."""
        if self.a["activation_type"] == RELU2:
            return h.relu().square()
        up, gate = (part.flatten(-2) for part in h.unflatten(-1, (-1, 2, 64)).unbind(-2))
        alpha, beta, limit = (self.a[f"swiglu_{name}"] for name in ("alpha", "beta", "limit"))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
