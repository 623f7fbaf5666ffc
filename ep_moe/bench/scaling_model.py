"""The arithmetic of `bench.scaling`: bytes on the wire, floors of a routed layer and crossovers, from shapes and rates.

Uniform routing, experts in order over R ranks, expectations. Times are microseconds of the rank with the most experts,
which no other exceeds. Launches, barriers, router, shared experts, activations and copies in memory are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.config import MoEConfig, Wire
from ep_moe.eplb.cost import H200, LayerTime, Machine
from ep_moe.errors import ConfigError

PER_HOST = 8
DTYPE = torch.bfloat16
ROUTE_BYTES = 8  # an id and a weight beside a row


@dataclass(frozen=True)
class Kind:
    """Weights and rows of a layer. bytes_per_weight: with its share of scales; machine: flops at the rate of `name`."""

    name: str
    bytes_per_weight: float
    wire: Wire
    machine: Machine


# docs/reference/benchmarks: 1472 to 1479 TFLOP/s in fp8. Blocks of 128 x 128 have a float32 scale.
KINDS = {
    "bf16": Kind("bf16", 2.0, Wire(), H200),
    "fp8": Kind("fp8", 1.0 + 4 / 128**2, Wire(dispatch="fp8_block"), dataclasses.replace(H200, flops=1475e12)),
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
    """Microseconds of the slowest rank."""

    weights: float
    products: float
    out: float
    back: float

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
        return max(self.experts, self.wire)

    @property
    def bound(self) -> str:
        if self.wire > self.experts:
            return "n"
        return "w" if self.weights >= self.products else "p"

    def __str__(self) -> str:
        return f"{self.in_turn:.0f}/{self.overlapped:.0f} {self.bound}"


def floor(
    config: MoEConfig, kind: Kind, ranks: int, tokens: float, *, per_host: int = PER_HOST, way: Way = deduplicated
) -> Floor:
    """Of a layer with `tokens` on each rank, of the rank with the most experts."""
    if not tokens > 0:
        raise ConfigError(f"tokens must be positive, got {tokens}")
    rows = way(config, ranks, per_host)
    cost = LayerTime.of(config, kind.machine, bytes_per_weight=kind.bytes_per_weight)
    held = -(-config.num_experts // ranks)
    touched = experts_touched(config.num_experts, config.top_k, held, tokens * ranks)
    routes = tokens * ranks * config.top_k * held / config.num_experts
    out, back = rows.us(config, kind.wire, kind.machine)
    return Floor(
        weights=touched * cost.expert_bytes / kind.machine.hbm_bytes_per_s * 1e6,
        products=routes * cost.flop_per_row / kind.machine.flops * 1e6,
        out=tokens * out,
        back=tokens * back,
    )


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
