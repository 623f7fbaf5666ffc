"""Computes the transfers from one map to another, in batches of bounded size.

All functions are pure, so all ranks compute the same schedule. Ranks are EP ranks, experts are logical. A row is all
bytes of one expert's slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ep_moe.placement.expert_map import EMPTY, ExpertMap

MAX_ROUNDS = 16  # the most rounds of a batch, two operations each: bounds the operations in flight for small experts
UNIT = 8  # bytes; pieces begin at multiples of it
_PAUSES = 32  # transfers between calls of `pause`


@dataclass(frozen=True, order=True, slots=True)
class Transfer:
    """One expert, from a rank that has it to one that does not."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True)
class Moves:
    """The moves from one map to another. A rank receives an expert once, even for several slots.

    local: for each rank, the experts that it copies from one of its slots to others
    transfers: the transfers between ranks
    """

    local: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]

    def staged(self, rank: int) -> tuple[int, ...]:
        """Return the experts for which a rank needs staging memory until the commit."""
        return (*self.local[rank], *(t.expert for t in self.transfers if t.target == rank))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of an expert's row, sent to or received from `peer`."""

    expert: int
    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one rank in one step.

    copies: experts to copy within the rank
    rounds: (sent, received) of each round, None for nothing. All ranks go through the rounds in this order
    """

    copies: tuple[int, ...]
    rounds: tuple[tuple[Piece | None, Piece | None], ...]


@dataclass(frozen=True)
class TransferSchedule:
    """One rank's part in the change from map `old` to map `new`.

    row_bytes: bytes of an expert
    slots: (slot, expert) of the slots that are written at the commit
    staged: the experts for which it needs staging memory until then
    batches: its work, step by step
    outbox_bytes: the most bytes that it sends in one batch
    """

    old: ExpertMap
    new: ExpertMap
    row_bytes: int
    moves: Moves
    slots: tuple[tuple[int, int], ...]
    staged: tuple[int, ...]
    batches: tuple[Batch, ...]
    outbox_bytes: int


def transfer_schedule(
    old: ExpertMap,
    new: ExpertMap,
    rank: int,
    *,
    row_bytes: int,
    budget: int,
    ranks_per_node: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> TransferSchedule:
    """Compute one rank's schedule.

    budget: as for `batches`
    pause: called repeatedly, so that a background thread can yield the GIL
    """
    planned = moves(old, new, ranks_per_node=ranks_per_node)
    pause()
    parts = tuple(batches(planned, rank, row_bytes, budget, pause=pause))
    outbox = max([sum(sent.stop - sent.start for sent, _ in part.rounds if sent) for part in parts], default=0)
    slots = tuple(changed_slots(old, new, rank))
    return TransferSchedule(old, new, row_bytes, planned, slots, planned.staged(rank), parts, outbox)


def changed_slots(old: ExpertMap, new: ExpertMap, rank: int) -> list[tuple[int, int]]:
    """Return (slot, expert) of a rank's slots that get another expert. The content of an EMPTY slot does not matter."""
    before, after = old.local(rank), new.local(rank)
    return [(slot, expert) for slot, expert in enumerate(after) if expert not in (EMPTY, before[slot])]


def moves(old: ExpertMap, new: ExpertMap, *, ranks_per_node: int | None = None) -> Moves:
    """Compute the moves. A source is on the target's node if a rank there has the expert. Sources are used evenly."""
    per_node, slots_per_rank = ranks_per_node or old.num_ranks, old.slots_per_rank
    wanted: list[set[int]] = [set() for _ in range(old.num_ranks)]
    for slot, (before, after) in enumerate(zip(old.physical_to_logical, new.physical_to_logical, strict=True)):
        if after not in (EMPTY, before):
            wanted[slot // slots_per_rank].add(after)
    # only of experts that move, which are few in a sub-plan
    holders = {e: sorted({slot // slots_per_rank for slot in old.logical_to_physical[e]}) for e in set().union(*wanted)}
    local: list[tuple[int, ...]] = []
    choices = []
    for target, experts in enumerate(wanted):
        local.append(tuple(sorted(expert for expert in experts if target in holders[expert])))
        for expert in experts:
            if target not in holders[expert]:
                near = [rank for rank in holders[expert] if rank // per_node == target // per_node]
                choices.append((near or holders[expert], expert, target))
    sent = [0] * old.num_ranks
    transfers = []
    # transfers with the fewest possible sources are assigned first
    for sources, expert, target in sorted(choices, key=lambda choice: (len(choice[0]), choice[1], choice[2])):
        source = min(sources, key=lambda rank: (sent[rank], rank))
        sent[source] += 1
        transfers.append(Transfer(expert, source, target))
    return Moves(tuple(local), tuple(sorted(transfers, key=lambda t: (t.expert, t.source, t.target))))


def rounds(
    transfers: Sequence[Transfer], num_ranks: int, pause: Callable[[], None] = lambda: None
) -> list[list[Transfer]]:
    """Split transfers into rounds, in which each rank sends to at most one peer and receives from at most one.

    The number of rounds is minimal: the most transfers that any rank sends or receives. The method is edge coloring of
    a bipartite graph (senders, receivers), one edge after another. If the two ends have no free color in common, two
    colors are exchanged along a path (Konig).
    """
    sends: list[dict[int, Transfer]] = [{} for _ in range(num_ranks)]  # color -> transfer
    receives: list[dict[int, Transfer]] = [{} for _ in range(num_ranks)]
    for number, transfer in enumerate(transfers):
        if number % _PAUSES == 0:
            pause()
        free_there = _free(sends[transfer.source])
        free_here = _free(receives[transfer.target])
        if free_there in receives[transfer.target]:
            _exchange(sends, receives, transfer.target, free_there, free_here)
        sends[transfer.source][free_there] = receives[transfer.target][free_there] = transfer
    count = max([colour + 1 for used in sends for colour in used], default=0)
    return [[used[colour] for used in sends if colour in used] for colour in range(count)]


def _free(used: dict[int, Transfer]) -> int:
    return next(colour for colour in range(len(used) + 1) if colour not in used)


def _exchange(
    sends: list[dict[int, Transfer]], receives: list[dict[int, Transfer]], target: int, one: int, other: int
) -> None:
    """Exchange two colors along the path that begins at `target` with color `one`."""
    path: list[tuple[Transfer, int]] = []
    ends, rank, colour = (receives, sends), target, one
    while colour in ends[len(path) % 2][rank]:
        edge = ends[len(path) % 2][rank][colour]
        rank = edge.source if len(path) % 2 == 0 else edge.target
        path.append((edge, colour))
        colour = other if colour == one else one
    for edge, colour in path:
        del sends[edge.source][colour], receives[edge.target][colour]
    for edge, colour in path:
        changed = other if colour == one else one
        sends[edge.source][changed] = receives[edge.target][changed] = edge


@dataclass(frozen=True)
class Message:
    """The most that a rank sends, and receives, in one batch: whole rows, or one piece of a larger row."""

    pieces: int
    piece_bytes: int

    @property
    def bytes(self) -> int:
        return self.pieces * self.piece_bytes


def message(row_bytes: int, budget: int) -> Message:
    if row_bytes > budget:
        return Message(1, max(UNIT, budget // UNIT * UNIT))
    return Message(min(budget // row_bytes, MAX_ROUNDS), row_bytes)


def batches(
    planned: Moves, rank: int, row_bytes: int, budget: int, *, pause: Callable[[], None] = lambda: None
) -> list[Batch]:
    """Return a rank's batches, one per step. All ranks have equally many.

    In a batch a rank sends at most `budget` bytes, receives at most as many, and copies at most as many (or one row).
    A row that is larger than `budget` is sent in pieces.
    """
    ranks = len(planned.local)
    most = message(row_bytes, budget)
    whole, piece = most.pieces, most.piece_bytes
    spans = [(start, min(start + piece, row_bytes)) for start in range(0, row_bytes, piece)]
    in_order: list[tuple[Piece | None, Piece | None]] = []
    for step in rounds(planned.transfers, ranks, pause):
        in_order += _part(step, rank, spans)
        pause()
    travel = [tuple(in_order[start : start + whole]) for start in range(0, len(in_order), whole)]
    copies = [planned.local[rank][start : start + whole] for start in range(0, max(map(len, planned.local)), whole)]
    return [
        Batch(
            copies=copies[number] if number < len(copies) else (),
            rounds=travel[number] if number < len(travel) else (),
        )
        for number in range(max(len(copies), len(travel)))
    ]


def _part(step: list[Transfer], rank: int, spans: Sequence[tuple[int, int]]) -> list[tuple[Piece | None, Piece | None]]:
    """Return a rank's (sent, received) pieces in one round, one pair for each span."""
    sent = next((t for t in step if t.source == rank), None)
    received = next((t for t in step if t.target == rank), None)
    return [
        (
            Piece(sent.expert, sent.target, *span) if sent else None,
            Piece(received.expert, received.source, *span) if received else None,
        )
        for span in spans
    ]


# --- sub-plans --------------------------------------------------------------------------------------------------------
# Splits a change of map into sub-plans, each a complete map, that are small enough to commit between two forwards.
#
# A forward waits while a commit reads and writes its slots. Slots can be written at different times unless an expert
# moves from one to another: in between it would be in neither of them, or in both.


def sub_plans(
    old: ExpertMap, new: ExpertMap, most: int, *, pause: Callable[[], None] = lambda: None
) -> list[ExpertMap]:
    """Return the maps on the way from `old` to `new`, the last of which is `new`. Pure: the same on all ranks.

    From each map to the next, a rank writes at most `most` slots. A cycle of experts that change places is never
    split, so its ranks may write more.

    pause: called repeatedly, so that a background thread can yield the GIL
    """
    found: list[tuple[list[int], Counter[int]]] = []  # slots of a sub-plan, and how many of them each rank writes
    for group in _groups(old, new):
        pause()
        needs = _writes(group, new)
        for slots, written in found:  # first fit; a rank that writes nothing yet accepts a cycle of any size
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
    """Return the number of slots that each rank writes. An EMPTY slot is not written."""
    slots_per_rank = new.slots_per_rank
    return Counter(slot // slots_per_rank for slot in group if new.physical_to_logical[slot] != EMPTY)


def _groups(old: ExpertMap, new: ExpertMap) -> list[list[int]]:
    """Group the slots that change. All slots that an expert leaves or enters are in one group, and change at once."""
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
