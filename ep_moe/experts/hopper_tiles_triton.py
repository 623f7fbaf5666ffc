"""What the grouped GEMMs for Hopper share, in Gluon: how tiles are numbered, the warp that copies operands into a ring
of buffers (TMA), activations, and storing.

groups: (starts or None, ends, experts, rows, capacity), as `fp8_block_kernels.grouped_gemm` takes them
to: (out, its scales or None, columns, alpha and limit of the clamped activation)
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def expert_tiles(groups, expert, BLOCK_M: gl.constexpr, columns):
    """First row, one past the last row, and tiles of an expert; no tiles past the last expert."""
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
    """Row and column of a tile of an expert: bands of GROUP_M row blocks, column by column."""
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    band = tile // (GROUP_M * columns)
    height = gl.minimum(blocks - band * GROUP_M, GROUP_M)
    rest = tile % (GROUP_M * columns)
    return start + (band * GROUP_M + rest % height) * BLOCK_M, rest // height * WIDTH


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Of a ring of buffers, whose barriers change their phase with each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


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


@gluon.jit
def scale_of(scales, expert):
    """What an expert's sums are multiplied by, of scales as `MatrixScales.given` has them."""
    a_factor, a_scale, a_step, b_scale, _ = scales
    scale = a_factor * gl.load(b_scale + expert)
    if a_scale is not None:
        scale *= gl.load(a_scale + expert * a_step)
    return scale


@gluon.constexpr_function
def _lines(bits):
    """Of a 64 x 128 tile in numbers of so many bits: 16 bytes of neighbouring columns a thread (32 of float32), a line
    of 128 bytes for the threads beside each other; rows stay in their warp."""
    if bits == 8:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0], [8, 0]], [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]]
    else:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 64], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128]
    )


@gluon.jit
def store_tile(to, acc, row, end, column, WIDE: gl.constexpr, MMA: gl.constexpr):
    """Of acc, 64 x 128, the rows before `end` and the columns that there are. WIDE: in lines of 128 bytes"""
    out = to[0]
    n = to[2]
    LAYOUT: gl.constexpr = _lines(out.dtype.element_ty.primitive_bitwidth) if WIDE else MMA
    value = gl.convert_layout(acc.to(out.dtype.element_ty), LAYOUT)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    at = out + r.to(gl.int64).expand_dims(1) * n + c.expand_dims(0)
    gl.store(at, value, mask=(r < end).expand_dims(1) & (c < n).expand_dims(0))
