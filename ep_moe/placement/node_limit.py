"""Node-limited routing (DeepSeek-V3, arXiv:2412.19437, 2.1.2): groups of experts that lie on one node each limit the
nodes that a token is sent to."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.config import MoEConfig
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.expert_map import ExpertMap


@dataclass(frozen=True)
class NodeLimit:
    """How far groups of experts limit the nodes of a token.

    Args:
        nodes: Of the EP group.
        groups: Groups of experts.
        top_groups: Groups that a token chooses from.
        most: Nodes that the experts of a token are on, at most.
        apart: Groups with experts on several nodes.
    """

    nodes: int
    groups: int
    top_groups: int
    most: int
    apart: tuple[int, ...]

    @classmethod
    def of(cls, config: MoEConfig, layout: RankLayout, expert_map: ExpertMap | None = None) -> NodeLimit | None:
        """Find the nodes of each group.

        Args:
            config: The layer, with groups in `config.routing`.
            layout: Of the ranks.
            expert_map: Where experts are, copies too. Default: the linear map.

        Returns:
            The limit, None where a token may go to every node whatever the map: one node, a router that does not
            choose groups, or as many groups as nodes.
        """
        routing, parts = config.routing, layout.ep_nodes
        if routing.top_groups == routing.num_groups or min(routing.top_groups, config.top_k) >= len(parts):
            return None
        placed = ExpertMap.linear(config.num_experts, layout.ep) if expert_map is None else expert_map
        per_group, group = config.num_experts // routing.num_groups, layout.group("ep")
        found: list[set[int]] = [set() for _ in range(routing.num_groups)]
        for node, ranks in enumerate(parts):
            for rank in ranks:
                for expert in placed.local(group.index(rank)):
                    if expert >= 0:
                        found[expert // per_group].add(node)
        widest = sorted(map(len, found), reverse=True)[: routing.top_groups]
        return cls(
            nodes=len(parts),
            groups=routing.num_groups,
            top_groups=routing.top_groups,
            most=min(sum(widest), config.top_k, len(parts)),
            apart=tuple(number for number, nodes in enumerate(found) if len(nodes) > 1),
        )

    def __str__(self) -> str:
        """A sentence for `explain`."""
        chosen = f"a token chooses {self.top_groups} of {self.groups} groups of experts"
        if not self.apart:
            return f"{chosen}, each on one node, and so goes to {self.most} of {self.nodes} nodes at most"
        names = ", ".join(map(str, self.apart))
        several = f"group {names} is" if len(self.apart) == 1 else f"groups {names} are"
        return (
            f"{chosen}, but {several} on several nodes of this map, and so a token goes to up to {self.most} of "
            f"{self.nodes} nodes"
        )
