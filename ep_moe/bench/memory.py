"""What one layer takes on this rank, beside what `EPContext.plan` says: from torch's allocator, and outside of it what
libraries and symmetric memory take from the driver."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_moe.bench.overlap import batch
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import barrier


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


def measure(context: EPContext, config: MoEConfig, make: Callable[[], MoELayer | None]) -> Held | None:
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
