"""Floors: the least time of one call of a routed layer, from the load of the busiest rank. Also crossovers.

The load is counted from ids (`load_of`), or expected with uniform routing (`floor`), with the rows of `wire_rows`.
Times are microseconds. Stages wait for the slowest rank, so each stage counts on the rank that has most of it.

in turn      weights or products, whichever takes longer, plus the wire: nothing is computed while rows travel
overlapped   the longest of the three, as if the other two were hidden behind it

Floors omit launches, barriers, router, shared experts, scratch memory, activations and copies in memory.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ep_moe.bench.wire_rows import Way, deduplicated, experts_of, gathered, rank_shares, row_bytes, two_level
from ep_moe.config import MoEConfig, Wire
from ep_moe.eplb.cost import H200, Machine
from ep_moe.errors import ConfigError
from ep_moe.runtime.gpus import GPU

PER_HOST = 8
SECOND_LEVEL_US = 10.0  # assumed, not measured: additional time of a second level of all2all, for any number of tokens
# bytes per value of a weight with its share of scales, and whether products run at the fp8 rate
WEIGHTS = {
    "none": (2.0, False),
    "fp8_static": (1.0, True),
    "fp8_dynamic": (1.0, True),
    "fp8_channel": (1.0, True),  # and a float32 for each row
    "fp8_block": (1.0 + 4 / 128**2, True),  # a float32 for each block of 128 x 128
    "mxfp4": (0.53, False),
    "mxfp4_fp8": (0.53, True),
    "int4_fp8": (0.52, True),
    "int4": (0.52, False),
    "mxint4": (0.5625, False),
    "mxint4_fp8": (0.5625, True),
    "nvfp4a16": (0.5625, False),
}


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU. copy: bytes/s (read plus written); bf16, fp8: operations/s"""

    copy: float
    bf16: float
    fp8: float


@dataclass(frozen=True)
class Kind:
    """Weights and rows of a layer. scheme: a key of `WEIGHTS`; machine: its flops are the rate of the scheme"""

    name: str
    scheme: str
    wire: Wire
    machine: Machine

    def at(self, rates: Rates, link: float) -> Kind:
        """Return the same with measured rates. link: bytes/s in one direction, while all links are busy"""
        flops = rates.fp8 if WEIGHTS[self.scheme][1] else rates.bf16
        own = {"hbm_bytes_per_s": rates.copy, "flops": flops, "link_bytes_per_s": link}
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, **own))


# docs/reference/benchmarks: 1472 to 1479 TFLOP/s in fp8
KINDS = {
    "bf16": Kind("bf16", "none", Wire(), H200),
    "fp8": Kind("fp8", "fp8_block", Wire(dispatch="fp8_block"), dataclasses.replace(H200, flops=1475e12)),
}


def kind_of(gpu: GPU, scheme: str, wire: Wire, nic: float = H200.node_link_bytes_per_s) -> Kind:
    """Return weights, rows and rates of a GPU that need not be here.

    Args:
        gpu: The GPU with its rates.
        scheme: The scheme of the experts, a key of `WEIGHTS`.
        wire: The format of rows on the wire.
        nic: Bytes per second to other hosts.

    Returns:
        The kind.
    """
    rates = gpu.rates
    machine = dataclasses.replace(H200, node_link_bytes_per_s=nic)
    return Kind(scheme, scheme, wire, machine).at(Rates(rates.copy, rates.bf16, rates.fp8), rates.link)


# --- floors --------------------------------------------------------------------------------------------------------


def experts_touched(experts: int, top_k: int, held: int, tokens: float, share: float = 1.0) -> float:
    """Return the expected number of `held` experts that at least one of `tokens` tokens (of all ranks) selects.

    share: share of an expert's routes that go to this replica
    """
    return held * (1 - math.pow(1 - share * top_k / experts, tokens))


@dataclass(frozen=True)
class Floor:
    """Microseconds of the slowest rank. link: time of the busiest link if all transfers overlap; None for out + back"""

    weights: float
    products: float
    out: float
    back: float
    link: float | None = None

    @property
    def experts(self) -> float:
        return max(self.weights, self.products)

    @property
    def wire(self) -> float:
        return self.out + self.back

    @property
    def in_turn(self) -> float:
        return self.experts + self.wire

    @property
    def overlapped(self) -> float:
        return max(self.experts, self.wire if self.link is None else self.link)

    @property
    def bound(self) -> str:
        if self.wire > self.experts:
            return "n"
        return "w" if self.weights >= self.products else "p"

    def __str__(self) -> str:
        return f"{self.in_turn:.0f}/{self.overlapped:.0f} {self.bound}"


def expert_times(
    config: MoEConfig, scheme: str, experts: float, pairs: float, copy: float, flops: float
) -> tuple[float, float]:
    """Return the microseconds to read the weights of `experts` experts, and to multiply `pairs` of row and expert."""
    numbers = config.hidden_size * (config.w13_rows + config.intermediate_size)  # values of an expert's weights
    return 1e6 * experts * numbers * WEIGHTS[scheme][0] / copy, 1e6 * 2 * pairs * numbers / flops


@dataclass(frozen=True)
class Load:
    """The load of the busiest rank. Expected values need not be integers.

    experts: number of experts with rows
    pairs: number of pairs of row and expert
    rows: number of rows sent to other ranks or received from them, whichever is larger
    both: number of rows sent and received together
    """

    experts: float
    pairs: float
    rows: float
    both: float


def load_of(ids: Tensor, num_experts: int) -> Load:
    """Count the load. Experts are placed in order over the ranks, equally many on each.

    ids: int64 [R, T, K] of all ranks' tokens, -1 for none
    """
    ranks, tokens, _ = ids.shape
    held = num_experts // ranks
    valid = ids >= 0
    counts = ids[valid].bincount(minlength=num_experts).view(ranks, held)
    goes = ids.new_zeros(ranks, tokens, ranks + 1).scatter_(2, (ids // held).where(valid, ranks), 1)[..., :ranks]
    rows = goes.sum(1).fill_diagonal_(0)  # [from rank, to rank]
    sent, received = rows.sum(1), rows.sum(0)
    return Load(
        experts=int((counts > 0).sum(1).max()),
        pairs=int(counts.sum(1).max()),
        rows=int(sent.maximum(received).max()),
        both=int((sent + received).max()),
    )


def counted_floor(config: MoEConfig, load: Load, kind: Kind) -> Floor:
    """Return the floor of a layer with a given load. Ids and routing weights do not count as bytes on the wire."""
    machine = kind.machine
    out, back = (1e6 * size / machine.link_bytes_per_s for size in row_bytes(config, kind.wire, 0))
    weights, products = expert_times(
        config, kind.scheme, load.experts, load.pairs, machine.hbm_bytes_per_s, machine.flops
    )
    return Floor(weights, products, load.rows * out, load.rows * back, load.both / 2 * (out + back))


def floor(
    config: MoEConfig, kind: Kind, ranks: int, tokens: float, *,
    per_host: int = PER_HOST, way: Way = deduplicated, redundant: int = 0,
) -> Floor:  # fmt: skip
    """Return the floor of a layer with uniform routing, from expected values of one rank.

    Args:
        config: The layer.
        kind: Weights, rows and rates.
        ranks: Number of ranks of the EP group.
        tokens: Tokens that each rank sends. A fraction means that only some ranks have tokens.
        per_host: Number of ranks of a host, which NVLink connects.
        way: The kind of transport.
        redundant: Slots in addition to one per expert.

    Returns:
        The floor.

    Raises:
        ConfigError: There are no tokens, the ranks do not fit hosts, or the experts cannot be placed on them.
    """
    if not tokens > 0:
        raise ConfigError(f"tokens must be positive, got {tokens}")
    rows, machine = way(config, ranks, per_host, redundant), kind.machine
    shares = rank_shares(config.num_experts, ranks, redundant)
    experts, top_k, everyone = config.num_experts, config.top_k, tokens * ranks
    touched = max(
        sum(experts_touched(experts, top_k, held, everyone, float(share)) for share, held in one) for one in shares
    )
    routes = float(max(map(experts_of, shares))) * everyone * top_k / experts
    weights, products = expert_times(config, kind.scheme, touched, routes, machine.hbm_bytes_per_s, machine.flops)
    out, back = rows.us(config, kind.wire, machine)
    link = tokens * rows.busy_us(config, kind.wire, machine) if rows.in_turn else None
    return Floor(weights, products, tokens * out, tokens * back, link)


DRAWN = 4096  # most tokens of all ranks for which routes are drawn; with more, the busiest rank is near the mean
_DRAWS = 8


def busiest_floor(
    config: MoEConfig, kind: Kind, ranks: int, tokens: int, *, per_host: int, way: Way, redundant: int = 0
) -> Floor:
    """As `floor`, but for few tokens with the mean load of the busiest rank, because few tokens load ranks unevenly.

    The load is that of drawn routes. With redundant experts, or uneven numbers of experts per rank, it is `floor`.
    """
    found = floor(config, kind, ranks, tokens, per_host=per_host, way=way, redundant=redundant)
    if ranks == 1 or redundant or config.num_experts % ranks or ranks * tokens > DRAWN:
        return found
    experts, pairs = _busiest(config.num_experts, config.top_k, ranks, tokens)
    machine = kind.machine
    weights, products = expert_times(config, kind.scheme, experts, pairs, machine.hbm_bytes_per_s, machine.flops)
    return dataclasses.replace(found, weights=weights, products=products)


@cache
def _busiest(experts: int, top_k: int, ranks: int, tokens: int) -> tuple[float, float]:
    """Return the number of experts with rows and of routes on the busiest rank, as means of uniform draws."""
    generator = torch.Generator("cpu").manual_seed(0)
    loads = []
    for _ in range(_DRAWS):
        scores = torch.rand(ranks, tokens, experts, generator=generator, device="cpu")
        loads.append(load_of(scores.topk(top_k, dim=-1).indices, experts))
    return sum(load.experts for load in loads) / _DRAWS, sum(load.pairs for load in loads) / _DRAWS


# --- crossovers ----------------------------------------------------------------------------------------------------


def faster_between(extra_us: float, saved_us: float) -> tuple[float, float]:
    """Return the first and last number of tokens per rank at which an alternative is faster.

    It costs `extra_us` more in any case and saves `saved_us` per token. The last number is infinite if there is no end,
    and the first one if it is never faster.
    """
    if extra_us > 0:
        return (max(extra_us / saved_us, 1), math.inf) if saved_us > 0 else (math.inf, math.inf)
    if saved_us >= 0:
        return 1, math.inf
    last = extra_us / saved_us
    return (1, last) if last >= 1 else (math.inf, math.inf)


def tokens_text(between: tuple[float, float]) -> str:
    first, last = between
    if math.isinf(first):
        return "never"
    if not math.isinf(last):
        return f"to {math.floor(last)}"
    return "always" if first == 1 else f"from {math.ceil(first)}"


@dataclass(frozen=True)
class Crossover:
    """A flat all2all compared with a two-level one, for an EP group on several hosts.

    Args:
        flat_us: Microseconds on the wire for each token of every rank, out and back, by the floor.
        two_level_us: The same for the two-level all2all.
        two_level_pays: The numbers of tokens per rank at which two levels are faster, in words. It is assumed that they
            cost `SECOND_LEVEL_US` more.
    """

    flat_us: float
    two_level_us: float
    two_level_pays: str


def two_levels_beside_flat(config: MoEConfig, kind: Kind, ranks: int, per_host: int, redundant: int = 0) -> Crossover:
    """Compare the flat and the hierarchical transport.

    Args:
        config: The layer.
        kind: Rows and rates.
        ranks: Number of ranks of the EP group.
        per_host: Number of ranks of a host, which NVLink connects.
        redundant: Slots in addition to one per expert.

    Returns:
        The comparison.
    """
    flat, two = (
        sum(way(config, ranks, per_host, redundant).us(config, kind.wire, kind.machine))
        for way in (deduplicated, two_level)
    )
    return Crossover(flat, two, tokens_text(faster_between(SECOND_LEVEL_US, flat - two)))


def saved_by_dedup(config: MoEConfig, kind: Kind, ranks: int, per_host: int = PER_HOST, redundant: int = 0) -> float:
    """Return the microseconds per token of each rank that `deduplicated` saves over `gathered`, out plus back."""
    of_gathered, of_dedup = (
        sum(way(config, ranks, per_host, redundant).us(config, kind.wire, kind.machine))
        for way in (gathered, deduplicated)
    )
    return of_gathered - of_dedup


def wire_bound_from(config: MoEConfig, kind: Kind, tokens: float, per_host: int = PER_HOST) -> int | None:
    """Return the smallest R that divides E from which on the wire takes longer than the experts, at `tokens` per rank.

    None if it does not even with one expert on each rank.
    """
    found = None
    for ranks in range(config.num_experts, 0, -1):
        if config.num_experts % ranks or (ranks > per_host and ranks % per_host):
            continue
        if floor(config, kind, ranks, tokens, per_host=per_host).bound != "n":
            return found
        found = ranks
    return found


def training_operations(config: MoEConfig, load: Load, *, frozen: bool = False) -> float:
    """Return the operations of forward and backward.

    For each product of forward, backward has one for the rows' gradient and, unless weights are frozen, one for the
    weight's gradient.
    """
    return (2 if frozen else 3) * 2 * load.pairs * config.hidden_size * (config.w13_rows + config.intermediate_size)


def training_us(config: MoEConfig, load: Load, rates: Rates, *, frozen: bool = False) -> float:
    """Return the microseconds of forward and backward in bf16, without the wire.

    The larger of: the products; reading weights twice and, unless they are frozen, writing their gradients.
    """
    weights = 2.0 * load.experts * config.hidden_size * (config.w13_rows + config.intermediate_size)
    operations = training_operations(config, load, frozen=frozen)
    return 1e6 * max((2 if frozen else 3) * weights / rates.copy, operations / rates.bf16)
