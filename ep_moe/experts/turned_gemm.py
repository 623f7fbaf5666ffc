"""The product of many rows, grouped by expert, on Hopper, with weights as the left operand of the tensor cores, in CUDA
C++: a tile is as wide as an expert's rows ask for, in steps of 16, where that of `hopper_gemm` has 64 or 128 of them.

Nothing here waits for the device.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from ep_moe import nvrtc
from ep_moe.types import Activation

LINE, WEIGHTS = 128, 256  # bytes along K at a time; rows of weights in a tile
STEP, WIDE = 16, 64  # of a tile's width; rows of a copy


@dataclass(frozen=True)
class Turned:
    """How a product is cut.

    rows: of an expert in a tile at most, a multiple of 16 up to 192; an expert's tiles are of one width
    stages: blocks of 128 bytes along K that are on their way at once
    """

    rows: int
    stages: int = 4


CUTS = (Turned(96), Turned(112), Turned(128), Turned(144), Turned(160), Turned(192, stages=3))


def cut_for(rows: float, experts: int, columns: int, programs: int) -> Turned:
    """The one that takes the fewest steps. rows: of an expert, as many as are expected on average; columns: of tiles"""

    def steps(cut: Turned) -> float:
        tiles = math.ceil((rows + math.sqrt(rows)) / cut.rows)  # most experts have not much more than the average
        width = math.ceil(rows / tiles / STEP) * STEP
        waves = math.ceil(experts * columns * tiles / programs)
        # 56: what a tile takes besides, as rows; three stages are 4 % slower than four (both fitted to an H200)
        return waves * (width + 56) * (1.04 if cut.stages < 4 else 1.0)

    return min(CUTS, key=steps)


def launch(
    a: Tensor, b: Tensor, out: Tensor, ends: Tensor, cut: Turned, programs: int, activation: str, alpha: float,
    limit: float, scales: tuple[Any, ...],
) -> None:  # fmt: skip
    """As `hopper_gemm_triton.launch`."""
    (experts, rows, k), itemsize = b.shape, b.element_size()
    gated = _gated(activation)
    n, depth = rows // 2 if gated else rows, LINE // itemsize
    a_factor, a_scale, a_step, b_scale, out_scale = scales
    weights, unit = _weights(b, gated, out.element_size())
    arguments = [
        (weights, None),
        *((nvrtc.tensor_map(a.data_ptr(), itemsize, (k, len(a)), (k,), (depth, box)), None) for box in (WIDE, STEP)),
        *((0 if given is None else given.data_ptr(), c_void_p) for given in (out, ends, a_scale, b_scale, out_scale)),
        (1.0 if a_factor is None else a_factor, c_float),
        *((number, c_int) for number in (a_step or 0, experts, len(a), n, rows // unit, k // depth)),
        *((number, c_int) for number in (cut.rows, cut.stages)),
        *((number, c_float) for number in (alpha, limit)),
    ]
    form = options(itemsize, out.element_size(), activation)
    function = nvrtc.kernel(source(itemsize), "turned_gemm", form, a.device.index)
    nvrtc.launch(function, programs, 384, shared_bytes(cut, experts), arguments)


def shared_bytes(cut: Turned, experts: int) -> int:
    """The ring, results on their way out, barriers, and where each expert's rows and tiles begin."""
    return cut.stages * (WEIGHTS + cut.rows) * LINE + 16 * 1024 + 16 * cut.stages + 4 * (2 * experts + 1)


def _gated(activation: str) -> bool:
    return bool(activation) and Activation(activation).gated


def options(itemsize: int, out_bytes: int, activation: str) -> tuple[str, ...]:
    """What `source` is compiled with."""
    form = f"-DIN_BYTES={itemsize}", f"-DOUT_BYTES={out_bytes}", f"-DGATED={int(_gated(activation))}"
    return (*form, f"-D{activation.upper()}") if activation else form


def _weights(b: Tensor, gated: bool, out_bytes: int) -> tuple[Any, int]:
    """Of a tile's rows of weights, as tensor cores give their products: eight rows of gates, eight of `up`, and so on,
    so that a thread holds both; results in E4M3 have neighbouring columns in a thread, which one store writes.

    Returns how many columns the map's fourth dimension counts at once, too.
    """
    (experts, rows, k), itemsize = b.shape, b.element_size()
    n, depth = rows // 2 if gated else rows, LINE // b.element_size()
    all_rows = experts * rows - (n if gated else 0)
    if out_bytes == 2:
        unit, strides = 8, (k, n * k, 8 * k, k)
        shape, box = (k, 8, 1 + gated, all_rows // 8, 1), (depth, 8, 1 + gated, 16 if gated else 32, 1)
    elif gated:
        unit, strides = 16, (2 * k, n * k, 16 * k, k)
        shape, box = (k, 8, 2, all_rows // 16, 2), (depth, 8, 2, 4, 2)
    else:
        unit, strides = 16, (2 * k, k, 16 * k, k)
        shape, box = (k, 8, 2, all_rows // 16, 1), (depth, 8, 2, 16, 1)
    return nvrtc.tensor_map(b.data_ptr(), itemsize, shape, strides, box), unit


@cache
def source(itemsize: int) -> str:
    """With the instruction for each width, which has a name and a list of registers of its own."""
    kind, depth, order = ("bf16.bf16", 16, ", 0, 0") if itemsize == 2 else ("e4m3.e4m3", 32, "")
    structs = []
    for n in range(STEP, CUTS[-1].rows + 1, STEP):
        numbers = ", ".join(f"%{i}" for i in range(n // 2))
        sums = ", ".join(f'"+f"(sum[{i}])' for i in range(n // 2))
        structs.append(
            f"template <> struct Multiply<{n}> {{\n"
            f"  static __device__ __forceinline__ void run(float (&sum)[{n // 2}], u64 a, u64 b) {{\n"
            f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind} '
            f'{{{numbers}}}, %{n // 2}, %{n // 2 + 1}, 1, 1, 1{order};" : {sums} : "l"(a), "l"(b));\n  }}\n}};\n'
        )
    text = files("ep_moe.experts").joinpath("turned_gemm.cu").read_text()
    return text.replace("// Multiply<16> to Multiply<192>\n", "".join(structs))
