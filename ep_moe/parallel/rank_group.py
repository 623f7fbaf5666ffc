"""A group of ranks and the ledger that watches over it: what every transport is handed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_moe.errors import InputError
from ep_moe.parallel.flight_recorder import FlightRecorder

# torch 2.13 renamed it; 2.11 has the old name only
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def barrier(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group, default all of the job's. NCCL would guess this rank's GPU, so name it."""
    ids = [device.index] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group, device_ids=ids)


Gradients = Mapping[str, Tensor]  # what a call is differentiated by, by name
NO_GRADIENTS: Gradients = MappingProxyType({})


@dataclass(frozen=True)
class RankGroup:
    """group: None where there is one rank only. ranks: global ranks in group order. rank: this one's place."""

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    flight_recorder: FlightRecorder

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def alone(cls) -> RankGroup:
        """A group of one rank, for one process without torch.distributed."""
        return cls(None, (0,), 0, FlightRecorder())

    def exchange(self, values: Tensor) -> list[list[int]]:
        """All ranks' `values` (int64 [n]) as host integers [R][n]. Waits for the device."""
        if self.size == 1:
            return [values.tolist()]
        self.flight_recorder.check()
        gathered = values.new_empty(self.size * len(values))
        all_gather_single(gathered, values, group=self.group)
        rows: list[list[int]] = gathered.view(self.size, -1).tolist()
        self.flight_recorder.check()
        return rows

    def agree(
        self,
        values: Sequence[int | Tensor],
        problem: str | None,
        device: torch.device,
        *,
        gradients: Gradients = NO_GRADIENTS,
    ) -> list[list[int]]:
        """Exchange one call's facts [R][n], n at most R + 1, and raise InputError on all ranks when any of them has a
        `problem` or when they are not in the same layer, or carry rows of different dtypes or sizes, or some want
        gradients and others none: their backward would wait for the others' for ever. This is how a bad argument on one
        rank ends in one sentence everywhere and not in a hang: it rides on the exchange of counts that the call needs
        anyway."""
        where, carried = (
            zlib.crc32(self.flight_recorder.where.encode()),
            zlib.crc32(self.flight_recorder.carried.encode()),
        )
        # integers in one copy to the device, tensors behind them
        integers = [value for value in values if isinstance(value, int)]
        tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
        assert not any(isinstance(value, int) for value in values[len(integers) :]), "integers come first"
        count = len(integers) + sum(map(len, tensors))
        if self.size > 1 and count > self.size + 1:
            raise ValueError(
                f"agree exchanges at most R + 1 = {self.size + 1} numbers on {self.size} ranks, got {count}"
            )
        # one width whatever the call, so that ranks in different layers still understand each other
        filler = [0] * (self.size + 1 - count)
        asked = sum(1 << at for at, tensor in enumerate(gradients.values()) if tensor.requires_grad)
        asked = asked if torch.is_grad_enabled() else 0
        header = [problem is not None, where, carried, asked, *filler, *integers]
        row = torch.tensor(header, dtype=torch.int64, device=device)
        rows = self.exchange(torch.cat([row, *tensors]) if tensors else row)
        troubled = [index for index, row in enumerate(rows) if row[0]]
        if troubled:
            text = self.flight_recorder.share(problem, owner=self.ranks[troubled[0]], group=self.ranks)
            raise InputError(f"rank {self.ranks[troubled[0]]}: {text}")
        odd = [index for index, row in enumerate(rows) if row[1] != rows[0][1]]
        if odd:
            pair = (self.ranks[0], self.ranks[odd[0]])
            names = [
                self.flight_recorder.share(self.flight_recorder.where, owner=rank, group=self.ranks) for rank in pair
            ]
            raise InputError(
                f"the ranks are not in the same layer: rank {pair[0]} is in {names[0]!r}, rank {pair[1]} in "
                f"{names[1]!r}; call the layers in the same order on all ranks"
            )
        self._same_rows([row[2] for row in rows])
        self._same_gradients(gradients, [row[3] for row in rows])
        return [row[len(row) - count :] for row in rows]

    def _same_rows(self, carried: list[int]) -> None:
        odd = [index for index, found in enumerate(carried) if found != carried[0]]
        if not odd:
            return
        pair = (self.ranks[0], self.ranks[odd[0]])
        facts = [
            self.flight_recorder.share(self.flight_recorder.carried, owner=rank, group=self.ranks).split(", ")
            for rank in pair
        ]
        first, second = (", ".join(fact for fact in own if fact not in other) for own, other in (facts, facts[::-1]))
        raise InputError(
            f"{self.flight_recorder.where} carries {first} on rank {pair[0]}, and {second} on rank {pair[1]}; build "
            f"the layer "
            f"alike on all ranks, and convert it (.to, .half, .bfloat16) on all of them or on none"
        )

    def _same_gradients(self, gradients: Gradients, asked: list[int]) -> None:
        for at, name in enumerate(gradients):
            found = {bool(bits >> at & 1): rank for rank, bits in zip(self.ranks, asked, strict=True)}
            if len(found) > 1:
                raise InputError(
                    f"{name} requires a gradient on rank {found[True]} and none on rank {found[False]}, whose backward "
                    f"would not be there; let requires_grad and grad mode be alike on all ranks, without rows too"
                )
