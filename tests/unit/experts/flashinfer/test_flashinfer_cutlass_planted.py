"""Test that the error bound detects planted errors in `flashinfer_cutlass`, and test edge cases of its numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ExpertMap, MoEConfig
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.quant.schemes import PLAIN, SCHEMES, Scheme
from ep_moe.types import LocalIds, Received
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutlass as cutlass_layouts
from ep_moe.weights.layouts import cutlass_mixed
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES
from tests.fixtures.expert_weights import etp_half
from tests.fixtures.flashinfer_cutlass import BF16, SLOTS, TOP_K, build, emulated, rows, shape  # noqa: F401 (a fixture)
from tests.fixtures.flashinfer_cutlass_planted import before_run, each_scheme, ratio, times_the_limit

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")
# one scheme with one kernel call, and one that measures rows first
BOTH = {"none": SCHEMES["none"], "int4_fp8": SCHEMES["int4_fp8"]}
each_of_both = pytest.mark.parametrize("scheme", BOTH.values(), ids=BOTH)


# --- errors in the weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [Activation.GEGLU, Activation.SWIGLU_CLAMPED], ids=lambda a: a.value)
@each_scheme
def test_gate_first_is_seen(scheme, activation, monkeypatch):
    config = shape(activation)
    assert ratio(scheme, config) <= 1
    monkeypatch.setattr(cutlass_layouts.CutlassSm90, "_swapped", lambda self, tensors: dict(tensors))
    assert ratio(scheme, config) > 1


def test_a_bias_with_gate_first_is_seen(monkeypatch):
    config = shape(bias=True)
    swapped = cutlass_layouts.CutlassSm90._swapped

    def planted(self, tensors):
        return swapped(self, tensors) | {"w13_bias": tensors["w13_bias"]}

    monkeypatch.setattr(cutlass_layouts.CutlassSm90, "_swapped", planted)
    assert ratio(PLAIN, config) > 1


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mxfp4", "interleave_mxfp4_bf16"),
        ("mxfp4_fp8", "interleave_mxfp4_fp8"),
        ("int4_fp8", "interleave_int4_fp8"),
    ],
)
def test_weights_that_are_not_interleaved_are_seen(name, function, monkeypatch):
    assert ratio(SCHEMES[name]) <= 1
    monkeypatch.setattr(cutlass_mixed, function, lambda data: data.clone())
    assert ratio(SCHEMES[name]) > 1


def test_another_interleave_is_seen(monkeypatch):
    monkeypatch.setattr(cutlass_mixed, "interleave_mxfp4_fp8", cutlass_mixed.interleave_int4_fp8)
    assert ratio(SCHEMES["mxfp4_fp8"]) > 1  # the signs stay where they were


@pytest.mark.parametrize(("name", "function"), [("mxfp4", "fold_mxfp4_scale"), ("int4_fp8", "fold_int4_scale")])
def test_scales_that_are_not_folded_are_seen(name, function, monkeypatch):
    fold = getattr(cutlass_mixed, function)
    monkeypatch.setattr(
        cutlass_mixed,
        function,
        lambda scale: scale.contiguous().view(fold(scale).dtype).view(fold(scale).shape),
    )
    assert ratio(SCHEMES[name]) > 1


def scale_tensors(name: str) -> tuple[str, ...]:
    return tuple(n for n in cutlass_op.scale_names(name) if n.startswith("w") and n.endswith(("_scale", "_residual")))


@pytest.mark.parametrize("which", [0, 1], ids=["w13", "w2"])
@pytest.mark.parametrize("name", [name for name in SM90_SCHEMES if name not in ("none", "mxfp4", "mxfp4_fp8")])
def test_a_scale_twice_as_large_is_seen(name, which):
    experts, tensors = build(shape(), SCHEMES[name])
    experts.weights.get_parameter(f"{('w13', 'w2')[which]}_scale").mul_(2)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_an_exponent_that_is_one_more_is_seen(which):
    experts, tensors = build(shape(), SCHEMES["mxfp4"])
    experts.weights.get_parameter(f"{which}_scale").view(torch.uint8).add_(1)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize("which", ["w13", "w2"])
@pytest.mark.parametrize("factor", [2.0, 1 / cutlass_mixed.HUMMING_COMPENSATION])
def test_another_residual_is_seen(which, factor):
    experts, tensors = build(shape(), SCHEMES["mxfp4_fp8"])
    experts.weights.get_parameter(f"{which}_residual").mul_(factor)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_a_missing_residual_is_seen(which):
    experts, tensors = build(shape(), SCHEMES["mxfp4_fp8"])
    experts.weights.get_parameter(f"{which}_residual").fill_(1)
    assert times_the_limit(experts, tensors, rows(shape())) > 1


@pytest.mark.parametrize("name", [name for name in SM90_SCHEMES if name != "none"])
def test_scales_of_the_other_matrix_are_seen(name, monkeypatch):
    """Scales of the other matrix are detected.

    Without a gate and with I = H, the scales of both matrices have the same shape. The test makes those of w2 8 times
    as
    large.
    """
    config = shape(Activation.RELU2, inner=256)
    experts, tensors = build(config, SCHEMES[name])
    for expert, own in enumerate(tensors):
        plain = {n: SCHEMES[name].dequantize(own, n) * (1.0, 8.0)[n == "w2"] for n in ("w13", "w2")}
        own |= SCHEMES[name].quantize(plain, BF16)
        experts.weights.update_expert(expert, own)
    assert times_the_limit(experts, tensors, rows(config)) <= 1
    names = [scale for scale in cutlass_op.scale_names(name) if scale != "w13_bound"]
    other = {scale: ("w2" + scale[3:] if scale.startswith("w13") else "w13" + scale[2:]) for scale in names}
    stored = experts.weights.get_parameter
    monkeypatch.setattr(experts.weights, "get_parameter", lambda name: stored(other.get(name, name)))
    assert times_the_limit(experts, tensors, rows(config)) > 1


# --- errors in the call ---------------------------------------------------------------------------------------------


CLAMPED = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=1.0, activation_alpha=3.0)


def next_expert(arguments: dict) -> None:
    ids = arguments["token_selected_experts"]
    arguments["token_selected_experts"] = torch.where(ids >= 0, (ids + 1) % SLOTS, ids).int()


def next_rows_weights(arguments: dict) -> None:
    arguments["token_final_scales"] = arguments["token_final_scales"].roll(1, 0)


def twice(at: int):
    """Return a change that doubles one scale, so that the scale that divides differs from the one that multiplies."""

    def planted(arguments: dict) -> None:
        arguments["quant_scales"][at] = arguments["quant_scales"][at] * 2

    return planted


def without(name: str):
    return lambda arguments: arguments.update({name: None})


# planted error -> (change of the call's arguments, schemes, configuration)
IN_THE_CALL = {
    "ids that are one off": (next_expert, SM90_SCHEMES, shape()),
    "weights of the next row": (next_rows_weights, ["none"], shape()),
    "another scale of the second product's input": (twice(1), ["fp8_static", "fp8_dynamic"], shape()),
    "another scale of the second product's input, int4": (twice(3), ["int4_fp8"], shape()),
    **{f"no {name}": (without(name), ["none"], CLAMPED) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")},
}


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, (_, names, _) in IN_THE_CALL.items() for name in names]
)
def test_a_fault_in_the_call_is_seen(fault, name, monkeypatch):
    change, _, config = IN_THE_CALL[fault]
    assert ratio(SCHEMES[name], config) <= 1
    before_run(monkeypatch, change)
    assert ratio(SCHEMES[name], config) > 1


@pytest.mark.parametrize("name", ["none", "fp8_dynamic", "mxfp4"])
def test_missing_clamp_constants_are_seen(name, monkeypatch):
    config = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=1.0)
    assert ratio(SCHEMES[name], config) <= 1
    monkeypatch.setattr(FlashInferCutlassExperts, "_clamp_constants", lambda self: [])
    assert ratio(SCHEMES[name], config) > 1


def pieces(config: MoEConfig, scheme: Scheme) -> list[tuple[FlashInferCutlassExperts, list[dict[str, Tensor]]]]:
    """Return the kernels of both ranks of an etp group, with their pieces of the experts."""
    whole = [random_expert(config, scheme, expert, BF16) for expert in range(SLOTS)]
    made = []
    for rank in range(2):
        weights, own = etp_half(config, whole, scheme, FlashInferCutlassExperts.weight_layout, rank)
        made.append((FlashInferCutlassExperts(config, weights), own))
    return made


@each_scheme
def test_one_rank_of_etp_adds_the_output_bias(scheme, monkeypatch):
    config = shape(Activation.SWIGLU_CLAMPED, bias=True, inner=256)
    ranks = pieces(config, scheme)
    received = rows(config)
    for rank, (experts, own) in enumerate(ranks):
        assert times_the_limit(experts, own, received, output_bias=rank == 0) <= 1
    before_run(monkeypatch, lambda arguments: arguments.update({"tp_rank": 0}))
    assert times_the_limit(*ranks[1], received, output_bias=False) > 1


# --- ids and weights ------------------------------------------------------------------------------------------------


def with_ids(received: Received, ids: Tensor, weights: Tensor | None) -> Received:
    return dataclasses.replace(received, local_ids=LocalIds(ids), weights=weights)


@each_of_both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_repeated_id_counts_once_with_all_its_weight(scheme, dtype):
    experts, tensors = build(shape(), scheme)
    received = rows(shape(), count=4)
    ids = torch.tensor([[2, 2, -1], [1, 4, 1], [3, 3, 3], [-1, -1, -1]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.25, 9.0], [0.5, 1.0, 0.75], [0.25, 0.5, 0.125], [1.0, 2.0, 3.0]])
    once = torch.tensor([[2, -1, -1], [1, 4, -1], [3, -1, -1], [-1, -1, -1]])
    merged = torch.tensor([[0.75, 0, 0], [1.25, 1.0, 0], [0.875, 0, 0], [0, 0, 0]])
    y = experts(with_ids(received, ids, weights))
    assert torch.equal(y, experts(with_ids(received, once, merged)))
    assert times_the_limit(experts, tensors, with_ids(received, once, merged)) <= 1
    assert not y[3].any()


@each_of_both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_count_as_none(scheme, dtype):
    experts, _ = build(shape(), scheme)
    received = rows(shape(), count=3)
    received.x[1] *= 50  # a row without an expert must not affect the scale
    ids = torch.tensor([[2, SLOTS, -7], [1000, -1, -2], [SLOTS - 1, 0, 2**31 - 1]], dtype=dtype)
    y = experts(with_ids(received, ids, received.weights))
    valid = torch.where((ids >= 0) & (ids < SLOTS), ids, -1)
    assert torch.equal(y, experts(with_ids(received, valid, received.weights)))
    assert not y[1].any()
    assert y[0].any()


def test_weights_may_be_a_part_of_a_wider_tensor():
    """Weights may be a slice of a wider tensor. `torch_a2a` delivers them beside the ids in one message."""
    experts, _ = build(shape(), PLAIN)
    received = rows(shape())
    wide = torch.cat([torch.full_like(received.weights, 99.0), received.weights], 1)
    part = wide.chunk(2, 1)[1]
    assert not part.is_contiguous()
    y = experts(with_ids(received, received.local_ids, part))
    assert torch.equal(y, experts(received))
    columns = torch.cat([received.local_ids, received.local_ids + 1], 1).chunk(2, 1)[0]
    assert torch.equal(experts(with_ids(received, columns, received.weights)), y)


def test_the_weight_of_an_absent_expert_is_not_read():
    experts, _ = build(shape(), PLAIN)
    received = rows(shape())
    y = experts(received)
    weights = torch.where(received.local_ids < 0, torch.nan, received.weights)
    assert torch.equal(experts(with_ids(received, received.local_ids, weights)), y)


@each_scheme
def test_rows_may_be_a_part_of_a_wider_tensor(scheme):
    """Rows may be a slice of a wider tensor, as when a model passes `x[:, :H]` to a layer on one rank."""
    experts, _ = build(shape(), scheme)
    received = rows(shape())
    y = experts(received)
    part = torch.cat([received.x, received.x + 1], 1)[:, :256]
    assert torch.equal(experts(dataclasses.replace(received, x=part)), y)


@each_scheme
def test_rows_without_an_expert_may_hold_anything(scheme):
    experts, _ = build(shape(), scheme)
    received = rows(shape())
    y = experts(received)
    absent = (received.local_ids < 0).all(1)
    assert absent.any()
    for junk in (torch.nan, torch.inf, 60000.0):
        x = torch.where(absent.unsqueeze(1), junk, received.x).to(BF16)
        again = experts(dataclasses.replace(received, x=x))
        assert torch.equal(again, y)
    assert not y[absent].any()


# --- nothing to do --------------------------------------------------------------------------------------------------


@each_scheme
def test_no_rows(scheme, emulated):  # noqa: F811
    experts, _ = build(shape(), scheme)
    y = experts(rows(shape(), count=0))
    assert (y.shape, y.dtype) == ((0, 256), BF16)
    out = torch.empty(0, 256, dtype=BF16)
    assert experts(rows(shape(), count=0), out) is out
    assert not emulated


@each_scheme
def test_no_slots(scheme, emulated):  # noqa: F811
    weights = ExpertWeights(
        shape(),
        ExpertMap.uneven([8, 0]),
        ep_rank=1,
        dtype=BF16,
        scheme=scheme,
        weight_layout=FlashInferCutlassExperts.weight_layout,
    )
    experts = FlashInferCutlassExperts(shape(), weights)
    assert experts.workspace_bytes() == 0
    received = rows(shape())
    out = torch.full_like(received.x, torch.nan)
    assert experts(received, out) is out
    assert not out.any()
    assert not emulated


@each_scheme
def test_no_row_with_an_expert(scheme):
    experts, _ = build(shape(), scheme)
    received = rows(shape())
    y = experts(with_ids(received, torch.full_like(received.local_ids, -1), received.weights))
    assert y.shape == received.x.shape
    assert not y.any()


@each_scheme
@pytest.mark.parametrize(
    "dtype",
    [BF16, torch.float16],
    ids=str,
)
def test_rows_of_zeros(scheme, dtype):
    if dtype == torch.float16 and scheme.name in ("mxfp4", "fp8_block"):
        pytest.skip("bfloat16 only")
    experts, _ = build(shape(), scheme, dtype)
    received = dataclasses.replace(rows(shape(), dtype), x=torch.zeros(24, 256, dtype=dtype))
    y = experts(received)
    assert torch.equal(y, torch.zeros_like(y))


def test_small_rows_in_half_precision_under_int4():
    experts, tensors = build(shape(), SCHEMES["int4_fp8"], torch.float16)
    received = rows(shape(), torch.float16)
    small = dataclasses.replace(received, x=(received.x.float() * 1e-3).half())
    assert times_the_limit(experts, tensors, small) <= 1


@pytest.mark.parametrize("alpha", [0.01, 0.1])
def test_the_bound_holds_for_every_alpha(alpha):
    """|activation| <= activation_bound for all gates and ups. Otherwise fp8 would saturate below that value."""
    config = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=1.0, activation_alpha=alpha)
    experts, _ = build(config, SCHEMES["fp8_dynamic"])
    gate = torch.linspace(-500, 50, 50_001, dtype=torch.float64)
    gate = gate.clamp(max=config.activation_limit)
    largest = (gate * (alpha * gate).sigmoid()).abs().max() * (config.activation_limit + 1)
    assert largest <= experts._activation_bound()


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_the_bound_holds_for_the_alpha_of_gpt_oss(limit):
    config = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=limit)
    experts, _ = build(config, SCHEMES["fp8_dynamic"])
    gate = torch.linspace(-500, 50, 50_001, dtype=torch.float64).clamp(max=limit)
    assert (gate * (1.702 * gate).sigmoid()).abs().max() * (limit + 1) <= experts._activation_bound()
    assert build(shape(Activation.GEGLU), SCHEMES["fp8_dynamic"])[0]._activation_bound() == 0


def test_the_bound_reaches_the_kernel(emulated):  # noqa: F811
    """The kernel scales fp8 by the activation's bound where long rows would give a larger one.

    Activations then use the whole range of fp8.
    """
    config = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_limit=0.01)
    experts, _ = build(config, SCHEMES["fp8_dynamic"])
    experts(rows(config))
    quant2 = emulated[-1]["quant_scales"][1]
    torch.testing.assert_close(quant2, torch.full_like(quant2, 448 / experts._activation_bound()))
