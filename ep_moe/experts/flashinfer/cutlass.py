"""`flashinfer_cutlass`: FlashInfer's CUTLASS fused MoE on Hopper and Blackwell, under any placement.

`Tactics` measures the fastest tiles for each number of rows once, and keeps them in a file.

The kernel itself supports only equal, contiguous shards of experts. It is called as if this rank were the only one
(`ep_size=1`), with local ids and -1 for experts elsewhere. So it also serves uneven, redundant and arbitrary
placements.

It has been run on Hopper, and not on Blackwell (10.x). For Blackwell, tests compare its arguments with FlashInfer
0.7.2's sources and an emulation of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.errors import InputError
from ep_moe.experts.base import ExpertsCapabilities, ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.base import FlashInferExperts, Given
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import Activation, LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES, SM100_SCHEMES, CutlassSm100

_REPLAYS = 7
_CALLS = 3  # per replay


class CutlassExperts(Protocol):
    """The interface of the experts that `Tactics` times. tactics: the last argument of `use`"""

    config: MoEConfig
    weights: ExpertWeights
    workspaces: Workspaces
    runner: cutlass_op.Runner
    tactics: list[int]

    @property
    def chunk_rows(self) -> int: ...

    def compute(self, received: Received, out: Tensor) -> Tensor: ...

    def use(self, tuned: list[int]) -> None: ...


class Tactics:
    """Time every tactic of one kernel, by CUDA-graph replays of the whole expert step.

    The first matrix product is tuned with the second at its default tactic, then the second with the first at its best.
    The two influence each other only through caches.
    """

    def __init__(self, experts: CutlassExperts, cache: Path | None) -> None:
        self.experts = experts
        self.cache = cache

    def find(self, rows: Sequence[int]) -> list[int]:
        """Return flat (rows, first, second) triples, ascending by rows. Cached triples are not measured again."""
        if torch.cuda.is_current_stream_capturing():
            raise InputError("tune() cannot run inside a CUDA graph capture; call it before")
        weights = self.experts.weights
        if weights.num_slots == 0 or weights.get_parameter("w13").is_meta:
            return []
        known = self._load()
        found: list[int] = []
        for count in sorted({min(count, self.experts.chunk_rows) for count in rows}):
            if str(count) not in known:
                known[str(count)] = self._measure(count)
            found += [count, *known[str(count)]]
        self._save(known)
        return found

    def key(self) -> dict[str, Any]:
        """Return everything on which the measured tactics depend, the key of the cache."""
        e = self.experts
        try:
            release = version("flashinfer-python")
        except PackageNotFoundError:  # a build without metadata
            import flashinfer

            release = flashinfer.__version__
        return {
            "gpu": torch.cuda.get_device_name(e.workspaces.device),
            "torch": torch.__version__,
            "flashinfer": release,
            "runner": str(e.runner),
            "hidden": e.config.hidden_size,
            "inner": e.config.intermediate_size // e.weights.etp.size,
            "experts": e.config.num_experts,
            "slots": e.weights.num_slots,
            "top_k": e.config.top_k,
            "activation": e.config.activation.value,
            "bias": e.config.expert_bias,
        }

    # --- the file ----------------------------------------------------------------------------------------------

    def _file(self) -> Path | None:
        if self.cache is None:
            return None
        text = json.dumps(self.key(), sort_keys=True)
        return self.cache / f"cutlass_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _load(self) -> dict[str, list[int]]:
        file = self._file()
        if file is None or not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text())
            known = content["tactics"].items() if content["key"] == self.key() else ()
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}  # incomplete or foreign file: measure again and overwrite it
        return {rows: pair for rows, pair in known if _is_pair(pair)}

    def _save(self, tactics: dict[str, list[int]]) -> None:
        file = self._file()
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"key": self.key(), "tactics": tactics}, indent=1))
        draft.replace(file)

    # --- measuring ---------------------------------------------------------------------------------------------

    def _measure(self, rows: int) -> list[int]:
        compiled = cutlass_op.compiled(self.experts.runner, self.experts.workspaces.device)
        received, out = self._example(rows)
        if self.experts.runner.scheme == "fp8_block":  # DeepGEMM chooses for itself, and compiles on first use
            self._time(received, out, (-1, -1))
            return [-1, -1]
        first_count, second_count = compiled.get_gemm1_tactic_count(), compiled.get_gemm2_tactic_count()
        best = [-1, -1]
        for which, candidates in enumerate((range(first_count), range(first_count, first_count + second_count))):
            times = {}
            for tactic in candidates:
                pair = (tactic, best[1]) if which == 0 else (best[0], tactic)
                if compiled.get_tactic_occupancy(tactic) > 0 and self._fits(compiled, which, tactic):
                    times[tactic] = self._time(received, out, pair)
            best[which] = min(times, key=times.__getitem__)
        return best

    def _fits(self, compiled: Any, which: int, tactic: int) -> bool:
        """Return whether a tactic supports the matrix. Tiles of mixed-input kernels must divide it."""
        if self.experts.runner.weight is not torch.uint8:
            return True
        config, etp = self.experts.config, self.experts.weights.etp.size
        inner, rows = config.intermediate_size // etp, config.w13_rows // etp
        shape = (rows, config.hidden_size) if which == 0 else (config.hidden_size, inner)
        return tactic in {int(t) for t in compiled.get_valid_tactics_for_shape(which + 1, *shape)}

    def _example(self, rows: int) -> tuple[Received, Tensor]:
        """Return rows as from a uniform router, each with at least one local expert, and an output tensor."""
        config, weights, device = self.experts.config, self.experts.weights, self.experts.workspaces.device
        generator = torch.Generator(device=device).manual_seed(0)
        slots = weights.num_slots
        physical = max(config.num_experts, slots)
        scores = torch.rand(rows, physical, generator=generator, dtype=torch.float32, device=device)
        ids = scores.topk(config.top_k).indices.int()
        ids = torch.where(ids < slots, ids, -1)
        any_slot = torch.randint(slots, (rows,), generator=generator, device=device, dtype=torch.int32)
        ids[:, 0] = torch.where((ids < 0).all(1), any_slot, ids[:, 0])
        x = torch.randn(rows, config.hidden_size, generator=generator, dtype=weights.dtype, device=device)
        received = Received(
            x=x,
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=None,
            local_ids=LocalIds(ids),
            weights=torch.full(ids.shape, 1 / config.top_k, dtype=torch.float32, device=device),
        )
        return received, torch.empty_like(x)

    def _time(self, received: Received, out: Tensor, pair: tuple[int, int]) -> float:
        """Return the median time of a call in ms; infinity for a tactic that this GPU refuses."""
        experts = self.experts
        before = experts.tactics
        experts.use([len(received.x), *pair])
        try:
            experts.compute(received, out)
            device = experts.workspaces.device
            torch.cuda.synchronize(device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                for _ in range(_CALLS):
                    experts.compute(received, out)
            times: list[float] = []
            for _ in range(_REPLAYS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(start.elapsed_time(end) / _CALLS)
            return statistics.median(times)
        except RuntimeError:
            return float("inf")
        finally:
            experts.use(before)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


# flashinfer.tllm_enums.ActivationType; Swiglu with alpha, beta and limit is the clamped SwiGLU
ACTIVATIONS = {
    Activation.SWIGLU: 3,
    Activation.SWIGLU_CLAMPED: 3,
    Activation.GEGLU: 4,
    Activation.RELU2: 6,
}
_MIXED = ("mxfp4", "mxfp4_fp8", "int4_fp8")
_ROWS = {  # row formats that it reads besides plain rows
    "fp8_static": "fp8_tensor",
    "nvfp4": "nvfp4",
    "mxfp4_mxfp8": "mxfp8",
    "mxfp8": "mxfp8",
}
_ON_BOTH = ("none", "fp8_static", "fp8_dynamic")  # one layout and one call on Hopper and Blackwell
_HOPPER, _BLACKWELL = (9, 0), ((10, 0), (10, 7))  # architectures: flashinfer/fused_moe/api.py, _CUTLASS_*_ARCHS
_MAX_INDEX = 2**31 - 1


class FlashInferCutlassExperts(FlashInferExperts):
    """FlashInfer's CUTLASS fused MoE on Hopper and Blackwell, under any placement."""

    name = "flashinfer_cutlass"
    tested_machines = (
        "1, 2 and 4 H200 in the schemes of 9.0, 2 H100 in none, fp8_block and fp8_static; on CPU over an emulation; "
        "on 10.x NOT RUN"
    )
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
        tested_capabilities=frozenset({_HOPPER}),
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
        self._tuned = False  # tuned, or warned about it
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
        """The most rows of one kernel call. The kernel counts the elements of all routes in 32 bits."""
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
        return cutlass_op.operator_scratch_bytes(self.runner, *shape) + scratch

    def _call(self, given: Given) -> None:
        self._advise()
        weights = self.weights
        cutlass_op.cutlass_moe(
            *given,
            weights.stored_tensors().get("w13_bias"),
            weights.stored_tensors().get("w2_bias"),
            [weights.get_parameter(name) for name in cutlass_op.scale_names(weights.scheme.name)],
            self._clamp_constants(),
            weights.scheme.name,
            ACTIVATIONS[self.config.activation],
            self._activation_bound(),
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
        """Warn once per object about untuned tiles, except with fp8_block, for which FlashInfer chooses the tiles."""
        if self._tuned or torch.compiler.is_compiling():
            return
        self._tuned = True
        if self.runner.scheme != "fp8_block":
            warnings.warn(
                "flashinfer_cutlass runs with FlashInfer's default tiles, which can be several times slower than the "
                "best ones; call EPContext.tune() once after the weights are loaded (cache=folder keeps what it finds)",
                stacklevel=4,
            )

    def _activation_bound(self) -> float:
        """Return an upper bound of the clamped SwiGLU's magnitude; 0 for activations without a limit.

        |up + 1| <= limit + 1. The gate is only clamped above, and gate * sigmoid(alpha * gate) lies between its minimum
        -0.2785 / alpha (because t * sigmoid(t) >= -0.2785) and limit.
        """
        if self.config.activation is not Activation.SWIGLU_CLAMPED:
            return 0.0
        limit = self.config.activation_limit
        return max(limit, 0.2785 / self.config.activation_alpha) * (limit + 1)


def _units(scheme: str, activation: Activation) -> tuple[int, int]:
    """Return the numbers of which hidden and intermediate size must be multiples.

    Source: flashinfer_cutlass_fused_moe_binding.cu. With NVFP4 the rows' linear scales are read in groups of 4 (64
    columns). Without a gate, the binding accepts the swizzled scales of w13 only if their rows fill tiles of 128.
    """
    if scheme in _MIXED or scheme in ("mxfp4_mxfp8", "mxfp8"):
        return 128, 128
    if scheme == "nvfp4":
        return 64, 64 if activation.gated else 128
    return (16, 16) if scheme in cutlass_op.PRE_ROUNDED else (1, 1)
