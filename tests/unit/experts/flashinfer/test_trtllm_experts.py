"""Test `flashinfer_trtllm` without a GPU: what it passes to FlashInfer, computed by an emulation of its layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.config import RoutingConfig
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import trtllm, trtllm_op
from ep_moe.experts.flashinfer.trtllm import FlashInferTrtllmExperts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import kernel_contract
from ep_moe.types import LocalIds, PhysicalIds, WireIds
from tests.emulations.trtllm import unpack
from tests.fixtures.trtllm_experts import (
    BF16,
    ROWS,
    SLOTS,
    TOP_K,
    build,
    emulated,  # noqa: F401 (fixtures)
    rows,
    shape,
    times_the_limit,
)

each_scheme = pytest.mark.parametrize("name", trtllm_op.ENTRIES)


# --- the contract ---------------------------------------------------------------------------------------------------


@each_scheme
def test_contract(name, monkeypatch):
    """Each activation, with and without biases, fulfils the contract for all row layouts, etp and global ids."""
    monkeypatch.setattr(trtllm, "HIDDEN_UNITS", {})  # the emulation needs whole tiles only
    monkeypatch.setattr(kernel_contract, "HIDDEN", 256 if name == "mxint4" else 128)
    monkeypatch.setattr(kernel_contract, "ROWS", (33, 1, 0))
    cpu = torch.device("cpu")
    served = [a for a in trtllm.ACTIVATIONS if problem(name, shape(a)) is None]
    assert kernel_contract.check_experts(
        FlashInferTrtllmExperts, device=cpu, schemes=[name], activations=served
    ) == len(served) * (1 + (name in trtllm_op.FP4))


def problem(name: str, config: MoEConfig, etp: int = 1, dtype: torch.dtype = BF16) -> str | None:
    return FlashInferTrtllmExperts.unsupported_reason(config, dtype, etp, SCHEMES[name])


@pytest.mark.parametrize("name", [name for name in trtllm_op.ENTRIES if name != "fp8_static"])
def test_a_clamp_that_clamps(name):
    experts, tensors = build(shape(Activation.SWIGLU_CLAMPED), name)
    assert times_the_limit(experts, tensors, rows()) <= 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", trtllm_op.FP4)
def test_one_etp_rank_adds_the_output_bias(name, rank):
    experts, tensors = build(shape(bias=True), name, etp=RankGroup(None, (0, 1), rank, FlightRecorder()))
    assert times_the_limit(experts, tensors, rows(), bias=rank == 0) <= 1


# --- ids ------------------------------------------------------------------------------------------------------------


def test_packed_ids_and_weights():
    ids = torch.tensor([[0, 4, -1], [-1, -1, -1], [3, 0, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, -1.25, 7.0], [1.0, 2.0, 3.0], [0.1, 1e-3, 300.7]])
    packed = torch.empty_like(ids)
    trtllm_op.pack(ids, weights, 5, packed)
    found, factors = unpack(packed)
    assert found.tolist() == [[0, 4, 5], [5, 5, 5], [3, 0, 1]]
    assert torch.equal(factors, torch.where(ids >= 0, weights, 0.0).to(BF16).float())
    trtllm_op.pack(ids, None, 5, packed)
    assert torch.equal(unpack(packed)[1], (ids >= 0).float())


def test_the_packing_is_that_of_the_documentation():
    """Ids and weights are packed as documented: `(expert_id << 16) | (weight_bf16.view(int16))`, for either sign."""
    ids, weights = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([[0.25, -2.0]])
    packed = torch.empty_like(ids)
    trtllm_op.pack(ids, weights, 5, packed)
    assert packed.tolist() == [[3 << 16 | 0x3E80, 1 << 16 | 0xC000]]


@pytest.mark.parametrize(("slots", "top_k"), [(1, 1), (3, 2), (4, 8), (5, 3), (128, 8), (7, 22)])
def test_an_expert_more_than_there_are(slots, top_k):
    experts = trtllm_op.expert_count(slots, top_k)
    assert experts > max(slots, top_k)
    assert experts % 4 == 0


def test_no_pick_reaches_the_kernel_as_minus_one(emulated):  # noqa: F811
    experts, _ = build(shape(), "none")
    experts(rows())
    (call,) = emulated
    ids, weights = unpack(call["topk_ids"])
    none = rows().local_ids < 0
    assert (ids[none] == SLOTS).all()
    assert (weights[none] == 0).all()
    assert (call["local_expert_offset"], call["local_num_experts"], call["num_experts"]) == (0, SLOTS, 8)


def test_ids_out_of_range_and_weights_of_zero_have_no_expert():
    experts, _ = build(shape(), "none")
    received = rows()
    clean = experts(received)
    none = received.local_ids < 0
    wild = torch.where(none, torch.tensor([SLOTS, 10**6, -7]).expand(ROWS, 3), received.local_ids)
    assert torch.equal(experts(dataclasses.replace(received, local_ids=LocalIds(wild))), clean)
    ids = torch.where(none, 2, received.local_ids)
    zero = received.weights.masked_fill(none, 0.0)
    assert torch.equal(experts(dataclasses.replace(received, local_ids=LocalIds(ids), weights=zero)), clean)


def test_a_repeated_id_counts_with_all_its_weights():
    """A repeated id counts with the sum of its weights. The routing kernel for few tokens would drop one of them."""
    experts, _ = build(shape(), "none")
    received = rows(2)
    ids = torch.tensor([[1, 4, 1], [0, 0, 0]])
    weights = torch.tensor([[0.25, 1.0, 0.5], [0.25, 0.25, 0.5]])
    twice = experts(dataclasses.replace(received, local_ids=LocalIds(ids), weights=weights))
    once = torch.tensor([[1, 4, -1], [0, -1, -1]])
    merged = torch.tensor([[0.75, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(twice, experts(dataclasses.replace(received, local_ids=LocalIds(once), weights=merged)))


def test_ids_as_they_travelled():
    experts, _ = build(shape(), "nvfp4")
    received = rows()
    base = 2 * SLOTS
    ids = torch.where(received.local_ids < 0, 3, received.local_ids + base).int()
    wire = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(ids), base))
    assert torch.equal(experts(wire), experts(received))


def test_nothing_arrives():
    experts, _ = build(shape(), "nvfp4")
    assert experts(rows(0)).shape == (0, 256)


def test_a_rank_without_experts(emulated):  # noqa: F811
    experts, _ = build(shape(), "nvfp4", slots=0)
    assert experts.workspace_bytes() == 0
    received = dataclasses.replace(rows(), local_ids=LocalIds(torch.full((ROWS, TOP_K), -1)))
    assert not experts(received).any()
    assert not emulated


# --- chunks, memory, weights in place -------------------------------------------------------------------------------


@each_scheme
def test_in_chunks_as_in_one(name, emulated):  # noqa: F811
    whole, _ = build(shape(), name)
    parts, tensors = build(shape(), name, chunk_rows=7)
    assert parts.workspace_bytes() < whole.workspace_bytes()
    received = rows()
    assert times_the_limit(whole, tensors, received) <= 1
    emulated.clear()
    assert times_the_limit(parts, tensors, received) <= 1
    assert [len(call["output"]) for call in emulated] == [7, 7, 7, 3]


def test_a_chunk_is_never_more_than_the_kernel_can_count():
    experts, _ = build(shape(), "none", chunk_rows=2**40)
    pairs = experts.chunk_rows * TOP_K + (trtllm_op.expert_count(SLOTS, TOP_K) + 1) * 256
    assert pairs * 512 < 2**31 <= (pairs + TOP_K + 1) * 512


@each_scheme
def test_out_is_written_and_what_was_given_stays(name):
    experts, _ = build(shape(), name)
    received = rows()
    before = [t.clone() for t in (received.x, received.local_ids, received.weights)]
    stored = {key: p.detach().clone() for key, p in experts.weights.stored_tensors().items()}
    out = torch.full_like(received.x, torch.nan)
    assert experts(received, out) is out
    assert not out.isnan().any()
    for now, then in zip((received.x, received.local_ids, received.weights), before, strict=True):
        assert torch.equal(now, then)
    for key, parameter in experts.weights.stored_tensors().items():
        assert torch.equal(parameter.detach().view(torch.uint8), stored[key].view(torch.uint8)), key


@each_scheme
def test_a_slot_moves_as_bytes(name):
    """A slot's expert moves with the bytes of all its tensors, as EPLB moves it."""
    experts, tensors = build(shape(bias=name in trtllm_op.FP4), name)
    for tensor in experts.weights.slot_tensors().values():
        plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        plain[[0, 3]] = plain[[3, 0]].clone()
    tensors[0], tensors[3] = tensors[3], tensors[0]
    assert times_the_limit(experts, tensors, rows()) <= 1


def test_compiled_as_eager():
    experts, _ = build(shape(), "nvfp4")
    received = rows()
    eager = experts(received)
    compiled = torch.compile(lambda r: experts(r), fullgraph=True, backend="eager")
    assert torch.equal(compiled(received), eager)


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nvfp4", {"hidden_size": 768}, "hidden_size must be a multiple of 512 with quantization nvfp4, got 768"),
        ("mxfp8", {"hidden_size": 576}, "hidden_size must be a multiple of 128 with quantization mxfp8, got 576"),
        ("none", {"intermediate_size": 192}, "intermediate_size / etp must be a multiple of 128"),
        ("mxint4", {"hidden_size": 640}, "hidden_size must be a multiple of 256 with quantization mxint4"),
        ("none", {"top_k": 33, "num_experts": 64}, "top_k must be at most 32, got 33"),
        ("none", {"activation": Activation.GEGLU}, "activation geglu is not among relu2, swiglu, swiglu_clamped"),
        ("fp8_block", {"activation": Activation.RELU2}, "activation relu2 does not go with quantization fp8_block"),
        ("mxint4", {"activation": Activation.RELU2}, "activation relu2 does not go with quantization mxint4"),
        (
            "fp8_static",
            {"activation": Activation.SWIGLU_CLAMPED},
            "activation swiglu_clamped does not go with quantization fp8_static",
        ),
        ("none", {"expert_bias": True}, "it has expert biases with quantization nvfp4, mxfp4, mxfp4_mxfp8 alone"),
        ("fp8_dynamic", {}, "quantization fp8_dynamic is not among"),
    ],
)
def test_what_it_refuses(name, changes, words):
    config = dataclasses.replace(shape(), **changes)
    assert words in (problem(name, config) or "")


def test_pieces_of_experts_have_units_too():
    assert "intermediate_size / etp must be a multiple of 128" in (problem("mxfp4", shape(), etp=4) or "")
    assert problem("mxfp4", shape(), etp=2) is None


def test_bfloat16_alone_and_no_promise_of_equal_bits():
    assert "dtype float16 is not among bfloat16" in (problem("none", shape(), dtype=torch.float16) or "")
    options = ExpertsOptions(deterministic=True)
    assert FlashInferTrtllmExperts.unsupported_reason(shape(), BF16, 1, options=options) == "it is not deterministic"


def test_weight_on_input_is_the_layers_matter():
    routing = RoutingConfig(weight_on_input=True)
    assert problem("mxfp4", dataclasses.replace(shape(), top_k=1, routing=routing)) is None


@pytest.mark.parametrize(("found", "serves"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)])
def test_blackwells_data_center_family_alone(found, serves):
    lowest, highest = FlashInferTrtllmExperts.compute_capability("nvfp4")
    assert (lowest <= found <= highest) is serves
