"""One check of one transport on all ranks, and how ranks tell each other what they found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.errors import InputError, PeerTimeout
from ep_moe.experts.layouts import localized
from ep_moe.parallel.groups import default_store, numbered
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.testing.transport_rows import CAP, expected, identity, moved, rounded, routes, rows, same, tolerance
from ep_moe.types import PeerRows, Pending, PhysicalRouting, Received, capturing

DispatcherFactory = Callable[[DispatchShape, RankGroup], Dispatcher]
Result = TypeVar("Result")


class Case:
    """One check of one dispatcher. Faults are noted, not raised: a rank that stops early leaves the others waiting."""

    def __init__(self, dispatcher: Dispatcher, device: torch.device, to_peers: bool = False) -> None:
        """to_peers: experts write their rows to the ranks that wait for them, where the transport offers it"""
        self.dispatcher = dispatcher
        self.device = device
        self.to_peers = to_peers
        self.rank, self.ranks = dispatcher.rank_group.rank, dispatcher.rank_group.size
        self.shape = dispatcher.dispatch_shape
        self.faults: list[str] = []

    def call(self, tokens: int, seed: int = 0) -> tuple[Tensor, PhysicalRouting, Tensor]:
        """This rank's rows and routes on the device, and what must come back."""
        x = rows(self.rank + seed, tokens, self.shape.dtype, self.shape.wire)
        routing = routes(self.rank + seed, tokens, self.ranks, self.shape.top_k)
        return x.to(self.device), moved(routing, self.device), expected(x, routing)

    def dispatch(self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None) -> Received:
        return self.dispatch_start(x, routing, max_tokens).wait()

    def dispatch_start(
        self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None, problem: str | None = None
    ) -> Pending[Received]:
        """Of plain rows, which are rounded here if the transport does not."""
        data, scale = (x, None) if self.rounds else rounded(x, self.shape)
        return self.dispatcher.dispatch_start(data, routing, problem, x_scale=scale, max_tokens=max_tokens)

    @property
    def rounds(self) -> bool:
        return self.shape.wire.dispatch in self.dispatcher.capabilities.rounds

    def once(self, x: Tensor, routing: PhysicalRouting) -> Tensor:
        received = self.dispatch(x, routing)
        return self.dispatcher.combine(self.experts(received), received.handle)

    def experts(self, received: Received) -> Tensor | PeerRows:
        ids = localized(received, CAP).local_ids
        if ids is not None and not capturing(self.device):
            self.that(bool(((ids >= -1) & (ids < self.shape.slots_per_rank)).all()), "local ids out of range")
        return identity(received, self.shape.dtype, to_peers=self.to_peers)

    def that(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    def same(self, actual: Tensor, wanted: Tensor, what: str) -> None:
        try:
            same(actual, wanted, what, tolerance(self.shape))
        except AssertionError as error:
            self.faults.append(str(error))


def run(check: Callable[[Case], None], dispatcher: Dispatcher, device: torch.device, to_peers: bool = False) -> None:
    case = Case(dispatcher, device, to_peers)
    try:
        check(case)
    except Exception as error:
        case.faults.append(_text(error))
    tell(check, case)


def tell(check: Callable[..., None], case: Case) -> None:
    """Raise on all ranks alike what any found."""
    what = check.__name__.replace("_", " ").strip()
    details = f"top_k {case.shape.top_k}, {case.shape.dtype}, {case.shape.wire}{', to peers' if case.to_peers else ''}"
    _tell(f"{case.dispatcher.name}: {what} ({details})", case.dispatcher.rank_group, case.faults)


def together(what: str, rank_group: RankGroup, call: Callable[[], Result]) -> Result:
    """What `call` returns here, where it returns on all ranks; else AssertionError on all of them."""
    found, faults = list[Result](), list[str]()
    try:
        found.append(call())
    except Exception as error:
        faults.append(_text(error))
    _tell(what, rank_group, faults)
    return found[0]


def _tell(what: str, rank_group: RankGroup, faults: Sequence[str]) -> None:
    """Through the store: where a rank has raised its peers may wait for it in a collective, until their deadline."""
    reports = {0: list(faults)}
    if rank_group.size > 1:
        store = default_store()
        turn = store.add(f"ep_moe/contract/turns/{rank_group.rank}", 1)
        keys = [f"ep_moe/contract/{turn}/{rank}" for rank in range(rank_group.size)]
        store.set(keys[rank_group.rank], json.dumps(reports[0]))
        try:
            store.wait(keys, timedelta(seconds=3 * rank_group.flight_recorder.deadline_s + 30))
        except RuntimeError:  # an end of its own: what was said is reported
            keys = [key if store.check([key]) else "" for key in keys]
        reports = {rank: json.loads(store.get(key)) if key else ["it never came"] for rank, key in enumerate(keys)}
    wrong = [rank for rank in reports if reports[rank]]
    if wrong:
        # who waited in vain for another is none the wiser than that one
        cause = min(wrong, key=lambda rank: reports[rank][0].startswith(PeerTimeout.__name__))
        raise AssertionError(f"{what} on ranks {wrong}; rank {cause}: {reports[cause][0]}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def said_within(seconds: float, call: Callable[[], object]) -> str:
    """What `call` raises, asked again until it raises or the time is over: a heartbeat carries what peers refuse."""
    end = time.monotonic() + seconds
    while not (sentence := said(call)) and time.monotonic() < end:
        time.sleep(0.02)
    return sentence


def hold_back(rank_group: RankGroup, lost: int, seconds: float) -> None:
    """Called by all ranks: `lost` returns once the others have called it too, after so many seconds at the latest."""
    store, name = default_store(), numbered("held back", rank_group.ranks)
    keys = [f"{name}/{rank}" for rank in range(rank_group.size) if rank != lost]
    if rank_group.rank != lost:
        store.set(f"{name}/{rank_group.rank}", "")
        return
    end = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)
