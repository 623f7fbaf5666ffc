"""Test `flashinfer_cutlass` in Blackwell's schemes: the error bound detects planted errors, and edge cases hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, ExpertMap, MoEConfig, RankLayout, Wire
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutlass, cutlass_op
from ep_moe.experts.flashinfer.cutlass import ACTIVATIONS, FlashInferCutlassExperts
from ep_moe.experts.layouts import as_plain
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import explain
from ep_moe.types import LocalIds, PhysicalIds, Received, WireIds
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutlass as cutlass_layouts
from ep_moe.weights.layouts.cutlass import SM100_SCHEMES
from tests.fixtures.expert_weights import etp_half
from tests.fixtures.flashinfer_cutlass import BF16, SLOTS, build, emulated, rows, shape  # noqa: F401 (a fixture)
from tests.fixtures.flashinfer_cutlass_planted import before_run, ratio, times_the_limit

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")
each_scheme = pytest.mark.parametrize("name", SM100_SCHEMES)


# --- errors in the weights ------------------------------------------------------------------------------------------


@each_scheme
def test_gate_first_is_seen(name, monkeypatch):
    assert ratio(SCHEMES[name]) <= 1
    monkeypatch.setattr(cutlass_layouts.CutlassSm90, "_swapped", lambda self, tensors: dict(tensors))
    assert ratio(SCHEMES[name]) > 1


@pytest.mark.parametrize("left", ["w13_scale", "w13_bias"])
@each_scheme
def test_a_tensor_with_gate_first_is_seen(name, left, monkeypatch):
    """Scales or biases left in [gate; up] order are detected, where the data is in [up; gate] order."""
    swapped = cutlass_layouts.CutlassSm90._swapped

    def planted(self, tensors):
        return swapped(self, tensors) | {left: tensors[left]}

    monkeypatch.setattr(cutlass_layouts.CutlassSm90, "_swapped", planted)
    assert ratio(SCHEMES[name], shape(bias=True)) > 1


@each_scheme
def test_scales_that_are_not_swizzled_are_seen(name, monkeypatch):
    monkeypatch.setattr(cutlass_layouts, "arrange", lambda scales, layout: scales.contiguous())
    assert ratio(SCHEMES[name]) > 1


@each_scheme
def test_nibbles_and_bytes_the_other_way_round_are_seen(name):
    experts, tensors = build(shape(), SCHEMES[name])
    data = experts.weights.get_parameter("w2").view(torch.uint8)
    data.copy_(data.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if name == "mxfp8" else data >> 4 | data << 4)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize(
    "tensor", ["w13_global_scale", "w2_global_scale", "w13_input_scale", "w2_input_scale", "w13_scale", "w2_scale"]
)
def test_a_wrong_nvfp4_scale_is_seen(tensor, monkeypatch):
    """A wrong NVFP4 scale is detected.

    An input scale is changed only where it divides or only where it multiplies. A change of both has little effect.
    """
    experts, tensors = build(shape(), SCHEMES["nvfp4"])
    if "input" in tensor:
        at = 2 if tensor.startswith("w13") else 5

        def planted(arguments):
            arguments["quant_scales"][at] = arguments["quant_scales"][at] * 2

        before_run(monkeypatch, planted)
    else:
        stored = experts.weights.get_parameter(tensor)
        stored.copy_(stored.float() * 2)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize("name", ["mxfp4_mxfp8", "mxfp8"])
@pytest.mark.parametrize("tensor", ["w13_scale", "w2_scale"])
def test_an_exponent_that_is_one_more_is_seen(tensor, name):
    experts, tensors = build(shape(), SCHEMES[name])
    experts.weights.get_parameter(tensor).add_(1)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


# --- errors in the call ---------------------------------------------------------------------------------------------


def wrong_calls() -> dict[str, dict]:
    def next_row(arguments):
        return {"input_sf": arguments["input_sf"].roll(1, 0)}

    def next_block(arguments):
        return {"input_sf": arguments["input_sf"].roll(1, 1)}

    def one_off(arguments):
        ids = arguments["token_selected_experts"]
        return {"token_selected_experts": torch.where(ids >= 0, (ids + 1) % SLOTS, ids).int()}

    def swizzled(arguments):
        filled = torch.nn.functional.pad(arguments["input_sf"], (0, 0, 0, 128 - len(arguments["input_sf"])))
        return {"swizzled_input_sf": True, "input_sf": filled.contiguous()}

    def larger(arguments):
        return {"quant_scales": [scale * 1.5 if scale.dim() == 1 else scale for scale in arguments["quant_scales"]]}

    return {f.__name__: f for f in (next_row, next_block, one_off, swizzled, larger)}


@pytest.mark.parametrize("which", wrong_calls())
@each_scheme
def test_wrong_arguments_are_seen(name, which, monkeypatch):
    before_run(monkeypatch, lambda arguments: arguments.update(wrong_calls()[which](arguments)))
    assert ratio(SCHEMES[name]) > 1


@each_scheme
def test_rows_without_scales_are_refused(name, monkeypatch):
    before_run(monkeypatch, lambda arguments: arguments.update({"input_sf": None}))
    with pytest.raises(AssertionError, match="need their input_sf"):
        ratio(SCHEMES[name])


@each_scheme
def test_missing_clamp_constants_are_seen(name, monkeypatch):
    config = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=1.0)
    assert ratio(SCHEMES[name], config) <= 1
    monkeypatch.setattr(FlashInferCutlassExperts, "_clamp_constants", lambda self: [])
    assert ratio(SCHEMES[name], config) > 1


# --- what the kernel is given ---------------------------------------------------------------------------------------


def test_the_six_scales_of_nvfp4(emulated):  # noqa: F811
    experts, tensors = build(shape(), SCHEMES["nvfp4"])
    experts(rows(shape()))
    (call,) = emulated
    first = max(float(t["w13_input_scale"]) for t in tensors)
    second = torch.stack([t["w2_input_scale"] for t in tensors])
    quant1, block1, alpha1, quant2, block2, alpha2 = call["quant_scales"]
    assert float(quant1) == pytest.approx(1 / first)
    torch.testing.assert_close(alpha1, first * torch.stack([t["w13_global_scale"] for t in tensors]))
    torch.testing.assert_close(quant2, 1 / second)
    torch.testing.assert_close(alpha2, second * torch.stack([t["w2_global_scale"] for t in tensors]))
    assert (block1.dtype, tuple(block1.shape)) == (torch.int32, (SLOTS, 256, 4))
    assert (block2.dtype, tuple(block2.shape)) == (torch.int32, (SLOTS, 256, 2))
    assert (call["input"].dtype, tuple(call["input"].shape)) == (torch.uint8, (24, 128))
    assert (call["input_sf"].dtype, tuple(call["input_sf"].shape)) == (torch.uint8, (24, 16))
    assert (call["fc1_expert_weights"].dtype, tuple(call["fc1_expert_weights"].shape)) == (torch.int64, (5, 256, 16))
    assert call["swizzled_input_sf"] is False


@pytest.mark.parametrize(("name", "weight"), [("mxfp4_mxfp8", torch.int64), ("mxfp8", torch.float8_e4m3fn)])
def test_the_four_scales_of_mxfp8_rows(name, weight, emulated):  # noqa: F811
    experts, _ = build(shape(), SCHEMES[name])
    experts(rows(shape()))
    (call,) = emulated
    assert [tuple(scale.shape) for scale in call["quant_scales"]] == [(5, 256, 2), (5,), (5, 256, 1), (5,)]
    assert [scale.dtype for scale in call["quant_scales"]] == [torch.int32, torch.float32] * 2
    assert all((scale == 1).all() for scale in call["quant_scales"][1::2])
    assert call["fc2_expert_weights"].dtype == weight
    assert (call["input"].dtype, call["input_sf"].dtype) == (torch.float8_e4m3fn, torch.uint8)


@each_scheme
def test_what_flashinfer_compiles_for(name):
    runner = build(shape(), SCHEMES[name])[0].runner
    wanted = {"nvfp4": (torch.uint8, torch.int64), "mxfp4_mxfp8": (torch.float8_e4m3fn, torch.int64)}
    assert (runner.input, runner.weight) == wanted.get(name, (torch.float8_e4m3fn, torch.float8_e4m3fn))
    assert runner.output == BF16
    on = {flag for flag, value in runner.flags.items() if value}
    assert on == {"use_fused_finalize"} | ({"use_mxfp8_act_scaling"} if name != "nvfp4" else set())


@each_scheme
def test_in_chunks_as_in_one(name, emulated):  # noqa: F811
    whole, _ = build(shape(), SCHEMES[name])
    received = rows(shape())
    y = whole(received)
    parts, _ = build(shape(), SCHEMES[name], chunk_rows=7)
    emulated.clear()
    assert torch.equal(parts(received), y)
    assert [len(call["input"]) for call in emulated] == [7, 7, 7, 3]
    assert parts.workspace_bytes() < whole.workspace_bytes()


@each_scheme
def test_planned_memory_is_what_a_call_takes(name, emulated):  # noqa: F811
    experts, _ = build(shape(), SCHEMES[name], chunk_rows=24)
    runner, size = experts.runner, (24, 256, 128, SLOTS, 3)
    assert experts.workspace_bytes() == cutlass_op.operator_scratch_bytes(runner, *size) + 1024
    experts(rows(shape()))
    (call,) = emulated
    assert call["workspace_buffer"].numel() == 1024
    row, blocks = (128, 16) if name == "nvfp4" else (256, 8)
    assert cutlass_op.operator_scratch_bytes(runner, *size) >= 24 * (row + blocks + 2 * 4 * 3)


@each_scheme
def test_edges_of_the_contract(name, emulated):  # noqa: F811
    """Edge cases keep the contract.

    They are: no rows, rows without a local expert that hold NaN or inf, global ids, ids out of range, and rows of
    zeros.
    """
    experts, _ = build(shape(), SCHEMES[name])
    assert experts(rows(shape(), count=0)).shape == (0, 256)
    assert not emulated
    received = rows(shape())
    y, absent = experts(received), (received.local_ids < 0).all(1)
    assert absent.any()
    for junk in (torch.nan, torch.inf, 60000.0):
        x = torch.where(absent.unsqueeze(1), junk, received.x).to(BF16)
        assert torch.equal(experts(dataclasses.replace(received, x=x)), y)
    assert not y[absent].any()
    wire = torch.where(received.local_ids < 0, 3, received.local_ids + 40)
    travelled = dataclasses.replace(received, local_ids=None, wire_ids=WireIds(PhysicalIds(wire), 40))
    assert torch.equal(experts(travelled), y)
    without = dataclasses.replace(received, local_ids=LocalIds(torch.full_like(received.local_ids, SLOTS)))
    assert not experts(without).any()
    assert not experts(dataclasses.replace(received, x=torch.zeros_like(received.x))).any()


def travelled(received: Received, name: str, input_scale: float) -> Received:
    """Round the rows as a transport does before it sends them."""
    wire = Wire(dispatch="nvfp4", input_scale=input_scale) if name == "nvfp4" else Wire(dispatch="mxfp8")
    data, scale = quantize_for_wire(received.x, wire)
    return dataclasses.replace(received, x=data, x_scale=scale, format=wire.dispatch, input_scale=wire.input_scale)


@each_scheme
def test_rows_that_arrive_rounded_give_the_same_bits(name, emulated):  # noqa: F811
    experts, tensors = build(shape(), SCHEMES[name], chunk_rows=7)
    first = float(max(t["w13_input_scale"] for t in tensors)) if name == "nvfp4" else 0.0
    y = experts(rows(shape()))
    emulated.clear()
    arrived = travelled(rows(shape()), name, first)
    assert torch.equal(experts(arrived), y)
    assert emulated[0]["input"].data_ptr() == arrived.x.data_ptr(), "read where they lie"
    assert experts(travelled(rows(shape(), count=0), name, first)).shape == (0, 256)
    if name == "nvfp4":
        wrong = dataclasses.replace(arrived, input_scale=first * 1.5)
        assert not torch.allclose(experts(wrong).float(), y.float(), rtol=0.1, atol=0.1)


@each_scheme
def test_rows_in_another_format_are_widened(name, emulated):  # noqa: F811
    experts, _ = build(shape(), SCHEMES[name])
    other = "mxfp8" if name == "nvfp4" else "nvfp4"
    assert other not in experts.row_formats
    arrived = travelled(rows(shape()), other, 0.001)
    plain = as_plain(arrived, BF16)
    assert torch.equal(experts(arrived), experts(plain))


@each_scheme
def test_no_slots(name, emulated):  # noqa: F811
    weights = ExpertWeights(
        shape(), ExpertMap.uneven([8, 0]), ep_rank=1, dtype=BF16, scheme=SCHEMES[name],
        weight_layout=FlashInferCutlassExperts.weight_layout,
    )  # fmt: skip
    experts = FlashInferCutlassExperts(shape(), weights)
    assert experts.workspace_bytes() == 0
    assert not experts(rows(shape())).any()
    assert not emulated


@each_scheme
def test_pieces_of_etp(name, monkeypatch):
    """With etp, each rank is within the error bound of its piece, and only rank 0 adds the output bias."""
    config = shape(Activation.SWIGLU_CLAMPED, bias=True, inner=256)
    whole = [random_expert(config, SCHEMES[name], expert, BF16) for expert in range(SLOTS)]
    for rank in range(2):
        weights, own = etp_half(config, whole, SCHEMES[name], FlashInferCutlassExperts.weight_layout, rank)
        experts = FlashInferCutlassExperts(config, weights)
        assert times_the_limit(experts, own, rows(config), output_bias=rank == 0) <= 1
    before_run(monkeypatch, lambda arguments: arguments.update({"tp_rank": 0}))
    assert times_the_limit(experts, own, rows(config), output_bias=False) > 1


# --- where it is offered --------------------------------------------------------------------------------------------

REFUSED = [
    ("nvfp4", {"hidden_size": 96}, 1, "hidden_size must be a multiple of 64 with quantization nvfp4, got 96"),
    ("nvfp4", {"intermediate_size": 64}, 2,
     "intermediate_size / etp must be a multiple of 64 with quantization nvfp4, got 32"),
    ("nvfp4", {"intermediate_size": 192, "activation": Activation.RELU2}, 1,
     "intermediate_size / etp must be a multiple of 128 with quantization nvfp4, got 192"),
    ("mxfp4_mxfp8", {"hidden_size": 192}, 1,
     "hidden_size must be a multiple of 128 with quantization mxfp4_mxfp8, got 192"),
    ("mxfp8", {"intermediate_size": 128}, 2,
     "intermediate_size / etp must be a multiple of 128 with quantization mxfp8, got 64"),
    ("mxint4", {}, 1, "quantization mxint4 is not among"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "etp", "sentence"), REFUSED)
def test_shapes_that_are_refused(name, fields, etp, sentence):
    config = MoEConfig(**{"hidden_size": 256, "intermediate_size": 256, "num_experts": 8, "top_k": 2, **fields})
    found = FlashInferCutlassExperts.unsupported_reason(config, BF16, etp, SCHEMES[name])
    assert found is not None
    assert found.startswith(sentence)


@each_scheme
def test_half_precision_biases_and_every_activation_are_served(name):
    for activation in ACTIVATIONS:
        config = shape(activation, bias=True)
        for dtype in (BF16, torch.float16):
            options = ExpertsOptions(deterministic=True)
            assert FlashInferCutlassExperts.unsupported_reason(config, dtype, 1, SCHEMES[name], options) is None


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (11, 0)], ids=str)
def test_what_is_chosen_on_which_gpu(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(FlashInferCutlassExperts, "available", classmethod(lambda cls: None))
    layout, gpu = RankLayout(world=1, rank=0, dp=1, ep=1, etp=1), torch.device("cuda")
    config, here = shape(inner=256), ".".join(map(str, capability))

    def reason(scheme: str) -> str | None:
        asked = {"scheme": SCHEMES[scheme], "experts": "flashinfer_cutlass"}
        (row,) = (r for r in explain(config, layout, gpu, BF16, **asked) if (r.all2all, r.experts)
                  == ("local", "flashinfer_cutlass"))  # fmt: skip
        return row.reason if row.status == "refused" else None

    needs = f"flashinfer_cutlass needs a GPU of compute capability {{}}, this one has {here}"
    for scheme in SM100_SCHEMES:
        sentence = needs.format(f"10.0 to 10.7 for quantization {scheme}")
        assert reason(scheme) == (None if capability[0] == 10 else sentence)
    assert reason("none") == (None if capability < (11, 0) else needs.format("9.0 to 10.7"))
    assert reason("mxfp4") == (None if capability == (9, 0) else needs.format("9.0 for quantization mxfp4"))


def test_which_gpu_a_scheme_needs():
    able = {name: FlashInferCutlassExperts.compute_capability(name) for name in SCHEMES if name != "mxint4"}
    assert {name for name, found in able.items() if found == ((10, 0), (10, 7))} == set(SM100_SCHEMES)
    both = {name for name, found in able.items() if found == ((9, 0), (10, 7))}
    assert both == {"none", "fp8_static", "fp8_dynamic"}
    assert all(able[name] == ((9, 0), (9, 0)) for name in able.keys() - both - set(SM100_SCHEMES))
    assert cutlass.SM100_SCHEMES == SM100_SCHEMES
