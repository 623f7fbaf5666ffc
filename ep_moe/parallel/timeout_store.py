"""Access to the job's store with timeouts: every call returns an answer, or raises a PeerTimeout that names the holder.

torch keeps the store (TCPStore) in one process: that of rank 0, or the agent of torchrun on one host. If this process
ends, its connections break. If its host loses power or network, connections neither break nor answer, and a call of
torch waits forever.
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

_ANCESTORS = 8  # how many levels of parent processes are searched for torchrun's agent
_LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp

Answer = TypeVar("Answer")


class StoreLost(PeerTimeout):
    """The store is gone or does not answer. Its message becomes a part of the message that users read."""


class TimeoutStore:
    """A store whose calls time out. They run on a helper thread, which starts with the first call.

    store: of torch.distributed; patience_s: how long an answer may take
    held: text that says which process holds the store; default: its address
    """

    def __init__(self, store: Store, patience_s: float, held: str = "") -> None:
        self._store = store
        self._patience_s = patience_s
        self._held = held or _address(store)
        self._under_way: threading.Event | None = None  # of a call that timed out; set when that call ends
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._gone = False  # torch does not reconnect, and prints a stack for each call over a broken connection

    def ask(self, call: Callable[[Store], Answer], more_s: float = 0.0) -> Answer:
        """Return the result of a call that waits for no key. Raises StoreLost. more_s: seconds beyond `patience_s`"""
        try:
            return self._ask(call, more_s)
        except StoreLost:
            raise
        except RuntimeError as error:
            raise self._lost("is gone") from error

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all keys exist within this many seconds. Raises StoreLost."""
        try:
            self._ask(lambda store: store.wait(list(keys), timedelta(seconds=seconds)), seconds)
        except StoreLost:
            raise
        except RuntimeError:  # DistStoreError; FileStore raises a plain RuntimeError
            return False
        return True

    def set(self, key: str, value: str) -> None:
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return bytes(self.ask(lambda store: store.get(key)))

    def has(self, key: str) -> bool:
        return self.ask(lambda store: store.check([key]))

    def set_if_absent(self, key: str, value: str) -> bytes:
        """Set a key unless it exists, and return its value."""
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
        store = self._store  # the thread must not hold this object: the object's finalizer ends the thread

        def run() -> None:
            try:
                found.append(call(store))
            except BaseException as error:  # raised again on the caller's thread
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
        if self._thread is None or not self._thread.is_alive():  # a fork has only the thread that called it
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run_all, args=(self._calls,), daemon=True, name="ep_moe store")
            self._thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(run)

    def _lost(self, how: str) -> StoreLost:
        return StoreLost(f"The store of the job {how}{self._held and f': {self._held}'}.")


def _run_all(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run calls from a queue until it holds None."""
    while (run := calls.get()) is not None:
        run()
        del run  # releases the store and the call while this thread waits for the next one


def _tcp(store: Store) -> Store:
    """Return the store below its PrefixStores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _address(store: Store) -> str:
    tcp = _tcp(store)
    return f"it was at {tcp.host}:{tcp.port}" if isinstance(tcp, dist.TCPStore) else ""


def holder(store: Store) -> str:
    """Return which process on this rank's host holds a store: "rank" for this process, "agent" for a parent, else "".

    It is found by the processes' listening sockets, because a host may have several addresses.
    """
    tcp = _tcp(store)
    return holder_of_port(tcp.port) if isinstance(tcp, dist.TCPStore) else ""


def holder_of_port(port: int) -> str:
    """Return which process listens on a port, as `holder` does."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for steps, pid in enumerate(_ancestors(os.getpid())):
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:  # fails for a process of another user, or ended
            for file in files:
                with suppress(OSError):
                    if os.readlink(file.path) in sockets:
                        return "agent" if steps else "rank"
    return ""


def _listening(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # not Linux, or no sockets of this kind
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == _LISTENING and int(field[1].rpartition(":")[2], 16) == port:
                    yield field[9]


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ids of this process and its parents, nearest first."""
    for _ in range(_ANCESTORS):
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
        if pid < 1:
            return
