"""The products of this project's Hopper kernels, grouped and streamed, against float64: in bf16, and in E4M3 with one
scale a matrix or one a row."""

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
from ep_moe.quant.kernels import MatrixScales, RowScales
from tests.fixtures.bf16_triton import BF16
from tests.fixtures.hopper_gpu import COUNTS, FORMS, exact_sums, operands

pytestmark = pytest.mark.timeout(600)
each_form = pytest.mark.parametrize("tiles", FORMS, ids=str)
SPARE_ROWS = 130  # after the last expert's; no product may write to them


def matrix_scales(_rows: int, _experts: int) -> MatrixScales:
    rows = torch.tensor([0.5, 1, 2, 4, 0.25, 8], device="cuda")
    return MatrixScales(rows, rows.flip(0) / 3)


def row_scales(rows: int, experts: int) -> RowScales:
    """Far apart from row to row, and the weights' with a stride."""
    row = torch.arange(rows, device="cuda")
    return RowScales(2.0 ** (row * 7 % 11 - 5).float(), torch.rand(experts, 3, 2, device="cuda")[:, 0, 0])


def factor_of(scales: MatrixScales | RowScales, expert: Tensor) -> Tensor:
    """What each row's sums are multiplied by, [r, 1]."""
    rows = scales.rows.double()[expert] if isinstance(scales, MatrixScales) else scales.rows.double()
    return (rows * scales.weights.double()[expert]).unsqueeze(1)


def grouped(a: Tensor, expert: Tensor) -> list[tuple[Tensor, int]]:
    return [(a[expert == e], e) for e in range(len(COUNTS)) if COUNTS[e]]


def expert_of(ends: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ends), device="cuda"), ends.long().diff(prepend=ends.new_zeros(1)))


@each_form
@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
@pytest.mark.parametrize("made", [matrix_scales, row_scales], ids=["a scale a matrix", "a scale a row"])
def test_grouped_in_e4m3(tiles, spare, made):
    """Experts without rows and tiles past an expert's last row and column among them. 384 columns: the last tile of
    256 is half another expert's."""
    n, k = 384, 384
    a, b, ends, expert = operands(n, k, FP8)
    scales = made(len(a), len(b))
    out = torch.full((len(a) + SPARE_ROWS, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=spare, scales=scales)
    factor = factor_of(scales, expert)
    for part in torch.arange(len(a), device="cuda").split(128):
        expected, lost = exact_sums(a[part].double(), b.double()[expert[part]])
        own = factor[part]
        # float32: the scales, and one rounding to bf16
        limit = own * (lost + 2.0**-8 * (expected.abs() + lost) + 2.0**-20 * expected.abs())
        assert bool(((out[part].double() - own * expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


@each_form
@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
def test_grouped_in_bf16(tiles, spare):
    n, k = 384, 192
    a, b, ends, expert = operands(n, k, BF16)
    out = torch.full((len(a) + SPARE_ROWS, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=spare)
    expected = torch.cat([one.double() @ b[e].double().T for one, e in grouped(a, expert)])
    size = torch.cat([one.double().abs() @ b[e].double().abs().T for one, e in grouped(a, expert)])
    assert bool(((out[: len(a)].double() - expected).abs() <= limit_in_bf16(expected, size, k)).all())
    assert bool(out[len(a) :].isnan().all())


@each_form
@pytest.mark.parametrize(
    ("dtype", "turned"), [(BF16, False), (BF16, True), (FP8, False)], ids=["bf16", "turned", "e4m3"]
)
def test_gathered_rows_give_the_same_bits(tiles, dtype, turned):
    """Rows that lie elsewhere, some of them read by several experts, beside rows that nothing reads."""
    n, k = 384, 384
    a, b, ends, _ = operands(n, k, dtype)
    if turned:
        b = b.mT.contiguous()
    generator = torch.Generator(device="cuda").manual_seed(3)
    source = torch.randint(0, len(a) // 2, (len(a),), generator=generator, device="cuda", dtype=torch.int32)
    rows = torch.full((len(a), k), torch.nan, device="cuda").to(dtype)
    rows[: len(a) // 2] = a[: len(a) // 2]
    scales = matrix_scales(len(a), len(b)) if dtype == FP8 else None
    outs = [torch.full((len(a) + SPARE_ROWS, n), 9.0, dtype=BF16, device="cuda") for _ in range(2)]
    sorted_rows = rows.view(torch.uint8)[source.long()].view(dtype)
    kernels.grouped_gemm(sorted_rows, b, ends, outs[0], tiles, scales=scales, turned=turned)
    kernels.grouped_gemm(rows, b, ends, outs[1], tiles, scales=scales, turned=turned, source=source)
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))
    assert not bool(outs[0].isnan().any())


def limit_in_bf16(expected: Tensor, size: Tensor, k: int) -> Tensor:
    """Products of two bf16 are exact in float32; k sums there, and one rounding to bf16."""
    return 2.0**-8 * expected.abs() + k * 2.0**-23 * size


@pytest.mark.parametrize("tiles", [Tiles(48), Tiles(144), Tiles(192, stages=3)], ids=str)
def test_every_way_to_activate_gives_the_same_numbers(tiles):
    """Operands of small integers, whose sums are exact however they are added: equal bits, whatever the tiles."""
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
def test_streamed_in_bf16(counts, ring):
    """Experts without rows, whose weights programs fetch all the same, and with more than fit."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    n, k, total = 384, 640, sum(counts)
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
