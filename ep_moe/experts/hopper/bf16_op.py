"""The bf16 expert step as one torch operator on caller-owned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ep_moe.experts.hopper.operator import launching_operator
from ep_moe.runtime.launch_cache import Launch
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes
from ep_moe.types import Activation

if TYPE_CHECKING:
    from ep_moe.experts.hopper.route_sort import Home, IdsReady

BF16 = torch.bfloat16


def shapes(routes: int, hidden: int, inner: int, slots: int, *, sort: bool = True) -> Shapes:
    """Scratch for received rows with so many routes in all."""
    from ep_moe.experts.hopper.route_sort import list_shapes

    products: Shapes = {"act": ((routes, inner), BF16), "y": ((routes, hidden), BF16)}
    if not sort:
        return products
    return products | list_shapes(routes, slots)


def scratch_bytes(routes: int, hidden: int, inner: int, slots: int) -> int:
    return carved_bytes(shapes(routes, hidden, inner, slots))


@launching_operator("bf16_moe")
def bf16_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    ids: Tensor,
    base: int,
    ids_ready: Tensor | None,
    sequence: Tensor | None,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    expected: float,
    chunk: int,
    spare_sms: int,
    peers: Tensor | None,
    offset: int,
    bound: int,
    rank: int,
    number: Tensor | None,
    stride: int,
) -> None:
    """x, out: bf16 [N, H]; ids: int [N, K], local ones counted from `base`, others are none; weights: float32 [N, K],
    None for 1, a route of weight 0 is none; w13: bf16 [L, 2 * I, H] ([L, I, H] without a gate), w2: bf16 [L, H, I]

    expected: pairs per row that tiles are chosen for; chunk: routes of one pass
    spare_sms: multiprocessors that the large products leave free
    ids_ready, sequence: of `types.WireIds`
    peers to stride: of `route_sort.Home`, whose memory is written instead of `out` unless peers is None
    """
    from ep_moe.experts.hopper.route_sort import Home, passes

    home = None if peers is None else Home(peers, offset, bound, rank, number, stride)
    coming = None if ids_ready is None or sequence is None else (ids_ready, sequence)
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), home):
        found = (ids[part], None if weights is None else weights[part], base)
        _pass(
            launch, out if to else out[part], to, workspace, x[part], found, coming, w13, w2, Activation(activation),
            alpha, limit, expected, spare_sms,
        )  # fmt: skip
        coming = None  # what comes later is here by then


def _pass(
    launch: Launch, out: Tensor, home: Home | None, workspace: Tensor, x: Tensor,
    found: tuple[Tensor, Tensor | None, int], coming: IdsReady | None, w13: Tensor, w2: Tensor, activation: Activation,
    alpha: float, limit: float, expected: float, spare_sms: int,
) -> None:  # fmt: skip
    """found: ids, weights and base; coming: `ids_ready` of `group_pairs`"""
    from ep_moe.experts.hopper import gemm_grouped, gemm_skinny, gemm_streaming, route_sort

    rows, top_k = found[0].shape
    slots, hidden, inner = w2.shape
    each = rows * expected / slots
    how: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit, "launch": launch}
    cut = gemm_skinny.TileConfig.of(rows * top_k, each)
    own = carve(workspace, shapes(rows * top_k, hidden, inner, slots, sort=cut is None))
    act, y = own["act"], own["y"]
    if cut is not None:
        gemm_skinny.first_product(x, *found, w13, act, cut=cut.first, **how)
        gemm_skinny.second_product(act, *found, w2, y, cut.second, launch=launch)
        route_sort.reduce(y, *found, slots, out, home=home, launch=launch)
        return
    ring = gemm_streaming.ring_for(each, w13)
    soon = ring is not None  # weights are fetched while pairs are sorted
    lists = route_sort.list_pairs(own, *found, slots, soon=soon, ids_ready=coming, launch=launch)
    if ring is not None:
        gemm_streaming.product(x, w13, lists, act, ring, gather=True, **how)
        gemm_streaming.product(act, w2, lists, y, ring, launch=launch)
    else:
        first, second = (gemm_grouped.tiles_for(each, w, spare_sms) for w in (w13, w2))
        # in the room of y, which is written after they are read
        route_sort.copy_rows(x, lists.slots, y, launch=launch)
        gemm_grouped.grouped_gemm(y, w13, lists.ends, act, first, spare_sms=spare_sms, **how)
        gemm_grouped.grouped_gemm(act, w2, lists.ends, y, second, spare_sms=spare_sms, launch=launch)
    route_sort.reduce(y, *found, slots, out, slots=lists.slots, home=home, soon=soon, launch=launch)
