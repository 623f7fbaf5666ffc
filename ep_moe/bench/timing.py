"""Timing of work on the device that is current (`on_device`), or on the CPU where there is no GPU: medians, calls
taking turns, so that the clock drifts for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_WARM = 2  # measurements that are thrown away


def replayed(
    calls: Sequence[Callable[[], Any]],
    *,
    repeat: int = 5,
    replays: int = 15,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Median microseconds of each call inside a CUDA graph of `repeat` of them. before: what precedes each replay."""
    graphs = [captured(call, repeat) for call in calls]
    return in_turns([graph.replay for graph in graphs], repeat, replays, before)


def eager(
    calls: Sequence[Callable[[], Any]],
    *,
    repeat: int = 5,
    replays: int = 9,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """The same without a graph: the host's work counts where the GPU waits for it."""
    return in_turns([lambda call=call: [call() for _ in range(repeat)] for call in calls], repeat, replays, before)  # type: ignore[misc]


def host(
    call: Callable[[], Any], *, calls: int = 20, samples: int = 10, before: Callable[[], Any] = lambda: None
) -> float:
    """Median over `samples` of the microseconds that the host needs for a call: `calls` back to back, of which none
    waits for the device: it is idle when they begin, and its queue has room for all their kernels.
    before: what precedes each sample."""
    on_gpu, times = torch.cuda.is_available(), list[float]()
    for _ in range(samples + _WARM):
        before()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
        if on_gpu:
            torch.cuda.synchronize()
    return statistics.median(times[_WARM:])


def in_turns(calls: Sequence[Callable[[], Any]], repeat: int, replays: int, before: Callable[[], Any]) -> list[float]:
    """Median microseconds of a call, of which each of `calls` is `repeat`. Each is called once more ahead, uncounted:
    ranks whose hosts start apart wait for each other there."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(replays + _WARM):
        for call, own in zip(calls, times, strict=True):
            before()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            call()
            start = _now()
            call()
            own.append(_us_since(start) / repeat)
    return [statistics.median(own[_WARM:]) for own in times]


def _now() -> Any:
    """An event on a GPU, else seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us_since(start: Any) -> float:
    end = _now()
    if isinstance(end, float):
        return float(end - start) * 1e6
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def captured(call: Callable[[], Any], repeat: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeat` calls, after three outside it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # one that fails leaves its stream on
        for _ in range(repeat):
            call()
    return graph
