"""`flashinfer_trtllm`: FlashInfer's TRTLLM kernels on Blackwell, under any placement.

The routed entries support one contiguous range of experts. They are called as if this rank were the only one, with
local ids and at least one expert more than there are slots. Routes of other ranks name that expert (`trtllm_op.pack`).
So the entries also serve uneven, redundant and arbitrary placements. Routing weights are rounded to bf16, because a
packed id has 16 bits for its weight.

The caller owns the output and the adapter's scratch. FlashInfer allocates its intermediate results at each call, from
torch's allocator. The adapter does not use FlashInfer's autotuner: without `flashinfer.autotune`, FlashInfer takes
default tactics. With fp8_block the first product's result is rounded to E4M3 once more than by other kernels, before
the activation, which is a separate kernel there.

Not run on a GPU yet. Tests use an emulation of the kernels, and FlashInfer's own signatures and index tables.
"""

from __future__ import annotations

import torch

from ep_moe.config import MoEConfig
from ep_moe.experts.base import ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.flashinfer.base import FlashInferExperts, Given
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.types import Activation, RowLayout, Weighting
from ep_moe.weights.layouts.trtllm import LAYOUTS, Trtllm

# flashinfer.tllm_enums.ActivationType; Swiglu with alpha, beta and limit is the clamped SwiGLU
ACTIVATIONS = {
    Activation.SWIGLU: trtllm_op.SWIGLU,
    Activation.SWIGLU_CLAMPED: trtllm_op.SWIGLU,
    Activation.RELU2: trtllm_op.RELU2,
}
_NO_CLAMP = ("fp8_static",)  # `gemm1_clamp_limit` of the per-tensor entry belongs to another activation
_SWIGLU_ONLY = ("fp8_block", "mxint4")  # the launcher has only SwiGLU for DeepSeekFp8, and no choice for MxInt4
HIDDEN_UNITS = {"nvfp4": 512}  # vLLM requires the same of these kernels (`TrtLlmNvFp4ExpertsBase._supports_shape`)
MAX_TOP_K = 32  # check_routing
_MAX_INDEX = 2**31 - 1
_MAX_TILE = 256  # largest tile to which an expert's rows are padded


class FlashInferTrtllmExperts(FlashInferExperts):
    """FlashInfer's TRTLLM kernels on Blackwell, under any placement."""

    name = "flashinfer_trtllm"
    tested_machines = "NOT RUN on a GPU; on CPU over an emulation of FlashInfer's layouts"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(ACTIVATIONS),
        dtypes=frozenset({torch.bfloat16}),
        schemes=frozenset(trtllm_op.ENTRIES),
        biases=True,
        etp=True,
        alignment_bytes=16,
        cuda_graph=True,
        host_sync=False,
        deterministic=False,
        differentiable=False,
        min_compute_capability=(10, 0),
        max_compute_capability=(10, 9),
        devices=frozenset({"cuda"}),
        tested_capabilities=frozenset(),
        wire_ids=True,
    )
    weight_layout = Trtllm
    own_rows = trtllm_op.ROWS

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
        return reason or shape_problem(config, etp, scheme)

    @property
    def chunk_rows(self) -> int:
        """The most rows of one kernel call."""
        experts = trtllm_op.expert_count(self.weights.num_slots, self.config.top_k)
        return min(self.options.chunk_rows, largest_call(self.config, experts, self.weights.etp.size))

    def workspace_bytes(self) -> int:
        if not self.weights.num_slots:
            return 0
        config, scheme = self.config, self.weights.scheme.name
        return trtllm_op.operator_scratch_bytes(scheme, self.chunk_rows, config.hidden_size, config.top_k)

    def _call(self, given: Given) -> None:
        weights = self.weights
        trtllm_op.trtllm_moe(
            *given,
            weights.stored_tensors().get("w13_bias"),
            weights.stored_tensors().get("w2_bias") if weights.adds_output_bias else None,
            [weights.get_parameter(name) for name in trtllm_op.scale_names(weights.scheme.name)],
            self._clamp_constants(),
            weights.scheme.name,
            ACTIVATIONS[self.config.activation],
            self.config.intermediate_size // weights.etp.size,
            self.chunk_rows,
        )


def shape_problem(config: MoEConfig, etp: int, scheme: Scheme) -> str | None:
    """Return why the scheme's entry, routed or not, cannot serve a layer of this shape, or None."""
    name, activation = scheme.name, config.activation
    gated = activation is not Activation.RELU2
    if (name in _NO_CLAMP and activation is Activation.SWIGLU_CLAMPED) or (name in _SWIGLU_ONLY and not gated):
        return f"activation {activation.value} does not go with quantization {name}"
    if config.expert_bias and name not in trtllm_op.FP4:
        return f"it has expert biases with quantization {', '.join(trtllm_op.FP4)} alone, not with {name}"
    if config.top_k > MAX_TOP_K:
        return f"top_k must be at most {MAX_TOP_K}, got {config.top_k}"
    unit = LAYOUTS[name].unit
    for field, size, wanted in (
        ("hidden_size", config.hidden_size, HIDDEN_UNITS.get(name, unit)),
        ("intermediate_size / etp", config.intermediate_size // etp, unit),
    ):
        if size % wanted:
            return f"{field} must be a multiple of {wanted} with quantization {name}, got {size}"
    return None


def largest_call(config: MoEConfig, experts: int, etp: int) -> int:
    """Return the most rows of a call.

    The finalize step counts the elements of all routes in 32 bits, with each expert's routes padded to tiles.
    """
    widest = max(config.hidden_size, config.w13_rows // etp)
    pairs = _MAX_INDEX // widest - (experts + 1) * _MAX_TILE
    return max(1, pairs // config.top_k)
