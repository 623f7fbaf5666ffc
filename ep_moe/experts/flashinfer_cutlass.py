"""`flashinfer_cutlass`: FlashInfer's CUTLASS fused MoE on Hopper, under any placement.

The kernel itself knows even, contiguous shards only. It is called as if it were alone (`ep_size=1`) with local ids, -1
for what is elsewhere: uneven, redundant and arbitrary placements are then nothing to it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts import cutlass_op
from ep_moe.experts.base import Experts, ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.tactics import Tactics
from ep_moe.types import Activation, Received, RowLayout, Weighting
from ep_moe.weights.cutlass_sm90 import CutlassSm90
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.schemes import PLAIN, SCHEMES, Scheme
from ep_moe.workspace import Workspaces

# flashinfer.tllm_enums.ActivationType; Swiglu with alpha, beta and limit given is the clamped one
ACTIVATIONS = {
    Activation.SWIGLU: 3,
    Activation.SWIGLU_CLAMPED: 3,
    Activation.GEGLU: 4,
    Activation.RELU2: 6,
}
_MIXED = ("mxfp4", "mxfp4_fp8", "int4_fp8")
_MAX_INDEX = 2**31 - 1


class FlashInferCutlassExperts(Experts):
    name = "flashinfer_cutlass"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=frozenset(ACTIVATIONS),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        schemes=frozenset(SCHEMES),
        biases=True,
        etp=True,
        alignment_bytes=16,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=False,
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        devices=frozenset({"cuda"}),
        wire_ids=True,
    )
    preparation = CutlassSm90

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
        self._clamp: list[Tensor] | None = None
        self._tactics: list[int] = []
        self._tuned = False  # or advised to be
        super().__init__(config, weights, workspaces, options)

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed; pip install ep-moe[gpu]"
        return None

    @classmethod
    def why_not(
        cls,
        config: MoEConfig,
        dtype: torch.dtype,
        etp: int,
        scheme: Scheme = PLAIN,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        reason = super().why_not(config, dtype, etp, scheme, options)
        if reason is not None:
            return reason
        unit = 128 if scheme.name in _MIXED else 16 if scheme.name in cutlass_op.PRE_ROUNDED else 1
        for name, size in (
            ("hidden_size", config.hidden_size),
            ("intermediate_size / etp", config.intermediate_size // etp),
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

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        x, weights = received.x, self.weights
        wire = received.wire_ids
        ids, base = (received.local_ids, 0) if wire is None else (wire.ids, wire.base)
        out = torch.empty_like(x) if out is None else out
        self._advise()
        names = cutlass_op.scale_names(weights.scheme.name)
        torch.ops.ep_moe.cutlass_moe(
            out,
            self.workspace(),
            x,
            ids,
            base,
            received.weights if received.weighting is Weighting.EXPERTS else None,
            weights.get_parameter("w13"),
            weights.get_parameter("w2"),
            weights.stored("w13_bias"),
            weights.stored("w2_bias"),
            [weights.get_parameter(name) for name in names],
            self._clamp_constants(),
            weights.scheme.name,
            ACTIVATIONS[self.config.activation],
            self._activation_cap(),
            weights.etp.rank,
            self.runner.fused_finalize,
            self.chunk_rows,
            self._tactics,
        )
        return out

    def tune(self, rows: Sequence[int], cache: Path | None) -> list[int]:
        return Tactics(self, cache).find(rows)

    def use(self, tuned: list[int]) -> None:
        self._tactics, self._tuned = tuned, True

    def _advise(self) -> None:
        """Once per kernel object; nothing to say where FlashInfer chooses the tile itself (fp8_block)."""
        if self._tuned or torch.compiler.is_compiling():
            return
        self._tuned = True
        if self.runner.scheme != "fp8_block":
            warnings.warn(
                "flashinfer_cutlass runs with FlashInfer's default tiles, which can be several times slower than the "
                "best ones; call EPContext.tune() once after the weights are loaded (cache=folder keeps what it finds)",
                stacklevel=3,
            )

    def _clamp_constants(self) -> list[Tensor]:
        """alpha, beta and limit, float32 [L] each, of the clamped SwiGLU."""
        if self.config.activation is not Activation.SWIGLU_CLAMPED:
            return []
        if self._clamp is None:
            values = (self.config.activation_alpha, 1.0, self.config.activation_limit)
            device = self.weights.get_parameter("w13").device
            self._clamp = [torch.full((self.weights.num_slots,), value, device=device) for value in values]
        return self._clamp

    def _activation_cap(self) -> float:
        """What the clamped SwiGLU cannot exceed; 0 for activations without a limit.

        |up + 1| <= limit + 1; the gate is clamped above only, and gate * sigmoid(alpha * gate) lies between its minimum
        -0.2785 / alpha (as t * sigmoid(t) >= -0.2785) and limit."""
        if self.config.activation is not Activation.SWIGLU_CLAMPED:
            return 0.0
        limit = self.config.activation_limit
        return max(limit, 0.2785 / self.config.activation_alpha) * (limit + 1)
