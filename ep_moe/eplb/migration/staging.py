"""Room for experts on their way: how much of it is needed, and the memory, which is there before anything moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ep_moe.eplb.migration.schedule import TransferSchedule, message

_MADE_AT_ONCE = 32 << 20  # bytes of memory in one step
_CYCLE = 8  # experts of a rank that change places together: more are rare for loads that are not steep


@dataclass(frozen=True)
class Room:
    """What one rank needs at a time, in bytes.

    rows: of each expert that waits for its commit, the largest first; outbox: of all that is sent in one step
    """

    rows: tuple[int, ...] = ()
    outbox: int = 0

    @classmethod
    def usual(cls, layers: Iterable[tuple[int, int]], *, budget: int, commit: int) -> Room:
        """For all maps but those in which experts change places in larger cycles. layers: (slots of this rank, bytes of
        a row); budget, commit: bytes of a step, and of what is put in force at once."""
        return cls._for_one_of(
            (min(slots, max(commit // size, _CYCLE)), size, message(size, budget).bytes) for slots, size in layers
        )

    @classmethod
    def of_plan(cls, parts: Iterable[TransferSchedule]) -> Room:
        return cls._for_one_of((len(part.staged), part.row_bytes, part.outbox_bytes) for part in parts)

    @classmethod
    def _for_one_of(cls, needs: Iterable[tuple[int, int, int]]) -> Room:
        """needs: (rows, bytes of each, outbox), of which there is one at a time."""
        needs = list(needs)
        largest = [0] * max([rows for rows, _, _ in needs], default=0)
        for rows, size, _ in needs:
            if rows:
                largest[rows - 1] = max(largest[rows - 1], size)
        places = [*accumulate(reversed(largest), max)]  # from the last on: one is as large as all after it
        return cls(tuple(reversed(places)), max([outbox for _, _, outbox in needs], default=0))


class Staging:
    """Memory for experts on their way, made with the balancer and kept: forwards would wait for memory that is made
    while they run. What a plan needs beyond that is made for it and given back.

    kept: what is kept; slots: the most that a rank has of a layer
    damage: int64 [slots], on the device, what each row's checksum finds; seen: the same on the host, pinned for a GPU
    pairs: int64 [slots, 2], on the device, which row goes to which slot (`SlotStore.address`)
    """

    @torch.inference_mode(False)  # or what is made within one could not be written outside
    def __init__(self, kept: Room, slots: int, device: torch.device) -> None:
        self.device, self._kept = device, len(kept.rows)
        self._rows = [self._empty(size) for size in kept.rows]
        self._outbox = self._empty(kept.outbox)
        self.damage = torch.zeros(slots, dtype=torch.int64, device=device)
        self.pairs = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.seen = torch.zeros(slots, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    @property
    def bytes(self) -> int:
        """Of experts."""
        return sum(row.numel() for row in self._rows) + self._outbox.numel()

    def reserve(self, room: Room) -> bool:
        """Make some of what is lacking before anything travels, so that a rank without memory says so while no peer
        waits for it; not all at once, since forwards would wait. Returns whether all is there."""
        if self._outbox.numel() < room.outbox:
            self._outbox = self._empty(room.outbox)
        made = 0
        for place, size in enumerate(room.rows):
            if place < len(self._rows) and self._rows[place].numel() >= size:
                continue
            if made >= _MADE_AT_ONCE:
                return False
            self._rows[place : place + 1] = [self._empty(size)]
            made += size
        return True

    def release(self) -> None:
        """What was made beyond what is kept."""
        del self._rows[self._kept :]

    def row(self, index: int, row_bytes: int) -> Tensor:
        """uint8 [row_bytes]"""
        return self._rows[index][:row_bytes]

    def outbox(self, start: int, size: int) -> Tensor:
        return self._outbox[start : start + size]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)
