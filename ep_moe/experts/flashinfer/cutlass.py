"""`flashinfer_cutlass`: FlashInfer's CUTLASS fused MoE on Hopper and Blackwell, under any placement.

The kernel itself knows even, contiguous shards only. It is called as if it were alone (`ep_size=1`) with local ids, -1
for what is elsewhere: uneven, redundant and arbitrary placements are then nothing to it.

It has been run on Hopper. On Blackwell (10.x) it has not: what it hands over there is held against FlashInfer 0.7.2's
sources and an emulation of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_moe.config import MoEConfig
from ep_moe.experts.base import ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.base import FlashInferExperts, Given
from ep_moe.experts.flashinfer.tactics import Tactics
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import Activation, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES, SM100_SCHEMES, CutlassSm100

# flashinfer.tllm_enums.ActivationType; Swiglu with alpha, beta and limit given is the clamped one
ACTIVATIONS = {
    Activation.SWIGLU: 3,
    Activation.SWIGLU_CLAMPED: 3,
    Activation.GEGLU: 4,
    Activation.RELU2: 6,
}
_MIXED = ("mxfp4", "mxfp4_fp8", "int4_fp8")
_ROWS = {  # what it reads besides plain rows
    "fp8_static": "fp8_tensor",
    "nvfp4": "nvfp4",
    "mxfp4_mxfp8": "mxfp8",
    "mxfp8": "mxfp8",
}
_ON_BOTH = ("none", "fp8_static", "fp8_dynamic")  # one layout and one call on Hopper and Blackwell
_HOPPER, _BLACKWELL = (9, 0), ((10, 0), (10, 7))  # architectures: flashinfer/fused_moe/api.py, _CUTLASS_*_ARCHS
_MAX_INDEX = 2**31 - 1


class FlashInferCutlassExperts(FlashInferExperts):
    name = "flashinfer_cutlass"
    run_on = "1 and 4 H200 in the schemes of 9.0; on CPU over an emulation; on 10.x NOT RUN"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(ACTIVATIONS),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        schemes=frozenset(SM90_SCHEMES + SM100_SCHEMES),
        biases=True,
        etp=True,
        alignment_bytes=16,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=False,
        min_compute_capability=_HOPPER,
        max_compute_capability=_BLACKWELL[1],
        devices=frozenset({"cuda"}),
        run_on=frozenset({_HOPPER}),
        wire_ids=True,
    )
    weight_layout = CutlassSm100
    own_rows = _ROWS

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights,
        workspaces: Workspaces | None = None,
        options: ExpertsOptions | None = None,
    ) -> None:
        scheme = weights.scheme.name
        self.runner = cutlass_op.runner_of(
            weights.dtype,
            weights.get_parameter("w13").dtype,
            scheme,
            fused_finalize=not (options or ExpertsOptions()).deterministic,
        )
        self.tactics: list[int] = []
        self._tuned = False  # or advised to be
        super().__init__(config, weights, workspaces, options)

    @classmethod
    def compute_capability(cls, scheme: str) -> tuple[tuple[int, int], tuple[int, int]]:
        if scheme in SM100_SCHEMES:
            return _BLACKWELL
        return (_HOPPER, _BLACKWELL[1]) if scheme in _ON_BOTH else (_HOPPER, _HOPPER)

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
        hidden_unit, inner_unit = _units(scheme.name, config.activation)
        for name, size, unit in (
            ("hidden_size", config.hidden_size, hidden_unit),
            ("intermediate_size / etp", config.intermediate_size // etp, inner_unit),
        ):
            if size % unit:
                return f"{name} must be a multiple of {unit} with quantization {scheme.name}, got {size}"
        if scheme.name in ("mxfp4", "fp8_block") and dtype != torch.bfloat16:
            return f"quantization {scheme.name} needs bfloat16"
        return None

    @property
    def chunk_rows(self) -> int:
        """Rows of one kernel call; the kernel counts elements of all pairs in 32 bits."""
        widest = max(self.config.hidden_size, self.config.w13_rows // self.weights.etp.size)
        return min(self.options.chunk_rows, _MAX_INDEX // (self.config.top_k * widest))

    def workspace_bytes(self) -> int:
        if not self.weights.num_slots:
            return 0
        hidden, inner = self.config.hidden_size, self.config.intermediate_size // self.weights.etp.size
        shape = (self.chunk_rows, hidden, inner, self.weights.num_slots, self.config.top_k)
        scratch = cutlass_op.scratch_bytes(
            self.runner, *shape, ACTIVATIONS[self.config.activation], self.workspaces.device
        )
        return cutlass_op.own_bytes(self.runner, *shape) + scratch

    def _call(self, given: Given) -> None:
        self._advise()
        weights = self.weights
        cutlass_op.cutlass_moe(
            *given,
            weights.stored("w13_bias"),
            weights.stored("w2_bias"),
            [weights.get_parameter(name) for name in cutlass_op.scale_names(weights.scheme.name)],
            self._clamp_constants(),
            weights.scheme.name,
            ACTIVATIONS[self.config.activation],
            self._activation_cap(),
            weights.etp.rank,
            self.runner.fused_finalize,
            self.chunk_rows,
            self.tactics,
        )

    def tune(self, rows: Sequence[int], cache: Path | None) -> list[int]:
        return Tactics(self, cache).find(rows)

    def use(self, tuned: list[int]) -> None:
        self.tactics, self._tuned = tuned, True

    def _advise(self) -> None:
        """Once per kernel object; nothing to say where FlashInfer chooses the tile itself (fp8_block)."""
        if self._tuned or torch.compiler.is_compiling():
            return
        self._tuned = True
        if self.runner.scheme != "fp8_block":
            warnings.warn(
                "flashinfer_cutlass runs with FlashInfer's default tiles, which can be several times slower than the "
                "best ones; call EPContext.tune() once after the weights are loaded (cache=folder keeps what it finds)",
                stacklevel=4,
            )

    def _activation_cap(self) -> float:
        """What the clamped SwiGLU cannot exceed; 0 for activations without a limit.

        |up + 1| <= limit + 1; the gate is clamped above only, and gate * sigmoid(alpha * gate) lies between its minimum
        -0.2785 / alpha (as t * sigmoid(t) >= -0.2785) and limit."""
        if self.config.activation is not Activation.SWIGLU_CLAMPED:
            return 0.0
        limit = self.config.activation_limit
        return max(limit, 0.2785 / self.config.activation_alpha) * (limit + 1)


def _units(scheme: str, activation: Activation) -> tuple[int, int]:
    """What hidden and intermediate size must be multiples of; flashinfer_cutlass_fused_moe_binding.cu.

    NVFP4: the rows' linear scales are read as whole groups of 4 (64 columns), and without a gate the binding wants as
    many rows of w13 scales as the swizzle has only if they fill its tiles of 128.
    """
    if scheme in _MIXED or scheme in ("mxfp4_mxfp8", "mxfp8"):
        return 128, 128
    if scheme == "nvfp4":
        return 64, 64 if activation.gated else 128
    return (16, 16) if scheme in cutlass_op.PRE_ROUNDED else (1, 1)
