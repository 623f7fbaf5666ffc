"""The matrix product of few rows, grouped by expert, with many weights, on Hopper.

It is bound by reading weights once. It starts to read them before the rows are known. For many rows there are
`gemm_grouped` and `gemm_fp8_block`.

Operands are bf16, or E4M3 with scales of one of these kinds:

- `MatrixScales`: one per matrix;
- `RowScales`: one per row of x, and one per matrix or channel (row) of weights;
- `BlockScales`: one per 128 of a row of x, and per 128 x 128 of weights.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ep_moe.experts.hopper.gemm_streaming_gluon import stream
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.kernels import NO_SCALES, BlockScales, MatrixScales, RowScales
from ep_moe.runtime.devices import memory_rate, multiprocessors
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly, next_power_of_2, pdl_launch
from ep_moe.runtime.triton_compat import TensorDescriptor, gl
from ep_moe.types import Activation


@dataclass(frozen=True)
class Ring:
    """The ring of buffers in shared memory.

    rows: rows of an expert in a tile
    stages: blocks of 128 bytes along K that are loaded at once, as many as shared memory holds
    """

    rows: int
    stages: int


@dataclass(frozen=True)
class Few:
    """Mean rows per expert up to which this is faster than `gemm_grouped`.

    bf16, e4m3: by dtype
    large: for large weights, where it costs most to read those of experts with more than MOST rows twice
    """

    bf16: int
    e4m3: int
    large: int


LINE = 128  # bytes of a row of a buffer, the swizzle width of shared memory
MOST = 64  # most rows of an expert in a tile; for more rows its weights are read again
FEW_BLOCKS = 28  # as `Few`, with scales of blocks, on an H100 and an H200; `large` may lower it
H100, H200 = Few(44, 76, 12), Few(60, 68, 50)
BETWEEN = 4e12  # bytes/s, more than an H100's memory rate and less than an H200's
LARGE = 16 << 20  # weights are large if an expert's w13 has more bytes; measured at 3 to 6 MiB and at 28 to 56


def ring_for(rows: float, w13: Tensor, *, blocks: bool = False) -> Ring | None:
    """Return the fastest ring for the models of `bench.experts` on an H100 and an H200, None for too many rows.

    rows: expected mean rows per expert; w13: [L, n, k]; blocks: weights have one scale per block
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
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[r] = x[r] @ w[e].T for each row r of expert e; sums in float32, for E4M3 with about 14 bits.

    x: [M, k]; w: [L, n, k]; both bf16, or with `scales` both E4M3; n and k multiples of 128, or for bf16 of 64
    lists: the order of rows; rows after the last expert's are not written
    gather: x is [N, k], and sorted row r is x[lists.source[r]], with the scale of that row of x
    out: bf16, or with scales of blocks fp16, [M, n]; with a gated activation [M, n / 2], where the first half of w's
        rows are the gates; E4M3 if `scales.out` is given
    bias: contiguous [L, n], added to the scaled sums
    launch: how it is launched. It starts before the previous kernel has ended, and reads w then: see `pdl_launch`
    """
    experts, n, k = w.shape
    itemsize, gated = w.element_size(), activation is not None and activation.gated
    layout = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8 * itemsize, rank=2)
    weights = TensorDescriptor(w, [experts * n, k], [k, 1], [64, LINE // itemsize], layout)
    width = n // 2 if gated else n
    columns, given = cdiv(width, 64 if gated else 128), NO_SCALES if scales is None else scales.kernel_args()
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
