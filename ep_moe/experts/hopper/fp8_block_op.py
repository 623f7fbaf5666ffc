"""The fp8 128 x 128 expert step as one torch operator on caller-owned memory, for every row layout."""

from __future__ import annotations

import dataclasses
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
BLOCK = 128


def shapes(pairs: int, rows: int, hidden: int, w13_rows: int, inner: int, slots: int, dtype: torch.dtype) -> Shapes:
    """Scratch for `pairs` (row, expert) pairs. rows: RANK_MAJOR rows, which are sorted and reduced, 0 for others."""
    found: Shapes = {
        "rows": ((pairs, hidden), FP8),
        "row_scale": ((pairs, hidden // BLOCK), torch.float32),
        "h": ((pairs, w13_rows), dtype),
        "act": ((pairs, inner), FP8),
        "act_scale": ((pairs, inner // BLOCK), torch.float32),
        "starts": ((slots,), torch.int32),
        "ends": ((slots,), torch.int32),
    }
    if rows:
        from ep_moe.experts.hopper.route_sort import list_shapes

        found |= {"y": ((pairs, hidden), dtype)} | list_shapes(pairs, slots)
    return found


def scratch_bytes(pairs: int, rows: int, hidden: int, w13_rows: int, inner: int, slots: int, dtype: torch.dtype) -> int:
    return carved_bytes(shapes(pairs, rows, hidden, w13_rows, inner, slots, dtype))


@launching_operator("fp8_block_moe")
def fp8_block_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    dtype: torch.dtype,
    ids: Tensor | None,
    base: int,
    ids_ready: Tensor | None,
    sequence: Tensor | None,
    weights: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
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
    """x, out: [N, H]; x_scale: float32 [N, H / 128] of rows in E4M3, of any strides, else None
    dtype: of the layer, and of plain rows

    Either ids (int [N, K], local ones counted from `base`, others are none) and weights (float32 [N, K], None for 1; a
    route of weight 0 is none), or starts and ends (int32 [L], each expert's rows) and weights (float32 [N] or None).

    expected: pairs per row that a kernel's tile is chosen for; chunk: pairs of one pass
    spare_sms: multiprocessors that the products leave free
    ids_ready, sequence: of `types.WireIds`
    peers to stride: of `route_sort.Home`, whose memory is written instead of `out` unless peers is None;
        with ids only
    """
    step = _Step(launch, workspace, dtype, w13, w13_scale, w2, w2_scale, activation, alpha, limit, spare_sms)
    if ids is None:
        assert starts is not None
        assert ends is not None
        for start in range(0, len(x), chunk):
            part = slice(start, min(start + chunk, len(x)))
            step.grouped(x[part], _part(x_scale, part), starts, ends, start, out[part], expected)
        if weights is not None:
            out.mul_(weights.unsqueeze(1))
        return
    from ep_moe.experts.hopper.route_sort import Home, passes

    home = None if peers is None else Home(peers, offset, bound, rank, number, stride)
    coming = None if ids_ready is None or sequence is None else (ids_ready, sequence)
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), home):
        found = (ids[part], _part(weights, part), base)
        step.rank_major(x[part], _part(x_scale, part), found, coming, out if to else out[part], to, expected)
        coming = None  # what comes later is here by then


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


class _Step:
    """One call's weights and scratch memory."""

    def __init__(
        self,
        launch: Launch,
        workspace: Tensor,
        dtype: torch.dtype,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        activation: str,
        alpha: float,
        limit: float,
        spare_sms: int,
    ) -> None:
        self.launch, self.workspace, self.dtype, self.spare_sms = launch, workspace, dtype, spare_sms
        self.w13, self.w13_scale, self.w2, self.w2_scale = w13, w13_scale, w2, w2_scale
        self.activation, self.alpha, self.limit = Activation(activation), alpha, limit

    def _carve(self, pairs: int, rows: int) -> dict[str, Tensor]:
        slots, hidden, inner = self.w2.shape
        return carve(self.workspace, shapes(pairs, rows, hidden, self.w13.shape[1], inner, slots, self.dtype))

    def grouped(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        starts: Tensor,
        ends: Tensor,
        first: int,
        out: Tensor,
        expected: float,
    ) -> None:
        """Rows that are grouped already; `first` is the number of x's first row."""
        from ep_moe.experts.hopper import gemm_fp8_block as kernels

        own = self._carve(len(x), 0)
        for name, bounds in (("starts", starts), ("ends", ends)):
            own[name].copy_(bounds).sub_(first).clamp_(0, len(x))
        if x_scale is None:
            kernels.quantize_rows(x, own["rows"], own["row_scale"], launch=self.launch)
        else:
            own |= {"rows": x, "row_scale": x_scale.contiguous()}
        self._matrices(own, own["starts"], None, out, len(x) * expected)

    def rank_major(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        found: tuple[Tensor, Tensor | None, int],
        coming: IdsReady | None,
        out: Tensor,
        home: Home | None,
        expected: float,
    ) -> None:
        """found: ids, weights and base; coming: `ids_ready` of `group_pairs`"""
        from ep_moe.experts.hopper import gemm_fp8_block as kernels
        from ep_moe.experts.hopper import gemm_skinny, route_sort

        launch, pairs, slots = self.launch, found[0].numel(), len(self.w2)
        own = self._carve(pairs, len(x))
        cut = gemm_skinny.TileConfig.of_blocks(pairs, len(x) * expected / slots, x.shape[1], self.w2.numel())
        if cut is not None and not cut.sort:
            self._few(own, x, x_scale, found, cut, None)
            route_sort.reduce(own["y"], *found, slots, out, home=home, launch=launch)
            return
        lists = route_sort.list_pairs(own, *found, slots, ids_ready=coming, launch=launch)
        if cut is not None:
            self._few(own, x, x_scale, found, cut, lists)
            route_sort.reduce(own["y"], *found, slots, out, slots=lists.slots, home=home, launch=launch)
            return
        counts = own["ends"][-1:]
        if x_scale is None:
            kernels.quantize_pairs(x, lists.slots, own["rows"], own["row_scale"], launch=launch)
        else:
            kernels.copy_pairs(x, x_scale, lists.slots, own["rows"], own["row_scale"], launch=launch)
        self._matrices(own, None, counts, own["y"], len(x) * expected)
        route_sort.reduce(own["y"], *found, slots, out, slots=lists.slots, home=home, launch=launch)

    def _few(
        self,
        own: dict[str, Tensor],
        x: Tensor,
        x_scale: Tensor | None,
        found: tuple[Tensor, Tensor | None, int],
        cut: Any,
        lists: Any,
    ) -> None:
        """Both products of few rows. cut: `gemm_skinny.TileConfig`; lists: `route_sort.Lists` or None"""
        from ep_moe.experts.hopper import gemm_fp8_block as kernels
        from ep_moe.experts.hopper import gemm_skinny

        if x_scale is None:
            x, x_scale, whole = own["rows"][: len(x)], own["row_scale"][: len(x)], x
            kernels.quantize_rows(whole, x, x_scale, launch=self.launch)
        act = own["h"].view(-1)[: found[0].numel() * self.w2.shape[2]].view(-1, self.w2.shape[2])
        gemm_skinny.first_product(
            x, *found, self.w13, act, self.activation, cut.first, lists=lists, alpha=self.alpha, limit=self.limit,
            x_scale=x_scale, w13_scale=self.w13_scale, launch=self.launch,
        )  # fmt: skip
        gemm_skinny.second_product(
            act, *found, self.w2, own["y"], cut.second, lists=lists, w2_scale=self.w2_scale, launch=self.launch
        )

    def _matrices(
        self, own: dict[str, Tensor], starts: Tensor | None, counts: Tensor | None, out: Tensor, expected: float
    ) -> None:
        from ep_moe.experts.hopper import gemm_fp8_block as kernels

        launch, slots, pairs = self.launch, len(self.w2), max(1, int(expected))
        hopper, ends = kernels.has_hopper(out.device), own["ends"]
        config = kernels.config_for(pairs, slots, *self.w13.shape[1:], hopper=hopper, activated=hopper)
        config = dataclasses.replace(config, spare_sms=self.spare_sms)
        first = (own["rows"], own["row_scale"], self.w13, self.w13_scale, ends)
        result = (own["act"], own["act_scale"], self.activation)
        if hopper:
            kernels.grouped_gemm_activate(
                *first, *result, starts=starts, config=config, alpha=self.alpha, limit=self.limit, launch=launch
            )
        else:
            kernels.grouped_gemm(*first, own["h"], starts=starts, config=config, launch=launch)
            kernels.activate_and_quantize(
                own["h"], *result, counts=counts, alpha=self.alpha, limit=self.limit, launch=launch
            )
        config = kernels.config_for(pairs, slots, *self.w2.shape[1:], hopper=hopper)
        config = dataclasses.replace(config, spare_sms=self.spare_sms)
        kernels.grouped_gemm(
            own["act"], own["act_scale"], self.w2, self.w2_scale, ends, out, starts=starts, config=config, launch=launch
        )
