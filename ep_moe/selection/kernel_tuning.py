"""Tuning of one layer's kernel: one rank measures, all ranks use what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ep_moe.context import TUNING_S, EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.placement.expert_map import ExpertMap

Kernel = Experts | FusedExperts


def tuned_on_one_rank(
    kernel: Kernel,
    context: EPContext,
    placed: ExpertMap,
    rows: Sequence[int],
    cache: str | Path | None,
    name: str,
) -> list[int]:
    """Let the rank with the most experts tune a kernel. Collective.

    Args:
        kernel: The layer's, on each rank.
        context: Its ranks.
        placed: Which rank has how many experts.
        rows: Numbers of received rows to measure.
        cache: A folder that keeps findings, None for none.
        name: Of the layer, for errors.

    Returns:
        What `kernel.tune` found there, on all ranks.
    """
    busiest = max(range(placed.num_ranks), key=placed.num_slots)
    found: list[int] = context.consensus.share(
        f"tune {name}",
        lambda: kernel.tune(_counts(rows), None if cache is None else Path(cache).expanduser()),
        owner=busiest * context.layout.etp,  # within the first EP group of those that run together
        deadline_s=TUNING_S,
    )
    return found


def _counts(rows: Sequence[int]) -> list[int]:
    for count in rows:
        if type(count) is not int or count < 1:
            raise ConfigError(f"tune: rows must be integers of at least 1, got {count!r}")
    return list(rows)
