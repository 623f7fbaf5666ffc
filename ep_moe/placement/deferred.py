"""Placement of logical ids on the device, deferred until a transport needs the physical ids.

A transport's dispatch kernel may place the ids while it sends them. Otherwise `materialize` places them in a launch of
their own. That launch is one Triton kernel; the same in torch operators is about twenty launches. Dispatch kernels call
the same Triton function, `place_ids`.
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
from ep_moe.runtime.launch_cache import Launch, cdiv, kept_launches, launch_directly, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.types import PhysicalIds, PhysicalRouting, recomputing

# The replica of a route is chosen by multiplicative hashing (Knuth, TAOCP 3, 6.4) with two odd constants. Neighboring
# tokens, and the experts of one token, so spread over replicas without a random state or a wait for the device.
# The hash, as a fraction of 2**32, chooses among equal intervals, one per replica. Of any N consecutive rows, the count
# in each interval differs from its share by at most 2 + log(N) to the base of the golden ratio (Denjoy and Koksma).
# Random numbers would differ by about sqrt(N). The remainder of the hash by the replica count has no such bound.
ROW_FACTOR = 2654435761
EXPERT_FACTOR = 2246822519
RANK_FACTOR = 3266489917


NO_ID = -1  # the value of `InvalidIds.word` while no invalid id was found


class InvalidIds:
    """The report of kernels to the host about invalid ids (neither -1 nor in [0, E)), whose routes they drop.

    Kernels write one such id into pinned host memory. The host reads it in later calls, without a wait for the device.

    Args:
        device: The device of the kernels. Only GPU kernels report: on a CPU ids are checked before a call.

    Attributes:
        word: The id, or `NO_ID`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.address = 0  # the address of `word` if kernels write it, else 0
        self.word = ctypes.c_int64(NO_ID)
        if device.type == "cuda":
            with on_device(device):  # the driver pins memory for the current device
                self._memory = torch.full((1,), NO_ID, dtype=torch.int64, device="cpu", pin_memory=True)
            self.address = self._memory.data_ptr()
            self.word = _word(self.address)

    def __deepcopy__(self, memo: dict[int, Any]) -> InvalidIds:
        return InvalidIds(self.device)  # a copied tensor would not be pinned

    def __reduce__(self) -> Any:
        return InvalidIds, (self.device,)

    def problem(self, layer: str, experts: int) -> str | None:
        """Return the message for an invalid id that an earlier call passed, and clear the report.

        Args:
            layer: Name of the layer.
            experts: E.

        Returns:
            None, or the message of an InputError.
        """
        return None if self.word.value == NO_ID else _dropped(self.word, layer, experts)


_word = ctypes.c_int64.from_address


def _dropped(word: ctypes.c_int64, layer: str, experts: int) -> str:
    found, word.value = word.value, NO_ID
    return (
        f"routing.ids must be -1 or in [0, {experts}), got {found} in an earlier call of {layer}, whose result "
        "ignores it: kernels report an invalid id only after they ran; to find the call, build the layer with "
        "all2all='allgather', which raises at once"
    )


class Tables(NamedTuple):
    """The buffers of a `Placement` that place and count the ids of a call, in the order of the kernels' arguments.

    A new expert map is written into the same buffers.

    replicas: int64 [E, most], physical ids; counts: int64 [E], replicas of each expert; expert_load: int64 [E];
    slot_load: int64 [P]; counting: int64 [], 0 to count nothing
    invalid: `InvalidIds.address`; seed: a constant that is added to every hash
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
        """Return the physical ids, int64 [T, K], of logical ids [T, K], and count them as load."""
        if not ids.is_cuda:
            return self._place(ids.long())
        out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        place_ids_once(ids.contiguous(), *self[:6], out, self.seed, launch=kept_launches(ids.device))
        return out

    def counting_nothing(self) -> Tables:
        """Return the same tables with `counting` 0, for a call that does not count as load. Does not wait for the
        device."""
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
    """The routing of one call with ids that are still logical.

    A transport that places and counts ids itself (`DispatcherCapabilities.places`) calls `placement_arguments`. All
    others call `materialize` first.

    The rows are those of the whole call. The row number enters the hash that chooses replicas, so a call is placed
    before it is split into parts.
    """

    logical: Tensor
    tables: Tables

    def __init__(self, logical: Tensor, weights: Tensor, tables: Tables) -> None:
        self.__dict__.update(logical=logical, weights=weights, tables=tables)  # the base class is a frozen dataclass

    def __getattr__(self, name: str) -> Any:
        if name == "ids":
            raise AttributeError("the ids of a DeferredRouting are not physical ids yet; use materialize().ids")
        raise AttributeError(name)

    def materialize(self) -> PhysicalRouting:
        """Place the ids and count them as load. Later calls return the result of the first one."""
        placed: PhysicalRouting | None = self.__dict__.get("_placed")
        if placed is None:
            placed = PhysicalRouting(PhysicalIds(self.tables.place(self.logical)), self.weights)
            self.__dict__["_placed"] = placed
        return placed


def ids_for_checks(routing: PhysicalRouting) -> Tensor:
    """Return the ids of a routing for checks of their shape: logical ids if they are not placed yet."""
    return routing.logical if _deferred(routing) else routing.materialize().ids


class Placing(NamedTuple):
    """Further arguments of a kernel that can place ids.

    most: the most replicas of an expert, 0 if ids are placed already; seed: as in `Tables`; experts: E
    """

    most: int
    seed: int | None
    experts: int | None


_PLACED = Placing(0, None, None)
_NO_TABLES = (None,) * 6


def placement_arguments(routing: PhysicalRouting) -> tuple[Tensor, tuple[Tensor | int | None, ...], Placing]:
    """Return the arguments of a kernel that can place ids.

    These are the ids (logical if not placed yet), the tables `replicas, counts, expert_load, slot_load, counting,
    invalid`, and the rest. The tables are None if the ids are placed already.
    """
    if not _deferred(routing):
        return routing.materialize().ids, _NO_TABLES, _PLACED
    return routing.logical, routing.tables[:6], routing.tables.placing


def _deferred(routing: PhysicalRouting) -> TypeGuard[DeferredRouting]:
    return isinstance(routing, DeferredRouting) and "_placed" not in routing.__dict__


# A custom operator for compiled graphs. Inductor cannot compile the arithmetic itself: it emits the hash constants as
# int32, which they exceed. The operator runs the eager code, so that eager and compiled calls choose the same replicas.


@torch.library.custom_op("ep_moe::place", mutates_args=("expert_load", "slot_load"))
def place(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    invalid: int, seed: int,
) -> Tensor:  # fmt: skip
    """Return the physical ids of logical ids, as `Tables.place`. Inside a backward pass, count nothing.

    Only this operator checks the ids in a compiled graph. On a CPU it raises InputError at once, on a GPU in a later
    call.
    """
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
_MANY = 4096  # from this many routes on, each program counts its routes in a histogram before it adds to the counters


def place_ids_once(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor,
    invalid: int, out: Tensor, seed: int, *, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Write physical ids to `out` and count the load, in one launch.

    ids: int [T, K], contiguous; replicas: int64 [E, most]; counts: int64 [E]; expert_load: int64 [E]; slot_load:
    int64 [P]; counting: int64 []; out: int64 [T, K]; invalid, seed: as in `Tables`
    """
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
        # integer sums do not depend on the order of the atomic additions
        if EXPERT_BINS:
            _count(expert_load, given, valid, experts, EXPERT_BINS)
            _count(slot_load, physical, valid, slots, SLOT_BINS)
        else:
            count_ids(given, physical, valid, expert_load, slot_load)


_ROW_FACTOR, _EXPERT_FACTOR = tl.constexpr(ROW_FACTOR), tl.constexpr(EXPERT_FACTOR)  # the constants of `Tables.place`


@triton.jit
def place_ids(given, row, replicas, counts, experts, seed, MOST: tl.constexpr):
    """Return the physical ids of logical ids, and whether each logical id is valid. Invalid ids get arbitrary results.

    row: the row of each id in the call; MOST: the second size of `replicas`
    """
    known = (given >= 0) & (given < experts)
    safe = tl.where(known, given, 0).to(tl.int64)
    at = safe * MOST
    if MOST > 1:
        mixed = tl.cast(row, tl.int64) * _ROW_FACTOR + safe * _EXPERT_FACTOR + seed
        at += ((mixed & 0xFFFFFFFF) * tl.load(counts + safe)) >> 32
    return tl.load(replicas + at), known


@triton.jit
def tell_invalid(given, known, invalid):
    """Report one id that is neither -1 nor valid to the host (`InvalidIds`). invalid: its address, 0 for no report"""
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
