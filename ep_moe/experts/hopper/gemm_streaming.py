"""The product of few rows, grouped by expert, with many weights, on Hopper: bound by reading weights once, which begins
before the rows are known. In bf16, and in E4M3 with one scale a matrix, or one a matrix of weights and one a row. For
many rows: `gemm_grouped`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.fp8_row_kernels import RowScales
from ep_moe.quant.fp8_tensor_kernels import NO_SCALES, MatrixScales
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.launch_cache import Launch, at_once
from ep_moe.types import Activation


@dataclass(frozen=True)
class Ring:
    """rows: of an expert at once; stages: blocks of 128 bytes along K that are on their way at once, as many as shared
    memory holds"""

    rows: int
    stages: int


MOST = 64  # rows of an expert at once; of more, its weights are read again
# rows of an expert on average up to which this is faster than `gemm_grouped` on an H200, in bf16 and in E4M3. Where
# weights are large, reading those of the few experts with more than MOST twice outweighs all else
FEW, FEW_E4M3, FEW_LARGE = 60, 68, 50
LARGE = 16 << 20  # bytes of an expert's w13; measured at 3 to 6 MiB and at 28 to 56


def ring_for(rows: float, w13: Tensor) -> Ring | None:
    """The fastest for `bench.experts`' models on an H200, None where there are too many rows.

    rows: of an expert, as many as are expected on average; w13: [L, n, k]
    """
    number = w13.element_size()
    few = FEW_LARGE if w13.shape[1] * w13.shape[2] * number > LARGE else FEW if number == 2 else FEW_E4M3
    if rows > few:
        return None
    if rows <= 10:
        return Ring(16, 12)
    return Ring(32, 11) if rows <= 22 else Ring(MOST, 9)


def product(
    x: Tensor, w: Tensor, lists: Lists, out: Tensor, ring: Ring, *, gather: bool = False,
    activation: Activation | None = None, alpha: float = 0.0, limit: float = 0.0,
    scales: MatrixScales | RowScales | None = None, launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[r] = x[r] @ w[e].T for each row r of expert e; sums in float32, of E4M3 in some 14 bits.

    x: [M, k]; w: [L, n, k], both bf16 or, with `scales`, both E4M3; n and k multiples of 128
    lists: rows are in their order; those beyond the last expert's are left as they are
    gather: x is [N, k], and row r of the sorted ones is x[lists.source[r]], whose scale is that of x's row, too
    out: bf16 [M, n], with a gated activation [M, n / 2], of which the first half of w's rows are the gates; E4M3 if
        `scales.out` is given

    launch: how it is launched. It starts before the kernel ahead of it has ended, and reads w then: see `pdl`.
    """
    from ep_moe.experts.hopper.gemm_streaming_triton import multiply

    name = "" if activation is None else activation.value
    given = NO_SCALES if scales is None else scales.given()
    source, programs = lists.source if gather else None, multiprocessors(x.device)
    multiply(
        x, source, w, lists.ends, out, ring.rows, ring.stages, programs, name, alpha, limit, given,
        isinstance(scales, RowScales), launch,
    )  # fmt: skip
