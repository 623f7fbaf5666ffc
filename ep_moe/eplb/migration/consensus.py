"""What the ranks tell each other while a rebalance is under way, and what follows from it: the same on all of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.parallel.rank_group import RankGroup, all_gather_single


class State(enum.IntEnum):
    """Where a rebalance is; equal on all ranks, but for OFF.

    IDLE       nothing under way: load is counted, nothing is exchanged
    GATHERING  counts are on their way to the host
    SUMMING    they are summed over the ranks
    PLANNING   every rank plans by itself, in a thread
    MOVING     one layer's experts travel
    OFF        a peer was lost; every further step raises
    """

    IDLE = 0
    GATHERING = 1
    SUMMING = 2
    PLANNING = 3
    MOVING = 4
    OFF = 5


class Trouble(enum.IntEnum):
    """NONE; HERE: this rank cannot go on with this rebalance; LOST: it cannot with any, for bytes are missing."""

    NONE = 0
    HERE = 1
    LOST = 2


@dataclass(frozen=True)
class RankStatus:
    """One rank's, all integers.

    step: the balancer's turns
    forward: the ledger's running number, equal where all ranks are between the same forwards
    epoch: migrations begun
    done: this rank has done its part of the state
    digest: of the plan, in PLANNING
    """

    step: int
    forward: int
    state: State
    epoch: int
    done: bool
    trouble: Trouble
    digest: int

    @classmethod
    def of(cls, row: Sequence[int]) -> RankStatus:
        step, forward, state, epoch, done, trouble, digest = row
        return cls(step, forward, State(state), epoch, bool(done), Trouble(trouble), digest)


class Call(enum.Enum):
    """WAIT for ranks that are not done; COMMIT on together; ROLLBACK to the old maps; ABORT: back, and nothing more."""

    WAIT = "wait"
    COMMIT = "go"
    ROLLBACK = "back"
    ABORT = "out"


@dataclass(frozen=True)
class Verdict:
    """call; explained_by: index of the rank whose words explain it, or None where `text` does."""

    call: Call
    explained_by: int | None = None
    text: str = ""


def reach_verdict(rows: Sequence[RankStatus], ranks: Sequence[int]) -> Verdict:
    """A function of all ranks' facts, in the order of `ranks` (global), and of nothing else."""
    for name in ("step", "forward", "state", "epoch"):
        found = [getattr(row, name) for row in rows]
        if len(set(found)) > 1:
            return Verdict(
                Call.ABORT,
                text=f"the ranks are not in step: {name} is {_listed(found, ranks)}; call ExpertBalancer.step() after "
                f"every forward, on all ranks alike",
            )
    troubles = [row.trouble for row in rows]
    if Trouble.LOST in troubles:
        return Verdict(Call.ABORT, explained_by=troubles.index(Trouble.LOST))
    # those in trouble too: what is under way between other ranks comes to its end first
    if not all(row.done for row in rows):
        return Verdict(Call.WAIT)
    if Trouble.HERE in troubles:
        return Verdict(Call.ROLLBACK, explained_by=troubles.index(Trouble.HERE))
    digests = [row.digest for row in rows]
    if len(set(digests)) > 1:
        return Verdict(
            Call.ROLLBACK,
            text=f"the ranks made different plans: their digest is {_listed(digests, ranks)}; a planner must depend on "
            f"its arguments alone",
        )
    return Verdict(Call.COMMIT)


def _listed(values: Sequence[int], ranks: Sequence[int]) -> str:
    first = values[0]
    odd = next(index for index, value in enumerate(values) if value != first)
    return f"{int(first)} on rank {ranks[0]}, {int(values[odd])} on rank {ranks[odd]}"


class StatusExchange:
    """Exchanges over a gloo group of their own. Begun at one step and read at a later one, they cost the steps nothing
    but a look. A lost peer leaves as PeerTimeout, which the ledger puts a name to."""

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self._sums: tuple[Tensor, dist.Work | None] | None = None
        self._posted: tuple[Tensor, dist.Work | None] | None = None

    def tell(self, facts: RankStatus) -> None:
        own = torch.tensor(list(map(int, vars(facts).values())), dtype=torch.int64, device="cpu")
        every, work = own, None
        if self.rank_group.size > 1:
            every = own.new_empty(self.rank_group.size * len(own))
            work = all_gather_single(every, own, group=self.rank_group.group, async_op=True)
        self._posted = every, work

    def hear(self) -> list[RankStatus]:
        """All ranks' facts as of the last `tell`."""
        assert self._posted is not None, "tell first"
        (every, work), self._posted = self._posted, None
        self._await("eplb agree", work)
        return [RankStatus.of(row) for row in every.view(-1, len(fields(RankStatus))).tolist()]

    def add(self, counts: Tensor) -> None:
        """Begin to sum host int64 `counts` over the ranks."""
        work = None
        if self.rank_group.size > 1:
            work = dist.all_reduce(counts, group=self.rank_group.group, async_op=True)
        self._sums = counts, work

    def sums(self) -> Tensor:
        assert self._sums is not None, "add first"
        (counts, work), self._sums = self._sums, None
        self._await("eplb sum", work)
        return counts

    def _await(self, phase: str, work: dist.Work | None) -> None:
        with self.rank_group.flight_recorder.step(phase, keep=False):  # layers go on where a rank was only late
            if work is not None:
                work.wait()
