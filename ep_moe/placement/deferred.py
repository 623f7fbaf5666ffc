"""Ids that are placed on their way: by the kernel that sends them, or by a launch of their own (`materialize`)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ep_moe.placement.expert_map import EMPTY
from ep_moe.types import PhysicalIds, PhysicalRouting

# Multiplicative hashing (Knuth, TAOCP 3, 6.4) with two odd constants, so that neighbouring tokens and
# different experts of a token spread over replicas without a random state or a host sync. A row's fraction of the full
# circle chooses among equal arcs: of any N rows in turn each arc has its share to within 2 + log N to the golden
# ratio's base (Denjoy and Koksma), where random numbers err by the root of N. A remainder of it has no such bound.
ROW_FACTOR = 2654435761
EXPERT_FACTOR = 2246822519
RANK_FACTOR = 3266489917


class Tables(NamedTuple):
    """What a call is placed and counted with, in the order in which kernels take it: `Placement`'s buffers, which are
    rewritten in place.

    replicas: int64 [E, most]; counts, expert_load: int64 [E]; slot_load: int64 [P]; counting: int64 []
    seed: what the hash adds to all
    """

    replicas: Tensor
    counts: Tensor
    expert_load: Tensor
    slot_load: Tensor
    counting: Tensor
    seed: int

    @property
    def placing(self) -> Placing:
        experts, most = self.replicas.shape
        return Placing(most, self.seed, experts)

    @torch.no_grad()
    def place(self, ids: Tensor) -> Tensor:
        """int64 [T, K] of logical ids [T, K]; counts them."""
        if not ids.is_cuda:
            return self._place(ids.long())
        from ep_moe.placement.placement_triton import place

        out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        place(ids.contiguous(), *self[:5], out, self.seed)
        return out

    def counting_nothing(self) -> Tables:
        """The same, for a call that is no load. The device learns it from a zero, without a wait."""
        return self._replace(counting=torch.zeros_like(self.counting))

    def _place(self, ids: Tensor) -> Tensor:
        valid = (ids >= 0) & (ids < len(self.counts))
        safe = ids.where(valid, 0)
        row = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        mixed = row * ROW_FACTOR + safe * EXPERT_FACTOR + self.seed
        replica = ((mixed & 0xFFFFFFFF) * self.counts[safe]) >> 32
        physical = self.replicas[safe, replica]
        ones = valid.long().flatten() * self.counting
        self.expert_load.index_add_(0, safe.flatten(), ones)
        self.slot_load.index_add_(0, physical.flatten(), ones)
        return physical.where(valid, torch.where(ids == EMPTY, ids, len(self.slot_load)))


class DeferredRouting(PhysicalRouting):
    """The routing of one call whose ids are logical still. A transport that places and counts them itself
    (`DispatcherCapabilities.places`) takes `to_place`; all others call `materialize` first.

    Rows are those of the whole call: their numbers choose replicas, so that a call is placed before it is cut.
    """

    logical: Tensor
    tables: Tables

    def __init__(self, logical: Tensor, weights: Tensor, tables: Tables) -> None:
        self.__dict__.update(logical=logical, weights=weights, tables=tables)  # frozen, as its base is

    def __getattr__(self, name: str) -> Any:
        if name == "ids":
            raise AttributeError("the ids of a DeferredRouting are not placed yet; use materialize().ids")
        raise AttributeError(name)

    def materialize(self) -> PhysicalRouting:
        """Place the ids and count them as load; what the first call gave is returned by later ones."""
        placed: PhysicalRouting | None = self.__dict__.get("_placed")
        if placed is None:
            placed = PhysicalRouting(PhysicalIds(self.tables.place(self.logical)), self.weights)
            self.__dict__["_placed"] = placed
        return placed


def given_ids(routing: PhysicalRouting) -> Tensor:
    """The ids of a routing, logical ones where they are not placed yet: for checks of their shape."""
    return routing.logical if _deferred(routing) else routing.materialize().ids


class Placing(NamedTuple):
    """What a kernel that can place takes besides tables. most: of an expert's replicas, 0 where ids are placed
    already; seed: as `Tables` has it; experts: E"""

    most: int
    seed: int | None
    experts: int | None


_PLACED = Placing(0, None, None)


def to_place(routing: PhysicalRouting) -> tuple[Tensor, tuple[Tensor | None, ...], Placing]:
    """For a kernel that can place: the ids that it is given, its arguments `replicas, counts, expert_load, slot_load,
    counting`, and the rest."""
    if not _deferred(routing):
        return routing.materialize().ids, (None,) * 5, _PLACED
    return routing.logical, routing.tables[:5], routing.tables.placing


def _deferred(routing: PhysicalRouting) -> TypeGuard[DeferredRouting]:
    return isinstance(routing, DeferredRouting) and "_placed" not in routing.__dict__
