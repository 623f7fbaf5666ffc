"""The least time that one call of a routed layer can take, from what it asks of the busiest rank, and crossovers.

The load is counted from ids (`load_of`) or expected of uniform routing with experts in order over R ranks (`floor`).
Times are microseconds. Stages wait for the slowest rank, so each counts that of the rank which has most of it.

in turn      weights or products, whichever takes longer, and then the wire: rows travel while nothing is computed
overlapped   the longest of the three, as if the other two ran beside it

Launches, barriers, router, shared experts, scratch memory, activations and copies in memory are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.all2all.base import DispatchShape
from ep_moe.config import MoEConfig, Wire
from ep_moe.eplb.cost import H200, Machine
from ep_moe.errors import ConfigError

PER_HOST = 8
DTYPE = torch.bfloat16
ROUTE_BYTES = 8  # an id and a weight beside a row
# bytes per number of a weight with its share of scales, and whether products run at the fp8 rate
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
    "nvfp4a16": (0.5625, False),
}


@dataclass(frozen=True)
class Rates:
    """What this GPU does: bytes/s copied (read and written), operations/s in bf16 and fp8."""

    copy: float
    bf16: float
    fp8: float


@dataclass(frozen=True)
class Kind:
    """Weights and rows of a layer. scheme: of `WEIGHTS`; machine: flops at the rate of the scheme"""

    name: str
    scheme: str
    wire: Wire
    machine: Machine

    def at(self, rates: Rates, link: float) -> Kind:
        """The same on a machine that was measured. link: bytes/s in one direction, while all links are busy"""
        flops = rates.fp8 if WEIGHTS[self.scheme][1] else rates.bf16
        own = {"hbm_bytes_per_s": rates.copy, "flops": flops, "link_bytes_per_s": link}
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, **own))


# docs/reference/benchmarks: 1472 to 1479 TFLOP/s in fp8
KINDS = {
    "bf16": Kind("bf16", "none", Wire(), H200),
    "fp8": Kind("fp8", "fp8_block", Wire(dispatch="fp8_block"), dataclasses.replace(H200, flops=1475e12)),
}


# --- rows ----------------------------------------------------------------------------------------------------------


def hit(experts: int, held: int, top_k: int) -> float:
    """Probability that a token has one of a rank's `held` experts: 1 - C(E - held, K) / C(E, K)."""
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def remote_ranks(experts: int, top_k: int, ranks: int) -> float:
    """d_r: other ranks that a token travels to, the mean over senders; where R does not divide E the first ranks hold
    one expert more (`ExpertMap.linear`)."""
    check_ranks(experts, ranks, per_host=ranks)
    base, extra = divmod(experts, ranks)
    reached = extra * hit(experts, base + 1, top_k) + (ranks - extra) * hit(experts, base, top_k)
    return reached * (ranks - 1) / ranks


@dataclass(frozen=True)
class Rows:
    """What the rank with the most experts receives for each token of every rank, which no rank exceeds on any link in
    either direction; the way back is the same with sender and receiver exchanged.

    near, far: rows over NVLink, and over its network card; routes: ids and weights that travel with a row
    """

    near: float
    far: float
    routes: int

    def bytes(self, config: MoEConfig, wire: Wire) -> tuple[float, float]:
        """Out and back, for each token of every rank."""
        out, back = row_bytes(config, wire, self.routes)
        return (self.near + self.far) * out, (self.near + self.far) * back

    def us(self, config: MoEConfig, wire: Wire, machine: Machine) -> tuple[float, float]:
        """Out and back, for each token of every rank. NVLink and the network are busy at the same time."""
        slower = max(self.near / machine.link_bytes_per_s, self.far / machine.node_link_bytes_per_s) * 1e6
        out, back = row_bytes(config, wire, self.routes)
        return slower * out, slower * back


Way = Callable[[MoEConfig, int, int], Rows]


def deduplicated(config: MoEConfig, ranks: int, per_host: int) -> Rows:
    """All2all, a token once to each rank that has an expert of it. A token with experts on several ranks of another
    host travels there as often."""
    per_host = check_ranks(config.num_experts, ranks, per_host)
    one = hit(config.num_experts, -(-config.num_experts // ranks), config.top_k)
    return Rows((per_host - 1) * one, (ranks - per_host) * one, config.top_k)


def per_route(config: MoEConfig, ranks: int, per_host: int) -> Rows:
    """All2all, a row for each route of a token, even where two go to one rank."""
    per_host = check_ranks(config.num_experts, ranks, per_host)
    one = config.top_k * -(-config.num_experts // ranks) / config.num_experts
    return Rows((per_host - 1) * one, (ranks - per_host) * one, 1)


def gathered(config: MoEConfig, ranks: int, per_host: int) -> Rows:
    """All-gather and reduce-scatter: (R - 1) * T rows. They cross the network once per host, to the rank of the same
    number, and are spread (or summed) over NVLink: what collectives of several hosts can do at best."""
    per_host = check_ranks(config.num_experts, ranks, per_host)
    hosts = ranks // per_host
    return Rows(ranks - hosts, hosts - 1, config.top_k)


def check_ranks(experts: int, ranks: int, per_host: int) -> int:
    """Ranks of one host."""
    if not 1 <= ranks <= experts:
        raise ConfigError(f"ranks must be in [1, {experts}], the number of experts, got {ranks}")
    if per_host < 1 or (ranks > per_host and ranks % per_host):
        raise ConfigError(f"per_host={per_host} must divide ranks={ranks} or be larger; choose other --ranks")
    return min(per_host, ranks)


def row_bytes(config: MoEConfig, wire: Wire, routes: int) -> tuple[int, int]:
    """Of one row out, with scales, ids and weights, and of one back."""
    dispatch_shape = DispatchShape(
        hidden_size=config.hidden_size, top_k=config.top_k, slots_per_rank=1, num_ranks=1, dtype=DTYPE, wire=wire
    )
    back = 1 if wire.combine == "fp8" else DTYPE.itemsize
    return dispatch_shape.row_bytes + dispatch_shape.scale_bytes + routes * ROUTE_BYTES, config.hidden_size * back


# --- floors --------------------------------------------------------------------------------------------------------


def experts_touched(experts: int, top_k: int, held: int, tokens: float) -> float:
    """Of `held` experts those that some of `tokens` tokens (of all ranks) chose."""
    return held * (1 - math.pow(1 - top_k / experts, tokens))


@dataclass(frozen=True)
class Floor:
    """Microseconds of the slowest rank. link: out and back at the same time, None for one after the other"""

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
    """To read the weights of so many experts, and to multiply so many pairs of a row and an expert."""
    numbers = config.hidden_size * (config.w13_rows + config.intermediate_size)  # of an expert
    return 1e6 * experts * numbers * WEIGHTS[scheme][0] / copy, 1e6 * 2 * pairs * numbers / flops


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


def counted_floor(config: MoEConfig, load: Load, kind: Kind) -> Floor:
    """Of a layer with this load. Ids and routing weights do not count as bytes on the wire."""
    machine = kind.machine
    out, back = (1e6 * size / machine.link_bytes_per_s for size in row_bytes(config, kind.wire, 0))
    weights, products = expert_times(
        config, kind.scheme, load.experts, load.pairs, machine.hbm_bytes_per_s, machine.flops
    )
    return Floor(weights, products, load.rows * out, load.rows * back, load.both / 2 * (out + back))


def floor(
    config: MoEConfig, kind: Kind, ranks: int, tokens: float, *, per_host: int = PER_HOST, way: Way = deduplicated
) -> Floor:
    """Of a layer with `tokens` on each rank, of the rank with the most experts."""
    if not tokens > 0:
        raise ConfigError(f"tokens must be positive, got {tokens}")
    rows, machine = way(config, ranks, per_host), kind.machine
    held = -(-config.num_experts // ranks)
    touched = experts_touched(config.num_experts, config.top_k, held, tokens * ranks)
    routes = tokens * ranks * config.top_k * held / config.num_experts
    weights, products = expert_times(config, kind.scheme, touched, routes, machine.hbm_bytes_per_s, machine.flops)
    out, back = rows.us(config, kind.wire, machine)
    return Floor(weights, products, tokens * out, tokens * back)


# --- crossovers ----------------------------------------------------------------------------------------------------


def faster_between(extra_us: float, saved_us: float) -> tuple[float, float]:
    """First and last number of tokens per rank at which what costs `extra_us` more in any case and saves `saved_us` per
    token is the faster; infinity as the last for no end, as the first for never."""
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


def saved_by_dedup(config: MoEConfig, kind: Kind, ranks: int, per_host: int = PER_HOST) -> float:
    """Microseconds per token of each rank that `deduplicated` takes less than `gathered`, both ways, or more (< 0)."""
    ways = (sum(way(config, ranks, per_host).us(config, kind.wire, kind.machine)) for way in (gathered, deduplicated))
    of_gathered, of_dedup = ways
    return of_gathered - of_dedup


def wire_bound_from(config: MoEConfig, kind: Kind, tokens: float, per_host: int = PER_HOST) -> int | None:
    """The smallest R that divides E from which on, at `tokens` on each rank, the wire takes longer than the experts;
    None if it does not even with one expert on a rank."""
    found = None
    for ranks in range(config.num_experts, 0, -1):
        if config.num_experts % ranks or (ranks > per_host and ranks % per_host):
            continue
        if floor(config, kind, ranks, tokens, per_host=per_host).bound != "n":
            return found
        found = ranks
    return found


def training_operations(config: MoEConfig, load: Load) -> float:
    """Of forward and backward: each product of forward has two, one for the rows' gradient and one for the weight's."""
    return 3 * 2 * load.pairs * config.hidden_size * (config.w13_rows + config.intermediate_size)


def training_us(config: MoEConfig, load: Load, rates: Rates) -> float:
    """Of forward and backward in bf16, without the wire: products, or weights that are read twice and their gradients,
    whichever takes longer."""
    weights = 2.0 * load.experts * config.hidden_size * (config.w13_rows + config.intermediate_size)
    return 1e6 * max(3 * weights / rates.copy, training_operations(config, load) / rates.bf16)
