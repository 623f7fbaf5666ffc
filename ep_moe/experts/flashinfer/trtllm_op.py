"""FlashInfer's TRTLLM MoE entries as one torch operator. Only this file calls them.

`arguments` returns the keyword arguments of an entry. tests/unit/experts/flashinfer/test_trtllm_signature.py binds them
against FlashInfer's signatures. Statements about the entries are from FlashInfer 0.7.2: fused_moe/core.py for
arguments, csrc/trtllm_fused_moe_kernel_launcher.cu for shapes and dtypes, RoutingKernel.cuh for ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.flashinfer.call_scales import clean_ids
from ep_moe.quant.fp8 import FP8, round_blocks, to_fp8
from ep_moe.quant.kernels import mxfp8_rows, nvfp4_rows
from ep_moe.quant.microscale import MX_BLOCK, NVFP4_BLOCK
from ep_moe.runtime.torch_operator import operator
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes

# flashinfer.tllm_enums
SWIGLU, RELU2 = 3, 6  # ActivationType
RENORMALIZE = 1  # RoutingMethodType; routed entries use it only for the top-k that it allows
MAJOR_K, BLOCK_MAJOR_K = 0, 2  # WeightLayout
DEEPSEEK_FP8, MXFP8 = 1, 2  # Fp8QuantizationType
LINEAR_SCALES = 2  # SfLayout

ENTRIES = {
    "none": "trtllm_bf16_routed_moe",
    "fp8_static": "trtllm_fp8_per_tensor_scale_routed_moe",
    "fp8_block": "trtllm_fp8_block_scale_routed_moe",
    "mxfp8": "trtllm_fp8_block_scale_routed_moe",
    "nvfp4": "trtllm_fp4_block_scale_routed_moe",
    "mxfp4": "trtllm_fp4_block_scale_routed_moe",
    "mxfp4_mxfp8": "trtllm_fp4_block_scale_routed_moe",
    "mxint4": "trtllm_mxint4_block_scale_routed_moe",
}
# by scheme, the row format that its entry reads besides plain rows
ROWS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "mxfp4_mxfp8": "mxfp8", "fp8_block": "fp8_block"}
FP4 = tuple(scheme for scheme, entry in ENTRIES.items() if "fp4" in entry)


def scale_names(scheme: str) -> tuple[str, ...]:
    """Return the names of the stored tensors that the operator takes as `scales`."""
    weights = ("w13_scale", "w2_scale")
    inputs = ("w13_input_scale", "w2_input_scale")
    return {
        "none": (),
        "fp8_static": (*weights, *inputs),
        "nvfp4": (*weights, "w13_global_scale", "w2_global_scale", *inputs),
    }.get(scheme, weights)


# --- routing ---------------------------------------------------------------------------------------------------------


def expert_count(slots: int, top_k: int) -> int:
    """Return `num_experts` of a call with `slots` local experts.

    It leaves at least one id for no local expert, exceeds top_k, and is a multiple of 4
    (`Fp8BlockScaleLauncher::check_routing`).
    """
    return -(-max(slots + 1, top_k + 1) // 4) * 4


def pack(ids: Tensor, weights: Tensor | None, slots: int, out: Tensor) -> None:
    """Pack ids and weights for the routed entries: `(id << 16) | bits of the weight in bfloat16`.

    A route without a local expert gets the id `slots` with weight 0. This is an expert of the call (`expert_count`)
    outside the local ones [0, slots), as a route of another rank has in FlashInfer's own expert parallelism. Every
    routing kernel skips such routes (`isLocalExpert`), however many a row has, and so does the finalize step. The id -1
    has the same effect in 0.7.2, but FlashInfer does not document it, and the kernel for few tokens then never writes
    the route's weight.

    ids: int32 [N, K], in each row distinct slots or -1; weights: float32 [N, K], None for 1; out: int32 [N, K]
    """
    none = ids < 0
    if weights is None:
        bits = torch.full_like(ids, 0x3F80)  # 1.0
    else:
        bits = weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    out.copy_(torch.where(none, slots << 16, (ids << 16) | bits))


# --- rows ------------------------------------------------------------------------------------------------------------


def row_shapes(scheme: str, rows: int, hidden: int) -> Shapes:
    """Return the shapes of rounded rows and their scales for the scheme's entry; {} if the entry reads plain rows."""
    match scheme:
        case "fp8_static":
            return {"rows": ((rows, hidden), FP8)}
        case "mxfp8" | "mxfp4_mxfp8":
            return {"rows": ((rows, hidden), FP8), "row_scales": ((rows, hidden // MX_BLOCK), torch.uint8)}
        case "nvfp4":
            return {"rows": ((rows, hidden // 2), torch.uint8), "row_scales": ((rows, hidden // NVFP4_BLOCK), FP8)}
    return {}


def quantize_rows(
    x: Tensor, scheme: str, input_scale: Tensor | None, scratch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Round rows for the scheme's entry, and return them with their scales.

    x: bf16 [N, H]; input_scale: float32 scalar for calibrated schemes, else None
    scratch: tensors of `row_shapes` with at least N rows

    none, mxfp4, mxint4   x itself
    fp8_static            E4M3 [N, H], saturating
    fp8_block             E4M3 [N, H], float32 [H / 128, N]
    mxfp8, mxfp4_mxfp8    E4M3 [N, H], E8M0 uint8 [N, H / 32], linear
    nvfp4                 uint8 [N, H / 2], float8_e4m3fn [N, H / 16], linear
    """
    if scheme == "fp8_block":
        data, scale = round_blocks(x)
        return data, scale.t().contiguous()
    if "rows" not in scratch:
        return x, None
    rows, scales = scratch["rows"][: len(x)], scratch["row_scales"][: len(x)] if "row_scales" in scratch else None
    if scales is None:
        assert input_scale is not None
        return rows.copy_(to_fp8(x, input_scale)), None
    if input_scale is None:
        mxfp8_rows(x, rows, scales)
    else:
        nvfp4_rows(x, input_scale, rows, scales)
    return rows, scales


# --- scales ----------------------------------------------------------------------------------------------------------


def output_scales(scheme: str, stored: Mapping[str, Tensor], gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `output1_scale_scalar`, `output1_scale_gate_scalar` and `output2_scale_scalar`, float32 [L] each.

    acc is a sum of products of codes, and acc * gate its value. The first step returns activation(acc * gate) in units
    of the second product's input scale. A gated activation multiplies by an up that is not scaled yet, so the first
    factor includes `gate` (prepare.py, `prepare_trtllm_fp8_per_tensor_weights`). The scale of the rows is the largest
    of all slots.
    """
    weights = ("w13_scale", "w2_scale") if scheme == "fp8_static" else ("w13_global_scale", "w2_global_scale")
    inner = stored["w2_input_scale"]
    gate = stored[weights[0]] * stored["w13_input_scale"].amax(0)
    return (gate if gated else 1) / inner, gate, stored[weights[1]] * inner


def clamp_arguments(clamp: Sequence[Tensor], gate: Tensor | None) -> dict[str, Tensor | None]:
    """Return alpha, beta and limit of the clamped SwiGLU under FlashInfer's names.

    With NVFP4 the kernel clamps and adds beta before it scales, so both are divided by the scale
    (BatchedGemmInterface.h of trtllm-gen: limit / dequantAb, beta / dequantAb). It applies alpha to scaled gates.
    """
    names = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    if not clamp:
        return dict.fromkeys(names)
    alpha, beta, limit = clamp
    if gate is not None:
        beta, limit = beta / gate, limit / gate
    return dict(zip(names, (alpha, beta, limit), strict=True))


# --- the call --------------------------------------------------------------------------------------------------------


def arguments(
    scheme: str,
    *,
    routing: Mapping[str, Any],
    x: Tensor,
    x_scale: Tensor | None,
    weights: Mapping[str, Tensor | None],
    scales: Mapping[str, Tensor],
    clamp: Sequence[Tensor],
    activation: int,
    inner: int,
    output: Tensor,
    on_input: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of the scheme's entry, routed or not.

    routing: the arguments that assign rows to experts
    weights: w13, w2, w13_bias and w2_bias as `Trtllm` stores them, [L, ...], None if absent
    scales: stored scales by name; inner: I of this rank
    on_input: multiply rows instead of results by the routing weight; only with fp8_static
    """
    w13, w2 = weights["w13"], weights["w2"]
    assert w13 is not None
    given: dict[str, Any] = {
        **routing,
        "hidden_states": x,
        "gemm1_weights": w13,
        "gemm2_weights": w2,
        "intermediate_size": inner,
        "local_num_experts": len(w13),
        "do_finalize": True,
        "output": output,
    }
    if scheme == "none":
        given |= {"use_shuffled_weight": True, "weight_layout": BLOCK_MAJOR_K, "activation_type": activation}
        return given | clamp_arguments(clamp, None)
    if scheme == "fp8_static":
        first, gate, second = output_scales(scheme, scales, activation == SWIGLU)
        given.setdefault("routing_bias", None)
        return given | {
            "output1_scales_scalar": first,
            "output1_scales_gate_scalar": gate,
            "output2_scales_scalar": second,
            "use_routing_scales_on_input": on_input,
            "activation_type": activation,
        }
    given |= {"gemm1_weights_scale": scales["w13_scale"], "gemm2_weights_scale": scales["w2_scale"]}
    if scheme == "mxint4":
        return given | clamp_arguments(clamp, None)
    given.setdefault("routing_bias", None)
    given |= {"activation_type": activation, "hidden_states_scale": x_scale}
    if scheme in FP4:
        return given | _fp4_arguments(scheme, x_scale, weights, scales, clamp, activation)
    blocks = scheme == "fp8_block"
    given |= {
        "use_shuffled_weight": not blocks,
        "weight_layout": MAJOR_K,
        "fp8_quantization_type": DEEPSEEK_FP8 if blocks else MXFP8,
    }
    return given | clamp_arguments(clamp, None)


def _fp4_arguments(
    scheme: str,
    x_scale: Tensor | None,
    weights: Mapping[str, Tensor | None],
    scales: Mapping[str, Tensor],
    clamp: Sequence[Tensor],
    activation: int,
) -> dict[str, Any]:
    first, second = weights["w13_bias"], weights["w2_bias"]
    output1 = gate = output2 = None
    if scheme == "nvfp4":
        output1, gate, output2 = output_scales(scheme, scales, activation == SWIGLU)
        # the kernel adds a bias to the unscaled sum
        first = None if first is None else first / gate.unsqueeze(1)
        second = None if second is None else second / output2.unsqueeze(1)
    return {
        # E4M3 and E8M0 scales have one dtype here: the entry tells them apart by their number
        "hidden_states_scale": None if x_scale is None else x_scale.view(FP8),
        "gemm1_weights_scale": scales["w13_scale"].view(FP8),
        "gemm2_weights_scale": scales["w2_scale"].view(FP8),
        "gemm1_bias": first,
        "gemm2_bias": second,
        "output1_scale_scalar": output1,
        "output1_scale_gate_scalar": gate,
        "output2_scale_scalar": output2,
        "hidden_states_scale_layout": LINEAR_SCALES,  # leaving it out is deprecated
        **clamp_arguments(clamp, gate),
    }


def operator_scratch_shapes(scheme: str, rows: int, hidden: int, top_k: int, weighted: bool) -> Shapes:
    """Return the scratch tensors that the operator places in the workspace."""
    shapes: Shapes = dict.fromkeys(("ids", "packed"), ((rows, top_k), torch.int32))
    if weighted:
        shapes["weights"] = ((rows, top_k), torch.float32)
    return shapes | row_shapes(scheme, rows, hidden)


def operator_scratch_bytes(scheme: str, rows: int, hidden: int, top_k: int) -> int:
    return carved_bytes(operator_scratch_shapes(scheme, rows, hidden, top_k, weighted=True))


@operator("trtllm_moe")
def trtllm_moe(
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    input_scale: float | None,
    ids: Tensor,
    base: int,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    scales: Sequence[Tensor],
    clamp: Sequence[Tensor],
    scheme: str,
    activation: int,
    inner: int,
    chunk: int,
) -> None:
    """Compute the experts for RANK_MAJOR rows.

    out: bf16 [N, H]; workspace: uint8; ids: int [N, K], local ids plus `base`; other ids name no local expert
    x: bf16 [N, H]; or rows in the format of `ROWS`, with x_scale, and with input_scale for NVFP4
    weights: float32 [N, K], None for 1; rounded to bf16 for the kernel
    w13, w2, biases: as `Trtllm` stores them, [L, ...]
    scales: the scheme's stored tensors in the order of `scale_names`
    clamp: alpha, beta, limit of the clamped SwiGLU, float32 [L] each
    activation: FlashInfer's ActivationType; inner: I of this rank; chunk: the most rows of one kernel call
    """
    (rows, hidden), top_k, slots = out.shape, ids.shape[1], len(w13)
    if slots == 0:  # the launcher needs an expert; without rows the loop below does not call it
        out.zero_()
        return
    scratch = carve(workspace, operator_scratch_shapes(scheme, min(rows, chunk), hidden, top_k, weights is not None))
    stored = dict(zip(scale_names(scheme), scales, strict=True))
    if input_scale is not None:
        stored["w13_input_scale"] = torch.full((slots,), input_scale, dtype=torch.float32, device=x.device)
    of_rows = stored["w13_input_scale"].amax(0) if "w13_input_scale" in stored else None
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        count = part.stop - part.start
        part_ids, part_weights = scratch["ids"][:count], None if weights is None else scratch["weights"][:count]
        clean_ids(ids[part], None if weights is None else weights[part], base, slots, part_ids, part_weights)
        packed = scratch["packed"][:count]
        pack(part_ids, part_weights, slots, packed)
        if x_scale is None:
            data, row_scale = quantize_rows(x[part], scheme, of_rows, scratch)
        else:  # the fp8_block entry reads transposed scales
            data, row_scale = x[part], x_scale[part].t().contiguous() if scheme == "fp8_block" else x_scale[part]
        call(
            ENTRIES[scheme],
            **arguments(
                scheme,
                routing=routed(packed, slots),
                x=data,
                x_scale=row_scale,
                weights={"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias},
                scales=stored,
                clamp=clamp,
                activation=activation,
                inner=inner,
                output=out[part],
            ),
        )


def routed(packed: Tensor, slots: int) -> dict[str, Any]:
    """Return the routing arguments of a call on local ids: experts [0, slots) are local, all others are not."""
    top_k = packed.shape[1]
    return {
        "topk_ids": packed,
        "num_experts": expert_count(slots, top_k),
        "top_k": top_k,
        "n_group": None,
        "topk_group": None,
        "local_expert_offset": 0,
        "routed_scaling_factor": None,
        "routing_method_type": RENORMALIZE,
    }


def call(entry: str, **given: Any) -> None:
    """Call one of FlashInfer's entries, which writes its argument `output`."""
    import flashinfer.fused_moe

    getattr(flashinfer.fused_moe, entry)(**given)
