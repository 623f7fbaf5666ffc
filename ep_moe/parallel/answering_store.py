"""The job's store on a rank that may lose it: every call ends, in an answer or in a PeerTimeout that says where it was.

torch keeps the store (TCPStore) in one process: that of rank 0, or the agent of torchrun on one host. If this process
ends, its connections break. If its host loses power or network, they neither break nor answer, and a call of torch
waits for ever.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store

from ep_moe.errors import PeerTimeout

_ANCESTORS = 8  # processes above a rank among which its agent is
_LISTENING = "0A"  # a state in /proc/net/tcp

Answer = TypeVar("Answer")


class StoreLost(PeerTimeout):
    """The store is gone or does not answer. Part of the sentence that users read."""


class AnsweringStore:
    """A store whose calls end in time. They run on one thread beside the caller's, which starts with the first call.

    store: of torch.distributed. patience_s: how long an answer may take. held: what holds the store, in words; default:
    its address
    """

    def __init__(self, store: Store, patience_s: float, held: str = "") -> None:
        self._store = store
        self._patience_s = patience_s
        self._held = held or _address(store)
        self._under_way: threading.Event | None = None  # a call that was given up, until it ends
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._gone = False  # torch makes no second connection, and prints a stack for each call over a broken one

    def ask(self, call: Callable[[Store], Answer], more_s: float = 0.0) -> Answer:
        """The answer to a call, which waits for no key. Raises StoreLost. more_s: seconds beyond the patience"""
        try:
            return self._ask(call, more_s)
        except StoreLost:
            raise
        except RuntimeError as error:
            raise self._lost("is gone") from error

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all keys are there within so many seconds. Raises StoreLost."""
        try:
            self._ask(lambda store: store.wait(list(keys), timedelta(seconds=seconds)), seconds)
        except StoreLost:
            raise
        except RuntimeError:  # DistStoreError, but FileStore has no type of its own
            return False
        return True

    def set(self, key: str, value: str) -> None:
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Of a key that is there."""
        return bytes(self.ask(lambda store: store.get(key)))

    def has(self, key: str) -> bool:
        return self.ask(lambda store: store.check([key]))

    def first(self, key: str, value: str) -> bytes:
        """What was given first for a key; this value where none was."""
        return bytes(self.ask(lambda store: store.compare_set(key, "", value)))

    def _ask(self, call: Callable[[Store], Answer], more_s: float) -> Answer:
        patience_s = self._patience_s + more_s
        if self._gone:
            raise self._lost("is gone")
        if self._under_way is not None and not self._under_way.wait(patience_s):
            raise self._lost("does not answer")
        done = self._under_way = threading.Event()
        found: list[Any] = []
        failed: list[BaseException] = []
        store = self._store  # the thread must not hold this object, whose end ends it

        def run() -> None:
            try:
                found.append(call(store))
            except BaseException as error:  # raised on the thread that asked
                failed.append(error)
            done.set()

        self._begin(run)
        if not done.wait(patience_s):
            raise self._lost("does not answer")
        self._under_way = None
        if failed:
            self._gone = isinstance(failed[0], dist.DistNetworkError)
            if self._gone:
                raise self._lost("is gone") from failed[0]
            raise failed[0]
        answer: Answer = found[0]
        return answer

    def _begin(self, run: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():  # as in a fork, which has the caller's thread alone
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run_all, args=(self._calls,), daemon=True, name="ep_moe store")
            self._thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(run)

    def _lost(self, how: str) -> StoreLost:
        return StoreLost(f"The store of the job {how}{self._held and f': {self._held}'}.")


def _run_all(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Until None."""
    while (run := calls.get()) is not None:
        run()
        del run  # with the store and what was asked


def _tcp(store: Store) -> Store:
    """The store below its prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _address(store: Store) -> str:
    tcp = _tcp(store)
    return f"it was at {tcp.host}:{tcp.port}" if isinstance(tcp, dist.TCPStore) else ""


def holder(store: Store) -> str:
    """What holds a store on this rank's host: "rank" for this process, "agent" for one above it, "" for none of them.
    The sockets of these processes tell, for the address may be one of several of a host."""
    tcp = _tcp(store)
    return holder_of_port(tcp.port) if isinstance(tcp, dist.TCPStore) else ""


def holder_of_port(port: int) -> str:
    """As `holder`, of what listens on a port."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for steps, pid in enumerate(_ancestors(os.getpid())):
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:  # of another user, or gone
            for file in files:
                with suppress(OSError):
                    if os.readlink(file.path) in sockets:
                        return "agent" if steps else "rank"
    return ""


def _listening(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # not Linux, or none
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == _LISTENING and int(field[1].rpartition(":")[2], 16) == port:
                    yield field[9]


def _ancestors(pid: int) -> Iterator[int]:
    """This process and those above it, nearest first."""
    for _ in range(_ANCESTORS):
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
        if pid < 1:
            return
