"""The Hopper expert step as one torch operator on caller-owned memory: sort rows by expert, multiply, sum per row.

The number of rows per expert decides between three kinds of kernels:

- few rows: each program looks up its rows (`gemm_skinny`);
- more rows: they are gathered while weights are streamed (`gemm_streaming`);
- many rows: they are sorted before (`gemm_grouped`, `gemm_fp8_block`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_moe.experts.hopper import route_sort
from ep_moe.experts.hopper.route_sort import IdsReady, PeerAddresses, list_shapes, passes
from ep_moe.experts.hopper.scaling import Products, Rows, Scaling, Trained, Unscaled
from ep_moe.experts.hopper.scaling_4bit import Int4, Int4Fp8, Mxfp4, Mxfp4Fp8, Mxint4, Mxint4Fp8, Nvfp4
from ep_moe.experts.hopper.scaling_fp8 import BlockScaled, ChannelScaled, MatrixScaled, RowScaled
from ep_moe.runtime.launch_cache import Launch
from ep_moe.runtime.torch_operator import launching_operator
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes
from ep_moe.types import Activation, PeerRows, WireIds

SCALINGS: dict[str, type[Scaling]] = {
    "none": Unscaled,
    "trained": Trained,
    "matrix": MatrixScaled,
    "row": RowScaled,
    "channel": ChannelScaled,
    "block": BlockScaled,
    "mxfp4": Mxfp4,
    "nvfp4a16": Nvfp4,
    "int4": Int4,
    "mxint4": Mxint4,
    "mxfp4_fp8": Mxfp4Fp8,
    "int4_fp8": Int4Fp8,
    "mxint4_fp8": Mxint4Fp8,
}


def shapes(
    scaling: str,
    routes: int,
    hidden: int,
    inner: int,
    slots: int,
    *,
    gated: bool,
    dtype: torch.dtype,
    sort: bool = True,
) -> Shapes:
    """Return the scratch tensors of one pass. sort: rows are to be sorted and summed; else they arrive grouped"""
    found = SCALINGS[scaling].scratch_shapes(routes, hidden, inner, gated, dtype)
    if sort:
        return found | list_shapes(routes, slots) | {"addresses": ((routes,), torch.int64)}
    del found["y"]
    return found | dict.fromkeys(("starts", "ends"), ((slots,), torch.int32))


def scratch_bytes(
    scaling: str, routes: int, hidden: int, inner: int, slots: int, *, gated: bool, dtype: torch.dtype
) -> int:
    """Return the bytes of scratch for passes of at most `routes` routes."""
    sizes = [
        carved_bytes(shapes(scaling, routes, hidden, inner, slots, gated=gated, dtype=dtype, sort=sort))
        for sort in (True, False)
    ]
    return max(sizes)


@launching_operator("hopper_moe")
def hopper_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    scaling: str,
    x: Tensor,
    x_scale: Tensor | None,
    input_scale: float | None,
    dtype: torch.dtype,
    ids: Tensor | None,
    base: int,
    ids_ready: Tensor | None,
    sequence: Tensor | None,
    weights: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    alpha: float,
    limit: float,
    expected: float,
    chunk: int,
    spare_sms: int,
    exact: bool,
    per_route: bool,
    peers: Tensor | None,
    offset: int,
    bound: int,
    rank: int,
    number: Tensor | None,
    stride: int,
) -> None:
    """Compute the experts for received rows.

    scaling: a key of `SCALINGS`; scales: its tensors, by `Scaling.names`; biases: as of `Products`
    x: [N, H], plain, or in E4M3 with the scaling's x_scale or input_scale; dtype: dtype of the layer
    out: [N, H]; with per_route (as of `types.Received`) [N * K, H]
    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate); w2: [L, H, I]; 4-bit weights as of `scaling.Products`

    Rows are assigned to experts in one of two ways:

    - ids: int [N, K], local ids plus `base`; other ids name no local expert; weights: float32 [N, K], None for 1; a
      route of weight 0 is skipped
    - with the `block` scaling, starts and ends: int32 [L], the bounds of each expert's rows; weights: float32 [N] or
      None

    expected: local experts per row, by which tiles are chosen; chunk: the most routes of one pass
    spare_sms: multiprocessors that the large products leave free
    exact: use only kernels with the same order of sums (`Scaling.same_bits`), also for few rows; only with ids
    ids_ready, sequence: as of `types.WireIds`
    peers to stride: the fields of `route_sort.PeerAddresses`. If peers is given, results are written there instead of
        to `out`; only with ids
    """
    products = Products(w13, w2, scales, dtype, Activation(activation), alpha, limit, spare_sms, launch, biases, exact)
    step = SCALINGS[scaling](products)
    rows = Rows(x, x_scale if input_scale is None else input_scale)
    if ids is None:
        assert isinstance(step, BlockScaled)
        assert starts is not None
        assert ends is not None
        for start in range(0, len(x), chunk):
            part = slice(start, min(start + chunk, len(x)))
            _grouped(step, workspace, rows.part(part), (starts, ends), start, out[part], expected)
        if weights is not None:
            out.mul_(weights.unsqueeze(1))
        return
    peer_out = None if peers is None else PeerAddresses(peers, offset, bound, rank, number, stride)
    coming = None if ids_ready is None or sequence is None else (ids_ready, sequence)
    returned = ids.shape[1] if per_route else 1
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), peer_out, returned):
        routing_args = (ids[part], None if weights is None else weights[part], base)
        own = out if to else out[part.start * returned : part.stop * returned]
        _pass(step, scaling, workspace, rows.part(part), routing_args, coming, own, to, expected, exact, per_route)
        coming = None  # after the first pass all ids and rows have arrived


def _pass(
    step: Scaling, scaling: str, workspace: Tensor, rows: Rows, routing_args: tuple[Tensor, Tensor | None, int],
    coming: IdsReady | None, out: Tensor, peer_out: PeerAddresses | None, expected: float, exact: bool,
    per_route: bool,
) -> None:  # fmt: skip
    """Compute one pass. routing_args: ids, weights and base; coming: `ids_ready` of `group_pairs`"""
    p, (count, top_k) = step.products, routing_args[0].shape
    launch, (slots, hidden, inner) = p.launch, step.sizes
    total = count * expected
    each = total / slots
    tiles = None if exact else step.skinny_tiles(count * top_k, each)
    ring = step.ring(each) if tiles is None and (step.same_bits or not exact) else None
    scratch = carve(
        workspace, shapes(scaling, count * top_k, hidden, inner, slots, gated=p.activation.gated, dtype=p.dtype)
    )
    if tiles is not None and not tiles.sort:
        step.run_skinny(step.prepare_rows(rows, scratch), routing_args, tiles, None, scratch)
        route_sort.reduce(
            scratch["y"], *routing_args, slots, out, peer_out=peer_out, per_route=per_route, launch=launch
        )
        return
    pdl = ring is not None  # the first product prefetches weights while routes are sorted
    if pdl:
        rows = step.prepare_rows(rows, scratch)
    # the second product writes the row of each route directly to its peer
    to_peers = peer_out is not None and peer_out.number is None
    direct = per_route and step.writes_to_peers and tiles is None and not pdl and to_peers
    lists = route_sort.list_pairs(
        scratch, *routing_args, slots, pdl=pdl, ids_ready=coming, peer_out=peer_out if direct else None,
        row_bytes=hidden * out.itemsize, launch=launch,
    )  # fmt: skip
    if tiles is not None:
        step.run_skinny(step.prepare_rows(rows, scratch), routing_args, tiles, lists, scratch)
    elif ring is not None:
        step.streamed(rows, lists, ring, scratch)
    else:
        step.grouped(rows, lists, each, total, scratch)
        if direct:
            return
    route_sort.reduce(
        scratch["y"],
        *routing_args,
        slots,
        out,
        slots=lists.slots,
        peer_out=peer_out,
        pdl=pdl,
        per_route=per_route,
        launch=launch,
    )


def _grouped(
    step: BlockScaled, workspace: Tensor, rows: Rows, bounds: tuple[Tensor, Tensor], first: int, out: Tensor,
    expected: float,
) -> None:  # fmt: skip
    """Compute a part of rows that arrived grouped by expert.

    bounds: `starts` and `ends` of the call; first: the index of the part's first row in the call
    """
    p, count = step.products, len(rows.x)
    slots, hidden, inner = step.sizes
    scratch = carve(
        workspace, shapes("block", count, hidden, inner, slots, gated=p.activation.gated, dtype=p.dtype, sort=False)
    )
    for name, bound in zip(("starts", "ends"), bounds, strict=True):
        scratch[name].copy_(bound).sub_(first).clamp_(0, count)
    if isinstance(rows.scale, Tensor):
        rows = Rows(rows.x, rows.scale.contiguous())
    step.multiply(
        step.prepare_rows(rows, scratch), scratch["starts"], scratch["ends"], None, out, count * expected, scratch
    )


def ids_ready_of(ids: WireIds | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the arguments `ids_ready` and `sequence` of `hopper_moe`."""
    return (None, None) if ids is None else (ids.ids_ready, ids.sequence)


def peer_arguments(peers: PeerRows | None) -> tuple[Tensor | None, int, int, int, Tensor | None, int]:
    """Return the arguments `peers` to `stride` of `hopper_moe`: plain types, which a torch operator can take."""
    if peers is None:
        return None, 0, 1, 0, None, 0
    to = PeerAddresses.of(peers)
    return to.addresses, to.offset, to.bound, to.rank, to.number, to.stride
