"""Ranges for torch's profiler, and on request stage times and NVTX ranges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


class StageTimes:
    """Milliseconds per layer and stage, summed over calls. On a GPU they are measured by events, read on request.

    where: returns the name of the layer whose call is running
    timed: measure times. CUDA graphs are then not replayed, because events in a graph have no times
    nvtx: mark each stage as an NVTX range, for Nsight Systems
    """

    def __init__(
        self, device: torch.device, where: Callable[[], str] = lambda: "", *, timed: bool = True, nvtx: bool = False
    ) -> None:
        self._device, self._where = device, where
        self.timed, self._nvtx = timed, nvtx
        self._spans: dict[tuple[str, str], list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._total: dict[tuple[str, str], float] = {}

    @contextmanager
    def span(self, stage: str, where: str | None = None) -> Iterator[None]:
        """Measure and mark a stage within a `with` block. where: the layer's name, if its call has not begun"""
        where = self._where() if where is None else where
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"ep_moe::{stage} {where}")
        try:
            with self._time((where, stage)) if self.timed else nullcontext():
                yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()

    @contextmanager
    def _time(self, key: tuple[str, str]) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            stream = torch.cuda.current_stream(self._device)
            begin.record(stream)
            yield
            end.record(stream)
            self._spans.setdefault(key, []).append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._total[key] = self._total.get(key, 0.0) + (time.perf_counter() - start) * 1e3

    def by_layer(self) -> dict[str, dict[str, float]]:
        """Return milliseconds by layer and stage. Waits for the device."""
        if self._spans:
            torch.cuda.synchronize(self._device)
        for key, spans in self._spans.items():
            self._total[key] = self._total.get(key, 0.0) + sum(begin.elapsed_time(end) for begin, end in spans)
        self._spans.clear()
        found: dict[str, dict[str, float]] = {}
        for (where, stage), spent in self._total.items():
            found.setdefault(where, {})[stage] = spent
        return found

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds by stage, summed over layers. Waits for the device."""
        found: dict[str, float] = {}
        for stages in self.by_layer().values():
            for stage, spent in stages.items():
                found[stage] = found.get(stage, 0.0) + spent
        return found


def stage(name: str, times: StageTimes | None) -> AbstractContextManager[Any]:
    """Return a context manager for a stage of the layer.

    While a profiler runs, it is a range `ep_moe::name`. With `times` it is also measured.
    """
    if torch.compiler.is_compiling():  # the parts of a compiled graph are not the layer's stages
        return _NO_STAGE
    # a range costs the host microseconds even if no profiler runs
    if torch.autograd._profiler_enabled():
        return _seen(name, times)
    return _NO_STAGE if times is None else times.span(name)


_NO_STAGE = nullcontext()


@contextmanager
def _seen(name: str, times: StageTimes | None) -> Iterator[None]:
    with record_function(f"ep_moe::{name}"), nullcontext() if times is None else times.span(name):
        yield
