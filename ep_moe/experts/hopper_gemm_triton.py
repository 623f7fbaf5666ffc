"""The grouped GEMM of `hopper_gemm` for Hopper, in Gluon, built as `fp8_block_hopper_triton`: one warp copies operands
into a ring of buffers (TMA), two groups of four warps multiply (wgmma), 64 rows each.

Operands in bf16, or in E4M3 with scales that are multiplied in after the sums.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.experts.hopper_tiles_triton import (
    activate,
    copy_tiles,
    expert_tiles,
    next_stage,
    scale_of,
    store_staged,
    tile_place,
)

if TYPE_CHECKING:
    from ep_moe.experts.hopper_gemm import Tiles

BLOCK_M = 128
LINE = 128  # bytes of a row of a's and b's buffers: as wide as shared memory is swizzled


def launch(
    a: Tensor, b: Tensor, out: Tensor, ends: Tensor, cut: Tiles, programs: int, activation: str, alpha: float,
    limit: float, scales: tuple[Any, ...],
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e. a: [M, K], b: [L, N, K], both bf16 or both E4M3
    ends: int32 [L], one past each expert's last row
    scales: as `MatrixScales.given` of operands in E4M3 has them, five None for bf16

    With an activation: 128 x 256, of which the second 128 columns are those of `up`, and out is [M, N / 2] (or [M, N]
    without a gate); else [M, N].
    """
    experts, n, k = b.shape
    block_k = LINE // a.element_size()
    layout = _swizzled(a)
    left = TensorDescriptor(a, list(a.shape), list(a.stride()), [64, block_k], layout)
    right = TensorDescriptor(b, [experts * n, k], [k, 1], [128, block_k], layout)
    to = TensorDescriptor(out, list(out.shape), list(out.stride()), [64, 128], _swizzled(out))
    _gemm[(programs,)](
        left, right, out, to, ends, *scales, experts, len(a), n, k // block_k, alpha, limit,
        BLOCK_M=BLOCK_M, BLOCK_N=cut.block_n, BLOCK_K=block_k, GROUP_M=cut.group_m, STAGES=cut.stages,
        ACTIVATION=activation, REGISTERS=216, COPY_REGISTERS=72, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _swizzled(tensor: Tensor) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8 * tensor.element_size(), rank=2)


@gluon.jit
def _gemm(
    a, b, out, out_tiles, ends, a_factor, a_scale, a_step, b_scale, out_scale, experts, rows, n, k_blocks, alpha, limit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCK_M // 64, 64, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * BLOCK_N // 128, 128, BLOCK_K], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring = (a_ring, b_ring, full, free)
    groups = (None, ends, experts, rows, 0)
    # a tile's second 128 columns: its neighbours, or what its first 128 are the gates of
    GATED: gl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    WIDTH: gl.constexpr = 128 if GATED else BLOCK_N
    if GATED:
        to = (out, None, n // 2, alpha, limit)
        second = n // 2
    else:
        to = (out, None, n, alpha, limit)
        second = 128
    operands = (None, None, n, second, k_blocks)
    scales = (a_factor, a_scale, a_step, b_scale, out_scale)
    stage_to = (out_tiles, gl.allocate_shared_memory(out_tiles.dtype, [2, 64, 128], out_tiles.layout))
    gl.warp_specialize(
        [
            (_multiply, (operands, to, stage_to, scales, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES,
                         ACTIVATION, 0)),
            (_multiply, (operands, to, stage_to, scales, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES,
                         ACTIVATION, 1)),
            (copy_tiles, (a, b, operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, BLOCK_K)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply(
    operands, to, stage_to, scales, ring, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    k_blocks = operands[4]
    experts = groups[2]
    PARTS_N: gl.constexpr = BLOCK_N // 128
    DEPTH: gl.constexpr = 256 // ring[0].dtype.primitive_bitwidth  # numbers of a row that one instruction multiplies
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, DEPTH])
    columns = (to[2] + WIDTH - 1) // WIDTH
    stage = 0
    phase = 0
    tile = gl.program_id(0)
    expert = 0
    base = 0
    start, end, count = expert_tiles(groups, expert, BLOCK_M, columns)
    while expert < experts:
        if tile >= base + count:
            base += count
            expert += 1
            start, end, count = expert_tiles(groups, expert, BLOCK_M, columns)
        else:
            row, column = tile_place(tile - base, start, end, BLOCK_M, WIDTH, GROUP_M, columns)
            row += PART * 64
            acc, acc1, stage, phase = _sum(ring, k_blocks, stage, phase, PARTS_N, PART, STAGES, MMA)
            if scales[3] is not None:
                scale = scale_of(scales, expert)
                acc *= scale
                acc1 *= scale
            if ACTIVATION == "":
                _store(to, stage_to, scales, expert, acc, row, end, column, PART)
                if PARTS_N == 2:
                    _store(to, stage_to, scales, expert, acc1, row, end, column + 128, PART)
            elif ACTIVATION == "relu2":
                gl.static_assert(PARTS_N == 2)
                value = activate(to, acc, acc, ACTIVATION)
                _store(to, stage_to, scales, expert, value, row, end, column, PART)
                value = activate(to, acc1, acc1, ACTIVATION)
                _store(to, stage_to, scales, expert, value, row, end, column + 128, PART)
            else:
                gl.static_assert(PARTS_N == 2)
                value = activate(to, acc, acc1, ACTIVATION)
                _store(to, stage_to, scales, expert, value, row, end, column, PART)
            tile += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _sum(
    ring, k_blocks, stage, phase,
    PARTS_N: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A tile's products, added up by the tensor cores; the second sum is of its second 128 columns. Of E4M3 they keep
    some 14 bits of a sum (DeepSeek-V3's report, section 3.3.2)."""
    a_ring, b_ring, full, free = ring
    acc = gl.zeros([64, 128], gl.float32, MMA)
    acc1 = gl.zeros([64, 128], gl.float32, MMA)
    before = 0
    for k in range(k_blocks):
        mbarrier.wait(full.index(stage), phase)
        left = a_ring.index(stage * 2 + PART)
        right = b_ring.index(stage * PARTS_N).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        # the products of the block before are done when no more than this block's are under way
        if PARTS_N == 2:
            right1 = b_ring.index(stage * PARTS_N + 1).permute((1, 0))
            acc1 = warpgroup_mma(left, right1, acc1, is_async=True)
            acc, acc1 = warpgroup_mma_wait(2, (acc, acc1))
        else:
            acc = warpgroup_mma_wait(1, (acc,))
        mbarrier.arrive(free.index(before), pred=k > 0)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    if PARTS_N == 2:
        acc, acc1 = warpgroup_mma_wait(0, (acc, acc1))
    else:
        acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(free.index(before))
    return acc, acc1, stage, phase


@gluon.jit
def _store(to, stage_to, scales, expert, value, row, end, column, PART: gl.constexpr):
    out_scale = scales[4]
    if out_scale is not None:
        value *= 1.0 / gl.load(out_scale + expert)  # the conversion to E4M3 saturates
    store_staged(to, stage_to, value, row, end, column, PART)
