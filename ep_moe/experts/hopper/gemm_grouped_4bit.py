"""The matrix product of many rows, grouped by expert, with 4-bit weights, on Hopper.

This is the kernel of `gemm_grouped`, which loads weights as they are stored. They become bf16, or E4M3 if the rows are
E4M3, in the registers that the tensor cores read. For few rows there are `fused_4bit` and `gemm_4bit`, and
`gemm_skinny_4bit` for rows in E4M3.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_void_p
from functools import cache

from torch import Tensor

from ep_moe.experts.hopper.gemm_grouped import (
    LINE,
    STEP,
    WEIGHTS,
    WIDE,
    Tiles,
    multiplies,
    options,
    programs,
)
from ep_moe.experts.hopper.numbers_4bit import DEPTH, EXPONENTS, Weights, numbers_form, numbers_text
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch, launch_directly
from ep_moe.types import Activation

PACKED = DEPTH // 2  # bytes of a row of weights in a block
RING = {1: 200 * 1024, 2: 92 * 1024}  # bytes of all stages, by programs per multiprocessor
UNIT = 2.0**32  # factor of sums with weights in bf16, which are in units of 2**-32
# {most rows of a tile: step between widths}. Each width needs its own registers for weights that are being loaded. With
# more widths the compiler makes the tensor cores wait for each product.
WIDTHS = {96: 32, 128: 64}
WIDER = {160: 80}  # for E2M1 with E4M3 rows, which needs the fewest registers
NARROW = {16: 16, 32: 32}  # with two programs per multiprocessor: one converts weights while the other waits
# Fitted to both products of Qwen3-30B-A3B, GPT-OSS-120B and Kimi-K2 on an H200: the fixed cost of a tile, in rows; the
# time factor of two programs per multiprocessor; the time factor of tiles of `WIDER`.
TILE_OVERHEAD_ROWS, TWO_PROGRAMS_FACTOR, OF_WIDER = 96, 1.75, 1.12
_APART = WIDTHS | WIDER | NARROW


def candidates_of(w: Weights) -> list[Tiles]:
    """Return all tilings of a product with these weights."""
    found = []
    for most in (*NARROW, *WIDTHS, *(WIDER if w.row_scale is not None else ())):
        programs = 2 if most in NARROW else 1
        found.append(Tiles(most, min(8, RING[programs] // _stage_bytes(most, w)), programs))
    return found


def tiles_for(rows: float, w: Weights, spare_sms: int = 0) -> Tiles:
    """Return the tiling with the fewest steps. rows: expected mean rows per expert"""
    # with few expected rows, some experts have none: the expected number of experts with rows (Poisson)
    tiles_of_weights = len(w.data) * -math.expm1(-rows) * -(-w.data.shape[2] // WEIGHTS)
    at_once = programs(w.data, spare_sms)

    def steps(candidate: Tiles) -> float:
        found = 0.0
        for own in (rows - math.sqrt(rows), rows, rows + math.sqrt(rows)):  # most experts have rows in this range
            tiles = max(1, math.ceil(own / candidate.rows))
            width = math.ceil(max(own, 1) / tiles / _APART[candidate.rows]) * _APART[candidate.rows]
            found += math.ceil(tiles_of_weights * tiles / (at_once * candidate.programs)) * (width + TILE_OVERHEAD_ROWS)
        return found * (
            TWO_PROGRAMS_FACTOR if candidate.programs == 2 else OF_WIDER if candidate.rows in WIDER else 1.0
        )

    return min(candidates_of(w), key=steps)


def product(
    a: Tensor, w: Weights, ends: Tensor, out: Tensor, tiles: Tiles, *, a_scale: Tensor | None = None,
    activation: Activation | None = None, alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0,
    source: Tensor | None = None, addresses: Tensor | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[r] = a[r] @ w[e].T for each row r of expert e; sums in float32, for E4M3 with about 14 bits.

    a: bf16 [M, K], or E4M3 with a_scale, float32 [M], and without `source`; K a multiple of 64
    w: rows [L, N, K], N a multiple of 64 (128 with a gated activation)
    ends: int32 [L], the index after each expert's last row; rows after the last are not written
    out, source, addresses, spare_sms: as of `gemm_grouped.grouped_gemm`
    """
    (experts, _, rows, _), k, gated = w.data.shape, a.shape[1], activation is not None and activation.gated
    n, box = rows // 2 if gated else rows, LINE // a.element_size()
    assert w.e4m3 == (a_scale is not None)
    assert source is None or not w.e4m3, "a row's last block would be read past its end"
    maps = [nvrtc.tensor_map(a.data_ptr(), a.element_size(), (k, len(a)), (k,), (box, of)) for of in (WIDE, WIDE, STEP)]
    read = (out, ends, a_scale, w.factor if w.row_scale is None else w.row_scale, None, w.bias)
    b_step = 1 if w.row_scale is None else w.row_scale.stride(0)
    arguments = [
        *((one, None) for one in maps),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in read),
        (1.0 if w.e4m3 else UNIT, c_float),
        *((number, c_int) for number in (0, b_step, experts, len(out), n, 0, -(-k // box), tiles.rows, tiles.stages)),
        *((number, c_float) for number in (alpha, limit)),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (None if source is None else a, source)),
        (0 if source is None else a.stride(0) * a.element_size(), c_int),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (addresses, w.data, w.scale)),
    ]
    form = form_of(w, tiles, activation, gather=source is not None, away=addresses is not None)
    function = nvrtc.kernel(source_text(tiles.rows, w.e4m3), "gemm_grouped", form, a.device.index)
    kernel = nvrtc.Kernel(function, a.device, 384, shared_bytes(tiles, experts, w))
    launch(kernel, (programs(a, spare_sms) * tiles.programs,), nvrtc.Arguments(arguments))


def form_of(w: Weights, tiles: Tiles, activation: Activation | None, *, gather: bool, away: bool) -> tuple[str, ...]:
    """Return the compiler options of `source_text`."""
    shared = options(
        1 if w.e4m3 else 2, 2, activation, scaled_rows=w.e4m3, channels=w.row_scale is not None,
        biased=w.bias is not None, gather=gather, away=away, factor=not w.e4m3, four_bits=True, most=tiles.rows,
        apart=_APART[tiles.rows], together=tiles.programs,
    )  # fmt: skip
    return (*shared, *numbers_form(w))


def _stage_bytes(rows: int, w: Weights) -> int:
    return (1 if w.e4m3 else 2) * rows * LINE + WEIGHTS * (PACKED + 4 * w.words)


def shared_bytes(tiles: Tiles, experts: int, w: Weights) -> int:
    """Return the bytes of shared memory: ring, results, barriers, number table, bounds of experts' rows and tiles."""
    ring = tiles.stages * (_stage_bytes(tiles.rows, w) + 16)
    return ring + 16 * 1024 + 8 * EXPONENTS + 4 * (2 * experts + 1)


@cache
def source_text(most: int, e4m3: bool) -> str:
    """Return the kernel's source with the tensor cores' instruction for each width. most: most rows of a tile"""
    kind = (32, "e4m3.e4m3", "") if e4m3 else (16, "bf16.bf16", ", 0")
    return numbers_text("gemm_grouped.cu").replace(
        "// MultiplyPacked<STEP> to MultiplyPacked<MOST>\n", multiplies("MultiplyPacked", most, *kind, registers=True)
    )
