"""RankLayout: the groups of every rank, computed in plain integers.

The same ranks form two grids: `pp * dp * tp` for attention, and `pp * replicas * ep * etp` for experts. In both the
last axis runs fastest. With pp = 1, dp = 2, tp = 2, ep = 4, etp = 1:

    rank        0  1  2  3
    (dp, tp)   00 01 10 11      tp groups  {0 1} {2 3}
    ep          0  1  2  3      ep group   {0 1 2 3}

Groups are computed on places: a rank's place is its index in this order. `RankLayout.ranks` has the rank in
torch.distributed at each place: 0, 1, 2, ... unless a DeviceMesh has another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ep_moe.checks import INT32_MAX, as_whole, check_kind, shown
from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError
from ep_moe.parallel.nodes import NodeLayout


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The sizes of all groups, this rank's coordinates, and the ranks of every group. It does not communicate.

    Args:
        world: The number of ranks that share the layout: all ranks of the job, or those of a submesh.
        rank: This process's rank in torch.distributed.
        pp: Pipeline stages.
        dp: Data-parallel ranks of a stage.
        tp: Tensor-parallel ranks of a dp rank.
        ep: Ranks of an EP group. A stage has `replicas` EP groups.
        etp: Ranks that share one expert's intermediate size.
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
        """Create the layout of a configuration.

        Args:
            parallel: The sizes. An `ep` of None becomes dp * tp / etp.
            world: The number of ranks.
            rank: This process's rank in torch.distributed.
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
            if found is None or not 1 <= found <= INT32_MAX:
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
        """The number of EP groups in a stage. All of them hold the same experts."""
        return self.stage // (self.ep * self.etp)

    @property
    def split(self) -> int:
        """The number of tp ranks over which a layer splits a call's tokens: tp if tokens are replicated, else 1."""
        return self.tp if self.tokens is Tokens.REPLICATED else 1

    @property
    def token_ranks(self) -> int:
        """The number of ranks of a stage with different tokens, over which a batch's gradients are averaged."""
        return self.stage // self.split

    @property
    def lockstep(self) -> int:
        """The number of ranks that must enter one layer's collectives together. They have consecutive places."""
        return math.lcm(self.split, self.ep * self.etp)

    def max_dispatch_tokens(self, tokens: int) -> int:
        """Return the most tokens that a rank dispatches: its share of a call's tokens and the shares of its etp peers.

        Args:
            tokens: The most tokens that any rank passes to a layer.

        Returns:
            The most tokens that a rank dispatches.
        """
        return -(-tokens // self.split) * self.etp

    # --- this rank's coordinates -------------------------------------------------------------------------------

    @cached_property
    def place(self) -> int:
        """This rank's index in `ranks`."""
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
        """The index of this rank's EP group in the stage."""
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
        """GPUs per node if the layout is only planned, for other machines; else None."""
        return self._nodes.gpus

    @property
    def ep_nodes(self) -> list[list[int]]:
        """The ranks of this rank's EP group by node."""
        return self._nodes.split(self.group("ep"))

    @cached_property
    def ep_node_count(self) -> int:
        """The largest number of nodes of any EP group; the same on all ranks."""
        return 1 if len(self._nodes.hosts) == 1 else max(len(self._nodes.split(group)) for group in self._ep_groups)

    @property
    def ep_ranks_per_node(self) -> int:
        """The number of consecutive ranks of an EP group that share a node; the same on all ranks.

        It is `ep` if the nodes do not divide every EP group into equal blocks of consecutive ranks.
        """
        size = self.ep // self.ep_node_count
        for group in self._ep_groups if self.ep_node_count > 1 else ():
            parts = [group[at : at + size] for at in range(0, self.ep, size)]
            if self._nodes.split(group) != parts:
                return self.ep
        return size

    @property
    def across_nodes(self) -> str | None:
        """None if every EP group is on one node, else text that lists the nodes of the first group that is not."""
        if self.ep_node_count == 1:
            return None
        return next(self._nodes.described(group) for group in self._ep_groups if len(self._nodes.split(group)) > 1)

    @cached_property
    def without_rails(self) -> str | None:
        """None, or why the EP groups cannot be divided into nodes and rails; the same on all ranks."""
        if len(self._nodes.hosts) == 1:
            return None
        return next(filter(None, map(self._nodes.uneven, self._ep_groups)), None)

    @cached_property
    def _ep_groups(self) -> list[list[int]]:
        return self._blocks(self.ep, self.etp)

    # --- groups ------------------------------------------------------------------------------------------------

    def _blocks(self, size: int, stride: int) -> list[list[int]]:
        """Return all groups of `size` places with a stride, as ranks. They divide blocks of size * stride places."""
        block = size * stride
        return [
            list(self.ranks[base + offset : base + block : stride])
            for base in range(0, self.world, block)
            for offset in range(stride)
        ]

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """All groups of every kind, as ranks in torch.distributed. The lists are the same on all ranks.

        - `tp`, `dp`, `pp`, `ep`, `etp`: the usual groups.
        - `lockstep`: the ranks that enter a layer's collectives together.
        - `expert_data`: the ranks with the same shard of the same experts, one of each EP group. Their gradients are
          summed.
        - `stage`: all ranks of a pipeline stage.
        - `ep_node`: the ranks of an EP group that share a node.
        - `ep_rail`: the ranks of an EP group with the same local rank.

        In `ep_node` and `ep_rail` each rank is alone if there is only one node, or if an EP group has no rails
        (`without_rails`).
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
        """Return the facts that must be equal on all ranks.

        Returns:
            Sizes and `tokens` by name, without this rank's coordinates.
        """
        names = ("world", "pp", "dp", "tp", "ep", "etp")
        return {name: getattr(self, name) for name in names} | {"tokens": self.tokens.value}

    def __str__(self) -> str:
        parts = " ".join(f"{name}={getattr(self, name)}" for name in ("pp", "dp", "tp", "ep", "etp"))
        whole = self.ranks == tuple(range(self.world))
        among = self.world if whole else f"ranks {', '.join(map(str, self.ranks))}"
        return f"rank {self.rank} of {among} ({parts} replicas={self.replicas} tokens={self.tokens.value})"


def split_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of part `index` when `total` rows are divided among `parts` ranks.

    The first `total % parts` ranks get one row more.
    """
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)
