"""The lockstep ledger: what step each rank is in, so that a lost peer has a name and a phase.

Every collective step of a rank is a `Step` with a running number. A host thread publishes the newest one as a
heartbeat. When a step fails or outlasts its deadline, the heartbeats of all ranks are compared: one that
stopped is a dead process, one that is behind hangs elsewhere, one with another phase went another way. There is no
collective in this and nothing on the hot path but filling in a record.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store

from ep_moe.errors import EPMoEError, InputError, PeerTimeout
from ep_moe.parallel.device_mark import DeviceMark
from ep_moe.types import capturing


class Step(NamedTuple):
    """One collective step. number: running; where: layer; phase: stage; detail: backend; done: left again.

    A tuple, since each call of a layer makes some eight."""

    number: int
    where: str
    phase: str
    detail: str
    done: bool

    def __str__(self) -> str:
        verb = "finished" if self.done else "in"
        place = f" of {self.where}" if self.where else ""
        return f"{verb} {self.phase}{place} (step {self.number})"


class _Inside:
    """A step of a ledger, from its beginning on. A generator in its place takes the host twice as long."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._ledger.leave(error)


_UNSEEN = nullcontext()


class Ledger:
    """One rank's record, and the watch over its peers. Without a store or peers it only counts.

    deadline_s: how long a step may last before its peers are examined.
    abort: called once when a step outlasts its deadline, to free a thread that waits on a device; None where the
        transport has a timeout of its own (gloo).
    """

    def __init__(
        self,
        store: Store | None = None,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        *,
        deadline_s: float = 300.0,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.where = ""
        self._inside = _Inside(self)
        self.deadline_s = deadline_s
        self._ranks, self._rank = list(ranks), rank
        self._step = Step(0, "", "start", "", True)
        self._started = time.monotonic()
        self._failure: EPMoEError | None = None
        self._abort = abort
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._period = min(5.0, max(0.05, deadline_s / 8))
        self._beats = 0
        self._mark: DeviceMark | None = None
        self._marked = 0.0
        self._shared: dict[tuple[int, ...], int] = {}
        self._store = store
        if store is not None and len(self._ranks) > 1:
            own = store.clone()  # type: ignore[attr-defined]  # a connection of its own: a waiting call holds its lock
            self._thread = threading.Thread(target=self._watch, args=(own,), daemon=True, name="ep_moe ledger")
            self._thread.start()

    @property
    def number(self) -> int:
        """The running number of the newest step; equal on all ranks while they are in step."""
        return self._step.number

    @property
    def newest(self) -> Step:
        return self._step

    def leave_at(self, step: Step) -> None:
        """Take it for the newest: replays and recordings of a call end where the peers' own calls do."""
        self._step = step

    def step(self, phase: str, detail: str = "", *, counted: bool = True) -> AbstractContextManager[None]:
        """Enter a collective step, for a `with`. A communication failure inside leaves as PeerTimeout.

        counted: False for a step that not all ranks make, or not equally often: the running number stays
        """
        if torch.compiler.is_compiling():  # one process alone is compiled, which has no peers to lose
            return _UNSEEN
        self.check()
        self._step = Step(self._step.number + counted, self.where, phase, detail, False)
        self._started = time.monotonic()
        return self._inside

    def leave(self, error: BaseException | None) -> None:
        """The end of a step. error: what left it"""
        try:
            if isinstance(error, EPMoEError | RuntimeError):
                self._explain(error)
        finally:
            step = self._step
            self._step = Step(step.number, step.where, step.phase, step.detail, True)
        if error is None:
            self.check()

    def _explain(self, error: EPMoEError | RuntimeError) -> None:
        """Raise what it comes from, if that is something else."""
        if self._failure is not None:  # whatever an aborted collective left behind is no news of its own
            raise self._failure from error
        if not isinstance(error, EPMoEError) and _is_communication_error(error):
            raise self._diagnose(str(error).splitlines()[0]) from error

    def mark(self, device: torch.device) -> None:
        """Let the watch see when a GPU has come this far: for steps that the host leaves before the device does. Now
        and then one is enough."""
        if self._thread is None or time.monotonic() - self._marked < self._period or capturing(device):
            return
        if self._mark is None:
            self._mark = DeviceMark(device)
        if self._mark.reached:
            self._marked = time.monotonic()
            self._mark.set()

    def check(self) -> None:
        """Raise what the watch found, if anything: what an aborted collective left in its buffers is noise."""
        if self._failure is not None:
            raise self._failure

    def share(self, text: str | None, *, owner: int, group: tuple[int, ...]) -> str:
        """The owner's text on every rank of a group. For error messages only: it waits for the store."""
        if self._store is None or len(group) == 1:
            return text or ""
        number = self._shared[group] = self._shared.get(group, 0) + 1
        key = f"text/{'-'.join(map(str, group))}/{number}"
        if self._rank == owner:
            self._store.set(key, text or "")
        try:
            self._store.wait([key], timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise self._diagnose(f"rank {owner} did not say what is wrong there") from error
        return self._store.get(key).decode()

    def refuse(self, text: str) -> None:
        """This rank cannot go on: raise `text` as InputError at every rank's next step, here and on the peers."""
        self._failure = self._failure or InputError(text)
        if self._store is not None and len(self._ranks) > 1:
            self._store.set("refusal", text)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    # --- the watch ---------------------------------------------------------------------------------------------

    def _watch(self, store: Store) -> None:
        try:
            while not self._stop.wait(self._period):
                self._beat(store)
                if self._failure is None and store.check(["refusal"]):
                    self._failure = InputError(store.get("refusal").decode())
                late = self._late()
                if late > self.deadline_s and self._failure is None and self._abort is not None:
                    self._failure = self._diagnose(f"no progress for {self.deadline_s:g} s", store)
                    # beside this thread: it waits for a device whose kernel may wait for the lost peer
                    threading.Thread(target=self._abort, daemon=True).start()
                if self._late_on_device() > 2 * self.deadline_s:
                    self._end()
        except RuntimeError:  # DistError, but FileStore has no type of its own
            pass  # the store is gone, and with it the job

    def _late(self) -> float:
        """Seconds that a step has lasted, or that the device has not come to a mark."""
        step = 0.0 if self._step.done else time.monotonic() - self._started
        return max(step, self._late_on_device())

    def _late_on_device(self) -> float:
        return 0.0 if self._mark is None or self._mark.reached else time.monotonic() - self._marked

    def _end(self) -> None:
        """A kernel that waits for a lost peer cannot be called back, and a thread that waits for the kernel cannot be
        told: what is left is to end the process, as NCCL's own watchdog does, so that the launcher ends the job."""
        sys.stderr.write(f"{type(self._failure).__name__}: {self._failure} The device still waits: ending.\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)

    def _beat(self, store: Store) -> None:
        self._beats += 1
        store.set(f"beat/{self._rank}", json.dumps({"beat": self._beats, **self._step._asdict()}))

    def _read(self, store: Store) -> dict[int, tuple[int, Step] | None]:
        found: dict[int, tuple[int, Step] | None] = {}
        for rank in self._ranks:
            key = f"beat/{rank}"
            if not store.check([key]):
                found[rank] = None
                continue
            entry = json.loads(store.get(key))
            found[rank] = (entry.pop("beat"), Step(**entry))
        return found

    def _diagnose(self, cause: str, store: Store | None = None) -> PeerTimeout:
        """Compare two readings of all heartbeats. The first rank to reach a verdict publishes it, because its own
        exit is what the others see next. A later failure, of ranks that went on after this one, has another key: by
        then the one that is furthest behind is not where it was."""
        step = self._step
        store = store or self._store
        text = f"rank {self._rank} lost its peers {step}: {cause}."
        if store is None:
            return PeerTimeout(text)
        try:
            self._beat(store)
            before = self._read(store)
            time.sleep(2.5 * self._period)
            self._beat(store)
            after = self._read(store)
            verdict = _compare(step, self._rank, before, after)
            behind = min([step.number, *(entry[1].number for entry in after.values() if entry is not None)])
            verdict = store.compare_set(f"verdict/{behind}", "", verdict).decode() or verdict
        except RuntimeError:
            return PeerTimeout(f"{text} The store is gone too, so that no rank can be named.")
        return PeerTimeout(f"{text} {verdict} Raise deadline_s (now {self.deadline_s:g} s) if it was only slow.")


def _compare(
    mine: Step, rank: int, before: dict[int, tuple[int, Step] | None], after: dict[int, tuple[int, Step] | None]
) -> str:
    findings = []
    for peer, entry in after.items():
        if peer == rank:
            continue
        if entry is None or entry == before[peer]:
            last = f", last seen {entry[1]}" if entry else ""
            findings.append(f"Rank {peer} shows no sign of life{last}.")
        elif entry[1].number < mine.number:
            findings.append(f"Rank {peer} is alive but behind: {entry[1]}.")
        elif entry[1].number == mine.number and (entry[1].where, entry[1].phase) != (mine.where, mine.phase):
            findings.append(f"Rank {peer} went another way: {entry[1]}.")
    return " ".join(findings) or "Every peer is alive and in the same step."


def _is_communication_error(error: RuntimeError) -> bool:
    """gloo and NCCL raise plain RuntimeErrors beside torch's own types."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection closed"))
