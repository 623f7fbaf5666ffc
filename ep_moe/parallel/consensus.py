"""Consensus through the store: all ranks publish the same facts, or all raise an error that names the difference.

It uses no collective, so that ranks whose process groups do not fit get an error instead of a hang. One rank compares
the facts and publishes the verdict: 2 store operations per rank, whatever the number of ranks.
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
from ep_moe.parallel.nodes import format_ranks
from ep_moe.parallel.timeout_store import StoreLost, TimeoutStore

_PATIENCE_S = 30.0  # the most seconds for an answer of the store that waits for no key

_ERRORS: dict[str, type[EPMoEError]] = {
    error.__name__: error
    for error in (BackendUnavailable, CheckpointError, ConfigError, InputError, OutOfMemory, PeerTimeout)
}


class StoreConsensus:
    """Consensus among `ranks`. All of them make the same calls in the same order. With one rank calls return at once.

    Args:
        store: The store that the ranks share; None for a single process.
        ranks: The global ranks that take part, the same list on all of them.
        rank: This rank, one of `ranks`.
        deadline_s: Seconds after which a rank that does not arrive counts as lost.
        held: Text that says which process holds the store. If the store is lost, every call raises PeerTimeout with it.
    """

    def __init__(self, store: Store | None, ranks: Sequence[int], rank: int, deadline_s: float, held: str = "") -> None:
        self._store = None if store is None else TimeoutStore(store, min(deadline_s, _PATIENCE_S), held)
        self._ranks = list(ranks)
        self._rank = rank
        self._deadline_s = deadline_s
        self._calls = 0
        self._mark = object()  # identifies the errors that this object raised (`EPMoEError.agreed_by`)

    def require_equal(self, what: str, facts: Mapping[str, Any], problem: Exception | None = None) -> None:
        """Raise ConfigError on all ranks unless all of them pass the same facts. Collective; also a barrier.

        Args:
            what: The name of the call in errors. Equal on all ranks.
            facts: Values by field. Those that JSON does not support are compared as text.
            problem: A fault of this rank's arguments, which is raised on all ranks.

        Raises:
            ConfigError: on all ranks, if facts differ. The message names the field, the values and the ranks.
            EPMoEError: on all ranks, the `problem` of the first rank that has one.
            PeerTimeout: a rank did not arrive.
        """
        self._settle({"what": what, **facts}, problem)

    def raise_on_all_ranks(self, what: str, problem: Exception | None, *, deadline_s: float | None = None) -> None:
        """Raise one rank's problem on all ranks. Collective; also a barrier.

        Args:
            what: The name of the call in errors. Equal on all ranks.
            problem: A fault found on this rank, or None.
            deadline_s: A longer deadline, for work that takes long. A value below the object's has no effect.

        Raises:
            EPMoEError: on all ranks, the problem of the first rank that has one. The message names the ranks. A problem
                of another class becomes a ConfigError.
            PeerTimeout: a rank did not arrive.
        """
        self._settle({"what": what}, problem, self._at_least(deadline_s))

    @contextmanager
    def propagate_errors(self, what: str) -> Iterator[None]:
        """Raise on all ranks if the body of a `with` block raises on any rank. Collective.

        All ranks enter the body. It may contain other calls of this object. If a rank raises between two of them, the
        next call of its peers raises the same error on all ranks.

        Args:
            what: The name of the call in errors. Equal on all ranks.

        Yields:
            Nothing.

        Raises:
            EPMoEError: as in `raise_on_all_ranks`. A rank whose body raised raises that exception itself, or the common
                error.
        """
        try:
            yield
        except Exception as error:
            agreed = isinstance(error, PeerTimeout) or getattr(error, "agreed_by", None) is self._mark
            if not agreed:
                self.raise_on_all_ranks(what, error)
            raise
        self.raise_on_all_ranks(what, None)

    def compute_on_owner(
        self, what: str, make: Callable[[], Any], *, owner: int = 0, deadline_s: float | None = None
    ) -> Any:
        """Compute a value on one rank, and return it on all. Collective.

        Args:
            what: The name of the call in errors. Equal on all ranks.
            make: Computes the value; called only on the owner. The value must be plain JSON.
            owner: The index of the owner in `ranks`.
            deadline_s: A longer deadline, for work that takes long.

        Returns:
            The result of `make` on the owner.

        Raises:
            EPMoEError: on all ranks, if `make` raises. An exception of another class becomes a ConfigError.
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
        """Return the value of the rank that calls this first. Does not wait for other ranks.

        Args:
            what: A name that is used once.
            value: This rank's value.

        Returns:
            The same value on all ranks, even if some of them have lost the others.

        Raises:
            PeerTimeout: the store is lost.
        """
        if len(self._ranks) == 1 or self._store is None:
            return value
        try:
            return self._store.set_if_absent(f"first/{what}", value).decode()
        except StoreLost as lost:
            raise PeerTimeout(f"{what}: the decision of the ranks is unknown. {lost}") from lost

    def first_here(self, what: str, place: str) -> bool:
        """Return whether this rank is the first of its place that makes this call.

        All ranks call it. Between two of its calls they make another call of this object.

        Args:
            what: A name for the call.
            place: A name that several ranks share, such as their host.

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
        # the comparing rank waits up to one deadline for a missing peer before it publishes the verdict
        if not self._store.wait([key], 2 * deadline_s):
            raise PeerTimeout(
                f"{what}: no verdict from rank {self._ranks[0]} within {2 * deadline_s:g} s; it died, or did not "
                "make this call"
            )
        return self._store.get(key)

    def _decide(self, key: str, what: str, deadline_s: float) -> tuple[str, str] | None:
        assert self._store is not None
        keys = [f"{key}/{rank}" for rank in self._ranks]
        if not self._store.wait(keys, deadline_s):
            missing = [rank for rank, k in zip(self._ranks, keys, strict=True) if not self._store.has(k)]
            return PeerTimeout.__name__, (
                f"{what}: {format_ranks(missing)} did not arrive within {deadline_s:g} s; all ranks must "
                f"make the same calls in the same order"
            )
        entries = {rank: json.loads(self._store.get(k)) for rank, k in zip(self._ranks, keys, strict=True)}
        troubled = [rank for rank, entry in entries.items() if entry["problem"] is not None]
        if troubled:
            first = entries[troubled[0]]
            text = first["problem"].removeprefix(f"{what}: ")
            if not text.startswith("rank"):  # otherwise a consensus among fewer ranks has named them already
                text = f"{format_ranks(troubled)}: {text}"
            return first["kind"], f"{what}: {text}"
        return _difference(what, {rank: entry["facts"] for rank, entry in entries.items()})


def _difference(what: str, facts: dict[int, dict[str, Any]]) -> tuple[str, str] | None:
    fields = sorted({name for entry in facts.values() for name in entry})
    if len({entry["what"] for entry in facts.values()}) > 1:
        fields = ["what"]  # ranks are in different calls, whose other fields cannot be compared
    lines = []
    for name in fields:
        by_value: dict[str, list[int]] = {}
        for rank, entry in facts.items():
            by_value.setdefault(json.dumps(entry.get(name)), []).append(rank)
        if len(by_value) > 1:
            lines.append(
                f"{name}: " + ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in by_value.items())
            )
    if not lines:
        return None
    return (
        ConfigError.__name__,
        f"{what}: the ranks were given different values; pass the same values on all ranks. " + "; ".join(lines),
    )
