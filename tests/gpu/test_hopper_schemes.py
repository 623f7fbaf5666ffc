"""Properties that only one of this project's Hopper kernels promises.

Saturation, NaN and inf, other dtypes and layouts, chunks, and rows written to peers.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.hopper import step
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.experts_fp8 import Fp8BlockTritonExperts, Fp8ChannelTritonExperts, Fp8DynamicTritonExperts
from ep_moe.quant.fp8 import round_blocks
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import PhysicalIds, Received, RowLayout, Weighting, WireIds
from ep_moe.weights.initial import random_expert
from tests.fixtures import fp8_dynamic_triton, fp8_tensor_triton
from tests.fixtures.bf16_triton import BF16, DEVICE, SMALL, check_peers, rows
from tests.fixtures.expert_weights import first_slots
from tests.fixtures.hopper_gpu import ODD, QWEN3

pytestmark = pytest.mark.timeout(600)
BLOCK = SCHEMES["fp8_block"]


# --- fp8_tensor_triton ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [30, 100, 2000], ids=str)
def test_values_out_of_range_and_none_as_if_rounded_before_the_wire(count):
    experts, tensors = fp8_tensor_triton.build(*SMALL)
    received = rows(*SMALL, count)
    received.x[3, 5], received.x[4, 6], received.x[5, 7] = 1e4, -1e4, torch.nan
    largest = max(float(own["w13_input_scale"]) for own in tensors)
    y = experts(received)
    mine = (received.local_ids >= 0).any(1)
    assert bool(y[5].isnan().all()) == bool(mine[5])
    assert bool(y[torch.arange(count, device=DEVICE) != 5].isfinite().all())
    assert torch.equal(experts(fp8_tensor_triton.rounded(received, largest)).nan_to_num(99.0), y.nan_to_num(99.0))


@pytest.mark.parametrize("count", [30, 2000], ids=str)
def test_activations_saturate(count):
    config = dataclasses.replace(SMALL[0], activation=Activation.RELU2)
    experts, _ = fp8_tensor_triton.build(config, SMALL[1])
    for name, value in (("w13", 1.0), ("w13_scale", 1.0), ("w2", 1.0), ("w2_scale", 1.0), ("w2_input_scale", 0.25)):
        stored = experts.weights.get_parameter(name).data
        stored.copy_(torch.full(stored.shape, value, device=DEVICE))
    received = rows(config, SMALL[1], count, empty=0.0)
    ids = torch.full_like(received.local_ids, -1)
    ids[:, 0] = received.local_ids[:, 0]
    ones = {"x": torch.ones_like(received.x), "weights": torch.ones_like(received.weights)}
    y = experts(dataclasses.replace(received, local_ids=ids, **ones))
    assert torch.equal(y, torch.full_like(y, config.intermediate_size * 448 * 0.25))


# --- fp8_dynamic_triton: rows and activations have a scale each -------------------------------------------------------


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Count the kernel's passes with row scaling."""
    seen: list[int] = []
    run = step._pass

    def counted(of, scaling, *args):
        seen.extend([1] * (scaling == "row"))
        run(of, scaling, *args)

    monkeypatch.setattr(step, "_pass", counted)
    return seen


def dynamic(config: MoEConfig, slots: int, **options) -> Experts:
    tensors = fp8_dynamic_triton.scales_apart(config, slots)
    return fp8_dynamic_triton.build(Fp8DynamicTritonExperts, config, tensors, **options)


@pytest.mark.parametrize("count", [20, 130, 2000])
def test_a_value_that_is_none_stays_in_its_row(count, steps):
    experts = dynamic(*SMALL)
    received = rows(*SMALL, count)
    clean = experts(received)
    received.x[5, 7] = torch.nan
    received.local_ids[5, 0] = 0
    y = experts(received)
    others = torch.arange(count, device=DEVICE) != 5
    assert bool(y[5].isnan().all())
    assert torch.equal(y[others], clean[others])
    assert steps


def test_half_precision_goes_by_blocks(steps):
    by_row, by_block, _ = fp8_dynamic_triton.both(torch.float16)
    received = rows(*SMALL, 2000)
    received = dataclasses.replace(received, x=received.x.half())
    assert torch.equal(by_row(received), by_block(received))
    assert not steps


def test_chunks_change_no_bit(steps):
    received = rows(*QWEN3, 5000)
    first = dynamic(*QWEN3)(received)
    before = len(steps)
    assert torch.equal(dynamic(*QWEN3, chunk_rows=1700)(received), first)
    assert len(steps) == before + 3


@pytest.mark.parametrize("count", [4, 40, 500])
@pytest.mark.parametrize("rank", [0, 2])
def test_written_to_peers(rank, count, steps):
    experts = dynamic(*SMALL)
    received = rows(*SMALL, 4 * count)
    received.weights[::3] = 0.0
    check_peers(experts, received, 4, rank)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    check_peers(experts, travelled, 4, rank)
    assert steps


# --- fp8_channel_triton: biases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_bias", [True, False], ids=["etp rank 0", "another"])
@pytest.mark.parametrize("count", [20, 30, 100, 130, 2000], ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=str), ids=lambda a: a.value)
@pytest.mark.parametrize("model", [SMALL, ODD], ids=["small", "odd"])
def test_biases_with_a_scale_for_each_channel(model, activation, count, output_bias):
    """Biases work on each path through the kernel, and only one etp rank adds w2's bias."""
    config, slots = dataclasses.replace(model[0], activation=activation, expert_bias=True), model[1]
    tensors = fp8_dynamic_triton.channels_biased(config, slots)
    experts = fp8_dynamic_triton.build(Fp8ChannelTritonExperts, config, tensors)
    experts.weights.etp = dataclasses.replace(experts.weights.etp, rank=0 if output_bias else 1)
    received = rows(config, slots, count)
    y = experts(received, torch.full_like(received.x, torch.nan))
    given = received.x, received.local_ids, received.weights, BF16
    expected, limit = expected_and_limit(
        config, SCHEMES["fp8_channel"], tensors, *given, output_bias=output_bias
    )  # fmt: skip
    assert max_error_ratio(y, expected, limit) <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


# --- fp8_block_triton: every layout, bfloat16 and float16 -------------------------------------------------------------


def block(config: MoEConfig, slots: int, dtype: torch.dtype = BF16, **options) -> tuple[Experts, list[dict]]:
    tensors = [random_expert(config, BLOCK, expert, dtype, DEVICE) for expert in range(slots)]
    weights = first_slots(config, tensors, BLOCK, Fp8BlockTritonExperts.weight_layout, device=DEVICE, dtype=dtype)
    return Fp8BlockTritonExperts(config, weights, Workspaces(DEVICE), ExpertsOptions(**options)), tensors


def check_block(experts: Experts, tensors: list[dict], received: Received) -> None:
    given = received.x, received.local_ids, received.weights, experts.weights.dtype
    y = experts(received, torch.full_like(received.x, torch.nan))
    found = max_error_ratio(y, *expected_and_limit(experts.config, BLOCK, tensors, *given))
    print(f"{len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


def test_half_precision():
    experts, tensors = block(*SMALL, torch.float16)
    received = rows(*SMALL, 100)
    check_block(experts, tensors, dataclasses.replace(received, x=received.x.half()))


def test_chunks_stay_within_the_bound():
    check_block(*block(*QWEN3, chunk_rows=300), rows(*QWEN3, 1000))


@pytest.mark.parametrize("chunk_rows", [16384, 10])
@pytest.mark.parametrize("weighting", list(Weighting), ids=lambda w: w.value)
def test_grouped_layouts(weighting, chunk_rows):
    experts, tensors = block(*SMALL, chunk_rows=chunk_rows)
    slots, slots_per_rank, hidden = SMALL[1], 40, 256
    counts = torch.tensor([40, 0, 7, 1, 33], dtype=torch.int32, device=DEVICE)
    x = torch.randn(slots, slots_per_rank, hidden, device=DEVICE).to(BF16)
    valid = torch.arange(slots_per_rank, device=DEVICE) < counts.unsqueeze(1)
    weights = torch.rand(slots, slots_per_rank, device=DEVICE) if weighting is Weighting.EXPERTS else None
    ids = torch.where(valid, torch.arange(slots, device=DEVICE).unsqueeze(1), -1).view(-1, 1)
    expected, limit = expected_and_limit(
        SMALL[0], BLOCK, tensors, x.view(-1, hidden), ids, None if weights is None else weights.view(-1, 1), BF16
    )
    value, limit = expected.view(x.shape)[valid], limit.view(x.shape)[valid]
    limit = limit + 2.0**-9 * value.abs()  # the weight is applied after rounding
    batched = Received(
        x=x, layout=RowLayout.BATCHED, weighting=weighting, handle=None, expert_counts=counts, weights=weights
    )  # fmt: skip
    assert max_error_ratio(experts(batched)[valid], value, limit) <= 1
    contiguous = Received(
        x=x[valid],
        layout=RowLayout.CONTIGUOUS,
        weighting=weighting,
        handle=None,
        expert_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        weights=None if weights is None else weights[valid],
    )
    assert max_error_ratio(experts(contiguous), value, limit) <= 1


@pytest.mark.parametrize("model", [SMALL, QWEN3], ids=["small", "qwen3"])
@pytest.mark.parametrize("chunk_rows", [16384, 100])
def test_batched_rows_rounded_before_the_wire_give_the_same_bits(model, chunk_rows):
    """Rows rounded before the wire give the bits of plain rows, in chunks and in both layouts."""
    experts, _ = block(*model, chunk_rows=chunk_rows)
    config, slots = model
    received = rows(*model, 257)
    data, scale = round_blocks(received.x)
    assert torch.equal(experts(dataclasses.replace(received, x=data, x_scale=scale)), experts(received))
    counts = torch.arange(slots, dtype=torch.int32, device=DEVICE)
    x = torch.randn(slots, slots, config.hidden_size, device=DEVICE).to(BF16)
    batched = Received(
        x=x, layout=RowLayout.BATCHED, weighting=Weighting.COMBINE, handle=None, expert_counts=counts
    )  # fmt: skip
    valid = torch.arange(slots, device=DEVICE) < counts.unsqueeze(1)
    data, scale = round_blocks(x)
    y = experts(batched)[valid]
    assert torch.equal(experts(dataclasses.replace(batched, x=data, x_scale=scale))[valid], y)


def test_rounding_is_the_same_on_both_devices():
    x = torch.randn(33, 512, device=DEVICE).to(BF16)
    data, scale = round_blocks(x)
    expected, expected_scale = round_blocks(x.cpu())
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2e-7, atol=0)
    code, expected_code = (stored.cpu().view(torch.uint8).int() for stored in (data, expected))
    assert (code - expected_code).abs().max() <= 1  # ties, where the scale's last bit differs
