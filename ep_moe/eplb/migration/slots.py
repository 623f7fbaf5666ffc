"""Reads, checks and writes the slots of one layer as rows of bytes with a checksum.

A row is all tensors of `ExpertWeights.slot_tensors` for one slot. Each tensor begins at a multiple of 8 bytes. The last
8 bytes are the checksum (int64) of the rest.

The Triton form (`Rows`) reads, checks or writes rows in one launch each, because the balancer runs between two forwards
and launches take host time. The torch form is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ep_moe.runtime.launch_cache import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.weights.expert_weights import ExpertWeights

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


_BLOCK = 4096  # words of one Triton program
_WARPS = 8


class Rows:
    """The rows of one layer's slots in Triton. Each part (tensor) of a slot must consist of whole int64 words.

    parts: (address of slot 0, words of a slot) of each part, in the order of a row
    factors, powers, scratch: those of `Checksum`. Scratch may be used by one stream only; it is zero between launches
    """

    def __init__(self, parts: Sequence[tuple[int, int]], factors: Tensor, powers: Tensor, scratch: Tensor) -> None:
        table, self._firsts, self._begins = [], [0], [0]
        for address, words in parts:
            table.append([address, words, self._firsts[-1], self._begins[-1]])
            self._firsts.append(self._firsts[-1] + words)
            self._begins.append(self._begins[-1] + cdiv(words, _BLOCK))
        on_host = torch.tensor(table, dtype=torch.int64, device="cpu", pin_memory=factors.is_cuda)
        self._table = on_host.to(factors.device, non_blocking=True)
        self._checksum = (factors, powers, scratch)
        self._programs, self._tail = self._begins[-1], self._firsts[-1]
        self._sizes = {"LANES": next_power_of_2(len(table)), "BLOCK": _BLOCK, "num_warps": _WARPS}

    def pack(self, slot: int, start: int, stop: int, out: Tensor) -> None:
        """Copy bytes [start, stop) of a slot's row to uint8 `out`. Bounds and out's address are multiples of 8."""
        start, stop = start // 8, stop // 8
        # the checksum needs all words; a range without it needs only the programs that have words of the range
        begin, end = 0, self._programs
        if stop <= self._tail:
            begin, end = self._program(start), self._program(stop - 1) + 1
        _weigh[(end - begin,)](
            self._table, len(self._begins) - 1, *self._checksum, slot, out.data_ptr(), start, stop, self._tail, begin,
            PACK=True, EACH=len(self._checksum[0]), **self._sizes,
        )  # fmt: skip

    def examine(self, row: Tensor, found: Tensor) -> None:
        """Write the checksum of uint8 `row` minus the one at its end to int64 [] `found`: 0 for an intact row."""
        _weigh[(self._programs,)](
            self._table, len(self._begins) - 1, *self._checksum, row.data_ptr(), found.data_ptr(), 0, self._tail + 1,
            self._tail, 0, PACK=False, EACH=len(self._checksum[0]), **self._sizes,
        )  # fmt: skip

    def write(self, pairs: Tensor, count: int) -> None:
        """Copy rows into slots. pairs: int64 [>= count, 2], (slot, address of its row)"""
        _write[(self._programs, count)](self._table, len(self._begins) - 1, pairs, **self._sizes)

    def _program(self, word: int) -> int:
        part = next(part for part, first in enumerate(self._firsts[1:]) if word < first)
        return self._begins[part] + (word - self._firsts[part]) // _BLOCK


@triton.jit
def _part_of(table, parts, program, LANES: tl.constexpr):
    """Return the address of the table entry of the part that a program works on, and the part's index."""
    lane = tl.arange(0, LANES)
    begins = tl.load(table + 4 * lane + 3, mask=lane < parts, other=1 << 62)
    part = tl.sum((begins <= program).to(tl.int32)) - 1
    return table + 4 * part, part


# compile one variant for all rows: no argument that differs between launches is specialized on
@triton.jit(
    do_not_specialize=["parts", "given", "out", "start", "stop", "tail", "begin"],
    do_not_specialize_on_alignment=["parts", "given", "out", "start", "stop", "tail", "begin"],
)
def _weigh(
    table, parts: tl.int64, factors, powers, scratch, given: tl.int64, out: tl.int64, start: tl.int64, stop: tl.int64,
    tail: tl.int64, begin: tl.int64, PACK: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack a slot's row, or examine a row.

    PACK: copy words [start, stop) of the row of slot `given` to address `out`. Word number `tail` is the checksum of
    the words before it. Otherwise: write the checksum of the row at address `given`, minus its word `tail`, to `out`.
    """
    program = begin + tl.program_id(0)
    entry, part = _part_of(table, parts, program, LANES)
    words, first = tl.load(entry + 1), tl.load(entry + 2)
    place = (program - tl.load(entry + 3)) * BLOCK
    at = place + tl.arange(0, BLOCK)
    inside = at < words
    source = tl.load(entry) + given * words * 8 if PACK else given + first * 8
    word = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=inside, other=0)
    # Triton's interpreter makes an address below 2**31 an int32, despite the signature
    target = out.to(tl.int64).to(tl.pointer_type(tl.int64)) - start
    if PACK:
        tl.store(target + first + at, word, mask=inside & (first + at >= start) & (first + at < stop))
    if stop > tail:
        blocks = (words + EACH - 1) // EACH
        factor = tl.load(factors + at % EACH, mask=inside, other=0)
        total = tl.sum(word * factor) * tl.load(powers + blocks - 1 - place // EACH)
        if place == 0:
            total += tl.load(powers + blocks)
        # integer addition modulo 2**64 gives the same sum in any order
        tl.atomic_add(scratch + 1 + part, total, sem="relaxed")
        if tl.atomic_add(scratch, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            # the last program: all sums are complete; it resets scratch to zero for the next launch
            tl.atomic_xchg(scratch, 0, sem="relaxed")
            lane = tl.arange(0, LANES)
            none = tl.zeros([LANES], tl.int64)
            sums = tl.atomic_xchg(scratch + 1 + lane, none, mask=lane < parts, sem="relaxed")
            weight = tl.load(factors + lane, mask=lane < parts, other=0)
            found = tl.sum(tl.where(lane < parts, sums, 0) * weight) + tl.load(powers + 1)
            if PACK:
                tl.store(target + tail, found)
            else:
                tl.store(target, found - tl.load(given.to(tl.pointer_type(tl.int64)) + tail))


@triton.jit(do_not_specialize=["parts"])
def _write(table, parts: tl.int64, pairs, LANES: tl.constexpr, BLOCK: tl.constexpr):
    program, pair = tl.program_id(0).to(tl.int64), pairs + 2 * tl.program_id(1)
    entry, _ = _part_of(table, parts, program, LANES)
    words = tl.load(entry + 1)
    at = (program - tl.load(entry + 3)) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(pair + 1) + tl.load(entry + 2) * 8
    slot = tl.load(entry) + tl.load(pair) * words * 8
    word = tl.load(row.to(tl.pointer_type(tl.int64)) + at, mask=at < words)
    tl.store(slot.to(tl.pointer_type(tl.int64)) + at, word, mask=at < words)


_WORDS = 1 << 20  # int64 words of a block, which is summed at once: 8 MiB of scratch memory
_MOST_BLOCKS = 1 << 10  # the most blocks of one tensor: 8 GiB
_TAIL = 8  # bytes of the checksum
_MOST_PARTS = 64  # the most tensors of a slot in one launch


class Checksum:
    """A checksum of bytes: the sum of int64 words times odd factors that depend on their position, modulo 2**64.

    A single changed word always changes the sum, and exchanged words almost certainly do. Equal bytes give equal sums
    on every device.
    """

    def __init__(self, device: torch.device) -> None:
        # a GPU's factors are read on several streams, so they are complete now; a CPU's grow to the largest part on
        # demand, because all of them would take 0.1 s
        self._factors = _factors(_WORDS if device.type == "cuda" else 0, device)
        self._step = 6364136223846793005  # odd; the factor between blocks
        powers = [pow(self._step, power, 1 << 64) for power in range(_MOST_BLOCKS + 1)]
        signed = [power - (1 << 64) if power >> 63 else power for power in powers]
        self._powers = torch.tensor(signed, dtype=torch.int64, device=device)
        self._scratch = torch.zeros(_MOST_PARTS + 1, dtype=torch.int64, device=device)

    def __call__(self, data: Tensor) -> Tensor:
        """Return the checksum int64 [] of uint8 [bytes], on the device. The last word is padded with zeros."""
        if data.numel() % 8 or data.storage_offset() % 8:
            padded = data.new_zeros(-(-data.numel() // 8) * 8)
            padded[: data.numel()] = data
            data = padded
        total = torch.ones((), dtype=torch.int64, device=data.device)  # not 0, so that a row of zeros is not intact
        blocks = data.view(torch.int64).split(_WORDS)
        if len(blocks[0]) > len(self._factors):
            self._factors = _factors(len(blocks[0]), data.device)
        for words in blocks:
            total = total * self._step + (words * self._factors[: len(words)]).sum()
        return total

    def of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the checksum int64 [] of the checksums of all parts, each uint8 [bytes]."""
        return self(_bytes(torch.stack([self(part) for part in parts])))

    def rows(self, parts: Sequence[tuple[int, int]]) -> Rows:
        """Return the Triton form, which needs few launches and one stream. parts: as for `Rows`, on this device"""
        if len(self._factors) < _WORDS:  # kernels read the factors of a whole block
            self._factors = _factors(_WORDS, self._powers.device)
        return Rows(parts, self._factors, self._powers, self._scratch)


def _factors(words: int, device: torch.device) -> Tensor:
    """Return the odd factors of the first words of a block. Each depends only on its position."""
    place = torch.arange(words, dtype=torch.int64, device=device) * -7046029254386353131  # 2**64 / golden ratio
    return ((place ^ (place >> 29)) * -4658895280553007687) | 1


class SlotStore:
    """Access to the slots of one layer on this rank, as rows of bytes.

    On a GPU, if all tensors have whole int64 words, reading or checking a row is one launch, and so is writing any
    number of rows (`Rows`).

    row_bytes: bytes of a row with its checksum, equal on all ranks of a layer
    slots: number of slots of this rank
    """

    def __init__(self, weights: ExpertWeights, checksum: Checksum) -> None:
        self._weights, self._checksum, self.slots = weights, checksum, weights.num_slots
        specs = {name: (tensor.shape[1:].numel(), tensor.itemsize) for name, tensor in weights.slot_tensors().items()}
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (count, itemsize) in specs.items():
            self._spans[name] = (end, end + count * itemsize)
            end += -(-count * itemsize // 8) * 8
        self.row_bytes = end + _TAIL
        self._kinds = _kinds(weights)
        self._at: list[int] = []  # addresses of the tensors when `_rows` was made
        self._rows: Rows | None = None

    def fits(self, weights: ExpertWeights) -> bool:
        """Return whether the layout of rows is still valid for these weights.

        `.to(dtype)`, or a newly registered tensor, changes it.
        """
        return weights is self._weights and _kinds(weights) == self._kinds

    def read(self, slot: int, start: int, stop: int, out: Tensor) -> None:
        """Copy bytes [start, stop) of the slot's row to uint8 `out` [stop - start].

        On a GPU the bounds are multiples of 8. Padding between tensors is undefined.
        """
        rows = self._on_gpu()
        if rows is not None:
            rows.pack(slot, start, stop, out)
            return
        for first, last, view in self._views(slot):
            low, high = max(first, start), min(last, stop)
            if low < high:
                out[low - start : high - start].copy_(view[low - first : high - first])
        tail = self.row_bytes - _TAIL
        if stop > tail:
            low = max(tail, start)
            out[low - start :].copy_(_bytes(self.checksum(slot))[low - tail : stop - tail])

    def examine(self, row: Tensor, found: Tensor) -> None:
        """Write 0 to int64 [] `found` if the row matches its checksum, else another number."""
        rows = self._on_gpu()
        if rows is not None:
            rows.examine(row, found)
            return
        parts = [row[first:last] for first, last in self._spans.values() if first < last]
        found.copy_(self._checksum.of_parts(parts) - row[-_TAIL:].view(torch.int64)[0])

    def address(self, rows: Mapping[int, Tensor], pairs: Tensor) -> None:
        """Prepare `write`: copy (slot, address of its row) for each slot to the device tensor `pairs` [>= slots, 2]."""
        listed = [(slot, row.data_ptr()) for slot, row in rows.items()]
        # always the same size, so that pinned memory of an earlier call is reused once its copy has ended
        on_host = torch.empty(self.slots, 2, dtype=torch.int64, device="cpu", pin_memory=pairs.is_cuda)
        on_host[: len(listed)] = torch.tensor(listed, dtype=torch.int64, device="cpu").view(len(listed), 2)
        pairs[: self.slots].copy_(on_host, non_blocking=True)

    def write(self, rows: Mapping[int, Tensor], pairs: Tensor) -> None:
        """Write rows into slots, in place. On a GPU it takes few launches, because forwards wait for it.

        pairs: as `address` wrote them for these rows
        """
        if not rows:
            return
        on_gpu = self._on_gpu()
        if on_gpu is not None:
            on_gpu.write(pairs, len(rows))
            return
        moved: list[tuple[Tensor, Tensor]] = []
        for slot, row in rows.items():
            moved += [(view, row[first:last]) for first, last, view in self._views(slot)]
        for group in (  # int64 words where possible: a thread copies a fixed number of elements, whatever their size
            [(view.view(torch.int64), data.view(torch.int64)) for view, data in moved if view.numel() % 8 == 0],
            [pair for pair in moved if pair[0].numel() % 8],
        ):
            if group:
                torch._foreach_copy_([view for view, _ in group], [data for _, data in group])

    def checksum(self, slot: int) -> Tensor:
        """Return the checksum int64 [] of the slot's present content."""
        return self._checksum.of_parts([view for _, _, view in self._views(slot)])

    def _views(self, slot: int) -> list[tuple[int, int, Tensor]]:
        """Return (start, stop, uint8 view) of the slot's tensors. Do not keep them: `.to(device)` replaces tensors."""
        return [
            (*self._spans[name], tensor[slot].view(-1).view(torch.uint8)) for name, tensor in self._tensors().items()
        ]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the non-empty slot tensors by name, in the order of a row."""
        found = {}
        for name, tensor in self._weights.slot_tensors().items():
            assert tensor.is_contiguous(), f"{name} of ExpertWeights is not contiguous"
            if self._spans[name][0] < self._spans[name][1]:
                found[name] = tensor
        return found

    def _on_gpu(self) -> Rows | None:
        """Return the Triton form; None if these tensors need the torch form."""
        at = [tensor.data_ptr() for tensor in (*self._weights.parameters(), *self._weights.buffers())]
        if at != self._at:
            self._at, self._rows = at, self._looked_up()
        return self._rows

    def _looked_up(self) -> Rows | None:
        parts = []
        for name, tensor in self._tensors().items():
            size = self._spans[name][1] - self._spans[name][0]
            if not _is_on_gpu(tensor) or size % 8 or tensor.data_ptr() % 8:
                return None
            parts.append((tensor.data_ptr(), size // 8))
        return self._checksum.rows(parts) if 0 < len(parts) <= _MOST_PARTS else None


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _kinds(weights: ExpertWeights) -> list[tuple[str, torch.Size, torch.dtype]]:
    found = (*weights.named_parameters(), *weights.named_buffers())
    return [(name, tensor.shape, tensor.dtype) for name, tensor in found]


def _bytes(words: Tensor) -> Tensor:
    return words.reshape(-1).view(torch.uint8)
