"""The least time that one call of a routed layer can take, from what the batch asks of the busiest rank.

apart     weights or products, whichever takes longer, and then the wire: rows travel while nothing is computed
overlap   the longest of the three, as if the other two ran beside it

Stages wait for the slowest rank, and so each counts that of the rank which has most of it. No launches, barriers,
router, ids, routing weights, scratch memory or activations between the products: nothing reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ep_moe.bench.experts import Rates
from ep_moe.config import MoEConfig


@dataclass(frozen=True)
class Kind:
    """What weights and rows are written in.

    weight, fp8_products: bytes per number of a weight, and whether products run at the fp8 rate
    out, back: bytes per number of a row on its way to the experts and back
    """

    weight: float
    fp8_products: bool
    out: float
    back: float


# fp8: a float32 scale per 128 columns of a row; those of the weights' 128 x 128 blocks are 0.02 % and left out
KINDS: Mapping[str, Kind] = {"bf16": Kind(2.0, False, 2.0, 2.0), "fp8": Kind(1.0, True, 1.0 + 4 / 128, 2.0)}


@dataclass(frozen=True)
class Load:
    """Of the busiest rank; expectations need not be whole.

    experts: that are touched; pairs: of a row and an expert
    rows: that a rank sends to others or receives from them, whichever are more; both: sent and received together
    """

    experts: float
    pairs: float
    rows: float
    both: float


@dataclass(frozen=True)
class Floor:
    """Microseconds. wire: out and then back; link: out and back at the same time, in both directions of it."""

    weights: float
    products: float
    wire: float
    link: float

    @property
    def apart(self) -> float:
        return max(self.weights, self.products) + self.wire

    @property
    def overlap(self) -> float:
        return max(self.weights, self.products, self.link)


def load_of(ids: Tensor, num_experts: int) -> Load:
    """ids: int64 [R, T, K] of all ranks' tokens, -1 for none; experts in order over the ranks, as many on each."""
    ranks, tokens, _ = ids.shape
    held = num_experts // ranks
    valid = ids >= 0
    counts = ids[valid].bincount(minlength=num_experts).view(ranks, held)
    goes = ids.new_zeros(ranks, tokens, ranks + 1).scatter_(2, (ids // held).where(valid, ranks), 1)[..., :ranks]
    rows = goes.sum(1).fill_diagonal_(0)  # from a rank, to a rank
    sent, received = rows.sum(1), rows.sum(0)
    return Load(
        experts=int((counts > 0).sum(1).max()),
        pairs=int(counts.sum(1).max()),
        rows=int(sent.maximum(received).max()),
        both=int((sent + received).max()),
    )


def floor(config: MoEConfig, load: Load, kind: Kind, rates: Rates, p2p: float) -> Floor:
    """p2p: bytes/s of a link in one direction, while all are busy."""
    numbers = config.hidden_size * (config.w13_rows + config.intermediate_size)  # of an expert
    row_us = 1e6 * config.hidden_size * (kind.out + kind.back) / p2p
    return Floor(
        weights=1e6 * load.experts * numbers * kind.weight / rates.copy,
        products=1e6 * 2 * load.pairs * numbers / (rates.fp8 if kind.fp8_products else rates.bf16),
        wire=load.rows * row_us,
        link=load.both / 2 * row_us,
    )


def training_operations(config: MoEConfig, load: Load) -> float:
    """Of forward and backward: each product of forward has two, one for the rows' gradient and one for the weight's."""
    return 3 * 2 * load.pairs * config.hidden_size * (config.w13_rows + config.intermediate_size)


def training_us(config: MoEConfig, load: Load, rates: Rates) -> float:
    """Of forward and backward in bf16, without the wire: products, or weights that are read twice and their gradients,
    whichever takes longer."""
    weights = 2.0 * load.experts * config.hidden_size * (config.w13_rows + config.intermediate_size)
    return 1e6 * max(3 * weights / rates.copy, training_operations(config, load) / rates.bf16)
