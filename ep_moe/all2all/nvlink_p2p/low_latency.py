"""`nvlink_p2p.reference.send` by LL packets, in Triton, for few tokens: without fences, flags or counters. The way back
is in `low_latency_answers`.

A packet has 8 bytes, which arrive whole: 4 of data and 4 of sequence number. The receiver polls the packets of a row
until all have this call's number, so no flag follows. Packets double the bytes and save two trips over the link.

Each program handles one token index, one peer and a piece of the row. It sends that piece of this rank's token to the
peer, and receives the same piece of the peer's token with the same index. A rank sends its tokens to itself in the same
way. All programs of a kernel must run at once, because they wait for programs of other ranks. The dispatcher limits
their number (`low_latency_programs`).
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import PIECE, Workspace
from ep_moe.all2all.nvlink_p2p.signals import any_of, late_packets, packets_of, put_packets, still_missing
from ep_moe.placement.deferred import Placing, count_ids, place_ids, placement_arguments, tell_invalid
from ep_moe.quant.fp8 import SMALLEST, e4m3_blocks, e4m3_by, e4m3_step, e4m3_under
from ep_moe.runtime import devices
from ep_moe.runtime.devices import aligned
from ep_moe.runtime.launch_cache import LaunchSpec, cdiv, next_power_of_2, pdl_trigger
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.runtime.waiting import Waiting
from ep_moe.types import PhysicalRouting


def send(
    workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, *,
    allow_pdl: bool = False, put: bool = True, take: bool = True,
) -> None:  # fmt: skip
    """Launch the send kernel.

    allow_pdl: as of `nvlink_p2p.reference.send`
    put, take: run the sending and the receiving half. Ranks that run one after the other need a launch for each half
    """
    ids, tables, placing = placement_arguments(routing)
    x, ids, weights = aligned(x.contiguous()), ids.contiguous(), routing.weights.contiguous()
    changing = (x, None if x_scale is None else x_scale.contiguous(), ids, weights, *tables, len(x))
    key = ("send by packets", bound, x.dtype, ids.dtype, x_scale is not None, placing, allow_pdl, put, take)
    workspace.launch_cache.launch(
        key, changing, partial(_send_spec, workspace, bound, changing, placing, allow_pdl, put, take)
    )


def _send_spec(
    workspace: Workspace, bound: int, given: tuple[Any, ...], placing: Placing, allow_pdl: bool, put: bool, take: bool
) -> LaunchSpec:
    g, tensors = workspace.dispatch_shape, workspace.local_tensors
    words, scale_words = g.row_bytes // 4, g.scale_bytes // 4
    x, x_scale, *rest = given
    rounds = "" if x.dtype == g.row_dtype else g.wire.dispatch
    block = piece_of(words)
    grid = (bound, g.num_ranks, cdiv(words, block))
    # a kernel that starts early occupies multiprocessors while all these programs must run at once. They still fit if
    # there is at most one per multiprocessor
    leads = allow_pdl and math.prod(grid) <= devices.multiprocessors(x.device)
    changing = (x if rounds else x.view(torch.int32), None if x_scale is None else x_scale.view(torch.int32), *rest)
    fixed = (
        placing.seed,
        placing.experts,
        g.wire.input_scale,
        workspace.memory.addresses,
        workspace.sequence,
        workspace.sent_ids,
        workspace.sent_weights,
        tensors["row_packets"],
        tensors["rows"].view(torch.int32),
        tensors["scales"].view(torch.int32),
        tensors["ids"],
        tensors["weights"],
        workspace.offsets["row_packets"],
        bound,
        g.num_physical,
        g.slots_per_rank,
    )
    constants = {
        "MOST": placing.most,
        "RANK": workspace.rank,
        "TOP_K": g.top_k,
        "WIDTH": next_power_of_2(g.top_k),
        "WORDS": words,
        "WHOLE": next_power_of_2(g.hidden_size),
        "BLOCK": block,
        "SCALES": scale_words,
        "SCALE_BLOCK": block // 32 if rounds == "fp8_block" else next_power_of_2(max(scale_words, 1)),
        "ROUNDS": rounds,
        "SMALLEST": SMALLEST,
        "FEW": tensors["row_packets"].shape[1],
        "PACKETS": tensors["row_packets"].shape[2],
        "PUT": put,
        "TAKE": take,
        "PDL": leads and devices.supports_pdl(x.device),
    }
    return LaunchSpec(_send, grid, changing, fixed, constants)


def piece_of(words: int) -> int:
    """Return how many 4-byte words of a row one program handles."""
    # at least one for each of the 128 threads: with fewer, several warps load the same packet, and the condition of a
    # polling loop sees only one of these loads
    return max(128, min(PIECE, next_power_of_2(words)))


@Waiting
@triton.jit(do_not_specialize=["invalid", "tokens"])
def _send(
    x, x_scale, ids, weights, replicas, counts, expert_load, slot_load, counting, invalid, tokens, seed, experts,
    input_scale, peers, sequence, sent, sent_weights, packets, rows, scales, got_ids, got_weights, packets_at, bound,
    num_physical, slots_per_rank,
    MOST: tl.constexpr, RANK: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    SMALLEST: tl.constexpr, FEW: tl.constexpr, PACKETS: tl.constexpr, PUT: tl.constexpr, TAKE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Send a piece of a token to a peer, and receive that of the peer's token.

    The packets of a token hold K ids, K weights, the words of its row, and the words of its scales. Each program maps
    its token's logical ids to physical ones. Only the program with peer = RANK and piece = 0 counts their load.

    replicas to invalid, seed, experts: as `placement_arguments` returns them
    """
    pdl_trigger(PDL)
    token, peer, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = tl.load(sequence + 2) + 1
    route, word = tl.arange(0, WIDTH), piece * BLOCK + tl.arange(0, BLOCK)
    if ROUNDS == "fp8_block":  # each piece sends its own scales; otherwise the first piece sends all
        step = piece * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)
        scaled = step < SCALES
    else:
        step = tl.arange(0, SCALE_BLOCK)
        scaled = (step < SCALES) & (piece == 0)
    if PUT:
        tl.store(sequence, number)
        given = (route < TOP_K) & (token < tokens)
        id = tl.load(ids + token * TOP_K + route, mask=given, other=-1)  # noqa: A001
        weight = tl.load(weights + token * TOP_K + route, mask=given, other=0.0)
        # loaded before `wanted` is known: overlaps the load of ids
        row, scale = _row(
            x, x_scale, input_scale, token, tokens, word, step, scaled, WORDS, WHOLE, SCALES, ROUNDS, SMALLEST
        )
        if MOST:
            logical, counted = id, tl.load(counting) != 0
            id, known = place_ids(logical, token, replicas, counts, experts, seed, MOST)  # noqa: A001
            id = tl.where(known, id, -1)  # noqa: A001
        valid = (id >= 0) & (id < num_physical)
        id = tl.where(valid, id, -1).to(tl.int32)  # noqa: A001
        first = (route < TOP_K) & (piece == 0)
        tl.store(sent + token * TOP_K + route, id, mask=first & (peer == RANK))
        if sent_weights is not None:
            own = tl.where(valid, weight, 0.0)
            tl.store(sent_weights + token * TOP_K + route, own, mask=first & (peer == RANK))
        theirs = packets_of(peers, peer, packets_at, RANK * FEW + token, PACKETS)
        put_packets(theirs + route, id, number, first)
        put_packets(theirs + TOP_K + route, tl.where(valid, weight, 0.0).to(tl.int32, bitcast=True), number, first)
        wanted = tl.max((valid & (id // slots_per_rank == peer)).to(tl.int32), axis=0) > 0
        put_packets(theirs + 2 * TOP_K + word, row, number, (word < WORDS) & wanted)
        if SCALES:
            put_packets(theirs + 2 * TOP_K + WORDS + step, scale, number, scaled & wanted)
        if MOST:
            tell_invalid(logical, known, invalid)
            count_ids(logical, id, known & counted & (peer == RANK) & (piece == 0), expert_load, slot_load)
    if TAKE:
        mine = packets + (peer * FEW + token) * PACKETS
        place = peer * tl.cast(bound, tl.int64) + token
        to = (got_ids, got_weights, rows, scales)
        _take(
            mine, to, place, number, slots_per_rank, route, word, step, scaled, RANK, TOP_K, WIDTH, WORDS, BLOCK, SCALES
        )


@triton.jit
def _row(
    x, x_scale, input_scale, token, tokens, word, step, scaled,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, SCALES: tl.constexpr, ROUNDS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Return the words of a row and of its scales in the wire format.

    With ROUNDS, x has plain numbers, of which four become a word. fp8_row has one scale per row: each program of a row
    reads the whole row (WHOLE numbers, a power of two) to compute it.
    """
    inside = (word < WORDS) & (token < tokens)
    scale = step
    if ROUNDS == "":
        row = tl.load(x + token * WORDS + word, mask=inside)
        if SCALES:
            scale = tl.load(x_scale + token * SCALES + step, mask=scaled & (token < tokens))
    else:
        plain = x + token * WORDS * 4
        if ROUNDS == "fp8_row":
            every = tl.arange(0, WHOLE)
            whole = tl.load(plain + every, mask=(every < WORDS * 4) & (token < tokens), other=0.0).to(tl.float32)
            scale = e4m3_step(tl.max(tl.abs(whole), 0), SMALLEST)
            row = words_of(e4m3_under(fours(plain, word, inside), scale).to(tl.uint8, bitcast=True))
            scale = tl.broadcast_to(scale, step.shape).to(tl.int32, bitcast=True)
        elif ROUNDS == "fp8_block":
            value = fours(plain, word, inside)
            value, scale = e4m3_blocks(tl.reshape(value, [step.shape[0], 128]), SMALLEST)
            row = words_of(tl.reshape(value.to(tl.uint8, bitcast=True), [word.shape[0], 4]))
            scale = scale.to(tl.int32, bitcast=True)
        else:
            row = words_of(e4m3_by(fours(plain, word, inside), input_scale))
    return row, scale


@triton.jit
def fours(plain, word, inside):
    """Load the four plain numbers of each word: float32 [words, 4]."""
    four = plain + word[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(four, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def words_of(byte):
    """Pack four bytes to a word. byte: uint8 [words, 4]"""
    return tl.sum(byte.to(tl.int32) << (tl.arange(0, 4) * 8)[None, :], axis=1)


@triton.jit
def _take(
    packets, to, place, number, slots_per_rank, route, word, step, scaled,
    RANK: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Wait for a token's ids and weights, and for its piece of the row if an expert is on this rank; store them.

    to: the tensors for ids, weights, rows and scales
    """
    got_ids, got_weights, rows, scales = to
    row_at = packets + 2 * TOP_K
    id_packet, weight_packet = tl.zeros([WIDTH], tl.int64), tl.zeros([WIDTH], tl.int64)
    row_packet, scale_packet = tl.zeros([BLOCK], tl.int64), step.to(tl.int64)
    here = place < 0
    missing = 1
    while missing > 0:
        id_packet = tl.load(packets + route, mask=route < TOP_K, other=-1, volatile=True)
        weight_packet = tl.load(packets + TOP_K + route, mask=route < TOP_K, other=0, volatile=True)
        row_packet = tl.load(row_at + word, mask=word < WORDS, other=0, volatile=True)
        id = id_packet.to(tl.int32)  # noqa: A001
        here = tl.max(((id >= 0) & (id // slots_per_rank == RANK)).to(tl.int32), axis=0) > 0
        few = any_of(
            late_packets(id_packet, number, route < TOP_K) | late_packets(weight_packet, number, route < TOP_K)
        )
        if SCALES:
            scale_packet = tl.load(row_at + WORDS + step, mask=scaled, other=0, volatile=True)
            few |= here & any_of(late_packets(scale_packet, number, scaled))
        missing = still_missing(late_packets(row_packet, number, word < WORDS) & here, few)
    tl.store(got_ids + place * TOP_K + route, id_packet.to(tl.int32), mask=route < TOP_K)
    weight = weight_packet.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(got_weights + place * TOP_K + route, weight, mask=route < TOP_K)
    tl.store(rows + place * WORDS + word, row_packet.to(tl.int32), mask=(word < WORDS) & here)
    if SCALES:
        tl.store(scales + place * SCALES + step, scale_packet.to(tl.int32), mask=scaled & here)
