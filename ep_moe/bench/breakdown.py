"""What one layer takes: time, by stage of a call, and memory of this rank beside what `EPContext.plan` says.

Stages are dispatch, experts, combine and the rest, from the kernels of several calls. Calls follow each other in one
graph, so that all but the first begin without the skew between ranks. Each stage lasts from the end of the one before
it to the end of its own last kernel: launches and waits count where the next kernel is waited for, and the four add up
to the time from call to call.

Memory is from torch's allocator, and outside of it what libraries and symmetric memory take from the driver.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.bench.overlap import Span, batch, timeline, travels
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import barrier

CALLS = 6


@dataclass(frozen=True)
class Stages:
    """Microseconds. rest: before the rows set out (placement, ids, rounding of rows)."""

    dispatch: float
    experts: float
    combine: float
    rest: float


def measure_stages(context: EPContext, call: Callable[[], Any]) -> Stages | None:
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


@dataclass(frozen=True)
class Held:
    """Bytes. plan: named by `EPContext.plan`; held: after a call; peak: at the most within one.

    A driver gives memory in pieces of 2 MiB, and a kernel's code counts where this process had not loaded it yet.
    """

    plan: int
    held: int
    peak: int


@dataclass(frozen=True)
class _Mark:
    allocated: int
    peak: int
    outside: int  # of torch's allocator; negative, for what is left of the device is what is known


def measure_memory(context: EPContext, config: MoEConfig, make: Callable[[], MoELayer | None]) -> Held | None:
    """In a context that has nothing yet; None where `make` gives nothing. Collective."""
    tokens = context.max_tokens or 1
    x, routing = batch(context, config, tokens)
    barrier(context.device, context.rank_groups["ep"].group)  # so that NCCL has its own buffers before
    before = _mark(context.device)
    layer = make()
    if layer is None:
        return None
    for _ in range(2):  # the first call makes what is made once
        gc.collect()
        torch.cuda.reset_peak_memory_stats(context.device)
        out = layer.forward_routed(x, routing)
        torch.cuda.synchronize(context.device)
        del out
    after = _mark(context.device)
    return Held(sum(context.plan().values()), *taken(before, after))


def taken(before: _Mark, after: _Mark) -> tuple[int, int]:
    """Held and peak bytes between two marks."""
    outside = after.outside - before.outside
    return after.allocated - before.allocated + outside, after.peak - before.allocated + outside


def _mark(device: torch.device) -> _Mark:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return _Mark(allocated, peak, -free - torch.cuda.memory_reserved(device))
