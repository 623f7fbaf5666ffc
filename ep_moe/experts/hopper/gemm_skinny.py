"""Matrix products of few rows with many weights, in Triton. They read each expert's weights once, and are bound by
that.

Weights are bf16 or fp16, or E4M3 with scales of one of these kinds:

- "block": one per 128 x 128 block of weights, and per 128 of a row of x;
- "matrix": one per matrix, and one for x or one per expert's rows of x;
- "row": one per matrix, and one per row of x;
- "channel": one per row of a matrix (an output channel), and one per row of x.

A forward pass is `first_product`, `second_product` and `route_sort.reduce`. Each program finds its expert's rows
itself. With more rows `route_sort.list_pairs` sorts them before, and the products read its lists. Nothing here
allocates or waits for the device. launch: how kernels are launched.

Letters: N received rows, K routes of a row, L experts. Hidden and intermediate sizes (H, I) are multiples of 128, or of
64 without scales.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from ep_moe.experts.hopper.route_sort import Lists, local_experts
from ep_moe.quant.fp8 import SMALLEST
from ep_moe.quant.kernels import NO_SCALES, BlockScales, MatrixScales, RowScales, saturated
from ep_moe.runtime.launch_cache import Launch, launch_directly, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.types import Activation

DEPTH = 128  # depth of a tile along K
# on an H200
FEWEST = 32  # routes that count as few for all tiles
UNSORTED = 256  # up to so many routes, programs that search all of them are faster than a sort before
DENSE = 1  # with more than FEWEST routes: from so many mean rows per expert, a sort and `gemm_streaming` are faster
DENSE_BLOCKS = 1.5  # the same, if blocks have scales


@dataclass(frozen=True)
class Tile:
    """The tiling of a product of few rows.

    block_m, block_n: rows and columns of a tile
    stages: blocks of DEPTH that are loaded at once
    warps: warps of a program
    split: warps that share the DEPTH blocks of the same weights; only in `gemm_skinny_4bit`
    """

    block_m: int
    block_n: int
    stages: int = 4
    warps: int = 4
    split: int = 1


@dataclass(frozen=True)
class TileConfig:
    """The tiling of both products of a call. sort: pairs are sorted by expert before"""

    sort: bool
    first: Tile
    second: Tile

    @classmethod
    def of(cls, routes: int, rows: float) -> TileConfig | None:
        """Return the fastest tiling for the models of `bench.experts` on an H200, None if other kernels are faster.

        routes: N * K; rows: expected mean rows per expert
        """
        if _sorted_first(routes, rows, DENSE):
            return None
        if routes <= FEWEST:
            return cls(False, Tile(16, 32, stages=6), Tile(16, 64, stages=3))
        return cls(False, Tile(16, 32), Tile(16, 64))

    @classmethod
    def of_blocks(cls, routes: int, rows: float) -> TileConfig | None:
        """Return the tiling for E4M3 weights with a scale per block, as `of`; also for an H100."""
        if _sorted_first(routes, rows, DENSE_BLOCKS):
            return None
        if routes <= FEWEST:
            return cls(False, Tile(16, 64), Tile(16, 64, stages=3))
        return cls(False, Tile(16, 128, stages=3, warps=8), Tile(16, 128, stages=3))

    @classmethod
    def of_matrices(cls, routes: int, rows: float) -> TileConfig | None:
        """Return the tiling for E4M3 weights with one scale per matrix, as `of`."""
        if _sorted_first(routes, rows, DENSE):
            return None
        if routes <= 2 * FEWEST:
            return cls(False, Tile(16, 32), Tile(16, 128, stages=3))
        return cls(False, Tile(16, 64, stages=3), Tile(16, 128, warps=8))

    @classmethod
    def of_rows(cls, routes: int, rows: float) -> TileConfig | None:
        """Return the tiling for rows with one scale each, as `of_matrices`. The second product rounds by blocks."""
        if _sorted_first(routes, rows, DENSE):
            return None
        first = Tile(16, 32) if routes <= 2 * FEWEST else Tile(16, 64, stages=3)
        return cls(False, first, Tile(16, 128, stages=3))


def _sorted_first(routes: int, rows: float, dense: float) -> bool:
    return routes > UNSORTED or (routes > FEWEST and rows >= dense)


def first_product(
    x: Tensor, ids: Tensor, weights: Tensor | None, base: int, w13: Tensor, out: Tensor, activation: Activation,
    tile: Tile, *, lists: Lists | None = None, alpha: float = 0.0, limit: float = 0.0,
    scales: MatrixScales | RowScales | BlockScales | None = None, bias: Tensor | None = None,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[p] = activation(w13[e] @ x[p // K]) for each pair p of expert e = ids[p] - base with weight != 0.

    x: [N, H]; ids: int [N, K]; weights: float32 [N, K] or None
    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate)
    out: [at least N * K, I]; rows of pairs without a local expert are not written
    scales: `MatrixScales` of weights, rows and out, all in E4M3; or, for an out in bf16, `RowScales` (one per row of x,
        one per matrix or channel of weights) or `BlockScales`
    bias: contiguous [L, 2 * I], added before the activation
    lists: if given, out's rows are in the order of `lists.source`, and ids are not read
    """
    experts, rows, hidden = w13.shape
    inner = rows // 2 if activation.gated else rows
    pairs = ids.numel()
    assert not isinstance(scales, MatrixScales) or scales.out is not None
    factor, x_scale, step, w13_scale, to = NO_SCALES if scales is None else scales.kernel_args()
    strides = tuple(scales.rows.stride()) if isinstance(scales, BlockScales) else (1, 0)
    by_pick = lists is None and pairs <= experts
    launch(
        _first_product, ((pairs if by_pick else experts) * (inner // tile.block_n),),
        x, x_scale, ids, weights, None if lists is None else lists.source, None if lists is None else lists.ends, w13,
        w13_scale, bias, out, factor, step, *strides, 0 if w13_scale is None else w13_scale.stride(0), to, base, pairs,
        experts, hidden, inner, alpha, limit,
        SCALES=_scales(w13_scale, scales), BY_ROUTE=by_pick, TOP_K=ids.shape[1], PAIRS=_looked_through(pairs, lists),
        SORTED=lists is not None, WEIGHTED=weights is not None, ACTIVATION=activation.value,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=gcd(hidden, DEPTH), STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip


def second_product(
    act: Tensor, ids: Tensor, weights: Tensor | None, base: int, w2: Tensor, out: Tensor, tile: Tile, *,
    lists: Lists | None = None, w2_scale: Tensor | None = None, scales: MatrixScales | None = None,
    bias: Tensor | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[p] = w2[e] @ act[p], for rows in the order of `first_product`.

    w2: [L, H, I]; out: [at least N * K, H]
    w2_scale: float32 [L, H / 128, I / 128] or [L, H], for E4M3 weights; act is then rounded to E4M3 by blocks
    scales: `MatrixScales` of weights and act, both in E4M3
    bias: contiguous [L, H]
    """
    experts, hidden, inner = w2.shape
    pairs = ids.numel()
    factor, act_scale, step, w2_scale, _ = (
        (None, None, None, w2_scale, None) if scales is None else scales.kernel_args()
    )
    by_pick = lists is None and pairs <= experts
    launch(
        _second_product, ((pairs if by_pick else experts) * (hidden // tile.block_n),),
        act, ids, weights, None if lists is None else lists.ends, w2, w2_scale, bias, out, factor, act_scale, step,
        base, pairs, experts, hidden, inner, SCALES=_scales(w2_scale, scales), BY_ROUTE=by_pick,
        PAIRS=_looked_through(pairs, lists), SORTED=lists is not None, WEIGHTED=weights is not None,
        SMALLEST=SMALLEST,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=gcd(inner, DEPTH), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def _scales(of_weights: Tensor | None, scales: MatrixScales | RowScales | BlockScales | None) -> str:
    """Return what has one scale: "matrix", "row", "channel" or "block" of weights; "" without scales."""
    if isinstance(scales, MatrixScales):
        return "matrix"
    if of_weights is None:
        return ""
    return {1: "row", 2: "channel", 3: "block"}[of_weights.dim()]


def _looked_through(pairs: int, lists: Lists | None) -> int:
    """Return how many pairs a program searches: one of few numbers, so that few kernels are compiled."""
    if lists is not None:
        return 1
    return FEWEST if pairs <= FEWEST else max(UNSORTED, next_power_of_2(pairs))


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def expert_of(ids, weights, base, asked, pair, pairs, experts, WEIGHTED: tl.constexpr, BY_ROUTE: tl.constexpr):
    """Return a program's expert, and which pairs belong to it.

    BY_ROUTE: `asked` is a route, and only the program of the first route of an expert has pairs. Otherwise `asked` is
    the expert.
    """
    local = local_experts(ids, weights, base, pair, pairs, WEIGHTED)
    if BY_ROUTE:
        expert = local_experts(ids, weights, base, asked, pairs, WEIGHTED)
        mine = (local == expert) & (expert >= 0) & (expert < experts)
        mine = mine & (tl.min(tl.where(mine, pair, asked)) == asked)
    else:
        expert = asked
        mine = local == expert
    return expert, mine


@triton.jit
def listed(mine, pair, first, ROWS: tl.constexpr):
    """Return the pairs number `first` to `first` + ROWS among those in `mine`, -1 beyond the last."""
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    wanted = first + tl.arange(0, ROWS)
    hit = mine[None, :] & (place[None, :] == wanted[:, None])
    return tl.max(tl.where(hit, pair[None, :], -1), 1)


@triton.jit
def activate(gate, up, alpha, bound, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        value = positive * positive
    elif ACTIVATION == "swiglu":
        value = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "geglu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_clamped")
        gate = tl.where(gate > bound, bound, gate)
        up = tl.where(up > bound, bound, up)
        up = tl.where(up < -bound, -bound, up)
        value = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    return value


@triton.jit
def _rounded(value, SMALLEST: tl.constexpr):
    """Round a block of 128 columns to E4M3 as `gemm_fp8_block.quantize_rows` does; return it and each row's scale."""
    wide = value.to(tl.float32)
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST), 448.0)
    return (wide * tl.div_rn(1.0, step)[:, None]).to(tl.float8e4nv), step


@triton.jit
def _scale_of(factor, rows_scale, step, weights_scale, expert):
    """Return the factor of an expert's sums, see `MatrixScales.kernel_args`."""
    scale = factor * tl.load(weights_scale + expert)
    if rows_scale is not None:
        scale *= tl.load(rows_scale + expert * step)
    return scale


@triton.jit
def _first_product(
    x, x_scale, ids, weights, source, ends, w13, w13_scale, bias, out, x_factor, x_step, scale_row, scale_block, w_step,
    out_scale, base, pairs, experts, hidden, inner, alpha, bound, SCALES: tl.constexpr, BY_ROUTE: tl.constexpr,
    TOP_K: tl.constexpr, PAIRS: tl.constexpr, SORTED: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `first_product`. A program computes BLOCK_N columns of one expert.

    SORTED: `source` holds the rows of pairs by expert, `ends` the index after each expert's last, and out's rows are in
        that order. Otherwise a program searches all ids, at most PAIRS, and row p of out is pair p
    BY_ROUTE: there is a program per route, and that of an expert's first route computes it; else one per expert
    SCALES: for E4M3: "block", one per block of x and w13; "matrix", one per matrix; "row", one per matrix of w13 and
        row of x; "channel", one per row of w13 and row of x. "" for bf16 or fp16
    """
    columns = inner // BLOCK_N
    asked = tl.program_id(0) // columns
    first_column = tl.program_id(0) % columns * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, PAIRS)
    if SORTED:
        expert = asked
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        count = tl.load(ends + expert) - start
    else:
        start = 0
        expert, mine = expert_of(ids, weights, base, asked, pair, pairs, experts, WEIGHTED, BY_ROUTE)
        count = tl.sum(mine.to(tl.int32))
    k = tl.arange(0, BLOCK_K)
    GATED: tl.constexpr = ACTIVATION != "relu2"
    BLOCKS: tl.constexpr = SCALES == "block"
    rows = inner * 2 if GATED else inner
    w_at = w13 + expert.to(tl.int64) * rows * hidden + column[None, :] * hidden + k[:, None]
    k_blocks = hidden // 128
    s_at = w13_scale
    if BLOCKS:
        s_at += (expert * (rows // 128) + first_column // 128) * k_blocks
    for first in range(0, count, BLOCK_M):
        if SORTED:
            at = first + tl.arange(0, BLOCK_M)
            row = tl.load(source + start + at, mask=at < count, other=-1)
            to = start + at
        else:
            to = listed(mine, pair, first, BLOCK_M)
            row = tl.where(to >= 0, to // TOP_K, -1)
        valid = row >= 0
        safe = tl.maximum(row, 0).to(tl.int64)
        x_at = x + safe[:, None] * hidden + k[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if BLOCKS:
            tl.static_assert(BLOCK_K == 128)
            gate_scale = tl.load(s_at)
            up_scale = tl.load(s_at + inner // 128 * k_blocks) if GATED else gate_scale
            step_at = x_scale + safe * scale_row
            step = tl.load(step_at)
        for i in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
            left = tl.load(x_at + i, mask=valid[:, None], other=0.0)
            if BLOCKS:
                # load the next block's scales while this block is multiplied
                block = tl.minimum(i // 128 + 1, k_blocks - 1)
                next_gate = tl.load(s_at + block)
                next_up = tl.load(s_at + inner // 128 * k_blocks + block) if GATED else next_gate
                next_step = tl.load(step_at + block * scale_block)
                gate += tl.dot(left, tl.load(w_at + i)) * (step * gate_scale)[:, None]
                if GATED:
                    up += tl.dot(left, tl.load(w_at + inner * hidden + i)) * (step * up_scale)[:, None]
                gate_scale = next_gate
                up_scale = next_up
                step = next_step
            else:
                gate = tl.dot(left, tl.load(w_at + i), gate)
                if GATED:
                    up = tl.dot(left, tl.load(w_at + inner * hidden + i), up)
        if SCALES == "matrix":
            scale = _scale_of(x_factor, x_scale, x_step, w13_scale, expert)
            gate *= scale
            up *= scale
        if SCALES == "row":
            scales = (tl.load(x_scale + safe * scale_row) * tl.load(w13_scale + expert * w_step))[:, None]
            gate *= scales
            up *= scales
        if SCALES == "channel":
            steps = tl.load(x_scale + safe * scale_row)[:, None]
            channel = w13_scale + expert * w_step + column
            gate *= steps * tl.load(channel)[None, :]
            if GATED:
                up *= steps * tl.load(channel + inner)[None, :]
        if bias is not None:
            gate += tl.load(bias + expert * rows + column).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias + expert * rows + inner + column).to(tl.float32)[None, :]
        value = activate(gate, up, alpha, bound, ACTIVATION)
        if SCALES == "matrix":
            value = saturated(value * tl.div_rn(1.0, tl.load(out_scale + expert)))
        out_at = out + to.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(out_at, value.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _second_product(
    act, ids, weights, ends, w2, w2_scale, bias, out, act_factor, act_scale, act_step, base, pairs, experts, hidden,
    inner, SCALES: tl.constexpr, BY_ROUTE: tl.constexpr, PAIRS: tl.constexpr, SORTED: tl.constexpr,
    WEIGHTED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = w2[e] @ act[r] for each row r of expert e, in the order of `first_product`."""
    columns = hidden // BLOCK_N
    asked = tl.program_id(0) // columns
    first_column = tl.program_id(0) % columns * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, PAIRS)
    if SORTED:
        expert = asked
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        count = tl.load(ends + expert) - start
    else:
        expert, mine = expert_of(ids, weights, base, asked, pair, pairs, experts, WEIGHTED, BY_ROUTE)
        count = tl.sum(mine.to(tl.int32))
    k = tl.arange(0, BLOCK_K)
    BLOCKS: tl.constexpr = SCALES == "block"
    ROUNDS: tl.constexpr = BLOCKS or SCALES == "channel"
    w_at = w2 + expert.to(tl.int64) * hidden * inner + column[None, :] * inner + k[:, None]
    k_blocks = inner // 128
    s_at = w2_scale
    if BLOCKS:
        s_at += (expert * (hidden // 128) + first_column // 128) * k_blocks
    for first in range(0, count, BLOCK_M):
        if SORTED:
            at = first + tl.arange(0, BLOCK_M)
            row = tl.where(at < count, start + at, -1)
        else:
            row = listed(mine, pair, first, BLOCK_M)
        valid = row >= 0
        a_at = act + tl.maximum(row, 0).to(tl.int64)[:, None] * inner + k[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scale = 1.0
        if BLOCKS:
            scale = tl.load(s_at)
        for i in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
            left = tl.load(a_at + i, mask=valid[:, None], other=0.0)
            if ROUNDS:
                tl.static_assert(BLOCK_K == 128)
                following = tl.load(s_at + tl.minimum(i // 128 + 1, k_blocks - 1)) if BLOCKS else scale
                left, step = _rounded(left, SMALLEST)
                total += tl.dot(left, tl.load(w_at + i)) * (step * scale)[:, None]
                scale = following
            else:
                total = tl.dot(left, tl.load(w_at + i), total)
        if SCALES == "channel":
            total *= tl.load(w2_scale + expert * hidden + column)[None, :]
        if SCALES == "matrix":
            total *= _scale_of(act_factor, act_scale, act_step, w2_scale, expert)
        if bias is not None:
            total += tl.load(bias + expert * hidden + column).to(tl.float32)[None, :]
        out_at = out + row.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=valid[:, None])
