"""`flashinfer_cutedsl`: FlashInfer's CuteDSL MoE on Blackwell, NVFP4 rows times NVFP4 weights, under any placement.

Called as if this rank were alone with its slots (`cutedsl_op`). One input scale serves all slots in both products, the
largest of them: the kernel has room for one in its second product.

It has not been run on a GPU: what it hands over is held against FlashInfer 0.7.2's sources and an emulation of them.
Tiles are FlashInfer's choice, by its default or its own autotuner.
"""

from __future__ import annotations

import importlib.util

import torch

from ep_moe.config import MoEConfig
from ep_moe.experts.base import ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.flashinfer import cutedsl_op
from ep_moe.experts.flashinfer.base import FlashInferExperts, Given
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.types import Activation, RowLayout, Weighting
from ep_moe.weights.layouts.cutedsl import CuteDsl

# flashinfer.tllm_enums.ActivationType; its gelu is the tanh one
ACTIVATIONS = {Activation.SWIGLU: 3, Activation.SWIGLU_CLAMPED: 3, Activation.RELU2: 6}
MAX_TOP_K, MAX_EXPERTS = 32, 2048  # what `moe_sort` is compiled for: PolicyTraits in RoutingCustomPolicy.cuh
_NO_LIMIT = torch.finfo(torch.float32).max


class FlashInferCuteDslExperts(FlashInferExperts):
    name = "flashinfer_cutedsl"
    run_on = "NOT RUN on a GPU; on CPU over an emulation of FlashInfer's layouts"
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
        run_on=frozenset(),
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
        # rows of the second product, and pairs of 64 rows of up and gate in the first, fill tiles of 128
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
        return cutedsl_op.own_bytes(self.chunk_rows, self.config.hidden_size, self.weights.num_slots, self.config.top_k)

    def _call(self, given: Given) -> None:
        config, clamped = self.config, self.config.activation is Activation.SWIGLU_CLAMPED
        cutedsl_op.cutedsl_moe(
            *given,
            [self.weights.get_parameter(name) for name in cutedsl_op.SCALES],
            ACTIVATIONS[config.activation],
            config.activation_alpha if clamped else 1.0,
            1.0 if clamped else 0.0,
            config.activation_limit if clamped else _NO_LIMIT,
            not self.options.deterministic,
            self.chunk_rows,
        )
