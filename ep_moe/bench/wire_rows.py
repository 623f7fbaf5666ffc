"""The number of rows that a rank receives from others, for each kind of transport. `fit` and `bench.scaling` use it.

Routing is uniform: a token has K distinct experts of E. Experts are placed as by `ExpertMap.redundant`, and a token
uses all replicas of an expert equally often (`Replicas.SPREAD`). Numbers are expected values for each token of every
rank. `tests/distributed/test_wire_rows.py` counts them on ranks.

flat        a row goes to each rank that has an expert of the token, over NVLink or the network
two levels  a row goes once to each host that has one, to the rank with the sender's local rank, and from there to the
            ranks of the host
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

Shares = tuple[tuple[Fraction, int], ...]  # (share of an expert's routes, number of experts with this share)


@dataclass(frozen=True)
class Rows:
    """Rows per token of the rank that receives most. No rank exceeds them on any link in either direction.

    Combine has the same rows, with sender and receiver exchanged.

    Args:
        near: Rows over NVLink.
        far: Rows over the rank's network card.
        routes: Number of ids and weights that are sent with a row.
        in_turn: The second link waits for the first. Otherwise both are busy at once.
    """

    near: float
    far: float
    routes: int
    in_turn: bool = False

    def bytes(self, config: MoEConfig, wire: Wire) -> tuple[float, float]:
        """Return the bytes per token, out and back."""
        out, back = row_bytes(config, wire, self.routes)
        return (self.near + self.far) * out, (self.near + self.far) * back

    def us(self, config: MoEConfig, wire: Wire, machine: Machine) -> tuple[float, float]:
        """Return the microseconds per token, out and back."""
        return self._times(config, wire, sum(self._links(machine)) if self.in_turn else max(self._links(machine)))

    def busy_us(self, config: MoEConfig, wire: Wire, machine: Machine) -> float:
        """Return the microseconds per token of the slower link, out plus back.

        It is a lower bound also for a call in parts, which overlap.
        """
        return sum(self._times(config, wire, max(self._links(machine))))

    def _links(self, machine: Machine) -> tuple[float, float]:
        return 1e6 * self.near / machine.link_bytes_per_s, 1e6 * self.far / machine.node_link_bytes_per_s

    def _times(self, config: MoEConfig, wire: Wire, us_per_byte: float) -> tuple[float, float]:
        out, back = row_bytes(config, wire, self.routes)
        return us_per_byte * out, us_per_byte * back


class Way(Protocol):
    """A function that counts the rows of a kind of transport."""

    def __call__(self, config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
        """Count rows.

        Args:
            config: The layer.
            ranks: Number of ranks of the EP group.
            per_host: Number of consecutive ranks that share a host.
            redundant: Slots in addition to one per expert.

        Returns:
            The rows.

        Raises:
            ConfigError: The ranks do not fit hosts, or the experts cannot be placed on them.
        """


def deduplicated(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows of a flat all2all, which sends a token once to each rank that has one of its experts.

    A token with experts on several ranks of another host is sent to that host several times.
    """
    per_host = check_ranks(ranks, per_host)
    one = _most_reached(config, ranks, per_host, redundant, together=1)
    return Rows((per_host - 1) * one, (ranks - per_host) * one, config.top_k)


def two_level(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows of a two-level all2all.

    It sends a token once to each host that has one of its experts, and there once to each rank that has one. On the
    sender's own host the rank with the sender's local rank is the sender itself.
    """
    per_host = check_ranks(ranks, per_host)
    hosts = ranks // per_host
    one, host = (_most_reached(config, ranks, per_host, redundant, together=together) for together in (1, per_host))
    return Rows((ranks - hosts) * one, (hosts - 1) * host, config.top_k, in_turn=True)


def per_route(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows of a flat all2all that sends a row for each route of a token, even if two go to one rank."""
    per_host = check_ranks(ranks, per_host)
    most = max(map(experts_of, rank_shares(config.num_experts, ranks, redundant)))
    one = float(config.top_k * most / config.num_experts)
    return Rows((per_host - 1) * one, (ranks - per_host) * one, 1)


def gathered(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows of all-gather and reduce-scatter: (R - 1) * T.

    A row crosses the network once per host, to the rank with the same local rank, and is spread (or summed) over
    NVLink. This is the best that collectives over several hosts can do. `redundant` has no effect.
    """
    per_host = check_ranks(ranks, per_host)
    hosts = ranks // per_host
    return Rows(ranks - hosts, hosts - 1, config.top_k)


def gathered_in_turn(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows as `gathered` does, for a transport that first uses the rails and then the links within hosts."""
    rows = gathered(config, ranks, per_host, redundant)
    return Rows(rows.near, rows.far, rows.routes, in_turn=True)


def gathered_over_rails(config: MoEConfig, ranks: int, per_host: int, redundant: int = 0) -> Rows:
    """Count rows of a transport that sends a token to every host, and there to each rank with one of its experts."""
    spread = two_level(config, ranks, per_host, redundant)
    return Rows(spread.near, gathered(config, ranks, per_host, redundant).far, config.top_k, in_turn=True)


WAYS: Mapping[str, Way] = {  # by name of a transport
    **dict.fromkeys(("local", "nvlink_p2p", "flashinfer_nvlink", "torch_a2a", "deepep", "deepep_static"), deduplicated),
    "allgather": gathered,
    "hierarchical": two_level,
    "hierarchical_nvlink": gathered_over_rails,
    "hierarchical_static": gathered_in_turn,
    "pplx": per_route,
}


def remote_ranks(experts: int, top_k: int, ranks: int, redundant: int = 0) -> float:
    """Return d_r, the number of other ranks to which a token is sent, as the mean over senders."""
    check_ranks(ranks, per_host=ranks)
    return sum(reached(experts, top_k, ranks, redundant, together=1)) * (ranks - 1) / ranks


def check_ranks(ranks: int, per_host: int) -> int:
    """Return the number of ranks of one host. Raise ConfigError if hosts would not be full."""
    if ranks < 1:
        raise ConfigError(f"ranks must be at least 1, got {ranks}")
    if per_host < 1 or (ranks > per_host and ranks % per_host):
        raise ConfigError(f"per_host={per_host} must divide ranks={ranks} or be larger; give whole hosts")
    return min(per_host, ranks)


def row_bytes(config: MoEConfig, wire: Wire, routes: int) -> tuple[int, int]:
    """Return the bytes of one row out, with scales, ids and weights, and of one row back."""
    dispatch_shape = DispatchShape(
        hidden_size=config.hidden_size, top_k=config.top_k, slots_per_rank=1, num_ranks=1, dtype=DTYPE, wire=wire
    )
    back = 1 if wire.combine == "fp8" else DTYPE.itemsize
    return dispatch_shape.row_bytes + dispatch_shape.scale_bytes + routes * ROUTE_BYTES, config.hidden_size * back


# --- experts of a rank ---------------------------------------------------------------------------------------------


def filling(experts: int, ranks: int) -> int:
    """Return the least number of redundant slots with which all ranks have equally many slots, none of them empty."""
    return -experts % ranks


@cache
def rank_shares(experts: int, ranks: int, redundant: int) -> frozenset[Shares]:
    """Return the distinct shares of ranks. An expert with n replicas has a share of 1 / n on each of their ranks."""
    return frozenset(_shares(experts, ranks, redundant, together=1))


def experts_of(shares: Shares) -> Fraction:
    """Return the sum of shares: to how many whole experts they are equivalent."""
    return sum((share * number for share, number in shares), Fraction(0))


@cache
def reached(experts: int, top_k: int, ranks: int, redundant: int, together: int) -> tuple[float, ...]:
    """Return the probability that a token goes to each run of `together` consecutive ranks (a rank, or a host)."""
    return tuple(_reached(experts, top_k, shares) for shares in _shares(experts, ranks, redundant, together))


def _most_reached(config: MoEConfig, ranks: int, per_host: int, redundant: int, together: int) -> float:
    """Return the probability of the run of ranks to which most tokens go.

    Expert groups of the router count only between hosts. Predictions use multiples of floors of measured layers. These
    were measured on one host, and their floors ignore groups.
    """
    if ranks > per_host and not redundant and config.num_experts % ranks == 0:
        found = within_groups(config, config.num_experts // ranks * together)
        if found is not None:
            return found
    return max(reached(config.num_experts, config.top_k, ranks, redundant, together))


def within_groups(config: MoEConfig, held: int) -> float | None:
    """Return the probability that a token goes to `held` consecutive experts, if the router first selects groups.

    The first of these experts is a multiple of `held`; groups are `RoutingConfig.num_groups`. Whole groups count as
    reached if one of them is selected. This is an upper bound; uniform scores come within 2 % of it at 2 experts per
    selected group. Within a part of a group, all experts of selected groups count as equally likely.

    Args:
        config: The layer.
        held: The number of experts.

    Returns:
        The probability. None if all groups are selected, or if the experts are neither whole groups nor an even part
        of one.
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
    """Return the probability that at least one of a token's K experts is used here.

    It is 1 - the mean, over all choices of K experts, of the probability that each of them is used elsewhere. The sum
    over choices of products is the coefficient of z^K in the product of 1 + z * (1 - share) over all experts.
    """
    elsewhere = experts - sum(number for _, number in shares)
    total = [Fraction(1)] + [Fraction(0)] * top_k
    for share, number in (*shares, (Fraction(0), elsewhere)):
        power = [math.comb(number, n) * (1 - share) ** n for n in range(top_k + 1)]
        total = [sum((total[i] * power[n - i] for i in range(n + 1)), Fraction(0)) for n in range(top_k + 1)]
    return float(1 - total[top_k] / math.comb(experts, top_k))
