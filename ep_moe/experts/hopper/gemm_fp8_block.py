"""Expert GEMMs with DeepSeek's fp8 blocks, in Triton: e4m3 weights with a scale for each 128 x 128 block, e4m3 rows
with a scale for each 128 values.

A forward pass is `route_sort.group_pairs` (rows by expert), `quantize_pairs`, `grouped_gemm`, `activate_and_quantize`
(on Hopper both in one: `grouped_gemm_activate`), `grouped_gemm`, `route_sort.reduce`. Nothing here allocates,
waits for the device or tunes at run time: the caller brings every output, and all of it can be captured in a CUDA
graph. How many rows there are is known to the device alone; work beyond them is not started. Row counts on the host (M)
are upper bounds. launch: how kernels are launched.

Letters: L experts, M rows (of all experts), K and N a product's inner and outer size, N also received rows; both
multiples of 128.
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
from ep_moe.runtime.launch_cache import Launch, at_once, cdiv, next_power_of_2, pdl_launch
from ep_moe.runtime.triton_compat import HAS_GLUON
from ep_moe.types import Activation

BLOCK = 128
# tuned on an H200
TILE = 4096  # values of a tile of the kernels that quantize
PROGRAMS = 64  # of such a kernel, a multiprocessor


@dataclass(frozen=True)
class GemmConfig:
    """How `grouped_gemm` tiles its work.

    block_m, block_n: rows and columns of a tile
    group_m: row blocks of an expert that are walked together, so that their weights stay in the L2 cache
    stages: blocks of 128 along K that are on their way at once
    hopper: the Gluon kernel with copies and products in different warps (sm90 only; blocks 64 x 128, 64 x 256,
        128 x 128, 128 x 256), or else the plain Triton kernel
    wide: outputs are rearranged to be written in lines of 128 bytes (Gluon kernel)
    warps: of the plain kernel
    programs: a multiprocessor; spare_sms: multiprocessors that are left free
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
    """The default, by how many rows an expert has on average. m: rows of all experts: as many as are expected rather
    than as many as fit, where the caller knows; any config gives the right result for any number of rows.
    activated: for `grouped_gemm_activate`."""
    rows = m / max(num_experts, 1)
    if not hopper:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return GemmConfig(block_m, 128, stages=4, programs=2)
    if activated:
        return GemmConfig(64, 256, stages=5, hopper=True) if rows <= 64 else GemmConfig(128, 256, hopper=True)
    many = num_experts * n >= 1024 * 256  # tiles enough that the last round of them hardly counts
    if rows <= 48 and not many:
        return GemmConfig(64, 128, stages=4, hopper=True, programs=2)
    if rows <= 256:
        return GemmConfig(64, 256, stages=5, hopper=True)
    if n % 256:
        return GemmConfig(128, 128, stages=6, hopper=True)
    return GemmConfig(128, 256, stages=4, hopper=True)


def grouped_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out: Tensor, *,
    starts: Tensor | None = None, config: GemmConfig | None = None, launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e; sums in float32, and the scales of each block of 128 along K.

    a: e4m3 [M, K], or [L, C, K]; a_scale: float32 [M, K / 128] or [L, C, K / 128]; b: e4m3 [L, N, K]
    b_scale: float32 [L, N / 128, K / 128]; out: bf16, fp16 or float32 [M, N] or [L, C, N]
    ends: int32 [L]. With a [M, K]: one past each expert's last row; expert e's rows begin at starts[e], without
    `starts` at ends[e - 1]. With a [L, C, K]: how many of an expert's rows count.
    Rows of no expert are left as they are. All tensors are contiguous; `a` and `b` begin at a multiple of 16 bytes.
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
    starts: Tensor | None = None, config: GemmConfig | None = None, launch: Launch = at_once,
) -> None:  # fmt: skip
    """`grouped_gemm` and `activate_and_quantize` in one kernel, with no rounding between; where `has_hopper`.

    b: e4m3 [L, 2 * I, K], gate first, then up (with `up_first` the other way round), or [L, I, K] for RELU2
    out: e4m3 [M, I] or [L, C, I]; out_scale: float32 [M, I / 128] or [L, C, I / 128]; the rest as in those two.
    config: blocks of 64 x 256 or 128 x 256
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
    pdl: bool = False, launch: Launch = at_once,
) -> None:  # fmt: skip
    """scale = amax / 448 for each 128 values of a row, out = x / scale rounded to the nearest e4m3. An amax below 1e-10
    counts as 1e-10. Values that are no number stay none.

    x: bf16 or fp16 [M, K], or any [S, K] with `rows`; out: e4m3 [M, K]; scale: float32 [M, K / 128]
    rows: int32 or int64 [M], the row of x for each output row; an output row with -1 is left as it is
    counts: int32 [G] on the device: the output is G groups of M / G rows, of which the first counts[g] are made and
    the others left as they are. For rows sorted by expert, `ends[-1:]`.
    pdl: start before the kernel ahead has ended, and let the next one
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


def quantize_pairs(x: Tensor, slots: Tensor, out: Tensor, scale: Tensor, *, launch: Launch = at_once) -> None:
    """`quantize_rows` of each row of x once, into all rows of the output that `slots` names; the others are left as
    they are. What `quantize_rows` does with `rows`, but each row is read and quantized only once.

    x: bf16 or fp16 [N, H]; slots: int32 or int64 [N, K], below 0 or at least M for none; no two are the same
    out: e4m3 [M, H]; scale: float32 [M, H / 128]
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
    x: Tensor, x_scale: Tensor, slots: Tensor, out: Tensor, scale: Tensor, *, launch: Launch = at_once
) -> None:
    """`quantize_pairs` of rows that are quantized already. x: e4m3 [N, H]
    x_scale: float32 [N, H / 128], of any strides"""
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
    alpha: float = 1.702, limit: float = 7.0, up_first: bool = False, launch: Launch = at_once,
) -> None:  # fmt: skip
    """What stands between the two matrices (`ep_moe.types.Activation`), in float32, then as `quantize_rows`.

    h: bf16 or fp16 [M, 2 * I], gate first, then up (with `up_first` the other way round), or [M, I] for RELU2
    out: e4m3 [M, I]; scale: float32 [M, I / 128]; counts: as in `quantize_rows`
    alpha, limit: of SWIGLU_CLAMPED
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
    """Columns and rows of a tile, and how many programs walk over the tiles."""
    columns = next(c for c in (1024, 512, 256, BLOCK) if size % c == 0)
    tall = TILE // columns
    tiles = cdiv(rows, tall) * (size // columns)
    return columns, tall, min(tiles, multiprocessors(device) * PROGRAMS)


def _programs(rows: int, experts: int, n: int, config: GemmConfig, device: torch.device) -> int:
    """No more than there can be tiles."""
    tiles = (rows // config.block_m + 1 + experts) * -(-n // min(config.block_n, BLOCK))
    return min(tiles, max(1, multiprocessors(device) - config.spare_sms) * config.programs)


def _groups(counts: Tensor | None) -> int:
    return 1 if counts is None else counts.numel()


@cache
def has_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels run there."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
