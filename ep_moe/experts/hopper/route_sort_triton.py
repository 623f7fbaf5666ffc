"""The Triton kernels behind `route_sort`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from ep_moe.all2all.nvlink_p2p.packets import put_packets
from ep_moe.all2all.nvlink_p2p.signals import grid_barrier, wait
from ep_moe.quant.fp8_rows_triton import to_e4m3
from ep_moe.runtime.pdl import pdl_trigger, pdl_wait
from ep_moe.runtime.waiting_triton import Waiting


@triton.jit
def local_experts(ids, weights, base, pair, pairs, WEIGHTED: tl.constexpr):
    """Of each pair, counted from `base`; -1 beyond the last, and for a pair of weight 0."""
    inside = pair < pairs
    expert = tl.load(ids + pair, mask=inside, other=-1).to(tl.int32) - base
    if WEIGHTED:
        inside = inside & (tl.load(weights + pair, mask=inside, other=0.0) != 0.0)
    return tl.where(inside, expert, -1)


@triton.jit
def count_own(
    ids, weights, base, block, pairs, experts,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert among the PAIRS pairs of a program."""
    count = tl.zeros([EXPERTS], tl.int32)
    for start in range(block * PAIRS, (block + 1) * PAIRS, CHUNK):
        expert = local_experts(ids, weights, base, start + tl.arange(0, CHUNK), pairs, WEIGHTED)
        count += tl.histogram(expert, EXPERTS, mask=(expert >= 0) & (expert < experts))
    return count


@triton.jit
def count_together(counts, met, count, experts, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Of each expert, all programs' counts, and those of the programs before this one. BLOCKS: that are read at once"""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, EXPERTS)
    tl.store(counts + block * experts + lane, count, mask=lane < experts)
    grid_barrier(met, blocks)
    total, place = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for first in range(0, blocks, BLOCKS):
        other = first + tl.arange(0, BLOCKS)[:, None]
        theirs = tl.load(counts + other * experts + lane[None], mask=(other < blocks) & (lane < experts)[None], other=0)
        total += tl.sum(theirs, 0)
        place += tl.sum(tl.where(other < block, theirs, 0), 0)
    return total, place


@triton.jit
def count_pairs(
    ids, weights, base, counts, pairs, experts,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """counts[e, b]: pairs of expert e among the PAIRS pairs of program b."""
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    count = count_own(ids, weights, base, block, pairs, experts, EXPERTS, CHUNK, PAIRS, WEIGHTED)
    tl.store(counts + lane * tl.num_programs(0) + block, count, mask=lane < experts)


@triton.jit
def sum_counts(counts, totals, blocks, BLOCKS: tl.constexpr):
    """Of each expert, what the programs before each one counted, instead of its own count, and all of them."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    count = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
    tl.store(counts + expert * blocks + block, tl.cumsum(count, 0) - count, mask=block < blocks)
    tl.store(totals + expert, tl.sum(count))


@Waiting
@triton.jit
def place_pairs(
    ids, weights, base, ids_ready, sequence, counts, totals, source_row, slots, ends, pairs, experts, top_k,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    WEIGHTED: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts, totals: of `sum_counts`. Without totals programs count their own into `counts` and wait for each other;
    without either each counts all pairs, at most ALL, itself.
    ids_ready, sequence: of `types.WireIds`, None where ids come with the rows"""
    pdl_trigger(PDL)
    if ids_ready is None:
        pdl_wait(PDL)
    else:
        wait(ids_ready, tl.load(sequence) + 1, RANKS, LANES)
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    if ALL:
        each = tl.arange(0, ALL)
        all_experts = local_experts(ids, weights, base, each, pairs, WEIGHTED)
        here = (all_experts >= 0) & (all_experts < experts)
        place = tl.histogram(all_experts, EXPERTS, mask=here & (each < block * PAIRS))
        count = tl.histogram(all_experts, EXPERTS, mask=here)
    elif totals is None:
        at_once: tl.constexpr = 1024 if PAIRS > 1024 else PAIRS
        count = count_own(ids, weights, base, block, pairs, experts, EXPERTS, at_once, PAIRS, WEIGHTED)
        count, place = count_together(counts, sequence + 1, count, experts, EXPERTS, BLOCKS)
    else:
        count = tl.load(totals + lane, mask=lane < experts, other=0)
        place = tl.load(counts + lane * tl.num_programs(0) + block, mask=lane < experts, other=0)
    end = tl.cumsum(count, 0)
    if block == 0:
        tl.store(ends + lane, end, mask=lane < experts)
    place += end - count
    for start in range(block * PAIRS, (block + 1) * PAIRS, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = local_experts(ids, weights, base, pair, pairs, WEIGHTED)
        mine = ((expert[:, None] == lane[None, :]) & (lane < experts)[None, :]).to(tl.int32)
        slot = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + place[None, :]), 1)
        valid = (expert >= 0) & (expert < experts)
        tl.store(slots + pair, tl.where(valid, slot, -1), mask=pair < pairs)
        tl.store(source_row + slot, pair // top_k, mask=valid)
        place += tl.sum(mine, 0)
    if ids_ready is not None:
        pdl_wait(PDL)


@triton.jit
def reduce(
    y, ids, weights, slots, out, peers, offset, bound, first, rank, number, stride, base, experts, rows, size,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of row n into out[n], or into row (first + n) % bound at peers[(first + n) // bound] + offset, by packets with
    the number that is there, if it is not None."""
    pdl_trigger(PDL)
    pdl_wait(PDL)
    program = tl.program_id(0)
    n = ((program + rank) % TURNS * (tl.num_programs(0) // TURNS) + program // TURNS).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) & (n < rows)
    total = tl.zeros([BLOCK], tl.float32)
    here = n < 0
    for i in tl.static_range(TOP_K):
        route = n * TOP_K + i
        row = route if slots is None else tl.load(slots + route, mask=n < rows, other=-1).to(tl.int64)
        weight = tl.load(weights + route, mask=n < rows, other=0.0) if WEIGHTED else 1.0
        expert = tl.load(ids + route, mask=n < rows, other=-1).to(tl.int32) - base
        valid = (expert >= 0) & (expert < experts) & (n < rows)
        here = here | valid
        if WEIGHTED:
            valid = valid & (weight != 0.0)
        value = tl.load(y + row * size + at, mask=inside & valid, other=0.0).to(tl.float32)
        total += value * weight
    if peers is None:
        tl.store(out + n * size + at, total.to(out.dtype.element_ty), mask=inside)
    else:
        row = first + n
        start = tl.load(peers + row // bound, mask=n < rows, other=0) + offset
        narrow: tl.constexpr = out.dtype.element_ty == tl.uint8
        left = total.to(y.dtype.element_ty)  # the same bits, whichever kernel writes them to peers
        value = to_e4m3(left.to(tl.float32)) if narrow else left
        # said of pointers: of numbers that become pointers the compiler forgets it, and stores 2 bytes at a time
        if number is None:
            theirs = tl.multiple_of(start.to(tl.pointer_type(out.dtype.element_ty)), 16) + row % bound * size
            tl.store(theirs + at, value, mask=inside & here)
        else:
            per: tl.constexpr = 4 if narrow else 2  # numbers of a word
            call, words = tl.load(number), size // per
            theirs = tl.multiple_of((start + row % bound * (stride * 8)).to(tl.pointer_type(tl.int64)), 16)
            word = tl.program_id(1) * (BLOCK // per) + tl.arange(0, BLOCK // per)
            if narrow:
                byte = tl.reshape(value, [BLOCK // 4, 4]).to(tl.int32) << (tl.arange(0, 4) * 8)[None, :]
                bits = tl.sum(byte, axis=1)
            else:
                low, high = tl.split(tl.reshape(value.to(tl.int16, bitcast=True), [BLOCK // 2, 2]))
                bits = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
            put_packets(theirs + word, bits, call, (word < words) & here)
            if tl.program_id(1) == 0:
                put_packets(theirs + words, call * 0, call, n < rows)


@triton.jit
def copy_rows(x, slots, out, rows_out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    used = n < 0
    for i in tl.static_range(TOP_K):
        slot = tl.load(slots + n * TOP_K + i)
        used = used | ((slot >= 0) & (slot < rows_out))
    value = tl.load(x + n * size + at, mask=inside & used, other=0.0)
    for i in tl.static_range(TOP_K):
        slot = tl.load(slots + n * TOP_K + i).to(tl.int64)
        tl.store(out + slot * size + at, value, mask=inside & (slot >= 0) & (slot < rows_out))
