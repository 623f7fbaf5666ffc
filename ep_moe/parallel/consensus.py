"""Agreement through the store: all ranks state the same facts, or all of them raise the difference by name.

No collective is entered, so that ranks which could not even form one still get a sentence instead of a hang.
One rank compares and publishes a verdict: 2 store operations a rank whatever the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import Store

from ep_moe.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    EPMoEError,
    InputError,
    OutOfMemory,
    PeerTimeout,
)
from ep_moe.parallel.answering_store import AnsweringStore, StoreLost
from ep_moe.parallel.nodes import named

_PATIENCE_S = 30.0  # of a store that must only answer

_ERRORS: dict[str, type[EPMoEError]] = {
    error.__name__: error
    for error in (BackendUnavailable, CheckpointError, ConfigError, InputError, OutOfMemory, PeerTimeout)
}


class StoreConsensus:
    """Agreements among `ranks`, in the order of their calls. With one rank every call returns at once.

    Args:
        store: Shared by the ranks; None for a single process.
        ranks: Global ranks that agree, the same list on all of them.
        rank: This rank, one of `ranks`.
        deadline_s: Seconds after which a rank that does not arrive is lost.
        held: What holds the store, in words. If the store is lost, every call raises PeerTimeout with them.
    """

    def __init__(self, store: Store | None, ranks: Sequence[int], rank: int, deadline_s: float, held: str = "") -> None:
        self._store = None if store is None else AnsweringStore(store, min(deadline_s, _PATIENCE_S), held)
        self._ranks = list(ranks)
        self._rank = rank
        self._deadline_s = deadline_s
        self._calls = 0
        self._mark = object()  # of the errors that it raised; an error may be pickled

    def same(self, what: str, facts: Mapping[str, Any], problem: Exception | None = None) -> None:
        """Compare facts among the ranks. Collective; also a barrier.

        Args:
            what: The call, for errors. Equal on all ranks.
            facts: Values by field, as JSON or as text.
            problem: A fault of this rank's arguments, raised on all ranks.

        Raises:
            ConfigError: on all ranks, where facts differ. Names the field, the values and the ranks.
            EPMoEError: on all ranks, the `problem` of the first rank that has one.
            PeerTimeout: a rank did not arrive.
        """
        self._settle({"what": what, **facts}, problem)

    def healthy(self, what: str, problem: Exception | None, *, deadline_s: float | None = None) -> None:
        """Raise one rank's problem on all ranks. Collective; also a barrier.

        Args:
            what: The call, for errors. Equal on all ranks.
            problem: A fault found on this rank, or None.
            deadline_s: For work that may take longer than other agreements. A smaller value than the object's has no
                effect.

        Raises:
            EPMoEError: on all ranks, the problem of the first rank that has one, which it names. ConfigError for a
                problem of another class.
            PeerTimeout: a rank did not arrive.
        """
        self._settle({"what": what}, problem, self._at_least(deadline_s))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise on all ranks when the body raises on any. Collective.

        All ranks enter the body. It may hold other calls of this object: a rank that raises between two of them ends
        the next one of its peers, on all ranks with the same sentence.

        Args:
            what: The call, for errors. Equal on all ranks.

        Yields:
            Nothing.

        Raises:
            EPMoEError: as `healthy`. The rank whose body raised raises that exception itself, or the agreed error.
        """
        try:
            yield
        except Exception as error:
            agreed = isinstance(error, PeerTimeout) or getattr(error, "agreed_by", None) is self._mark
            if not agreed:
                self.healthy(what, error)
            raise
        self.healthy(what, None)

    def share(self, what: str, make: Callable[[], Any], *, owner: int = 0, deadline_s: float | None = None) -> Any:
        """Make something on one rank, and give it to all. Collective.

        Args:
            what: The call, for errors. Equal on all ranks.
            make: Called on the owner alone. Returns plain JSON.
            owner: Index among the ranks of the one that makes it.
            deadline_s: For work that may take longer than other agreements.

        Returns:
            What `make` returned on the owner.

        Raises:
            EPMoEError: on all ranks, where `make` raises. ConfigError for an exception of another class.
            PeerTimeout: a rank did not arrive.
        """
        found, problem = None, None
        maker = self._ranks[owner]
        longest_s = self._at_least(deadline_s)
        if self._rank == maker:
            try:
                found = make()
            except Exception as error:
                problem = error
        self._settle({"what": what}, problem, longest_s)
        if len(self._ranks) == 1 or self._store is None:
            return found
        number, self._calls = self._calls, self._calls + 1
        key = f"agree/{number}/shared"
        if self._rank == maker:
            self._store.set(key, json.dumps(found))
        return json.loads(self._await(key, what, self._deadline_s))

    def first(self, what: str, value: str) -> str:
        """Choose the value that any rank gave first. Does not wait for other ranks.

        Args:
            what: A name that is used once.
            value: This rank's.

        Returns:
            The same value on all ranks, also where some of them have lost the others.

        Raises:
            PeerTimeout: the store is lost.
        """
        if len(self._ranks) == 1 or self._store is None:
            return value
        try:
            return self._store.first(f"first/{what}", value).decode()
        except StoreLost as lost:
            raise PeerTimeout(f"{what}: what the ranks decided is not known. {lost}") from lost

    def first_here(self, what: str, place: str) -> bool:
        """Say whether this rank is the first of its place to come here. All ranks call it, with another agreement
        between two calls.

        Args:
            what: A name for the call.
            place: What several ranks share, such as a host.

        Returns:
            True on one rank of each place.
        """
        return self.first(f"{self._calls}/{what} on {place}", str(self._rank)) == str(self._rank)

    def _at_least(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else max(self._deadline_s, deadline_s)

    def _settle(self, facts: dict[str, Any], problem: Exception | None, deadline_s: float | None = None) -> None:
        deadline_s = deadline_s or self._deadline_s
        kind = type(problem).__name__ if isinstance(problem, EPMoEError) else ConfigError.__name__
        if len(self._ranks) == 1 or self._store is None:
            if problem is not None:
                raise self._agreed(kind, str(problem)) from problem
            return
        number, self._calls = self._calls, self._calls + 1
        key = f"agree/{number}"
        entry = {"facts": facts, "problem": None if problem is None else str(problem), "kind": kind}
        self._store.set(f"{key}/{self._rank}", json.dumps(entry, sort_keys=True, default=str))
        if self._rank == self._ranks[0]:
            self._store.set(f"{key}/verdict", json.dumps(self._decide(key, facts["what"], deadline_s)))
        verdict = json.loads(self._await(f"{key}/verdict", facts["what"], deadline_s))
        if verdict is not None:
            raise self._agreed(*verdict) from problem

    def _agreed(self, kind: str, text: str) -> EPMoEError:
        error = _ERRORS.get(kind, ConfigError)(text)
        error.agreed_by = self._mark
        return error

    def _await(self, key: str, what: str, deadline_s: float) -> bytes:
        assert self._store is not None
        # the comparing rank may itself wait one deadline for a missing peer before it can publish that
        if not self._store.wait([key], 2 * deadline_s):
            raise PeerTimeout(
                f"{what}: no verdict from rank {self._ranks[0]} within {2 * deadline_s:g} s; it died or never got here"
            )
        return self._store.get(key)

    def _decide(self, key: str, what: str, deadline_s: float) -> tuple[str, str] | None:
        assert self._store is not None
        keys = [f"{key}/{rank}" for rank in self._ranks]
        if not self._store.wait(keys, deadline_s):
            missing = [rank for rank, k in zip(self._ranks, keys, strict=True) if not self._store.has(k)]
            return PeerTimeout.__name__, (
                f"{what}: {named(missing)} did not arrive within {deadline_s:g} s; all ranks must "
                f"make the same calls in the same order"
            )
        entries = {rank: json.loads(self._store.get(k)) for rank, k in zip(self._ranks, keys, strict=True)}
        troubled = [rank for rank, entry in entries.items() if entry["problem"] is not None]
        if troubled:
            first = entries[troubled[0]]
            text = first["problem"].removeprefix(f"{what}: ")
            if not text.startswith("rank"):  # else an agreement among fewer ranks has named them already
                text = f"{named(troubled)}: {text}"
            return first["kind"], f"{what}: {text}"
        return _difference(what, {rank: entry["facts"] for rank, entry in entries.items()})


def _difference(what: str, facts: dict[int, dict[str, Any]]) -> tuple[str, str] | None:
    fields = sorted({name for entry in facts.values() for name in entry})
    if len({entry["what"] for entry in facts.values()}) > 1:
        fields = ["what"]  # what other calls agree on has no counterpart
    lines = []
    for name in fields:
        by_value: dict[str, list[int]] = {}
        for rank, entry in facts.items():
            by_value.setdefault(json.dumps(entry.get(name)), []).append(rank)
        if len(by_value) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items()))
    if not lines:
        return None
    return ConfigError.__name__, f"{what}: the ranks were given different values; give all the same. " + "; ".join(
        lines
    )
