"""Sort pairs of a received row and a local expert by expert before the products, and sum results per row after them.

Nothing here allocates or waits for the device: the caller provides every output. launch: how kernels are launched.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.signals import grid_barrier, put_packets, wait
from ep_moe.quant.fp8 import to_e4m3
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.launch_cache import (
    Launch,
    cdiv,
    launch_directly,
    next_power_of_2,
    pdl_launch,
    pdl_trigger,
    pdl_wait,
)
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.runtime.waiting import Waiting
from ep_moe.runtime.workspace import Shapes
from ep_moe.types import PeerRows

# tuned on an H200
REDUCE_BLOCK, REDUCE_WARPS = 1024, 2
ALONE = 4096  # up to so many pairs, each sorting program counts all of them itself, which saves two launches
CHUNK = 128  # with more pairs, how many a program sorts at once
PROGRAMS = 1024  # most sorting programs


IdsReady = tuple[Tensor, Tensor]  # `types.WireIds.ids_ready` and `sequence`


@dataclass(frozen=True)
class PeerAddresses:
    """The peers' memory for the experts' rows: `types.PeerRows` without its blocks.

    number, stride: as of `types.PeerPackets`, for rows that travel as packets
    first: the index of this pass's first row among all rows received
    """

    addresses: Tensor
    offset: int
    bound: int
    rank: int
    number: Tensor | None = None
    stride: int = 0
    first: int = 0

    @classmethod
    def of(cls, rows: PeerRows) -> PeerAddresses:
        number, stride = (None, 0) if rows.packets is None else (rows.packets.number, rows.packets.stride)
        return cls(rows.addresses, rows.offset, rows.bound, rows.rank, number, stride)


@dataclass(frozen=True)
class Lists:
    """Pairs sorted by expert, the result of `group_pairs`.

    source: int32 [N * K], the row of each pair
    slots: int32 [N, K], the index of each route's pair, -1 for none
    ends: int32 [L], the index after each expert's last pair
    addresses: int64 [N * K], the address of each pair's result in the memory of peers (one row per route), or None
    """

    source: Tensor
    slots: Tensor
    ends: Tensor
    addresses: Tensor | None = None


def passes(
    rows: int, most: int, peer_out: PeerAddresses | None, returned: int = 1
) -> list[tuple[slice, PeerAddresses | None]]:
    """Split received rows into parts of at most `most`, and return each part with the target of its results.

    The first part contains this rank's own rows, so that ranks do not all write to the same peers at once.

    returned: results per received row
    """
    parts = [slice(start, min(start + most, rows)) for start in range(0, rows, most)]
    if peer_out is None:
        return [(part, None) for part in parts]
    turn = peer_out.rank * (peer_out.bound // returned) // most
    return [(part, replace(peer_out, first=part.start * returned)) for part in parts[turn:] + parts[:turn]]


def reduce(
    y: Tensor, ids: Tensor, weights: Tensor | None, base: int, num_experts: int, out: Tensor, *,
    slots: Tensor | None = None, peer_out: PeerAddresses | None = None, pdl: bool = False, per_route: bool = False,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Sum results per row: out[n] is the sum over k of weights[n, k] * y[n * K + k], in float32, k from 0 upwards.

    The sum includes routes whose expert ids[n, k] - base is in 0 .. L - 1. It is zero for a row without such a route.

    y: bf16 or fp16 [M, H]; ids: int [N, K]; weights: float32 [N, K], None for ones; a route of weight 0 is skipped
    slots: int32 [N, K]; if given, a route's row is y[slots[n, k]], and a negative slot is skipped
    out: [N, H]. With `peer_out` only its dtype is used, E4M3 for sums that are rounded, saturating at 448. Rows without
        a local expert are then not written, except the packet that is sent for every row
    pdl: start before the previous kernel has ended, and let the next kernel do the same
    per_route: each of the K routes is its own row; out is [N * K, H]
    """
    rows, top_k = (ids.numel(), 1) if per_route else ids.shape
    size = out.shape[-1]
    if not rows:
        return
    block = min(REDUCE_BLOCK, next_power_of_2(size))
    # consecutive programs write to different ranks, so that all links are busy
    turns = 1 if peer_out is None else max(1, min(len(peer_out.addresses), rows // peer_out.bound))
    to: tuple[Tensor | int | None, ...] = (None, 0, 1, 0, 0, None, 0)
    if peer_out is not None:
        at, packets = (peer_out.offset, peer_out.bound, peer_out.first), (peer_out.number, peer_out.stride)
        to = (peer_out.addresses, *at, peer_out.rank, *packets)
    launch(
        _reduce, (turns * cdiv(rows, turns), cdiv(size, block)),
        y, ids, weights, slots, out.view(torch.uint8) if out.itemsize == 1 else out, *to, base, num_experts, rows, size,
        TOP_K=top_k, WEIGHTED=weights is not None, TURNS=turns, BLOCK=block, num_warps=REDUCE_WARPS,
        **pdl_launch(y.device, pdl),
    )  # fmt: skip


def copy_rows(x: Tensor, slots: Tensor, out: Tensor, *, launch: Launch = launch_directly) -> None:
    """Copy each row of x to all rows of the output that `slots` names. Other rows are not written.

    x: [N, H]; slots: int32 [N, K], below 0 or at least M for none; out: [M, H]; all contiguous
    """
    rows, size = x.shape
    if not rows:
        return
    assert x.is_contiguous()
    assert out.is_contiguous()
    block = min(1024, next_power_of_2(size))
    grid = (rows, cdiv(size, block))
    launch(_copy_rows, grid, x, slots, out, out.shape[0], size, TOP_K=slots.shape[1], BLOCK=block)


def group_workspace(num_pairs: int, num_experts: int) -> int:
    """Return the size of the workspace of `group_pairs`, in int32."""
    return (cdiv(num_pairs, _pairs_per_program(num_pairs, PROGRAMS)) + 1) * num_experts if num_pairs > ALONE else 0


def list_shapes(num_pairs: int, num_experts: int) -> Shapes:
    """Return the shapes of the tensors that `group_pairs` writes."""
    return {
        "source": ((num_pairs,), torch.int32),
        "slots": ((num_pairs,), torch.int32),
        "ends": ((num_experts,), torch.int32),
        "sorting": ((group_workspace(num_pairs, num_experts),), torch.int32),
    }


def _pairs_per_program(num_pairs: int, programs: int) -> int:
    return max(CHUNK, next_power_of_2(cdiv(num_pairs, programs)))


def list_pairs(
    scratch: dict[str, Tensor], ids: Tensor, weights: Tensor | None, base: int, num_experts: int, *, pdl: bool = False,
    ids_ready: IdsReady | None = None, peer_out: PeerAddresses | None = None, row_bytes: int = 0,
    launch: Launch = launch_directly,
) -> Lists:  # fmt: skip
    """Run `group_pairs` into tensors of `list_shapes`. peer_out: also compute addresses there, of rows of row_bytes"""
    addresses = None if peer_out is None else scratch["addresses"]
    lists = Lists(scratch["source"], scratch["slots"].view(ids.shape), scratch["ends"], addresses)
    group_pairs(
        ids, num_experts, lists.source, lists.slots, lists.ends, scratch["sorting"], base=base, weights=weights,
        pdl=pdl, ids_ready=ids_ready, peer_out=peer_out, addresses=addresses, row_bytes=row_bytes, launch=launch,
    )  # fmt: skip
    return lists


def group_pairs(
    ids: Tensor, num_experts: int, source_row: Tensor, slots: Tensor, ends: Tensor, workspace: Tensor, *,
    base: int = 0, weights: Tensor | None = None, pdl: bool = False, ids_ready: IdsReady | None = None,
    peer_out: PeerAddresses | None = None, addresses: Tensor | None = None, row_bytes: int = 0,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Sort (row, expert) pairs by expert. The sort is stable, and so deterministic.

    ids: int32 or int64 [N, K]; an expert is ids - base; numbers outside 0 .. L - 1 name no local expert
    weights: float32 [N, K] or None; a pair of weight 0 is left out
    source_row: int32 [N * K], the row n of each sorted pair; not written beyond the last pair
    slots: int32 [N, K], the index of each pair in the sorted order, -1 for none
    ends: int32 [L], the index after each expert's last pair
    workspace: int32 [group_workspace(N * K, L)], may be uninitialized
    pdl: if one launch suffices, start before the previous kernel has ended, and let the next kernel do the same
    ids_ready: as of `types.WireIds`, if rows may still travel. One launch then sorts while they travel
    addresses: int64 [N * K] or None, the address of each sorted pair's row of `row_bytes` at `peer_out`, with one row
        per route
    """
    pairs, top_k = ids.numel(), ids.shape[1]
    if not pairs:
        ends.zero_()
        return
    lanes, ranks = next_power_of_2(num_experts), 1 if ids_ready is None else len(ids_ready[0])
    to: tuple[Tensor | int | None, ...] = (None, None, 0, 1, 0, 0)
    if addresses is not None:
        assert peer_out is not None
        to = (addresses, peer_out.addresses, peer_out.offset, peer_out.bound, peer_out.first, row_bytes)
    found, lists = (ids, weights, base), (source_row, slots, ends, pairs, num_experts, top_k, *to)
    given = {"EXPERTS": lanes, "WEIGHTED": weights is not None}
    place = given | {"BLOCKS": max(1, min(128, 8192 // lanes)), "RANKS": ranks, "LANES": next_power_of_2(ranks)}
    most = max(16, 16384 // lanes)  # most pairs that a program can place at once
    if pairs <= ALONE:
        chunk = 16 if pairs <= 1024 else max(16, min(32, 8192 // lanes))
        launch(
            _place_pairs, (cdiv(pairs, chunk),), *found, *(ids_ready or (None, None)), None, None, *lists,
            **place,
            PAIRS=chunk, CHUNK=chunk, ALL=next_power_of_2(pairs), num_warps=8,
            **pdl_launch(ids.device, pdl or ids_ready is not None),
        )  # fmt: skip
    elif ids_ready is not None:
        # programs wait for each other, so no more than run at once; in the interpreter only one
        mine = _pairs_per_program(pairs, multiprocessors(ids.device) if ids.is_cuda else 1)
        launch(
            _place_pairs, (cdiv(pairs, mine),), *found, *ids_ready, workspace, None, *lists, **place, PAIRS=mine,
            CHUNK=min(mine, most), ALL=0, num_warps=8, **pdl_launch(ids.device),
        )  # fmt: skip
    else:
        mine = _pairs_per_program(pairs, PROGRAMS)
        blocks = cdiv(pairs, mine)
        counts, totals = workspace[: blocks * num_experts], workspace[blocks * num_experts :]
        counted = (*found, counts, pairs, num_experts)
        launch(_count_pairs, (blocks,), *counted, **given, PAIRS=mine, CHUNK=CHUNK)
        launch(_sum_counts, (num_experts,), counts, totals, blocks, BLOCKS=next_power_of_2(blocks))
        launch(
            _place_pairs, (blocks,), *found, None, None, counts, totals, *lists, **place, PAIRS=mine,
            CHUNK=min(CHUNK, most), ALL=0, **pdl_launch(ids.device, False),
        )  # fmt: skip


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def local_experts(ids, weights, base, pair, pairs, WEIGHTED: tl.constexpr):
    """Return each pair's local expert, ids - base; -1 beyond the last pair and for a pair of weight 0."""
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
    """Count the pairs of each expert among the PAIRS pairs of a program."""
    count = tl.zeros([EXPERTS], tl.int32)
    for start in range(block * PAIRS, (block + 1) * PAIRS, CHUNK):
        expert = local_experts(ids, weights, base, start + tl.arange(0, CHUNK), pairs, WEIGHTED)
        count += tl.histogram(expert, EXPERTS, mask=(expert >= 0) & (expert < experts))
    return count


@triton.jit
def count_together(counts, met, count, experts, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return for each expert the sum of all programs' counts, and of the programs before this one.

    BLOCKS: the number of programs' counts that are read at once
    """
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
def _count_pairs(
    ids, weights, base, counts, pairs, experts,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Set counts[e, b] to the number of pairs of expert e among the PAIRS pairs of program b."""
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    count = count_own(ids, weights, base, block, pairs, experts, EXPERTS, CHUNK, PAIRS, WEIGHTED)
    tl.store(counts + lane * tl.num_programs(0) + block, count, mask=lane < experts)


@triton.jit
def _sum_counts(counts, totals, blocks, BLOCKS: tl.constexpr):
    """Replace each program's count of an expert by the sum of the programs before it, and store the expert's total."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    count = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
    tl.store(counts + expert * blocks + block, tl.cumsum(count, 0) - count, mask=block < blocks)
    tl.store(totals + expert, tl.sum(count))


@Waiting
@triton.jit
def _place_pairs(
    ids, weights, base, ids_ready, sequence, counts, totals, source_row, slots, ends, pairs, experts, top_k, addresses,
    peers, offset, bound, first, row_bytes,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    WEIGHTED: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute source_row, slots, ends and addresses of `group_pairs`.

    counts, totals: the results of `_sum_counts`. Without totals, programs count their own pairs into `counts` and wait
        for each other. Without both, each program counts all pairs (at most ALL) itself
    ids_ready, sequence: as of `types.WireIds`, None if ids and rows arrive together
    """
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
        if addresses is not None:
            row = (first + pair).to(tl.int64)
            start = tl.load(peers + row // bound, mask=valid, other=0) + offset
            tl.store(addresses + slot, start + row % bound * row_bytes, mask=valid)
        place += tl.sum(mine, 0)
    if ids_ready is not None:
        pdl_wait(PDL)


@triton.jit
def _reduce(
    y, ids, weights, slots, out, peers, offset, bound, first, rank, number, stride, base, experts, rows, size,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the sum of row n, see `reduce`.

    The target is out[n], or row (first + n) % bound at peers[(first + n) // bound] + offset. If `number` is not None,
    it holds a sequence number, and the row is written as packets.
    """
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
        valid = valid & (row >= 0)
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
        left = total.to(y.dtype.element_ty)  # so that all kernels that write to peers give the same bits
        value = to_e4m3(left.to(tl.float32)) if narrow else left
        # `multiple_of` is on the pointer: on an integer address the compiler forgets it, and stores 2 bytes at a time
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
def _copy_rows(x, slots, out, rows_out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
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
