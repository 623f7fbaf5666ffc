"""Numbers that ranks of one host exchange before a call, through memory that they share (`step_board`): a few
microseconds of the host, and no wait for a device.

Each rank writes two words for its peers to read, one pair for exchanges with an even number and one for those with an
odd number. A rank writes a pair again two exchanges later. By then each peer has written the exchange between, and so
has read this one. Each word holds the number of its exchange, so that no order among stores is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist

from ep_moe.parallel.step_board import EXCHANGED, PeerBoard, StepBoard

_BITS = 16  # of a word are the number of the exchange
_NUMBERS = (1 << _BITS) - 1
LARGEST = (1 << 63 - _BITS) - 1  # of a number that is exchanged
_POLLS, _POLLS_IN_TURN = 200, 2000  # before others get this core, and before this thread sleeps
_LONGEST_S = 5e-4  # of a sleep

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class Recorder(Protocol):
    """What is asked of the flight recorder."""

    deadline_s: float

    def check(self) -> None: ...


class HostExchange:
    """Exchanges among the ranks of one group, all of which make the same ones. own: this rank's; peers: by rank"""

    def __init__(self, own: StepBoard, peers: dict[int, PeerBoard]) -> None:
        self._own, self._peers = own.words, {rank: board.words for rank, board in peers.items()}
        self._number = 0

    def exchange(
        self, first: int, second: int, recorder: Recorder, late: Callable[[], AbstractContextManager[object]]
    ) -> list[tuple[int, int]]:
        """The pairs of all ranks, this one's first.

        first, second: in [0, LARGEST]
        late: entered where a peer is not here yet, for a `with`; what it makes of an exception is raised
        """
        number = self._number = self._number + 1 & _NUMBERS
        at = EXCHANGED + 2 * (number & 1)
        self._own[at], self._own[at + 1] = first << _BITS | number, second << _BITS | number
        if self._missing(at, number, _POLLS):
            with late():
                self._wait(at, number, recorder)
        return [(first, second), *((words[at] >> _BITS, words[at + 1] >> _BITS) for words in self._peers.values())]

    def _missing(self, at: int, number: int, polls: int) -> list[int]:
        """Ranks that have not written, after so many looks at one that has not."""
        missing = []
        for rank, words in self._peers.items():
            for _ in range(polls):
                if words[at] & _NUMBERS == number == words[at + 1] & _NUMBERS:
                    break
            else:
                missing.append(rank)
        return missing

    def _wait(self, at: int, number: int, recorder: Recorder) -> None:
        end, turns, pause_s = time.monotonic() + recorder.deadline_s, 0, 1e-6
        while missing := self._missing(at, number, 1):
            turns += 1
            if turns < _POLLS_IN_TURN:
                _yield()
                continue
            recorder.check()  # a peer may have failed meanwhile
            if time.monotonic() > end:
                raise dist.DistError(f"{_ranks(missing)} did not come to this call")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
