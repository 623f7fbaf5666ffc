"""The grouped GEMM of `gemm_fp8_block` for Hopper, in Gluon, with copies and products in different warps.

The programs of all multiprocessors share the tiles. One warp copies operands into a ring of buffers (TMA). One or two
groups of four warps multiply (wgmma), each its own 64 rows or 128 columns. While one group scales and adds its
products, the tensor cores work for the other.

Arguments of several functions:

groups: (starts or None, ends, experts, rows, capacity), as of `gemm_fp8_block.grouped_gemm`
to: (out, its scales or None, columns, alpha and limit of the clamped activation)
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from torch import Tensor

from ep_moe.runtime.launch_cache import Launch
from ep_moe.runtime.triton_compat import (
    TensorDescriptor,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, out_scale: Tensor | None,
    starts: Tensor | None, ends: Tensor, capacity: int, block_m: int, block_n: int, group_m: int, stages: int,
    programs: int, wide: bool, activation: str, up_first: bool, alpha: float, limit: float, smallest: float,
    launch: Launch,
) -> None:  # fmt: skip
    """Launch the GEMM.

    a: fp8 [M, K]; b: fp8 [L, N, K]; other arguments as of `gemm_fp8_block`
    block_m x block_n: 64 x 128 (one group of multiplying warps, two programs per multiprocessor), 64 x 256, 128 x 128
        or 128 x 256 (two groups). With an activation: 64 x 256 (one group) or 128 x 256. The second 128 columns are
        then those of `up`, and out is fp8 [M, N / 2] ([M, N] without a gate) with a scale per 128 columns
    """
    experts, n, k = b.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    left = TensorDescriptor(a, list(a.shape), list(a.stride()), [64, 128], layout)
    right = TensorDescriptor(b, [experts * n, k], [k, 1], [128, 128], layout)
    groups = 1 if block_m == 64 and (block_n == 128 or activation) else 2
    # the first multiplying group gets the registers that the others leave; with 216 and 72 no group spills
    registers = 168 if groups == 2 else 128 if block_n == 128 else 144
    launch(
        _gemm, (programs,),
        left, right, a_scale, b_scale, out, out_scale, starts, ends, experts, a.shape[0], capacity, n, k // 128,
        alpha, limit, BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=group_m, STAGES=stages, WIDE=wide, GROUPS=groups,
        ACTIVATION=activation, UP_FIRST=up_first, SMALLEST=smallest, REGISTERS=216, COPY_REGISTERS=72, num_warps=4,
        maxnreg=registers,
    )  # fmt: skip


@gluon.jit
def _gemm(
    a, b, a_scale, b_scale, out, out_scale, starts, ends, experts, rows, capacity, n, k_blocks, alpha, limit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    GROUPS: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, SMALLEST: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCK_M // 64, 64, 128], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * BLOCK_N // 128, 128, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    ring = (a_ring, b_ring, full, free)
    groups = (starts, ends, experts, rows, capacity)
    # a tile's second 128 columns: the next columns, or the `up` columns of the first 128, which are gates
    GATED: gl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    WIDTH: gl.constexpr = 128 if GATED else BLOCK_N
    if GATED:
        to = (out, out_scale, n // 2, alpha, limit)
        second = n // 2
    else:
        to = (out, out_scale, n, alpha, limit)
        second = 128
    operands = (a_scale, b_scale, n, second, k_blocks)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, WIDE,
                             ACTIVATION, UP_FIRST, SMALLEST, GROUPS, 0)),
                (copy_tiles, (a, b, operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, 128)),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, WIDE,
                             ACTIVATION, UP_FIRST, SMALLEST, GROUPS, 0)),
                (_multiply, (operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, WIDE,
                             ACTIVATION, UP_FIRST, SMALLEST, GROUPS, 1)),
                (copy_tiles, (a, b, operands, to, ring, groups, BLOCK_M, BLOCK_N, WIDTH, GROUP_M, STAGES, 128)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _multiply(
    operands, to, ring, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, SMALLEST: gl.constexpr, GROUPS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    a_scale, b_scale, n, second, k_blocks = operands
    a_ring, b_ring, full, free = ring
    experts = groups[2]
    rows = groups[3]
    PARTS_M: gl.constexpr = BLOCK_M // 64
    PARTS_N: gl.constexpr = BLOCK_N // 128
    MY_M: gl.constexpr = PART if PARTS_M == 2 else 0
    MY_N: gl.constexpr = 0 if PARTS_M == 2 else PART
    TWO: gl.constexpr = PARTS_N == 2 and (PARTS_M == 2 or GROUPS == 1)  # this group has both halves of the columns
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    columns = (to[2] + WIDTH - 1) // WIDTH
    n_blocks = n // 128
    stage = 0
    phase = 0
    tile = gl.program_id(0)
    expert = 0
    base = 0
    start, end, count = expert_tiles(groups, expert, BLOCK_M, columns)
    zero = gl.zeros([64, 128], gl.float32, MMA)
    while expert < experts:
        if tile >= base + count:
            base += count
            expert += 1
            start, end, count = expert_tiles(groups, expert, BLOCK_M, columns)
        else:
            row, column = tile_place(tile - base, start, end, BLOCK_M, WIDTH, GROUP_M, columns)
            row += MY_M * 64
            column += MY_N * 128
            at = gl.minimum(row + gl.arange(0, 64, layout=ROWS), rows - 1)
            a_at = a_scale + at.to(gl.int64) * k_blocks
            b_block = expert * n_blocks + column // 128
            last = expert * n_blocks + n_blocks - 1  # a tile may extend past the expert's columns
            b_at = b_scale + gl.minimum(b_block, last) * k_blocks
            b_at1 = b_scale + gl.minimum(b_block + second // 128, last) * k_blocks
            acc = gl.zeros([64, 128], gl.float32, MMA)
            acc1 = gl.zeros([64, 128], gl.float32, MMA)
            sa = gl.load(a_at)
            sb = gl.load(b_at)
            sb1 = gl.load(b_at1) if TWO else sb
            for k in range(k_blocks):
                mbarrier.wait(full.index(stage), phase)
                left = a_ring.index(stage * PARTS_M + MY_M)
                right = b_ring.index(stage * PARTS_N + MY_N).permute((1, 0))
                product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
                # load the next block's scales while this block is multiplied
                scale = sa * sb
                scale1 = sa * sb1
                ahead = gl.minimum(k + 1, k_blocks - 1)
                sa = gl.load(a_at + ahead)
                sb = gl.load(b_at + ahead)
                if TWO:
                    sb1 = gl.load(b_at1 + ahead)
                done = warpgroup_mma_wait(0, (product,))
                if TWO:
                    acc += done * scale.expand_dims(1)
                    right1 = b_ring.index(stage * PARTS_N + 1).permute((1, 0))
                    product1 = warpgroup_mma(left, right1, zero, use_acc=False, is_async=True)
                    done1 = warpgroup_mma_wait(0, (product1,))
                    mbarrier.arrive(free.index(stage))
                    acc1 += done1 * scale1.expand_dims(1)
                else:
                    mbarrier.arrive(free.index(stage))
                    acc += done * scale.expand_dims(1)
                stage, phase = next_stage(stage, phase, STAGES)
            if ACTIVATION == "":
                store_tile(to, acc, row, end, column, WIDE, MMA)
                if TWO:
                    store_tile(to, acc1, row, end, column + 128, WIDE, MMA)
            elif ACTIVATION == "relu2":
                gl.static_assert(TWO)
                _store_quantized(to, activate(to, acc, acc, ACTIVATION), row, end, column, SMALLEST, MMA)
                _store_quantized(to, activate(to, acc1, acc1, ACTIVATION), row, end, column + 128, SMALLEST, MMA)
            else:
                gl.static_assert(TWO)
                gate = acc1 if UP_FIRST else acc
                up = acc if UP_FIRST else acc1
                _store_quantized(to, activate(to, gate, up, ACTIVATION), row, end, column, SMALLEST, MMA)
            tile += gl.num_programs(0)


@gluon.jit
def _store_quantized(to, value, row, end, column, SMALLEST: gl.constexpr, MMA: gl.constexpr):
    LINES: gl.constexpr = _lines(8)
    out = to[0]
    scale = to[1]
    n = to[2]
    step = gl.maximum(gl.max(gl.abs(value), 1), SMALLEST) / 448.0
    quantized = gl.convert_layout((value * (1.0 / step).expand_dims(1)).to(gl.float8e4nv), LINES)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    c = column + gl.arange(0, 128, layout=gl.SliceLayout(0, LINES))
    at = out + r.to(gl.int64).expand_dims(1) * n + c.expand_dims(0)
    gl.store(at, quantized, mask=(r < end).expand_dims(1) & (c < n).expand_dims(0))
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    gl.store(scale + r.to(gl.int64) * (n // 128) + column // 128, step, mask=(r < end) & (column < n))


@gluon.jit
def copy_tiles(
    a, b, operands, to, ring, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    n = operands[2]
    second = operands[3]
    k_blocks = operands[4]
    a_ring, b_ring, full, free = ring
    experts = groups[2]
    PARTS_M: gl.constexpr = BLOCK_M // 64
    PARTS_N: gl.constexpr = BLOCK_N // 128
    columns = (to[2] + WIDTH - 1) // WIDTH
    stage = 0
    phase = 1
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
            b_row = expert * n + column
            for k in range(k_blocks):
                mbarrier.wait(free.index(stage), phase)
                bar = full.index(stage)
                mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * 128)
                for i in gl.static_range(PARTS_M):
                    buffer = a_ring.index(stage * PARTS_M + i)
                    tma.async_copy_global_to_shared(a, [row + i * 64, k * BLOCK_K], bar, buffer)
                for i in gl.static_range(PARTS_N):
                    buffer = b_ring.index(stage * PARTS_N + i)
                    tma.async_copy_global_to_shared(b, [b_row + i * second, k * BLOCK_K], bar, buffer)
                stage, phase = next_stage(stage, phase, STAGES)
            tile += gl.num_programs(0)


@gluon.jit
def expert_tiles(groups, expert, BLOCK_M: gl.constexpr, columns):
    """Return an expert's first row, the index after its last row, and its tiles; no tiles past the last expert."""
    starts, ends, experts, rows, capacity = groups
    end = gl.load(ends + expert, mask=expert < experts, other=0)
    if capacity > 0:
        start = expert * capacity
        end = start + gl.minimum(end, capacity)
    elif starts is None:
        start = gl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    else:
        start = gl.load(starts + expert, mask=expert < experts, other=0)
    end = gl.minimum(end, rows)
    return start, end, (gl.maximum(end - start, 0) + BLOCK_M - 1) // BLOCK_M * columns


@gluon.jit
def tile_place(tile, start, end, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr, columns):
    """Return row and column of an expert's tile. Tiles are in bands of GROUP_M row blocks, column by column."""
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    band = tile // (GROUP_M * columns)
    height = gl.minimum(blocks - band * GROUP_M, GROUP_M)
    rest = tile % (GROUP_M * columns)
    return start + (band * GROUP_M + rest % height) * BLOCK_M, rest // height * WIDTH


@gluon.constexpr_function
def _lines(bits):
    """Return the layout of a 64 x 128 tile for stores, by the bits of a number.

    A thread has 16 bytes of neighboring columns (32 for float32), and neighboring threads have a line of 128 bytes.
    Rows stay in their warp.
    """
    if bits == 8:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0], [8, 0]], [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]]
    else:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 64], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128]
    )


@gluon.jit
def store_tile(to, acc, row, end, column, WIDE: gl.constexpr, MMA: gl.constexpr):
    """Store acc, 64 x 128, without rows from `end` on and columns past the last. WIDE: in lines of 128 bytes"""
    out = to[0]
    n = to[2]
    LAYOUT: gl.constexpr = _lines(out.dtype.element_ty.primitive_bitwidth) if WIDE else MMA
    value = gl.convert_layout(acc.to(out.dtype.element_ty), LAYOUT)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    at = out + r.to(gl.int64).expand_dims(1) * n + c.expand_dims(0)
    gl.store(at, value, mask=(r < end).expand_dims(1) & (c < n).expand_dims(0))


# --- shared by all Gluon kernels of this folder ---------------------------------------------------------------------


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of a ring of buffers, and its phase, which changes with each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def activate(to, gate, up, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu2":
        positive = gl.where(gate < 0.0, 0.0, gate)
        return positive * positive
    elif ACTIVATION == "swiglu":  # noqa: RET505  (the compiler wants one chain)
        return gate / (1.0 + gl.exp(-gate)) * up
    elif ACTIVATION == "geglu":
        return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    else:
        gl.static_assert(ACTIVATION == "swiglu_clamped")
        alpha = to[3]
        limit = to[4]
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, up)
        up = gl.where(up < -limit, -limit, up)
        return (up + 1.0) * (gate / (1.0 + gl.exp(-alpha * gate)))
