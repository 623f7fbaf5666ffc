"""`bf16_triton` on a Hopper GPU: within the bound however a call is cut, allocation-free, captured, deterministic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import MoEConfig
from ep_moe.experts.hopper.experts import ACTIVATIONS

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.hopper import gemm_grouped as kernels
from ep_moe.experts.hopper.gemm_streaming import Ring, product
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.testing.expert_oracle import expected_and_limit, worst
from tests.fixtures.bf16_triton import BF16, PLAIN, SMALL, build, check, rows

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

pytestmark = pytest.mark.timeout(600)

# the share of one rank of four: (config, slots)
QWEN3 = (MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8), 32)
DEEPSEEK = (MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8), 64)
ODD = (MoEConfig(hidden_size=384, intermediate_size=640, num_experts=12, top_k=6), 3)  # not powers of two


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


def test_rows_of_one_expert_only():
    experts, tensors = build(*ODD)
    for count in (30, 300, 3000):
        received = rows(*ODD, count)
        received.local_ids.fill_(-1)[:, 5] = 2
        check(experts, tensors, received)


@pytest.mark.parametrize("tiles", [kernels.Tiles(112), kernels.Tiles(192, stages=3)], ids=str)
def test_large_product(tiles):
    """Against float64, experts without rows and tiles past an expert's last row and column among them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    counts, n, k = [130, 0, 1, 64, 129], 384, 192
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    total = sum(counts)
    a = torch.randn(total, k, generator=generator, device="cuda").to(BF16)
    b = torch.randn(len(counts), n, k, generator=generator, device="cuda").to(BF16)
    out = torch.full((total + 3, n), torch.nan, dtype=BF16, device="cuda")
    kernels.grouped_gemm(a, b, ends, out, tiles)
    expert = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), torch.tensor(counts, device="cuda"))
    expected = torch.einsum("rk,rnk->rn", a.double(), b.double()[expert])
    size = torch.einsum("rk,rnk->rn", a.double().abs(), b.double().abs()[expert])
    # products of two bf16 are exact in float32; k sums there, and one rounding to bf16
    assert bool(((out[:total].double() - expected).abs() <= 2.0**-8 * expected.abs() + k * 2.0**-23 * size).all())
    assert bool(out[total:].isnan().all())


@pytest.mark.parametrize("ring", [Ring(16, 12), Ring(32, 11), Ring(64, 9)], ids=lambda ring: str(ring.rows))
@pytest.mark.parametrize("counts", [[130, 0, 1, 64, 129], [0, 0, 0, 3], [1] * 70], ids=["many", "last", "more tiles"])
def test_streamed_product(counts, ring):
    """Against float64: experts without rows, whose weights programs fetch all the same, and with more than fit."""
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
        assert bool(((out[:total].double() - expected).abs() <= 2.0**-8 * expected.abs() + k * 2.0**-23 * size).all())
        assert bool(out[total:].isnan().all())


def test_repeats_its_bits():
    experts, tensors = build(*QWEN3)
    for count in (20, 200, 3000):
        received = rows(*QWEN3, count)
        first = check(experts, tensors, received)
        assert all(torch.equal(experts(received), first) for _ in range(20))


def test_spared_multiprocessors_change_no_bit():
    received = rows(*QWEN3, 3000)
    assert torch.equal(build(*QWEN3, spare_sms=16)[0](received), build(*QWEN3)[0](received))


@pytest.mark.parametrize("count", [24, 400, 3000], ids=str)
def test_nothing_is_allocated_and_a_graph_replays(count):
    experts, tensors = build(*QWEN3)
    received, out = rows(*QWEN3, count), torch.empty(count, 2048, dtype=BF16, device="cuda")
    experts(received, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    experts(received, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(received, out)
    fresh = rows(*QWEN3, count, seed=5)
    for name in ("x", "local_ids", "weights"):
        getattr(received, name).copy_(getattr(fresh, name))
    out.fill_(torch.nan)
    graph.replay()
    expected, limit = expected_and_limit(
        QWEN3[0], PLAIN, tensors, received.x, received.local_ids, received.weights, BF16
    )
    assert worst(out, expected, limit) <= 1


def test_compiled_without_a_graph_break():
    experts, _ = build(*SMALL)
    received = rows(*SMALL, 300)
    expected = experts(received)

    def step(x, ids, weights):
        return experts(dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)) * 1

    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)
