"""The nodes of ranks: which ranks share a host, local ranks and rails, as plain integers.

node        a host, or the ranks that count as one (`ranks_per_node`)
local rank  a rank's place among the ranks of a group that are on its node
rail        the ranks of a group that have the same local rank, one per node; on a cluster they share a switch

    EP group of 4 ranks on 2 nodes     nodes {0 1} {2 3}     rails {0 2} {1 3}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class NodeLayout:
    """The node of every rank of a context. It is the same on all ranks.

    Args:
        ranks: Ranks in torch.distributed.
        nodes: The node of each rank, numbered from 0 in the order of first appearance.
        hosts: A name for each node, for messages.
        gpus: GPUs per node for a layout that is only planned; None for real nodes, whose GPUs the driver counts.
        store: Text that says which process holds the store of torch.distributed; "" if that is not known.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    gpus: int | None = None
    store: str = ""

    @classmethod
    def from_hosts(cls, ranks: Sequence[int], hosts: Sequence[tuple[str, str]]) -> NodeLayout:
        """Create the nodes from the identities of hosts.

        Args:
            ranks: Ranks in torch.distributed.
            hosts: Identity and name of each rank's host. Ranks with equal identities are on one node.

        Returns:
            The nodes. If two hosts have the same name, the node's number is appended to the second one's.
        """
        number: dict[str, int] = {}
        names: list[str] = []
        for identity, name in hosts:
            if identity not in number:
                names.append(f"{name} ({len(names)})" if name in names else name)
                number[identity] = len(number)
        return cls(tuple(ranks), tuple(number[identity] for identity, _ in hosts), tuple(names))

    @classmethod
    def from_ranks_per_node(cls, ranks: Sequence[int], ranks_per_node: int, gpus: int | None = None) -> NodeLayout:
        """Create nodes of consecutive ranks, whatever hosts they are on.

        Args:
            ranks: Ranks in torch.distributed.
            ranks_per_node: The number of consecutive ranks of a node.
            gpus: The field `gpus`. Default: real nodes.

        Returns:
            The nodes.
        """
        hosts = [f"node {rank // ranks_per_node}" for rank in ranks]
        return replace(cls.from_hosts(ranks, [(host, host) for host in hosts]), gpus=gpus)

    @cached_property
    def _node(self) -> dict[int, int]:
        return dict(zip(self.ranks, self.nodes, strict=True))

    def node(self, rank: int) -> int:
        """Return the node of a rank.

        Args:
            rank: In torch.distributed.

        Returns:
            The node's number.
        """
        return self._node[rank]

    def host(self, rank: int) -> str:
        """Return the name of a rank's host.

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
            One list per node with ranks of the group, nodes ascending. Each list is in the order of the group.
        """
        parts: dict[int, list[int]] = {}
        for rank in group:
            parts.setdefault(self._node[rank], []).append(rank)
        return [parts[node] for node in sorted(parts)]

    def rails(self, group: Sequence[int]) -> list[list[int]]:
        """List the ranks of a group by local rank.

        Args:
            group: Ranks in torch.distributed, for which `uneven` returns None.

        Returns:
            One list per local rank, with one rank of each node.
        """
        return [list(rail) for rail in zip(*self.split(group), strict=True)]

    def uneven(self, group: Sequence[int]) -> str | None:
        """Return why a group has no rails.

        Args:
            group: Ranks in torch.distributed.

        Returns:
            None if it has rails. Else the reason: its nodes have different numbers of ranks, or the ranks of a rail are
            not in the order of their nodes.
        """
        parts = self.split(group)
        if len({len(part) for part in parts}) > 1:
            return f"the EP group has different numbers of ranks on its nodes: {self.described(group)}"
        place = {rank: at for at, rank in enumerate(group)}
        for rail in self.rails(group):
            if any(place[one] > place[other] for one, other in pairwise(rail)):
                return (
                    f"ranks {', '.join(map(str, rail))} of the EP group have the same local rank, and must be in the "
                    f"order of their nodes: {self.described(group)}"
                )
        return None

    def described(self, group: Sequence[int]) -> str:
        """List the nodes of a group for a message.

        Args:
            group: Ranks in torch.distributed.

        Returns:
            For example "a (ranks 0, 1), b (ranks 2, 3)".
        """
        return ", ".join(f"{self.host(part[0])} ({format_ranks(part)})" for part in self.split(group))

    def with_store(self, holders: Sequence[str]) -> NodeLayout:
        """Return the nodes with `store` set, the text that says which process holds the store of torch.distributed.

        Args:
            holders: The result of `timeout_store.holder` on each rank, in the order of `ranks`: "rank" if the rank
                itself holds the store, "agent" if the torchrun agent that started it does, else "".

        Returns:
            The same nodes with `store`.
        """
        found = [(rank, kind) for rank, kind in zip(self.ranks, holders, strict=True) if kind]
        if not found:
            return self
        rank, kind = found[0]
        mates = format_ranks([mate for mate in self.ranks if self.node(mate) == self.node(rank)])
        held = f"the process of rank {rank}" if kind == "rank" else f"the agent that started {mates}"
        lost = "this process"
        if len(self.hosts) > 1:
            held += f" on host {self.host(rank)}" + (f" ({mates})" if kind == "rank" else "")
            lost += ", its host, or the network to it"
        return replace(self, store=f"{held} held it, so {lost} is lost")

    def lost(self, silent: Sequence[int], group: Sequence[int]) -> list[str]:
        """Describe the hosts of the silent ranks of a group.

        Args:
            silent: Ranks that show no sign of life.
            group: The silent ranks, and the ranks that wait for them.

        Returns:
            One sentence per node with silent ranks. Empty if there is only one node.
        """
        if len(self.hosts) == 1:
            return []
        found = []
        for part in self.split(group):
            gone, host = [rank for rank in part if rank in silent], self.host(part[0])
            if gone == part and len(part) > 1:
                found.append(
                    f"Host {host}, or the network to it, is lost: all its ranks in this group are silent "
                    f"({format_ranks(part)})."
                )
            elif gone:
                found.append(f"Host of {format_ranks(gone)}: {host}.")
        return found


def format_ranks(ranks: Sequence[int]) -> str:
    """Write a list of ranks as text.

    Args:
        ranks: At least one rank.

    Returns:
        For example "ranks 0, 1".
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
