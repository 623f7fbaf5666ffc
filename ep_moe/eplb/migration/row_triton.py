"""The Triton form of what `SlotStore` does: rows are read, examined and written in one launch each, for a step of the
balancer launches them between two forwards. The torch form is the definition."""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton

_BLOCK = 4096  # words of a program
_WARPS = 8


class Rows:
    """The rows of one layer's slots, all their parts of whole int64 words.

    parts: (address of slot 0, words of a slot) in the order of a row
    factors, powers, scratch: `Checksum`'s; scratch is used by one stream, and zeros between launches
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
        """Bytes [start, stop) of a slot's row into uint8 `out`. Bounds are multiples of 8, as out's address."""
        start, stop = start // 8, stop // 8
        # who writes the checksum has weighed all; else those programs alone that have words of the range
        begin, end = 0, self._programs
        if stop <= self._tail:
            begin, end = self._program(start), self._program(stop - 1) + 1
        _weigh[(end - begin,)](
            self._table, len(self._begins) - 1, *self._checksum, slot, out.data_ptr(), start, stop, self._tail, begin,
            PACK=True, EACH=len(self._checksum[0]), **self._sizes,
        )  # fmt: skip

    def examine(self, row: Tensor, found: Tensor) -> None:
        """Into int64 [] `found`: the checksum of uint8 `row`, less the one at its end."""
        _weigh[(self._programs,)](
            self._table, len(self._begins) - 1, *self._checksum, row.data_ptr(), found.data_ptr(), 0, self._tail + 1,
            self._tail, 0, PACK=False, EACH=len(self._checksum[0]), **self._sizes,
        )  # fmt: skip

    def write(self, pairs: Tensor, count: int) -> None:
        """pairs: int64 [>= count, 2], (slot, address of the row that it gets)"""
        _write[(self._programs, count)](self._table, len(self._begins) - 1, pairs, **self._sizes)

    def _program(self, word: int) -> int:
        part = next(part for part, first in enumerate(self._firsts[1:]) if word < first)
        return self._begins[part] + (word - self._firsts[part]) // _BLOCK


@triton.jit
def _part_of(table, parts, program, LANES: tl.constexpr):
    """Where the part that a program has words of begins in the table, and its index."""
    lane = tl.arange(0, LANES)
    begins = tl.load(table + 4 * lane + 3, mask=lane < parts, other=1 << 62)
    part = tl.sum((begins <= program).to(tl.int32)) - 1
    return table + 4 * part, part


# one variant for all rows: nothing of what differs between launches is compiled in
@triton.jit(
    do_not_specialize=["parts", "given", "out", "start", "stop", "tail", "begin"],
    do_not_specialize_on_alignment=["parts", "given", "out", "start", "stop", "tail", "begin"],
)
def _weigh(
    table, parts: tl.int64, factors, powers, scratch, given: tl.int64, out: tl.int64, start: tl.int64, stop: tl.int64,
    tail: tl.int64, begin: tl.int64, PACK: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PACK: words [start, stop) of the row of slot `given` to address `out`; the checksum of its `tail` words is the
    next, where that is among them. Else `out` gets the checksum of the row at address `given`, less the one there."""
    program = begin + tl.program_id(0)
    entry, part = _part_of(table, parts, program, LANES)
    words, first = tl.load(entry + 1), tl.load(entry + 2)
    place = (program - tl.load(entry + 3)) * BLOCK
    at = place + tl.arange(0, BLOCK)
    inside = at < words
    source = tl.load(entry) + given * words * 8 if PACK else given + first * 8
    word = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=inside, other=0)
    # the interpreter takes an address below 2**31 for an int32, whatever the signature says
    target = out.to(tl.int64).to(tl.pointer_type(tl.int64)) - start
    if PACK:
        tl.store(target + first + at, word, mask=inside & (first + at >= start) & (first + at < stop))
    if stop > tail:
        blocks = (words + EACH - 1) // EACH
        factor = tl.load(factors + at % EACH, mask=inside, other=0)
        total = tl.sum(word * factor) * tl.load(powers + blocks - 1 - place // EACH)
        if place == 0:
            total += tl.load(powers + blocks)
        # modulo 2**64, and so the same in any order
        tl.atomic_add(scratch + 1 + part, total, sem="relaxed")
        if tl.atomic_add(scratch, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            # the last one: what the others have added is there, and is left as it was found
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
