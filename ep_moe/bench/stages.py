"""Where the time of a layer call goes: dispatch, experts, combine and the rest, from the kernels of several calls.

Calls follow each other in one graph, so that all but the first begin without the skew between ranks. Each stage lasts
from the end of the one before it to the end of its own last kernel: launches and waits count where the next kernel is
waited for, and the four add up to the time from call to call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.bench.overlap import Span, timeline, travels
from ep_moe.context import EPContext

CALLS = 6


@dataclass(frozen=True)
class Stages:
    """Microseconds. rest: before the rows set out (placement, ids, rounding of rows)."""

    dispatch: float
    experts: float
    combine: float
    rest: float


def measure(context: EPContext, call: Callable[[], Any]) -> Stages | None:
    """The mean over ranks, for a wait on one is another's work; None where a kernel does it all. Collective."""
    own = split(timeline(lambda: [call() for _ in range(CALLS)], context.device))
    found = torch.tensor([0.0] * 4 if own is None else astuple(own), dtype=torch.float64, device=context.device)
    dist.all_reduce(found)
    return None if own is None else Stages(*(found / context.layout.ep).tolist())


def split(spans: Sequence[Span]) -> Stages | None:
    """Medians over the calls but the first; None unless each has kernels of dispatch and of combine."""
    calls, stage = list[dict[str, float]](), "combine"  # where each stage's last kernel ends
    for name, _, end in sorted(spans, key=lambda span: span[1]):
        before, stage = stage, _following(name, stage)
        if not calls or (before == "combine" != stage):
            calls.append({})
        calls[-1][stage] = max(end, calls[-1].get(stage, end))
    if calls and "combine" not in calls[-1]:  # what follows the last call
        calls.pop()
    if len(calls) < 2 or any("dispatch" not in call or "combine" not in call for call in calls):
        return None
    lasts: dict[str, list[float]] = {"rest": [], "dispatch": [], "experts": [], "combine": []}
    for last, call in pairwise(calls):
        at = last["combine"]
        for name, times in lasts.items():
            end = max(at, call.get(name, at))
            times.append(end - at)
            at = end
    return Stages(**{name: statistics.median(times) for name, times in lasts.items()})


def _following(name: str, stage: str) -> str:
    """The stage of a kernel, given that of the one before it."""
    if name in ("_give", "_receive") or ("a2a" in name.lower() and "combine" in name.lower()):
        return "combine"
    if travels(name) and not name.startswith("Memcpy"):  # a copy belongs to whatever it is among
        return "dispatch"
    return {"combine": "rest", "dispatch": "experts"}.get(stage, stage)
