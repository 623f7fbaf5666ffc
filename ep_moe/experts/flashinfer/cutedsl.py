"""`flashinfer_cutedsl`: FlashInfer's CuteDSL MoE on Blackwell, NVFP4 rows times NVFP4 weights, under any placement.

The torch operator `cutedsl_moe` calls the kernel as if this rank's slots were all experts. Each product uses the
largest input scale of all slots, because the kernel takes only one for its second product.

FlashInfer documents `CuteDslMoEWrapper` (flashinfer/fused_moe/cute_dsl/fused_moe.py, 0.7.2) for CUDA graphs. Each call
allocates its output and the rows between the products. Rows, ids and scales are in the caller's memory. Only this file
calls the wrapper.

It has not been run on a GPU. Tests compare its arguments with FlashInfer 0.7.2's sources and an emulation of them.
FlashInfer chooses the tiles, by its default or its own autotuner.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.base import ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.flashinfer.base import FlashInferExperts, Given
from ep_moe.experts.flashinfer.call_scales import clean_ids
from ep_moe.quant.kernels import nvfp4_rows
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.runtime.torch_operator import operator
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes
from ep_moe.types import Activation, RowLayout, Weighting
from ep_moe.weights.layouts.cutedsl import CuteDsl, mma_view

SCALES = ("w13_scale", "w13_global_scale", "w13_input_scale", "w2_scale", "w2_global_scale", "w2_input_scale")


@dataclass(frozen=True)
class Kernel:
    """The parameters for which FlashInfer compiles one set of kernels.

    elsewhere: the number of ids after those of the slots, for routes without a local expert; equals K
    activation: FlashInfer's ActivationType; alpha, beta, limit: constants of its SwiGLU
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
    """Create FlashInfer's object, which compiles its kernels on first use."""
    from flashinfer.fused_moe import CuteDslMoEWrapper

    return CuteDslMoEWrapper(**arguments(kernel, device))


def arguments(kernel: Kernel, device: torch.device) -> dict[str, Any]:
    """Return the constructor arguments of `CuteDslMoEWrapper`. This rank's slots are its local experts, from id 0."""
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


def operator_scratch_shapes(rows: int, hidden: int, slots: int, top_k: int) -> Shapes:
    """Return the scratch tensors that the operator places in the workspace."""
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


def operator_scratch_bytes(rows: int, hidden: int, slots: int, top_k: int) -> int:
    return carved_bytes(operator_scratch_shapes(rows, hidden, slots, top_k))


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
    """Compute the experts for RANK_MAJOR rows.

    out: bf16 [N, H]; workspace: uint8; ids: int [N, K], local ids plus `base`; other ids name no local expert
    x: [N, H] of out's dtype; or NVFP4 rows with linear x_scale and input_scale (`row_formats`)
    weights: float32 [N, K], None for 1
    w13, w2, scales: as `CuteDsl` stores them, [L, ...], scales in the order of `SCALES`
    activation: FlashInfer's ActivationType; alpha, beta, limit: constants of its SwiGLU; chunk: the most rows of one
    kernel call
    """
    rows, hidden = out.shape
    slots, inner, top_k = w2.shape[0], w2.shape[2] * 2, ids.shape[1]
    if rows == 0 or slots == 0:
        out.zero_()
        return
    kernel = Kernel(slots, top_k, hidden, inner, out.dtype, activation, alpha, beta, limit, fused_finalize)
    scratch = carve(workspace, operator_scratch_shapes(min(rows, chunk), hidden, slots, top_k))
    stored = dict(zip(SCALES, scales, strict=True))
    _scale_call(scratch, stored, input_scale)
    moe = wrapper(kernel, x.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        count = part.stop - part.start
        part_ids, part_weights = scratch["ids"][:count], scratch["weights"][:count]
        clean_ids(ids[part], None if weights is None else weights[part], base, slots, part_ids,
                  None if weights is None else part_weights)  # fmt: skip
        if weights is None:
            part_weights.fill_(1.0)
        replace_missing_ids(part_ids, slots)
        if x_scale is None:
            part_rows, part_scale = scratch["rows"][:count], scratch["row_scale"][:count]
            nvfp4_rows(x[part], scratch["input1"], part_rows, part_scale)
        else:
            part_rows, part_scale = x[part], x_scale[part]
        y = moe.run(
            x=part_rows,
            x_sf=part_scale.view(torch.uint8),
            token_selected_experts=part_ids,
            token_final_scales=part_weights,
            w1_weight=w13,
            w1_weight_sf=mma_view(stored["w13_scale"]),
            w1_alpha=scratch["alpha1"],
            fc2_input_scale=scratch["quant2"],
            w2_weight=w2,
            w2_weight_sf=mma_view(stored["w2_scale"]),
            w2_alpha=scratch["alpha2"],
        )
        out[part].copy_(y)


def _scale_call(scratch: dict[str, Tensor], stored: dict[str, Tensor], input_scale: float | None) -> None:
    """Fill in the scales of one call."""
    # a row has one scale for all its experts, and the kernel takes one scale for the second product's input
    torch.amax(stored["w13_input_scale"], 0, out=scratch["input1"])
    torch.amax(stored["w2_input_scale"], 0, out=scratch["input2"])
    if input_scale is not None:
        scratch["input1"].fill_(input_scale)
    torch.reciprocal(scratch["input2"], out=scratch["quant2"][0])
    torch.mul(stored["w13_global_scale"], scratch["input1"], out=scratch["alpha1"])
    torch.mul(stored["w2_global_scale"], scratch["input2"], out=scratch["alpha2"])


def replace_missing_ids(ids: Tensor, slots: int) -> None:
    """Replace each id -1 by an id without a slot, distinct within the row: `slots` plus its position in the row.

    The kernel takes these for experts of another rank (`num_local_experts`, `local_expert_offset`), and `moe_sort`
    gives them no row. The kernels of FlashInfer 0.7.2 (trtllm_fused_moe_routing_custom.cuh, RoutingKernel.cuh) would
    also drop -1, and accept an id twice in a row, but FlashInfer does not document either.

    ids: int32 [N, K], modified in place
    """
    places = torch.arange(slots, slots + ids.shape[1], dtype=ids.dtype, device=ids.device)
    torch.where(ids < 0, places, ids, out=ids)


# flashinfer.tllm_enums.ActivationType; its GELU is the tanh approximation
ACTIVATIONS = {Activation.SWIGLU: 3, Activation.SWIGLU_CLAMPED: 3, Activation.RELU2: 6}
MAX_TOP_K, MAX_EXPERTS = 32, 2048  # limits of `moe_sort` as compiled: PolicyTraits in RoutingCustomPolicy.cuh
_NO_LIMIT = torch.finfo(torch.float32).max


class FlashInferCuteDslExperts(FlashInferExperts):
    """FlashInfer's CuteDSL MoE on Blackwell: NVFP4 rows and weights, under any placement."""

    name = "flashinfer_cutedsl"
    tested_machines = "NOT RUN on a GPU; on CPU over an emulation of FlashInfer's layouts"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(ACTIVATIONS),
        dtypes=frozenset({torch.bfloat16}),  # in float16 it is not deterministic on request (moe_finalize.py)
        schemes=frozenset({"nvfp4"}),
        row_formats=frozenset({"plain", "nvfp4"}),
        biases=False,
        etp=True,
        alignment_bytes=16,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=False,
        min_compute_capability=(10, 0),
        max_compute_capability=(10, 3),
        devices=frozenset({"cuda"}),
        tested_capabilities=frozenset(),
        wire_ids=True,
    )
    weight_layout = CuteDsl

    @classmethod
    def available(cls) -> str | None:
        if (missing := super().available()) is not None:
            return missing
        if importlib.util.find_spec("cutlass") is None:
            return "FlashInfer's CuteDSL kernels need nvidia-cutlass-dsl; pip install nvidia-cutlass-dsl"
        return None

    @classmethod
    def unsupported_reason(
        cls,
        config: MoEConfig,
        dtype: torch.dtype,
        etp: int,
        scheme: Scheme = PLAIN,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        reason = super().unsupported_reason(config, dtype, etp, scheme, options)
        if reason is not None:
            return reason
        # tiles of 128: rows of w2 in the second product; 64 rows each of up and gate in the first
        for name, size, unit in (
            ("hidden_size", config.hidden_size, 128),
            ("intermediate_size / etp", config.intermediate_size // etp, 64 if config.activation.gated else 128),
        ):
            if size % unit:
                return f"{name} must be a multiple of {unit}, got {size}"
        if config.top_k > MAX_TOP_K:
            return f"it is compiled for a top_k of {MAX_TOP_K} at most, got {config.top_k}"
        if config.num_experts + config.top_k > MAX_EXPERTS:
            return f"it is compiled for {MAX_EXPERTS} experts less top_k, got {config.num_experts}"
        return None

    @property
    def chunk_rows(self) -> int:
        return self.options.chunk_rows

    def workspace_bytes(self) -> int:
        if not self.weights.num_slots:
            return 0
        config = self.config
        return operator_scratch_bytes(self.chunk_rows, config.hidden_size, self.weights.num_slots, config.top_k)

    def _call(self, given: Given) -> None:
        config, clamped = self.config, self.config.activation is Activation.SWIGLU_CLAMPED
        cutedsl_moe(
            *given,
            [self.weights.get_parameter(name) for name in SCALES],
            ACTIVATIONS[config.activation],
            config.activation_alpha if clamped else 1.0,
            1.0 if clamped else 0.0,
            config.activation_limit if clamped else _NO_LIMIT,
            not self.options.deterministic,
            self.chunk_rows,
        )
