"""Expert GEMMs with DeepSeek's fp8 blocks, in Triton: E4M3 weights with a scale per 128 x 128 block, E4M3 rows with a
scale per 128 values.

A forward pass is `route_sort.group_pairs` (rows by expert), `quantize_pairs`, `grouped_gemm`, `activate_and_quantize`,
`grouped_gemm`, `route_sort.reduce`. On Hopper `grouped_gemm_activate` does the first product and the activation in one
kernel. Nothing here allocates, waits for the device or tunes at run time: the caller provides every output, and a CUDA
graph can capture all of it. Only the device knows the number of rows, and no work beyond them is started. Row counts on
the host (M) are upper bounds. launch: how kernels are launched.

Letters: L experts, M rows of all experts, K and N a product's inner and outer size, both multiples of 128. For pairs, N
is the number of received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ep_moe.experts.hopper import gemm_fp8_block_triton as kernels
from ep_moe.experts.hopper.gemm_fp8_block_gluon import multiply
from ep_moe.quant.fp8 import SMALLEST
from ep_moe.runtime.devices import multiprocessors
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly, next_power_of_2, pdl_launch
from ep_moe.runtime.triton_compat import HAS_GLUON
from ep_moe.types import Activation

BLOCK = 128
# tuned on an H200
TILE = 4096  # values in a tile of the quantizing kernels
PROGRAMS = 64  # most programs of a quantizing kernel per multiprocessor


@dataclass(frozen=True)
class GemmConfig:
    """The tiling of `grouped_gemm`.

    block_m, block_n: rows and columns of a tile
    group_m: row blocks of an expert that are processed together, so that their weights stay in the L2 cache
    stages: blocks of 128 along K that are loaded at once
    hopper: use the Gluon kernel with copies and products in different warps (sm90 only; tiles of 64 x 128, 64 x 256,
        128 x 128, 128 x 256), else the plain Triton kernel
    wide: rearrange outputs to write lines of 128 bytes (Gluon kernel)
    warps: warps of a program of the plain kernel
    programs: programs per multiprocessor; spare_sms: multiprocessors that are left free
    """

    block_m: int
    block_n: int
    group_m: int = 16
    stages: int = 4
    hopper: bool = False
    wide: bool = True
    warps: int = 4
    programs: int = 1
    spare_sms: int = 0


def config_for(m: int, num_experts: int, n: int, *, hopper: bool = True, activated: bool = False) -> GemmConfig:
    """Return the default config for a mean number of rows per expert.

    Any config gives the right result for any number of rows.

    m: rows of all experts, the expected number if the caller knows it, else the largest
    activated: for `grouped_gemm_activate`
    """
    rows = m / max(num_experts, 1)
    if not hopper:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return GemmConfig(block_m, 128, stages=4, programs=2)
    if activated:
        return GemmConfig(64, 256, stages=5, hopper=True) if rows <= 64 else GemmConfig(128, 256, hopper=True)
    many = num_experts * n >= 1024 * 256  # so many tiles that an incomplete last wave hardly matters
    if rows <= 48 and not many:
        return GemmConfig(64, 128, stages=4, hopper=True, programs=2)
    if rows <= 256:
        return GemmConfig(64, 256, stages=5, hopper=True)
    if n % 256:
        return GemmConfig(128, 128, stages=6, hopper=True)
    return GemmConfig(128, 256, stages=4, hopper=True)


def grouped_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out: Tensor, *,
    starts: Tensor | None = None, config: GemmConfig | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[r] = a[r] @ b[e].T for each row r of expert e, scaled per block of 128 along K; sums in float32.

    a: E4M3 [M, K] or [L, C, K]; a_scale: float32 [M, K / 128] or [L, C, K / 128]; b: E4M3 [L, N, K]
    b_scale: float32 [L, N / 128, K / 128]; out: bf16, fp16 or float32 [M, N] or [L, C, N]
    ends: int32 [L]. With a [M, K]: the index after each expert's last row. Expert e's rows begin at starts[e], or
        without `starts` at ends[e - 1]. With a [L, C, K]: the number of an expert's valid rows

    Rows without an expert are not written. All tensors are contiguous; `a` and `b` begin at a multiple of 16 bytes.
    """
    config = config or config_for(a.numel() // b.shape[2], *b.shape[:2], hopper=has_hopper(b.device))
    if config.hopper:
        _gluon(a, a_scale, b, b_scale, ends, out, None, starts, config, launch, "")
        return
    experts, n, k = b.shape
    rows = a.numel() // k
    if not rows or not experts:
        return
    launch(
        kernels.gemm, (_programs(rows, experts, n, config, b.device),),
        a, a_scale, b, b_scale, out, starts, ends, experts, rows, a.shape[1] if a.dim() == 3 else 0, n, k,
        EXPERTS=next_power_of_2(experts), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        GROUP_M=config.group_m, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


def grouped_gemm_activate(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out: Tensor, out_scale: Tensor,
    activation: Activation = Activation.SWIGLU, *, alpha: float = 1.702, limit: float = 7.0, up_first: bool = False,
    starts: Tensor | None = None, config: GemmConfig | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Do `grouped_gemm` and `activate_and_quantize` in one kernel, without rounding between. Needs `has_hopper`.

    b: E4M3 [L, 2 * I, K], gate first, then up (with `up_first` up first), or [L, I, K] for RELU2
    out: E4M3 [M, I] or [L, C, I]; out_scale: float32 [M, I / 128] or [L, C, I / 128]
    config: tiles of 64 x 256 or 128 x 256
    other arguments: as of these two functions
    """
    config = config or config_for(a.numel() // b.shape[2], *b.shape[:2], activated=True)
    how = (activation.value, up_first, alpha, limit)
    _gluon(a, a_scale, b, b_scale, ends, out, out_scale, starts, config, launch, *how)


def _gluon(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out: Tensor, out_scale: Tensor | None,
    starts: Tensor | None, config: GemmConfig, launch: Launch, activation: str, up_first: bool = False,
    alpha: float = 0.0, limit: float = 0.0,
) -> None:  # fmt: skip
    experts, n, k = b.shape
    capacity = a.shape[1] if a.dim() == 3 else 0
    a = a.view(-1, k)
    if not a.shape[0] or not experts:
        return
    multiply(
        a, a_scale, b, b_scale, out, out_scale, starts, ends, capacity, config.block_m, config.block_n, config.group_m,
        config.stages, _programs(a.shape[0], experts, n, config, b.device), config.wide, activation, up_first, alpha,
        limit, SMALLEST, launch,
    )  # fmt: skip


def quantize_rows(
    x: Tensor, out: Tensor, scale: Tensor, *, rows: Tensor | None = None, counts: Tensor | None = None,
    pdl: bool = False, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Quantize rows: scale = amax / 448 for each 128 values of a row, out = x / scale rounded to the nearest E4M3.

    An amax below 1e-10 is replaced by 1e-10. NaN stays NaN.

    x: bf16 or fp16 [M, K], or [S, K] with `rows`; out: E4M3 [M, K]; scale: float32 [M, K / 128]
    rows: int32 or int64 [M], the row of x for each output row; -1: the output row is not written
    counts: int32 [G] on the device. The output has G groups of M / G rows, of which only the first counts[g] are
        written. For rows sorted by expert, `ends[-1:]`
    pdl: start before the previous kernel has ended, and let the next kernel do the same
    """
    total, k = out.numel() // out.shape[-1], out.shape[-1]
    if not total:
        return
    columns, tall, programs = _tiling(total, k, x.device)
    launch(
        kernels.quantize, (programs,),
        x, rows, counts, out, scale, total, total // _groups(counts), k, x.stride(-2),
        SMALLEST=SMALLEST, GATHER=rows is not None, COUNTED=counts is not None,
        ONE=_groups(counts) == 1, ROWS=tall, COLUMNS=columns, **pdl_launch(x.device, pdl),
    )  # fmt: skip


def quantize_pairs(x: Tensor, slots: Tensor, out: Tensor, scale: Tensor, *, launch: Launch = launch_directly) -> None:
    """Quantize each row of x into all rows of the output that `slots` names. Other rows are not written.

    The result is that of `quantize_rows` with `rows`, but each row is read and quantized only once.

    x: bf16 or fp16 [N, H]; slots: int32 or int64 [N, K], distinct; negative or at least M for none
    out: E4M3 [M, H]; scale: float32 [M, H / 128]
    """
    total, size = x.shape
    if not total:
        return
    columns, tall, programs = _tiling(total, size, x.device)
    launch(
        kernels.quantize_pairs, (programs,),
        x, slots, out, scale, total, out.shape[0], size, x.stride(0),
        SMALLEST=SMALLEST, TOP_K=slots.shape[1], ROWS=tall, COLUMNS=columns,
    )  # fmt: skip


def copy_pairs(
    x: Tensor, x_scale: Tensor, slots: Tensor, out: Tensor, scale: Tensor, *, launch: Launch = launch_directly
) -> None:
    """Copy rows that are quantized already, as `quantize_pairs` does.

    x: E4M3 [N, H]; x_scale: float32 [N, H / 128], of any strides
    """
    total, size = x.shape
    if not total:
        return
    columns, tall, programs = _tiling(total, size, x.device)
    launch(
        kernels.copy_pairs, (programs,),
        x, x_scale, slots, out, scale, total, out.shape[0], size, *x_scale.stride(),
        TOP_K=slots.shape[1], ROWS=tall, COLUMNS=columns,
    )  # fmt: skip


def activate_and_quantize(
    h: Tensor, out: Tensor, scale: Tensor, activation: Activation = Activation.SWIGLU, *, counts: Tensor | None = None,
    alpha: float = 1.702, limit: float = 7.0, up_first: bool = False, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Apply the activation (`ep_moe.types.Activation`) in float32, then quantize as `quantize_rows` does.

    h: bf16 or fp16 [M, 2 * I], gate first, then up (with `up_first` up first), or [M, I] for RELU2
    out: E4M3 [M, I]; scale: float32 [M, I / 128]; counts: as of `quantize_rows`
    alpha, limit: constants of SWIGLU_CLAMPED
    """
    total, size = out.numel() // out.shape[-1], out.shape[-1]
    if not total:
        return
    columns, tall, programs = _tiling(total, size, h.device)
    launch(
        kernels.activate, (programs,),
        h, counts, out, scale, total, total // _groups(counts), size, h.stride(-2), alpha, limit,
        SMALLEST=SMALLEST, ACTIVATION=activation.value, UP_FIRST=up_first, COUNTED=counts is not None,
        ONE=_groups(counts) == 1, ROWS=tall, COLUMNS=columns,
    )  # fmt: skip


def _tiling(rows: int, size: int, device: torch.device) -> tuple[int, int, int]:
    """Return columns and rows of a tile, and the number of programs that share the tiles."""
    columns = next(c for c in (1024, 512, 256, BLOCK) if size % c == 0)
    tall = TILE // columns
    tiles = cdiv(rows, tall) * (size // columns)
    return columns, tall, min(tiles, multiprocessors(device) * PROGRAMS)


def _programs(rows: int, experts: int, n: int, config: GemmConfig, device: torch.device) -> int:
    """Return the number of programs, at most the number of tiles."""
    tiles = (rows // config.block_m + 1 + experts) * -(-n // min(config.block_n, BLOCK))
    return min(tiles, max(1, multiprocessors(device) - config.spare_sms) * config.programs)


def _groups(counts: Tensor | None) -> int:
    return 1 if counts is None else counts.numel()


@cache
def has_hopper(device: torch.device) -> bool:
    """Return whether the Gluon kernels run on a device."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
