"""`fp8_tensor_triton` on a Hopper GPU: within the bound however a call is cut, allocation-free, captured,
deterministic; the grouped GEMM behind it and behind `bf16_triton` in every form."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from ep_moe import Activation
from ep_moe.experts.hopper.experts import ACTIVATIONS

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.hopper import gemm_grouped as kernels
from ep_moe.experts.hopper.gemm_grouped import Tiles
from ep_moe.quant.fp8_tensor_kernels import MatrixScales
from ep_moe.testing.expert_oracle import expected_and_limit, worst
from tests.fixtures.bf16_triton import BF16, SMALL, check, rows
from tests.fixtures.fp8_tensor_triton import FP8, STATIC, build, rounded
from tests.fixtures.fp8_tensor_triton_gpu import COUNTS, DEEPSEEK, FORMS, ODD, QWEN3, exact_sums, operands

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("model", [SMALL, ODD, QWEN3, DEEPSEEK], ids=["small", "odd", "qwen3", "deepseek"])
def test_every_cut(model):
    experts, tensors = build(*model)
    for count in (1, 7, 32, 33, 64, 255, 256, 257, 1100, 4099):
        check(experts, tensors, rows(*model, count))


@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
@pytest.mark.parametrize("count", [30, 100, 2000], ids=str)
def test_every_activation(activation, count):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = build(config, SMALL[1])
    check(experts, tensors, rows(config, SMALL[1], count))


@pytest.mark.parametrize("count", [30, 100, 2000], ids=str)
def test_rows_that_were_rounded_before_give_the_same_bits(count):
    experts, tensors = build(*SMALL)
    received = rows(*SMALL, count)
    received.x[3, 5], received.x[4, 6], received.x[5, 7] = 1e4, -1e4, torch.nan
    largest = max(float(own["w13_input_scale"]) for own in tensors)
    y = experts(received)
    mine = (received.local_ids >= 0).any(1)
    assert bool(y[5].isnan().all()) == bool(mine[5])
    assert bool(y[torch.arange(count, device="cuda") != 5].isfinite().all())
    assert torch.equal(experts(rounded(received, largest)).nan_to_num(99.0), y.nan_to_num(99.0))


@pytest.mark.parametrize("count", [30, 2000], ids=str)
def test_activations_saturate(count):
    config = dataclasses.replace(SMALL[0], activation=Activation.RELU2)
    experts, _ = build(config, SMALL[1])
    for name, value in (("w13", 1.0), ("w13_scale", 1.0), ("w2", 1.0), ("w2_scale", 1.0), ("w2_input_scale", 0.25)):
        stored = experts.weights.get_parameter(name).data
        stored.copy_(torch.full(stored.shape, value, device="cuda"))
    received = rows(config, SMALL[1], count, empty=0.0)
    ids = torch.full_like(received.local_ids, -1)
    ids[:, 0] = received.local_ids[:, 0]
    ones = {"x": torch.ones_like(received.x), "weights": torch.ones_like(received.weights)}
    y = experts(dataclasses.replace(received, local_ids=ids, **ones))
    assert torch.equal(y, torch.full_like(y, config.intermediate_size * 448 * 0.25))


@pytest.mark.parametrize("spare", [0, 120], ids=["every multiprocessor", "a few"])
@pytest.mark.parametrize("tiles", FORMS, ids=str)
def test_large_product(tiles, spare):
    """Experts without rows and tiles past an expert's last row and column among them. 384 columns: the last tile of
    256 is half another expert's."""
    n, k = 384, 384
    a, b, ends, expert = operands(n, k, FP8)
    rows_scale = torch.tensor([0.5, 1, 2, 4, 0.25, 8], device="cuda")
    scales = MatrixScales(rows_scale, rows_scale.flip(0) / 3)
    out = torch.full((len(a) + 130, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=spare, scales=scales)
    factor = (scales.rows * scales.weights).double()[expert].unsqueeze(1)
    at = torch.arange(len(a), device="cuda")
    for part in at.split(128):
        expected, lost = exact_sums(a[part].double(), b.double()[expert[part]])
        own = factor[part]
        # float32: the scales, and one rounding to bf16
        limit = own * (lost + 2.0**-8 * (expected.abs() + lost) + 2.0**-20 * expected.abs())
        assert bool(((out[part].double() - own * expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


@pytest.mark.parametrize("tiles", FORMS, ids=str)
def test_large_product_in_bf16(tiles):
    n, k = 384, 192
    a, b, ends, expert = operands(n, k, BF16)
    out = torch.full((len(a) + 130, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles, spare_sms=120)
    expected = torch.cat([one.double() @ b[e].double().T for one, e in grouped(a, expert)])
    size = torch.cat([one.double().abs() @ b[e].double().abs().T for one, e in grouped(a, expert)])
    # products of two bf16 are exact in float32; k sums there, and one rounding to bf16
    limit = 2.0**-8 * expected.abs() + k * 2.0**-23 * size
    assert bool(((out[: len(a)].double() - expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


def grouped(a: Tensor, expert: Tensor) -> list[tuple[Tensor, int]]:
    return [(a[expert == e], e) for e in range(len(COUNTS)) if COUNTS[e]]


@pytest.mark.parametrize("tiles", [Tiles(48), Tiles(144), Tiles(192, stages=3)], ids=str)
def test_every_way_to_activate_gives_the_same_numbers(tiles):
    """Operands of small integers, whose sums are exact however they are added: equal bits, whatever the tiles."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    _, _, ends, _ = operands(256, 256, FP8)
    a = torch.randint(-2, 3, (sum(COUNTS), 256), generator=generator, device="cuda").to(FP8)
    b = torch.randint(-2, 3, (len(COUNTS), 256, 256), generator=generator, device="cuda").to(FP8)
    one = torch.ones(len(COUNTS), device="cuda")
    scales = MatrixScales(2.0**-4, one, one / 16)
    outs = [torch.full((len(a) + 130, 128), 9.0, device="cuda").to(FP8) for _ in range(2)]
    for out, form in zip(outs, (Tiles(16), tiles), strict=True):
        kernels.grouped_gemm(a, b, ends, out, form, activation=Activation.SWIGLU, scales=scales, spare_sms=120)
    assert torch.equal(outs[1].view(torch.uint8), outs[0].view(torch.uint8))
    assert bool((outs[1][len(a) :].float() == 9).all())
    h = torch.cat([rows_.double() @ b[e].double().T for rows_, e in grouped(a, expert_of(ends))]) / 16
    value = torch.nn.functional.silu(h[:, :128]) * h[:, 128:] * 16
    # one rounding to E4M3, and 2**-16 for exp and division in float32
    limit = torch.maximum(value.abs() * (2.0**-4 + 2.0**-16), torch.tensor(2.0**-10, device="cuda"))
    assert bool(((outs[1][: len(a)].double() - value.clamp(-448, 448)).abs() <= limit).all())


def expert_of(ends: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ends), device="cuda"), ends.long().diff(prepend=ends.new_zeros(1)))


def test_repeats_its_bits():
    experts, tensors = build(*QWEN3)
    for count in (20, 200, 3000):
        received = rows(*QWEN3, count)
        first = check(experts, tensors, received)
        assert all(torch.equal(experts(received), first) for _ in range(20))


def test_spared_multiprocessors_change_no_bit():
    received = rows(*QWEN3, 3000)
    assert torch.equal(build(*QWEN3, spare_sms=16)[0](received), build(*QWEN3)[0](received))


@pytest.mark.parametrize(("count", "travelled"), itertools.product((24, 400, 3000), (False, True)))
def test_nothing_is_allocated_and_a_graph_replays(count, travelled):
    experts, tensors = build(*QWEN3)
    largest = max(float(own["w13_input_scale"]) for own in tensors)
    plain, out = rows(*QWEN3, count), torch.empty(count, 2048, dtype=BF16, device="cuda")
    received = rounded(plain, largest) if travelled else plain
    experts(received, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    experts(received, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(received, out)
    fresh = rows(*QWEN3, count, seed=5)
    received.x.copy_(rounded(fresh, largest).x if travelled else fresh.x)
    received.local_ids.copy_(fresh.local_ids)
    received.weights.copy_(fresh.weights)
    out.fill_(torch.nan)
    graph.replay()
    expected, limit = expected_and_limit(QWEN3[0], STATIC, tensors, fresh.x, fresh.local_ids, fresh.weights, BF16)
    assert worst(out, expected, limit) <= 1


def test_compiled_without_a_graph_break():
    experts, _ = build(*SMALL)
    received = rows(*SMALL, 300)
    expected = experts(received)

    def step(x, ids, weights):
        return experts(dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)) * 1

    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)
