"""Test `fp8_tensor_triton` against the float64 oracle; on a CPU, few rows in Triton's interpreter.

`tests/gpu/test_hopper_kernels.py` calls the kernel with a model's sizes, and `tests/gpu/test_hopper_products.py` tests
its large products.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe import Activation, MoEConfig
from ep_moe.experts.hopper import gemm_skinny
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.quant.kernels import round_rows_by_tensor
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import PhysicalIds, Received, RowLayout, Weighting, WireIds
from tests.fixtures.bf16_triton import (
    BF16,
    CUT_OFF,
    DEVICE,
    SMALL,
    check,
    check_peers,
    rows,
    sorted_first,
)
from tests.fixtures.fp8_tensor_triton import FP8, STATIC, build, rounded

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

TINY = (MoEConfig(hidden_size=128, intermediate_size=128, num_experts=16, top_k=4), 3)


def exact(received: Received, input_scale: float) -> Received:
    """Return rows with values that E4M3 represents, because the interpreter's casts differ from torch's.

    input_scale: a power of two.
    """
    if DEVICE.type == "cuda":
        return received
    return dataclasses.replace(received, x=(received.x.float() / input_scale).to(FP8).to(BF16) * input_scale)


@pytest.mark.parametrize("count", [1, 64, sorted_first(65)], ids=str)
def test_within_the_bound(count):
    experts, tensors = build(*SMALL)
    check(experts, tensors, rows(*SMALL, count))


@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_every_activation(activation):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = build(config, SMALL[1])
    check(experts, tensors, rows(config, SMALL[1], 20))


@pytest.mark.parametrize("count", [20, sorted_first(65)], ids=str)
def test_rows_that_were_rounded_before_give_the_same_bits(count):
    scale = 2.0**-6
    experts, tensors = build(*TINY, input_scale=scale)
    received = exact(rows(*TINY, count), scale)
    y = check(experts, tensors, received)
    assert torch.equal(experts(rounded(received, scale)), y)


def test_rows_are_rounded_by_what_they_say():
    """Rounded rows are widened by their own scale, which may differ from the weights' input scale."""
    experts, tensors = build(*SMALL)
    received = exact(rows(*SMALL, 20), 2.0**-5)
    expected, limit = expected_and_limit(
        SMALL[0],
        STATIC,
        [own | {"w13_input_scale": torch.tensor(2.0**-5)} for own in tensors],
        received.x,
        received.local_ids,
        received.weights,
        BF16,
    )
    assert max_error_ratio(experts(rounded(received, 2.0**-5)), expected, CUT_OFF * limit) <= 1


def test_large_values_saturate():
    """Values beyond 448 * scale saturate. Here that is 1.75, and many values exceed it."""
    scale = 2.0**-8
    experts, _ = build(*TINY, input_scale=scale)
    received = exact(dataclasses.replace(rows(*TINY, 20), x=rows(*TINY, 20).x.clamp(-1.75, 1.75)), scale)
    beyond = received.x * torch.where(received.x.abs() == 1.75, 3.0, 1.0).to(BF16)
    assert bool((beyond.abs() > 5).any())
    assert torch.equal(experts(dataclasses.replace(received, x=beyond)), experts(received))


def test_large_activations_saturate():
    """Activations beyond 448 * scale saturate. The weights of the second product are all 1, so results show the sum."""
    config = dataclasses.replace(SMALL[0], activation=Activation.RELU2)
    experts, tensors = build(config, SMALL[1])
    for expert, own in enumerate(tensors):
        one = {"w13": torch.ones_like(own["w13"]), "w13_scale": torch.tensor(1.0), "w2": torch.ones_like(own["w2"])}
        one |= {"w2_scale": torch.tensor(1.0), "w2_input_scale": torch.tensor(2.0 ** -(expert + 4))}
        experts.weights.update_expert(expert, own | {name: value.to(DEVICE) for name, value in one.items()})
    received = rows(config, SMALL[1], 20, empty=0.0)
    ids = torch.full_like(received.local_ids, -1)
    ids[:, 0] = received.local_ids[:, 0]
    received = dataclasses.replace(
        received, x=torch.ones_like(received.x), local_ids=ids, weights=torch.ones_like(received.weights)
    )
    # 7 times a power of two is exact in bf16
    expected = config.intermediate_size * 448 * 2.0 ** -(ids[:, 0] + 4).float()
    assert torch.equal(experts(received).float(), expected.unsqueeze(1).expand(-1, config.hidden_size))


@pytest.mark.parametrize("count", [20, sorted_first(65)], ids=str)
def test_ids_as_they_travelled(count):
    experts, _ = build(*TINY)
    received = rows(*TINY, count)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    assert torch.equal(experts(travelled), experts(received))


def test_weights_are_left_to_combine():
    """Weighting.COMBINE leaves weights to the transport. CONTIGUOUS transports deliver one row per route."""
    experts, tensors = build(*SMALL)
    counts = torch.tensor([20, 0, 3, 1, 7], device=DEVICE)
    received = Received(
        x=rows(*SMALL, int(counts.sum())).x,
        layout=RowLayout.CONTIGUOUS,
        weighting=Weighting.COMBINE,
        handle=None,
        expert_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
    )
    ids = torch.repeat_interleave(torch.arange(5, device=DEVICE), counts).unsqueeze(1)
    expected, limit = expected_and_limit(SMALL[0], STATIC, tensors, received.x, ids, None, BF16)
    assert max_error_ratio(experts(received), expected, CUT_OFF * limit) <= 1


def test_no_rows_of_ours():
    experts, tensors = build(*SMALL)
    check(experts, tensors, rows(*SMALL, 20, empty=1.0))
    none = rounded(rows(*SMALL, 0), 0.5)
    y = experts(none)
    assert (y.shape, y.dtype) == ((0, SMALL[0].hidden_size), BF16)


def test_passes_of_few_rows_give_the_same_answer():
    received = rows(*TINY, 60)
    for options in ({"chunk_rows": 59}, {}):
        check(*build(*TINY, **options), received)


@pytest.mark.parametrize(
    ("ranks", "rank", "bound", "chunk"), [(2, 1, 8, 100), (3, 1, 24, 40), sorted_first(3, 1, 24, 66)]
)
def test_written_to_peers(ranks, rank, bound, chunk):
    experts, _ = build(*TINY, chunk_rows=chunk)
    check_peers(experts, rows(*TINY, ranks * bound), ranks, rank)


@pytest.mark.parametrize("listed", [False, True])
def test_rows_are_rounded_once(listed):
    """Rows are rounded once, to the places that `slots` names and nowhere else.

    They use the largest scale, which the kernel writes to a tensor on the device.
    """
    hidden, scales = 1152, torch.tensor([0.25, 0.5, 0.125], device=DEVICE)  # more than the columns of one program
    # eighths of 4, so E4M3 represents them divided by 0.5
    x = (torch.randint(-8, 9, (5, hidden), device=DEVICE) * 0.5).to(BF16)
    x[1, 7], x[2, 3] = 1000.0, -1000.0
    slots = torch.tensor([[3, -1], [-1, -1], [0, 7], [1, 5], [9, -1]], dtype=torch.int32, device=DEVICE)
    guarded = torch.full((11 if listed else 7, hidden), 9.0, device=DEVICE).to(FP8)
    out = guarded[1:-1]
    scale = torch.full((1,), torch.nan, device=DEVICE)
    round_rows_by_tensor(x, scales, out, scale, slots if listed else None)
    numbers = (x.float() / 0.5).clamp(-448, 448)
    expected = torch.full((9, hidden), 9.0, device=DEVICE)
    if listed:
        for row, slot in ((0, 3), (2, 0), (2, 7), (3, 1), (3, 5)):
            expected[slot] = numbers[row]
    assert torch.equal(out.float(), expected if listed else numbers)
    assert bool((guarded[[0, -1]].float() == 9.0).all())
    assert scale.item() == 0.5


def test_how_a_call_is_cut():
    of = gemm_skinny.TileConfig.of_matrices
    assert [of(count, 0).first.block_n for count in (64, 65)] == [32, 64]
    assert of(gemm_skinny.UNSORTED, 0) is not None
    assert of(gemm_skinny.UNSORTED, gemm_skinny.DENSE) is None
    assert of(gemm_skinny.UNSORTED + 1, 0) is None
