"""The product of few rows, grouped by expert, with many weights, on Hopper: bound by reading weights once, which begins
before the rows are known. In bf16, and in E4M3 with one scale a matrix, or one a row of x and one a matrix of weights
or a row of it (a channel), or one for each 128 of a row of x and each 128 x 128 of weights. For many rows:
`gemm_grouped`, `gemm_fp8_block`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.experts.hopper.gemm_streaming_gluon import stream
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.kernels import NO_SCALES, BlockScales, MatrixScales, RowScales
from ep_moe.runtime.devices import memory_rate, multiprocessors
from ep_moe.runtime.launch_cache import Launch, at_once, cdiv, next_power_of_2, pdl_launch
from ep_moe.runtime.triton_compat import TensorDescriptor, gl
from ep_moe.types import Activation


@dataclass(frozen=True)
class Ring:
    """rows: of an expert at once; stages: blocks of 128 bytes along K that are on their way at once, as many as shared
    memory holds"""

    rows: int
    stages: int


@dataclass(frozen=True)
class Few:
    """Rows of an expert on average up to which this is faster than `gemm_grouped`: in bf16, in E4M3, and where weights
    are large, so that reading those of experts with more than MOST rows twice outweighs all else."""

    bf16: int
    e4m3: int
    large: int


LINE = 128  # bytes of a row of a buffer: as wide as shared memory is swizzled
MOST = 64  # rows of an expert at once; of more, its weights are read again
FEW_BLOCKS = 28  # rows up to which it is where blocks have scales, on an H100 and an H200; fewer by `large`
H100, H200 = Few(44, 76, 12), Few(60, 68, 50)
BETWEEN = 4e12  # bytes a second that an H100's memory does not move, and an H200's does
LARGE = 16 << 20  # bytes of an expert's w13; measured at 3 to 6 MiB and at 28 to 56


def ring_for(rows: float, w13: Tensor, *, blocks: bool = False) -> Ring | None:
    """The fastest for `bench.experts`' models on an H100 and an H200, None where there are too many rows.

    rows: of an expert, as many as are expected on average; w13: [L, n, k]; blocks: they have scales
    """
    number, limits = w13.element_size(), H100 if 0 < memory_rate(w13.device) < BETWEEN else H200
    few = limits.bf16 if number == 2 else limits.e4m3
    if w13.shape[1] * w13.shape[2] * number > LARGE:
        few = limits.large
    if rows > (min(FEW_BLOCKS, few) if blocks else few):
        return None
    if rows <= 10:
        return Ring(16, 12)
    return Ring(32, 11) if rows <= (FEW_BLOCKS if blocks else 22) else Ring(MOST, 9)


def product(
    x: Tensor, w: Tensor, lists: Lists, out: Tensor, ring: Ring, *, gather: bool = False,
    activation: Activation | None = None, alpha: float = 0.0, limit: float = 0.0,
    scales: MatrixScales | RowScales | BlockScales | None = None, bias: Tensor | None = None,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[r] = x[r] @ w[e].T for each row r of expert e; sums in float32, of E4M3 in some 14 bits.

    x: [M, k]; w: [L, n, k], both bf16 or, with `scales`, both E4M3; n and k multiples of 128, or in bf16 of 64
    lists: rows are in their order; those beyond the last expert's are left as they are
    gather: x is [N, k], and row r of the sorted ones is x[lists.source[r]], whose scale is that of x's row, too
    out: bf16, or with scales of blocks fp16, [M, n]; with a gated activation [M, n / 2], where the first half of w's
        rows are the gates; E4M3 if `scales.out` is given
    bias: contiguous [L, n], added to the scaled sums

    launch: how it is launched. It starts before the kernel ahead of it has ended, and reads w then: see `pdl_launch`.
    """
    experts, n, k = w.shape
    itemsize, gated = w.element_size(), activation is not None and activation.gated
    layout = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8 * itemsize, rank=2)
    weights = TensorDescriptor(w, [experts * n, k], [k, 1], [64, LINE // itemsize], layout)
    width = n // 2 if gated else n
    columns, given = cdiv(width, 64 if gated else 128), NO_SCALES if scales is None else scales.given()
    w_scale = given[3]
    steps = scales.rows.stride() if isinstance(scales, BlockScales) else (0, 0)
    launch(
        stream, (min(multiprocessors(x.device), experts * columns),),
        weights, x, lists.source if gather else None, lists.ends, out, bias, *given,
        0 if w_scale is None else w_scale.stride(0), *steps, experts, n,
        n // 2 if gated else 64, width, columns, k * itemsize // LINE,
        alpha, limit, ROWS=ring.rows, BLOCK_K=LINE // itemsize, STAGES=ring.stages,
        EXPERTS=max(32, next_power_of_2(experts)), ACTIVATION="" if activation is None else activation.value,
        SCALED_ROWS=isinstance(scales, RowScales), CHANNELS=isinstance(scales, RowScales) and scales.per_channel,
        BLOCKS=isinstance(scales, BlockScales), num_warps=4, maxnreg=168, **pdl_launch(x.device),
    )  # fmt: skip
