"""One check of one transport on all ranks, and how ranks tell each other what they found."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, Geometry
from ep_moe.errors import InputError, PeerTimeout
from ep_moe.experts.layouts import localized
from ep_moe.parallel.link import Link
from ep_moe.testing.transport_rows import CAP, expected, identity, moved, rounded, routes, rows, same, tolerance
from ep_moe.types import PeerRows, Pending, PhysicalRouting, Received, capturing

DispatcherFactory = Callable[[Geometry, Link], Dispatcher]


class Case:
    """One check of one dispatcher. Faults are noted, not raised: a rank that stops early leaves the others waiting."""

    def __init__(self, dispatcher: Dispatcher, device: torch.device, to_peers: bool = False) -> None:
        """to_peers: experts write their rows to the ranks that wait for them, where the transport offers it"""
        self.dispatcher = dispatcher
        self.device = device
        self.to_peers = to_peers
        self.rank, self.ranks = dispatcher.link.rank, dispatcher.link.size
        self.shape = dispatcher.geometry
        self.faults: list[str] = []

    def call(self, tokens: int, seed: int = 0) -> tuple[Tensor, PhysicalRouting, Tensor]:
        """This rank's rows and routes on the device, and what must come back."""
        x = rows(self.rank + seed, tokens, self.shape.dtype, self.shape.wire)
        routing = routes(self.rank + seed, tokens, self.ranks, self.shape.top_k)
        return x.to(self.device), moved(routing, self.device), expected(x, routing)

    def dispatch(self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None) -> Received:
        return self.dispatch_start(x, routing, max_tokens).wait()

    def dispatch_start(self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None) -> Pending[Received]:
        """Of plain rows, which are rounded here if the transport does not."""
        data, scale = (x, None) if self.rounds else rounded(x, self.shape)
        return self.dispatcher.dispatch_start(data, routing, x_scale=scale, max_tokens=max_tokens)

    @property
    def rounds(self) -> bool:
        return self.shape.wire.dispatch in self.dispatcher.capabilities.rounds

    def once(self, x: Tensor, routing: PhysicalRouting) -> Tensor:
        received = self.dispatch(x, routing)
        return self.dispatcher.combine(self.experts(received), received.handle)

    def experts(self, received: Received) -> Tensor | PeerRows:
        ids = localized(received, CAP).local_ids
        if ids is not None and not capturing(self.device):
            self.that(bool(((ids >= -1) & (ids < self.shape.cap)).all()), "local ids out of range")
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
    except PeerTimeout:
        raise
    except Exception as error:
        case.faults.append(f"{type(error).__name__}: {error}")
    tell(check, case)


def tell(check: Callable[..., None], case: Case) -> None:
    """Raise on all ranks alike what any found."""
    dispatcher = case.dispatcher
    told: list[list[str]] = [[] for _ in range(case.ranks)]
    dist.all_gather_object(told, case.faults)
    wrong = [rank for rank, faults in enumerate(told) if faults]
    if wrong:
        name = check.__name__.replace("_", " ").strip()
        raise AssertionError(
            f"{dispatcher.name}: {name} (top_k {case.shape.top_k}, {case.shape.dtype}, {case.shape.wire}"
            f"{', to peers' if case.to_peers else ''}) on ranks {wrong}; rank {wrong[0]}: {told[wrong[0]][0]}"
        )


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""
