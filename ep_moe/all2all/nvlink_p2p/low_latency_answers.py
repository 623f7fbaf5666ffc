"""`nvlink_p2p.reference.receive` by LL packets, in Triton: without fences, flags or counters.

`low_latency` describes packets and programs.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import Workspace, answer_bytes, answer_dtype
from ep_moe.all2all.nvlink_p2p.low_latency import fours, piece_of, words_of
from ep_moe.all2all.nvlink_p2p.signals import any_of, late_packets, packets_of, put_packets, still_missing
from ep_moe.quant.fp8 import of_e4m3, to_e4m3
from ep_moe.runtime.launch_cache import LaunchSpec, cdiv, next_power_of_2, pdl_launch, pdl_wait
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.runtime.waiting import Waiting


def receive(workspace: Workspace, out: Tensor, bound: int, *, put: bool = True, take: bool = True) -> None:
    key = ("receive by packets", bound, put, take)
    workspace.launch_cache.launch(key, (out, len(out)), partial(_receive_spec, workspace, out, bound, put, take))


def _receive_spec(workspace: Workspace, out: Tensor, bound: int, put: bool, take: bool) -> LaunchSpec:
    g, tensors = workspace.dispatch_shape, workspace.local_tensors
    words, rounds = answer_bytes(g) // 4, answer_dtype(g) != g.dtype
    block, rows, top_k = piece_of(words), bound * g.returned, g.top_k // g.returned
    changing = (out if rounds else out.view(torch.int32), len(out))
    fixed = (
        tensors["answers"] if rounds else tensors["answers"].view(torch.int32),
        tensors["ids"],
        workspace.sent_ids,
        workspace.sent_weights,
        workspace.memory.addresses,
        workspace.sequence,
        tensors["answer_packets"],
        workspace.offsets["answer_packets"],
        rows,
        g.slots_per_rank,
    )
    part = next_power_of_2(cdiv(block, g.num_ranks * g.returned))
    constants = {
        "RANK": workspace.rank,
        "RANKS": g.num_ranks,
        "TOP_K": top_k,
        "WIDTH": next_power_of_2(top_k),
        "ROUTES": g.top_k,
        "WORDS": words,
        "BLOCK": block,
        # a program polls K rows at once, and each of its 128 threads needs a packet of its own (see `piece_of`)
        "PART": max(part, 128 // next_power_of_2(g.top_k)) if g.per_route else part,
        "LANES": next_power_of_2(g.num_ranks),
        "DTYPE": getattr(tl, str(g.dtype).removeprefix("torch.")),
        "ROUNDS": rounds,
        "FEW": tensors["answer_packets"].shape[1],
        "PACKETS": tensors["answer_packets"].shape[2],
        "PUT": put,
        "TAKE": take,
        **({"enable_fp_fusion": False} if g.per_route else {}),  # products are rounded before they are added
        **pdl_launch(out.device),
    }
    return LaunchSpec(_receive, (rows, g.num_ranks, cdiv(words, block)), changing, fixed, constants)


@Waiting
@triton.jit(do_not_specialize=["tokens"])
def _receive(
    out, tokens, answers, got_ids, sent, sent_weights, peers, sequence, packets, packets_at, bound, slots_per_rank,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
    ROUNDS: tl.constexpr, FEW: tl.constexpr, PACKETS: tl.constexpr, PUT: tl.constexpr, TAKE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Send a piece of an answer to a peer, and sum a part of the same piece of this rank's token.

    The packets of a row hold the words of its answer, if there is one, and one packet that always arrives. That packet
    tells a rank that its peers have read what it sent.

    A row is a token, or with `sent_weights` one of its ROUTES routes. bound: the most rows of a rank
    """
    pdl_wait(PDL)
    row, peer, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = tl.load(sequence)
    if PUT:
        route, word = tl.arange(0, WIDTH), piece * BLOCK + tl.arange(0, BLOCK)
        place = peer * tl.cast(bound, tl.int64) + row
        id = tl.load(got_ids + place * TOP_K + route, mask=route < TOP_K, other=-1)  # noqa: A001
        if ROUNDS:
            answer = words_of(to_e4m3(fours(answers + place * WORDS * 4, word, word < WORDS)))
        else:
            answer = tl.load(answers + place * WORDS + word, mask=word < WORDS)  # overlaps the load of ids
        theirs = packets_of(peers, peer, packets_at, RANK * FEW + row, PACKETS)
        wanted = tl.max(((id >= 0) & (id // slots_per_rank == RANK)).to(tl.int32), axis=0) > 0
        put_packets(theirs + word, answer, number, (word < WORDS) & wanted)
        put_packets(theirs + WORDS, number * 0, number, piece == 0)
    if TAKE:
        tl.store(sequence + 2, number)
        if sent_weights is None:
            _take_by_rank(
                out, tokens, sent, packets, number, slots_per_rank, row, peer, piece, RANKS, TOP_K, WIDTH, WORDS, BLOCK,
                PART, LANES, DTYPE, ROUNDS, FEW, PACKETS,
            )  # fmt: skip
        else:
            _take_by_route(
                out, tokens, sent, sent_weights, packets, number, slots_per_rank, row, peer, piece, RANKS, ROUTES,
                WORDS, BLOCK, PART, LANES, DTYPE, FEW, PACKETS,
            )  # fmt: skip


@triton.jit
def _take_by_rank(
    out, tokens, sent, packets, number, slots_per_rank, token, peer, piece,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr, ROUNDS: tl.constexpr, FEW: tl.constexpr,
    PACKETS: tl.constexpr,
):  # fmt: skip
    """Wait for the answers of all ranks to a token, and store their sum in rank order."""
    route, lane, within = tl.arange(0, WIDTH), tl.arange(0, LANES), peer * PART + tl.arange(0, PART)
    part = piece * BLOCK + within
    inside = (within < BLOCK) & (part < WORDS)
    id = tl.load(sent + token * TOP_K + route, mask=(route < TOP_K) & (token < tokens), other=-1)  # noqa: A001
    owner = tl.where(id >= 0, id // slots_per_rank, RANKS)
    mine = packets + token * PACKETS
    # poll the packets of all ranks at once, then load them rank by rank, to sum in rank order
    every = mine + lane[:, None] * (FEW * PACKETS) + part[None, :]
    asked = tl.max((owner[None, :] == lane[:, None]).to(tl.int32), axis=1) > 0
    asked = (asked & (lane < RANKS))[:, None] & inside[None, :]
    _await(every, asked, mine, number, lane, RANKS, WORDS, FEW, PACKETS)
    byte = tl.arange(0, 4)[None, :]
    low, high, four = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32), tl.zeros([PART, 4], tl.float32)
    for source in tl.static_range(RANKS):
        wanted = (tl.max((owner == source).to(tl.int32), axis=0) > 0) & inside
        packet = tl.load(mine + source * (FEW * PACKETS) + part, mask=wanted, other=0, volatile=True)
        if ROUNDS:
            four += tl.where(wanted[:, None], of_e4m3(packet.to(tl.int32)[:, None] >> (8 * byte)), 0.0)
        else:
            one, other = _numbers(packet.to(tl.int32), DTYPE)
            low, high = low + tl.where(wanted, one, 0.0), high + tl.where(wanted, other, 0.0)
    inside = inside & (token < tokens)
    if ROUNDS:
        tl.store(out + (token * WORDS + part[:, None]) * 4 + byte, four.to(DTYPE), mask=inside[:, None])
    else:
        tl.store(out + token * WORDS + part, _word(low, high, DTYPE), mask=inside)


@triton.jit
def _take_by_route(
    out, tokens, sent, sent_weights, packets, number, slots_per_rank, row, peer, piece,
    RANKS: tl.constexpr, ROUTES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    LANES: tl.constexpr, DTYPE: tl.constexpr, FEW: tl.constexpr, PACKETS: tl.constexpr,
):  # fmt: skip
    """Wait for the answers to a token's routes, and store their weighted sum in the order of routes.

    The programs of the token's rows (one row per route) share its words.
    """
    token = row // ROUTES
    route, lane = tl.arange(0, triton.next_power_of_2(ROUTES)), tl.arange(0, LANES)
    within = (row % ROUTES * RANKS + peer) * PART + tl.arange(0, PART)
    part = piece * BLOCK + within
    inside = (within < BLOCK) & (part < WORDS)
    first = token * ROUTES
    id = tl.load(sent + first + route, mask=(route < ROUTES) & (token < tokens), other=-1)  # noqa: A001
    at = tl.maximum(id, 0) // slots_per_rank * (FEW * PACKETS) + (first + route) * PACKETS
    asked = (id >= 0)[:, None] & inside[None, :]
    _await(
        packets + at[:, None] + part[None, :], asked, packets + row * PACKETS, number, lane, RANKS, WORDS, FEW, PACKETS
    )
    low, high = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    for k in tl.static_range(ROUTES):
        id = tl.load(sent + first + k, mask=token < tokens, other=-1)  # noqa: A001
        weight = tl.load(sent_weights + first + k, mask=token < tokens, other=0.0)
        at = tl.maximum(id, 0) // slots_per_rank * (FEW * PACKETS) + (first + k) * PACKETS
        packet = tl.load(packets + at + part, mask=inside & (id >= 0), other=0, volatile=True)
        one, other = _numbers(packet.to(tl.int32), DTYPE)
        low, high = low + one * weight, high + other * weight
    tl.store(out + token * WORDS + part, _word(low, high, DTYPE), mask=inside & (token < tokens))


@triton.jit
def _await(
    every, asked, mine, number, lane, RANKS: tl.constexpr, WORDS: tl.constexpr, FEW: tl.constexpr,
    PACKETS: tl.constexpr,
):  # fmt: skip
    """Wait for all packets in `asked`, and for the packet that each rank always sends for a row."""
    missing = 1
    while missing > 0:
        packet = tl.load(every, mask=asked, other=0, volatile=True)
        ready = tl.load(mine + lane * (FEW * PACKETS) + WORDS, mask=lane < RANKS, other=0, volatile=True)
        missing = still_missing(late_packets(packet, number, asked), any_of(late_packets(ready, number, lane < RANKS)))


@triton.jit
def _numbers(bits, DTYPE: tl.constexpr):
    """Unpack a word to float32: its two 16-bit numbers, or its one float32 number and 0.0."""
    if tl.float32 == DTYPE:
        low = bits.to(tl.float32, bitcast=True)
        high = tl.zeros_like(low)
    else:
        low = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    """Pack numbers to a word, the inverse of `_numbers`."""
    if tl.float32 == DTYPE:
        bits = low.to(tl.int32, bitcast=True)
    else:
        bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        bits |= high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits
