"""Times that all ranks agree on, and attempts that fail on all ranks together, for `ep-moe tune`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_moe.context import EPContext
from ep_moe.errors import PeerTimeout


def by_the_clock(calls: Sequence[Callable[[], Any]], rounds: int, before: Callable[[], Any]) -> list[float]:
    """Return the median wall-clock time of each call in microseconds. Calls take turns; the first round is warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            before()
            start = time.perf_counter()
            call()
            own.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(own[1:]) for own in times]


def slowest(context: EPContext, times: Sequence[float]) -> list[float]:
    nanoseconds = torch.tensor([round(us * 1e3) for us in times], dtype=torch.int64, device=context.device)
    rows = context.rank_groups["lockstep"].exchange(nanoseconds)
    return [max(column) / 1e3 for column in zip(*rows, strict=True)]


def barrier(context: EPContext) -> None:
    context.rank_groups["lockstep"].exchange(torch.zeros(1, dtype=torch.int64, device=context.device))


def attempt(context: EPContext, what: str, make: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (result of `make`, None), or on all ranks (None, reason) if it failed on any. Raise PeerTimeout."""
    found, problem = None, None
    try:
        found = make()
    except PeerTimeout:
        raise
    except Exception as error:  # any error of a library: the other candidates must still be measured
        problem = error
    try:
        context.consensus.raise_on_all_ranks(what, problem)
    except PeerTimeout:
        raise
    except Exception as error:
        return None, str(error)
    return found, None
