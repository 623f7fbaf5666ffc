"""The flight recorder: it records the step of each rank, so that errors name a lost peer and its phase.

Every collective step of a rank is a `Step` with a running number. A host thread publishes the newest step as a
heartbeat (`heartbeats`). When a step fails or exceeds its deadline, the heartbeats of all ranks are compared. A rank
whose call raises publishes the error, and its peers raise it too. The flight recorder uses no collectives, and on the
hot path it only records.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch.distributed import Store

from ep_moe.errors import EPMoEError, InputError, OutOfMemory, PeerTimeout, RankFailed
from ep_moe.parallel.device_watch import DeviceWatch
from ep_moe.parallel.failed import failure_text, is_communication_error, is_out_of_memory, published_failure, with_cause
from ep_moe.parallel.heartbeats import Heartbeats, Step
from ep_moe.parallel.nodes import NodeLayout, format_ranks
from ep_moe.parallel.step_board import HostExchange, PeerBoard, StepBoard
from ep_moe.parallel.timeout_store import StoreLost, TimeoutStore

_log = logging.getLogger("ep_moe.parallel")

_PATIENCE_S = 5.0  # seconds after which a rank that waits for others logs or warns
COMPILING_S = 600.0  # seconds beyond the deadline, for steps in which a library may compile kernels


class _StepGuard:
    """The context manager that `FlightRecorder.step` returns; it ends the step.

    It is a class because a generator-based context manager takes the host twice as long.
    """

    def __init__(self, flight_recorder: FlightRecorder) -> None:
        self._flight_recorder = flight_recorder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._flight_recorder.end_step(error)


_UNSEEN = nullcontext()


class FlightRecorder:
    """The record of one rank's steps, and the watch over its peers. Without a store or peers it only counts steps.

    Args:
        store: The store that the ranks share; None for a single process.
        ranks: The global ranks that are watched, including this one.
        rank: This rank.
        others: Global ranks that only sum gradients with these. Only their heartbeats are read.
        deadline_s: Seconds that a step may last before its peers are examined.
        abort: Called once when a step exceeds its deadline or a peer fails, to free a thread that waits on a device.
            None if the backend has its own timeout (gloo).
        device: The layers' device, for errors about its memory.
        nodes: The ranks' hosts, for errors that name lost hosts or the holder of the store.
    """

    def __init__(
        self,
        store: Store | None = None,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        *,
        others: Sequence[int] = (),
        deadline_s: float = 300.0,
        abort: Callable[[], None] | None = None,
        device: torch.device | None = None,
        nodes: NodeLayout | None = None,
    ) -> None:
        self.call_name = ""  # the layer or function whose call is running, "" between calls
        self.call_facts = ""  # "name=value, name=value" of the call; ranks compare them before they exchange rows
        self._guard = _StepGuard(self)
        self.deadline_s = deadline_s
        self._ranks, self._rank = list(ranks), rank
        self._step = Step(0, "", "start", "", True)
        self._started = time.monotonic()
        self._failure: EPMoEError | None = None
        self._keeps, self._more_s = True, 0.0  # `keep` and `more_s` of the current step
        self._said_slow = -1  # the number of the last step that was logged as slow
        self.longest_wait: dict[str, float] = {}  # seconds by layer, of the longest wait that the watch thread saw
        self._abort = abort
        self._device = torch.device("cpu") if device is None else device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._period = min(5.0, max(0.05, deadline_s / 8))
        self._board: StepBoard | None = None  # this rank's
        self._boards: dict[int, PeerBoard] = {}  # those of peers on this host, by rank
        self._heartbeats = Heartbeats(self._ranks, rank, lambda: self._step, self._boards, nodes, others)
        self._key = f"block{self._ranks[0]}"  # prefix of keys of these ranks: other ranks write to the same store
        self._exchanging = False  # whether a group already uses the board for a `HostExchange`
        self.device_watch = DeviceWatch(self._period, abortable=abort is not None)
        self._shared: dict[object, int] = {}  # calls of `broadcast_text` by group, and of `monitored_barrier` by key
        self._store: TimeoutStore | None = None
        self._watched = True  # whether the store answered the watch thread's last calls
        if store is not None:
            patience_s, held = max(2.0, 2.5 * self._period), "" if nodes is None else nodes.store
            self._store = TimeoutStore(store, patience_s, held)
        if store is not None and self._store is not None and (len(self._ranks) > 1 or others):
            clone = store.clone()  # type: ignore[attr-defined]  # a waiting call locks its connection
            own = TimeoutStore(clone, patience_s, held)
            self._board = StepBoard.made()
            self._store.set(f"board/{rank}", "" if self._board is None else self._board.address)
            self.device_watch.active = len(self._ranks) > 1
            self._thread = threading.Thread(target=self._watch, args=(own,), daemon=True, name="ep_moe flight recorder")
            self._thread.start()

    def attach(self) -> None:
        """Map the step boards of peers on this host. Call it once all ranks have created their flight recorders.

        From then on the last step of a killed process is known exactly.
        """
        if self._board is None or self._store is None:
            return
        for peer in self._ranks:
            address = "" if peer == self._rank else self._store.get(f"board/{peer}").decode()
            board = PeerBoard.at(address) if address else None
            if board is not None:
                self._boards[peer] = board

    def host_exchange(self, ranks: Sequence[int]) -> HostExchange | None:
        """Return a `HostExchange` for a group of ranks, if this rank can read the memory of all of them, else None.

        Only one group can have it.
        """
        peers = {rank: self._boards[rank] for rank in ranks if rank in self._boards}
        if self._board is None or self._exchanging or len(peers) < len(ranks) - 1:
            return None
        self._exchanging = True
        return HostExchange(self._board, peers)

    @property
    def number(self) -> int:
        """The running number of the newest step; equal on all ranks while they are in step."""
        return self._step.number

    @property
    def newest(self) -> Step:
        return self._step

    def set_newest_step(self, step: Step) -> None:
        """Set the newest step. Replays and recordings use it to end at the same step as eager calls of the peers."""
        self._step = step
        if self._board is not None:
            self._board.put(step.number, step[1:4], step.done)

    @property
    def failed(self) -> bool:
        """Whether a failure was found, so that every later step raises."""
        return self._failure is not None

    def begin_call(self, name: str, call_facts: str = "") -> None:
        """Begin a layer's call. Until `call_name` is "" again, the watch also measures the time between steps."""
        self.check()
        self.call_name, self.call_facts = name, call_facts
        self._started = time.monotonic()

    def step(
        self, phase: str, detail: str = "", *, counted: bool = True, keep: bool = True, more_s: float = 0.0
    ) -> AbstractContextManager[None]:
        """Begin a collective step, and return a context manager that ends it.

        Args:
            phase: The name of the step in errors.
            detail: What it concerns, such as a transport's name.
            counted: False for a step that not all ranks make, or not equally often. The running number then stays.
            keep: Whether every later step raises a PeerTimeout of this step too. False if the step has its own process
                groups, and the other groups stay usable.
            more_s: Seconds beyond the deadline, for steps that compile or connect.

        Returns:
            A context manager. It turns communication errors of its body into PeerTimeout.
        """
        if torch.compiler.is_compiling():  # only layers on one process are compiled, and they have no peers
            return _UNSEEN
        self.check()
        self._keeps, self._more_s = keep, more_s
        self.set_newest_step(Step(self._step.number + counted, self.call_name, phase, detail, False))
        self._started = time.monotonic()
        return self._guard

    def end_step(self, error: BaseException | None) -> None:
        """End a step. error: the exception that left it, or None"""
        try:
            if isinstance(error, EPMoEError | RuntimeError):
                self._explain(error)
        finally:
            step = self._step
            self.set_newest_step(Step(step.number, step.call_name, step.phase, step.detail, True))
        if error is None:
            self.check()

    def _explain(self, error: EPMoEError | RuntimeError) -> None:
        """Raise the failure that caused an error, if it is not the error itself."""
        if self._failure is not None:  # an error of an aborted collective is only a consequence
            raise with_cause(self._failure, error)
        if isinstance(error, EPMoEError):
            return
        if is_out_of_memory(error, self._device):
            raise with_cause(self.publish_failure(error), error)
        if is_communication_error(error):
            found = self._diagnose(str(error).splitlines()[0])
            if self._keeps:
                self._failure = found
            raise found from error

    @property
    def has_no_peers(self) -> bool:
        """Whether this rank has no peers."""
        return self._store is None or len(self._ranks) == 1

    def publish_failure(self, error: BaseException, call_name: str = "") -> EPMoEError:
        """Publish that `error` left a call on this rank. Return the error that all ranks raise from now on.

        call_name: the layer, if `begin_call` was not called for its call
        """
        if self._failure is not None:
            return self._failure
        memory = is_out_of_memory(error, self._device)
        text = failure_text(error, self._rank, self._step, self.call_name or call_name, self._device, memory=memory)
        failure: EPMoEError = (OutOfMemory if memory else RankFailed)(text)
        if self._store is not None and not self.has_no_peers:
            with suppress(StoreLost):  # the peers also notice a lost store
                entry = json.dumps({"memory": memory, "text": text})
                # if two ranks fail, the first failure is taken for the cause
                failure = published_failure(self._store.set_if_absent(f"{self._key}/failed", entry)) or failure
            self._failure = failure
        return failure

    def _failed_elsewhere(self, store: TimeoutStore) -> EPMoEError | None:
        if not store.has(f"{self._key}/failed"):
            return None
        return published_failure(store.get(f"{self._key}/failed"))

    def check(self) -> None:
        """Raise the failure that was found, if any.

        It is a PeerTimeout, RankFailed or OutOfMemory, or the InputError of a peer that refused a call. Called after a
        collective too, because an aborted one leaves arbitrary numbers in its buffers.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def broadcast_text(self, text: str | None, *, owner: int, group: tuple[int, ...]) -> str:
        """Return the owner's text on every rank of a group. For error messages only: it waits for the store."""
        if self._store is None or len(group) == 1:
            return text or ""
        number = self._shared[group] = self._shared.get(group, 0) + 1
        key = f"text/{'-'.join(map(str, group))}/{number}"
        if self._rank == owner:
            self._store.set(key, text or "")
        if not self._store.wait([key], self.deadline_s):
            raise self._diagnose(f"rank {owner} did not report its error")
        return self._store.get(key).decode()

    def gather_texts(self, text: str, group: tuple[int, ...]) -> list[str]:
        """Return the texts of all ranks of a group, in its order. Waits for the store, not for the device."""
        if self._store is None or len(group) == 1:
            return [text]
        number = self._shared["texts", group] = self._shared.get(("texts", group), 0) + 1
        keys = {rank: f"texts/{'-'.join(map(str, group))}/{number}/{rank}" for rank in group}
        self._store.set(keys[self._rank], text)
        if not self._store.wait(list(keys.values()), self.deadline_s):
            missing = [rank for rank, key in keys.items() if not self._store.has(key)]
            raise self._diagnose(f"{format_ranks(missing)} did not report where they are")
        return [self._store.get(key).decode() for key in keys.values()]

    def monitored_barrier(self, key: str, ranks: Sequence[int], what: str) -> None:
        """Wait through the store until all of `ranks` make this call.

        For collectives that a user might start on one rank alone. Warns after a few seconds, and raises PeerTimeout
        after the deadline. Both name the missing ranks.

        key: the same on all ranks; it may be used repeatedly
        what: the name of the call in messages
        """
        if self._store is None or len(ranks) == 1:
            return
        number = self._shared[key] = self._shared.get(key, 0) + 1
        key = f"meet/{'-'.join(map(str, ranks))}/{key}/{number}"
        self._store.set(f"{key}/{self._rank}", "")
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        for seconds in (min(_PATIENCE_S, self.deadline_s), self.deadline_s):
            if self._store.wait(list(keys.values()), seconds):
                return
            missing = [rank for rank, own in keys.items() if not self._store.has(own)]
            text = f"{what} needs {format_ranks(missing)} too"
            if seconds < self.deadline_s:
                warnings.warn(f"{text}; rank {self._rank} waits up to {self.deadline_s:g} s", stacklevel=2)
        raise PeerTimeout(f"{text}, which did not call it within {self.deadline_s:g} s; call it on all ranks")

    def refuse(self, text: str) -> None:
        """Make the next step of every rank, this one included, raise `text` as InputError."""
        self._failure = self._failure or InputError(text)
        if self._store is not None and not self.has_no_peers:
            with suppress(StoreLost):  # the peers also notice a lost store
                self._store.set(f"{self._key}/refusal", text)

    def close(self, *, wait: bool = True) -> None:
        """End the watch and close the step boards. wait: whether to wait for the watch thread"""
        self._stop.set()
        if wait and self._thread is not None:
            self._thread.join(timeout=5)
            self._thread, self.device_watch.active = None, False
        boards = [self._board, *self._boards.values()]
        self._board = None
        self._boards.clear()
        for one in boards:
            if one is not None:
                one.close()

    # --- the watch ---------------------------------------------------------------------------------------------

    def _watch(self, store: TimeoutStore) -> None:
        """Watch the peers until `close`; the body of the watch thread.

        It continues without the store. The store may be lost together with a peer, and threads that wait for that peer
        must still be freed. A lost store alone is no failure, because the rank that holds it may end first.
        """
        while not self._stop.wait(self._period):
            try:
                self._heartbeats.beat(store)
                self._read_peer_failures(store)
                self._watched = True
            except StoreLost as lost:
                self._say_unwatched(lost)
            late = max(self._late_on_host(), self.device_watch.late_s)
            self._note_wait(late)
            self._say_slow(late)
            if late > self.deadline_s and self._failure is None and self._abort is not None:
                self._failure = self._diagnose(f"no progress for {self.deadline_s:g} s", store)
                self._free(store)
            if self.device_watch.late_s > 2 * self.deadline_s:
                self._end("The device still waits")
            if self._late_on_host() > 2 * self.deadline_s and self._abort is not None:
                self._end("The host still waits")

    def _read_peer_failures(self, store: TimeoutStore) -> None:
        """Adopt a failure that a peer published."""
        if self._failure is None and store.has(f"{self._key}/refusal"):
            self._failure = InputError(store.get(f"{self._key}/refusal").decode())
        if self._failure is None and (found := self._failed_elsewhere(store)) is not None:
            self._failure = found
            self._free(store)
        if self.device_watch.reads_aborts and store.has(f"{self._key}/aborted"):
            self.device_watch.note_abort()  # a collective with the ranks that aborted leaves arbitrary numbers here too

    def _say_unwatched(self, lost: StoreLost) -> None:
        if self._watched:
            _log.info("rank %d cannot watch its peers: %s", self._rank, lost)
        self._watched = False

    def _free(self, store: TimeoutStore) -> None:
        """Free a thread that waits on a device for a peer, by `abort` on another thread.

        An abort may itself wait for the device, whose kernel may wait for the lost peer. Called once, with the first
        failure.
        """
        if self.device_watch.reads_aborts:
            self.device_watch.note_abort()  # before the abort lets the device continue
            with suppress(StoreLost):
                store.set(f"{self._key}/aborted", "")
        if self._abort is not None:
            threading.Thread(target=self._abort_once_heard, daemon=True, name="ep_moe abort").start()

    def _abort_once_heard(self) -> None:
        """Abort after the peers' watch threads have had time to read the store.

        A peer that reads it later would take the arbitrary numbers of an aborted collective for results.
        """
        assert self._abort is not None
        time.sleep(1.5 * self._period)
        self._abort()

    def _note_wait(self, late: float) -> None:
        call_name = self._step.call_name
        if late > self.longest_wait.get(call_name, 0.0):
            self.longest_wait[call_name] = late

    def _say_slow(self, late: float) -> None:
        """Log a long wait, once per step."""
        step = self._step
        if late > max(_PATIENCE_S, self.deadline_s / 10) and step.number != self._said_slow:
            self._said_slow = step.number
            _log.warning(
                "rank %d has waited %.0f s %s; a peer is slow, and counts as lost after %g s",
                self._rank, late, step, self.deadline_s,
            )  # fmt: skip

    def _late_on_host(self) -> float:
        """Return how many seconds the host has spent in the current step, minus the step's allowance `more_s`.

        Between the steps of a call: the seconds since the last step began, minus `COMPILING_S`, because kernels may be
        compiled there. 0 between calls.
        """
        if not self._step.done:
            return time.monotonic() - self._started - self._more_s
        return time.monotonic() - self._started - COMPILING_S if self.call_name else 0.0

    def _end(self, why: str) -> None:
        """End the process with a stack trace, as NCCL's watchdog does, so that the launcher ends the job.

        It is the last resort: a kernel that waits for a lost peer cannot be cancelled, and a thread that waits for the
        kernel cannot be woken.
        """
        sys.stderr.write(f"{type(self._failure).__name__}: {self._failure} {why}: ending.\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)

    def _diagnose(self, cause: str, store: TimeoutStore | None = None) -> EPMoEError:
        """Return the failure that a peer published. If there is none, compare two readings of all heartbeats.

        The first rank with a verdict publishes it, and the others adopt it: to them, that rank's exit would look like
        the cause. The key contains the step of the rank that is furthest behind. A later failure, of ranks that went on
        after this one, so has another key.
        """
        step = self._step
        store = store or self._store
        text = f"rank {self._rank} lost its peers {step}: {cause}."
        if store is None:
            return PeerTimeout(text)
        try:
            if (failed := self._failed_elsewhere(store)) is not None:
                return failed
            verdict, behind = self._heartbeats.compared(store, step, 2.5 * self._period)
            if (failed := self._failed_elsewhere(store)) is not None:
                return failed
            verdict = store.set_if_absent(f"{self._key}/verdict/{behind}", verdict).decode() or verdict
        except StoreLost as lost:
            return PeerTimeout(f"{text} {lost}")
        return PeerTimeout(f"{text} {verdict} Raise deadline_s (now {self.deadline_s:g} s) if it was only slow.")
