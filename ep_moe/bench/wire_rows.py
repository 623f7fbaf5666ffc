"""Rows that a rank receives from others, for each kind of transport: the model of bytes of `fit` and `bench.scaling`.

Routing is uniform: a token has K of E experts without repetition. Experts lie as `ExpertMap.redundant` puts them, and
a token takes any replica of an expert equally often (`Replicas.SPREAD`). Numbers are expectations for each token of
every rank. `tests/distributed/test_wire_rows.py` counts them on ranks.

flat        a row to each rank that has an expert of the token, over NVLink or the network
two levels  a row to each host that has one, to the rank with the sender's local rank; from there to ranks of the host
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Protocol

import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.config import MoEConfig, Wire
from ep_moe.eplb.cost import Machine
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY, ExpertMap

DTYPE = torch.bfloat16
ROUTE_BYTES = 8  # an id and a weight beside a row

Shares = tuple[tuple[Fraction, int], ...]  # a share of an expert's routes, and how many experts have it


@dataclass(frozen=True)
class Rows:
    """Of the rank that receives most, which no rank exceeds on any link in either direction; the way back is the same
    with sender and receiver exchanged.

    Args:
        near: Over NVLink.
        far: Over its network card.
        routes: Ids and weights that travel with a row.
        in_turn: The second link waits for the first; else both are busy at once.
    """

    near: float
    far: float
    routes: int
    in_turn: bool = False

    def bytes(self, config: MoEConfig, wire: Wire) -> tuple[float, float]:
        """Out and back."""
        out, back = row_bytes(config, wire, self.routes)
        return (self.near + self.far) * out, (self.near + self.far) * back

    def us(self, config: MoEConfig, wire: Wire, machine: Machine) -> tuple[float, float]:
        """Out and back, in microseconds."""
        return self._times(config, wire, sum(self._links(machine)) if self.in_turn else max(self._links(machine)))

    def busy_us(self, config: MoEConfig, wire: Wire, machine: Machine) -> float:
        """Of the slower link, both ways: what parts of a call that follow each other cannot go below."""
        return sum(self._times(config, wire, max(self._links(machine))))

    def _links(self, machine: Machine) -> tuple[float, float]:
        return 1e6 * self.near / machine.link_bytes_per_s, 1e6 * self.far / machine.node_link_bytes_per_s

    def _times(self, config: MoEConfig, wire: Wire, us_per_byte: float) -> tuple[float, float]:
        out, back = row_bytes(config, wire, self.routes)
        return us_per_byte * out, us_per_byte * back


class Way(Protocol):
    """How a kind of transport sends rows."""

    def __call__(self, config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
        """Count rows.

        Args:
            config: The layer.
            ranks: Of the EP group.
            per_host: So many consecutive ones share a host.
            redundant: Slots beyond one per expert.

        Returns:
            The rows.

        Raises:
            ConfigError: there are no such ranks, or the experts cannot lie on them.
        """


def deduplicated(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Flat all2all, a token once to each rank that has an expert of it. A token with experts on several ranks of
    another host travels there as often."""
    per_host = check_ranks(ranks, per_host)
    one = _most_reached(config, ranks, per_host, redundant, together=1)
    return Rows((per_host - 1) * one, (ranks - per_host) * one, config.top_k)


def two_level(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """A token once to each host that has an expert of it, and there once to each such rank. Rows of the own host, too,
    go through the rank with the sender's local rank, which is the sender."""
    per_host = check_ranks(ranks, per_host)
    hosts = ranks // per_host
    one, host = (_most_reached(config, ranks, per_host, redundant, together=together) for together in (1, per_host))
    return Rows((ranks - hosts) * one, (hosts - 1) * host, config.top_k, in_turn=True)


def per_route(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Flat all2all, a row for each route of a token, even where two go to one rank."""
    per_host = check_ranks(ranks, per_host)
    most = max(map(experts_of, rank_shares(config.num_experts, ranks, redundant)))
    one = float(config.top_k * most / config.num_experts)
    return Rows((per_host - 1) * one, (ranks - per_host) * one, 1)


def gathered(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """All-gather and reduce-scatter: (R - 1) * T rows. They cross the network once per host, to the rank of the same
    number, and are spread (or summed) over NVLink: what collectives of several hosts can do at best. `redundant`, a
    parameter of every `Way`, changes nothing."""
    per_host = check_ranks(ranks, per_host)
    hosts = ranks // per_host
    return Rows(ranks - hosts, hosts - 1, config.top_k)


def gathered_in_turn(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """The same rows, over the rails first and then within the hosts."""
    rows = gathered(config, ranks, per_host, redundant)
    return Rows(rows.near, rows.far, rows.routes, in_turn=True)


def gathered_over_rails(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """A token to every host, and there once to each rank that has an expert of it."""
    spread = two_level(config, ranks, per_host, redundant)
    return Rows(spread.near, gathered(config, ranks, per_host, redundant).far, config.top_k, in_turn=True)


WAYS: Mapping[str, Way] = {  # of transports
    **dict.fromkeys(("local", "nvlink_p2p", "flashinfer_nvlink", "torch_a2a", "deepep", "deepep_static"), deduplicated),
    "allgather": gathered,
    "hierarchical": two_level,
    "hierarchical_nvlink": gathered_over_rails,
    "hierarchical_static": gathered_in_turn,
    "pplx": per_route,
}


def remote_ranks(experts: int, top_k: int, ranks: int, redundant: int = 0) -> float:
    """d_r: other ranks that a token travels to, the mean over senders."""
    check_ranks(ranks, per_host=ranks)
    return sum(reached(experts, top_k, ranks, redundant, together=1)) * (ranks - 1) / ranks


def check_ranks(ranks: int, per_host: int) -> int:
    """Ranks of one host."""
    if ranks < 1:
        raise ConfigError(f"ranks must be at least 1, got {ranks}")
    if per_host < 1 or (ranks > per_host and ranks % per_host):
        raise ConfigError(f"per_host={per_host} must divide ranks={ranks} or be larger; give whole hosts")
    return min(per_host, ranks)


def row_bytes(config: MoEConfig, wire: Wire, routes: int) -> tuple[int, int]:
    """Of one row out, with scales, ids and weights, and of one back."""
    dispatch_shape = DispatchShape(
        hidden_size=config.hidden_size, top_k=config.top_k, slots_per_rank=1, num_ranks=1, dtype=DTYPE, wire=wire
    )
    back = 1 if wire.combine == "fp8" else DTYPE.itemsize
    return dispatch_shape.row_bytes + dispatch_shape.scale_bytes + routes * ROUTE_BYTES, config.hidden_size * back


# --- experts of a rank ---------------------------------------------------------------------------------------------


def filling(experts: int, ranks: int) -> int:
    """The fewest redundant slots with which all ranks have as many slots, none of them empty."""
    return -experts % ranks


@cache
def rank_shares(experts: int, ranks: int, redundant: int) -> frozenset[Shares]:
    """What ranks have: all different ones. An expert with n replicas has a share of 1 / n on each of their ranks."""
    return frozenset(_shares(experts, ranks, redundant, together=1))


def experts_of(shares: Shares) -> Fraction:
    """How many experts' routes these are, in all."""
    return sum((share * number for share, number in shares), Fraction(0))


@cache
def reached(experts: int, top_k: int, ranks: int, redundant: int, together: int) -> tuple[float, ...]:
    """Probability that a token goes there, of each run of `together` ranks: each rank, or each host."""
    return tuple(_reached(experts, top_k, shares) for shares in _shares(experts, ranks, redundant, together))


def _most_reached(config: MoEConfig, ranks: int, per_host: int, redundant: int, together: int) -> float:
    """Of the run of ranks that most tokens go to. Groups of experts count between hosts alone: multiples of measured
    layers, which are of one host, are of floors without them."""
    if ranks > per_host and not redundant and config.num_experts % ranks == 0:
        found = within_groups(config, config.num_experts // ranks * together)
        if found is not None:
            return found
    return max(reached(config.num_experts, config.top_k, ranks, redundant, together))


def within_groups(config: MoEConfig, held: int) -> float | None:
    """Probability that a token goes to `held` experts in a row, whose first is a multiple of them, where the router
    chooses groups of experts first (`RoutingConfig.num_groups`).

    Whole groups are reached if one of them is chosen: an upper bound, which uniform scores come within 2 % of at 2
    experts per chosen group. A part of a group is reached as if the experts of chosen groups were equally likely.

    Args:
        config: The layer.
        held: So many experts.

    Returns:
        The probability. None where all groups are chosen, or the experts are neither whole groups nor an even part of
        one.
    """
    groups, best = config.routing.num_groups, config.routing.top_groups
    per_group = config.num_experts // groups
    whole, rest = divmod(held, per_group)
    if best == groups or (rest and (whole or per_group % held)):
        return None
    if whole:
        return _hit(groups, whole, best)
    return best / groups * _hit(best * per_group, held, config.top_k)


def _hit(experts: int, held: int, top_k: int) -> float:
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def _shares(experts: int, ranks: int, redundant: int, together: int) -> list[Shares]:
    expert_map = ExpertMap.redundant(experts, ranks, redundant)
    replicas, slots = expert_map.replica_count, expert_map.slots_per_rank * together
    found = []
    for first in range(0, expert_map.num_physical, slots):
        here = Counter(expert_map.physical_to_logical[first : first + slots])
        here.pop(EMPTY, None)
        numbers = Counter(Fraction(count, replicas[expert]) for expert, count in here.items())
        found.append(tuple(sorted(numbers.items())))
    return found


@cache
def _reached(experts: int, top_k: int, shares: Shares) -> float:
    """1 - the mean, over all choices of K experts, of the probability that each of them is taken elsewhere.

    The sum over choices of products is the coefficient of z^K in the product of 1 + z * (1 - share) over all experts.
    """
    elsewhere = experts - sum(number for _, number in shares)
    total = [Fraction(1)] + [Fraction(0)] * top_k
    for share, number in (*shares, (Fraction(0), elsewhere)):
        power = [math.comb(number, n) * (1 - share) ** n for n in range(top_k + 1)]
        total = [sum((total[i] * power[n - i] for i in range(n + 1)), Fraction(0)) for n in range(top_k + 1)]
    return float(1 - total[top_k] / math.comb(experts, top_k))
