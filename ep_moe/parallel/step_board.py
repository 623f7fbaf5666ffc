"""Shared memory of the ranks of one host: each rank's newest step (`StepBoard`), and exchanges of numbers before a call
(`HostExchange`).

Steps: when a process is killed, its last heartbeat may be seconds old. So a rank also writes one word per step into
memory that the other ranks of its host have mapped. The memory is anonymous (memfd), so a killed process leaves no file
behind. This works on Linux only. On other systems, and between hosts and containers, there are only heartbeats.

Exchanges: they take a few microseconds of the host and do not wait for a device. Each rank writes a pair of words that
its peers read. There are two pairs, one for exchanges with an even number and one for those with an odd number. A rank
overwrites a pair two exchanges later. It does so only after each peer has written the exchange between, hence has read
the pair. Each word contains the number of its exchange, so that the order of the two stores does not matter.
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

from ep_moe.parallel.nodes import format_ranks

_BYTES = 1 << 14
_TOKEN, _STEP, _LENGTH = 0, 1, 2  # indices of words
EXCHANGED = 3  # the index of the first of 4 words: a pair for even exchanges, then a pair for odd ones
_TEXT = 56  # the byte offset of the names of places, one JSON line each
_CODES = 1 << 15  # places have 15-bit numbers: a word holds the step's number, its place and `done`

Place = tuple[str, str, str]  # where, phase, detail


class StepBoard:
    """The board of this rank. Peers map it by its `address`."""

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
        except (AttributeError, OSError):  # memfd_create does not exist or is not allowed
            return None

    def put(self, number: int, place: Place, done: bool) -> None:
        """Write the newest step. It is one aligned word, so that a reader never sees half of it."""
        code = self._codes.get(place)
        if code is None:
            code = self._named(place)
        self._words[_STEP] = (number << 16) | (code << 1) | done

    def _named(self, place: Place) -> int:
        """Write the name of a new place and return its number, from 1 on; 0 if there is no room for the name."""
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
        """The memory as int64 words, for writing."""
        return self._words

    def close(self) -> None:
        with suppress(BufferError, OSError, ValueError):
            self._words.release()
            self._memory.close()
            os.close(self._file)


class PeerBoard:
    """The board of a peer, for reading. words: its memory as int64 words"""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = memoryview(memory).cast("q")

    @classmethod
    def at(cls, address: str) -> PeerBoard | None:
        """Map a peer's board; return None if it cannot be read from this process."""
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
        """Return number, place and `done` of the newest step; None before the first one, or if it has no name."""
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
    """Return a key of this host and PID namespace. Processes with the same key see each other under /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)


# --- exchanges of numbers ---------------------------------------------------------------------------------------------


_BITS = 16  # bits of a word that hold the number of the exchange
_NUMBERS = (1 << _BITS) - 1
LARGEST = (1 << 63 - _BITS) - 1  # the largest number that can be exchanged
_POLLS, _POLLS_IN_TURN = 200, 2000  # polls before this thread yields the core, and then before it sleeps
_LONGEST_S = 5e-4  # the longest sleep

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class Recorder(Protocol):
    """The part of the flight recorder that an exchange uses."""

    deadline_s: float

    def check(self) -> None: ...


class HostExchange:
    """Exchanges of numbers among the ranks of one group. All ranks make the same exchanges in the same order.

    own: this rank's board; peers: the boards of all other ranks
    """

    def __init__(self, own: StepBoard, peers: dict[int, PeerBoard]) -> None:
        self._own, self._peers = own.words, {rank: board.words for rank, board in peers.items()}
        self._number = 0

    def post(self, first: int, second: int) -> None:
        """Write this rank's pair of numbers, each in [0, LARGEST]. `collect` must follow."""
        number = self._number = self._number + 1 & _NUMBERS
        at = EXCHANGED + 2 * (number & 1)
        self._own[at], self._own[at + 1] = first << _BITS | number, second << _BITS | number

    def collect(self, recorder: Recorder, late: Callable[[], AbstractContextManager[object]]) -> list[tuple[int, int]]:
        """Wait for the peers' pairs of the exchange that was posted last, and return them.

        late: returns a context manager for the wait, if a peer is late. It may replace the wait's exceptions
        """
        number, at = self._number, EXCHANGED + 2 * (self._number & 1)
        if self._missing(at, number, _POLLS):
            with late():
                self._wait(at, number, recorder)
        return [(words[at] >> _BITS, words[at + 1] >> _BITS) for words in self._peers.values()]

    def _missing(self, at: int, number: int, polls: int) -> list[int]:
        """Return the ranks that have not written their pair. polls: how often to look at each rank"""
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
            recorder.check()  # raises if a peer has failed
            if time.monotonic() > end:
                raise dist.DistError(f"{format_ranks(missing)} did not enter this call")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
