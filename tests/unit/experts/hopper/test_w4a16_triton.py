"""Test `w4a16_triton` against the float64 oracle of the dequantized weights, in Triton's interpreter.

tests/gpu/test_hopper_4bit.py tests more rows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe.experts.hopper import gemm_4bit
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.gemm_skinny import Tile
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import PhysicalIds, WireIds
from tests.fixtures.bf16_triton import BF16, CUT_OFF, SMALL, check_peers, rows
from tests.fixtures.w4a16_triton import FOUR_BITS, UNEVEN, build

each_scheme = pytest.mark.parametrize("scheme", FOUR_BITS)
# fewer and more rows than a tile; the last rows of an expert fill half a tile, and a whole one
WAYS = {"some": (1, 16), "more": (50, 16), "half": (50, 64), "whole": (100, 64)}


def within(experts, tensors, received, *, output_bias: bool = True) -> None:
    y = experts(received, torch.full_like(received.x, torch.nan))
    given = received.x, received.local_ids, received.weights, BF16
    scheme = experts.weights.scheme
    expected, limit = expected_and_limit(experts.config, scheme, tensors, *given, output_bias=output_bias)
    assert max_error_ratio(y, expected, CUT_OFF * limit) <= 1
    assert bool((y[(received.local_ids < 0).all(1)] == 0).all())


def set_tiles(monkeypatch, block_m: int, block_n: int = 64) -> None:
    tile = Tile(block_m, block_n, stages=2, warps=block_n // 16)
    monkeypatch.setattr(gemm_4bit, "tile_for", lambda _: tile)


@each_scheme
@pytest.mark.parametrize(("count", "block_m"), WAYS.values(), ids=WAYS)
def test_each_way_of_finding_rows(count, block_m, scheme, monkeypatch):
    set_tiles(monkeypatch, block_m)
    within(*build(*SMALL, scheme), rows(*SMALL, count, empty=0.0 if block_m == 64 else 0.6))


@each_scheme
@pytest.mark.parametrize("block_n", [64, 128])
def test_sizes_that_leave_half_a_block_or_tile(block_n, scheme, monkeypatch):
    model = UNEVEN
    if SCHEMES[scheme].weights.unit[1] == 128:
        model = (dataclasses.replace(UNEVEN[0], hidden_size=384, intermediate_size=128), 5)
    set_tiles(monkeypatch, 16, block_n)
    within(*build(*model, scheme), rows(*model, 10))


@each_scheme
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=lambda a: a.value), ids=lambda a: a.value)
@pytest.mark.parametrize("etp_rank", [0, 1])
def test_every_activation_with_biases(etp_rank, activation, scheme):
    """Each activation is right with biases. The output bias is added by one etp rank only."""
    config = dataclasses.replace(SMALL[0], activation=activation, expert_bias=True)
    experts, tensors = build(config, SMALL[1], scheme)
    experts.weights.etp = dataclasses.replace(experts.weights.etp, rank=etp_rank)
    within(experts, tensors, rows(config, SMALL[1], 5), output_bias=etp_rank == 0)


@each_scheme
def test_ids_as_they_travelled_and_peers(scheme):
    experts, _ = build(*SMALL, scheme)
    received = rows(*SMALL, 12)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    there = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    assert torch.equal(experts(there), experts(received))
    check_peers(experts, there, 3, 1)


@each_scheme
def test_chunks_change_no_bit(scheme, monkeypatch):
    set_tiles(monkeypatch, 16)
    received = rows(*SMALL, 30)
    assert torch.equal(build(*SMALL, scheme, chunk_rows=8)[0](received), build(*SMALL, scheme)[0](received))
