"""Seeing where time goes: profiler ranges always, stage times and NVTX ranges on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


class StageTimes:
    """Milliseconds per layer and stage, summed over calls. On a GPU by events, read when they are asked for.

    where: the layer whose call is under way
    timed: measure times; calls are not replayed then, since the events of a graph have none
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
        """where: the layer, if its call has not begun"""
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
        """Layer to stage to milliseconds; waits for the device."""
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
        """Stage to milliseconds of all layers; waits for the device."""
        found: dict[str, float] = {}
        for stages in self.by_layer().values():
            for stage, spent in stages.items():
                found[stage] = found.get(stage, 0.0) + spent
        return found


def stage(name: str, times: StageTimes | None) -> AbstractContextManager[Any]:
    """One stage of the layer: a range `ep_moe::name` where a profiler listens, timed where times are wanted."""
    if torch.compiler.is_compiling():  # a compiled graph has no stages: its parts are not the layer's
        return _NO_STAGE
    # a range costs the host microseconds, also without a profiler
    if torch.autograd._profiler_enabled():
        return _seen(name, times)
    return _NO_STAGE if times is None else times.span(name)


_NO_STAGE = nullcontext()


@contextmanager
def _seen(name: str, times: StageTimes | None) -> Iterator[None]:
    with record_function(f"ep_moe::{name}"), nullcontext() if times is None else times.span(name):
        yield
