"""Matrix products of few bf16 rows with 4-bit weights, in Triton. Weights are read once, and become bf16 in registers.

For fewer rows there is `fused_4bit`, for many `gemm_grouped_4bit`. The weights' layout is
`weights.layouts.hopper_4bit`. Weights are the left operand of the tensor cores, which is in registers. A thread loads
16 bytes for 32 numbers of a row. Shifts and masks convert two numbers at a time to bf16:

    E2M1    2**-126 times the number. Times the group's scale and 2**94 it has at most 6 bits, so it is exact
    INT4    2**-133 times code + 8. Times the scale and 2**101, less 8 times the scale, it is rounded once

Sums are in float32, in units of 2**-32. Nothing here allocates or waits for the device.

Letters: N received rows, K routes of a row, L experts, H and I the hidden and intermediate sizes.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N806  (constants of the compiler are upper case)

from __future__ import annotations

from torch import Tensor

from ep_moe.experts.hopper.gemm_skinny import Tile, activate
from ep_moe.experts.hopper.numbers_4bit import DEPTH, Weights
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly, next_power_of_2
from ep_moe.runtime.triton_compat import JITFunction, tl, triton
from ep_moe.types import Activation


def tile_for(rows: float) -> Tile:
    """Return the fastest tile for GPT-OSS's sizes with 32 and 128 experts on an H100.

    rows: expected mean rows per expert
    """
    return Tile(16 if rows <= 8 else 32 if rows <= 16 else 64, 64, stages=3)


def product(
    x: Tensor, w: Weights, lists: Lists, out: Tensor, tile: Tile, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, gather: bool = False, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[p] = w[e] @ x[p] for each pair p of expert e, in the order of `lists`; sums in float32.

    x: bf16 [M, k], one row per pair; with `gather` [N, k], where pair p has row `lists.source[p]`; w: rows [L, n, k]
    out: bf16 [at least N * K, n]; with a gated activation [.., n / 2], where the first half of w's rows are the gates
    """
    experts, blocks, rows, _ = w.data.shape
    gated = activation is not None and activation.gated
    width, k, pairs = rows // 2 if gated else rows, x.shape[1], lists.slots.numel()
    columns, tiles = cdiv(width, tile.block_n), min(experts, pairs) + pairs // tile.block_m
    launch(
        _product, (tiles * columns,),
        x, lists.source if gather else None, lists.ends, w.data, w.scale, w.factor, w.bias, out, experts, k, rows,
        width, blocks, w.scale.stride(0), alpha, limit,
        FORMAT=w.format, GROUP=w.group, PACKED=isinstance(_product, JITFunction), EVEN=k % DEPTH == 0,
        LANES=next_power_of_2(experts), ACTIVATION="" if activation is None else activation.value,
        BLOCK_M=tile.block_m, WIDTH=tile.block_n, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _pairs_of(q, E2M1: tl.constexpr):
    """Unpack words of eight codes to four words of two bf16 numbers: [...] to [..., 2, 2], low bit of i first."""
    if E2M1:
        BITS: tl.constexpr = -2118090304  # 0x81C081C0: in each half, the sign, exponent and mantissa of E2M1
        p0 = q & BITS
        p1 = (q << 3) & BITS
        p2 = (q << 6) & BITS
        p3 = ((q << 1) & -2147450880) | ((q >> 3) & 0x01800180) | ((q >> 7) & 0x00400040)
    else:
        p0 = q & 0x000F000F
        p1 = (q >> 4) & 0x000F000F
        p2 = (q >> 8) & 0x000F000F
        p3 = (q >> 12) & 0x000F000F
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def _halves(word):
    """Split words into two bf16 numbers each: [...] to [..., 2]."""
    low = word.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _low(word):
    """Return a word's first bf16 number in float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _factors(words, b, FORMAT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """Return the scales of block b as words of two equal bf16 numbers: int32 [N, words] to [N, GROUPS].

    Scales of E2M1 are multiplied by 2**94.
    """
    if FORMAT == "int4":
        if GROUPS == 1:
            half = (words >> (b % 2 * 16)) & 0xFFFF
        else:
            half = tl.reshape((words[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :]) & 0xFFFF, [N, GROUPS])
    else:
        byte = tl.reshape((words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF, [N, GROUPS])
        if FORMAT == "mxfp4":
            half = (byte + 94) << 7
        else:
            # E4M3's bits in a float32 are 2**-120 times the number
            wide = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * 1.9807040628566084e28
            half = (wide.to(tl.int32, bitcast=True) >> 16) | ((byte & 0x80) << 8)
    return half | (half << 16)


@triton.jit
def _times(a, b):
    """Multiply words of two bf16 numbers."""
    return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _numbers(q, words, b, FORMAT: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr):
    """Return block b of weights times their scales, bf16 [N, 128] in units of 2**-32.

    Row 16 w + 8 h + l is row h * N / 2 + 8 w + l of the tile, so that each thread converts what it has loaded.

    PACKED: use instructions for two numbers at once, which Triton's interpreter does not support
    """
    E2M1: tl.constexpr = FORMAT != "int4"
    GROUPS: tl.constexpr = 128 // GROUP
    v = tl.reshape(_pairs_of(q, E2M1), [2, N // 16, 8, 4, 4, 2, 2])  # h, w, l, t, g, i
    v = tl.reshape(tl.permute(v, [1, 0, 2, 4, 6, 5, 3]), [N, GROUPS, GROUP // 2])
    scale = _factors(words, b, FORMAT, N, GROUPS)
    if PACKED:
        if E2M1:
            v = _times(v, scale[:, :, None])
        else:
            factor = _times(scale, 0x72007200)[:, :, None]  # 2**101
            eight = _times(scale, -1325354752)[:, :, None]  # 0xB100B100: -8 * 2**-32
            v = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [v, factor, eight], tl.int32, True, 1
            )
        v = _halves(v)
    elif E2M1:
        v = (tl.join(_low(v), _low(v >> 16)) * _low(scale)[:, :, None, None]).to(tl.bfloat16)
    else:
        codes = (tl.join(v & 0xFFFF, v >> 16) - 8).to(tl.float32)
        v = (codes * _low(scale)[:, :, None, None] * 2.3283064365386963e-10).to(tl.bfloat16)
    return tl.reshape(v, [N, 128])


@triton.jit
def _tile_of(ends, experts, columns, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tile of a program: expert, column, first row within the expert, the expert's first row and rows.

    Programs beyond the last tile have no rows. Tiles with the same weights are neighbors.
    """
    lane = tl.arange(0, LANES)
    start = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < experts), other=0)
    count = tl.where(lane < experts, tl.load(ends + lane, mask=lane < experts, other=0) - start, 0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles * columns, 0)
    program = tl.program_id(0)
    expert = tl.sum((last <= program).to(tl.int32))
    here = lane == expert
    at = program - tl.sum(tl.where(here, last - tiles * columns, 0))
    own = tl.maximum(tl.sum(tl.where(here, tiles, 0)), 1)
    first = at % own * BLOCK_M
    return expert, at // own, first, tl.sum(tl.where(here, start, 0)), tl.sum(tl.where(here, count, 0))


@triton.jit
def _tile(
    x, w, w_scale, factor, bias, out, to, row, valid, expert, tile, depth, rows, width, blocks, scale_step, alpha,
    bound, FORMAT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one tile: BLOCK_M rows `to` of out (where `valid`) from rows `row` of x, and WIDTH columns."""
    GATED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    SCALE_WORDS: tl.constexpr = 2 if FORMAT == "nvfp4" or (FORMAT == "int4" and GROUP == 32) else 1
    SHARE: tl.constexpr = 2 if GROUP == 128 else 1  # blocks with one word of scales
    lane = tl.arange(0, WIDTH)
    first = tile * WIDTH
    column = first + lane
    inside = tl.minimum(column, width - 1)
    # the row of the left operand to which `_numbers` moves each loaded row
    turned = lane % (WIDTH // 2) // 8 * 16 + lane // (WIDTH // 2) * 8 + lane % 8
    q_at = w + expert.to(tl.int64) * blocks * rows * 16
    q_at += tl.minimum(first + turned, width - 1)[:, None] * 16 + tl.arange(0, 16)[None, :]
    s_at = w_scale + expert.to(tl.int64) * scale_step + tl.arange(0, SCALE_WORDS)[None, :] * rows + inside[:, None]
    k = tl.arange(0, 128)[:, None]
    seen = valid[None, :]
    x_at = x + row.to(tl.int64)[None, :] * depth
    gate = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    up = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    for b in tl.range(0, blocks, num_stages=STAGES):
        gate_q = tl.load(q_at + b * rows * 16)
        if GATED:
            up_q = tl.load(q_at + b * rows * 16 + width * 16)
        right = tl.load(x_at + k + b * 128, mask=seen if EVEN else seen & (k < depth - b * 128), other=0.0)
        given = s_at + b // SHARE * SCALE_WORDS * rows
        gate = tl.dot(_numbers(gate_q, tl.load(given), b, FORMAT, GROUP, WIDTH, PACKED), right, gate)
        if GATED:
            up = tl.dot(_numbers(up_q, tl.load(given + width), b, FORMAT, GROUP, WIDTH, PACKED), right, up)
    unit = 4294967296.0
    if factor is not None:
        unit *= tl.load(factor + expert)
    gate *= unit
    up *= unit
    if bias is not None:
        gate += tl.load(bias + expert * rows + inside).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + expert * rows + width + inside).to(tl.float32)[:, None]
    value = gate if ACTIVATION == "" else activate(gate, up, alpha, bound, ACTIVATION)
    out_at = out + to.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(out_at, value.to(out.dtype.element_ty), mask=valid[None, :] & (column < width)[:, None])


@triton.jit
def _listed_tile(
    x, source, w, w_scale, factor, bias, out, begin, start, count, expert, tile, depth, rows, width, blocks, scale_step,
    alpha, bound, FORMAT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the expert's rows from `begin` to `count`. start: the expert's first sorted row"""
    at = begin + tl.arange(0, BLOCK_M)
    valid = at < count
    to = start + at
    row = to if source is None else tl.load(source + to, mask=valid, other=0)
    _tile(
        x, w, w_scale, factor, bias, out, to, row, valid, expert, tile, depth, rows, width, blocks, scale_step, alpha,
        bound, FORMAT, GROUP, PACKED, EVEN, ACTIVATION, BLOCK_M, WIDTH, STAGES,
    )  # fmt: skip


@triton.jit
def _product(
    x, source, ends, w, w_scale, factor, bias, out, experts, depth, rows, width, blocks, scale_step, alpha, bound,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `product`. A program has at most BLOCK_M rows, and uses a tile of half the size if that holds them.

    rows: rows of an expert's weights; width: columns of out; depth: columns of x; scale_step: words of an expert's
    scales
    """
    columns = tl.cdiv(width, WIDTH)
    expert, tile, begin, start, count = _tile_of(ends, experts, columns, LANES, BLOCK_M)
    left = count - begin
    SHORT: tl.constexpr = BLOCK_M // 2
    if left > 0:
        if BLOCK_M >= 64 and left <= SHORT:
            _listed_tile(
                x, source, w, w_scale, factor, bias, out, begin, start, count, expert, tile, depth, rows, width,
                blocks, scale_step, alpha, bound, FORMAT, GROUP, PACKED, EVEN, ACTIVATION, SHORT, WIDTH, STAGES,
            )  # fmt: skip
        else:
            _listed_tile(
                x, source, w, w_scale, factor, bias, out, begin, start, count, expert, tile, depth, rows, width,
                blocks, scale_step, alpha, bound, FORMAT, GROUP, PACKED, EVEN, ACTIVATION, BLOCK_M, WIDTH, STAGES,
            )  # fmt: skip
