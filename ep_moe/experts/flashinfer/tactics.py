"""The fastest CUTLASS tile per number of rows, measured once and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.errors import InputError
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights

_REPLAYS = 7
_CALLS = 3  # per replay


class CutlassExperts(Protocol):
    """What is timed. tactics: those in use, as `use` was given them"""

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
    """Times every tactic of one kernel by graph replays of the whole expert step, not of a GEMM alone.

    The first matrix product is tuned with the second at its default, then the second with the first at its best: their
    tiles do not interact except through the caches.
    """

    def __init__(self, experts: CutlassExperts, cache: Path | None) -> None:
        self.experts = experts
        self.cache = cache

    def find(self, rows: Sequence[int]) -> list[int]:
        """Flat (rows, first, second) triples, ascending by rows; from the cache where it has them."""
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
        """What the findings depend on."""
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
            return {}  # half written or not ours: measured again and written anew
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
        """Mixed-input tiles must divide the matrix; the other kernels take any tile."""
        if self.experts.runner.weight is not torch.uint8:
            return True
        config, etp = self.experts.config, self.experts.weights.etp.size
        inner, rows = config.intermediate_size // etp, config.w13_rows // etp
        shape = (rows, config.hidden_size) if which == 0 else (config.hidden_size, inner)
        return tactic in {int(t) for t in compiled.get_valid_tactics_for_shape(which + 1, *shape)}

    def _example(self, rows: int) -> tuple[Received, Tensor]:
        """Rows as a uniform router would deliver them: at least one local expert each."""
        config, weights, device = self.experts.config, self.experts.weights, self.experts.workspaces.device
        generator = torch.Generator(device=device).manual_seed(0)
        slots = weights.num_slots
        physical = max(config.num_experts, slots)
        ids = torch.rand(rows, physical, generator=generator, device=device).topk(config.top_k).indices.int()
        ids = torch.where(ids < slots, ids, -1)
        any_slot = torch.randint(slots, (rows,), generator=generator, device=device, dtype=torch.int32)
        ids[:, 0] = torch.where((ids < 0).all(1), any_slot, ids[:, 0])
        x = torch.randn(rows, config.hidden_size, generator=generator, device=device).to(weights.dtype)
        received = Received(
            x=x,
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=None,
            local_ids=LocalIds(ids),
            weights=torch.full(ids.shape, 1 / config.top_k, device=device),
        )
        return received, torch.empty_like(x)

    def _time(self, received: Received, out: Tensor, pair: tuple[int, int]) -> float:
        """Median milliseconds of a call; infinite for a tactic that this GPU refuses."""
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
