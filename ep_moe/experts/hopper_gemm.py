"""The product of many rows, grouped by expert, on Hopper, in bf16, and in E4M3 with one scale a matrix: very many in
tiles of 128, in Gluon, others by `turned_gemm`. For few: `stream_gemm`, `few_rows`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.devices import multiprocessors
from ep_moe.experts.fp8_tensor_kernels import NO_SCALES, MatrixScales
from ep_moe.experts.turned_gemm import WEIGHTS, Turned, cut_for
from ep_moe.types import Activation


@dataclass(frozen=True)
class Tiles:
    """How the product of very many rows is cut.

    block_n: columns beside 128 rows, 128 or 256; with an activation 256
    stages: blocks of 128 bytes along K that are on their way at once
    group_m: row blocks of an expert that are walked together, so that their weights stay in the L2 cache
    """

    block_n: int
    stages: int = 4
    group_m: int = 16


# up to which weights are the left operand, on an H200: rows of an expert times K (first products), rows (second ones)
TURNED_FIRST, TURNED_SECOND = 1 << 22, 512


def first_cut(rows: float, w13: Tensor, spare_sms: int = 0) -> Tiles | Turned:
    """The fastest for `bench.experts`' models on an H200. rows: of an expert, as many as are expected on average"""
    experts, n, k = w13.shape
    if rows * k <= TURNED_FIRST:
        return cut_for(rows, experts, -(-n // WEIGHTS), _programs(w13, spare_sms))
    return Tiles(256)


def second_cut(rows: float, w2: Tensor, spare_sms: int = 0) -> Tiles | Turned:
    """The same for the second product."""
    experts, n, _ = w2.shape
    if rows <= TURNED_SECOND:
        return cut_for(rows, experts, -(-n // WEIGHTS), _programs(w2, spare_sms))
    return Tiles(256, group_m=8) if w2.itemsize == 2 else Tiles(128, stages=6)


def _programs(w: Tensor, spare_sms: int) -> int:
    return max(1, multiprocessors(w.device) - spare_sms)


def grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, out: Tensor, cut: Tiles | Turned, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0, scales: MatrixScales | None = None,
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e, on Hopper; sums in float32, of E4M3 in some 14 bits.

    a: [M, K]; b: [L, N, K]; both bf16, K a multiple of 64, or with `scales` E4M3, K a multiple of 128
    ends: int32 [L], one past each expert's last row; rows beyond the last are left as they are
    out: bf16 [M, N], with a gated activation [M, N / 2], of which the first half of b's rows are the gates; E4M3 if
        `scales.out` is given
    spare_sms: multiprocessors that are left free
    """
    from ep_moe.experts import hopper_gemm_triton, turned_gemm

    experts, n, _ = b.shape
    name, given = "" if activation is None else activation.value, NO_SCALES if scales is None else scales.given()
    programs = _programs(a, spare_sms)
    if isinstance(cut, Turned):
        turned_gemm.launch(a, b, out, ends, cut, programs, name, alpha, limit, given)
        return
    tiles = (len(a) // 128 + 1 + experts) * -(-n // 128)
    hopper_gemm_triton.launch(a, b, out, ends, cut, min(tiles, programs), name, alpha, limit, given)
