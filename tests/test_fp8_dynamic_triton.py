"""`fp8_dynamic_triton` against `fp8_block_triton` on the same numbers, bit for bit, and against the float64 oracle;
on a CPU the kernels for few rows in Triton's interpreter, on Hopper the others too."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import ExpertMap
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.fp8_block_triton import Fp8BlockTritonExperts
from ep_moe.experts.fp8_dynamic_triton import Fp8DynamicTritonExperts
from ep_moe.kernels.fp8_rows import round_blocks
from ep_moe.testing.expert_oracle import expected_and_limit, random_expert, worst
from ep_moe.types import Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.schemes import SCHEMES
from ep_moe.workspace import Workspaces
from tests.test_bf16_triton import BF16, CUT_OFF, DEVICE, SMALL, rows, sorted_first

COUNTS = [1, 3, 60, sorted_first(130), sorted_first(2000)]


def scales_apart() -> list[dict[str, torch.Tensor]]:
    """Experts whose two scales differ from each other's, and from other experts', by powers of two."""
    found = [random_expert(SMALL[0], SCHEMES["fp8_dynamic"], expert, BF16, DEVICE) for expert in range(SMALL[1])]
    for expert, own in enumerate(found):
        own["w13_scale"], own["w2_scale"] = own["w13_scale"] * 2 ** (expert % 2), own["w2_scale"] / 2 ** (expert % 3)
    return found


def in_blocks(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `fp8_block` has it, made without `PerBlock`."""
    scales = {}
    for name in ("w13", "w2"):
        blocks = [size // 128 for size in own[name].shape]
        scales[f"{name}_scale"] = torch.full(blocks, float(own[f"{name}_scale"]), device=DEVICE)
    return own | scales


def build(kind: type[Experts], scheme: str, tensors: list[dict[str, torch.Tensor]], **options) -> Experts:
    weights = ExpertWeights(
        SMALL[0],
        ExpertMap.uneven([SMALL[1], SMALL[0].num_experts - SMALL[1]]),
        device=DEVICE,
        dtype=BF16,
        scheme=SCHEMES[scheme],
        preparation=kind.preparation,
        trainable=False,
    )
    for expert, own in enumerate(tensors):
        weights.update_expert(expert, own)
    return kind(SMALL[0], weights, Workspaces(DEVICE), ExpertsOptions(**options))


def both(**options) -> tuple[Experts, Experts, list[dict[str, torch.Tensor]]]:
    tensors = scales_apart()
    blocks = [in_blocks(own) for own in tensors]
    dynamic = build(Fp8DynamicTritonExperts, "fp8_dynamic", tensors, **options)
    return dynamic, build(Fp8BlockTritonExperts, "fp8_block", blocks, **options), blocks


def within(y, tensors, x, ids, weights) -> None:
    expected, limit = expected_and_limit(SMALL[0], SCHEMES["fp8_block"], tensors, x, ids, weights, BF16)
    assert worst(y, expected, CUT_OFF * limit) <= 1


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_the_bits_of_the_same_numbers_in_blocks(count):
    dynamic, block, tensors = both()
    received = rows(*SMALL, count)
    y = dynamic(received)
    assert torch.equal(y, block(received))
    within(y, tensors, received.x, received.local_ids, received.weights)


@pytest.mark.parametrize("count", [40, sorted_first(130)], ids=str)
def test_rows_that_travelled_in_blocks(count):
    dynamic, block, _ = both()
    received = rows(*SMALL, count)
    data, scale = round_blocks(received.x)
    travelled = dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block")
    assert torch.equal(dynamic(travelled), block(travelled))


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
    ids = torch.repeat_interleave(torch.arange(len(counts), device=DEVICE), counts).unsqueeze(1)
    within(y, tensors, x, ids, None if weights is None else weights.unsqueeze(1))
