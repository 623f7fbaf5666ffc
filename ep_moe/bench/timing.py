"""Timing of GPU work: medians, calls taking turns, so that the clock drifts for all."""

from __future__ import annotations

import statistics
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
    graphs = [_captured(call, repeat) for call in calls]
    return _medians([graph.replay for graph in graphs], repeat, replays, before)


def eager(
    calls: Sequence[Callable[[], Any]],
    *,
    repeat: int = 5,
    replays: int = 9,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """The same without a graph: the host's work counts where the GPU waits for it."""
    return _medians([lambda call=call: [call() for _ in range(repeat)] for call in calls], repeat, replays, before)  # type: ignore[misc]


def _medians(calls: Sequence[Callable[[], Any]], repeat: int, replays: int, before: Callable[[], Any]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(replays + _WARM):
        for call, own in zip(calls, times, strict=True):
            before()
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) * 1e3 / repeat)
    return [statistics.median(own[_WARM:]) for own in times]


def _captured(call: Callable[[], Any], repeat: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeat` calls, after three outside it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            call()
    return graph
