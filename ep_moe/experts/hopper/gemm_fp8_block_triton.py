"""The Triton kernels of `gemm_fp8_block`, except the GEMM for Hopper."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from ep_moe.quant.fp8 import e4m3_blocks
from ep_moe.runtime.launch_cache import pdl_trigger, pdl_wait
from ep_moe.runtime.triton_compat import tl, triton


@triton.jit
def gemm(
    a, a_scale, b, b_scale, out, starts, ends, experts, rows, capacity, n, k,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute `grouped_gemm` on any GPU with E4M3. Programs share the tiles of all experts; BLOCK_N is at most 128."""
    lane = tl.arange(0, EXPERTS)
    there = lane < experts
    end = tl.load(ends + lane, mask=there, other=0)
    if capacity > 0:
        start = lane * capacity
        end = tl.where(there, start + tl.minimum(end, capacity), start)
    else:
        if starts is None:
            start = tl.load(ends + lane - 1, mask=there & (lane > 0), other=0)
        else:
            start = tl.load(starts + lane, mask=there, other=0)
    end = tl.minimum(end, rows)
    columns = tl.cdiv(n, BLOCK_N)
    count = tl.where(there, tl.cdiv(tl.maximum(end - start, 0), BLOCK_M) * columns, 0)
    last = tl.cumsum(count, 0)
    total = tl.sum(count)
    k_blocks = k // 128
    inner = tl.arange(0, 128)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tl.sum((last <= tile).to(tl.int32))
        mine = lane == expert
        first_row = tl.sum(tl.where(mine, start, 0))
        end_row = tl.sum(tl.where(mine, end, 0))
        place = tile - tl.sum(tl.where(mine, last - count, 0))
        blocks = tl.cdiv(end_row - first_row, BLOCK_M)
        band = place // (GROUP_M * columns)
        height = tl.minimum(blocks - band * GROUP_M, GROUP_M)
        rest = place % (GROUP_M * columns)
        row = first_row + (band * GROUP_M + rest % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = rest // height * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_row = tl.minimum(row, rows - 1).to(tl.int64)
        safe_column = tl.minimum(column, n - 1).to(tl.int64)
        a_at = a + safe_row[:, None] * k + inner[None, :]
        b_at = b + expert.to(tl.int64) * n * k + safe_column[None, :] * k + inner[:, None]
        a_scale_at = a_scale + safe_row * k_blocks
        b_scale_at = b_scale + (expert * (n // 128) + rest // height * BLOCK_N // 128) * k_blocks
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in range(k_blocks):
            left = tl.load(a_at + i * 128)
            right = tl.load(b_at + i * 128)
            scale = tl.load(a_scale_at + i) * tl.load(b_scale_at + i)
            acc += tl.dot(left, right) * scale[:, None]
        to = out + row.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(row < end_row)[:, None] & (column < n)[None, :])


@triton.jit
def _valid_rows(counts, row, total, group_size, COUNTED: tl.constexpr, ONE: tl.constexpr):
    valid = row < total
    if COUNTED and not ONE:
        valid = valid & (row % group_size < tl.load(counts + row // group_size, mask=valid, other=0))
    return valid


@triton.jit
def _row_limit(counts, total, COUNTED: tl.constexpr, ONE: tl.constexpr):
    limit = total
    if COUNTED and ONE:
        limit = tl.minimum(tl.load(counts), total)
    return limit


@triton.jit
def _store_quantized(
    value, row, column, valid, out, scale, size, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Quantize and store value, float32 [ROWS, COLUMNS], to rows `row` and columns `column` to `column` + COLUMNS."""
    quantized, step = _quantized(value, SMALLEST, ROWS, COLUMNS)
    _store_rows(quantized, step, row, column, valid, out, scale, size, COLUMNS)


@triton.jit
def _quantized(value, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    value = tl.reshape(value, [ROWS, COLUMNS // 128, 128])
    quantized, step = e4m3_blocks(value, SMALLEST)
    return tl.reshape(quantized, [ROWS, COLUMNS]), step


@triton.jit
def _store_rows(quantized, step, row, column, valid, out, scale, size, COLUMNS: tl.constexpr):
    at = column + tl.arange(0, COLUMNS)
    row = row.to(tl.int64)
    tl.store(out + row[:, None] * size + at[None, :], quantized, mask=valid[:, None])
    group = column // 128 + tl.arange(0, COLUMNS // 128)
    tl.store(scale + row[:, None] * (size // 128) + group[None, :], step, mask=valid[:, None])


@triton.jit
def quantize(
    x, rows, counts, out, scale, total, group_size, size, stride,
    SMALLEST: tl.constexpr, GATHER: tl.constexpr, COUNTED: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_trigger(PDL)
    pdl_wait(PDL)
    wide = size // COLUMNS
    limit = _row_limit(counts, total, COUNTED, ONE)
    for tile in range(tl.program_id(0), tl.cdiv(limit, ROWS) * wide, tl.num_programs(0)):
        row = tile // wide * ROWS + tl.arange(0, ROWS)
        column = tile % wide * COLUMNS
        valid = _valid_rows(counts, row, limit, group_size, COUNTED, ONE)
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(rows + row, mask=valid, other=-1).to(tl.int64)
            valid = valid & (source >= 0)
        at = column + tl.arange(0, COLUMNS)
        value = tl.load(x + source[:, None] * stride + at[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        _store_quantized(value, row, column, valid, out, scale, size, SMALLEST, ROWS, COLUMNS)


@triton.jit
def _has_slot(slot_at, row, total, rows_out, TOP_K: tl.constexpr):
    used = row < 0
    for i in tl.static_range(TOP_K):
        slot = tl.load(slot_at + i, mask=row < total, other=-1)
        used = used | ((slot >= 0) & (slot < rows_out))
    return used


@triton.jit
def quantize_pairs(
    x, slots, out, scale, total, rows_out, size, stride,
    SMALLEST: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wide = size // COLUMNS
    for tile in range(tl.program_id(0), tl.cdiv(total, ROWS) * wide, tl.num_programs(0)):
        row = tile // wide * ROWS + tl.arange(0, ROWS)
        column = tile % wide * COLUMNS
        slot_at = slots + row.to(tl.int64) * TOP_K
        used = _has_slot(slot_at, row, total, rows_out, TOP_K)
        at = x + row.to(tl.int64)[:, None] * stride + (column + tl.arange(0, COLUMNS))[None, :]
        value = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
        quantized, step = _quantized(value, SMALLEST, ROWS, COLUMNS)
        for i in tl.static_range(TOP_K):
            slot = tl.load(slot_at + i, mask=row < total, other=-1)
            valid = (slot >= 0) & (slot < rows_out)
            _store_rows(quantized, step, slot, column, valid, out, scale, size, COLUMNS)


@triton.jit
def copy_pairs(
    x, x_scale, slots, out, scale, total, rows_out, size, scale_row, scale_block,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wide = size // COLUMNS
    for tile in range(tl.program_id(0), tl.cdiv(total, ROWS) * wide, tl.num_programs(0)):
        row = tile // wide * ROWS + tl.arange(0, ROWS)
        column = tile % wide * COLUMNS
        slot_at = slots + row.to(tl.int64) * TOP_K
        used = _has_slot(slot_at, row, total, rows_out, TOP_K)
        source = row.to(tl.int64)[:, None]
        value = tl.load(x + source * size + (column + tl.arange(0, COLUMNS))[None, :], mask=used[:, None])
        group = column // 128 + tl.arange(0, COLUMNS // 128)
        step = tl.load(x_scale + source * scale_row + group[None, :] * scale_block, mask=used[:, None])
        for i in tl.static_range(TOP_K):
            slot = tl.load(slot_at + i, mask=row < total, other=-1)
            valid = (slot >= 0) & (slot < rows_out)
            _store_rows(value, step, slot, column, valid, out, scale, size, COLUMNS)


@triton.jit
def activate(
    h, counts, out, scale, total, group_size, size, stride, alpha, bound,
    SMALLEST: tl.constexpr, ACTIVATION: tl.constexpr, UP_FIRST: tl.constexpr, COUNTED: tl.constexpr,
    ONE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wide = size // COLUMNS
    limit = _row_limit(counts, total, COUNTED, ONE)
    for tile in range(tl.program_id(0), tl.cdiv(limit, ROWS) * wide, tl.num_programs(0)):
        row = tile // wide * ROWS + tl.arange(0, ROWS)
        column = tile % wide * COLUMNS
        valid = _valid_rows(counts, row, limit, group_size, COUNTED, ONE)
        at = h + row.to(tl.int64)[:, None] * stride + (column + tl.arange(0, COLUMNS))[None, :]
        first = tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)
        if ACTIVATION == "relu2":
            positive = tl.maximum(first, 0.0, propagate_nan=tl.PropagateNan.ALL)
            value = positive * positive
        else:
            second = tl.load(at + size, mask=valid[:, None], other=0.0).to(tl.float32)
            gate = second if UP_FIRST else first
            up = first if UP_FIRST else second
            if ACTIVATION == "swiglu":
                value = gate * tl.sigmoid(gate) * up
            elif ACTIVATION == "geglu":
                value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
            else:
                tl.static_assert(ACTIVATION == "swiglu_clamped")
                gate = tl.minimum(gate, bound, propagate_nan=tl.PropagateNan.ALL)
                up = tl.minimum(up, bound, propagate_nan=tl.PropagateNan.ALL)
                up = tl.maximum(up, -bound, propagate_nan=tl.PropagateNan.ALL)
                value = (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
        _store_quantized(value, row, column, valid, out, scale, size, SMALLEST, ROWS, COLUMNS)
