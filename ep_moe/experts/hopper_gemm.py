"""The product of many rows, grouped by expert, on Hopper: bound by matrix products. In bf16, and in E4M3 with one scale
a matrix. For few rows: `few_rows`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.devices import multiprocessors
from ep_moe.experts.fp8_tensor_kernels import NO_SCALES, MatrixScales
from ep_moe.types import Activation


@dataclass(frozen=True)
class Tiles:
    """How `grouped_gemm` is cut.

    block_m x block_n: 64 x 128, 64 x 256, 128 x 128 or 128 x 256; with an activation 64 x 256 or 128 x 256
    stages: blocks of 128 bytes along K that are on their way at once
    group_m: row blocks of an expert that are walked together, so that their weights stay in the L2 cache
    programs: a multiprocessor
    staged: results are copied out (TMA) of shared memory, where stages leave room, while the next tile is multiplied;
        else the warps that multiply store them
    """

    block_m: int
    block_n: int
    stages: int = 4
    group_m: int = 16
    programs: int = 1
    staged: bool = False


def tiles_for(rows: float) -> tuple[Tiles, Tiles]:
    """Of both products: the fastest for `bench.experts`' models on an H200. rows: of an expert, as many as are expected
    on average"""
    first = Tiles(64, 256, stages=5) if rows <= 448 else Tiles(128, 256, staged=True)
    if rows <= 192:
        return first, Tiles(64, 128, programs=2, staged=True)
    if rows <= 448:
        return first, Tiles(128, 128, stages=5, group_m=4, staged=True)
    return first, Tiles(128, 256, group_m=8, staged=True)


def tiles_for_e4m3(rows: float) -> tuple[Tiles, Tiles]:
    """The same for operands in E4M3."""
    if rows <= 448:
        return Tiles(64, 256, stages=5), Tiles(64, 128, programs=2, staged=True)
    return Tiles(128, 256, staged=True), Tiles(128, 128, stages=6, staged=True)


def grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, out: Tensor, cut: Tiles, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0, scales: MatrixScales | None = None,
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e, on Hopper; sums in float32, of E4M3 in some 14 bits.

    a: [M, K]; b: [L, N, K]; both bf16, K a multiple of 64, or with `scales` E4M3, K a multiple of 128
    ends: int32 [L], one past each expert's last row; rows beyond the last are left as they are
    out: bf16 [M, N], with a gated activation [M, N / 2], of which the first half of b's rows are the gates; E4M3 if
        `scales.out` is given
    spare_sms: multiprocessors that are left free
    """
    from ep_moe.experts.hopper_gemm_triton import launch

    experts, n, _ = b.shape
    tiles = (len(a) // cut.block_m + 1 + experts) * -(-n // 128)
    programs = min(tiles, max(1, multiprocessors(a.device) - spare_sms) * cut.programs)
    name = "" if activation is None else activation.value
    launch(a, b, out, ends, cut, programs, name, alpha, limit, NO_SCALES if scales is None else scales.given())
