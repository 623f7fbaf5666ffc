"""The product of many rows, grouped by expert, with weights of 4 bits, on Hopper: `gemm_grouped`, whose weights travel
as they are stored, and become bf16 in the registers from which tensor cores read them. For few rows: `gemm_4bit`.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_void_p
from functools import cache

from torch import Tensor

from ep_moe.experts.hopper.gemm_4bit import DEPTH, Weights
from ep_moe.experts.hopper.gemm_grouped import (
    LINE,
    STEP,
    WEIGHTS,
    WIDE,
    Tiles,
    kernel_text,
    multiplies,
    options,
    programs,
)
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch, at_once
from ep_moe.types import Activation

BOX = LINE // 2  # columns
PACKED = DEPTH // 2  # bytes of a row of weights in a block
RING = 200 * 1024  # bytes of all stages
UNIT = 2.0**32  # of sums of E2M1
# Rows of a tile at most, and from one width to the next. Each width takes registers of its own for weights on their
# way: with more widths the compiler has the tensor cores wait for each product.
CUTS = {96: 32, 128: 64}


def tiles_for(rows: float, w: Weights, spare_sms: int = 0) -> Tiles:
    """Those that take the fewest steps. rows: of an expert, as many as are expected on average"""
    experts, all_rows = len(w.data), w.data.shape[2]
    tiles_of_weights, at_once = experts * -(-all_rows // WEIGHTS), programs(w.data, spare_sms)

    def steps(most: int) -> float:
        found = 0.0
        for own in (rows - math.sqrt(rows), rows, rows + math.sqrt(rows)):  # most experts have about as many
            tiles = max(1, math.ceil(own / most))
            width = math.ceil(max(own, 1) / tiles / CUTS[most]) * CUTS[most]
            found += math.ceil(tiles_of_weights * tiles / at_once) * (width + 56)  # 56: as `gemm_grouped` has it
        return found

    best = min(CUTS, key=steps)
    return Tiles(best, min(8, RING // _stage_bytes(best, _words(w))))


def product(
    a: Tensor, w: Weights, ends: Tensor, out: Tensor, tiles: Tiles, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0, source: Tensor | None = None,
    addresses: Tensor | None = None, launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[r] = a[r] @ w[e].T for each row r of expert e; sums in float32.

    a: bf16 [M, K], K a multiple of 64; w: rows [L, N, K], N a multiple of 64 (128 with a gated activation)
    ends: int32 [L], one past each expert's last row; rows beyond the last are left as they are
    out, source, addresses, spare_sms: as `gemm_grouped.grouped_gemm` has them
    """
    (experts, _, rows, _), k, gated = w.data.shape, a.shape[1], activation is not None and activation.gated
    n, e2m1 = rows // 2 if gated else rows, w.format != "int4"
    maps = [nvrtc.tensor_map(a.data_ptr(), 2, (k, len(a)), (k,), (BOX, box)) for box in (WIDE, WIDE, STEP)]
    read = (out, ends, None, w.factor, None, w.bias)
    arguments = [
        *((one, None) for one in maps),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in read),
        (UNIT if e2m1 else 1.0, c_float),
        *((number, c_int) for number in (0, 1, experts, len(out), n, 0, k // BOX, tiles.rows, tiles.stages)),
        *((number, c_float) for number in (alpha, limit)),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (None if source is None else a, source)),
        (0 if source is None else a.stride(0) * a.element_size(), c_int),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (addresses, w.data, w.scale)),
    ]
    form = form_of(w, tiles, activation, gather=source is not None, away=addresses is not None)
    function = nvrtc.kernel(source_text(tiles.rows), "gemm_grouped", form, a.device.index)
    kernel = nvrtc.Kernel(function, a.device, 384, shared_bytes(tiles, experts, _words(w)))
    launch(kernel, (programs(a, spare_sms),), nvrtc.Arguments(arguments))


def form_of(w: Weights, tiles: Tiles, activation: Activation | None, *, gather: bool, away: bool) -> tuple[str, ...]:
    """What `source_text` is compiled with."""
    e2m1 = w.format != "int4"
    shared = options(
        2, 2, activation, biased=w.bias is not None, gather=gather, away=away, factor=e2m1, four_bits=True,
        most=tiles.rows, apart=CUTS[tiles.rows],
    )  # fmt: skip
    return (*shared, f"-DINT4={int(not e2m1)}", f"-DGROUP={w.group}", f"-DWORDS={_words(w)}")


def _words(w: Weights) -> int:
    """Of a row's scales in a block."""
    return w.scale.shape[2]


def _stage_bytes(rows: int, words: int) -> int:
    return 2 * rows * LINE + WEIGHTS * (PACKED + 4 * words)


def shared_bytes(tiles: Tiles, experts: int, words: int) -> int:
    """The ring, results on their way out, barriers, and where each expert's rows and tiles begin."""
    return tiles.stages * (_stage_bytes(tiles.rows, words) + 16) + 16 * 1024 + 4 * (2 * experts + 1)


@cache
def source_text(most: int) -> str:
    """most: rows of a tile"""
    part = kernel_text("gemm_grouped_4bit.cu").replace(
        "// MultiplyPacked<STEP> to MultiplyPacked<MOST>\n",
        multiplies("MultiplyPacked", most, 16, "bf16.bf16", ", 0", registers=True),
    )
    return kernel_text().replace("// gemm_grouped_4bit.cu\n", part)
