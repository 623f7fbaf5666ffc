"""The grouped and streaming GEMMs of this project's Hopper kernels against float64.

In bf16, and in E4M3 with a scale per matrix, per row, per weight row, or per block.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.hopper import gemm_grouped as kernels
from ep_moe.experts.hopper.gemm_grouped import Tiles
from ep_moe.experts.hopper.gemm_streaming import Ring, product
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.quant.fp8 import FP8
from ep_moe.quant.kernels import BlockScales, MatrixScales, RowScales
from tests.fixtures.bf16_triton import BF16
from tests.fixtures.hopper_gpu import COUNTS, FORMS, exact_sums, operands

pytestmark = pytest.mark.timeout(600)
each_form = pytest.mark.parametrize("tiles", FORMS, ids=str)
SPARE_ROWS = 130  # after the last expert's rows; no GEMM may write to them


def matrix_scales(_rows: int, _experts: int, _n: int) -> MatrixScales:
    rows = torch.tensor([0.5, 1, 2, 4, 0.25, 8], device="cuda")
    return MatrixScales(rows, rows.flip(0) / 3)


def row_scales(rows: int, experts: int, _n: int) -> RowScales:
    """Return row scales far apart from row to row, and strided weight scales."""
    row = torch.arange(rows, device="cuda")
    return RowScales(2.0 ** (row * 7 % 11 - 5).float(), torch.rand(experts, 3, 2, device="cuda")[:, 0, 0])


def channel_scales(rows: int, experts: int, n: int) -> RowScales:
    """Return scales whose weight part differs from row to row too."""
    scales = torch.rand(experts, n, generator=torch.Generator(device="cuda").manual_seed(3), device="cuda") + 0.5
    return RowScales(row_scales(rows, experts, n).rows, scales * 2.0 ** (torch.arange(n, device="cuda") * 5 % 7 - 3))


each_scales = pytest.mark.parametrize(
    "made", [matrix_scales, row_scales, channel_scales], ids=["a scale a matrix", "a scale a row", "a scale a channel"]
)


def factor_of(scales: MatrixScales | RowScales, expert: Tensor) -> Tensor:
    """Return the factor of each row's sums, [r, 1] or [r, n]."""
    rows = scales.rows.double()[expert] if isinstance(scales, MatrixScales) else scales.rows.double()
    weights = scales.weights.double()[expert]
    return rows.unsqueeze(1) * (weights if weights.dim() == 2 else weights.unsqueeze(1))


def grouped(a: Tensor, expert: Tensor) -> list[tuple[Tensor, int]]:
    return [(a[expert == e], e) for e in range(len(COUNTS)) if COUNTS[e]]


def expert_of(ends: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ends), device="cuda"), ends.long().diff(prepend=ends.new_zeros(1)))


@each_form
@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
@each_scales
def test_grouped_in_e4m3(tiles, spare, made):
    """The grouped GEMM in E4M3 is within its bound.

    Some experts have no rows, and some tiles exceed an expert's last row or column. With 384 columns, half of the last
    tile of 256 belongs to the next expert.
    """
    n, k = 384, 384
    a, b, ends, expert = operands(n, k, FP8)
    scales = made(len(a), len(b), n)
    out = torch.full((len(a) + SPARE_ROWS, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=spare, scales=scales)
    factor = factor_of(scales, expert)
    for part in torch.arange(len(a), device="cuda").split(128):
        expected, lost = exact_sums(a[part].double(), b.double()[expert[part]])
        own = factor[part]
        # the scales in float32, and one rounding to bf16
        limit = own * (lost + 2.0**-8 * (expected.abs() + lost) + 2.0**-20 * expected.abs())
        assert bool(((out[part].double() - own * expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


def block_scales(rows: int, experts: int, n: int, k: int) -> BlockScales:
    """Return scales of rows and weights that are far apart from block to block, along K and across."""
    row, block = torch.arange(rows, device="cuda").unsqueeze(1), torch.arange(k // 128, device="cuda")
    scale = (
        torch.rand(experts, n // 128, k // 128, generator=torch.Generator("cuda").manual_seed(3), device="cuda") + 0.5
    )
    across = torch.arange(n // 128, device="cuda").unsqueeze(1)
    return BlockScales(
        2.0 ** ((row * 7 + block * 3) % 11 - 5).float(), scale * 2.0 ** ((across * 5 + block * 3) % 7 - 3)
    )


def sums_of_blocks(a: Tensor, b: Tensor, scales: BlockScales, expert: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return products of some rows in float64 [r, n], and what tensor cores and float32 block sums may lose."""
    rows, weights = scales.rows.double()[part], scales.weights.double()[expert[part]].repeat_interleave(128, 1)
    left, right = a[part].double().split(128, 1), b.double()[expert[part]].split(128, 2)
    expected, limit = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    for block, (one, other) in enumerate(zip(left, right, strict=True)):
        own, lost = exact_sums(one, other)
        factor = rows[:, block].unsqueeze(1) * weights[:, :, block]
        expected, limit = expected + factor * own, limit + factor * (lost + 2.0**-20 * (own.abs() + lost))
    return expected, limit


@pytest.mark.parametrize("tiles", [Tiles(16), kernels.BLOCKS], ids=str)
@pytest.mark.parametrize("activation", [None, Activation.SWIGLU], ids=["plain", "activated"])
@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
def test_grouped_with_scales_of_blocks(tiles, activation, gathered, spare):
    """The grouped GEMM with block scales is within its bound.

    Gathered rows are read from other places, and their scales have another stride along K.
    """
    n, k = 768, 384
    a, b, ends, expert = operands(n, k, FP8)
    scales = block_scales(len(a), len(b), n, k)
    given, of_rows, source = a, scales.rows, None
    if gathered:
        place = torch.randperm(len(a), generator=torch.Generator().manual_seed(1)).cuda()
        source = place.int()
        given = torch.empty_like(a)
        given.view(torch.uint8)[place] = a.view(torch.uint8)
        of_rows = torch.empty(k // 128, len(a), device="cuda").mT
        of_rows[place] = scales.rows
    columns = n if activation is None else n // 2
    out = torch.full((len(a) + SPARE_ROWS, columns), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(
        given, b, ends, out, tiles, activation=activation, spare_sms=spare, source=source,
        scales=BlockScales(of_rows, scales.weights),
    )  # fmt: skip
    for part in torch.arange(len(a), device="cuda").split(64):
        expected, limit = sums_of_blocks(a, b, scales, expert, part)
        if activation is not None:  # the derivative of silu is at most 1.1
            (gate, up), (gate_limit, up_limit) = expected.chunk(2, 1), limit.chunk(2, 1)
            silu = torch.nn.functional.silu(gate)
            expected = silu * up
            limit = 1.1 * gate_limit * (up.abs() + up_limit) + silu.abs() * up_limit + 2.0**-16 * expected.abs()
        limit = limit + 2.0**-8 * (expected.abs() + limit)
        assert bool(((out[part].double() - expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


@each_form
@pytest.mark.parametrize("n", [384, 320], ids=["whole tiles", "a part of one"])
@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
def test_grouped_in_bf16(tiles, spare, n):
    k = 192
    a, b, ends, expert = operands(n, k, BF16)
    out = torch.full((len(a) + SPARE_ROWS, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=spare)
    expected = torch.cat([one.double() @ b[e].double().T for one, e in grouped(a, expert)])
    size = torch.cat([one.double().abs() @ b[e].double().abs().T for one, e in grouped(a, expert)])
    assert bool(((out[: len(a)].double() - expected).abs() <= limit_in_bf16(expected, size, k)).all())
    assert bool(out[len(a) :].isnan().all())


@each_form
@pytest.mark.parametrize(
    ("dtype", "turned", "n"),
    [(BF16, False, 384), (BF16, True, 384), (BF16, True, 320), (FP8, False, 384)],
    ids=["bf16", "turned", "turned, a part of a tile", "e4m3"],
)
def test_gathered_rows_give_the_same_bits(tiles, dtype, turned, n):
    """Gathered rows give the bits of sorted rows. Several experts read some of them, and others are read by none."""
    k = 384
    a, b, ends, _ = operands(n, k, dtype)
    if turned:
        b = b.mT.contiguous()
    generator = torch.Generator(device="cuda").manual_seed(3)
    source = torch.randint(0, len(a) // 2, (len(a),), generator=generator, device="cuda", dtype=torch.int32)
    rows = torch.full((len(a), k), torch.nan, device="cuda").to(dtype)
    rows[: len(a) // 2] = a[: len(a) // 2]
    scales = matrix_scales(len(a), len(b), n) if dtype == FP8 else None
    outs = [torch.full((len(a) + SPARE_ROWS, n), 9.0, dtype=BF16, device="cuda") for _ in range(2)]
    sorted_rows = rows.view(torch.uint8)[source.long()].view(dtype)
    kernels.grouped_gemm(sorted_rows, b, ends, outs[0], tiles, scales=scales, turned=turned)
    kernels.grouped_gemm(rows, b, ends, outs[1], tiles, scales=scales, turned=turned, source=source)
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))
    assert not bool(outs[0].isnan().any())


@each_form
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("n", [384, 320], ids=["whole tiles", "a part of one"])
def test_rows_written_to_peers_have_the_same_bits(tiles, dtype, n):
    """Rows written to two other memories, in any order, have the same bits, and nothing between them is written."""
    a, b, ends, _ = operands(n, 384, dtype)
    scales = channel_scales(len(a), len(b), n) if dtype is FP8 else None
    out, rows = torch.full((len(a), n), torch.nan, device="cuda", dtype=BF16), int(ends[-1])
    kernels.grouped_gemm(a, b, ends, out, tiles, scales=scales)
    peer_memory = torch.full((2, len(a), n + 8), torch.nan, device="cuda", dtype=BF16)
    line = torch.randperm(2 * len(a), generator=torch.Generator().manual_seed(n))[: len(a)].cuda()
    addresses = peer_memory.data_ptr() + line * (n + 8) * BF16.itemsize
    kernels.grouped_gemm(a, b, ends, torch.empty_like(out), tiles, scales=scales, addresses=addresses)
    found = peer_memory.flatten(0, 1)
    assert torch.equal(found[line[:rows], :n], out[:rows])
    found[line[:rows], :n] = torch.nan
    assert bool(found.isnan().all())


def limit_in_bf16(expected: Tensor, size: Tensor, k: int) -> Tensor:
    """Return the bound in bf16: products are exact in float32, k of them are added there and rounded once."""
    return 2.0**-8 * expected.abs() + k * 2.0**-23 * size


@pytest.mark.parametrize("tiles", [Tiles(48), Tiles(144), Tiles(192, stages=3)], ids=str)
def test_every_way_to_activate_gives_the_same_numbers(tiles):
    """All tile sizes give the same bits after the activation.

    Operands are small integers, so sums are exact in any order.
    """
    generator = torch.Generator(device="cuda").manual_seed(1)
    _, _, ends, _ = operands(256, 256, FP8)
    a = torch.randint(-2, 3, (sum(COUNTS), 256), generator=generator, device="cuda").to(FP8)
    b = torch.randint(-2, 3, (len(COUNTS), 256, 256), generator=generator, device="cuda").to(FP8)
    one = torch.ones(len(COUNTS), device="cuda")
    scales = MatrixScales(2.0**-4, one, one / 16)
    outs = [torch.full((len(a) + SPARE_ROWS, 128), 9.0, device="cuda").to(FP8) for _ in range(2)]
    for out, form in zip(outs, (Tiles(16), tiles), strict=True):
        kernels.grouped_gemm(a, b, ends, out, form, activation=Activation.SWIGLU, scales=scales, spare_sms=120)
    assert torch.equal(outs[1].view(torch.uint8), outs[0].view(torch.uint8))
    assert bool((outs[1][len(a) :].float() == 9).all())
    h = torch.cat([rows_.double() @ b[e].double().T for rows_, e in grouped(a, expert_of(ends))]) / 16
    value = torch.nn.functional.silu(h[:, :128]) * h[:, 128:] * 16
    # one rounding to E4M3, and 2**-16 for exp and division in float32
    limit = torch.maximum(value.abs() * (2.0**-4 + 2.0**-16), torch.tensor(2.0**-10, device="cuda"))
    assert bool(((outs[1][: len(a)].double() - value.clamp(-448, 448)).abs() <= limit).all())


@pytest.mark.parametrize("ring", [Ring(16, 12), Ring(32, 11), Ring(64, 9)], ids=lambda ring: str(ring.rows))
@pytest.mark.parametrize("counts", [[130, 0, 1, 64, 129], [0, 0, 0, 3], [1] * 70], ids=["many", "last", "more tiles"])
@pytest.mark.parametrize(("n", "k"), [(384, 640), (192, 320)], ids=["whole tiles", "a part of one"])
def test_streamed_in_bf16(counts, ring, n, k):
    """The streaming GEMM in bf16 is within its bound.

    Some experts have no rows, but programs still fetch their weights. Some have more rows than a ring holds.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    total = sum(counts)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    x = torch.randn(50, k, generator=generator, device="cuda").to(BF16)
    source = torch.randint(50, (total + 3,), generator=generator, device="cuda", dtype=torch.int32)
    w = torch.randn(len(counts), n, k, generator=generator, device="cuda").to(BF16)
    expert = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), torch.tensor(counts, device="cuda"))
    for gather, a in ((True, x), (False, x[source.long()])):
        out = torch.full((total + 3, n), torch.nan, dtype=BF16, device="cuda")
        product(a, w, Lists(source, source, ends), out, ring, gather=gather)
        left = x[source.long()][:total].double()
        expected = torch.einsum("rk,rnk->rn", left, w.double()[expert])
        size = torch.einsum("rk,rnk->rn", left.abs(), w.double()[expert].abs())
        assert bool(((out[:total].double() - expected).abs() <= limit_in_bf16(expected, size, k)).all())
        assert bool(out[total:].isnan().all())


@pytest.mark.parametrize("ring", [Ring(16, 12), Ring(32, 11), Ring(64, 9)], ids=lambda ring: str(ring.rows))
@each_scales
def test_streamed_in_e4m3(ring, made):
    """The streaming GEMM in E4M3 is within its bound, for rows in place and for gathered rows with their scales."""
    n, k = 384, 384
    a, b, ends, expert = operands(n, k, FP8)
    source = torch.randint(len(a), (len(a),), generator=torch.Generator(device="cuda").manual_seed(2), device="cuda")
    scales = made(len(a), len(b), n)
    for gather in (False, True):
        rows = source if gather else torch.arange(len(a), device="cuda")
        out = torch.full((len(a) + SPARE_ROWS, n), torch.nan, dtype=BF16, device="cuda")
        product(a, b, Lists(source.int(), source.int(), ends), out, ring, gather=gather, scales=scales)
        taken = scales if isinstance(scales, MatrixScales) else RowScales(scales.rows[rows], scales.weights)
        factor = factor_of(taken, expert)
        for part in torch.arange(len(a), device="cuda").split(128):
            expected, lost = exact_sums(a[rows[part]].double(), b.double()[expert[part]])
            own = factor[part]
            limit = own * (lost + 2.0**-8 * (expected.abs() + lost) + 2.0**-20 * expected.abs())
            assert bool(((out[part].double() - own * expected).abs() <= limit).all())
        assert bool(out[len(a) :].isnan().all())


@each_form
@pytest.mark.parametrize("form", ["grouped", "streamed"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda kind: kind.value)
def test_gate_and_up_have_channels_of_their_own(tiles, form, activation, biased):
    """Gate and up rows use their own channel scales, which are far apart here.

    Operands are small integers, so sums are exact. With 192 columns, a group's tile is cut off.
    """
    generator = torch.Generator(device="cuda").manual_seed(1)
    _, _, ends, expert = operands(128, 128, FP8)
    inner, gated = 192, activation.gated
    if form == "streamed":
        inner = 256  # whole tiles
    a = torch.randint(-2, 3, (len(expert), 256), generator=generator, device="cuda").to(FP8)
    b = torch.randint(-2, 3, (len(COUNTS), inner * (1 + gated), 256), generator=generator, device="cuda").to(FP8)
    made = channel_scales(len(a), len(b), b.shape[1])
    scales = RowScales(made.rows / 64, made.weights)
    bias = torch.randn(b.shape[:2], generator=generator, device="cuda").to(BF16) if biased else None
    out = torch.full((len(a) + SPARE_ROWS, inner), torch.nan, dtype=BF16, device="cuda")
    if form == "grouped":
        kernels.grouped_gemm(a, b, ends, out, tiles, activation=activation, scales=scales, bias=bias, spare_sms=120)
    else:
        product(a, b, Lists(ends, ends, ends), out, Ring(32, 11), activation=activation, scales=scales, bias=bias)
    h = torch.cat([part.double() @ b[e].double().T for part, e in grouped(a, expert)]) * factor_of(scales, expert)
    added = torch.zeros_like(h) if bias is None else bias.double()[expert]
    lost = 2.0**-22 * (h.abs() + added.abs())  # float32 rounding of scales, and of a bias that may cancel the sum
    h = h + added
    gate, up = h.chunk(2, 1) if gated else (h, h)
    value = torch.nn.functional.silu(gate) * up if gated else gate.relu().square()
    of_gate, of_up = lost.chunk(2, 1) if gated else (lost, lost)
    # the derivative of silu is below 1.1; one rounding to bf16, and 2**-16 for exp and division in float32
    limit = value.abs() * (2.0**-8 + 2.0**-16) + 2.0**-30
    limit = limit + 1.01 * (1.1 * of_gate * up.abs() + of_up * gate.abs()) + 1.1 * of_gate * of_up
    assert bool(((out[: len(a)].double() - value).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())
