"""Ids that are placed on their way: by the kernel that sends them, or by a launch of their own for whoever looks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ep_moe.types import LogicalIds, PhysicalIds, PhysicalRouting


class Tables(NamedTuple):
    """What a GPU places and counts with, in the order in which kernels take it: `Placement`'s buffers, which are
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
        from ep_moe.placement.placement_triton import place

        out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        place(ids.contiguous(), *self[:5], out, self.seed)
        return out


class LateRouting(PhysicalRouting):
    """The routing of one call, not placed yet: whoever looks at `ids` first has them placed, and counted. A transport
    that does both itself (`DispatcherCapabilities.places`) takes `to_place` instead, and then nobody may look.

    Rows are those of the whole call, by whose numbers replicas are chosen: it is placed before it is cut.
    """

    logical: LogicalIds
    tables: Tables

    def __init__(self, logical: LogicalIds, weights: Tensor, tables: Tables) -> None:
        self.__dict__.update(logical=logical, weights=weights, tables=tables)  # frozen, as its base is

    @cached_property
    def ids(self) -> PhysicalIds:  # type: ignore[override]
        return PhysicalIds(self.tables.place(self.logical))


def placed(routing: PhysicalRouting) -> PhysicalRouting:
    """With ids that are there."""
    return PhysicalRouting(routing.ids, routing.weights) if isinstance(routing, LateRouting) else routing


def given_ids(routing: PhysicalRouting) -> Tensor:
    """Those that there are, placed or not: for checks of their shape."""
    return routing.logical if _late(routing) else routing.ids


class Placing(NamedTuple):
    """What a kernel that can place is told besides tables. most: of an expert's replicas, 0 where ids are placed
    already; seed: as `Tables` has it; experts: E"""

    most: int
    seed: int | None
    experts: int | None


_PLACED = Placing(0, None, None)


def to_place(routing: PhysicalRouting) -> tuple[Tensor, tuple[Tensor | None, ...], Placing]:
    """For a kernel that can place: the ids that it is given, its arguments `replicas, counts, expert_load, slot_load,
    counting`, and the rest."""
    if not _late(routing):
        return routing.ids, (None,) * 5, _PLACED
    return routing.logical, routing.tables[:5], routing.tables.placing


def _late(routing: PhysicalRouting) -> TypeGuard[LateRouting]:
    return isinstance(routing, LateRouting) and "ids" not in routing.__dict__
