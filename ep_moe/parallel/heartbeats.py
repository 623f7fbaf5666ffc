"""Heartbeats: ranks publish their newest steps, and two readings of them describe the state of each peer.

A heartbeat that stopped belongs to a dead process. A peer at an earlier step hangs elsewhere. A peer at the same step
number in another phase runs another call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.step_board import PeerBoard
from ep_moe.parallel.timeout_store import TimeoutStore

_FEWER_CALLS = (
    "Did a rank make fewer calls, because its batches or its generate ended earlier? Then keep it in step: "
    "layer(x[:0]), or for models of transformers idle_step(model) and generate without synced_gpus=False."
)
_NONE: Mapping[int, Any] = MappingProxyType({})


class Step(NamedTuple):
    """One collective step.

    number: the running number; call_name: the layer; phase: the stage; detail: the backend; done: whether it has ended

    It is a tuple because that is fast: each call of a layer creates about eight."""

    number: int
    call_name: str
    phase: str
    detail: str
    done: bool

    def __str__(self) -> str:
        verb = "finished" if self.done else "in"
        place = f" of {self.call_name}" if self.call_name else ""
        return f"{verb} {self.phase}{place} (step {self.number})"


class Heartbeats:
    """The heartbeats of a job's ranks, in its store.

    newest: returns this rank's newest step; boards: the step boards of peers on this host, once they are mapped
    others: ranks of other EP groups, which sum gradients with these and have their own step numbers
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        newest: Callable[[], Step],
        boards: Mapping[int, PeerBoard],
        nodes: NodeLayout | None,
        others: Sequence[int] = (),
    ) -> None:
        self._ranks, self._rank, self._nodes, self._others = ranks, rank, nodes, others
        self._newest, self._boards = newest, boards
        self._beats = 0
        self._heard: dict[int, float] = {}  # the time of a rank's newest heartbeat, by that rank's clock

    def beat(self, store: TimeoutStore) -> None:
        """Publish this rank's heartbeat."""
        self._beats += 1
        store.set(
            f"beat/{self._rank}", json.dumps({"beat": self._beats, "at": time.time(), **self._newest()._asdict()})
        )

    def _read(self, store: TimeoutStore) -> dict[int, tuple[int, Step] | None]:
        found: dict[int, tuple[int, Step] | None] = {}
        for rank in (*self._ranks, *self._others):
            key = f"beat/{rank}"
            if not store.has(key):
                found[rank] = None
                continue
            entry = json.loads(store.get(key))
            self._heard[rank] = entry.pop("at")
            found[rank] = (entry.pop("beat"), Step(**entry))
        return found

    def _exact(self) -> dict[int, Step]:
        """Return the newest steps of peers on this host, read from their boards. They may be dead."""
        found = {rank: board.read() for rank, board in list(self._boards.items())}
        return {rank: Step(one[0], *one[1], one[2]) for rank, one in found.items() if one is not None}

    def compared(self, store: TimeoutStore, mine: Step, wait_s: float) -> tuple[str, int]:
        """Read all heartbeats twice, `wait_s` seconds apart, and compare them.

        Return the description of the peers, and the step number of the rank that is furthest behind.

        mine: the step of this rank that failed
        """
        self.beat(store)
        before = self._read(store)
        time.sleep(wait_s)
        self.beat(store)
        after = self._read(store)
        peers = {rank: after[rank] for rank in self._ranks}
        found = compare(mine, self._rank, before, peers, self._exact(), self._heard, self._nodes)
        if not found:
            found = compare_others(mine, before, {rank: after[rank] for rank in self._others}, self._heard)
        behind = min([mine.number, *(entry[1].number for entry in peers.values() if entry is not None)])
        return found or unless_ahead(mine, peers, self._exact()), behind


def compare(
    mine: Step,
    rank: int,
    before: dict[int, tuple[int, Step] | None],
    after: dict[int, tuple[int, Step] | None],
    exact: Mapping[int, Step] = _NONE,
    heard: Mapping[int, float] = _NONE,
    nodes: NodeLayout | None = None,
) -> str:
    """Describe peers that are silent, behind or in another phase, by two readings of all heartbeats; "" if none is.

    mine: this rank's step; rank: this rank; exact: the steps of ranks on this host, read from their boards
    heard: the time of each rank's heartbeat; nodes: the nodes of all ranks
    """
    findings = []
    silent = [peer for peer, entry in after.items() if peer != rank and (entry is None or entry == before[peer])]
    for peer, entry in after.items():
        if peer == rank:
            continue
        if entry is None or peer in silent:
            last = f", last seen {exact[peer]}" if peer in exact else _by_heartbeat(entry, heard.get(peer))
            findings.append(f"Rank {peer} shows no sign of life{last}.")
            continue
        step = exact.get(peer, entry[1])
        if step.number < mine.number:
            findings.append(f"Rank {peer} is alive but behind: {step}.")
        elif step.number == mine.number and (step.call_name, step.phase) != (mine.call_name, mine.phase):
            findings.append(f"Rank {peer} is in another call: {step}.")
    if nodes is not None:
        findings += nodes.lost(silent, list(after))
    if any(entry is not None and entry[1].done and entry[1].number < mine.number for entry in after.values()):
        findings.append(_FEWER_CALLS)
    return " ".join(findings)


def unless_ahead(mine: Step, after: Mapping[int, tuple[int, Step] | None], exact: Mapping[int, Step] = _NONE) -> str:
    """Describe the peers if `compare` found none that is silent, behind or in another phase.

    They are in the same step or ahead. They are ahead if, for example, this rank makes a step that they do not make.
    """
    steps = {peer: exact.get(peer, entry[1]) for peer, entry in after.items() if entry is not None}
    ahead = [f"rank {peer} is ahead: {step}" for peer, step in steps.items() if step.number > mine.number]
    return f"Every peer is alive, and {'; '.join(ahead)}." if ahead else "Every peer is alive and in the same step."


def compare_others(
    mine: Step,
    before: Mapping[int, tuple[int, Step] | None],
    after: Mapping[int, tuple[int, Step] | None],
    heard: Mapping[int, float] = _NONE,
) -> str:
    """Describe ranks of other EP groups that are silent or at an earlier step. A sum of gradients waits for them.

    Without sums of gradients these ranks may make fewer calls, so an earlier step is not described as an error.
    """
    findings = []
    for rank, entry in after.items():
        if entry is None or entry == before[rank]:
            findings.append(
                f"Rank {rank} of another EP group shows no sign of life{_by_heartbeat(entry, heard.get(rank))}."
            )
        elif entry[1].number < mine.number:
            findings.append(f"Rank {rank} of another EP group is alive, and {entry[1]}.")
    return " ".join(findings)


def _by_heartbeat(entry: tuple[int, Step] | None, at: float | None) -> str:
    """Return the last known step of a process that is gone, as text. It may have advanced after that heartbeat."""
    if entry is None:
        return ""
    ago = "" if at is None else f" {max(time.time() - at, 0):.0f} s ago (it may have advanced since)"
    return f", last seen {entry[1]}{ago}"
