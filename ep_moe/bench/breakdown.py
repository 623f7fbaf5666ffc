"""Measures the time of each stage of a layer's call, and the memory of this rank compared with `EPContext.plan`.

Stages are dispatch, experts, combine and the rest, from a profile of several calls. The calls follow each other in one
graph, so that all but the first begin without skew between ranks. A stage lasts from the end of the previous one to
the end of its own last kernel. Launches and waits therefore count for the stage of the next kernel, and the four stages
add up to the time from call to call.

Memory is that of torch's allocator, and what libraries and symmetric memory take from the driver besides it.
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

from ep_moe.bench.overlap import Span, batch, is_transport_kernel, timeline
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import barrier

CALLS = 6


@dataclass(frozen=True)
class Stages:
    """Microseconds of each stage. rest: before rows are sent (placement, ids, rounding of rows)"""

    dispatch: float
    experts: float
    combine: float
    rest: float


def measure_stages(context: EPContext, call: Callable[[], Any]) -> Stages | None:
    """Return the stages of a call, as means over ranks; None for a kernel that contains all stages. Collective.

    Means are taken because a wait on one rank is caused by work on another.
    """
    own = split(timeline(lambda: [call() for _ in range(CALLS)], context.device))
    found = torch.tensor([0.0] * 4 if own is None else astuple(own), dtype=torch.float64, device=context.device)
    dist.all_reduce(found)
    return None if own is None else Stages(*(found / context.layout.ep).tolist())


def split(spans: Sequence[Span]) -> Stages | None:
    """Return medians over all calls but the first; None unless each call has kernels of dispatch and of combine."""
    calls, stage = list[dict[str, float]](), "combine"  # of each call, the end of each stage's last kernel
    for name, _, end in sorted(spans, key=lambda span: span[1]):
        before, stage = stage, _following(name, stage)
        if not calls or (before == "combine" != stage):
            calls.append({})
        calls[-1][stage] = max(end, calls[-1].get(stage, end))
    if calls and "combine" not in calls[-1]:  # kernels after the last call
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
    """Return the stage of a kernel, given that of the kernel before it."""
    if name in ("_give", "_receive") or ("a2a" in name.lower() and "combine" in name.lower()):
        return "combine"
    if is_transport_kernel(name) and not name.startswith("Memcpy"):  # a copy belongs to the stage around it
        return "dispatch"
    return {"combine": "rest", "dispatch": "experts"}.get(stage, stage)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of memory. plan: stated by `EPContext.plan`; held: after a call; peak: the most within a call.

    A driver allocates in units of 2 MiB. A kernel's code counts if this process loads it for the first time.
    """

    plan: int
    held: int
    peak: int


@dataclass(frozen=True)
class _Mark:
    allocated: int
    peak: int
    # bytes outside torch's allocator, up to a constant: only the device's free memory is known, so it is negative
    outside: int


def measure_memory(context: EPContext, config: MoEConfig, make: Callable[[], MoELayer | None]) -> MemoryUse | None:
    """Measure the memory of a layer in a new context; None if `make` returns None. Collective."""
    tokens = context.max_tokens or 1
    x, routing = batch(context, config, tokens)
    barrier(context.device, context.rank_groups["ep"].group)  # lets NCCL allocate its own buffers before the first mark
    before = _mark(context.device)
    layer = make()
    if layer is None:
        return None
    for _ in range(2):  # the first call allocates what is allocated once
        gc.collect()
        torch.cuda.reset_peak_memory_stats(context.device)
        out = layer.forward_routed(x, routing)
        torch.cuda.synchronize(context.device)
        del out
    after = _mark(context.device)
    return MemoryUse(sum(context.plan().values()), *taken(before, after))


def taken(before: _Mark, after: _Mark) -> tuple[int, int]:
    """Return held and peak bytes between two marks."""
    outside = after.outside - before.outside
    return after.allocated - before.allocated + outside, after.peak - before.allocated + outside


def _mark(device: torch.device) -> _Mark:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return _Mark(allocated, peak, -free - torch.cuda.memory_reserved(device))
