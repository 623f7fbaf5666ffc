"""`fp8_dynamic_triton` on a Hopper GPU, whose rows and activations have one scale each: within the bound,
allocation-free, captured, deterministic, written to peers; the products with a scale for each row."""

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

from ep_moe.experts.base import Experts
from ep_moe.experts.hopper import fp8_row_op, gemm_grouped
from ep_moe.experts.hopper.fp8_dynamic_triton import Fp8DynamicTritonExperts
from ep_moe.quant.dequantize import FP8
from ep_moe.quant.fp8_row_kernels import RowScales
from ep_moe.testing.expert_oracle import expected_and_limit, worst
from ep_moe.types import PhysicalIds, Received, WireIds
from tests.fixtures.bf16_triton import BF16, SMALL, check_peers, rows
from tests.fixtures.fp8_dynamic_triton import BY_ROW, apart, both, build, by_row, scales_apart
from tests.fixtures.fp8_tensor_triton_gpu import DEEPSEEK, FORMS, ODD, QWEN3, exact_sums, operands

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def steps(monkeypatch) -> list[int]:
    """Passes that went by row."""
    seen: list[int] = []
    step = fp8_row_op._pass

    def counted(*args):
        seen.append(1)
        step(*args)

    monkeypatch.setattr(fp8_row_op, "_pass", counted)
    return seen


def made(config: MoEConfig, slots: int, **options) -> tuple[Experts, list[dict]]:
    tensors = scales_apart(config, slots)
    return build(Fp8DynamicTritonExperts, config, tensors, **options), tensors


def check(config: MoEConfig, tensors: list[dict], received: Received, y: torch.Tensor) -> None:
    given = received.x, received.local_ids, received.weights, BF16
    found = worst(y, *expected_and_limit(config, BY_ROW, tensors, *given))
    print(f"{len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


@pytest.mark.parametrize("model", [SMALL, ODD, QWEN3, DEEPSEEK], ids=["small", "odd", "qwen3", "deepseek"])
@pytest.mark.parametrize("count", [1, 8, 30, 70, 130, 300, 700, 2000, 4099])
def test_rows_of_every_number(model, count, steps):
    """By each program for itself, by `gemm_streaming`'s rings, by `gemm_grouped`."""
    experts, tensors = made(*model)
    received = apart(rows(*model, count))
    check(model[0], tensors, received, experts(received, torch.full_like(received.x, torch.nan)))
    assert steps


@pytest.mark.parametrize("model", [SMALL, ODD, DEEPSEEK], ids=["small", "odd", "deepseek"])
def test_rows_that_travelled_with_one_scale(model, steps):
    """The bits of plain rows, which it would round alike."""
    experts, _ = made(*model)
    for count in (5, 130, 700, 2000):
        received = apart(rows(*model, count))
        assert torch.equal(experts(by_row(received)), experts(received)), count
    assert len(steps) == 8


@pytest.mark.parametrize("count", [20, 130, 2000])
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_every_activation(activation, count, steps):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = made(config, SMALL[1])
    received = rows(config, SMALL[1], count)
    check(config, tensors, received, experts(received))
    assert steps


@pytest.mark.parametrize("tiles", FORMS, ids=str)
def test_large_product(tiles):
    """As test_fp8_tensor_triton_gpu's, with scales of rows far apart, and weights' with a stride."""
    n, k = 384, 384
    a, b, ends, expert = operands(n, k, FP8)
    row = torch.arange(len(a), device="cuda")
    scales = RowScales(2.0 ** (row * 7 % 11 - 5).float(), torch.rand(len(b), 3, 2, device="cuda")[:, 0, 0])
    out = torch.full((len(a) + 130, n), torch.nan, dtype=BF16, device="cuda")
    gemm_grouped.grouped_gemm(a, b, ends, out, tiles, spare_sms=120, scales=scales)
    factor = (scales.rows.double() * scales.weights.double()[expert]).unsqueeze(1)
    for part in row.split(128):
        expected, lost = exact_sums(a[part].double(), b.double()[expert[part]])
        # float32: the scales, and one rounding to bf16
        limit = factor[part] * (lost + 2.0**-8 * (expected.abs() + lost) + 2.0**-20 * expected.abs())
        assert bool(((out[part].double() - factor[part] * expected).abs() <= limit).all())
    assert bool(out[len(a) :].isnan().all())


@pytest.mark.parametrize("count", [20, 130, 2000])
def test_a_value_that_is_none_stays_in_its_row(count, steps):
    experts, _ = made(*SMALL)
    received = rows(*SMALL, count)
    clean = experts(received)
    received.x[5, 7] = torch.nan
    received.local_ids[5, 0] = 0
    y = experts(received)
    others = torch.arange(count, device="cuda") != 5
    assert bool(y[5].isnan().all())
    assert torch.equal(y[others], clean[others])
    assert steps


def test_half_precision_goes_by_blocks(steps):
    dynamic, block, _ = both(torch.float16)
    received = rows(*SMALL, 2000)
    received = dataclasses.replace(received, x=received.x.half())
    assert torch.equal(dynamic(received), block(received))
    assert not steps


def test_chunks_and_spared_multiprocessors_change_no_bit(steps):
    received = rows(*QWEN3, 5000)
    first = made(*QWEN3)[0](received)
    assert torch.equal(made(*QWEN3, spare_sms=16)[0](received), first)
    before = len(steps)
    assert torch.equal(made(*QWEN3, chunk_rows=1700)[0](received), first)
    assert len(steps) == before + 3


@pytest.mark.parametrize("count", [4, 40, 500])
@pytest.mark.parametrize("rank", [0, 2])
def test_written_to_peers(rank, count, steps):
    experts, _ = made(*SMALL)
    received = rows(*SMALL, 4 * count)
    received.weights[::3] = 0.0
    check_peers(experts, received, 4, rank)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    check_peers(experts, travelled, 4, rank)
    assert steps


@pytest.mark.parametrize("count", [20, 130, 3000])
def test_nothing_is_allocated_and_a_graph_replays(count, steps):
    experts, tensors = made(*QWEN3)
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
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        check(QWEN3[0], tensors, fresh, out)
    assert steps


def test_compiled_without_a_graph_break():
    experts, _ = made(*SMALL)
    received = rows(*SMALL, 2000)
    expected = experts(received)

    def step(x, ids, weights):
        return experts(dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)) * 1

    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)
