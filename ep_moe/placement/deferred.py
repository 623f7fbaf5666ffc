"""Ids that are placed on their way: by the kernel that sends them, or by a launch of their own (`materialize`).

The Triton form is one launch instead of some twenty. Its arithmetic serves kernels that place ids as they send them.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.placement.expert_map import EMPTY
from ep_moe.runtime.devices import on_device, unseen_by_modes
from ep_moe.runtime.launch_cache import Launch, at_once, cdiv, kept_launches, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.types import PhysicalIds, PhysicalRouting, recomputing

# Multiplicative hashing (Knuth, TAOCP 3, 6.4) with two odd constants, so that neighboring tokens and
# different experts of a token spread over replicas without a random state or a host sync. A row's fraction of the full
# circle chooses among equal arcs: of any N rows in turn each arc has its share to within 2 + log N to the golden
# ratio's base (Denjoy and Koksma), where random numbers err by the root of N. A remainder of it has no such bound.
ROW_FACTOR = 2654435761
EXPERT_FACTOR = 2246822519
RANK_FACTOR = 3266489917


NO_ID = -1  # in `InvalidIds.word` while there is none


class InvalidIds:
    """What kernels say to the host of ids that name no expert, which they drop: one of them, in host memory that they
    write. The host looks there in later calls, and waits for no device.

    Args:
        device: Of the kernels. Only a GPU's tell: on a CPU ids are looked at before a call.

    Attributes:
        word: The id, `NO_ID` while there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.address = 0  # of `word` where kernels write it, else 0
        self.word = ctypes.c_int64(NO_ID)
        if device.type == "cuda":
            with on_device(device):  # the driver pins memory for the current one
                self._memory = torch.full((1,), NO_ID, dtype=torch.int64, device="cpu", pin_memory=True)
            self.address = self._memory.data_ptr()
            self.word = _word(self.address)

    def __deepcopy__(self, memo: dict[int, Any]) -> InvalidIds:
        return InvalidIds(self.device)  # a copy of the tensor would not be pinned

    def __reduce__(self) -> Any:
        return InvalidIds, (self.device,)

    def problem(self, layer: str, experts: int) -> str | None:
        """None, or what an earlier call did wrong. It is returned once.

        Args:
            layer: Name of the layer.
            experts: E.

        Returns:
            A sentence for an InputError.
        """
        return None if self.word.value == NO_ID else _dropped(self.word, layer, experts)


_word = ctypes.c_int64.from_address


def _dropped(word: ctypes.c_int64, layer: str, experts: int) -> str:
    found, word.value = word.value, NO_ID
    return (
        f"routing.ids must be -1 or in [0, {experts}), got {found} in an earlier call of {layer}, whose result is "
        f"without it: kernels tell of an id after they ran; build the layer with all2all='allgather', which refuses it "
        f"at once, to find the call"
    )


class Tables(NamedTuple):
    """What a call is placed and counted with, in the order in which kernels take it: `Placement`'s buffers, which are
    rewritten in place.

    replicas: int64 [E, most]; counts, expert_load: int64 [E]; slot_load: int64 [P]; counting: int64 []
    invalid: `InvalidIds.address`; seed: what the hash adds to all
    """

    replicas: Tensor
    counts: Tensor
    expert_load: Tensor
    slot_load: Tensor
    counting: Tensor
    invalid: int
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
        out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        place_ids_once(ids.contiguous(), *self[:6], out, self.seed, launch=kept_launches(ids.device))
        return out

    def counting_nothing(self) -> Tables:
        """The same, for a call that is no load. The device learns it from a zero, without a wait."""
        with unseen_by_modes():
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
_NO_TABLES = (None,) * 6


def to_place(routing: PhysicalRouting) -> tuple[Tensor, tuple[Tensor | int | None, ...], Placing]:
    """For a kernel that can place: the ids that it is given, its arguments `replicas, counts, expert_load, slot_load,
    counting, invalid`, and the rest."""
    if not _deferred(routing):
        return routing.materialize().ids, _NO_TABLES, _PLACED
    return routing.logical, routing.tables[:6], routing.tables.placing


def _deferred(routing: PhysicalRouting) -> TypeGuard[DeferredRouting]:
    return isinstance(routing, DeferredRouting) and "_placed" not in routing.__dict__


# One torch operator for compiled graphs. Inductor cannot be given the arithmetic itself: it writes the hash's constants
# into kernels as int32, which they exceed. An operator runs the eager form, so that both choose the same replicas.


@torch.library.custom_op("ep_moe::place", mutates_args=("expert_load", "slot_load"))
def place(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    invalid: int, seed: int,
) -> Tensor:  # fmt: skip
    """`Tables.place`, which counts nothing inside a backward pass. No other step of a compiled graph sees invalid ids:
    a CPU's are refused at once, a GPU's in a later call."""
    tables = Tables(replicas, counts, expert_load, slot_load, counting, invalid, seed)
    experts = len(counts)
    if not ids.is_cuda and bool(((ids < EMPTY) | (ids >= experts)).any()):
        raise InputError(f"routing.ids must be -1 or in [0, {experts}), got {int(ids.min())} to {int(ids.max())}")
    if invalid and (word := _word(invalid)).value != NO_ID:
        raise InputError(_dropped(word, "a compiled layer", experts))
    return (tables.counting_nothing() if recomputing() else tables).place(ids).contiguous()


@place.register_fake
def _(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    invalid: int, seed: int,
) -> Tensor:  # fmt: skip
    return ids.new_empty(ids.shape, dtype=torch.int64)


# --- Triton ---------------------------------------------------------------------------------------------------------

_BLOCK, _WIDE_BLOCK = 256, 1024  # routes of a program
_MANY = 4096  # routes from which on each program counts its own first: they are many for few counters


def place_ids_once(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    invalid: int, out: Tensor, seed: int, *, launch: Launch = at_once,
) -> None:  # fmt: skip
    """ids: int [T, K], contiguous; replicas: int64 [E, most]; counts: int64 [E]; expert_load: int64 [E]; slot_load:
    int64 [P]; counting: int64 []; out: int64 [T, K]; invalid, seed: as `Tables` has them"""
    pairs, top_k = ids.numel(), ids.shape[1]
    if not pairs:
        return
    many = pairs >= _MANY
    block = _WIDE_BLOCK if many else _BLOCK
    launch(
        _place, (cdiv(pairs, block),),
        ids, replicas, counts, expert_load, slot_load, counting, invalid, out, seed, pairs, len(counts), len(slot_load),
        top_k,
        MOST=replicas.shape[1], BLOCK=block, EXPERT_BINS=_bins(expert_load) if many else 0,
        SLOT_BINS=_bins(slot_load) if many else 0,
    )  # fmt: skip


def _bins(load: Tensor) -> int:
    return max(128, next_power_of_2(len(load)))


@triton.jit
def _place(
    ids, replicas, counts, expert_load, slot_load, counting, invalid, out, seed, pairs, experts, slots, top_k,
    MOST: tl.constexpr, BLOCK: tl.constexpr, EXPERT_BINS: tl.constexpr, SLOT_BINS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    given = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    physical, valid = place_ids(given, at // top_k, replicas, counts, experts, seed, MOST)
    tl.store(out + at, tl.where(valid, physical, tl.where(given == -1, given, slots)), mask=inside)
    tell_invalid(given, valid, invalid)
    if tl.load(counting) != 0:
        # sums of whole numbers are the same in any order
        if EXPERT_BINS:
            _count(expert_load, given, valid, experts, EXPERT_BINS)
            _count(slot_load, physical, valid, slots, SLOT_BINS)
        else:
            count_ids(given, physical, valid, expert_load, slot_load)


_ROW_FACTOR, _EXPERT_FACTOR = tl.constexpr(ROW_FACTOR), tl.constexpr(EXPERT_FACTOR)  # as `Tables.place` has them


@triton.jit
def place_ids(given, row, replicas, counts, experts, seed, MOST: tl.constexpr):
    """Physical ids of logical ones in these rows of a call, and whether they are: for ids of no expert they are noise.
    MOST: replicas that an expert may have"""
    known = (given >= 0) & (given < experts)
    safe = tl.where(known, given, 0).to(tl.int64)
    at = safe * MOST
    if MOST > 1:
        mixed = tl.cast(row, tl.int64) * _ROW_FACTOR + safe * _EXPERT_FACTOR + seed
        at += ((mixed & 0xFFFFFFFF) * tl.load(counts + safe)) >> 32
    return tl.load(replicas + at), known


@triton.jit
def tell_invalid(given, known, invalid):
    """Write one of the ids that are neither -1 nor known to the host, for `InvalidIds`. invalid: an address, or 0"""
    word = tl.cast(invalid, tl.int64).to(tl.pointer_type(tl.int64)) + tl.zeros(given.shape, tl.int32)
    tl.store(word, given.to(tl.int64), mask=(known == 0) & (given != -1) & (invalid != 0))


@triton.jit
def count_ids(given, physical, known, expert_load, slot_load):
    one = tl.full(given.shape, 1, tl.int64)
    tl.atomic_add(expert_load + given, one, mask=known, sem="relaxed")
    tl.atomic_add(slot_load + physical, one, mask=known, sem="relaxed")


@triton.jit
def _count(load, found, mask, most, BINS: tl.constexpr):
    lane = tl.arange(0, BINS)
    count = tl.histogram(found.to(tl.int32), BINS, mask=mask)
    tl.atomic_add(load + lane, count.to(tl.int64), mask=(count > 0) & (lane < most), sem="relaxed")
