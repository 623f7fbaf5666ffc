"""The matrix product of many rows, grouped by expert, on Hopper. For few rows there are `gemm_streaming` and
`gemm_skinny`.

Operands are bf16, or E4M3 with scales of one of these kinds:

- `MatrixScales`: one per matrix;
- `RowScales`: one per row of x, and one per matrix or channel (row) of weights;
- `BlockScales`: one per block of 128 along K.

The kernel is in CUDA C++. Weights are the left operand of the tensor cores, so the width of a tile follows an expert's
rows in steps of 16. In Triton widths would be powers of two.

Nothing here allocates or waits for the device.
"""

from __future__ import annotations

import math
import re
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from ep_moe.quant.kernels import NO_SCALES, BlockScales, MatrixScales, RowScales
from ep_moe.runtime import nvrtc
from ep_moe.runtime.devices import memory_rate, multiprocessors
from ep_moe.runtime.launch_cache import Launch, launch_directly
from ep_moe.types import Activation

LINE, WEIGHTS = 128, 256  # bytes along K per block; rows of weights in a tile
STEP, WIDE = 16, 64  # step of a tile's width; rows of a TMA copy


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product.

    rows: most rows of an expert in a tile, a multiple of 16 up to 192; all tiles of an expert have one width
    stages: blocks of 128 bytes along K that are loaded at once
    programs: programs per multiprocessor, which share its registers and shared memory; more than one for tiles of few
        rows
    pingpong: the two groups of threads that multiply take turns at tiles of 128 rows of weights (otherwise they share
        tiles of 256), so that one multiplies while the other writes its results (method of CUTLASS)
    """

    rows: int
    stages: int = 4
    programs: int = 1
    pingpong: bool = False

    @property
    def weights(self) -> int:
        """Rows of weights in a tile."""
        return WEIGHTS // 2 if self.pingpong else WEIGHTS


# A copy of rows takes as long as the product of so many columns, measured on an H200 at its memory rate in bytes/s
_COPY_COLUMNS, _RATE = 212, 4.8e12
_LEAST_GAIN = 1.03  # smaller gains of the model were losses of up to 2 %
_NO_CODES = ((0, c_void_p), (0, c_void_p))
PINGPONG = Tiles(192, stages=5, pingpong=True)
CANDIDATES = (Tiles(96), Tiles(112), Tiles(128), Tiles(144), Tiles(160), Tiles(192, stages=3), PINGPONG)
BLOCKS = Tiles(96)  # with scales of blocks: a thread holds a block's sums besides the total
GRADIENT_CANDIDATES = (PINGPONG, Tiles(128, stages=6, pingpong=True))


def tiles_for(rows: float, w: Tensor, spare_sms: int = 0, *, gathered: bool = False, blocks: bool = False) -> Tiles:
    """Return the tiling with the fewest steps.

    rows: expected mean rows per expert; w: [L, N, K]; gathered: rows are gathered by `source`; blocks: one scale per
    block
    """
    if blocks:
        return BLOCKS
    return _fewest_steps(rows, len(w), w.shape[1], programs(w, spare_sms), gathered=gathered)[1]


def copies_rows_first(rows: float, w: Tensor, spare_sms: int = 0) -> bool:
    """Return whether a copy of rows into the experts' order and its product take less time than a product that gathers.

    rows, w: as of `tiles_for`
    """
    columns = w.shape[1]
    given = rows, len(w), columns, programs(w, spare_sms)
    (gathering, _), (multiplying, _) = (_fewest_steps(*given, gathered=gathered) for gathered in (True, False))
    copy = _COPY_COLUMNS * (_RATE / memory_rate(w.device) if w.is_cuda else 1) / columns
    return multiplying * (1 + copy) * _LEAST_GAIN < gathering


@lru_cache(maxsize=256)
def _fewest_steps(rows: float, experts: int, columns: int, waves_of: int, *, gathered: bool) -> tuple[float, Tiles]:
    """Return the fewest steps of a product, and the tiles that need them."""

    def steps(candidate: Tiles) -> float:
        tiles = math.ceil((rows + math.sqrt(rows)) / candidate.rows)  # few experts have many more rows than the mean
        width = math.ceil(rows / tiles / STEP) * STEP
        waves = math.ceil(experts * -(-columns // candidate.weights) * tiles / waves_of)
        if candidate.pingpong:
            # Shared memory limits a group alone: an instruction takes 32 + 3/8 width cycles instead of width / 2. 16:
            # the fixed cost of a tile, in rows, fitted to an H200. Half of a tile's weights take half of the steps
            return waves * (64 + 0.75 * width + 16) / 2
        # 56: the fixed cost of a tile, in rows. Three stages are 4 % slower than four (both fitted to an H200), and
        # 10 % slower if threads gather rows (fitted to an H100)
        fewer_stages = 1.10 if gathered else 1.04
        return waves * (width + 56) * (fewer_stages if candidate.stages < 4 else 1.0)

    # Threads that gather rows cannot fill a stage as fast as one group uses it. With fewer rows it was not measured
    pingpong = rows >= 64 and not gathered
    found = [(steps(one), one) for one in CANDIDATES if pingpong or not one.pingpong]
    return min(found, key=lambda one: one[0])


def programs(w: Tensor, spare_sms: int) -> int:
    return max(1, multiprocessors(w.device) - spare_sms)


def grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, out: Tensor, tiles: Tiles, *, activation: Activation | None = None,
    alpha: float = 0.0, limit: float = 0.0, spare_sms: int = 0,
    scales: MatrixScales | RowScales | BlockScales | None = None, turned: bool = False, source: Tensor | None = None,
    bias: Tensor | None = None, addresses: Tensor | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[r] = a[r] @ b[e].T for each row r of expert e; sums in float32, for E4M3 with about 14 bits.

    a: [M, K]; b: [L, N, K]; both bf16, K a multiple of 64, or with `scales` E4M3, K a multiple of 128
    scales: `BlockScales` need N to be a multiple of 128 (256 with a gated activation), an out in bf16, and tiles of at
        most `BLOCKS.rows` rows
    turned: compute out[r] = a[r] @ b[e] for b [L, K, N], bf16, N a multiple of 64; without an activation
    ends: int32 [L], the index after each expert's last row; rows after the last are not written
    source: int32 [M] or None. If given, a is [any, K], and row r is a[source[r]]
    out: bf16 [M, N]; with a gated activation [M, N / 2], where the first half of b's rows are the gates; E4M3 if
        `scales.out` is given
    bias: bf16, contiguous [L, N], added to the scaled sums of an out in bf16
    addresses: int64 [M] or None. If given, row r is written to this address instead, on this GPU or a peer
    spare_sms: multiprocessors that are left free; launch: how it is launched
    """
    experts, rows, k = (len(b), b.shape[2], b.shape[1]) if turned else b.shape
    itemsize, gated = b.element_size(), activation is not None and activation.gated
    n, depth, blocks = rows // 2 if gated else rows, LINE // itemsize, isinstance(scales, BlockScales)
    a_factor, a_scale, a_step, b_scale, out_scale = NO_SCALES if scales is None else scales.kernel_args()
    b_step = 1 if b_scale is None else b_scale.stride(0)
    if blocks:  # strides of the rows' scales along rows and K; the weights' scales are contiguous
        a_step, b_step = a_scale.stride()
    boxes = tiles.weights // 64
    weights, unit = (_across(b.view(-1, n), boxes), 1) if turned else _weights(b, gated, out.element_size(), boxes)
    read = (out, ends, a_scale, b_scale, out_scale, bias)
    arguments = [
        (weights, None),
        *((nvrtc.tensor_map(a.data_ptr(), itemsize, (k, len(a)), (k,), (depth, box)), None) for box in (WIDE, STEP)),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in read),
        (1.0 if a_factor is None else a_factor, c_float),
        *((number, c_int) for number in (a_step or 0, b_step, experts, len(out), n, rows // unit, k // depth)),
        *((number, c_int) for number in (tiles.rows, tiles.stages)),
        *((number, c_float) for number in (alpha, limit)),
        *_gathered(a, source),
        (0 if addresses is None else addresses.data_ptr(), c_void_p),
        *_NO_CODES,
    ]
    form = options(
        itemsize, out.element_size(), activation, scaled_rows=isinstance(scales, RowScales),
        channels=isinstance(scales, RowScales) and scales.per_channel, blocks=blocks, biased=bias is not None,
        turned=turned, gather=source is not None, away=addresses is not None, pingpong=tiles.pingpong,
    )  # fmt: skip
    mode = "turned" if turned else "blocks" if blocks else ""
    function = nvrtc.kernel(source_text(itemsize, mode), "gemm_grouped", form, a.device.index)
    kernel = nvrtc.Kernel(function, a.device, 384, shared_bytes(tiles, experts, blocks=blocks))
    launch(kernel, (programs(a, spare_sms),), nvrtc.Arguments(arguments))


def weight_gradient(
    a: Tensor, b: Tensor, ends: Tensor, out: Tensor, accumulate: bool = False, factor: float = 1.0, *,
    spare_sms: int = 0, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[e] = factor * (sum of a[r].T @ b[r] over expert e's rows r), in float32.

    The gradient of an expert without rows is zero.

    a: bf16 [M, A]; b: bf16 [M, B]; A and B multiples of 64
    ends: int32 [L], the index after each expert's last row, at most M
    out: bf16 or float32, contiguous [L, A, B]
    accumulate: add to out. In bf16 the gradient is rounded before the addition and the sum after it, as when torch
        accumulates gradients. float32 numbers below 2**-126 become zero
    """
    (rows, across), n, experts = a.shape, b.shape[1], len(out)
    tiles = min(GRADIENT_CANDIDATES, key=lambda one: math.ceil(across / one.rows) * (one.rows + 40))
    arguments = [
        *((map_, None) for map_ in (_across(b, tiles.weights // 64), _across(a, 1), _across(a, 1))),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (out, ends, None, None, None, None)),
        (factor, c_float),
        *((number, c_int) for number in (0, 1, experts, rows, n, across, 0, tiles.rows, tiles.stages)),
        *((0.0, c_float) for _ in range(2)),
        *_gathered(a, None),
        (0, c_void_p),
        *_NO_CODES,
    ]
    wide = out.element_size() == 4
    scaled = accumulate or wide or factor != 1.0  # one form for all of these, to compile fewer kernels
    form = options(
        2, out.element_size(), None, over_rows=True, accumulate=accumulate, factor=scaled, pingpong=tiles.pingpong
    )
    function = nvrtc.kernel(source_text(2, "over_rows"), "gemm_grouped", form, a.device.index)
    kernel = nvrtc.Kernel(function, a.device, 384, shared_bytes(tiles, experts))
    launch(kernel, (programs(a, spare_sms),), nvrtc.Arguments(arguments))


def _gathered(x: Tensor, source: Tensor | None) -> list[tuple[Any, Any]]:
    """Return the kernel's arguments for gathered rows: addresses of x and source, and the bytes of a row of x."""
    if source is None:
        return [(0, c_void_p), (0, c_void_p), (0, c_int)]
    return [(x.data_ptr(), c_void_p), (source.data_ptr(), c_void_p), (x.stride(0) * x.element_size(), c_int)]


def _across(x: Tensor, boxes: int) -> Any:
    """Return a TMA map of x [rows, columns], with boxes of 64 rows and `boxes` consecutive blocks of 64 columns."""
    rows, columns = x.shape
    return nvrtc.tensor_map(x.data_ptr(), 2, (64, rows, columns // 64), (columns, 64), (64, 64, boxes))


def shared_bytes(tiles: Tiles, experts: int, *, blocks: bool = False) -> int:
    """Return the bytes of shared memory: ring, results, barriers, block scales, bounds of experts' rows and tiles."""
    stage = (tiles.weights + tiles.rows) * LINE + 16 + (4 * BLOCKS.rows if blocks else 0)
    return tiles.stages * stage + 16 * 1024 + 4 * (2 * experts + 1)


@cache
def options(
    itemsize: int, out_bytes: int, activation: Activation | None, *, scaled_rows: bool = False, channels: bool = False,
    blocks: bool = False, biased: bool = False, turned: bool = False, over_rows: bool = False, gather: bool = False,
    away: bool = False, accumulate: bool = False, factor: bool = False, four_bits: bool = False,
    pingpong: bool = False, most: int = 0, apart: int = STEP, together: int = 1,
) -> tuple[str, ...]:  # fmt: skip
    """Return the compiler options of `source_text`.

    most: the largest width of a tile, 0 for the default; apart: the step between widths
    together: programs per multiprocessor
    """
    gated = activation is not None and activation.gated
    given = {"IN_BYTES": itemsize, "OUT_BYTES": out_bytes, "GATED": int(gated), "SCALED_ROWS": int(scaled_rows)}
    given |= {"CHANNELS": int(channels), "BLOCKS": int(blocks), "BIASED": int(biased)}
    given |= {"TURNED": int(turned), "OVER_ROWS": int(over_rows), "GATHER": int(gather), "AWAY": int(away)}
    given |= {"ACCUMULATE": int(accumulate), "FACTOR": int(factor), "FOUR_BITS": int(four_bits)}
    given |= {"PROGRAMS": together, "PINGPONG": int(pingpong)}
    given |= {"MOST": most or (BLOCKS if blocks else CANDIDATES[-1]).rows, "ROUND": apart}
    form = [f"-D{name}={value}" for name, value in given.items()]
    return tuple(form if activation is None else [*form, f"-D{activation.value.upper()}"])


def _weights(b: Tensor, gated: bool, out_bytes: int, boxes: int) -> tuple[Any, int]:
    """Return a TMA map of a tile's rows of weights, and the columns per step of the map's fourth dimension.

    The map orders rows for the registers of the tensor cores' results. Eight rows of gates alternate with eight of
    `up`, so that a thread holds both. For E4M3 results a thread holds neighboring columns, which one store writes.
    """
    (experts, rows, k), itemsize = b.shape, b.element_size()
    n, depth = rows // 2 if gated else rows, LINE // b.element_size()
    all_rows = experts * rows - (n if gated else 0)
    if out_bytes == 2:
        unit, strides = 8, (k, n * k, 8 * k, k)
        shape = (k, 8, 1 + gated, all_rows // 8, 1)
        box = (depth, 8, 1 + gated, boxes * (4 if gated else 8), 1)
    elif gated:
        unit, strides = 16, (2 * k, n * k, 16 * k, k)
        shape, box = (k, 8, 2, all_rows // 16, 2), (depth, 8, 2, 4, 2)
    else:
        unit, strides = 16, (2 * k, k, 16 * k, k)
        shape, box = (k, 8, 2, all_rows // 16, 1), (depth, 8, 2, 4 * boxes, 1)
    return nvrtc.tensor_map(b.data_ptr(), itemsize, shape, strides, box), unit


@cache
def source_text(itemsize: int, mode: str = "") -> str:
    """Return the kernel's source with the tensor cores' instruction for each width.

    mode: "turned" or "over_rows", for operands that are stored across K; "blocks", with scales of blocks
    """
    kind, depth = ("bf16.bf16", 16) if itemsize == 2 else ("e4m3.e4m3", 32)
    order = {"": ", 0, 0", "turned": ", 1, 0", "over_rows": ", 1, 1"}[mode] if itemsize == 2 else ""
    most = BLOCKS.rows if mode == "blocks" else CANDIDATES[-1].rows
    return kernel_text().replace(
        "// Multiply<STEP> to Multiply<MOST>\n", multiplies("Multiply", most, depth, kind, order)
    )


@cache
def kernel_text(name: str = "gemm_grouped.cu") -> str:
    """Return the text of a CUDA file of this folder, with its includes expanded."""
    text = files("ep_moe.experts.hopper").joinpath(name).read_text()
    return re.sub(r'^#include "(\w+\.cu)"\n', lambda found: kernel_text(found[1]), text, flags=re.MULTILINE)


def multiplies(name: str, most: int, depth: int, kind: str, order: str, *, registers: bool = False) -> str:
    """Return C++ structs of the tensor cores' instruction, whose name and registers depend on the width.

    most: the largest width; depth: numbers along K per instruction; registers: weights are in four registers instead of
    shared memory
    """
    structs, left = [], [f"a{i}" for i in range(4)] if registers else ["a"]
    kind_of, constraint = ("u32", "r") if registers else ("u64", "l")
    read = ", ".join(f'"{constraint}"({one})' for one in left)
    for n in range(STEP, most + 1, STEP):
        numbers = ", ".join(f"%{i}" for i in range(n // 2))
        sums = ", ".join(f'"+f"(sum[{i}])' for i in range(n // 2))
        given = [f"%{n // 2 + i}" for i in range(len(left) + 2)]
        weights = f"{{{', '.join(given[:4])}}}" if registers else given[0]
        structs.append(
            f"template <> struct {name}<{n}> {{\n"
            f"  static __device__ __forceinline__ void run(float (&sum)[{most // 2}], "
            f"{', '.join(f'{kind_of} {one}' for one in left)}, u64 b, int more) {{\n"
            f'    asm volatile("{{.reg .pred more; setp.ne.b32 more, {given[-1]}, 0; "\n'
            f'                 "wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind} '
            f'{{{numbers}}}, {weights}, {given[-2]}, more, 1, 1{order};}}"\n'
            f'                 : {sums} : {read}, "l"(b), "r"(more));\n  }}\n}};\n'
        )
    return "".join(structs)
