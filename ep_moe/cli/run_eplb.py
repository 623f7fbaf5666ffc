"""`ep-moe run --eplb`: the same text again, while experts move and once they have."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_moe.context import EPContext
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.planner.score import critical_path
from ep_moe.layer import MoELayer
from ep_moe.placement.placement import LayerStats

BYTES_PER_STEP = 1 << 20  # small, so that the demo's move takes more than one step
_PASSES = 40  # over the text, at most, until all that is to move has


@dataclass(frozen=True, kw_only=True)
class Rebalanced:
    """What one rebalance did.

    before, after: balancedness of the text's load, sum over layers of the mean rank / sum of the fullest
    perplexity: after it; sent_bytes: between ranks, all of them together
    forwards: while it was under way; usual_ms, longest_ms: the median forward before, and the longest of those, each
        with its `ExpertBalancer.step`, of the slowest rank
    """

    before: float
    after: float
    perplexity: float
    sent_bytes: int
    forwards: int
    usual_ms: float
    longest_ms: float


def rebalance(
    layers: Sequence[MoELayer], context: EPContext, forward: Callable[[int], tuple[float, int]], steps: int
) -> Rebalanced:
    """forward: one of the text's `steps` forwards -> its negative log likelihood and tokens, on all ranks alike."""
    for layer in layers:
        layer.expert_weights.requires_grad_(False)
        layer.placement.reset_load()
    config = EPLBConfig(interval=steps, window=steps, bytes_per_step=BYTES_PER_STEP)
    usual: list[float] = []
    moving: list[float] = []
    before: tuple[LayerStats, ...] = ()
    with ExpertBalancer(list(layers), context, config) as balancer:
        for number in range(_PASSES * steps):
            under_way = balancer.state is not State.IDLE
            if before and balancer.state not in (State.PLANNING, State.MOVING):
                break
            start = time.perf_counter()
            forward(number % steps)
            balancer.step()
            (moving if under_way else usual).append(1e3 * (time.perf_counter() - start))
            before = before or balancer.stats().layers
        balancer.settle()
        received = balancer.stats().received_bytes
    nll, count, after = _again(layers, forward, steps)
    facts = torch.tensor([nll, count, received], dtype=torch.float64)
    if context.layout.tp_rank:
        facts[:2] = 0  # the same text as tp rank 0's
    facts = _reduced(facts, context, dist.ReduceOp.SUM)
    slowest = _reduced(torch.tensor([*usual, *moving], dtype=torch.float64), context, dist.ReduceOp.MAX)
    return Rebalanced(
        before=critical_path([layer.rank_load for layer in before]),
        after=critical_path([layer.rank_load for layer in after]),
        perplexity=math.exp(float(facts[0] / facts[1])),
        sent_bytes=int(facts[2]),
        forwards=len(moving),
        usual_ms=float(slowest[: len(usual)].median()),
        longest_ms=float(slowest[len(usual) :].max()) if moving else 0.0,
    )


def _again(
    layers: Sequence[MoELayer], forward: Callable[[int], tuple[float, int]], steps: int
) -> tuple[float, int, list[LayerStats]]:
    """The text once more, counted anew."""
    for layer in layers:
        layer.placement.reset_load()
    parts = [forward(step) for step in range(steps)]
    return sum(nll for nll, _ in parts), sum(count for _, count in parts), [layer.stats() for layer in layers]


def _reduced(values: torch.Tensor, context: EPContext, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    values = values.to(context.device)
    dist.all_reduce(values, op=operation)
    return values.cpu()
