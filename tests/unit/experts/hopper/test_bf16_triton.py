"""Test `bf16_triton`, and `fp8_block_triton` with few rows, against the float64 oracle.

On a CPU the kernels for few rows run in Triton's interpreter. `tests/gpu/test_hopper_kernels.py` calls the kernel with
a model's sizes, and `tests/gpu/test_hopper_products.py` tests its large products.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe import Activation
from ep_moe.experts.hopper import gemm_grouped
from ep_moe.experts.hopper.experts import ACTIVATIONS, Bf16TritonExperts
from ep_moe.experts.hopper.experts_fp8 import Fp8BlockTritonExperts
from ep_moe.quant.fp8 import round_blocks
from ep_moe.quant.schemes import PLAIN
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, PeerRows, PhysicalIds, Received, RowLayout, Weighting, WireIds
from tests.fixtures.bf16_triton import (
    BF16,
    CUT_OFF,
    DEVICE,
    SMALL,
    build,
    check,
    check_peers,
    rows,
    sorted_first,
)

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="many rows are multiplied by kernels for Hopper")
def test_rows_copied_before_the_first_product_give_the_bits_of_gathered_rows(monkeypatch):
    config, found = SMALL[0], []
    for copied in (False, True):
        asked = []
        monkeypatch.setattr(
            gemm_grouped, "copies_rows_first", lambda *_, copied=copied, asked=asked: asked.append(1) or copied
        )
        experts, tensors = build(config, 5)
        found.append(check(experts, tensors, rows(config, 5, 1000, empty=0.2)))
        assert asked, "the product of many rows ran"
    assert torch.equal(*found)


@pytest.mark.parametrize("count", [1, 3, 64, sorted_first(65), sorted_first(130)], ids=str)
def test_within_the_bound(count):
    experts, tensors = build(*SMALL)
    check(experts, tensors, rows(*SMALL, count))


@pytest.mark.parametrize("count", [20, sorted_first(90)], ids=str)
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_every_activation(activation, count):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = build(config, SMALL[1])
    check(experts, tensors, rows(config, SMALL[1], count))


@pytest.mark.parametrize("etp_rank", [0, 1])
@pytest.mark.parametrize("count", [3, 20, sorted_first(90)], ids=str)
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
def test_biases(activation, count, etp_rank):
    """Biases are added, and the output bias by one etp rank only."""
    config = dataclasses.replace(SMALL[0], activation=activation, expert_bias=True)
    experts, tensors = build(config, SMALL[1])
    experts.weights.etp = dataclasses.replace(experts.weights.etp, rank=etp_rank)
    received = rows(config, SMALL[1], count)
    y = experts(received, torch.full_like(received.x, torch.nan))
    given = received.x, received.local_ids, received.weights, BF16
    expected, limit = expected_and_limit(config, PLAIN, tensors, *given, output_bias=etp_rank == 0)
    assert max_error_ratio(y, expected, CUT_OFF * limit) <= 1
    assert bool((y[(received.local_ids < 0).all(1)] == 0).all())


@pytest.mark.parametrize("count", [3, 20, sorted_first(90), sorted_first(1500)], ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("activation", [Activation.SWIGLU_CLAMPED, Activation.RELU2], ids=lambda a: a.value)
@pytest.mark.parametrize(("hidden", "inner"), [(192, 320), (320, 192)], ids=str)
def test_sizes_that_are_no_whole_tiles(hidden, inner, activation, biases, count):
    """Sizes may be multiples of 64 that do not fill whole tiles, as GPT-OSS's."""
    config = dataclasses.replace(
        SMALL[0], hidden_size=hidden, intermediate_size=inner, activation=activation, expert_bias=biases
    )
    experts, tensors = build(config, SMALL[1])
    check(experts, tensors, rows(config, SMALL[1], count))


@pytest.mark.parametrize("count", [20, sorted_first(90)], ids=str)
def test_every_row_on_one_expert(count):
    experts, tensors = build(*SMALL)
    received = rows(*SMALL, count)
    received.local_ids.fill_(-1)[:, 1] = 4
    check(experts, tensors, received)


@pytest.mark.parametrize("kind", [Bf16TritonExperts, Fp8BlockTritonExperts])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_picks_than_experts(count, kind):
    """Calls with fewer routes than experts are right: one program per route.

    Routes share an expert, or have none, weight 0, or an expert of another rank.
    """
    experts, tensors = build(SMALL[0], 12, kind)
    received = rows(SMALL[0], 12, count, empty=0.0)
    received.local_ids[:, 0] = 7  # the same expert for all rows; in the first row it comes after another
    received.local_ids[0] = torch.tensor([3, 7, 11, -1], device=DEVICE)
    check(experts, tensors, received)
    received.weights[0, 1] = 0.0  # the first route of expert 7 is void, and the next one takes its place
    wire = torch.where(received.local_ids < 0, 52, received.local_ids + 40).int()  # 52 is on the next rank
    y = experts(dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40)))
    none = received.local_ids.clone()
    none[0, 1] = -1
    assert torch.equal(y, check(experts, tensors, dataclasses.replace(received, local_ids=LocalIds(none))))


@pytest.mark.parametrize("count", [20, sorted_first(90)], ids=str)
def test_no_rows_of_ours(count):
    experts, tensors = build(*SMALL)
    check(experts, tensors, rows(*SMALL, count, empty=1.0))
    assert experts(rows(*SMALL, 0)).shape == (0, SMALL[0].hidden_size)


@pytest.mark.parametrize("count", [20, sorted_first(90)], ids=str)
def test_ids_as_they_travelled(count):
    """Global ids are accepted in any column.

    Ids of other ranks, ids out of range and routes of weight 0 count as no route.
    """
    experts, _ = build(*SMALL)
    received = rows(*SMALL, count)
    base, local = 40, received.local_ids
    others = torch.where(torch.arange(local.shape[1], device=DEVICE) % 2 == 0, 3, base + SMALL[1])
    wire = torch.where(local < 0, others, local + base).int()
    weights = received.weights.clone()
    # an id of this rank whose weight 0 makes it no route
    wire[:, 3] = torch.where(local[:, 3] < 0, base + 1, wire[:, 3])
    weights[:, 3] = torch.where(local[:, 3] < 0, 0.0, weights[:, 3])
    travelled = dataclasses.replace(
        received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), base), weights=weights
    )
    assert torch.equal(experts(travelled), experts(received))


@pytest.mark.parametrize("count", [20, sorted_first(90)], ids=str)
def test_weights_are_left_to_combine(count):
    """Weighting.COMBINE leaves weights to the transport. CONTIGUOUS transports deliver one row per route."""
    experts, tensors = build(*SMALL)
    counts = torch.tensor([count, 0, 3, 1, 7], device=DEVICE)
    total = int(counts.sum())
    received = Received(
        x=rows(*SMALL, total).x,
        layout=RowLayout.CONTIGUOUS,
        weighting=Weighting.COMBINE,
        handle=None,
        expert_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
    )
    ids = torch.repeat_interleave(torch.arange(5, device=DEVICE), counts).unsqueeze(1)
    expected, limit = expected_and_limit(SMALL[0], PLAIN, tensors, received.x, ids, None, BF16)
    assert max_error_ratio(experts(received), expected, CUT_OFF * limit) <= 1


def test_passes_of_few_rows_give_the_same_answer():
    whole, tensors = build(*SMALL)
    parts, _ = build(*SMALL, chunk_rows=7)
    received = rows(*SMALL, 60)
    check(whole, tensors, received)
    check(parts, tensors, received)


@pytest.mark.parametrize("kind", [Bf16TritonExperts, Fp8BlockTritonExperts])
@pytest.mark.parametrize(
    ("ranks", "rank", "bound", "chunk"),
    [
        (1, 0, 3, 100),
        (2, 1, 1, 100),
        (4, 2, 6, 100),
        sorted_first(4, 3, 24, 100),
        (4, 1, 24, 48),
        (3, 2, 9, 5),
        (2, 0, 40, 30),
    ],
)
def test_written_to_peers(kind, ranks, rank, bound, chunk):
    experts, _ = build(*SMALL, kind, chunk_rows=chunk)
    received = rows(*SMALL, ranks * bound)
    received.weights[::3] = 0.0  # rows of weight 0 are written too, because their sender reads them
    check_peers(experts, received, ranks, rank)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40).int()
    check_peers(
        experts, dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40)), ranks, rank
    )


@pytest.mark.parametrize("count", [1, 40, 90], ids=str)
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
def test_blocks_within_the_bound(activation, count):
    config = dataclasses.replace(SMALL[0], activation=activation)
    experts, tensors = build(config, SMALL[1], Fp8BlockTritonExperts)
    received = rows(config, SMALL[1], count)
    check(experts, tensors, received)


@pytest.mark.parametrize("count", [40, 90], ids=str)
def test_blocks_of_rows_that_were_rounded_before_give_the_same_bits(count):
    experts, _ = build(*SMALL, Fp8BlockTritonExperts)
    received = rows(*SMALL, count)
    if DEVICE.type == "cpu":  # the interpreter's casts to E4M3 differ from torch's, so use values that both represent
        data, scale = round_blocks(received.x)
        wide = (data.float().unflatten(-1, (-1, 128)) * 2**-4).flatten(-2)
        received = dataclasses.replace(received, x=wide.to(BF16))
    data, scale = round_blocks(received.x)
    y = experts(dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block"))
    assert torch.equal(y, experts(received))


@pytest.mark.parametrize(
    "moved", ["x", "ids", "weights", "weighting", "out", "count", "experts", "wire", "scratch", "peers"]
)
def test_a_call_on_other_memory_is_not_taken_for_an_earlier_one(moved):
    """A recorded launch is not reused for tensors at other addresses. moved: the tensor or argument that changes."""
    experts, _ = build(*SMALL)
    received = rows(*SMALL, 6)
    out = torch.zeros_like(received.x)
    to: torch.Tensor | PeerRows = peer_rows(out[:3], out[3:]) if moved == "peers" else out
    for seed in range(3):  # the first call is seen, the second recorded, and the third launched from the record
        ahead = rows(*SMALL, 6, seed)
        for name in ("x", "local_ids", "weights"):
            getattr(received, name).copy_(getattr(ahead, name))
        out.zero_()
        experts(received, to)
        assert torch.equal(out, build(*SMALL)[0](received)), f"call {seed}"
    out.zero_()
    other, given, weights, block = rows(*SMALL, 6, 7), received, experts.weights, torch.zeros_like(out[3:])
    match moved:
        case "x":
            given = dataclasses.replace(received, x=other.x)
        case "ids":
            given = dataclasses.replace(received, local_ids=other.local_ids)
        case "weights":
            given = dataclasses.replace(received, weights=other.weights)
        case "weighting":
            given = dataclasses.replace(received, weighting=Weighting.COMBINE)
        case "out":
            out = to = torch.zeros_like(out)
        case "count":
            given, to = part_of(received, 4), out[:4]
        case "experts":
            for name, parameter in list(weights.named_parameters()):
                setattr(weights, name, torch.nn.Parameter(parameter.detach() * 2, requires_grad=False))
        case "wire":
            wire = WireIds(PhysicalIds(received.local_ids), 1)
            given = dataclasses.replace(received, local_ids=None, wire_ids=wire)
        case "scratch":
            experts.workspaces.reserve(experts.workspace_bytes() + 1)
            experts.workspace().fill_(255)
        case "peers":
            to = peer_rows(out[:3], block)
    expected = Bf16TritonExperts(experts.config, weights, Workspaces(DEVICE))(given)
    experts(given, to)
    if moved == "peers":
        assert not out[3:].any(), "of peers that are not this call's"
        out = torch.cat([out[:3], block])
    assert torch.equal(out[: len(expected)], expected)
    assert not out[len(expected) :].any(), "behind the rows of this call"
    written = bool((experts.workspace() != 255).any())
    assert moved != "scratch" or written, "scratch memory of before"


def test_scales_on_other_memory_are_not_taken_for_earlier_ones():
    experts, _ = build(*SMALL, Fp8BlockTritonExperts)
    received = rows(*SMALL, 6)
    data, scale = round_blocks(received.x)
    given = dataclasses.replace(received, x=data, x_scale=scale, format="fp8_block")
    out = torch.zeros_like(received.x)
    for _ in range(3):
        experts(given, out)
    experts(dataclasses.replace(given, x_scale=2 * scale), out)
    assert torch.equal(out, build(*SMALL, Fp8BlockTritonExperts)[0](dataclasses.replace(given, x_scale=2 * scale)))


def peer_rows(*blocks: torch.Tensor) -> PeerRows:
    return PeerRows(blocks, torch.tensor([block.data_ptr() for block in blocks], device=DEVICE), 0, 0)


def part_of(received: Received, count: int) -> Received:
    names = ("x", "local_ids", "weights")
    return dataclasses.replace(received, **{name: getattr(received, name)[:count] for name in names})
