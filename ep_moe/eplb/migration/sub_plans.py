"""A change of map as sub-plans that are small enough to be put in force between two forwards, each a whole map.

Writing a layer's slots takes the device what reading and writing them takes, and a forward waits for it. Slots can be
written at different times unless an expert goes from one to another: then it would be nowhere meanwhile, or twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ep_moe.placement.expert_map import EMPTY, ExpertMap


def sub_plans(
    old: ExpertMap, new: ExpertMap, most: int, *, pause: Callable[[], None] = lambda: None
) -> list[ExpertMap]:
    """The maps on the way from `old` to `new`, of which the last is `new`; from each to the next a rank writes at most
    `most` slots, or as many as a cycle of experts that change places needs. Pure: the same on all ranks.

    pause: called now and then, for a thread that is not to take all the time"""
    found: list[tuple[list[int], Counter[int]]] = []  # slots of a sub-plan, and how many of them each rank writes
    for group in _groups(old, new):
        pause()
        needs = _writes(group, new)
        for slots, written in found:  # the first with room, where a rank that writes nothing takes a cycle of any size
            if all(not written[rank] or written[rank] + count <= most for rank, count in needs.items()):
                slots.extend(group)
                written.update(needs)
                break
        else:
            found.append((list(group), needs))
    way, held = list[ExpertMap](), list(old.physical_to_logical)
    for slots, _ in found[:-1]:
        pause()
        for slot in slots:
            held[slot] = new.physical_to_logical[slot]
        twice = old.allow_duplicates or new.allow_duplicates
        way.append(ExpertMap(new.num_experts, new.num_ranks, tuple(held), twice))
    return [*way, new] if found else way


def _writes(group: Iterable[int], new: ExpertMap) -> Counter[int]:
    """Slots that each rank writes; what an empty slot holds is no matter."""
    slots_per_rank = new.slots_per_rank
    return Counter(slot // slots_per_rank for slot in group if new.physical_to_logical[slot] != EMPTY)


def _groups(old: ExpertMap, new: ExpertMap) -> list[list[int]]:
    """Slots that change, those together that must change at once: all that an expert leaves and comes to."""
    before, after = old.physical_to_logical, new.physical_to_logical
    changed = [slot for slot in range(len(before)) if before[slot] != after[slot]]
    parent = {slot: slot for slot in changed}

    def root(slot: int) -> int:
        while parent[slot] != slot:
            parent[slot] = parent[parent[slot]]
            slot = parent[slot]
        return slot

    left: dict[int, list[int]] = {}
    for slot in changed:
        left.setdefault(before[slot], []).append(slot)
    for slot in changed:
        expert = after[slot]
        for other in left.get(expert, []) if expert != EMPTY else []:
            parent[root(other)] = root(slot)
    found: dict[int, list[int]] = {}
    for slot in changed:
        found.setdefault(root(slot), []).append(slot)
    return sorted(found.values())
