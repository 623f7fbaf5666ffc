"""The product of `gemm_streaming`, in Gluon, with copies and products in different warps.

One warp copies weights (TMA), and one copies rows (cp.async), both into a ring of buffers. Four warps multiply (wgmma).
Weights are the left operand, so its 64 rows per instruction are used even with few tokens. Each program owns one tile
of weights, and fetches it before anything is known about the rows. The other tiles are distributed over the programs
when the number of each expert's rows is known.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from ep_moe.experts.hopper.gemm_fp8_block_gluon import activate, next_stage
from ep_moe.runtime.launch_cache import pdl_trigger, pdl_wait
from ep_moe.runtime.triton_compat import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def stream(
    w, x, source, ends, out, bias, x_factor, x_scale, x_step, w_scale, out_scale, w_step, scale_row, scale_block,
    experts, n, second, width, columns, k_blocks, alpha, limit, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, EXPERTS: gl.constexpr, ACTIVATION: gl.constexpr, SCALED_ROWS: gl.constexpr,
    CHANNELS: gl.constexpr, BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute `gemm_streaming.product`.

    second: distance from a tile's first 64 rows of weights to its second 64, which are the next rows, or the `up` rows
        of gates
    columns: tiles of an expert
    """
    w_ring = gl.allocate_shared_memory(w.dtype, [2 * STAGES, 64, BLOCK_K], w.layout)
    x_ring = gl.allocate_shared_memory(w.dtype, [STAGES, ROWS, BLOCK_K], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32)  # the warp of weights, and each thread of the warp of rows
        mbarrier.init(free.index(i), count=1)
    pdl_trigger(PDL)
    ring = (w_ring, x_ring, full, free)
    cut = (ends, experts, columns)
    to = (out, None, width, alpha, limit)
    scales = (x_factor, x_scale, x_step, w_scale, out_scale, w_step, source)
    own = (n, second, bias, scale_row, scale_block)
    kinds: gl.constexpr = (SCALED_ROWS, CHANNELS, BLOCKS)
    gl.warp_specialize(
        [
            (_multiply, (ring, cut, to, scales, own, k_blocks, ROWS, STAGES, EXPERTS, ACTIVATION, kinds, PDL)),
            (_copy_weights, (w, ring, cut, n, second, k_blocks, ROWS, BLOCK_K, STAGES, EXPERTS, ACTIVATION, PDL)),
            (_copy_rows, (x, source, ring, cut, k_blocks, ROWS, BLOCK_K, STAGES, EXPERTS, PDL)),
        ],
        [1, 1],
        [72, 120],
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _dealt(cut, ROWS: gl.constexpr, EXPERTS: gl.constexpr, WARPS: gl.constexpr):
    """Return for each expert: its index, rows, first row, tiles owned by programs, and distributed tiles.

    The distributed tiles are returned twice: summed up to this expert, and of this expert.
    """
    LANES: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0])
    ends, experts, columns = cut
    lane = gl.arange(0, EXPERTS, layout=LANES)
    first = gl.load(ends + lane - 1, mask=(lane > 0) & (lane < experts), other=0)
    count = gl.where(lane < experts, gl.load(ends + lane, mask=lane < experts, other=0) - first, 0)
    own = gl.minimum(gl.maximum(gl.num_programs(0) - lane * columns, 0), columns)
    dealt = gl.maximum((count + ROWS - 1) // ROWS * columns - own, 0)
    return lane, count, first, own, gl.associative_scan(dealt, 0, _add), dealt


@gluon.jit
def _tile(tile, experts_of, columns, ROWS: gl.constexpr):
    """Return expert, column, first row and rows of a tile. Negative tiles are those that programs own.

    These may have no rows.
    """
    lane, count, first, own, last, dealt = experts_of
    mine = tile + gl.num_programs(0)
    expert = gl.where(tile < 0, mine // columns, gl.sum((last <= tile).to(gl.int32), 0))
    here = lane == expert
    at = tile - gl.sum(gl.where(here, last - dealt - own, 0), 0)
    at = gl.where(tile < 0, mine % columns, at)
    before = at // columns * ROWS
    rows = gl.minimum(gl.sum(gl.where(here, count, 0), 0) - before, ROWS)
    return expert, at % columns, gl.sum(gl.where(here, first, 0), 0) + before, rows


@gluon.jit
def _tiles(experts_of):
    return gl.max(experts_of[4], 0)


@gluon.jit
def _copy_weights(
    w, ring, cut, n, second, k_blocks, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    EXPERTS: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = 128 if ACTIVATION == "" or ACTIVATION == "relu2" else 64
    columns = cut[2]
    program = gl.program_id(0)
    row = program // columns * n + program % columns * WIDTH
    stage = 0
    phase = 1
    stage, phase = _copy_tile_weights(w, ring, row, second, k_blocks, stage, phase, BLOCK_K, STAGES)
    pdl_wait(PDL)
    experts_of = _dealt(cut, ROWS, EXPERTS, 1)
    for tile in range(program, _tiles(experts_of), gl.num_programs(0)):
        expert, column, _, _ = _tile(tile, experts_of, columns, ROWS)
        stage, phase = _copy_tile_weights(
            w, ring, expert * n + column * WIDTH, second, k_blocks, stage, phase, BLOCK_K, STAGES
        )


@gluon.jit
def _copy_tile_weights(w, ring, row, second, k_blocks, stage, phase, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    w_ring, _, full, free = ring
    for k in range(k_blocks):
        mbarrier.wait(free.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, 128 * 128)
        tma.async_copy_global_to_shared(w, [row, k * BLOCK_K], bar, w_ring.index(2 * stage))
        tma.async_copy_global_to_shared(w, [row + second, k * BLOCK_K], bar, w_ring.index(2 * stage + 1))
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _copy_rows(
    x, source, ring, cut, k_blocks, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    EXPERTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy rows into the ring. source: the row of x of each sorted row; None: x is sorted"""
    ends, _, columns = cut
    program = gl.program_id(0)
    pdl_wait(PDL)
    expert = program // columns  # load the own tile's rows before the other tiles are known
    start = gl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = gl.minimum(gl.load(ends + expert) - start, ROWS)
    stage = 0
    phase = 1
    stage, phase = _copy_tile_rows(x, source, ring, start, count, k_blocks, stage, phase, ROWS, BLOCK_K, STAGES)
    experts_of = _dealt(cut, ROWS, EXPERTS, 1)
    for tile in range(program, _tiles(experts_of), gl.num_programs(0)):
        _, _, first, left = _tile(tile, experts_of, columns, ROWS)
        stage, phase = _copy_tile_rows(x, source, ring, first, left, k_blocks, stage, phase, ROWS, BLOCK_K, STAGES)


@gluon.jit
def _copy_tile_rows(
    x, source, ring, start, count, k_blocks, stage, phase, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = BLOCK_K // 8  # numbers of 16 bytes
    LINES: gl.constexpr = gl.BlockedLayout([1, WIDE], [4, 8], [1, 1], [1, 0])
    _, x_ring, full, free = ring
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LINES))
    row = start + r
    if source is not None:
        row = gl.load(source + row, mask=r < count, other=0)
    at = x + row.to(gl.int64).expand_dims(1) * (k_blocks * BLOCK_K) + c.expand_dims(0)
    inside = (r < count).expand_dims(1) & (c >= 0).expand_dims(0)
    for k in range(k_blocks):
        mbarrier.wait(free.index(stage), phase)
        async_copy.async_copy_global_to_shared(x_ring.index(stage), at + k * BLOCK_K, mask=inside)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _multiply(
    ring, cut, to, scales, own, k_blocks, ROWS: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply tiles from the ring, and store the results.

    own: rows of an expert's weights, `second`, bias, and strides of the rows' block scales (by row, by block)
    SCALED: one scale per row of x; also one per row of weights; one per block of both
    """
    n, second, bias, scale_row, scale_block = own
    SCALED_ROWS: gl.constexpr = SCALED[0]
    CHANNELS: gl.constexpr = SCALED[1]
    BLOCKS: gl.constexpr = SCALED[2]
    WIDTH: gl.constexpr = 128 if ACTIVATION == "" or ACTIVATION == "relu2" else 64
    DEPTH: gl.constexpr = 256 // ring[0].dtype.primitive_bitwidth  # numbers of a row that one instruction multiplies
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, DEPTH])
    columns = cut[2]
    pdl_wait(PDL)
    experts_of = _dealt(cut, ROWS, EXPERTS, 4)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0) - gl.num_programs(0), _tiles(experts_of), gl.num_programs(0)):
        expert, column, start, count = _tile(tile, experts_of, columns, ROWS)
        if BLOCKS:
            at = scales[3] + expert * scales[5]
            blocks = (at + column * WIDTH // 128 * k_blocks, at + (column * WIDTH + second) // 128 * k_blocks)
            rows = _row_of(scales, start, count, ROWS, MMA) * scale_row
            acc, acc1, stage, phase = _sum_of_blocks(
                ring, scales[1] + rows, scale_block, blocks, count, k_blocks, stage, phase, ROWS, STAGES, MMA
            )
        elif scales[3] is not None:  # load scales while the products run
            if CHANNELS:
                gl.static_assert(SCALED_ROWS)
                scale = _row_scales(scales, start, count, ROWS, MMA)
                at = scales[3] + expert * scales[5] + column * WIDTH
                of_channels = _per_channel(at, MMA)
                of_channels1 = _per_channel(at + second, MMA)
            else:
                scale = _scale_of(scales, expert, SCALED_ROWS)
                if SCALED_ROWS:
                    scale *= _row_scales(scales, start, count, ROWS, MMA)
        if not BLOCKS:
            acc, acc1, stage, phase = _sum(ring, k_blocks, stage, phase, ROWS, STAGES, MMA)
        if scales[3] is not None and not BLOCKS:
            acc *= scale
            acc1 *= scale
            if CHANNELS:
                acc *= of_channels
                acc1 *= of_channels1
        if bias is not None:
            added = bias + expert * n
            acc += _per_channel(added + column * WIDTH, MMA)
            # the second half of a tile may be past the last row of weights
            acc1 += _per_channel(added + gl.minimum(column * WIDTH + second, n - 64), MMA)
        if ACTIVATION == "":
            _store(to, scales, expert, acc, start, count, column * 128)
            _store(to, scales, expert, acc1, start, count, column * 128 + 64)
        elif ACTIVATION == "relu2":
            _store(to, scales, expert, activate(to, acc, acc, ACTIVATION), start, count, column * 128)
            _store(to, scales, expert, activate(to, acc1, acc1, ACTIVATION), start, count, column * 128 + 64)
        else:
            _store(to, scales, expert, activate(to, acc, acc1, ACTIVATION), start, count, column * 64)


@gluon.jit
def _sum(ring, k_blocks, stage, phase, ROWS: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):
    """Return a tile's sums for the first 64 rows of weights and for the second."""
    w_ring, x_ring, full, free = ring
    acc = gl.zeros([64, ROWS], gl.float32, MMA)
    acc1 = gl.zeros([64, ROWS], gl.float32, MMA)
    before = 0
    for k in range(k_blocks):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()  # makes the rows that threads copied visible to the tensor cores
        rows = x_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_ring.index(2 * stage), rows, acc, is_async=True)
        acc1 = warpgroup_mma(w_ring.index(2 * stage + 1), rows, acc1, is_async=True)
        # at most the two products of this block are still running, so those of the previous block are done
        acc, acc1 = warpgroup_mma_wait(2, (acc, acc1))
        mbarrier.arrive(free.index(before), pred=k > 0)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    acc, acc1 = warpgroup_mma_wait(0, (acc, acc1))
    mbarrier.arrive(free.index(before))
    return acc, acc1, stage, phase


@gluon.jit
def _sum_of_blocks(
    ring, x_scale, scale_block, w_scales, count, k_blocks, stage, phase, ROWS: gl.constexpr, STAGES: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Return a tile's sums as `_sum`, with a scale per block of 128 along K.

    x_scale: pointer to the first scales of the tile's rows; w_scales: pointers to the first scales of its weights, for
    the first 64 rows and the second
    """
    w_ring, x_ring, full, free = ring
    at, at1 = w_scales
    inside = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)) < count
    acc = gl.zeros([64, ROWS], gl.float32, MMA)
    acc1 = gl.zeros([64, ROWS], gl.float32, MMA)
    zero = gl.zeros([64, ROWS], gl.float32, MMA)
    of_rows = gl.load(x_scale, mask=inside, other=0.0)
    first = gl.load(at)
    second = gl.load(at1)
    for k in range(k_blocks):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()  # makes the rows that threads copied visible to the tensor cores
        rows = x_ring.index(stage).permute((1, 0))
        product = warpgroup_mma(w_ring.index(2 * stage), rows, zero, use_acc=False, is_async=True)
        # load the next block's scales while this block is multiplied
        scale = of_rows * first
        scale1 = of_rows * second
        ahead = gl.minimum(k + 1, k_blocks - 1)
        of_rows = gl.load(x_scale + ahead * scale_block, mask=inside, other=0.0)
        first = gl.load(at + ahead)
        second = gl.load(at1 + ahead)
        done = warpgroup_mma_wait(0, (product,))
        acc += done * scale.expand_dims(0)
        product1 = warpgroup_mma(w_ring.index(2 * stage + 1), rows, zero, use_acc=False, is_async=True)
        done1 = warpgroup_mma_wait(0, (product1,))
        mbarrier.arrive(free.index(stage))
        acc1 += done1 * scale1.expand_dims(0)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, acc1, stage, phase


@gluon.jit
def _store(to, scales, expert, value, start, count, column):
    """Store value [64 columns of out, ROWS rows of out], without columns past the last, which are of other weights."""
    out, _, width, _, _ = to
    out_scale = scales[4]
    if out_scale is not None:
        value *= 1.0 / gl.load(out_scale + expert)  # the conversion to E4M3 saturates
    WIDE: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth  # numbers of 16 bytes
    LINES: gl.constexpr = gl.BlockedLayout([WIDE, 1], [64 // WIDE, WIDE // 2], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(out.dtype.element_ty), LINES)
    c = column + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    r = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LINES))
    at = out + (start + r).to(gl.int64).expand_dims(0) * width + c.expand_dims(1)
    gl.store(at, value, mask=(r < count).expand_dims(0) & (c < width).expand_dims(1))


@gluon.jit
def _scale_of(scales, expert, SCALED_ROWS: gl.constexpr):
    """Return the factor of an expert's sums, without the scales of rows."""
    a_factor, a_scale, a_step, b_scale, _, b_step, _ = scales
    scale = a_factor * gl.load(b_scale + expert * b_step)
    if a_scale is not None and not SCALED_ROWS:
        scale *= gl.load(a_scale + expert * a_step)
    return scale


@gluon.jit
def _row_scales(scales, start, count, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Return the scales of a tile's rows, [1, ROWS]."""
    inside = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)) < count
    at = scales[1] + _row_of(scales, start, count, ROWS, MMA)
    return gl.load(at, mask=inside, other=0.0).expand_dims(0)


@gluon.jit
def _row_of(scales, start, count, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Return the row of x of each of a tile's rows, [ROWS]."""
    source = scales[6]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
    row = start + r
    if source is not None:
        row = gl.load(source + row, mask=r < count, other=0)
    return row


@gluon.jit
def _per_channel(own, MMA: gl.constexpr):
    """Load a number for each of 64 rows of weights, [64, 1]."""
    return gl.load(own + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))).to(gl.float32).expand_dims(1)
