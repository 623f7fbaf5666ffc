"""Both products of few bf16 rows with 4-bit weights in one kernel, on Hopper, in CUDA C++.

Each program finds the routes of all experts and multiplies an equal share of the weights, which go directly from memory
to the registers that the tensor cores read. Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p

from torch import Tensor

from ep_moe.experts.hopper.gemm_grouped import programs
from ep_moe.experts.hopper.gemm_grouped_4bit import UNIT
from ep_moe.experts.hopper.gemm_skinny import Tile, TileConfig
from ep_moe.experts.hopper.numbers_4bit import DEPTH, Weights, numbers_form, numbers_text
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly
from ep_moe.types import Activation

MOST_ROUTES = 1024  # that a program sorts
MOST_ROWS = 10.0  # mean rows of an expert; beyond, the other kernels are faster
SHORT_ROWS = 3.5  # the same, for tiles of eight rows
_WARPS, _AHEAD = 24, 1
_LANES = 32


def tiles_for(routes: int, rows: float, w13: Weights, w2: Weights) -> TileConfig | None:
    """Return the fastest tiling for the models of `bench.experts` on an H200, None if other kernels are faster.

    routes: N * K; rows: expected mean rows per expert
    """
    if routes > MOST_ROUTES or rows > MOST_ROWS:
        return None
    for height in (8,) if rows <= SHORT_ROWS else (16, 8):
        tile = Tile(height, 0, _AHEAD, _WARPS)
        if min(_rooms(routes, tile, w13, w2)) >= height:
            return TileConfig(False, tile, tile)
    return None


def products(
    x: Tensor, ids: Tensor, routing: Tensor | None, base: int, w13: Weights, w2: Weights, act: Tensor, y: Tensor,
    tile: Tile, *, activation: Activation, alpha: float = 0.0, limit: float = 0.0,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute y[p] = w2[e] @ act(w13[e] @ x[p // K]) for each pair p of expert e = ids[p] - base with weight != 0.

    Sums are in float32, activations are rounded to bf16.

    x: bf16 [N, H]; ids: int [N, K]; routing: float32 [N, K] or None; w13, w2: rows [L, I or 2 * I, H], gate first, and
        [L, H, I]
    act, y: bf16 [at least N * K, I] and [.., H]. Rows of pairs without a local expert are not written
    tile: `block_m` is the number of an expert's rows that are multiplied at once, `stages` the number of weight blocks
        that a warp loads at once
    """
    experts, pairs, hidden, inner = len(w13.data), ids.numel(), x.shape[1], act.shape[1]
    rooms = _rooms(pairs, tile, w13, w2)
    assert min(rooms) >= tile.block_m
    arguments = [
        *_pointers(x, ids), (ids.element_size(), c_int), *_pointers(routing),
        *(one for w in (w13, w2) for one in _pointers(w.data, w.scale, w.factor, w.bias)), *_pointers(act, y),
        *((number, c_int) for number in (base, pairs, experts, _most_tiles(pairs, experts, tile), ids.shape[1])),
        *((number, c_int) for number in (hidden, inner, *rooms)),
        *((number, c_float) for number in (UNIT, alpha, limit)),
    ]  # fmt: skip
    form = form_of(w13, tile, activation)
    function = nvrtc.kernel(numbers_text("fused_4bit.cu"), "fused_4bit", form, x.device.index)
    # all shared memory, because its programs must be the only ones that wait for each other
    kernel = nvrtc.Kernel(function, x.device, _LANES * tile.warps, nvrtc.SHARED, cooperative=True)
    launch(kernel, (programs(x, 0),), nvrtc.Arguments(arguments))


def _pointers(*given: Tensor | None) -> list[tuple[int, type[c_void_p]]]:
    return [(0 if one is None else one.data_ptr(), c_void_p) for one in given]


def form_of(w: Weights, tile: Tile, activation: Activation) -> tuple[str, ...]:
    """Return the compiler options of the kernel."""
    given = {"WARPS": tile.warps, "AHEAD": tile.stages, "ROWS": tile.block_m, "GATED": int(activation.gated)}
    return (*numbers_form(w), *(f"-D{name}={value}" for name, value in given.items()), f"-D{activation.value.upper()}")


def _most_tiles(pairs: int, experts: int, tile: Tile) -> int:
    return min(pairs, experts + pairs // tile.block_m)


def _rooms(pairs: int, tile: Tile, w13: Weights, w2: Weights) -> list[int]:
    """Return how many rows of x, and of the second product's input, fit into shared memory.

    It also holds the lists of routes, the tiles, and the sums of all warps but one.
    """
    experts = len(w13.data)
    lists = 4 * (4 + experts + 1 + 2 * pairs + 3 * _most_tiles(pairs, experts, tile))
    sums = (tile.warps - 1) * tile.block_m // 8 * 4 * 4 * _LANES
    left = nvrtc.SHARED - cdiv(lists, 128) * 128 - sums
    return [left // (w.data.shape[1] * DEPTH * 2 + 16) for w in (w13, w2)]
