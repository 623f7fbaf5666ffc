"""Pairs of a received row and a local expert: sorted by expert before the products, summed up by row after them.

Nothing here allocates or waits for the device: the caller brings every output. launch: how kernels are launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_moe.experts.hopper import route_sort_triton as kernels
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.grids import cdiv, next_power_of_2
from ep_moe.runtime.launch_cache import Launch, at_once
from ep_moe.runtime.pdl import pdl_launch
from ep_moe.runtime.workspace import Shapes

# tuned on an H200
REDUCE_BLOCK, REDUCE_WARPS = 1024, 2
ALONE = 4096  # pairs up to which each program that sorts counts all of them itself, which spares two launches
CHUNK = 128  # pairs that a program sorts at once, beyond these
PROGRAMS = 1024  # that sort, at most


IdsReady = tuple[Tensor, Tensor]  # `types.WireIds.ids_ready` and `sequence`


@dataclass(frozen=True)
class Home:
    """The ranks that received rows came from, for a kernel that writes its rows there: `types.PeerRows` without its
    blocks.

    number, stride: of `types.PeerPackets`, for rows that go by packets; first: the number of a call's first row among
        all that were received"""

    addresses: Tensor
    offset: int
    bound: int
    rank: int
    number: Tensor | None = None
    stride: int = 0
    first: int = 0


@dataclass(frozen=True)
class Lists:
    """Pairs by expert, as `group_pairs` leaves them.

    source: int32 [N * K], the row of each; slots: int32 [N, K], where each route's pair is; ends: int32 [L], one past
    each expert's last
    """

    source: Tensor
    slots: Tensor
    ends: Tensor


def passes(rows: int, most: int, home: Home | None) -> list[tuple[slice, Home | None]]:
    """Received rows in parts of at most so many, and the home of each. The first one has this rank's own rows, so that
    not all ranks write to the same few at once."""
    parts = [slice(start, min(start + most, rows)) for start in range(0, rows, most)]
    if home is None:
        return [(part, None) for part in parts]
    turn = home.rank * home.bound // most
    return [(part, replace(home, first=part.start)) for part in parts[turn:] + parts[:turn]]


def reduce(
    y: Tensor, ids: Tensor, weights: Tensor | None, base: int, num_experts: int, out: Tensor, *,
    slots: Tensor | None = None, home: Home | None = None, soon: bool = False, launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[n] = the sum over k of weights[n, k] * y[n * K + k], in float32, k from 0 upwards, over the routes whose
    expert ids[n, k] - base is in 0 .. L - 1; zero where row n has none.

    y: bf16 or fp16 [M, H]; ids: int [N, K]; weights: float32 [N, K], None for ones, a route of weight 0 is none
    slots: int32 [N, K], a route's row is y[slots[n, k]] then, and below 0 for no route
    out: [N, H]; with a `home` only its dtype counts, E4M3 for sums that are rounded so, saturating at 448, and rows
        without any expert here are left as they are, but for the cell that comes for each
    soon: start before the kernel ahead has ended, and let the next one
    """
    rows, top_k = ids.shape
    size = out.shape[-1]
    if not rows:
        return
    block = min(REDUCE_BLOCK, next_power_of_2(size))
    # as many ranks as rows came from take turns, so that all links are busy all the time
    turns = 1 if home is None else max(1, min(len(home.addresses), rows // home.bound))
    to: tuple[Tensor | int | None, ...] = (None, 0, 1, 0, 0, None, 0)
    if home is not None:
        to = (home.addresses, home.offset, home.bound, home.first, home.rank, home.number, home.stride)
    launch(
        kernels.reduce, (turns * cdiv(rows, turns), cdiv(size, block)),
        y, ids, weights, slots, out.view(torch.uint8) if out.itemsize == 1 else out, *to, base, num_experts, rows, size,
        TOP_K=top_k, WEIGHTED=weights is not None, TURNS=turns, BLOCK=block, num_warps=REDUCE_WARPS,
        **pdl_launch(y.device, soon),
    )  # fmt: skip


def copy_rows(x: Tensor, slots: Tensor, out: Tensor, *, launch: Launch = at_once) -> None:
    """Each row of x into all rows of the output that `slots` names; the others are left as they are.

    x: [N, H]; slots: int32 [N, K], below 0 or at least M for none; out: [M, H]
    """
    rows, size = x.shape
    if not rows:
        return
    block = min(1024, next_power_of_2(size))
    grid = (rows, cdiv(size, block))
    launch(kernels.copy_rows, grid, x, slots, out, out.shape[0], size, TOP_K=slots.shape[1], BLOCK=block)


def group_workspace(num_pairs: int, num_experts: int) -> int:
    """How many int32 `group_pairs` needs to work."""
    return (cdiv(num_pairs, _pairs_per_program(num_pairs, PROGRAMS)) + 1) * num_experts if num_pairs > ALONE else 0


def list_shapes(num_pairs: int, num_experts: int) -> Shapes:
    """Of what `group_pairs` writes."""
    return {
        "source": ((num_pairs,), torch.int32),
        "slots": ((num_pairs,), torch.int32),
        "ends": ((num_experts,), torch.int32),
        "sorting": ((group_workspace(num_pairs, num_experts),), torch.int32),
    }


def _pairs_per_program(num_pairs: int, programs: int) -> int:
    return max(CHUNK, next_power_of_2(cdiv(num_pairs, programs)))


def list_pairs(
    own: dict[str, Tensor], ids: Tensor, weights: Tensor | None, base: int, num_experts: int, *, soon: bool = False,
    ids_ready: IdsReady | None = None, launch: Launch = at_once,
) -> Lists:  # fmt: skip
    """`group_pairs` into tensors of `list_shapes`."""
    lists = Lists(own["source"], own["slots"].view(ids.shape), own["ends"])
    group_pairs(
        ids, num_experts, lists.source, lists.slots, lists.ends, own["sorting"], base=base, weights=weights, soon=soon,
        ids_ready=ids_ready, launch=launch,
    )  # fmt: skip
    return lists


def group_pairs(
    ids: Tensor, num_experts: int, source_row: Tensor, slots: Tensor, ends: Tensor, workspace: Tensor, *,
    base: int = 0, weights: Tensor | None = None, soon: bool = False, ids_ready: IdsReady | None = None,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """Sort (row, expert) pairs by expert, pairs of one expert in their order. Always the same for the same ids.

    ids: int32 or int64 [N, K], an expert is ids - base, anything outside 0 .. L - 1 none
    weights: float32 [N, K]; a pair of weight 0 counts as none
    source_row: int32 [N * K], the row n of each sorted pair; beyond the last it is left as it is
    slots: int32 [N, K], where each pair went, -1 for none; ends: int32 [L], one past each expert's last pair
    workspace: int32 [group_workspace(N * K, L)], what it holds does not matter
    soon: start before the kernel ahead has ended, and let the next one, where one launch does it all
    ids_ready: of `types.WireIds`, if rows may still travel: one launch does it all, beside them
    """
    pairs, top_k = ids.numel(), ids.shape[1]
    if not pairs:
        ends.zero_()
        return
    lanes, ranks = next_power_of_2(num_experts), 1 if ids_ready is None else len(ids_ready[0])
    found, lists = (ids, weights, base), (source_row, slots, ends, pairs, num_experts, top_k)
    given = {"EXPERTS": lanes, "WEIGHTED": weights is not None}
    place = given | {"BLOCKS": max(1, min(128, 8192 // lanes)), "RANKS": ranks, "LANES": next_power_of_2(ranks)}
    most = max(16, 16384 // lanes)  # that a program can place at once
    if pairs <= ALONE:
        chunk = 16 if pairs <= 1024 else max(16, min(32, 8192 // lanes))
        launch(
            kernels.place_pairs, (cdiv(pairs, chunk),), *found, *(ids_ready or (None, None)), None, None, *lists,
            **place,
            PAIRS=chunk, CHUNK=chunk, ALL=next_power_of_2(pairs), num_warps=8,
            **pdl_launch(ids.device, soon or ids_ready is not None),
        )  # fmt: skip
    elif ids_ready is not None:
        # as many as run at once, since they wait for each other; in the interpreter one
        mine = _pairs_per_program(pairs, multiprocessors(ids.device) if ids.is_cuda else 1)
        launch(
            kernels.place_pairs, (cdiv(pairs, mine),), *found, *ids_ready, workspace, None, *lists, **place, PAIRS=mine,
            CHUNK=min(mine, most), ALL=0, num_warps=8, **pdl_launch(ids.device),
        )  # fmt: skip
    else:
        mine = _pairs_per_program(pairs, PROGRAMS)
        blocks = cdiv(pairs, mine)
        counts, totals = workspace[: blocks * num_experts], workspace[blocks * num_experts :]
        counted = (*found, counts, pairs, num_experts)
        launch(kernels.count_pairs, (blocks,), *counted, **given, PAIRS=mine, CHUNK=CHUNK)
        launch(kernels.sum_counts, (num_experts,), counts, totals, blocks, BLOCKS=next_power_of_2(blocks))
        launch(
            kernels.place_pairs, (blocks,), *found, None, None, counts, totals, *lists, **place, PAIRS=mine,
            CHUNK=min(CHUNK, most), ALL=0, **pdl_launch(ids.device, False),
        )  # fmt: skip
