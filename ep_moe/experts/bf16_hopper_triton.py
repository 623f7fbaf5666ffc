"""The grouped GEMM of `bf16_kernels` for Hopper, in Gluon, built as `fp8_block_hopper_triton`: one warp copies operands
into a ring of buffers (TMA), two groups of four warps multiply (wgmma), each its own 64 rows or its own 128 columns."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.experts.hopper_tiles_triton import activate, copy_tiles, expert_tiles, store_tile, tile_place

BLOCK_K = 64  # columns of a's and b's buffers: 128 bytes, as wide as shared memory is swizzled


def launch(
    a: Tensor, b: Tensor, out: Tensor, ends: Tensor, block_m: int, block_n: int, group_m: int, stages: int,
    programs: int, activation: str, alpha: float, limit: float,
) -> None:  # fmt: skip
    """out[r] = a[r] @ b[e].T for each row r of expert e. a: bf16 [M, K]; b: bf16 [L, N, K]
    ends: int32 [L], one past each expert's last row
    block_m x block_n: 64 x 128 (one group of multiplying warps, two programs a multiprocessor), 64 x 256 or 128 x 256
    (two groups)

    With an activation: 64 x 256 (one group) or 128 x 256, of which the second 128 columns are those of `up`, and out is
    [M, N / 2] (or [M, N] without a gate); else [M, N].
    """
    experts, n, k = b.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    left = TensorDescriptor(a, list(a.shape), list(a.stride()), [64, BLOCK_K], layout)
    right = TensorDescriptor(b, [experts * n, k], [k, 1], [128, BLOCK_K], layout)
    groups = 1 if block_m == 64 and (block_n == 128 or activation) else 2
    registers = 168 if groups == 2 else 128 if block_n == 128 else 168
    _gemm[(programs,)](
        left, right, out, ends, experts, len(a), n, k // BLOCK_K, alpha, limit,
        BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=group_m, STAGES=stages, GROUPS=groups, ACTIVATION=activation,
        REGISTERS=216, COPY_REGISTERS=72, num_warps=4, maxnreg=registers,
    )  # fmt: skip


@gluon.jit
def _gemm(
    a, b, out, ends, experts, rows, n, k_blocks, alpha, limit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCK_M // 64, 64, 64], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * BLOCK_N // 128, 128, 64], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
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
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, ACTIVATION, 1, 0)),
                (copy_tiles, (a, b, operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, 64)),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, ACTIVATION, 2, 0)),
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, ACTIVATION, 2, 1)),
                (copy_tiles, (a, b, operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, 64)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _multiply(
    operands, to, ring, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, GROUPS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    k_blocks = operands[4]
    a_ring, b_ring, full, free = ring
    experts = groups[2]
    PARTS_M: gl.constexpr = BLOCK_M // 64
    PARTS_N: gl.constexpr = BLOCK_N // 128
    MY_M: gl.constexpr = PART if PARTS_M == 2 else 0
    MY_N: gl.constexpr = 0 if PARTS_M == 2 else PART
    TWO: gl.constexpr = PARTS_N == 2 and (PARTS_M == 2 or GROUPS == 1)  # both halves of the columns are mine
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
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
            row += MY_M * 64
            column += MY_N * 128
            acc = gl.zeros([64, 128], gl.float32, MMA)
            acc1 = gl.zeros([64, 128], gl.float32, MMA)
            before = 0
            for k in range(k_blocks):
                mbarrier.wait(full.index(stage), phase)
                left = a_ring.index(stage * PARTS_M + MY_M)
                right = b_ring.index(stage * PARTS_N + MY_N).permute((1, 0))
                acc = warpgroup_mma(left, right, acc, is_async=True)
                # the products of the block before are done when no more than this block's are under way
                if TWO:
                    right1 = b_ring.index(stage * PARTS_N + 1).permute((1, 0))
                    acc1 = warpgroup_mma(left, right1, acc1, is_async=True)
                    acc, acc1 = warpgroup_mma_wait(2, (acc, acc1))
                else:
                    acc = warpgroup_mma_wait(1, (acc,))
                mbarrier.arrive(free.index(before), pred=k > 0)
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            if TWO:
                acc, acc1 = warpgroup_mma_wait(0, (acc, acc1))
            else:
                acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index(before))
            if ACTIVATION == "":
                store_tile(to, acc, row, end, column, True, MMA)
                if TWO:
                    store_tile(to, acc1, row, end, column + 128, True, MMA)
            elif ACTIVATION == "relu2":
                gl.static_assert(TWO)
                store_tile(to, activate(to, acc, acc, ACTIVATION), row, end, column, True, MMA)
                store_tile(to, activate(to, acc1, acc1, ACTIVATION), row, end, column + 128, True, MMA)
            else:
                gl.static_assert(TWO)
                store_tile(to, activate(to, acc, acc1, ACTIVATION), row, end, column, True, MMA)
            tile += gl.num_programs(0)
