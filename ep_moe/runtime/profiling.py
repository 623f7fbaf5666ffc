"""Seeing where time goes: profiler ranges always, stage times on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


class StageTimes:
    """Milliseconds per stage, summed over calls. On a GPU by events, read when `milliseconds` is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._host: dict[str, float] = {}

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            stream = torch.cuda.current_stream(self._device)
            begin.record(stream)
            yield
            end.record(stream)
            self._spans.setdefault(stage, []).append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._host[stage] = self._host.get(stage, 0.0) + (time.perf_counter() - start) * 1e3

    def milliseconds(self) -> dict[str, float]:
        """Stage to milliseconds; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return {stage: sum(a.elapsed_time(b) for a, b in spans) for stage, spans in self._spans.items()}
        return dict(self._host)


def stage(name: str, times: StageTimes | None) -> AbstractContextManager[Any]:
    """One stage of the layer: a range `ep_moe::name` where a profiler listens, timed where times are wanted."""
    if torch.compiler.is_compiling():  # a compiled graph has no stages: its parts are not the layer's
        return _NOBODY
    # a range costs the host microseconds, also without a profiler
    if torch.autograd._profiler_enabled():
        return _seen(name, times)
    return _NOBODY if times is None else times.span(name)


_NOBODY = nullcontext()


@contextmanager
def _seen(name: str, times: StageTimes | None) -> Iterator[None]:
    with record_function(f"ep_moe::{name}"), nullcontext() if times is None else times.span(name):
        yield


def balancedness(load: list[float] | list[int]) -> float:
    """Mean over ranks divided by the maximum: 1 is even, 1 / R is everything on one rank. 1 for no load."""
    most = max(load, default=0)
    return sum(load) / len(load) / most if most else 1.0
