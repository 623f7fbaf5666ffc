"""The steps of `nvlink_p2p.reference` in Triton, for calls without packets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import Workspace, answer_bytes, answer_dtype
from ep_moe.all2all.nvlink_p2p.signals import last_to_count, tell, wait
from ep_moe.placement.deferred import Placing, count_ids, place_ids, placement_arguments, tell_invalid
from ep_moe.quant.fp8 import SMALLEST, e4m3_blocks, e4m3_by, of_e4m3, to_e4m3
from ep_moe.runtime import devices
from ep_moe.runtime.devices import aligned
from ep_moe.runtime.launch_cache import LaunchSpec, cdiv, next_power_of_2, pdl_launch, pdl_trigger, pdl_wait
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.runtime.waiting import Waiting
from ep_moe.types import PhysicalRouting

_TILE, _TILES = 32, 8  # tokens per program and step that send ids; most programs of `announce`
_BLOCKS = 1056  # most programs of `receive`


def send(
    workspace: Workspace, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int, blocks: int, *,
    allow_pdl: bool = False,
) -> None:  # fmt: skip
    ids, tables, placing = placement_arguments(routing)
    x, ids, weights = aligned(x.contiguous()), ids.contiguous(), routing.weights.contiguous()
    changing = (x, None if x_scale is None else x_scale.contiguous(), ids, weights, *tables, len(x))
    key = ("send", bound, blocks, x.dtype, ids.dtype, x_scale is not None, placing, allow_pdl)
    workspace.launch_cache.launch(
        key, changing, partial(_send_spec, workspace, bound, blocks, changing, placing, allow_pdl)
    )


def _send_spec(
    workspace: Workspace, bound: int, blocks: int, given: tuple[Any, ...], placing: Placing, allow_pdl: bool
) -> LaunchSpec:
    g, at = workspace.dispatch_shape, workspace.offsets
    x, x_scale, *rest = given
    rounds = "" if x.dtype == g.row_dtype else g.wire.dispatch
    elements, scale_words = g.hidden_size if rounds else g.row_bytes // 4, g.scale_bytes // 4
    changing = (x if rounds else x.view(torch.int32), None if x_scale is None else x_scale.view(torch.int32), *rest)
    fixed = (
        placing.seed,
        placing.experts,
        g.wire.input_scale,
        workspace.memory.addresses,
        workspace.local_tensors["flags"],
        workspace.sequence,
        workspace.sent_ids,
        workspace.sent_weights,
        at["rows"],
        at["scales"],
        at["ids"],
        at["weights"],
        at["flags"],
        bound,
        g.num_physical,
        g.slots_per_rank,
    )
    choosers = max(1, min(cdiv(bound, _TILE), blocks // 8))
    constants = {
        "MOST": placing.most,
        "CHOOSERS": choosers,
        "TILE": _TILE,
        "RANK": workspace.rank,
        "RANKS": g.num_ranks,
        "LANES": next_power_of_2(g.num_ranks),
        "TOP_K": g.top_k,
        "WIDTH": next_power_of_2(g.top_k),
        "ELEMENTS": elements,
        "BLOCK": next_power_of_2(elements),
        "SCALES": scale_words,
        "SCALE_BLOCK": next_power_of_2(max(scale_words, 1)),
        "ROUNDS": rounds,
        "SMALLEST": SMALLEST,
        "PDL": allow_pdl and devices.supports_pdl(x.device),
        "num_warps": 8 if g.row_bytes > 4096 else 4,
    }
    # rounding adds latency to each row, which more programs hide
    programs = choosers + min(bound, 4 * blocks if rounds else blocks)
    return LaunchSpec(_send, (programs,), changing, fixed, constants)


@Waiting
@triton.jit(do_not_specialize=["invalid", "tokens"])
def _send(
    x, x_scale, ids, weights, replicas, counts, expert_load, slot_load, counting, invalid, tokens, seed, experts,
    input_scale, peers, flags, sequence, sent, sent_weights, rows_at, scales_at, ids_at, weights_at, flags_at, bound,
    num_physical, slots_per_rank,
    MOST: tl.constexpr, CHOOSERS: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, ROUNDS: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Send ids, weights and rows to the peers, then wait for theirs.

    The first CHOOSERS programs send ids and weights, and set their flag. The other programs send rows. Both map logical
    to physical ids if MOST is not 0.

    x: rows of ELEMENTS: 4-byte words in the wire format, or plain numbers that are rounded to bytes. Scales are words
    replicas to invalid, seed, experts: as `placement_arguments` returns them
    """
    pdl_trigger(PDL)
    program, blocks = tl.program_id(0), tl.num_programs(0)
    if program < CHOOSERS:
        _send_ids(
            ids, weights, replicas, counts, expert_load, slot_load, counting, invalid, tokens, seed, experts, peers,
            sequence, sent, sent_weights, ids_at, weights_at, flags_at, bound, num_physical, CHOOSERS, MOST, TILE,
            RANK, RANKS, LANES, TOP_K, WIDTH,
        )  # fmt: skip
    else:
        _send_rows(
            x, x_scale, ids, replicas, counts, tokens, seed, experts, input_scale, peers, rows_at, scales_at, bound,
            num_physical, slots_per_rank, program - CHOOSERS, blocks - CHOOSERS, MOST, RANK, RANKS, TOP_K, WIDTH,
            ELEMENTS, BLOCK,
            SCALES, SCALE_BLOCK, ROUNDS, SMALLEST,
        )  # fmt: skip
    _meet(peers, flags, sequence, flags_at + 4 * RANK, blocks, RANKS, LANES)


@triton.jit
def _send_ids(
    ids, weights, replicas, counts, expert_load, slot_load, counting, invalid, tokens, seed, experts, peers, sequence,
    sent, sent_weights, ids_at, weights_at, flags_at, bound, num_physical, programs,
    MOST: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Send ids and weights to all peers. The last of the programs that do this sets the flag IDS_SENT on each peer."""
    route = tl.arange(0, WIDTH)[None]
    for first in range(tl.program_id(0) * TILE, bound, programs * TILE):
        token = (first + tl.arange(0, TILE)).to(tl.int64)[:, None]
        place = RANK * tl.cast(bound, tl.int64) + token
        inside, present = (route < TOP_K) & (token < bound), token < tokens
        id = tl.load(ids + token * TOP_K + route, mask=inside & present, other=-1)  # noqa: A001
        weight = tl.load(weights + token * TOP_K + route, mask=inside & present, other=0.0)
        if MOST:
            logical, counted = id, tl.load(counting) != 0
            id, known = place_ids(logical, token, replicas, counts, experts, seed, MOST)  # noqa: A001
            id = tl.where(known, id, -1)  # noqa: A001
        valid = (id >= 0) & (id < num_physical)
        tl.store(sent + token * TOP_K + route, tl.where(valid, id, -1).to(tl.int32), mask=inside)
        if sent_weights is not None:
            tl.store(sent_weights + token * TOP_K + route, tl.where(valid, weight, 0.0), mask=inside)
        for turn in tl.static_range(RANKS):
            base = tl.multiple_of(tl.load(peers + (RANK + turn) % RANKS), 16)
            their_ids = (base + ids_at).to(tl.pointer_type(tl.int32))
            their_weights = (base + weights_at).to(tl.pointer_type(tl.float32))
            tl.store(their_ids + place * TOP_K + route, tl.where(valid, id, -1).to(tl.int32), mask=inside)
            tl.store(their_weights + place * TOP_K + route, tl.where(valid, weight, 0.0), mask=inside)
        if MOST:
            tell_invalid(logical, known, invalid)
            count_ids(logical, id, known & counted, expert_load, slot_load)
    if last_to_count(sequence + 4, programs):
        tell(peers, flags_at + 4 * (2 * RANKS + RANK), tl.load(sequence + 2) + 1, RANKS, LANES)


@triton.jit
def _send_rows(
    x, x_scale, ids, replicas, counts, tokens, seed, experts, input_scale, peers, rows_at, scales_at, bound,
    num_physical, slots_per_rank, program, programs,
    MOST: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Send each row to the peers that hold one of its experts."""
    route, element, step = tl.arange(0, WIDTH), tl.arange(0, BLOCK), tl.arange(0, SCALE_BLOCK)
    for token in range(program, tokens, programs):
        at = tl.cast(token, tl.int64)
        id = tl.load(ids + at * TOP_K + route, mask=route < TOP_K, other=-1)  # noqa: A001
        if MOST:
            id, known = place_ids(id, at, replicas, counts, experts, seed, MOST)  # noqa: A001
            id = tl.where(known, id, -1)  # noqa: A001
        owner = tl.where((id >= 0) & (id < num_physical), (id // slots_per_rank).to(tl.int32), RANKS)
        row = tl.load(x + at * ELEMENTS + element, mask=element < ELEMENTS, other=0)
        if ROUNDS == "fp8_tensor":
            row = e4m3_by(row.to(tl.float32), input_scale)
        elif ROUNDS != "":
            row, scale = e4m3_blocks(tl.reshape(row.to(tl.float32), [SCALE_BLOCK, BLOCK // SCALE_BLOCK]), SMALLEST)
            row, scale = tl.reshape(row, [BLOCK]).to(tl.uint8, bitcast=True), scale.to(tl.int32, bitcast=True)
        elif SCALES:
            scale = tl.load(x_scale + at * SCALES + step, mask=step < SCALES)
        place = RANK * tl.cast(bound, tl.int64) + token
        for turn in tl.static_range(RANKS):
            peer = (RANK + token + turn) % RANKS  # spreads the ranks' writes over the peers' links
            if tl.max((owner == peer).to(tl.int32), axis=0) > 0:
                base = tl.multiple_of(tl.load(peers + peer), 16)
                their_rows = tl.multiple_of((base + rows_at).to(tl.pointer_type(row.dtype)), 16)
                tl.store(their_rows + place * ELEMENTS + element, row, mask=element < ELEMENTS)
                if SCALES:
                    their_scales = (base + scales_at).to(tl.pointer_type(tl.int32))
                    tl.store(their_scales + place * SCALES + step, scale, mask=step < SCALES)


def announce(workspace: Workspace, x_scale: Tensor | None, routing: PhysicalRouting, bound: int) -> None:
    routing = routing.materialize()
    ids, weights = routing.ids.contiguous(), routing.weights.contiguous()
    changing = (None if x_scale is None else x_scale.contiguous(), ids, weights, len(ids))
    key = ("announce", bound, ids.dtype, x_scale is None)
    workspace.launch_cache.launch(key, changing, partial(_announce_spec, workspace, bound, changing))


def _announce_spec(workspace: Workspace, bound: int, given: tuple[Any, ...]) -> LaunchSpec:
    g, at = workspace.dispatch_shape, workspace.offsets
    x_scale, *rest = given
    changing = (None if x_scale is None else x_scale.view(torch.int32), *rest)
    fixed = (
        workspace.memory.addresses,
        workspace.local_tensors["flags"],
        workspace.sequence,
        workspace.sent_ids,
        workspace.sent_weights,
        at["scales"],
        at["ids"],
        at["weights"],
        at["flags"],
        bound,
        g.num_physical,
    )
    constants = {
        "RANK": workspace.rank,
        "RANKS": g.num_ranks,
        "LANES": next_power_of_2(g.num_ranks),
        "TOP_K": g.top_k,
        "WIDTH": next_power_of_2(g.top_k),
        "SCALES": g.scale_bytes // 4,
        "SCALE_BLOCK": next_power_of_2(max(g.scale_bytes // 4, 1)),
        "TILE": _TILE,
    }
    return LaunchSpec(_announce, (min(cdiv(bound, _TILE), _TILES),), changing, fixed, constants)


@Waiting
@triton.jit(do_not_specialize=["tokens"])
def _announce(
    x_scale, ids, weights, tokens, peers, flags, sequence, sent, sent_weights, scales_at, ids_at, weights_at, flags_at,
    bound, num_physical,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0)
    _send_ids(
        ids, weights, None, None, None, None, None, None, tokens, None, None, peers, sequence, sent, sent_weights,
        ids_at, weights_at, flags_at, bound, num_physical, blocks, 0, TILE, RANK, RANKS, LANES, TOP_K, WIDTH,
    )  # fmt: skip
    if SCALES:
        step = tl.arange(0, SCALE_BLOCK)[None]
        for first in range(tl.program_id(0) * TILE, tokens, blocks * TILE):
            token = (first + tl.arange(0, TILE)).to(tl.int64)[:, None]
            place = RANK * tl.cast(bound, tl.int64) + token
            given = (step < SCALES) & (token < tokens)
            scale = tl.load(x_scale + token * SCALES + step, mask=given)
            for peer in tl.static_range(RANKS):
                base = tl.multiple_of(tl.load(peers + peer), 16)
                their_scales = (base + scales_at).to(tl.pointer_type(tl.int32))
                tl.store(their_scales + place * SCALES + step, scale, mask=given)
    _meet(peers, flags, sequence, flags_at + 4 * RANK, blocks, RANKS, LANES)


@triton.jit
def _meet(peers, flags, sequence, place, blocks, RANKS: tl.constexpr, LANES: tl.constexpr):
    """In the last program of the grid, set the flag ROWS_SENT on the peers, and wait for theirs."""
    if last_to_count(sequence + 1, blocks):
        number = tl.load(sequence + 2) + 1
        tl.store(sequence, number)
        tell(peers, place, number, RANKS, LANES)
        wait(flags, number, RANKS, LANES)


def signal_answers_written(workspace: Workspace) -> None:
    def make_spec() -> LaunchSpec:
        ranks = workspace.dispatch_shape.num_ranks
        place = workspace.offsets["flags"] + 4 * (ranks + workspace.rank)
        constants = {"RANKS": ranks, "LANES": next_power_of_2(ranks), "num_warps": 1}
        return LaunchSpec(_tell_given, (1,), (), (workspace.memory.addresses, workspace.sequence, place), constants)

    workspace.launch_cache.launch("signal answers written", (), make_spec)


@triton.jit
def _tell_given(peers, sequence, place, RANKS: tl.constexpr, LANES: tl.constexpr):
    tell(peers, place, tl.load(sequence), RANKS, LANES)


def send_answers(workspace: Workspace, bound: int) -> None:
    workspace.launch_cache.launch(("send answers", bound), (), partial(_give_spec, workspace, bound))


def _give_spec(workspace: Workspace, bound: int) -> LaunchSpec:
    g, tensors = workspace.dispatch_shape, workspace.local_tensors
    rounds = answer_dtype(g) != g.dtype
    numbers = g.hidden_size if rounds else answer_bytes(g) // 4
    fixed = (
        tensors["answers"] if rounds else tensors["answers"].view(torch.int32),
        tensors["ids"],
        workspace.memory.addresses,
        workspace.offsets["arrived"],
        bound * g.returned,
        g.slots_per_rank,
    )
    constants = {
        "RANK": workspace.rank,
        "RANKS": g.num_ranks,
        "TOP_K": g.top_k // g.returned,
        "WIDTH": next_power_of_2(g.top_k // g.returned),
        "NUMBERS": numbers,
        "BLOCK": next_power_of_2(numbers),
        "ROUNDS": rounds,
        "num_warps": 8 if answer_bytes(g) > 4096 else 4,
    }
    return LaunchSpec(_give, (g.num_ranks * bound * g.returned,), (), fixed, constants)


@triton.jit
def _give(
    answers, ids, peers, arrived_at, bound, slots_per_rank,
    RANK: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write one answer per program to the rank of its token, as words or as numbers that are rounded to bytes.

    Consecutive programs write to different peers, so all links are busy.
    """
    peer, token = (tl.program_id(0) + RANK) % RANKS, tl.program_id(0) // RANKS
    route, at = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    place = peer * tl.cast(bound, tl.int64) + token
    id = tl.load(ids + place * TOP_K + route, mask=route < TOP_K, other=-1)  # noqa: A001
    answer = tl.load(answers + place * NUMBERS + at, mask=at < NUMBERS)  # overlaps the load of ids
    if ROUNDS:
        answer = to_e4m3(answer.to(tl.float32))
    wanted = tl.max(((id >= 0) & (id // slots_per_rank == RANK)).to(tl.int32), axis=0) > 0
    theirs = tl.multiple_of((tl.load(peers + peer) + arrived_at).to(tl.pointer_type(answer.dtype)), 16)
    row = RANK * tl.cast(bound, tl.int64) + token
    tl.store(theirs + row * NUMBERS + at, answer, mask=(at < NUMBERS) & wanted)


def receive(workspace: Workspace, out: Tensor, bound: int, *, signal_first: bool) -> None:
    make_spec = partial(_receive_spec, workspace, out, bound, signal_first)
    workspace.launch_cache.launch(("receive", bound, signal_first), (out, len(out)), make_spec)


def _receive_spec(workspace: Workspace, out: Tensor, bound: int, signal_first: bool) -> LaunchSpec:
    g, arrived = workspace.dispatch_shape, workspace.local_tensors["arrived"]
    fixed = (
        arrived if answer_dtype(g) == g.dtype else arrived.view(torch.uint8),
        workspace.sent_ids,
        workspace.sent_weights,
        workspace.memory.addresses,
        workspace.local_tensors["flags"][1],
        workspace.sequence,
        workspace.offsets["flags"] + 4 * g.num_ranks,
        bound,
        g.slots_per_rank,
    )
    constants = {
        "TELL": signal_first,
        "RANK": workspace.rank,
        "RANKS": g.num_ranks,
        "LANES": next_power_of_2(g.num_ranks),
        "TOP_K": g.top_k,
        "WIDTH": next_power_of_2(g.top_k),
        "HIDDEN": g.hidden_size,
        "BLOCK": next_power_of_2(g.hidden_size),
        "num_warps": 8 if g.hidden_size > 2048 else 4,
        **({"enable_fp_fusion": False} if g.per_route else {}),  # products are rounded before they are added
        **pdl_launch(out.device),
    }
    return LaunchSpec(_receive, (min(bound, _BLOCKS),), (out, len(out)), fixed, constants)


@Waiting
@triton.jit(do_not_specialize=["tokens"])
def _receive(
    out, tokens, arrived, sent, sent_weights, peers, flags, sequence, flags_at, bound, slots_per_rank,
    TELL: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    number = tl.load(sequence)
    if tl.program_id(0) == 0:
        tl.store(sequence + 2, number)
        if TELL:
            tell(peers, flags_at + 4 * RANK, number, RANKS, LANES)
    wait(flags, number, RANKS, LANES)
    route, column = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        if sent_weights is None:
            id = tl.load(sent + at * TOP_K + route, mask=route < TOP_K, other=-1)  # noqa: A001
            owner = tl.where(id >= 0, id // slots_per_rank, RANKS)
            for peer in tl.static_range(RANKS):
                wanted = tl.max((owner == peer).to(tl.int32), axis=0) > 0
                row = peer * tl.cast(bound, tl.int64) + token
                answer = tl.load(arrived + row * HIDDEN + column, mask=(column < HIDDEN) & wanted, other=0)
                total += of_e4m3(answer) if arrived.dtype.element_ty == tl.uint8 else answer.to(tl.float32)
        else:  # a row for each route
            for k in tl.static_range(TOP_K):
                place = at * TOP_K + k
                id = tl.load(sent + place)  # noqa: A001
                row = tl.maximum(id, 0) // slots_per_rank * tl.cast(bound, tl.int64) * TOP_K + place
                answer = tl.load(arrived + row * HIDDEN + column, mask=(column < HIDDEN) & (id >= 0), other=0)
                total += answer.to(tl.float32) * tl.load(sent_weights + place)
        tl.store(out + at * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
