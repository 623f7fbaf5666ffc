"""Expert products in bf16, in Triton and Gluon. Nothing here allocates, waits for the device or tunes at run time.

Few rows: `first_product`, `second_product`, `reduce_unsorted`, which find an expert's rows themselves; bound by reading
weights. More: `pair_kernels.group_pairs`, the same two products by lists, `pair_kernels.reduce_pairs`. Many, on Hopper:
rows are copied into the order of experts (`pair_kernels.copy_rows`), and `grouped_gemm` is bound by matrix products.
`Cut.of` says which.

Letters: N received rows, K picks of a row, L experts, M pairs of a row and a local expert
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ep_moe.experts import bf16_kernels_triton as kernels
from ep_moe.experts.pair_kernels import REDUCE_BLOCK, REDUCE_WARPS, multiprocessors
from ep_moe.types import Activation

UNSORTED = 256  # picks up to which a program that looks through all of them is faster than sorting them first
STREAMED = 48  # rows of an expert up to which reading weights takes longer than multiplying


@dataclass(frozen=True)
class Streams:
    """How a product of few rows is cut: rows, columns and depth of a tile, tiles under way at once, warps."""

    block_m: int
    block_n: int
    block_k: int
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True)
class Tiles:
    """How `grouped_gemm` is cut. block_m x block_n: 64 x 128, 64 x 256 or 128 x 256; group_m: row blocks of an expert
    that are walked together, so that their weights stay in the L2 cache; programs: a multiprocessor"""

    block_m: int
    block_n: int
    stages: int = 4
    group_m: int = 16
    programs: int = 1


@dataclass(frozen=True)
class Cut:
    """How one call of the experts is cut. sort: pairs are sorted by expert first"""

    sort: bool
    first: Streams | Tiles
    second: Streams | Tiles

    @classmethod
    def of(cls, picks: int, rows: float, *, hopper: bool) -> Cut:
        """The fastest of `bench.experts`' models on an H200; any gives the right result. picks: N * K; rows: of an
        expert, as many as are expected on average."""
        if picks <= UNSORTED:
            return cls(False, Streams(16, 32, 128), Streams(16, 64, 128))
        if hopper and rows > STREAMED:
            if rows <= 448:
                return cls(True, Tiles(64, 256, stages=5), Tiles(64, 256, stages=5))
            return cls(True, Tiles(128, 256), Tiles(128, 256, group_m=8))
        if rows <= 10:
            return cls(True, Streams(16, 64, 128, stages=3), Streams(16, 64, 128, stages=3))
        if rows <= 22:
            return cls(True, Streams(32, 64, 128, stages=3), Streams(32, 128, 128, stages=3, warps=8))
        return cls(True, Streams(64, 64, 64), Streams(64, 128, 64))


@dataclass(frozen=True)
class Lists:
    """Pairs by expert, as `pair_kernels.group_pairs` leaves them.

    source: int32 [N * K], the row of each; ends: int32 [L], one past each expert's last
    """

    source: Tensor
    ends: Tensor


def first_product(
    x: Tensor, ids: Tensor, weights: Tensor | None, base: int, w13: Tensor, out: Tensor, activation: Activation,
    cut: Streams, *, lists: Lists | None = None, alpha: float = 0.0, limit: float = 0.0,
) -> None:  # fmt: skip
    """out[p] = activation(w13[e] @ x[p // K]) for each pair p of expert e = ids[p] - base, unless its weight is 0.

    x: bf16 [N, H]; ids: int [N, K]; weights: float32 [N, K] or None; w13: bf16 [L, 2 * I, H], gate first ([L, I, H]
    without a gate); out: bf16 [at least N * K, I], rows of pairs that are not ours are left as they are
    lists: out's rows are then in the order of `source`, and ids are not read
    """
    experts, rows, hidden = w13.shape
    inner = rows // 2 if activation.gated else rows
    pairs = ids.numel()
    kernels.first_product[(experts * (inner // cut.block_n),)](
        x, ids, weights, None if lists is None else lists.source, None if lists is None else lists.ends, w13, out,
        base, pairs, hidden, inner, alpha, limit,
        TOP_K=ids.shape[1], PAIRS=_looked_through(pairs, lists), SORTED=lists is not None,
        WEIGHTED=weights is not None, ACTIVATION=activation.value,
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def second_product(
    act: Tensor, ids: Tensor, weights: Tensor | None, base: int, w2: Tensor, out: Tensor, cut: Streams, *,
    lists: Lists | None = None,
) -> None:  # fmt: skip
    """out[p] = w2[e] @ act[p], rows as `first_product` left them. w2: bf16 [L, H, I]; out: bf16 or float32 [.., H]"""
    experts, hidden, inner = w2.shape
    pairs = ids.numel()
    kernels.second_product[(experts * (hidden // cut.block_n),)](
        act, ids, weights, None if lists is None else lists.ends, w2, out, base, pairs, hidden, inner,
        PAIRS=_looked_through(pairs, lists), SORTED=lists is not None, WEIGHTED=weights is not None,
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip


def _looked_through(pairs: int, lists: Lists | None) -> int:
    """One number for all calls of few picks, so that few kernels are compiled."""
    return max(UNSORTED, triton.next_power_of_2(pairs)) if lists is None else 1


def reduce_unsorted(y: Tensor, ids: Tensor, weights: Tensor | None, base: int, slots: int, out: Tensor) -> None:
    """out[n] = the sum over k of weights[n, k] * y[n * K + k] where ids[n, k] - base is in 0 .. slots - 1.

    y: [N * K, H]; ids: int [N, K]; weights: float32 [N, K], None for ones; out: [N, H]
    """
    rows, top_k = ids.shape
    size = out.shape[-1]
    block = min(REDUCE_BLOCK, triton.next_power_of_2(size))
    kernels.reduce_unsorted[(rows, triton.cdiv(size, block))](
        y, ids, weights, out, base, slots, size, TOP_K=top_k, WEIGHTED=weights is not None, BLOCK=block,
        num_warps=REDUCE_WARPS,
    )  # fmt: skip


def grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, out: Tensor, cut: Tiles, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0,
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e, on Hopper; sums in float32.

    a: bf16 [M, K]; b: bf16 [L, N, K]
    ends: int32 [L], one past each expert's last row; rows beyond the last are left as they are
    out: bf16 [M, N], with a gated activation [M, N / 2], of which the first half of b's rows are the gates
    spare_sms: multiprocessors that are left free
    """
    from ep_moe.experts.bf16_hopper_triton import launch

    experts, n, _ = b.shape
    tiles = (len(a) // cut.block_m + 1 + experts) * -(-n // 128)
    programs = min(tiles, max(1, multiprocessors(a.device) - spare_sms) * cut.programs)
    launch(
        a, b, out, ends, cut.block_m, cut.block_n, cut.group_m, cut.stages, programs,
        "" if activation is None else activation.value, alpha, limit,
    )  # fmt: skip
