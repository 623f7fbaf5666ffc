"""The product of many rows in bf16, grouped by expert, on Hopper: bound by matrix products. For few rows: `few_rows`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.experts.pair_kernels import multiprocessors
from ep_moe.types import Activation


@dataclass(frozen=True)
class Tiles:
    """How `grouped_gemm` is cut. block_m x block_n: 64 x 128, 64 x 256 or 128 x 256; group_m: row blocks of an expert
    that are walked together, so that their weights stay in the L2 cache; programs: a multiprocessor"""

    block_m: int
    block_n: int
    stages: int = 4
    group_m: int = 16
    programs: int = 1


def tiles_for(rows: float) -> tuple[Tiles, Tiles]:
    """Of both products: the fastest for `bench.experts`' models on an H200. rows: of an expert, as many as are expected
    on average"""
    if rows <= 448:
        return Tiles(64, 256, stages=5), Tiles(64, 256, stages=5)
    return Tiles(128, 256), Tiles(128, 256, group_m=8)


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
