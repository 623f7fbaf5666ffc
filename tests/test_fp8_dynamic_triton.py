"""`fp8_dynamic_triton` against `fp8_block_triton` on the same numbers, bit for bit, where it goes the same way, and
against the float64 oracle; on a CPU in Triton's interpreter. Many rows: tests/gpu/test_fp8_dynamic_triton_gpu.py."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import ExpertMap, MoEConfig
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

DYNAMIC = SCHEMES["fp8_dynamic"]


def scales_apart(config: MoEConfig, slots: int) -> list[dict[str, torch.Tensor]]:
    """Experts whose two scales differ from each other's, and from other experts', by powers of two."""
    found = [random_expert(config, DYNAMIC, expert, BF16, DEVICE) for expert in range(slots)]
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


def build(
    kind: type[Experts], config: MoEConfig, tensors: list[dict[str, torch.Tensor]], dtype: torch.dtype = BF16, **options
) -> Experts:
    (scheme,) = kind.capabilities.schemes
    weights = ExpertWeights(
        config,
        ExpertMap.uneven([len(tensors), config.num_experts - len(tensors)]),
        device=DEVICE,
        dtype=dtype,
        scheme=SCHEMES[scheme],
        preparation=kind.preparation,
        trainable=False,
    )
    for expert, own in enumerate(tensors):
        weights.update_expert(expert, own)
    return kind(config, weights, Workspaces(DEVICE), ExpertsOptions(**options))


def both(dtype: torch.dtype = BF16) -> tuple[Experts, Experts, list[dict[str, torch.Tensor]]]:
    tensors = scales_apart(*SMALL)
    blocks = [in_blocks(own) for own in tensors]
    dynamic = build(Fp8DynamicTritonExperts, SMALL[0], tensors, dtype)
    return dynamic, build(Fp8BlockTritonExperts, SMALL[0], blocks, dtype), blocks


def within(y, tensors, x, ids, weights) -> None:
    expected, limit = expected_and_limit(SMALL[0], SCHEMES["fp8_block"], tensors, x, ids, weights, BF16)
    assert worst(y, expected, CUT_OFF * limit) <= 1


@pytest.mark.parametrize("count", [1, 3, 60])
def test_the_bits_of_the_same_numbers_in_blocks(count):
    dynamic, block, tensors = both()
    received = rows(*SMALL, count)
    y = dynamic(received)
    assert torch.equal(y, block(received))
    within(y, tensors, received.x, received.local_ids, received.weights)


@pytest.mark.parametrize("count", [40, sorted_first(130), sorted_first(2000)], ids=str)
def test_rows_that_travelled_in_blocks(count):
    dynamic, block, _ = both()
    received = rows(*SMALL, count)
    data, scale = round_blocks(received.x)
    travelled = dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block")
    assert torch.equal(dynamic(travelled), block(travelled))


def by_row(received: Received) -> Received:
    """As it travels in fp8_row."""
    data, scale = round_blocks(received.x, received.x.shape[1])
    return dataclasses.replace(received, x=data, x_scale=scale, format="fp8_row")


@pytest.mark.parametrize("count", [1, 40, sorted_first(130)], ids=str)
def test_few_rows_that_travelled_with_one_scale(count):
    """It stands for each 128 columns."""
    dynamic, block, tensors = both()
    received = rows(*SMALL, count)
    received.x[::3] *= 8  # rows' scales are apart, so that another's shows
    travelled = by_row(received)
    blocks = travelled.x_scale.repeat(1, SMALL[0].hidden_size // 128)
    y = dynamic(travelled)
    assert torch.equal(y, block(dataclasses.replace(travelled, x_scale=blocks, format="fp8_block")))
    assert travelled.x_scale is not None
    within(y, tensors, travelled.x.float() * travelled.x_scale, received.local_ids, received.weights)


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
    blocks = travelled.x_scale.repeat(1, SMALL[0].hidden_size // 128)
    wanted = block(dataclasses.replace(travelled, x_scale=blocks, format="fp8_block"))
    assert torch.equal(dynamic(travelled), wanted)
    ids = torch.repeat_interleave(torch.arange(len(counts), device=DEVICE), counts).unsqueeze(1)
    within(y, tensors, x, ids, None if weights is None else weights.unsqueeze(1))


def test_what_goes_by_row():
    """Many rows of bf16 layers, plain or with a scale each, where its GEMM compiles."""
    dynamic, half = both()[0], both(torch.float16)[0]

    def goes(experts: Experts, received: Received, compiles: bool = True) -> bool:
        experts._compiles = compiles
        return experts._by_row(received, received.local_ids)

    many = rows(*SMALL, 2000)
    assert goes(dynamic, many)
    assert not goes(dynamic, rows(*SMALL, 60))
    wide = dataclasses.replace(SMALL[0], num_experts=64, top_k=2)  # a 32nd of all rows for each
    experts = build(Fp8DynamicTritonExperts, wide, scales_apart(wide, 5))
    assert [goes(experts, rows(wide, 5, count)) for count in (100, 300, 340)] == [False, False, True]
    assert not goes(dynamic, many, compiles=False)
    assert not goes(half, many)
    data, scale = round_blocks(many.x)
    assert not goes(dynamic, dataclasses.replace(many, x=data, x_scale=scale, format="fp8_block"))
    assert goes(dynamic, by_row(many))
    assert not goes(dynamic, by_row(rows(*SMALL, 60)))
