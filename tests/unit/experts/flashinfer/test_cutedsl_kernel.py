"""Test `flashinfer_cutedsl` without a GPU: its calls of an emulated FlashInfer, planted errors, and its limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ExpertMap, MoEConfig, RankLayout, Wire
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutedsl as cutedsl_op
from ep_moe.experts.flashinfer.cutedsl import FlashInferCuteDslExperts
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import choose, explain
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, PhysicalIds, Received, Weighting, WireIds
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutedsl
from tests.emulations.cutedsl import Wrapper
from tests.fixtures.expert_weights import etp_half, first_slots
from tests.fixtures.received import random_rows

SLOTS, ROWS, TOP_K, NVFP4, BF16 = 5, 24, 3, SCHEMES["nvfp4"], torch.bfloat16
ACTIVATIONS = [Activation.SWIGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2]
Tensors = list[dict[str, Tensor]]


def shape(activation: Activation = Activation.SWIGLU, *, inner: int = 128, **fields) -> MoEConfig:
    return MoEConfig(
        hidden_size=256, intermediate_size=inner, num_experts=8, top_k=TOP_K, activation=activation, **fields
    )


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[dict]:
    """Replace FlashInfer's wrapper by the emulation. Return the arguments of its calls."""
    made: list[dict] = []

    class Recording(Wrapper):
        def run(self, **arguments) -> Tensor:
            made.append(arguments | {"made_with": self.a})
            return super().run(**arguments)

    monkeypatch.setattr(cutedsl_op, "wrapper", lambda kernel, device: Recording(**cutedsl_op.arguments(kernel, device)))
    return made


def planted(monkeypatch, change) -> None:
    """Replace arguments of the kernel's calls by those that `change(arguments)` returns."""
    make = cutedsl_op.wrapper

    def wrong(kernel, device):
        found = make(kernel, device)
        run = found.run
        found.run = lambda **arguments: run(**(arguments | change(arguments)))
        return found

    monkeypatch.setattr(cutedsl_op, "wrapper", wrong)


def build(config: MoEConfig, **options) -> tuple[FlashInferCuteDslExperts, Tensors]:
    tensors = [random_expert(config, NVFP4, expert, BF16) for expert in range(SLOTS)]
    weights = first_slots(config, tensors, NVFP4, FlashInferCuteDslExperts.weight_layout)
    return FlashInferCuteDslExperts(config, weights, options=ExpertsOptions(**options)), tensors


def one_input_scale(tensors: Tensors) -> Tensors:
    """Return the tensors with the input scale that the kernel uses: the largest of the second product's inputs."""
    largest = torch.stack([own["w2_input_scale"] for own in tensors]).max()
    return [own | {"w2_input_scale": largest} for own in tensors]


def rows(count: int = ROWS) -> Received:
    return random_rows(count, slots=SLOTS, top_k=TOP_K, hidden=256, dtype=BF16)


def times_the_limit(experts: FlashInferCuteDslExperts, tensors: Tensors, received: Received) -> float:
    config, weights = experts.config, received.weights
    if experts.weights.etp.size > 1:
        config = dataclasses.replace(config, intermediate_size=config.intermediate_size // experts.weights.etp.size)
    y = experts(received)
    wanted = expected_and_limit(
        config, NVFP4, one_input_scale(tensors), received.x, received.local_ids, weights, experts.weights.dtype
    )
    assert (y[(received.local_ids < 0).all(1)] == 0).all()
    return max_error_ratio(y, *wanted)


def ratio(config: MoEConfig | None = None) -> float:
    experts, tensors = build(config or shape())
    return times_the_limit(experts, tensors, rows())


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["fused", "deterministic"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_within_the_bound_of_the_dequantised_weights(activation, options):
    experts, tensors = build(shape(activation, activation_limit=1.0), **options)
    assert times_the_limit(experts, tensors, rows()) <= 1


def test_half_a_tile():
    assert ratio(shape(inner=192)) <= 1


# --- planted errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS[:2], ids=lambda a: a.value)
def test_gate_first_is_seen(activation, monkeypatch):
    monkeypatch.setattr(cutedsl, "swap_halves", lambda tensor: tensor)
    assert ratio(shape(activation, activation_limit=1.0)) > 1


@pytest.mark.parametrize("group", [32, 128])
def test_another_interleave_is_seen(group, monkeypatch):
    monkeypatch.setattr(cutedsl, "GROUP", group)
    assert ratio() > 1


def test_rows_that_are_not_interleaved_are_seen(monkeypatch):
    monkeypatch.setattr(cutedsl, "interleave", lambda rows: rows)
    assert ratio() > 1


def test_scales_that_are_not_interleaved_are_seen(monkeypatch):
    interleave = cutedsl.interleave
    monkeypatch.setattr(cutedsl, "interleave", lambda r: r if r.dtype != torch.uint8 else interleave(r))
    assert ratio() > 1


def test_scales_that_are_not_swizzled_are_seen(monkeypatch):
    monkeypatch.setattr(cutedsl, "arrange", lambda scales, layout: scales.contiguous())
    assert ratio() > 1


@pytest.mark.parametrize("name", ["w13_global_scale", "w2_global_scale", "w13_scale", "w2_scale"])
def test_a_scale_twice_as_large_is_seen(name):
    experts, tensors = build(shape())
    stored = experts.weights.get_parameter(name)
    stored.copy_(stored.float() * 2)
    assert times_the_limit(experts, tensors, rows()) > 1


WRONG = {
    "alpha of the first": lambda a: {"w1_alpha": a["w1_alpha"] * 1.5},
    "alpha of the second": lambda a: {"w2_alpha": a["w2_alpha"] * 1.5},
    "decode for encode": lambda a: {"fc2_input_scale": 1 / a["fc2_input_scale"]},
    "scales of the next row": lambda a: {"x_sf": a["x_sf"].roll(1, 0)},
    "weights of the next row": lambda a: {"token_final_scales": a["token_final_scales"].roll(1, 0)},
    "ids one off": lambda a: {"token_selected_experts": (a["token_selected_experts"] + 1) % (SLOTS + TOP_K)},
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_arguments_are_seen(which, monkeypatch):
    assert ratio() <= 1
    planted(monkeypatch, WRONG[which])
    experts, tensors = build(shape())
    wanted = expected_and_limit(
        shape(), NVFP4, one_input_scale(tensors), rows().x, rows().local_ids, rows().weights, BF16
    )
    assert max_error_ratio(experts(rows()), *wanted) > 1


@pytest.mark.parametrize("change", [{"alpha": 1.0}, {"beta": 0.0}, {"limit": 1e30}], ids=str)
def test_each_missing_constant_of_the_clamp_is_seen(change, monkeypatch):
    make = cutedsl_op.wrapper
    monkeypatch.setattr(
        cutedsl_op, "wrapper", lambda kernel, device: make(dataclasses.replace(kernel, **change), device)
    )
    config = shape(Activation.SWIGLU_CLAMPED, activation_limit=1.0, activation_alpha=3.0)
    assert ratio(config) > 1


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [([[0, -1, -1]], "ids must be those of experts"), ([[0, SLOTS, SLOTS]], "experts must differ")],
)
def test_ids_that_flashinfer_does_not_promise_are_refused(ids, sentence, monkeypatch):
    planted(monkeypatch, lambda a: {"token_selected_experts": torch.tensor(ids * ROWS, dtype=torch.int32)})
    with pytest.raises(AssertionError, match=sentence):
        ratio()


def test_contiguous_scales_of_six_dimensions_are_refused(monkeypatch):
    planted(monkeypatch, lambda a: {"w1_weight_sf": a["w1_weight_sf"].contiguous()})
    with pytest.raises(AssertionError, match="strides"):
        ratio()


# --- what the kernel is given ---------------------------------------------------------------------------------------


def test_arguments_of_a_call(calls):
    experts, tensors = build(shape())
    experts(rows())
    (call,) = calls
    first, second = (max(float(own[f"{name}_input_scale"]) for own in tensors) for name in ("w13", "w2"))
    torch.testing.assert_close(call["w1_alpha"], first * torch.stack([own["w13_global_scale"] for own in tensors]))
    torch.testing.assert_close(call["w2_alpha"], second * torch.stack([own["w2_global_scale"] for own in tensors]))
    torch.testing.assert_close(call["fc2_input_scale"], torch.tensor([1 / second]))
    ids, local = call["token_selected_experts"], rows().local_ids
    assert torch.equal(ids[local >= 0].long(), local[local >= 0])
    assert (ids[local < 0] >= SLOTS).all()
    made = call["made_with"]
    assert (made["num_experts"], made["num_local_experts"], made["local_expert_offset"]) == (SLOTS + TOP_K, SLOTS, 0)
    assert made["use_fused_finalize"] is True
    build(shape(), deterministic=True)[0](rows())
    assert calls[-1]["made_with"]["use_fused_finalize"] is False


def test_in_chunks_as_in_one(calls):
    y = build(shape())[0](rows())
    calls.clear()
    parts, _ = build(shape(), chunk_rows=7)
    assert torch.equal(parts(rows()), y)
    assert [len(call["x"]) for call in calls] == [7, 7, 7, 3]
    assert parts.workspace_bytes() == cutedsl_op.operator_scratch_bytes(7, 256, SLOTS, TOP_K)


def test_rows_that_arrive_rounded_give_the_same_bits(calls):
    experts, tensors = build(shape(), chunk_rows=7)
    wire = Wire(dispatch="nvfp4", input_scale=float(max(own["w13_input_scale"] for own in tensors)))
    y, received = experts(rows()), rows()
    calls.clear()
    data, scale = quantize_for_wire(received.x, wire)
    arrived = dataclasses.replace(received, x=data, x_scale=scale, format="nvfp4", input_scale=wire.input_scale)
    assert torch.equal(experts(arrived), y)
    assert calls[0]["x"].data_ptr() == data.data_ptr(), "read where they lie"
    assert not torch.equal(experts(dataclasses.replace(arrived, input_scale=2 * wire.input_scale)), y)


def test_without_weights(calls):
    """With Weighting.COMBINE each row has one expert, and the kernel applies no weight. The transport applies it."""
    experts, tensors = build(shape())
    ids = rows().local_ids.clone()
    ids[:, 1:] = -1
    received = dataclasses.replace(rows(), local_ids=LocalIds(ids), weighting=Weighting.COMBINE, weights=None)
    assert times_the_limit(experts, tensors, received) <= 1


def test_edges_of_the_contract(calls):
    """Edge cases keep the contract.

    They are: no rows, rows without a local expert that hold NaN or inf, global ids, ids out of range, and repeated ids.
    """
    experts, _ = build(shape(), deterministic=True)
    assert experts(rows(count=0)).shape == (0, 256)
    assert not calls
    received = rows()
    y, absent = experts(received), (received.local_ids < 0).all(1)
    for junk in (torch.nan, torch.inf):
        x = torch.where(absent.unsqueeze(1), junk, received.x).to(BF16)
        assert torch.equal(experts(dataclasses.replace(received, x=x)), y)
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40)
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    assert torch.equal(experts(travelled), y)
    twice = dataclasses.replace(
        received, local_ids=LocalIds(torch.tensor([[2, 2, 7]] * ROWS)), weights=torch.tensor([[0.5, 0.25, 1.0]] * ROWS)
    )
    once = dataclasses.replace(
        received, local_ids=LocalIds(torch.tensor([[2, -1, -1]] * ROWS)), weights=torch.tensor([[0.75, 0, 0]] * ROWS)
    )
    assert torch.equal(experts(twice), experts(once))
    assert not experts(dataclasses.replace(received, x=torch.zeros_like(received.x))).any()


def test_no_slots(calls):
    weights = ExpertWeights(
        shape(), ExpertMap.uneven([8, 0]), ep_rank=1, dtype=BF16, scheme=NVFP4, weight_layout=cutedsl.CuteDsl
    )
    experts = FlashInferCuteDslExperts(shape(), weights)
    assert experts.workspace_bytes() == 0
    assert not experts(rows()).any()
    assert not calls


def test_pieces_of_etp():
    config = shape(inner=256)
    whole = [random_expert(config, NVFP4, expert, BF16) for expert in range(SLOTS)]
    for rank in range(2):
        weights, own = etp_half(config, whole, NVFP4, cutedsl.CuteDsl, rank)
        assert times_the_limit(FlashInferCuteDslExperts(config, weights), own, rows()) <= 1


# --- where it is offered --------------------------------------------------------------------------------------------

BASE = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 8, "top_k": 2}
REFUSED = [
    ({"hidden_size": 192}, {}, "hidden_size must be a multiple of 128, got 192"),
    ({"intermediate_size": 96}, {}, "intermediate_size / etp must be a multiple of 64, got 96"),
    ({"intermediate_size": 128}, {"etp": 4}, "intermediate_size / etp must be a multiple of 64, got 32"),
    ({"intermediate_size": 192, "activation": Activation.RELU2}, {},
     "intermediate_size / etp must be a multiple of 128, got 192"),
    ({"activation": Activation.GEGLU}, {}, "activation geglu is not among relu2, swiglu, swiglu_clamped"),
    ({"expert_bias": True}, {}, "it has no expert biases (expert_bias=True)"),
    ({"num_experts": 64, "top_k": 33}, {}, "it is compiled for a top_k of 32 at most, got 33"),
    ({"num_experts": 2047, "top_k": 8}, {}, "it is compiled for 2048 experts less top_k, got 2047"),
    ({}, {"scheme": SCHEMES["mxfp4"]}, "quantization mxfp4 is not among nvfp4"),
    ({}, {"dtype": torch.float16}, "dtype float16 is not among bfloat16"),
    ({}, {"options": ExpertsOptions(spare_sms=8)}, "it cannot leave multiprocessors free (spare_sms=8)"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "call", "sentence"), REFUSED)
def test_what_is_refused(fields, call, sentence):
    config, call = MoEConfig(**(BASE | fields)), {"dtype": BF16, "etp": 1, "scheme": NVFP4} | call
    assert FlashInferCuteDslExperts.unsupported_reason(config, **call) == sentence


def test_the_same_shapes_unrefused():
    for activation in ACTIVATIONS:
        config = MoEConfig(**(BASE | {"activation": activation}))
        assert (
            FlashInferCuteDslExperts.unsupported_reason(config, BF16, 2, NVFP4, ExpertsOptions(deterministic=True))
            is None
        )


def test_libraries(monkeypatch):
    missing = {"flashinfer", "cutlass"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())
    assert FlashInferCuteDslExperts.available() == "FlashInfer is not installed; pip install ep-moe[gpu]"
    missing.discard("flashinfer")
    assert "pip install nvidia-cutlass-dsl" in FlashInferCuteDslExperts.available()
    missing.clear()
    assert FlashInferCuteDslExperts.available() is None


@pytest.mark.parametrize(
    ("capability", "possible"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_gpus(capability, possible, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(FlashInferCuteDslExperts, "available", classmethod(lambda cls: None))
    layout, gpu = RankLayout(world=1, rank=0, dp=1, ep=1, etp=1), torch.device("cuda")
    asked = {"experts": "flashinfer_cutedsl", "scheme": NVFP4}
    if capability in ((10, 0), (10, 3)):
        assert choose(MoEConfig(**BASE), layout, gpu, BF16, **asked).experts == "flashinfer_cutedsl"
        return
    here = ".".join(map(str, capability))
    sentence = "flashinfer_cutedsl needs a GPU of compute capability 10.0 to 10.3 for quantization nvfp4, this one has "
    found = [row.reason for row in explain(MoEConfig(**BASE), layout, gpu, BF16, **asked) if row.all2all == "local"]
    assert sentence + here in found
