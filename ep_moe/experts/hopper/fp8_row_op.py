"""The expert step in fp8 with one scale a matrix and one a row as one torch operator on caller-owned memory."""

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

FP8 = torch.float8_e4m3fn


def shapes(routes: int, hidden: int, inner: int, slots: int) -> Shapes:
    """Scratch for received rows with so many routes in all. E4M3 rows lie in the room of y, which is written after they
    are read."""
    from ep_moe.experts.hopper.route_sort import list_shapes

    return {
        "row_scale": ((routes,), torch.float32),
        "act": ((routes, inner), torch.bfloat16),
        "act_numbers": ((routes, inner), FP8),
        "act_scale": ((routes,), torch.float32),
        "y": ((routes, hidden), torch.bfloat16),
    } | list_shapes(routes, slots)


def scratch_bytes(routes: int, hidden: int, inner: int, slots: int) -> int:
    return carved_bytes(shapes(routes, hidden, inner, slots))


@launching_operator("fp8_row_moe")
def fp8_row_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    base: int,
    ids_ready: Tensor | None,
    sequence: Tensor | None,
    weights: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
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
    """x: bf16 [N, H], or E4M3 with x_scale, float32 [N, 1]; out: bf16 [N, H]
    ids: int [N, K], local ones counted from `base`, others are none
    weights: float32 [N, K], None for 1, a route of weight 0 is none
    w13: E4M3 [L, 2 * I, H] ([L, I, H] without a gate); w2: E4M3 [L, H, I]
    w13_scale, w2_scale: float32 [L, rows / 128, columns / 128], of which a matrix's are all the same

    The rest as in `fp8_tensor_moe`.
    """
    from ep_moe.experts.hopper.route_sort import Home, passes

    home = None if peers is None else Home(peers, offset, bound, rank, number, stride)
    coming = None if ids_ready is None or sequence is None else (ids_ready, sequence)
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), home):
        found = (ids[part], None if weights is None else weights[part], base)
        came = (x[part], None if x_scale is None else x_scale[part])
        how = {"activation": Activation(activation), "alpha": alpha, "limit": limit}
        matrices = (w13, w13_scale, w2, w2_scale)
        _pass(launch, out if to else out[part], to, workspace, came, found, coming, matrices, how, expected, spare_sms)
        coming = None  # what comes later is here by then


def _pass(
    launch: Launch, out: Tensor, home: Home | None, workspace: Tensor, came: tuple[Tensor, Tensor | None],
    found: tuple[Tensor, Tensor | None, int], coming: IdsReady | None, matrices: tuple[Tensor, Tensor, Tensor, Tensor],
    how: dict[str, Any], expected: float, spare_sms: int,
) -> None:  # fmt: skip
    """came: x and x_scale; found: ids [N, K], weights and base; coming: `ids_ready` of `group_pairs`; how: of the first
    product"""
    from ep_moe.experts.hopper import gemm_skinny, gemm_streaming, route_sort
    from ep_moe.experts.hopper.gemm_grouped import grouped_gemm, tiles_for
    from ep_moe.quant.fp8_row_kernels import RowScales, round_rows

    (x, x_scale), (w13, w13_scale, w2, w2_scale) = came, matrices
    routes, (slots, hidden, inner) = found[0].numel(), w2.shape
    each = len(x) * expected / slots
    cut, ring = gemm_skinny.TileConfig.of_rows(routes, each), gemm_streaming.ring_for(each, w13)
    own = carve(workspace, shapes(routes, hidden, inner, slots))
    act, y, row_scale = own["act"], own["y"], own["row_scale"]
    numbers = y.view(FP8).view(-1, hidden)[:routes]
    if x_scale is None and (cut is not None or ring is not None):
        whole, x, x_scale = x, numbers[: len(x)], row_scale[: len(x)]
        round_rows(whole, x, x_scale, launch=launch)
    if cut is not None:
        assert x_scale is not None
        first = RowScales(x_scale, w13_scale[:, 0, 0])
        gemm_skinny.first_product(x, *found, w13, act, cut=cut.first, scales=first, **how, launch=launch)
        gemm_skinny.second_product(act, *found, w2, y, cut.second, w2_scale=w2_scale, launch=launch)
        route_sort.reduce(y, *found, slots, out, home=home, launch=launch)
        return
    soon = ring is not None  # weights are fetched while pairs are sorted, and while what is between is rounded
    lists = route_sort.list_pairs(own, *found, slots, soon=soon, ids_ready=coming, launch=launch)
    if ring is None:
        round_rows(x, numbers, row_scale, x_scale=x_scale, slots=lists.slots, launch=launch)
        x, x_scale = numbers, row_scale

    def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, to: Tensor, **more: Any) -> None:
        scales = RowScales(a_scale, b_scale[:, 0, 0])
        if ring is not None:
            gemm_streaming.product(a, b, lists, to, ring, gather=b is w13, scales=scales, launch=launch, **more)
        else:
            tiles = tiles_for(each, b, spare_sms)
            grouped_gemm(a, b, lists.ends, to, tiles, spare_sms=spare_sms, scales=scales, launch=launch, **more)

    assert x_scale is not None
    multiply(x, x_scale, w13, w13_scale, act, **how)
    round_rows(act, own["act_numbers"], own["act_scale"], counts=lists.ends[-1:], soon=soon, launch=launch)
    multiply(own["act_numbers"], own["act_scale"], w2, w2_scale, y)
    route_sort.reduce(y, *found, slots, out, slots=lists.slots, home=home, soon=soon, launch=launch)
