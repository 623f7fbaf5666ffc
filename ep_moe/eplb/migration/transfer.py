"""Moves the experts of one layer from one map to another, through staging memory, one batch per step.

Forwards use the old slots until the commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.eplb.migration.schedule import Batch, Piece, TransferSchedule, message
from ep_moe.eplb.migration.slots import Checksum, SlotStore
from ep_moe.errors import PeerTimeout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.placement import Placement
from ep_moe.weights.expert_weights import ExpertWeights

_MAPS_AHEAD = 4  # maps that the host may put in force before the device has reached the first of them


class BalancedLayer(Protocol):
    """The attributes of a layer that the balancer uses. `MoELayer` has them."""

    name: str
    placement: Placement
    expert_weights: ExpertWeights


class Mover:
    """Transfers bytes between the ranks of an EP group, concurrently with the model.

    It has its own communicator, CUDA stream and staging memory.

    rank_group: the EP group, over a process group of the balancer
    staging: memory on the layers' device
    deadline_s: the longest time of a batch
    """

    def __init__(self, rank_group: RankGroup, staging: Staging, deadline_s: float) -> None:
        self.rank_group, self.staging, self.deadline_s = rank_group, staging, deadline_s
        self.device = staging.device
        self.checksum = Checksum(self.device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._tag = 0
        self._stores: dict[int, SlotStore] = {}
        self._connect()

    def store(self, layer: BalancedLayer) -> SlotStore:
        """Return the layer's SlotStore. It is reused until the layout of the layer's rows changes."""
        held = self._stores.get(id(layer))
        if held is None or not held.fits(layer.expert_weights):
            held = self._stores[id(layer)] = SlotStore(layer.expert_weights, self.checksum)
        return held

    @torch.no_grad()
    def warm_up(self, layer: BalancedLayer) -> None:
        """Run once all that moves a layer's experts, on the mover's stream. Slots are written with their own content.

        The first run compiles or loads kernels and allocates memory for the stream. Later it would delay forwards.
        """
        store = self.store(layer)
        self.wait_for_caller()
        with self.beside():
            # two slots: every other one may not be 16-byte aligned, and then torch runs another kernel
            for slot in range(min(2, store.slots)):
                row = self.staging.row(0, store.row_bytes)
                store.read(slot, 0, store.row_bytes, row)
                store.examine(row, self.staging.damage[slot])
                store.address({slot: row}, self.staging.pairs)
                store.write({slot: row}, self.staging.pairs)
            self.staging.damage_on_host.copy_(self.staging.damage, non_blocking=True)
        self.make_caller_wait()
        if self.stream is not None:
            # fill torch's cache with pinned memory, through which maps are put in force: several may be in use at once
            placed, pairs = layer.placement, self.staging.pairs[: store.slots]
            tables = (placed.logical_to_physical, placed.replica_count, pairs)
            _ = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tables for _ in range(_MAPS_AHEAD)]

    def wait_for_caller(self) -> None:
        """Make the mover's stream wait for the work queued on the caller's stream, such as commits."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for the work queued on the mover's stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run a block on the mover's stream."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def exchange(
        self, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> list[tuple[dist.Work, str]]:
        """Start one round: send and receive (bytes, peer). Return each work with a text of what it waits for."""
        operations, texts = [], []
        for call, text, part in ((dist.isend, "to", sent), (dist.irecv, "from", received)):
            if part is not None:
                peer = self.rank_group.ranks[part[1]]
                operations.append(dist.P2POp(call, part[0], peer, group=self.rank_group.group, tag=self._tag))
                texts.append(f"{text} rank {peer}")
        self._tag += 1
        works = dist.batch_isend_irecv(operations) if operations else []
        return list(zip(works, texts if len(works) == len(texts) else [" and ".join(texts)], strict=True))

    def _connect(self) -> None:
        """Exchange 8 bytes with every peer: NCCL connects two ranks at their first transfer, which delays forwards."""
        size, rank = self.rank_group.size, self.rank_group.rank
        if size == 1:
            return
        # NCCL sets up a group at its first call, which must be one of all ranks
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=self.rank_group.group)
        there, here = torch.zeros(2, 8, dtype=torch.uint8, device=self.device)
        for far in range(1, size):
            for work, _ in self.exchange((there, (rank + far) % size), (here, (rank - far) % size)):
                work.wait()

    def abort(self) -> None:
        """Abort the process group, so that the device stops waiting for a lost peer."""
        if self.stream is not None and self.rank_group.group is not None:
            self.rank_group.group.abort()


class Migration:
    """Moves a layer's experts from the map in force to another map.

    Every rank constructs it in the same step, and calls `advance` in every following step. Nothing that forwards use is
    written before `commit`.

    done: this rank has sent and received all of its bytes
    """

    def __init__(self, layer: BalancedLayer, transfer_schedule: TransferSchedule, mover: Mover) -> None:
        self.layer, self.transfer_schedule, self._mover = layer, transfer_schedule, mover
        self._rank = mover.rank_group.rank
        self._updates, self._written = layer.expert_weights.updates, layer.expert_weights.version_key()
        self._store = mover.store(layer)
        self._batches, self._staged = transfer_schedule.batches, transfer_schedule.staged
        self._place = {expert: index for index, expert in enumerate(self._staged)}
        # the buffers are shared by all migrations, of which one is under way at a time
        self._damage = mover.staging.damage[: len(self._staged)].zero_()
        self._damage_on_host = mover.staging.damage_on_host[: len(self._staged)].zero_()
        self._next = 0
        self._batch_transfer: _BatchTransfer | None = None
        self._rows: dict[int, Tensor] | None = None  # by slot, once `_prepare` was called
        # once, not for each batch: if the host is far ahead of the device, each batch would wait for all queued
        # forwards; weights that are written in the meantime make the migration outdated
        mover.wait_for_caller()

    @property
    def done(self) -> bool:
        return self._batch_transfer is None and self._next == len(self._batches)

    def damage(self) -> str:
        """Return a sentence about rows that do not match their checksums; "" if all do. Call it once `done`."""
        bad = [self._staged[index] for index in self._damage_on_host.nonzero().flatten().tolist()]
        if not bad:
            return ""
        origin = {t.expert: t.source for t in self.transfer_schedule.moves.transfers if t.target == self._rank}
        source = self._mover.rank_group.ranks[origin.get(bad[0], self._rank)]
        return (
            f"layer {self.layer.name}: expert {bad[0]} from rank {source} does not match its checksum ({len(bad)} of "
            f"{len(self._staged)} experts)"
        )

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives from other ranks."""
        return (len(self._staged) - len(self.transfer_schedule.moves.local[self._rank])) * self._store.row_bytes

    def outdated(self) -> str:
        """Return what makes the staged experts unusable: "weights" or "map" if it changed since the start, else ""."""
        if self.layer.placement.expert_map is not self.transfer_schedule.old:
            return "map"
        return "weights" if self.layer.expert_weights.updates != self._updates else ""

    def written(self) -> bool:
        """Return whether this rank's weights were written through parameters since the start.

        Other ranks cannot know it.
        """
        return self.layer.expert_weights.version_key() != self._written

    def advance(self) -> None:
        """Check the current batch, and start the next. Raise PeerTimeout if a peer does not answer in time."""
        if self._next == len(self._batches):
            self._prepare()  # here, because this step starts no batch
        if self._batch_transfer is not None:
            if not self._batch_transfer.check_complete(self.layer.name):
                return
            if self._mover.stream is None:
                self._examine(self._batches[self._next - 1])
            self._batch_transfer = None
        if self._next < len(self._batches):
            batch, self._next = self._batches[self._next], self._next + 1
            with self._mover.beside():
                works = self._start(batch)
                if self._mover.stream is not None:
                    for work, _ in works:
                        work.wait()  # makes the stream wait, not the host
                    self._examine(batch)
            self._batch_transfer = _BatchTransfer(self._mover, works)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the slots in place and put the new map in force, between two forwards."""
        rows = self._prepare()
        self._mover.make_caller_wait()
        self._store.write(rows, self._mover.staging.pairs)
        self.layer.expert_weights.set_expert_map(self.transfer_schedule.new)
        self.layer.placement.update(self.transfer_schedule.new)

    @torch.no_grad()
    def _prepare(self) -> dict[int, Tensor]:
        """Prepare `commit` once, as far as possible, because forwards wait for a commit.

        It changes nothing that forwards use. Returns the row for each slot that will be written.
        """
        if self._rows is None:
            self._rows = {slot: self._row(expert) for slot, expert in self.transfer_schedule.slots}
            with self._mover.beside():
                self._store.address(self._rows, self._mover.staging.pairs)
            self.layer.placement.prepare(self.transfer_schedule.new)
        return self._rows

    # --- a batch -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start(self, batch: Batch) -> list[tuple[dist.Work, str]]:
        for expert in batch.copies:
            self._store.read(self._slot(expert), 0, self._store.row_bytes, self._row(expert))
        works: list[tuple[dist.Work, str]] = []
        used = 0
        for sent, received in batch.rounds:
            there = here = None
            if sent is not None:
                packed = self._mover.staging.outbox(used, sent.stop - sent.start)
                self._store.read(self._slot(sent.expert), sent.start, sent.stop, packed)
                there, used = (packed, sent.peer), used + len(packed)
            if received is not None:
                here = (self._landing(received), received.peer)
            works += self._mover.exchange(there, here)
        return works

    @torch.no_grad()
    def _examine(self, batch: Batch) -> None:
        """Compare the rows that this batch has completed with their checksums, on the device."""
        complete = [part.expert for _, part in batch.rounds if part and part.stop == self._store.row_bytes]
        for expert in (*batch.copies, *complete):
            self._store.examine(self._row(expert), self._damage[self._place[expert]])
        if self._next == len(self._batches):
            self._damage_on_host.copy_(self._damage, non_blocking=True)

    def _slot(self, expert: int) -> int:
        return self.transfer_schedule.old.local(self._rank).index(expert)

    def _row(self, expert: int) -> Tensor:
        return self._mover.staging.row(self._place[expert], self._store.row_bytes)

    def _landing(self, piece: Piece) -> Tensor:
        return self._row(piece.expert)[piece.start : piece.stop]


class _BatchTransfer:
    """A batch in transfer.

    On a GPU it is complete once the stream has reached its event, which is queried without waiting. On a CPU the
    transfer runs beside the forward, and `check_complete` waits for the rest of it.
    """

    def __init__(self, mover: Mover, works: list[tuple[dist.Work, str]]) -> None:
        self._mover, self._works = mover, works
        self._started = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if mover.stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(mover.stream)

    def check_complete(self, layer: str) -> bool:
        """Return whether the batch is complete. Raise PeerTimeout if a peer does not answer in time."""
        if self._event is None:
            for work, text in self._works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise PeerTimeout(self._late(layer, text, str(error).splitlines()[0])) from error
            return True
        if self._event.query():
            return True
        if time.monotonic() - self._started > self._mover.deadline_s:
            raise PeerTimeout(self._late(layer, ", ".join(text for _, text in self._works), "no progress"))
        return False

    def _late(self, layer: str, text: str, cause: str) -> str:
        return (
            f"layer {layer}: bytes {text} did not arrive within {self._mover.deadline_s:g} s ({cause}); raise "
            f"EPLBConfig.deadline_s if that rank was only slow"
        )


# --- staging ----------------------------------------------------------------------------------------------------------
# Staging memory for experts in transfer. It is allocated before anything moves.

_MADE_AT_ONCE = 32 << 20  # bytes to allocate in one step
_CYCLE = 8  # experts of a rank that change places in one cycle: more are rare unless the load is very uneven


@dataclass(frozen=True)
class StagingSize:
    """The staging memory that one rank needs, in bytes.

    rows: bytes of each expert that waits for its commit, the largest first
    outbox: bytes of all that is sent in one step
    """

    rows: tuple[int, ...] = ()
    outbox: int = 0

    @classmethod
    def usual(cls, layers: Iterable[tuple[int, int]], *, budget: int, commit: int) -> StagingSize:
        """Return the size for all maps, except those in which experts change places in cycles longer than `_CYCLE`.

        layers: (slots of this rank, bytes of a row) of each layer
        budget: bytes of a step
        commit: bytes of a commit
        """
        return cls._for_one_of(
            (min(slots, max(commit // size, _CYCLE)), size, message(size, budget).bytes) for slots, size in layers
        )

    @classmethod
    def of_plan(cls, parts: Iterable[TransferSchedule]) -> StagingSize:
        return cls._for_one_of((len(part.staged), part.row_bytes, part.outbox_bytes) for part in parts)

    @classmethod
    def _for_one_of(cls, needs: Iterable[tuple[int, int, int]]) -> StagingSize:
        """Return the size that satisfies any one of the needs at a time. needs: (rows, bytes of each, outbox)"""
        needs = list(needs)
        largest = [0] * max([rows for rows, _, _ in needs], default=0)
        for rows, size, _ in needs:
            if rows:
                largest[rows - 1] = max(largest[rows - 1], size)
        places = [*accumulate(reversed(largest), max)]  # from the last to the first: each as large as those after it
        return cls(tuple(reversed(places)), max([outbox for _, _, outbox in needs], default=0))


class Staging:
    """Memory for experts in transfer. It is allocated with the balancer and kept, because allocations delay forwards.

    Memory that a plan needs beyond this is allocated for the plan and freed after it.

    kept: the size that is kept
    slots: the most slots of this rank in any layer
    damage: int64 [slots] on the device, the checksum difference of each row, 0 for an intact one
    damage_on_host: a copy of `damage` on the host, pinned for a GPU
    pairs: int64 [slots, 2] on the device, which row goes to which slot (`SlotStore.address`)
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def __init__(self, kept: StagingSize, slots: int, device: torch.device) -> None:
        self.device, self._kept = device, len(kept.rows)
        self._rows = [self._empty(size) for size in kept.rows]
        self._outbox = self._empty(kept.outbox)
        self.damage = torch.zeros(slots, dtype=torch.int64, device=device)
        self.pairs = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.damage_on_host = torch.zeros(slots, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    @property
    def bytes(self) -> int:
        """Bytes of the memory for experts."""
        return sum(row.numel() for row in self._rows) + self._outbox.numel()

    def reserve(self, needed: StagingSize) -> bool:
        """Allocate some of the memory that is missing for `needed`. Return whether all of it is there.

        It runs before any transfer, so that a rank without memory reports it while no peer waits for it. It does not
        allocate all at once, because forwards wait for allocations.
        """
        if self._outbox.numel() < needed.outbox:
            self._outbox = self._empty(needed.outbox)
        made = 0
        for place, size in enumerate(needed.rows):
            if place < len(self._rows) and self._rows[place].numel() >= size:
                continue
            if made >= _MADE_AT_ONCE:
                return False
            self._rows[place : place + 1] = [self._empty(size)]
            made += size
        return True

    def release(self) -> None:
        """Free the rows beyond those that are kept."""
        del self._rows[self._kept :]

    def row(self, index: int, row_bytes: int) -> Tensor:
        """Return the memory of one row, uint8 [row_bytes]."""
        return self._rows[index][:row_bytes]

    def outbox(self, start: int, size: int) -> Tensor:
        return self._outbox[start : start + size]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)
