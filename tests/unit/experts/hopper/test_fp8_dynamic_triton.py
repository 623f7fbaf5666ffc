"""Test `fp8_dynamic_triton` and `fp8_channel_triton` against the float64 oracle.

Where `fp8_dynamic_triton` takes the path of `fp8_block_triton`, both are compared bit for bit on the same numbers. On a
CPU the kernels run in Triton's interpreter. tests/gpu/test_hopper_kernels.py tests more rows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe.experts.base import Experts
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.experts_fp8 import Fp8ChannelTritonExperts, Fp8DynamicTritonExperts
from ep_moe.quant.fp8 import round_blocks
from ep_moe.quant.schemes import SCHEMES, Scheme
from ep_moe.runtime import nvrtc
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, PhysicalIds, Received, RowLayout, Weighting, WireIds
from tests.fixtures.bf16_triton import BF16, CUT_OFF, DEVICE, SMALL, check_peers, rows, sorted_first
from tests.fixtures.fp8_dynamic_triton import (
    BY_ROW,
    CHANNEL,
    apart,
    both,
    build,
    by_row,
    channels_apart,
    channels_biased,
    scales_apart,
)

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)
# scale per matrix or per channel -> kernel, maker of experts, and how the oracle rounds
KINDS = {
    "matrix": (Fp8DynamicTritonExperts, scales_apart, BY_ROW),
    "channel": (Fp8ChannelTritonExperts, channels_apart, CHANNEL),
}
each_kind = pytest.mark.parametrize(("kernel", "made", "scheme"), KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    """Pretend that NVRTC is present. What it compiles is for more rows."""
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


def in_blocks_only(experts: Experts) -> Experts:
    """Return the experts as they are without NVRTC."""
    experts._compiles = False
    return experts


def within(y, scheme: Scheme, tensors, x, received: Received) -> None:
    given = received.local_ids, received.weights, BF16
    expected, limit = expected_and_limit(SMALL[0], scheme, tensors, x, *given)
    assert max_error_ratio(y, expected, CUT_OFF * limit) <= 1
    assert bool((y[(received.local_ids < 0).all(1)] == 0).all())


@each_kind
@pytest.mark.parametrize("count", [1, 3, 16, 60])
@pytest.mark.parametrize("travelled", [False, True])
def test_few_rows_with_one_scale_each(count, travelled, kernel, made, scheme):
    """Rows with one scale each are right: plain rows are rounded first, and rounded rows are read as they are."""
    experts = build(kernel, SMALL[0], tensors := made(*SMALL))
    received = apart(rows(*SMALL, count))
    given, x = received, received.x
    if travelled:
        given = by_row(received)
        assert given.x_scale is not None
        x = given.x.float() * given.x_scale
    out = torch.full_like(received.x, torch.nan)
    within(experts(given, out), scheme, tensors, x, received)


@each_kind
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_every_activation_of_few_rows(activation, kernel, made, scheme):
    config = dataclasses.replace(SMALL[0], activation=activation)
    tensors = made(config, SMALL[1])
    received = apart(rows(config, SMALL[1], 20))
    y = build(kernel, config, tensors)(received)
    expected, limit = expected_and_limit(
        config, scheme, tensors, received.x, received.local_ids, received.weights, BF16
    )
    assert max_error_ratio(y, expected, CUT_OFF * limit) <= 1


@pytest.mark.parametrize("etp_rank", [0, 1])
@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_biases_with_a_scale_for_each_channel(activation, count, etp_rank):
    """Biases are added with a scale per channel, and the output bias by one etp rank only."""
    config = dataclasses.replace(SMALL[0], activation=activation, expert_bias=True)
    experts = build(Fp8ChannelTritonExperts, config, tensors := channels_biased(config, SMALL[1]))
    experts.weights.etp = dataclasses.replace(experts.weights.etp, rank=etp_rank)
    received = rows(config, SMALL[1], count)
    y = experts(received, torch.full_like(received.x, torch.nan))
    expected, limit = expected_and_limit(
        config, CHANNEL, tensors, received.x, received.local_ids, received.weights, BF16, output_bias=etp_rank == 0
    )
    assert max_error_ratio(y, expected, CUT_OFF * limit) <= 1
    assert bool((y[(received.local_ids < 0).all(1)] == 0).all())


@each_kind
def test_ids_as_they_travelled_and_peers(kernel, made, scheme):
    experts = build(kernel, SMALL[0], made(*SMALL))
    received = rows(*SMALL, 24)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    there = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    assert torch.equal(experts(there), experts(received))
    check_peers(experts, there, 3, 1)


@pytest.mark.parametrize("count", [1, 3, 60])
def test_the_bits_of_the_same_numbers_in_blocks(count):
    dynamic, block, tensors = both()
    received = rows(*SMALL, count)
    y = in_blocks_only(dynamic)(received)
    assert torch.equal(y, block(received))
    within(y, SCHEMES["fp8_block"], tensors, received.x, received)


@pytest.mark.parametrize("count", [40, sorted_first(130), sorted_first(2000)], ids=str)
def test_rows_that_travelled_in_blocks(count):
    dynamic, block, _ = both()
    received = rows(*SMALL, count)
    data, scale = round_blocks(received.x)
    travelled = dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block")
    assert torch.equal(dynamic(travelled), block(travelled))


@pytest.mark.parametrize("count", [1, 40, sorted_first(130), sorted_first(2000)], ids=str)
def test_one_scale_of_a_row_stands_for_each_of_its_blocks(count):
    """Kernels that need a scale per 128 columns get the row's scale for each block."""
    dynamic, block, tensors = both()
    received = apart(rows(*SMALL, count))
    travelled = by_row(received)
    assert travelled.x_scale is not None
    blocks = travelled.x_scale.repeat(1, SMALL[0].hidden_size // 128)
    y = in_blocks_only(dynamic)(travelled)
    assert torch.equal(y, block(dataclasses.replace(travelled, x_scale=blocks, format="fp8_block")))
    within(y, SCHEMES["fp8_block"], tensors, travelled.x.float() * travelled.x_scale, received)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="grouped rows are multiplied by kernels for Hopper")
@pytest.mark.parametrize("weighting", list(Weighting), ids=lambda w: w.value)
def test_grouped_rows(weighting):
    dynamic, block, tensors = both()
    counts = torch.tensor([40, 0, 7, 1, 33], device=DEVICE)
    x = torch.randn(int(counts.sum()), SMALL[0].hidden_size, device=DEVICE).to(BF16)
    weights = torch.rand(len(x), device=DEVICE) if weighting is Weighting.EXPERTS else None
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    received = Received(x, RowLayout.CONTIGUOUS, weighting, None, weights=weights, expert_offsets=offsets)
    y = dynamic(received)
    assert torch.equal(y, block(received))
    travelled = by_row(received)
    assert travelled.x_scale is not None
    blocks = travelled.x_scale.repeat(1, SMALL[0].hidden_size // 128)
    wanted = block(dataclasses.replace(travelled, x_scale=blocks, format="fp8_block"))
    assert torch.equal(dynamic(travelled), wanted)
    ids = torch.repeat_interleave(torch.arange(len(counts), device=DEVICE), counts).unsqueeze(1)
    flat = dataclasses.replace(
        received, local_ids=LocalIds(ids), weights=None if weights is None else weights.unsqueeze(1)
    )
    within(y, SCHEMES["fp8_block"], tensors, x, flat)


def test_what_goes_by_row():
    """bf16 layers compute ungrouped rows by their row scale, if NVRTC can compile the GEMM for many rows."""
    dynamic, half = both()[0], both(torch.float16)[0]
    received = rows(*SMALL, 60)
    data, scale = round_blocks(received.x)
    assert dynamic._by_row(received)
    assert dynamic._by_row(by_row(received))
    assert not dynamic._by_row(dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block"))
    assert not dynamic._by_row(dataclasses.replace(received, layout=RowLayout.CONTIGUOUS))
    assert not half._by_row(received)
    assert not in_blocks_only(dynamic)._by_row(received)
