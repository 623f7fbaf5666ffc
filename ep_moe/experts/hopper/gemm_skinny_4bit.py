"""Matrix products of the fewest E4M3 rows with 4-bit weights, on Hopper, in CUDA C++. For bf16 rows: `fused_4bit`.

Each program finds its expert's routes. Each warp loads 16 rows of weights directly into the registers that the tensor
cores read. Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p

from torch import Tensor

from ep_moe.experts.hopper.gemm_skinny import FEWEST, Tile, TileConfig
from ep_moe.experts.hopper.numbers_4bit import DEPTH, EXPONENTS, Weights, numbers_form, numbers_text
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly
from ep_moe.types import Activation

_LANES = 32
ROWS = 8  # rows of a tile


def tiles_for(routes: int) -> TileConfig:
    """Return the fastest tiling for the models of `bench.experts` on an H100. routes: N * K"""
    tile = Tile(ROWS, 64, stages=2, warps=8, split=4 if routes <= 16 else 2)
    return TileConfig(False, tile, tile)


def product(
    x: Tensor, ids: Tensor, routing: Tensor | None, base: int, w: Weights, out: Tensor, tile: Tile, *,
    x_scale: Tensor, activation: Activation | None = None, alpha: float = 0.0, limit: float = 0.0,
    gather: bool = False, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[p] = w[e] @ x[p] for each pair p of expert e = ids[p] - base with weight != 0; sums in float32.

    x: E4M3 [M, k], one row per pair; with `gather` [N, k], where pair p has row p // K; x_scale: float32 [M]
    ids: int [N, K], at most 32; routing: float32 [N, K] or None; w: rows [L, n, k]
    out: bf16 [at least N * K, n]; with a gated activation [.., n / 2], where the first half of w's rows are the gates.
        Rows of pairs without a local expert are not written
    tile: `stages` is the number of weight blocks that a warp loads at once, `split` the number of warps that share the
        blocks of the same rows of weights. A tile has eight rows, and its columns follow from these
    """
    experts, blocks, rows, _ = w.data.shape
    gated = activation is not None and activation.gated
    width, k, pairs = rows // 2 if gated else rows, x.shape[1], ids.numel()
    assert pairs <= FEWEST
    columns = cdiv(width, tile.warps // tile.split * (8 if gated else 16))
    arguments = [
        *_pointers(x, x_scale, ids),
        (ids.element_size(), c_int),
        *_pointers(routing, w.data, w.scale, w.row_scale, w.bias, out),
        *((number, c_int) for number in (base, pairs, experts, k, rows, width, blocks, ids.shape[1] if gather else 1)),
        *((number, c_float) for number in (alpha, limit)),
    ]
    form = form_of(w, tile, activation)
    function = nvrtc.kernel(numbers_text("gemm_skinny_4bit.cu"), "gemm_skinny_4bit", form, x.device.index)
    kernel = nvrtc.Kernel(function, x.device, _LANES * tile.warps, shared_bytes(tile))
    launch(kernel, (min(experts, pairs) * columns,), nvrtc.Arguments(arguments))


def _pointers(*given: Tensor | None) -> list[tuple[int, type[c_void_p]]]:
    return [(0 if one is None else one.data_ptr(), c_void_p) for one in given]


def form_of(w: Weights, tile: Tile, activation: Activation | None) -> tuple[str, ...]:
    """Return the compiler options of the kernel."""
    given = {"WARPS": tile.warps, "SPLIT": tile.split, "AHEAD": tile.stages}
    given |= {"PROGRAMS": programs(tile), "GATED": int(activation is not None and activation.gated)}
    given["BIASED"] = int(w.bias is not None)
    form = [*numbers_form(w), *(f"-D{name}={value}" for name, value in given.items())]
    return tuple(form if activation is None else [*form, f"-D{activation.value.upper()}"])


def programs(tile: Tile) -> int:
    """Return the programs per multiprocessor, by the registers of a thread. Blocks being loaded take most of these."""
    return max(1, 65536 // (_LANES * tile.warps * (58 + 11 * tile.stages)))


def shared_bytes(tile: Tile) -> int:
    """Return the bytes of shared memory: row indices, the table of numbers, and two chunks of x.

    The sums of warps that share rows of weights use the memory of the chunks later.
    """
    chunk = ROWS * (tile.stages * tile.split * DEPTH + 16)
    sums = (tile.split - 1) * (tile.warps // tile.split) * 4 * _LANES * 4
    return 8 * ROWS + 8 * EXPONENTS + max(2 * chunk, sums)
