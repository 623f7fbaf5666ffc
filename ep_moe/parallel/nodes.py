"""Which ranks share a host: nodes, local ranks and rails, in plain integers.

node        a host, or what stands for one (`ranks_per_node`)
local rank  a rank's place among the ranks of its node that are in one group
rail        the ranks of a group with one local rank, one of each node; on a cluster they share a switch

    EP group of 4 ranks on 2 nodes     nodes {0 1} {2 3}     rails {0 2} {1 3}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class NodeLayout:
    """The node of every rank of a context, the same on all of them.

    Args:
        ranks: Ranks in torch.distributed.
        nodes: The node of each, counted from 0 in the order in which nodes appear.
        hosts: A name for each node, for messages.
        gpus: GPUs of each node where the nodes are on paper; None where they are here, and the driver knows.
        store: What holds the store of torch.distributed, in words; "" where that is not known.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    gpus: int | None = None
    store: str = ""

    @classmethod
    def found(cls, ranks: Sequence[int], hosts: Sequence[tuple[str, str]]) -> NodeLayout:
        """Tell nodes apart by the identities of hosts.

        Args:
            ranks: Ranks in torch.distributed.
            hosts: Identity and name of each rank's host. Equal identities are one node.

        Returns:
            The nodes. Of two hosts with one name the second has its number behind it.
        """
        number: dict[str, int] = {}
        names: list[str] = []
        for identity, name in hosts:
            if identity not in number:
                names.append(f"{name} ({len(names)})" if name in names else name)
                number[identity] = len(number)
        return cls(tuple(ranks), tuple(number[identity] for identity, _ in hosts), tuple(names))

    @classmethod
    def counted(cls, ranks: Sequence[int], ranks_per_node: int, gpus: int | None = None) -> NodeLayout:
        """Tell nodes apart by the numbers of ranks, whatever hosts these are on.

        Args:
            ranks: Ranks in torch.distributed.
            ranks_per_node: So many consecutive ranks are one node.
            gpus: As the field. Default: nodes that are here.

        Returns:
            The nodes.
        """
        hosts = [f"node {rank // ranks_per_node}" for rank in ranks]
        return replace(cls.found(ranks, [(host, host) for host in hosts]), gpus=gpus)

    @cached_property
    def _node(self) -> dict[int, int]:
        return dict(zip(self.ranks, self.nodes, strict=True))

    def node(self, rank: int) -> int:
        """Say on which node a rank is.

        Args:
            rank: In torch.distributed.

        Returns:
            The node's number.
        """
        return self._node[rank]

    def host(self, rank: int) -> str:
        """Name the node that a rank is on.

        Args:
            rank: In torch.distributed.

        Returns:
            The host's name.
        """
        return self.hosts[self._node[rank]]

    def split(self, group: Sequence[int]) -> list[list[int]]:
        """List the ranks of a group by node.

        Args:
            group: Ranks in torch.distributed.

        Returns:
            A list per node that has any, nodes ascending, each in the order of the group.
        """
        parts: dict[int, list[int]] = {}
        for rank in group:
            parts.setdefault(self._node[rank], []).append(rank)
        return [parts[node] for node in sorted(parts)]

    def rails(self, group: Sequence[int]) -> list[list[int]]:
        """List the ranks of a group by local rank.

        Args:
            group: Ranks in torch.distributed, of which `uneven` has nothing to say.

        Returns:
            A list per local rank, each with one rank of each node.
        """
        return [list(rail) for rail in zip(*self.split(group), strict=True)]

    def uneven(self, group: Sequence[int]) -> str | None:
        """Say why a group has no rails.

        Args:
            group: Ranks in torch.distributed.

        Returns:
            None, or what is wrong with its ranks.
        """
        parts = self.split(group)
        if len({len(part) for part in parts}) > 1:
            return f"the EP group has different numbers of ranks on its nodes: {self.described(group)}"
        place = {rank: at for at, rank in enumerate(group)}
        for rail in self.rails(group):
            if any(place[one] > place[other] for one, other in pairwise(rail)):
                return (
                    f"ranks {', '.join(map(str, rail))} of the EP group have one local rank, and are not in the order "
                    f"of their nodes: {self.described(group)}"
                )
        return None

    def described(self, group: Sequence[int]) -> str:
        """List the nodes of a group for a message.

        Args:
            group: Ranks in torch.distributed.

        Returns:
            Such as "a (ranks 0, 1), b (ranks 2, 3)".
        """
        return ", ".join(f"{self.host(part[0])} ({named(part)})" for part in self.split(group))

    def with_store(self, holders: Sequence[str]) -> NodeLayout:
        """Say what holds the store of torch.distributed.

        Args:
            holders: What each rank found on its host, in the order of `ranks`: "rank" for itself, "agent" for the agent
                of torchrun that started it, "" for neither.

        Returns:
            The same nodes with `store`.
        """
        found = [(rank, kind) for rank, kind in zip(self.ranks, holders, strict=True) if kind]
        if not found:
            return self
        rank, kind = found[0]
        mates = named([mate for mate in self.ranks if self.node(mate) == self.node(rank)])
        held = f"the process of rank {rank}" if kind == "rank" else f"the agent that started {mates}"
        lost = "this process"
        if len(self.hosts) > 1:
            held += f" on host {self.host(rank)}" + (f" ({mates})" if kind == "rank" else "")
            lost += ", its host or the way to it"
        return replace(self, store=f"{held} held it, so {lost} is lost")

    def lost(self, silent: Sequence[int], group: Sequence[int]) -> list[str]:
        """Say on which hosts the silent ranks of a group are.

        Args:
            silent: Ranks that show no sign of life.
            group: These, and the ranks that wait for them.

        Returns:
            A sentence for each node that has any, where there are several nodes.
        """
        if len(self.hosts) == 1:
            return []
        found = []
        for part in self.split(group):
            gone, host = [rank for rank in part if rank in silent], self.host(part[0])
            if gone == part and len(part) > 1:
                found.append(f"Host {host} is lost, or the way to it: all its ranks here are silent ({named(part)}).")
            elif gone:
                found.append(f"Host of {named(gone)}: {host}.")
        return found


def named(ranks: Sequence[int]) -> str:
    """Write ranks in words.

    Args:
        ranks: At least one.

    Returns:
        Such as "ranks 0, 1".
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
