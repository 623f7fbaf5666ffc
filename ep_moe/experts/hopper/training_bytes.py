"""Bytes of a training step of `bf16_triton`, computed from shapes: what forward saves, and what is freed again."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.config import MoEConfig
from ep_moe.experts.hopper.gradients import UNCOUNTED
from ep_moe.experts.layouts import expected_pairs

_NUMBER, _SCALE = 4, 4  # bytes of a route's number or weight, and of a scale of E4M3


@dataclass(frozen=True)
class StepShape:
    """The shapes of a step on one rank, for a uniform router.

    rows: received rows; slots: local experts; hidden: H; first: rows of w13 (2 * I, or I without a gate)
    itemsize: bytes of a number of rows and weights
    """

    config: MoEConfig
    rows: int
    slots: int
    hidden: int
    first: int
    itemsize: int

    @property
    def inner(self) -> int:
        return self.first // (1 + self.config.activation.gated)

    @property
    def routes(self) -> int:
        return self.rows * self.config.top_k

    @property
    def uncounted(self) -> bool:
        """Whether all possible pairs have memory, so that the host need not wait for their number (`Routes.sort`)."""
        return self.routes * self.first * self.itemsize <= UNCOUNTED

    @property
    def pairs(self) -> int:
        """The number of pairs that have memory."""
        if self.uncounted:
            return self.routes
        return round(self.rows * expected_pairs(self.config, self.slots, self.config.top_k))


def saved_bytes(shape: StepShape, *, recompute: bool) -> int:
    """Count the bytes that forward saves: routes, and the first product's results without `recompute`."""
    if not shape.slots:
        return 0
    kept = 0 if recompute else shape.pairs * shape.first * shape.itemsize
    return 4 * (2 * shape.routes + shape.slots) + kept


def temporary_bytes(shape: StepShape, *, recompute: bool, float8: bool, recorded: bool) -> int:
    """Count the most bytes that a step holds at once beside what forward saves, without gradients of weights.

    recorded: the step is recorded as CUDA graphs. They keep this memory, which the layers of a stream share
    """
    if not shape.slots:
        return 0
    pairs, size = shape.pairs, shape.itemsize
    forward, stages = (_float8_stages if float8 else _stages)(shape)
    if recorded:  # dy, da, dh and x have memory of their own, and the graphs share that of all other tensors
        own = pairs * (2 * shape.hidden + shape.inner + shape.first) * size
        most = own + max(forward, *(other for _, other in stages))
    else:
        most = max(forward, *(rows + other for rows, other in stages))
    again = pairs * shape.first * size if recompute else 0
    return most + again + _NUMBER * (pairs + shape.routes)  # numbers of routes, and gradients of their weights


def _stages(shape: StepShape) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the bytes of forward, and of backward until w2's gradient and behind it: of rows, and of other tensors."""
    pairs, size = shape.pairs, shape.itemsize
    rows, act, sums = pairs * shape.hidden * size, pairs * shape.inner * size, shape.rows * shape.hidden * size
    return rows + max(act, sums), ((rows + act, 0), (rows, sums))


def _float8_stages(shape: StepShape) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the same with operands that are rounded to E4M3, which include matrices."""
    pairs, slots, hidden, inner, first = shape.pairs, shape.slots, shape.hidden, shape.inner, shape.first
    rows, act = pairs * hidden * shape.itemsize, pairs * inner * shape.itemsize
    sums = shape.rows * hidden * shape.itemsize

    def rounded(count: int, width: int) -> int:
        return count * (width + _SCALE)

    forward = max(
        rounded(pairs, hidden) + rounded(slots * first, hidden),
        rounded(pairs, inner) + rows + rounded(slots * hidden, inner),
        rows + sums,
    )
    until_w2 = max(rounded(pairs, hidden) + rounded(slots * inner, hidden), rounded(pairs, first))
    behind = rounded(pairs, first) + max(rounded(slots * hidden, first), sums)
    return forward, ((rows + act, until_w2), (rows, behind))
