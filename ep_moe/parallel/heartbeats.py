"""Heartbeats: what ranks publish of their newest steps, and what two readings of them say of a peer.

One that stopped is a dead process, one that is behind hangs elsewhere, one with another phase went another way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ep_moe.parallel.answering_store import AnsweringStore
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.step_board import PeerBoard

_FEWER_CALLS = (
    "Did a rank make fewer calls, because its batches or its generate ended earlier? Then keep it in step: "
    "layer(x[:0]), or for models of transformers idle_step(model) and generate without synced_gpus=False."
)
_NONE: Mapping[int, Any] = MappingProxyType({})


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


class Heartbeats:
    """Those of a job's ranks, in its store.

    newest: gives this rank's newest step; boards: what peers on this host write of theirs, once they are mapped;
    others: ranks of other EP groups, which share gradients with these and count their own steps
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
        self._heard: dict[int, float] = {}  # when a rank's newest heartbeat was, by its clock

    def beat(self, store: AnsweringStore) -> None:
        """Publish this rank's."""
        self._beats += 1
        store.set(
            f"beat/{self._rank}", json.dumps({"beat": self._beats, "at": time.time(), **self._newest()._asdict()})
        )

    def _read(self, store: AnsweringStore) -> dict[int, tuple[int, Step] | None]:
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
        """The newest steps of peers on this host, whether they live or not."""
        found = {rank: board.read() for rank, board in list(self._boards.items())}
        return {rank: Step(one[0], *one[1], one[2]) for rank, one in found.items() if one is not None}

    def compared(self, store: AnsweringStore, mine: Step, wait_s: float) -> tuple[str, int]:
        """Read all heartbeats twice, `wait_s` apart.

        mine: the step of this rank that failed. Returns `compare`'s words, and the number of the step of the rank that
        is furthest behind.
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
    """Describe what two readings of all heartbeats say of the peers; "" where all are alive and in the same step.

    mine, rank: this rank's step and number; exact: steps that are known as they are, of ranks on this host; heard: when
    a rank's heartbeat was; nodes: of all ranks
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
        elif step.number == mine.number and (step.where, step.phase) != (mine.where, mine.phase):
            findings.append(f"Rank {peer} went another way: {step}.")
    if nodes is not None:
        findings += nodes.lost(silent, list(after))
    if any(entry is not None and entry[1].done and entry[1].number < mine.number for entry in after.values()):
        findings.append(_FEWER_CALLS)
    return " ".join(findings)


def unless_ahead(mine: Step, after: Mapping[int, tuple[int, Step] | None], exact: Mapping[int, Step] = _NONE) -> str:
    """Describe peers of which `compare` says nothing: they are in the same step, or further, as where a step of this
    rank is none of theirs."""
    steps = {peer: exact.get(peer, entry[1]) for peer, entry in after.items() if entry is not None}
    ahead = [f"rank {peer} is ahead: {step}" for peer, step in steps.items() if step.number > mine.number]
    return f"Every peer is alive, and {'; '.join(ahead)}." if ahead else "Every peer is alive and in the same step."


def compare_others(
    mine: Step,
    before: Mapping[int, tuple[int, Step] | None],
    after: Mapping[int, tuple[int, Step] | None],
    heard: Mapping[int, float] = _NONE,
) -> str:
    """Describe those of other EP groups that are silent, or at an earlier step: a sum of gradients waits for them.

    Their calls may rightly be fewer where nothing is summed, and so no step is called wrong.
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
    """What a heartbeat says of a process that is gone: where it was then. It may have come further."""
    if entry is None:
        return ""
    ago = "" if at is None else f" {max(time.time() - at, 0):.0f} s ago, from where it may have come further"
    return f", last seen {entry[1]}{ago}"
