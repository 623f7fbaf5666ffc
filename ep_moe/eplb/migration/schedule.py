"""From two maps to the transfers between them, in bounded rounds. Pure: every rank computes the same schedule.

Ranks are EP ranks, experts logical. A row is all bytes of one expert's slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ep_moe.placement.expert_map import EMPTY, ExpertMap

MAX_ROUNDS = 16  # in one batch: two operations each, so that few are in flight however small the experts are
UNIT = 8  # bytes; pieces begin at multiples
_PAUSES = 32  # transfers between calls of `pause`


@dataclass(frozen=True, order=True, slots=True)
class Transfer:
    """One expert from a rank that has it to one that has not."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True)
class Moves:
    """What changes from one map to another. A rank gets an expert once, however many of its slots want it.

    local: for each rank the experts that it copies from one of its slots to others
    transfers: what travels
    """

    local: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]

    def staged(self, rank: int) -> tuple[int, ...]:
        """The experts that a rank needs room for until the commit."""
        return (*self.local[rank], *(t.expert for t in self.transfers if t.target == rank))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of an expert's row, to or from `peer`."""

    expert: int
    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank does in one step.

    copies: experts to copy within the rank
    rounds: (sent, received), each None where the rank has no part in it; all ranks go through rounds in this order
    """

    copies: tuple[int, ...]
    rounds: tuple[tuple[Piece | None, Piece | None], ...]


@dataclass(frozen=True)
class TransferSchedule:
    """One rank's part in going from `old` to `new`.

    row_bytes: of an expert
    slots: (slot, expert) that it writes at the end; staged: the experts that it needs room for until then
    batches: what it does step by step; outbox_bytes: the most that it sends in one of them
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
    """budget: as for `batches`; pause: called now and then, for a thread that is not to take all the time"""
    planned = moves(old, new, ranks_per_node=ranks_per_node)
    pause()
    parts = tuple(batches(planned, rank, row_bytes, budget, pause=pause))
    outbox = max([sum(sent.stop - sent.start for sent, _ in part.rounds if sent) for part in parts], default=0)
    slots = tuple(changed_slots(old, new, rank))
    return TransferSchedule(old, new, row_bytes, planned, slots, planned.staged(rank), parts, outbox)


def changed_slots(old: ExpertMap, new: ExpertMap, rank: int) -> list[tuple[int, int]]:
    """(slot, expert) of a rank's slots whose content differs under `new`; what an empty slot holds is no matter."""
    before, after = old.local(rank), new.local(rank)
    return [(slot, expert) for slot, expert in enumerate(after) if expert not in (EMPTY, before[slot])]


def moves(old: ExpertMap, new: ExpertMap, *, ranks_per_node: int | None = None) -> Moves:
    """Sources are ranks of the target's node where any has the expert, and send evenly many."""
    per_node, slots_per_rank = ranks_per_node or old.num_ranks, old.slots_per_rank
    wanted: list[set[int]] = [set() for _ in range(old.num_ranks)]
    for slot, (before, after) in enumerate(zip(old.physical_to_logical, new.physical_to_logical, strict=True)):
        if after not in (EMPTY, before):
            wanted[slot // slots_per_rank].add(after)
    # of few experts, where the change is one piece of a layer's
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
    # who has no choice goes first
    for sources, expert, target in sorted(choices, key=lambda choice: (len(choice[0]), choice[1], choice[2])):
        source = min(sources, key=lambda rank: (sent[rank], rank))
        sent[source] += 1
        transfers.append(Transfer(expert, source, target))
    return Moves(tuple(local), tuple(sorted(transfers, key=lambda t: (t.expert, t.source, t.target))))


def rounds(
    transfers: Sequence[Transfer], num_ranks: int, pause: Callable[[], None] = lambda: None
) -> list[list[Transfer]]:
    """Rounds in which each rank sends to at most one peer and receives from at most one; as few as there can be, which
    is the most that any rank sends or receives.

    The edges of a bipartite graph (senders, receivers) colored one by one; where the two ends have no free color in
    common, two colors are exchanged along a path (Konig)."""
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
    """Along the path that begins at `target` with color `one`: each edge of one color gets the other."""
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
    """What a rank sends, and receives, in one batch at most: rows, or one piece of a larger row."""

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
    """A rank's part, step by step; equally many on all ranks.

    In a batch a rank sends at most `budget` bytes, receives at most as many, and copies as many (or one row). Rows that
    are larger travel in pieces.
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
    """A rank's (sent, received) of one round, span by span."""
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
# A change of map as sub-plans that are small enough to be put in force between two forwards, each a whole map.
#
# Writing a layer's slots takes the device what reading and writing them takes, and a forward waits for it. Slots can
# be written at different times unless an expert goes from one to another: then it would be nowhere meanwhile, or
# twice.


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
