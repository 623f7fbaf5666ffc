"""Rank arithmetic in plain integers: who sits in which group, in both views of the same ranks.

Attention sees `pp * dp * tp`, experts see `pp * replicas * ep * etp`; in both the last axis runs fastest.
With pp = 1, dp = 2, tp = 2, ep = 4, etp = 1:

    rank        0  1  2  3
    (dp, tp)   00 01 10 11      tp groups  {0 1} {2 3}
    ep          0  1  2  3      ep group   {0 1 2 3}

The arithmetic is on places, which count a job's ranks in this order. `RankLayout.ranks` gives the rank in
torch.distributed at each place: 0, 1, 2, ... unless a DeviceMesh orders them otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ep_moe.checks import INT32, as_whole, check_kind, shown
from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError
from ep_moe.parallel.nodes import NodeLayout


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Sizes, this rank's coordinates and every group's rank list. No torch, no communication.

    Args:
        world: The number of ranks that share the layout, all of the job or a submesh of it.
        rank: This process in torch.distributed.
        pp: Pipeline stages.
        dp: Data-parallel ranks of a stage.
        tp: Tensor-parallel ranks of a dp rank.
        ep: Ranks of an EP group; `replicas` EP groups stand side by side in a stage.
        etp: Ranks over which an expert is cut.
        tokens: Whether the tp ranks of one dp rank pass the same tokens.
        ranks: The rank in torch.distributed at each place. Default: 0, 1, 2, ...
        nodes: The node of each rank. Default: all are on one.

    Raises:
        ConfigError: the sizes do not fit the world or each other.
    """

    world: int
    rank: int
    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    tokens: Tokens = Tokens.REPLICATED
    ranks: tuple[int, ...] = ()
    nodes: NodeLayout | None = None

    @classmethod
    def from_config(
        cls,
        parallel: ParallelConfig,
        *,
        world: int,
        rank: int,
        ranks: Sequence[int] = (),
        nodes: NodeLayout | None = None,
    ) -> RankLayout:
        """Lay out the ranks by a configuration.

        Args:
            parallel: The sizes. An `ep` of None takes dp * tp / etp.
            world: The number of ranks.
            rank: This process in torch.distributed.
            ranks: The rank in torch.distributed at each place. Default: 0, 1, 2, ...
            nodes: The node of each rank. Default: all are on one.

        Returns:
            The layout of `rank`.

        Raises:
            ConfigError: the sizes do not fit the world or each other.
        """
        p = parallel
        ep = p.ep
        if ep is None:
            if p.etp < 1 or p.dp * p.tp % p.etp:
                raise ConfigError(
                    f"ParallelConfig.etp must divide dp * tp, got etp={p.etp}, dp={p.dp}, tp={p.tp}; set ep and etp so "
                    f"that ep * etp divides dp * tp"
                )
            ep = p.dp * p.tp // p.etp
        sizes = {"pp": p.pp, "dp": p.dp, "tp": p.tp, "ep": ep, "etp": p.etp}
        return cls(world=world, rank=rank, ranks=tuple(ranks), tokens=p.tokens, nodes=nodes, **sizes)

    def __post_init__(self) -> None:
        for name in ("world", "pp", "dp", "tp", "ep", "etp"):
            found = as_whole(getattr(self, name))
            if found is None or not 1 <= found <= INT32:
                raise ConfigError(f"RankLayout.{name} must be at least 1, got {shown(getattr(self, name))}")
            object.__setattr__(self, name, found)
        check_kind("RankLayout.tokens", self.tokens, Tokens)
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.world)))
        assert len(self.ranks) == self.world, f"{len(self.ranks)} ranks for {self.world} places"
        if as_whole(self.rank) is None or self.rank not in self.ranks:
            raise ConfigError(f"RankLayout.rank must be in [0, world), got rank={self.rank}, world={self.world}")
        if self.pp * self.dp * self.tp != self.world:
            raise ConfigError(
                f"world must equal pp * dp * tp, got world={self.world} and pp={self.pp} * dp={self.dp} * tp={self.tp} "
                f"= {self.pp * self.dp * self.tp}; launch that many ranks or change dp, tp or pp"
            )
        if self.stage % (self.ep * self.etp):
            raise ConfigError(
                f"ep * etp must divide dp * tp, got ep={self.ep} * etp={self.etp} = {self.ep * self.etp} and dp="
                f"{self.dp} * tp={self.tp} = {self.stage}; change ep or etp"
            )

    # --- sizes -------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def replicas(self) -> int:
        """EP groups with the same experts, side by side in one stage."""
        return self.stage // (self.ep * self.etp)

    @property
    def split(self) -> int:
        """Over how many tp ranks a token batch is split on entry: tp where tokens are replicated, else 1."""
        return self.tp if self.tokens is Tokens.REPLICATED else 1

    @property
    def token_ranks(self) -> int:
        """Ranks of a stage that have tokens of their own: over how many a batch's gradients are averaged."""
        return self.stage // self.split

    @property
    def lockstep(self) -> int:
        """Ranks that must enter one layer's collectives together: a contiguous block of so many places."""
        return math.lcm(self.split, self.ep * self.etp)

    def max_dispatch_tokens(self, tokens: int) -> int:
        """Bound the tokens that a rank dispatches: its own share and its etp peers'.

        Args:
            tokens: The most tokens that any rank passes to a layer.

        Returns:
            The most tokens that a rank dispatches.
        """
        return -(-tokens // self.split) * self.etp

    # --- this rank's coordinates -------------------------------------------------------------------------------

    @cached_property
    def place(self) -> int:
        """This rank's index among the places that the arithmetic is on."""
        return self.ranks.index(self.rank)

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.place // self.stage

    @property
    def dp_rank(self) -> int:
        """This rank's place in its dp group."""
        return self.place % self.stage // self.tp

    @property
    def tp_rank(self) -> int:
        """This rank's place in its tp group."""
        return self.place % self.tp

    @property
    def replica_rank(self) -> int:
        """Which of the stage's EP groups this rank is in."""
        return self.place % self.stage // (self.ep * self.etp)

    @property
    def ep_rank(self) -> int:
        """This rank's place in its EP group."""
        return self.place % (self.ep * self.etp) // self.etp

    @property
    def etp_rank(self) -> int:
        """This rank's place in its etp group."""
        return self.place % self.etp

    # --- nodes -------------------------------------------------------------------------------------------------

    @cached_property
    def _nodes(self) -> NodeLayout:
        return self.nodes or NodeLayout(self.ranks, (0,) * self.world, ("one host",))

    @property
    def paper_gpus(self) -> int | None:
        """GPUs of a node where the layout is of machines that are not here, else None."""
        return self._nodes.gpus

    @property
    def ep_nodes(self) -> list[list[int]]:
        """The ranks of this rank's EP group by node."""
        return self._nodes.split(self.group("ep"))

    @cached_property
    def ep_node_count(self) -> int:
        """On how many nodes the ranks of an EP group are, of the one on most; the same on all ranks."""
        return 1 if len(self._nodes.hosts) == 1 else max(len(self._nodes.split(group)) for group in self._ep_groups)

    @property
    def ep_ranks_per_node(self) -> int:
        """So many consecutive ranks of every EP group are on one node; `ep` where no such number tells where they are.
        The same on all ranks."""
        size = self.ep // self.ep_node_count
        for group in self._ep_groups if self.ep_node_count > 1 else ():
            parts = [group[at : at + size] for at in range(0, self.ep, size)]
            if self._nodes.split(group) != parts:
                return self.ep
        return size

    @property
    def across_nodes(self) -> str | None:
        """None where every EP group is on one node, else the nodes of the first one that is not."""
        if self.ep_node_count == 1:
            return None
        return next(self._nodes.described(group) for group in self._ep_groups if len(self._nodes.split(group)) > 1)

    @cached_property
    def without_rails(self) -> str | None:
        """None, or why the EP groups cannot be cut into nodes and rails; the same on all ranks."""
        if len(self._nodes.hosts) == 1:
            return None
        return next(filter(None, map(self._nodes.uneven, self._ep_groups)), None)

    @cached_property
    def _ep_groups(self) -> list[list[int]]:
        return self._blocks(self.ep, self.etp)

    # --- groups ------------------------------------------------------------------------------------------------

    def _blocks(self, size: int, stride: int) -> list[list[int]]:
        """All groups of `size` places with this stride, as ranks; blocks of size * stride places are contiguous."""
        block = size * stride
        return [
            list(self.ranks[base + offset : base + block : stride])
            for base in range(0, self.world, block)
            for offset in range(stride)
        ]

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """Every group of every kind in torch.distributed's ranks, the same lists on all of them.

        tp, dp, ep, etp are the usual ones; `lockstep` holds the ranks that enter a layer together; `expert_data` holds
        the ranks with the same shard of the same experts in other EP groups (their gradients belong together); `stage`
        holds all ranks of a pipeline stage. `ep_node` holds the ranks of an EP group that share a node, `ep_rail` those
        that have the same place on their nodes; each rank is alone in both where there is one node, or where an EP
        group lies unevenly on nodes.
        """
        alone = [[rank] for rank in self.ranks]
        apart = len(self._nodes.hosts) > 1 and self.without_rails is None
        return {
            "tp": self._blocks(self.tp, 1),
            "dp": self._blocks(self.dp, self.tp),
            "pp": self._blocks(self.pp, self.stage),
            "ep": self._ep_groups,
            "etp": self._blocks(self.etp, 1),
            "lockstep": self._blocks(self.lockstep, 1),
            "expert_data": self._blocks(self.replicas, self.ep * self.etp),
            "stage": self._blocks(self.stage, 1),
            "ep_node": [part for group in self._ep_groups for part in self._nodes.split(group)] if apart else alone,
            "ep_rail": [rail for group in self._ep_groups for rail in self._nodes.rails(group)] if apart else alone,
        }

    def group(self, kind: str) -> list[int]:
        """List the ranks of this rank's group of a kind.

        Args:
            kind: A key of `groups`.

        Returns:
            Ranks in torch.distributed, in the group's order.
        """
        return next(ranks for ranks in self.groups[kind] if self.rank in ranks)

    def describe(self) -> dict[str, int | str]:
        """List what all ranks must agree on.

        Returns:
            Sizes and `tokens` by name; nothing that differs between ranks.
        """
        names = ("world", "pp", "dp", "tp", "ep", "etp")
        return {name: getattr(self, name) for name in names} | {"tokens": self.tokens.value}

    def __str__(self) -> str:
        parts = " ".join(f"{name}={getattr(self, name)}" for name in ("pp", "dp", "tp", "ep", "etp"))
        whole = self.ranks == tuple(range(self.world))
        among = self.world if whole else f"ranks {', '.join(map(str, self.ranks))}"
        return f"rank {self.rank} of {among} ({parts} replicas={self.replicas} tokens={self.tokens.value})"


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `total` rows go to `parts` ranks; the first ones take the remainder."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)
