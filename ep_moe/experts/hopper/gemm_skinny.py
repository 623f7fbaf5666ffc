"""Products of few rows with many weights, which read each expert's weights once and are bound by that. In Triton, for
weights in bf16 or fp16, and in E4M3 with a scale for each 128 x 128 block or for each matrix (and rows one each, too).

`first_product` and `second_product`, and `route_sort.reduce`, are a forward pass in which each program finds its
expert's rows itself. For more rows `route_sort.list_pairs` comes first, and the same two products go by its lists.
Nothing here allocates or waits for the device. launch: how kernels are launched.

Letters: N received rows, K routes of a row, L experts; hidden and intermediate sizes (H, I) are multiples of 128
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.experts.hopper import gemm_skinny_triton as kernels
from ep_moe.experts.hopper.gemm_fp8_block import SMALLEST_AMAX
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.fp8_row_kernels import RowScales
from ep_moe.quant.fp8_tensor_kernels import MatrixScales
from ep_moe.runtime.grids import next_power_of_2
from ep_moe.runtime.launch_cache import Launch, at_once
from ep_moe.types import Activation

DEPTH = 128  # of a tile
# on an H200
FEWEST = 32  # routes that are few for all tiles
UNSORTED = 256  # routes up to which a program that looks through all of them is faster than sorting them first
DENSE = 1  # rows of an expert from which on sorting is faster all the same, where `gemm_streaming` is behind it
FEW_BLOCKS = 40  # rows of an expert up to which reading weights takes longer than multiplying
SHORT = 2048  # hidden size up to which the lists are faster in E4M3; measured at 2048 and 7168
LIGHT = 32 * 2048 * 768  # numbers in w2 up to which they are with more than 10 rows: then launches are what they save


@dataclass(frozen=True)
class Tile:
    """How a product of few rows is cut: rows and columns of a tile, tiles of DEPTH under way at once, warps."""

    block_m: int
    block_n: int
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True)
class TileConfig:
    """How both products of a call are cut. sort: pairs are sorted by expert first"""

    sort: bool
    first: Tile
    second: Tile

    @classmethod
    def of(cls, routes: int, rows: float) -> TileConfig | None:
        """The fastest for `bench.experts`' models on an H200, None where sorting first is.

        routes: N * K; rows: of an expert, as many as are expected on average
        """
        if _sorted_first(routes, rows):
            return None
        if routes <= FEWEST:
            return cls(False, Tile(16, 32, stages=6), Tile(16, 64, stages=3))
        return cls(False, Tile(16, 32), Tile(16, 64))

    @classmethod
    def of_blocks(cls, routes: int, rows: float, hidden: int, numbers: int) -> TileConfig | None:
        """The same for weights in E4M3 with a scale for each block, sorted or not; None where there are too many rows.

        rows: of an expert, as many as are expected on average; hidden: H; numbers: of w2
        """
        if routes <= 2 * FEWEST:
            return cls(False, Tile(16, 64), Tile(16, 64, stages=3))
        if routes <= UNSORTED:
            return cls(False, Tile(16, 128, stages=3, warps=8), Tile(16, 128, stages=3))
        if rows > FEW_BLOCKS or hidden > SHORT:
            return None
        if rows <= 10:
            return cls(True, Tile(16, 64, stages=3), Tile(16, 128, stages=3))
        if numbers > LIGHT:
            return None
        return cls(True, Tile(64, 32), Tile(64, 128, stages=3, warps=8))

    @classmethod
    def of_matrices(cls, routes: int, rows: float) -> TileConfig | None:
        """As `of`, for weights in E4M3 with one scale a matrix."""
        if _sorted_first(routes, rows):
            return None
        if routes <= 2 * FEWEST:
            return cls(False, Tile(16, 32), Tile(16, 128, stages=3))
        return cls(False, Tile(16, 64, stages=3), Tile(16, 128, warps=8))

    @classmethod
    def of_rows(cls, routes: int, rows: float) -> TileConfig | None:
        """As `of_matrices`, where rows have a scale each: the second product rounds its own, by blocks."""
        if _sorted_first(routes, rows):
            return None
        first = Tile(16, 32) if routes <= 2 * FEWEST else Tile(16, 64, stages=3)
        return cls(False, first, Tile(16, 128, stages=3))


def _sorted_first(routes: int, rows: float) -> bool:
    return routes > UNSORTED or (routes > FEWEST and rows >= DENSE)


def first_product(
    x: Tensor, ids: Tensor, weights: Tensor | None, base: int, w13: Tensor, out: Tensor, activation: Activation,
    cut: Tile, *, lists: Lists | None = None, alpha: float = 0.0, limit: float = 0.0,
    x_scale: Tensor | None = None, w13_scale: Tensor | None = None, scales: MatrixScales | RowScales | None = None,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[p] = activation(w13[e] @ x[p // K]) for each pair p of expert e = ids[p] - base, unless its weight is 0.

    x: [N, H]; ids: int [N, K]; weights: float32 [N, K] or None; w13: [L, 2 * I, H], gate first ([L, I, H] without a
    gate); out: [at least N * K, I], rows of pairs that are not ours are left as they are
    w13_scale, x_scale: float32 [L, 2 * I / 128, H / 128] and, of any strides, [N, H / 128], of weights and rows in E4M3
    scales: of weights, rows and out in E4M3, one a matrix; or of weights, and of rows one each, for an out in bf16
    lists: out's rows are then in the order of `source`, and ids are not read
    """
    experts, rows, hidden = w13.shape
    inner = rows // 2 if activation.gated else rows
    pairs = ids.numel()
    assert not isinstance(scales, MatrixScales) or scales.out is not None
    factor, x_scale, step, w13_scale, to = (None, x_scale, None, w13_scale, None) if scales is None else scales.given()
    strides = tuple(x_scale.stride()) if x_scale is not None and x_scale.dim() == 2 else (1, 0)
    by_pick = lists is None and pairs <= experts
    launch(
        kernels.first_product, ((pairs if by_pick else experts) * (inner // cut.block_n),),
        x, x_scale, ids, weights, None if lists is None else lists.source, None if lists is None else lists.ends, w13,
        w13_scale, out, factor, step, *strides, 0 if w13_scale is None else w13_scale.stride(0), to, base, pairs,
        experts, hidden, inner, alpha, limit,
        SCALES=_scales(w13_scale, scales), BY_ROUTE=by_pick, TOP_K=ids.shape[1], PAIRS=_looked_through(pairs, lists),
        SORTED=lists is not None, WEIGHTED=weights is not None, ACTIVATION=activation.value,
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=DEPTH, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def second_product(
    act: Tensor, ids: Tensor, weights: Tensor | None, base: int, w2: Tensor, out: Tensor, cut: Tile, *,
    lists: Lists | None = None, w2_scale: Tensor | None = None, scales: MatrixScales | None = None,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[p] = w2[e] @ act[p], rows as `first_product` left them. w2: [L, H, I]; out: [at least N * K, H]
    w2_scale: float32 [L, H / 128, I / 128] of weights in E4M3; act is rounded to E4M3 then
    scales: of weights and act in E4M3, one a matrix"""
    experts, hidden, inner = w2.shape
    pairs = ids.numel()
    factor, act_scale, step, w2_scale, _ = (None, None, None, w2_scale, None) if scales is None else scales.given()
    by_pick = lists is None and pairs <= experts
    launch(
        kernels.second_product, ((pairs if by_pick else experts) * (hidden // cut.block_n),),
        act, ids, weights, None if lists is None else lists.ends, w2, w2_scale, out, factor, act_scale, step, base,
        pairs, experts, hidden, inner, SCALES=_scales(w2_scale, scales), BY_ROUTE=by_pick,
        PAIRS=_looked_through(pairs, lists), SORTED=lists is not None, WEIGHTED=weights is not None,
        SMALLEST=SMALLEST_AMAX,
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=DEPTH, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def _scales(of_weights: Tensor | None, scales: MatrixScales | RowScales | None) -> str:
    """One for each what."""
    if scales is None:
        return "" if of_weights is None else "block"
    return "matrix" if isinstance(scales, MatrixScales) else "row"


def _looked_through(pairs: int, lists: Lists | None) -> int:
    """Few different numbers, so that few kernels are compiled."""
    if lists is not None:
        return 1
    return FEWEST if pairs <= FEWEST else max(UNSORTED, next_power_of_2(pairs))
