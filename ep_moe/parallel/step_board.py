"""What ranks of one host tell each other through memory that they share: how far each has come (`StepBoard`), for those
that must not wait for it, and numbers before a call (`HostExchange`).

A heartbeat is up to seconds old when a process is killed. Here a rank writes one word for each step, and the ranks of
its host have mapped that word beforehand. The memory has no name in a file system, so a killed process leaves nothing
behind. Linux only; elsewhere, and between hosts and containers, heartbeats are all there is.

Numbers cost a few microseconds of the host, and no wait for a device. Each rank writes two words for its peers to read,
one pair for exchanges with an even number and one for those with an odd number. A rank writes a pair again two
exchanges later. By then each peer has written the exchange between, and so has read this one. Each word holds the
number of its exchange, so that no order among stores is needed.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ep_moe.parallel.nodes import named

_BYTES = 1 << 14
_TOKEN, _STEP, _LENGTH = 0, 1, 2  # words
EXCHANGED = 3  # the first of 4 words: two of an exchange with an even number, two of one with an odd number
_TEXT = 56  # bytes, where the text begins
_CODES = 1 << 15  # names of steps that fit beside a number and `done` into one word

Place = tuple[str, str, str]  # where, phase, detail


class StepBoard:
    """This rank's own. `address` tells peers where it is."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ep_moe steps")
        os.ftruncate(self._file, _BYTES)
        self._memory = mmap.mmap(self._file, _BYTES)
        self._words = memoryview(self._memory).cast("q")
        self._words[_TOKEN] = token = secrets.randbits(62)
        self._codes: dict[Place, int] = {}
        self._text = b""
        self.address = json.dumps({"host": _host(), "path": f"/proc/{os.getpid()}/fd/{self._file}", "token": token})

    @classmethod
    def made(cls) -> StepBoard | None:
        try:
            return cls()
        except (AttributeError, OSError):  # no such call, or none allowed
            return None

    def put(self, number: int, place: Place, done: bool) -> None:
        """One aligned word, so that a reader never sees half of a step."""
        code = self._codes.get(place)
        if code is None:
            code = self._named(place)
        self._words[_STEP] = (number << 16) | (code << 1) | done

    def _named(self, place: Place) -> int:
        """The place's number, which begins at 1; 0 where there is no room left for its name."""
        line = json.dumps(place).encode() + b"\n"
        end = _TEXT + len(self._text) + len(line)
        if end > _BYTES or len(self._codes) + 1 >= _CODES:
            return 0
        self._memory[end - len(line) : end] = line
        self._text += line
        self._words[_LENGTH] = len(self._text)
        self._codes[place] = len(self._codes) + 1
        return self._codes[place]

    @property
    def words(self) -> memoryview:
        """int64, to write."""
        return self._words

    def close(self) -> None:
        with suppress(BufferError, OSError, ValueError):
            self._words.release()
            self._memory.close()
            os.close(self._file)


class PeerBoard:
    """A peer's, for reading. words: int64"""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = memoryview(memory).cast("q")

    @classmethod
    def at(cls, address: str) -> PeerBoard | None:
        """None where it cannot be reached from here."""
        found: dict[str, Any] = json.loads(address)
        if found["host"] != _host():
            return None
        try:
            file = os.open(found["path"], os.O_RDONLY | os.O_NONBLOCK)
            try:
                memory = mmap.mmap(file, _BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None
        board = cls(memory)
        return board if board._word(_TOKEN) == found["token"] else None

    def read(self) -> tuple[int, Place, bool] | None:
        """Number, place and done of its newest step; None before the first one, or where its name found no room."""
        word = self._word(_STEP)
        code = word >> 1 & _CODES - 1
        lines = self._memory[_TEXT : _TEXT + self._word(_LENGTH)].splitlines()
        if not 0 < code <= len(lines):
            return None
        where, phase, detail = json.loads(lines[code - 1])
        return word >> 16, (where, phase, detail), bool(word & 1)

    def _word(self, at: int) -> int:
        return int(self.words[at])

    def close(self) -> None:
        with suppress(BufferError, ValueError):
            self.words.release()
            self._memory.close()


def _host() -> str:
    """Processes of one value see each other under /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)


# --- a device's progress ----------------------------------------------------------------------------------------------


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

    def post(self, first: int, second: int) -> None:
        """Write this rank's pair for its peers, each number in [0, LARGEST]. The next step is `collect`."""
        number = self._number = self._number + 1 & _NUMBERS
        at = EXCHANGED + 2 * (number & 1)
        self._own[at], self._own[at + 1] = first << _BITS | number, second << _BITS | number

    def collect(self, recorder: Recorder, late: Callable[[], AbstractContextManager[object]]) -> list[tuple[int, int]]:
        """The peers' pairs of the exchange that was posted last.

        late: entered where a peer is not here yet, for a `with`; what it makes of an exception is raised
        """
        number, at = self._number, EXCHANGED + 2 * (self._number & 1)
        if self._missing(at, number, _POLLS):
            with late():
                self._wait(at, number, recorder)
        return [(words[at] >> _BITS, words[at + 1] >> _BITS) for words in self._peers.values()]

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
                raise dist.DistError(f"{named(missing)} did not come to this call")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
