"""The published EPLB algorithm in plain Python, written from its description: the planner's oracle. Slow.

1. pack(weights, packs): items, heaviest first, each into the lightest pack that is not full; all packs equally many
2. replicate(weights, slots): one copy of each, then again and again one more of the expert with the heaviest copies
3. with groups % nodes == 0: groups are packed to nodes, each node's experts replicated, the copies packed to its ranks;
   else the same with one group and one node
"""

from collections.abc import Sequence


def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """The items of each pack, by index."""
    size = len(weights) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        open_packs = [pack for pack in found if len(pack) < size]
        min(open_packs, key=lambda pack: sum(weights[i] for i in pack)).append(item)
    return found


def replicate(weights: Sequence[float], slots: int) -> list[int]:
    """Copies of each expert."""
    copies = [1] * len(weights)
    for _ in range(slots - len(weights)):
        heaviest = max(range(len(weights)), key=lambda expert: weights[expert] / copies[expert])
        copies[heaviest] += 1
    return copies


def published(load: Sequence[float], slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> list[list[int]]:
    """The experts of each rank, slots / ranks of them; an expert may be on a rank more than once."""
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    held: list[list[int]] = []
    for packed in pack([sum(load[e] for e in experts) for experts in members], nodes):
        experts = [expert for group in packed for expert in members[group]]
        weights = [load[expert] for expert in experts]
        copies = replicate(weights, slots // nodes)
        items = [index for index in range(len(experts)) for _ in range(copies[index])]
        packs = pack([weights[index] / copies[index] for index in items], ranks // nodes)
        held += [[experts[items[item]] for item in one] for one in packs]
    return held


def loads(load: Sequence[float], held: Sequence[Sequence[int]]) -> list[float]:
    """Load of each rank, each copy carrying an equal share."""
    copies = [sum(rank.count(expert) for rank in held) for expert in range(len(load))]
    return [sum(load[expert] / copies[expert] for expert in rank) for rank in held]
