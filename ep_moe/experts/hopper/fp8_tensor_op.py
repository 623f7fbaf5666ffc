"""The expert step in fp8 with one scale a matrix (`fp8_static`) as one torch operator on caller-owned memory."""

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


def shapes(routes: int, hidden: int, inner: int, slots: int, *, sort: bool = True) -> Shapes:
    """Scratch for received rows with so many routes in all. E4M3 rows lie in the room of y, which is written after they
    are read."""
    from ep_moe.experts.hopper.route_sort import list_shapes

    products: Shapes = {
        "scale": ((1,), torch.float32),
        "act": ((routes, inner), FP8),
        "y": ((routes, hidden), torch.bfloat16),
    }
    if not sort:
        return products
    return products | list_shapes(routes, slots)


def scratch_bytes(routes: int, hidden: int, inner: int, slots: int) -> int:
    return carved_bytes(shapes(routes, hidden, inner, slots))


@launching_operator("fp8_tensor_moe")
def fp8_tensor_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    input_scale: float | None,
    ids: Tensor,
    base: int,
    ids_ready: Tensor | None,
    sequence: Tensor | None,
    weights: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w13_input_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_input_scale: Tensor,
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
    """x: [N, H] in bf16, rounded here by the largest of w13_input_scale; or E4M3, rounded before by input_scale
    out: bf16 [N, H]; ids: int [N, K], local ones counted from `base`, others are none
    weights: float32 [N, K], None for 1, a route of weight 0 is none
    w13: E4M3 [L, 2 * I, H] ([L, I, H] without a gate); w2: E4M3 [L, H, I]; scales: float32 [L], value = number * scale

    expected: pairs per row that tiles are chosen for; chunk: routes of one pass
    spare_sms: multiprocessors that the large products leave free
    ids_ready, sequence: of `types.WireIds`
    peers to stride: of `route_sort.Home`, whose memory is written instead of `out` unless peers is None
    """
    from ep_moe.experts.hopper.route_sort import Home, passes

    matrices = (w13, w13_scale, w13_input_scale, w2, w2_scale, w2_input_scale)
    step = _Step(launch, workspace, *matrices, Activation(activation), alpha, limit, expected, spare_sms)
    home = None if peers is None else Home(peers, offset, bound, rank, number, stride)
    coming = None if ids_ready is None or sequence is None else (ids_ready, sequence)
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), home):
        found = (ids[part], None if weights is None else weights[part], base)
        step(out if to else out[part], to, x[part], input_scale, found, coming)
        coming = None  # what comes later is here by then


class _Step:
    """One call's weights and scratch memory."""

    def __init__(
        self, launch: Launch, workspace: Tensor, w13: Tensor, w13_scale: Tensor, w13_input_scale: Tensor, w2: Tensor,
        w2_scale: Tensor, w2_input_scale: Tensor, activation: Activation, alpha: float, limit: float, expected: float,
        spare_sms: int,
    ) -> None:  # fmt: skip
        self.launch, self.workspace, self.w13, self.w2 = launch, workspace, w13, w2
        self.w13_scale, self.w13_input_scale = w13_scale, w13_input_scale
        self.w2_scale, self.w2_input_scale = w2_scale, w2_input_scale
        self.how: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit, "launch": launch}
        self.expected, self.spare_sms = expected, spare_sms

    def __call__(
        self, out: Tensor, home: Home | None, x: Tensor, input_scale: float | None,
        found: tuple[Tensor, Tensor | None, int], coming: IdsReady | None,
    ) -> None:  # fmt: skip
        """found: ids [N, K], weights and base; coming: `ids_ready` of `group_pairs`"""
        from ep_moe.experts.hopper import gemm_grouped, gemm_skinny, gemm_streaming, route_sort
        from ep_moe.quant.fp8_tensor_kernels import MatrixScales, round_rows

        launch, (rows, top_k), (slots, hidden, inner) = self.launch, found[0].shape, self.w2.shape
        each = rows * self.expected / slots
        cut = gemm_skinny.TileConfig.of_matrices(rows * top_k, each)
        own = carve(self.workspace, shapes(rows * top_k, hidden, inner, slots, sort=cut is None))
        act, y = own["act"], own["y"]
        numbers = y.view(FP8).view(-1, hidden)
        scale = own["scale"] if input_scale is None else input_scale
        first: dict[str, Any] = self.how | {"scales": MatrixScales(scale, self.w13_scale, self.w2_input_scale)}
        second = MatrixScales(self.w2_input_scale, self.w2_scale)
        ring = gemm_streaming.ring_for(each, self.w13)
        if input_scale is None and (cut is not None or ring is not None):
            round_rows(x, self.w13_input_scale, numbers[:rows], own["scale"], launch=launch)
            x = numbers[:rows]
        if cut is not None:
            gemm_skinny.first_product(x, *found, self.w13, act, cut=cut.first, **first)
            gemm_skinny.second_product(act, *found, self.w2, y, cut.second, scales=second, launch=launch)
            route_sort.reduce(y, *found, slots, out, home=home, launch=launch)
            return
        soon = ring is not None  # weights are fetched while pairs are sorted
        lists = route_sort.list_pairs(own, *found, slots, soon=soon, ids_ready=coming, launch=launch)
        if ring is not None:
            gemm_streaming.product(x, self.w13, lists, act, ring, gather=True, **first)
            gemm_streaming.product(act, self.w2, lists, y, ring, scales=second, launch=launch)
        else:
            sorted_rows = numbers[: rows * top_k]
            if input_scale is None:
                round_rows(x, self.w13_input_scale, sorted_rows, own["scale"], lists.slots, launch=launch)
            else:
                route_sort.copy_rows(x, lists.slots, sorted_rows, launch=launch)
            spare, gemm = self.spare_sms, gemm_grouped.grouped_gemm
            tiles = [gemm_grouped.tiles_for(each, w, spare) for w in (self.w13, self.w2)]
            gemm(sorted_rows, self.w13, lists.ends, act, tiles[0], spare_sms=spare, **first)
            gemm(act, self.w2, lists.ends, y, tiles[1], spare_sms=spare, scales=second, launch=launch)
        route_sort.reduce(y, *found, slots, out, slots=lists.slots, home=home, soon=soon, launch=launch)
