"""`fp8_block_triton` on a Hopper GPU: within the bound in every layout, allocation-free, captured, deterministic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig, registry
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.quant.fp8_rows import round_blocks
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, random_expert, worst
from ep_moe.types import Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.flashinfer_cutlass_gpu import DEEPSEEK, QWEN3, SMALL, rows

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

REASON = (
    "torch sees no GPU" if not torch.cuda.is_available() else registry.unsupported_reason("experts", "fp8_block_triton")
)
if not REASON and torch.cuda.get_device_capability() != (9, 0):
    REASON = "needs a GPU of compute capability 9.0"
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(600)]

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
SCHEME = SCHEMES["fp8_block"]


def build(config: MoEConfig, slots: int, dtype: torch.dtype = BF16, **options) -> tuple[Experts, list[dict]]:
    kind = registry.load("experts", "fp8_block_triton")
    weights = ExpertWeights(
        config,
        ExpertMap.uneven([slots, config.num_experts - slots]),
        device=GPU,
        dtype=dtype,
        scheme=SCHEME,
        weight_layout=kind.weight_layout,
        trainable=False,
    )
    tensors = [random_expert(config, SCHEME, expert, dtype, GPU) for expert in range(slots)]
    for expert, expert_tensors in enumerate(tensors):
        weights.update_expert(expert, expert_tensors)
    return kind(config, weights, Workspaces(GPU), ExpertsOptions(**options)), tensors


def check(experts: Experts, tensors: list[dict], received: Received) -> None:
    y = experts(received, torch.full_like(received.x, torch.nan))
    expected, limit = expected_and_limit(
        experts.config, SCHEME, tensors, received.x, received.local_ids, received.weights, experts.weights.dtype
    )
    found = worst(y, expected, limit)
    print(f"{len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


@pytest.mark.parametrize("model", [SMALL, QWEN3, DEEPSEEK], ids=["small", "qwen3", "deepseek"])
def test_rank_major(model):
    experts, tensors = build(*model)
    for count in (1, 7, 255, 256, 257, 4099):
        check(experts, tensors, rows(*model, count))
    assert experts(rows(*model, 0)).shape == (0, model[0].hidden_size)


@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_every_activation(activation):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = build(config, SMALL[1])
    check(experts, tensors, rows(config, SMALL[1], 100))


def test_half_precision():
    experts, tensors = build(*SMALL, torch.float16)
    check(experts, tensors, rows(*SMALL, 100, torch.float16))


@pytest.mark.parametrize("chunk_rows", [16384, 10])
@pytest.mark.parametrize("weighting", list(Weighting), ids=lambda w: w.value)
def test_grouped_layouts(weighting, chunk_rows):
    experts, tensors = build(*SMALL, chunk_rows=chunk_rows)
    slots, slots_per_rank, hidden = SMALL[1], 40, 256
    counts = torch.tensor([40, 0, 7, 1, 33], dtype=torch.int32, device=GPU)
    x = torch.randn(slots, slots_per_rank, hidden, device=GPU).to(BF16)
    valid = torch.arange(slots_per_rank, device=GPU) < counts.unsqueeze(1)
    weights = torch.rand(slots, slots_per_rank, device=GPU) if weighting is Weighting.EXPERTS else None
    ids = torch.where(valid, torch.arange(slots, device=GPU).unsqueeze(1), -1).view(-1, 1)
    expected, limit = expected_and_limit(
        SMALL[0], SCHEME, tensors, x.view(-1, hidden), ids, None if weights is None else weights.view(-1, 1), BF16
    )
    value, limit = expected.view(x.shape)[valid], limit.view(x.shape)[valid]
    limit = limit + 2.0**-9 * value.abs()  # the weight is multiplied in after rounding
    batched = Received(
        x=x, layout=RowLayout.BATCHED, weighting=weighting, handle=None, expert_counts=counts, weights=weights
    )  # fmt: skip
    assert worst(experts(batched)[valid], value, limit) <= 1
    contiguous = Received(
        x=x[valid],
        layout=RowLayout.CONTIGUOUS,
        weighting=weighting,
        handle=None,
        expert_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        weights=None if weights is None else weights[valid],
    )
    assert worst(experts(contiguous), value, limit) <= 1


def test_repeats_its_bits_in_chunks_too():
    whole, tensors = build(*QWEN3)
    parts, _ = build(*QWEN3, chunk_rows=300)
    received = rows(*QWEN3, 1000)
    check(whole, tensors, received)
    first = whole(received)
    assert all(torch.equal(whole(received), first) for _ in range(20))
    check(parts, tensors, received)


def test_nothing_is_allocated_and_a_graph_replays():
    experts, tensors = build(*QWEN3)
    received, out = rows(*QWEN3, 700), torch.empty(700, 2048, dtype=BF16, device=GPU)
    experts(received, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    experts(received, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(received, out)
    fresh = rows(*QWEN3, 700, seed=5)
    for name in ("x", "local_ids", "weights"):
        getattr(received, name).copy_(getattr(fresh, name))
    out.fill_(torch.nan)
    graph.replay()
    expected, limit = expected_and_limit(
        QWEN3[0], SCHEME, tensors, received.x, received.local_ids, received.weights, BF16
    )
    assert worst(out, expected, limit) <= 1


def test_compiled_without_a_graph_break():
    experts, _ = build(*SMALL)
    received = rows(*SMALL, 64)
    expected = experts(received)

    def step(x, ids, weights):
        return experts(dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)) * 1

    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("model", [SMALL, QWEN3], ids=["small", "qwen3"])
@pytest.mark.parametrize("chunk_rows", [16384, 100])
def test_rows_rounded_before_the_wire_give_the_same_bits(model, chunk_rows):
    experts, _ = build(*model, chunk_rows=chunk_rows)
    config, slots = model
    received = rows(*model, 257)
    y = experts(received)
    data, scale = round_blocks(received.x)
    assert torch.equal(experts(dataclasses.replace(received, x=data, x_scale=scale)), y)
    counts = torch.arange(slots, dtype=torch.int32, device=GPU)
    x = torch.randn(slots, slots, config.hidden_size, device=GPU).to(BF16)
    batched = Received(
        x=x, layout=RowLayout.BATCHED, weighting=Weighting.COMBINE, handle=None, expert_counts=counts
    )  # fmt: skip
    valid = torch.arange(slots, device=GPU) < counts.unsqueeze(1)
    data, scale = round_blocks(x)
    y = experts(batched)[valid]
    assert torch.equal(experts(dataclasses.replace(batched, x=data, x_scale=scale))[valid], y)


def test_rounding_is_the_same_on_both_devices():
    x = torch.randn(33, 512, device=GPU).to(BF16)
    data, scale = round_blocks(x)
    expected, expected_scale = round_blocks(x.cpu())
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2e-7, atol=0)
    code, expected_code = (rows.cpu().view(torch.uint8).int() for rows in (data, expected))
    assert (code - expected_code).abs().max() <= 1  # ties, where the scale's last bit differs
