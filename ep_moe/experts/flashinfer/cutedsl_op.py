"""FlashInfer's CuteDSL MoE (NVFP4, Blackwell) as one torch operator. The only file that calls it.

`CuteDslMoEWrapper` (flashinfer/fused_moe/cute_dsl/fused_moe.py, 0.7.2) is the form that FlashInfer documents for CUDA
graphs. It allocates its output and what lies between the products at each call; rows, ids and scales are in memory of
the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.flashinfer.call_scales import clean_ids
from ep_moe.experts.hopper.operator import operator
from ep_moe.quant.kernels import nvfp4_rows
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes
from ep_moe.weights.layouts.cutedsl import mma_view

SCALES = ("w13_scale", "w13_global_scale", "w13_input_scale", "w2_scale", "w2_global_scale", "w2_input_scale")


@dataclass(frozen=True)
class Kernel:
    """What FlashInfer compiles one kernel set for.

    elsewhere: ids behind those of the slots, for routes of none
    activation: FlashInfer's ActivationType; alpha, beta, limit: of its SwiGLU
    """

    slots: int
    elsewhere: int
    hidden: int
    inner: int
    output: torch.dtype
    activation: int
    alpha: float
    beta: float
    limit: float
    fused_finalize: bool


@functools.cache
def wrapper(kernel: Kernel, device: torch.device) -> Any:
    """FlashInfer's object for it. Its kernels are compiled on first use."""
    from flashinfer.fused_moe import CuteDslMoEWrapper

    return CuteDslMoEWrapper(**arguments(kernel, device))


def arguments(kernel: Kernel, device: torch.device) -> dict[str, Any]:
    """Of the constructor of `CuteDslMoEWrapper`. A rank is alone: its slots are the local experts, from 0."""
    return {
        "num_experts": kernel.slots + kernel.elsewhere,
        "num_local_experts": kernel.slots,
        "local_expert_offset": 0,
        "top_k": kernel.elsewhere,
        "hidden_size": kernel.hidden,
        "intermediate_size": kernel.inner,
        "use_cuda_graph": True,
        "output_dtype": kernel.output,
        "device": str(device),
        "activation_type": kernel.activation,
        "swiglu_alpha": kernel.alpha,
        "swiglu_beta": kernel.beta,
        "swiglu_limit": kernel.limit,
        "use_fused_finalize": kernel.fused_finalize,
        "quant_mode": "w4a4",
    }


def own_shapes(rows: int, hidden: int, slots: int, top_k: int) -> Shapes:
    """What the operator carves out of the workspace."""
    return {
        "ids": ((rows, top_k), torch.int32),
        "weights": ((rows, top_k), torch.float32),
        "rows": ((rows, hidden // 2), torch.uint8),
        "row_scale": ((rows, hidden // 16), torch.float8_e4m3fn),
        "input1": ((), torch.float32),
        "input2": ((), torch.float32),
        "quant2": ((1,), torch.float32),
        "alpha1": ((slots,), torch.float32),
        "alpha2": ((slots,), torch.float32),
    }


def own_bytes(rows: int, hidden: int, slots: int, top_k: int) -> int:
    return carved_bytes(own_shapes(rows, hidden, slots, top_k))


@operator("cutedsl_moe")
def cutedsl_moe(
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
    scales: Sequence[Tensor],
    activation: int,
    alpha: float,
    beta: float,
    limit: float,
    fused_finalize: bool,
    chunk: int,
) -> None:
    """The expert step on RANK_MAJOR rows.

    out: bf16 [N, H]; workspace: uint8; ids: int [N, K], counted from `base`, all others for none
    x: [N, H] of out's dtype; or NVFP4 rows with linear x_scale and input_scale (`row_formats`)
    weights: float32 [N, K], None for 1
    w13, w2, scales: as `CuteDsl` stores them, [L, ...], the last in the order of `SCALES`
    activation: FlashInfer's ActivationType; alpha, beta, limit: of its SwiGLU; chunk: rows of one kernel call
    """
    rows, hidden = out.shape
    slots, inner, top_k = w2.shape[0], w2.shape[2] * 2, ids.shape[1]
    if rows == 0 or slots == 0:
        out.zero_()
        return
    kernel = Kernel(slots, top_k, hidden, inner, out.dtype, activation, alpha, beta, limit, fused_finalize)
    own = carve(workspace, own_shapes(min(rows, chunk), hidden, slots, top_k))
    stored = dict(zip(SCALES, scales, strict=True))
    # one scale for the rows whatever expert they go to, and the kernel has one for the second product's input too
    torch.amax(stored["w13_input_scale"], 0, out=own["input1"])
    torch.amax(stored["w2_input_scale"], 0, out=own["input2"])
    if input_scale is not None:
        own["input1"].fill_(input_scale)
    torch.reciprocal(own["input2"], out=own["quant2"][0])
    torch.mul(stored["w13_global_scale"], own["input1"], out=own["alpha1"])
    torch.mul(stored["w2_global_scale"], own["input2"], out=own["alpha2"])
    moe = wrapper(kernel, x.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        count = part.stop - part.start
        part_ids, part_weights = own["ids"][:count], own["weights"][:count]
        clean_ids(ids[part], None if weights is None else weights[part], base, slots, part_ids,
                  None if weights is None else part_weights)  # fmt: skip
        if weights is None:
            part_weights.fill_(1.0)
        send_elsewhere(part_ids, slots)
        if x_scale is None:
            part_rows, part_scale = own["rows"][:count], own["row_scale"][:count]
            nvfp4_rows(x[part], own["input1"], part_rows, part_scale)
        else:
            part_rows, part_scale = x[part], x_scale[part]
        y = moe.run(
            x=part_rows,
            x_sf=part_scale.view(torch.uint8),
            token_selected_experts=part_ids,
            token_final_scales=part_weights,
            w1_weight=w13,
            w1_weight_sf=mma_view(stored["w13_scale"]),
            w1_alpha=own["alpha1"],
            fc2_input_scale=own["quant2"],
            w2_weight=w2,
            w2_weight_sf=mma_view(stored["w2_scale"]),
            w2_alpha=own["alpha2"],
        )
        out[part].copy_(y)


def send_elsewhere(ids: Tensor, slots: int) -> None:
    """Give each route of none (-1) an id of its own that no slot has: `slots` plus its place in the row.

    To the kernel these are experts of another rank, as FlashInfer documents `num_local_experts` and
    `local_expert_offset`: `moe_sort` gives them no row. Its kernels of 0.7.2 (trtllm_fused_moe_routing_custom.cuh,
    RoutingKernel.cuh) would also drop -1, and take an id twice in a row, but neither is promised.
    ids: int32 [N, K], in place
    """
    places = torch.arange(slots, slots + ids.shape[1], dtype=ids.dtype, device=ids.device)
    torch.where(ids < 0, places, ids, out=ids)
