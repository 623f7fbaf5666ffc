"""`w4a16_triton` and `w4a8_triton` on a Hopper GPU, beyond tests/gpu/test_hopper_kernels.py.

Biases, sizes that are not multiples of 128, every tile, rows to peers, exponents far apart, and what the layout
refuses.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.errors import InputError

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.hopper import fused_4bit, gemm_4bit, gemm_grouped_4bit, gemm_skinny_4bit, scaling_4bit
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.gemm_grouped import Tiles
from ep_moe.experts.hopper.gemm_skinny import Tile, TileConfig
from ep_moe.experts.hopper.numbers_4bit import Weights
from ep_moe.experts.hopper.step import SCALINGS
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, PhysicalIds, WireIds
from tests.fixtures.bf16_triton import BF16, SMALL, check_peers, rows
from tests.fixtures.w4a16_triton import FOUR_BITS, FOUR_BITS_FP8, UNEVEN, build

pytestmark = pytest.mark.timeout(600)
GPT_OSS = (
    MoEConfig(
        hidden_size=2880, intermediate_size=2880, num_experts=16, top_k=4, expert_bias=True,
        activation=Activation.SWIGLU_CLAMPED,
    ),
    6,
)  # fmt: skip
ALL = FOUR_BITS + FOUR_BITS_FP8
each_scheme = pytest.mark.parametrize("scheme", ALL)
by_32 = pytest.mark.parametrize("scheme", [name for name in ALL if SCHEMES[name].weights.unit[1] <= 32])


def check(experts, tensors, received, *, output_bias: bool = True) -> None:
    y = experts(received, torch.full_like(received.x, torch.nan))
    given = received.x, received.local_ids, received.weights, BF16
    found = max_error_ratio(
        y, *expected_and_limit(experts.config, experts.weights.scheme, tensors, *given, output_bias=output_bias)
    )
    print(f"{len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


def sorted_and_grouped(monkeypatch, scheme: str) -> None:
    """Use the grouped GEMMs, which are for many rows, for the fewest rows too."""
    monkeypatch.setattr(scaling_4bit, "FEWEST", 0)
    monkeypatch.setattr(fused_4bit, "MOST_ROUTES", 0)
    monkeypatch.setattr(SCALINGS[scheme], "listed_up_to", (0.0, 0.0))


@each_scheme
@pytest.mark.parametrize("output_bias", [True, False], ids=["etp rank 0", "another"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=str), ids=lambda a: a.value)
def test_biases(activation, output_bias, scheme):
    config, slots = dataclasses.replace(SMALL[0], activation=activation, expert_bias=True), SMALL[1]
    experts, tensors = build(config, slots, scheme)
    experts.weights.etp = dataclasses.replace(experts.weights.etp, rank=0 if output_bias else 1)
    for count in (2, 20, 60, 130, 400, 2000):
        check(experts, tensors, rows(config, slots, count), output_bias=output_bias)


@by_32
@pytest.mark.parametrize("model", [UNEVEN, GPT_OSS], ids=["uneven", "gpt-oss"])
def test_half_a_block_of_columns(model, scheme):
    experts, tensors = build(*model, scheme)
    for count in (1, 4, 20, 64, 200, 700):
        check(experts, tensors, rows(*model, count))


@pytest.mark.parametrize("scheme", FOUR_BITS)
@pytest.mark.parametrize(
    "tile",
    [Tile(16, 32, warps=2), Tile(16, 64), Tile(16, 128, warps=8), Tile(32, 64), Tile(64, 64, stages=3),
     Tile(64, 128, stages=3, warps=8)],
    ids=str,
)  # fmt: skip
def test_each_tile(tile, scheme, monkeypatch):
    monkeypatch.setattr(gemm_4bit, "tile_for", lambda _: tile)
    monkeypatch.setattr(SCALINGS[scheme], "listed_up_to", (math.inf, math.inf))
    experts, tensors = build(*SMALL, scheme)
    for count in (9, 60, 500):
        check(experts, tensors, rows(*SMALL, count))


@pytest.mark.parametrize("scheme", FOUR_BITS_FP8)
@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, stages=2, warps=8), Tile(8, 64, stages=3, warps=4), Tile(8, 64, stages=2, warps=8, split=2),
     Tile(8, 64, stages=2, warps=8, split=4), Tile(8, 64, stages=1, warps=8, split=8)],
    ids=str,
)  # fmt: skip
def test_each_tile_of_the_fewest(tile, scheme, monkeypatch):
    """Each tile of the skinny GEMM works.

    Cases have more routes per expert than a tile, half a block, and fewer blocks than the warps that share them.
    """
    monkeypatch.setattr(gemm_skinny_4bit, "tiles_for", lambda _: TileConfig(False, tile, tile))
    for model in [SMALL] + [UNEVEN] * (SCHEMES[scheme].weights.unit[1] <= 32):
        experts, tensors = build(*model, scheme)
        for count in (1, 3, 8):
            check(experts, tensors, rows(*model, count))


def fused_tile(monkeypatch, tile: Tile, *, room: int | None = None) -> None:
    """Use the fused kernel with this tile. room: rows of x that a program holds at once"""
    monkeypatch.setattr(fused_4bit, "tiles_for", lambda *_: TileConfig(False, tile, tile))
    if room is not None:
        monkeypatch.setattr(fused_4bit, "_rooms", lambda *_: [room, room])


@pytest.mark.parametrize("scheme", FOUR_BITS)
@pytest.mark.parametrize("programs", [2, 14, 132])
@pytest.mark.parametrize(("warps", "ahead"), [(24, 1), (16, 2), (8, 3)])
@pytest.mark.parametrize("height", [8, 16])
def test_each_tile_of_the_fused_kernel(height, warps, ahead, programs, scheme, monkeypatch):
    """Both products in one kernel work with each tiling.

    Cases have more routes per expert than a tile, half a block, one to eight warps a strip by the number of programs,
    fewer blocks than these, and programs that hold the rows of one tile at a time.
    """
    for model in [SMALL] + [UNEVEN] * (SCHEMES[scheme].weights.unit[1] <= 32):
        experts, tensors = build(*model, scheme)
        for room in (None, height):
            with monkeypatch.context() as patched:
                patched.setattr(fused_4bit, "programs", lambda *_: programs)
                fused_tile(patched, Tile(height, 0, ahead, warps), room=room)
                for count in (1, 3, 20, 130):
                    check(experts, tensors, rows(*model, count))


@pytest.mark.parametrize("scheme", FOUR_BITS)
def test_few_rows_of_one_expert(scheme, monkeypatch):
    """All rows choose one expert, which then has more rows than a tile, and the others have none."""
    fused_tile(monkeypatch, Tile(8, 0, 1, 24))
    config, slots = SMALL
    experts, tensors = build(config, slots, scheme)
    received = rows(config, slots, 100)
    ids = torch.full_like(received.local_ids, -1)
    ids[:, 0] = slots - 1
    check(experts, tensors, dataclasses.replace(received, local_ids=LocalIds(ids)))


@pytest.mark.parametrize("scheme", ["mxfp4", "mxint4"])
def test_few_rows_give_the_same_bits(scheme):
    """Equal bits over 20 calls and in a captured graph, though programs sort routes in any order."""
    config, slots = SMALL
    experts, _ = build(config, slots, scheme)
    received, out = rows(config, slots, 100), torch.empty(100, config.hidden_size, dtype=BF16, device="cuda")
    first = experts(received, out).clone()
    for _ in range(20):
        assert torch.equal(experts(received, out.fill_(torch.nan)), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(received, out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)


def test_few_rows_of_two_layers_at_once():
    """Two layers on two streams, whose programs wait for each other, end with the right results."""
    config, slots = SMALL
    layers = [build(config, slots, scheme)[0] for scheme in ("mxfp4", "mxint4")]
    received = rows(config, slots, 60)
    expected = [layer(received, torch.empty_like(received.x)).clone() for layer in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    outs = [[torch.empty_like(received.x) for _ in range(50)] for _ in layers]
    for i in range(50):
        for stream, layer, out in zip(streams, layers, outs, strict=True):
            with torch.cuda.stream(stream):
                layer(received, out[i])
    torch.cuda.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert all(torch.equal(one, right) for one in out)


@each_scheme
@pytest.mark.parametrize("rows_at_most", [16, 32, 96, 128, 160])
def test_each_tile_of_many_rows(rows_at_most, scheme, monkeypatch):
    """Each tile of the grouped GEMM works.

    Experts have one row, part of a tile and several tiles. One model has half a block of columns.
    """
    if rows_at_most > 128 and scheme != "mxfp4_fp8":
        pytest.skip("tiles that registers suffice for with these weights alone")

    def chosen(rows: float, w: Weights, spare_sms: int) -> Tiles:
        (tiles,) = (tiles for tiles in gemm_grouped_4bit.candidates_of(w) if tiles.rows == rows_at_most)
        return tiles

    monkeypatch.setattr(gemm_grouped_4bit, "tiles_for", chosen)
    sorted_and_grouped(monkeypatch, scheme)
    model = SMALL if SCHEMES[scheme].weights.unit[1] > 32 else UNEVEN
    experts, tensors = build(*model, scheme)
    for count in (1, 3, 60, 500, 1500):
        check(experts, tensors, rows(*model, count))


@each_scheme
@pytest.mark.parametrize("many", [False, True], ids=["few at once", "many at once"])
@pytest.mark.parametrize("count", [4, 40, 500])
def test_written_to_peers(count, many, scheme, monkeypatch):
    if many:
        sorted_and_grouped(monkeypatch, scheme)
    elif scheme in FOUR_BITS:
        monkeypatch.setattr(SCALINGS[scheme], "listed_up_to", (math.inf, math.inf))
    experts, _ = build(*SMALL, scheme)
    received = rows(*SMALL, count)
    received.weights[::3] = 0.0
    check_peers(experts, received, 4, 2)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    check_peers(experts, travelled, 4, 2)


@pytest.mark.parametrize("many", [False, True], ids=["few at once", "many at once"])
def test_exponents_far_apart_in_e4m3(many, monkeypatch):
    """Groups whose exponent is up to 14 below the largest of their row are exact in E4M3.

    Beyond that they round to multiples of 2 ** -9. A group of zeros does not count, whatever its exponent.
    """
    if many:
        sorted_and_grouped(monkeypatch, "mxfp4_fp8")
    experts, tensors = build(*SMALL, "mxfp4_fp8")
    for own in tensors:
        for name in ("w13", "w2"):
            scale, data = own[f"{name}_scale"], own[name]
            row = torch.arange(len(scale), device=scale.device)
            scale[:, 1] = scale[:, 0] - (row % 15).to(torch.uint8)
            data[::3, -16:] = 0
            scale[::3, -1] = 200
    for expert, own in enumerate(tensors):
        experts.weights.update_expert(expert, own)
    for count in (3, 40, 500):
        check(experts, tensors, rows(*SMALL, count))
    for own in tensors:  # round the expected numbers as the kernel does
        scale = own["w13_scale"]
        scale[:, 1] = scale[:, 0] - 17
        values = SCHEMES["mxfp4_fp8"].dequantize(own, "w13").unflatten(1, (-1, 32))
        step = torch.exp2(scale[:, [0, 2, 3]].amax(1).float() - 127 - 6 - 9)
        values[:, 1] = (values[:, 1] / step[:, None]).round() * step[:, None]
        own["numbers"] = values.flatten(1).double(), SCHEMES["mxfp4_fp8"].dequantize(own, "w2").double()
    numbers = [own.pop("numbers") for own in tensors]
    for expert, own in enumerate(tensors):
        experts.weights.update_expert(expert, own)
    received = rows(*SMALL, 60)
    given = received.x, received.local_ids, received.weights, BF16
    y = experts(received, None)
    assert (
        max_error_ratio(y, *expected_and_limit(SMALL[0], SCHEMES["mxfp4_fp8"], tensors, *given, numbers=numbers)) <= 1
    )


def test_exponents_beyond_bf16_are_refused():
    experts, tensors = build(*SMALL, "mxfp4")
    tensors[0]["w2_scale"][3, 1] = 161
    with pytest.raises(InputError, match="w2_scale must have exponents of at most 160"):
        experts.weights.update_expert(0, tensors[0])
