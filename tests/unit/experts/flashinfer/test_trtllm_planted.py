"""Test that planted errors in `flashinfer_trtllm` are detected."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.flashinfer.trtllm import FlashInferTrtllmExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.layouts import trtllm
from ep_moe.weights.layouts.trtllm import LAYOUTS
from tests.fixtures.trtllm_experts import (  # noqa: F401 (a fixture)
    SLOTS,
    TOP_K,
    before_call,
    build,
    emulated,
    rows,
    shape,
    times_the_limit,
)

each_scheme = pytest.mark.parametrize("name", trtllm_op.ENTRIES)
SHUFFLED = [name for name in LAYOUTS if LAYOUTS[name].shuffled]
SWIZZLED = [name for name in LAYOUTS if LAYOUTS[name].swizzled]
BLOCKED = [name for name in LAYOUTS if LAYOUTS[name].blocked]
CALIBRATED = ("fp8_static", "nvfp4")


def ratio(name: str, config: MoEConfig | None = None) -> float:
    config = config or shape()
    experts, tensors = build(config, name)
    return times_the_limit(experts, tensors, rows(hidden=config.hidden_size))


@each_scheme
def test_nothing_planted(name):
    assert ratio(name) <= 1


# --- in the weights -------------------------------------------------------------------------------------------------


@each_scheme
def test_swapped_halves_are_seen(name, monkeypatch):
    experts, tensors = build(shape(), name)
    for expert, own in enumerate(tensors):
        swapped = {key: t.roll(len(t) // 2, 0) if key.startswith("w13") and t.dim() else t for key, t in own.items()}
        plain = {key: t.view(torch.uint8) if t.itemsize == 1 else t for key, t in own.items()}
        for key, t in plain.items():
            if key.startswith("w13") and t.dim():
                swapped[key] = t.roll(len(t) // 2, 0).view(own[key].dtype)
        experts.weights.update_expert(expert, swapped)
    assert times_the_limit(experts, tensors, rows()) > 1


@pytest.mark.parametrize("name", SHUFFLED)
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
def test_rows_that_are_not_shuffled_are_seen(name, activation, monkeypatch):
    if name == "mxint4" and activation is Activation.RELU2:
        activation = Activation.SWIGLU_CLAMPED
    monkeypatch.setattr(trtllm, "shuffle_rows", lambda tensor, gated: tensor)
    assert ratio(name, shape(activation)) > 1


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_gate_and_an_up_that_are_not_interleaved_are_seen(name, monkeypatch):
    shuffle = trtllm.shuffle_rows
    monkeypatch.setattr(trtllm, "shuffle_rows", lambda tensor, gated: shuffle(tensor, gated=False))
    assert ratio(name) > 1


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_gate_before_its_up_is_seen(name, monkeypatch):
    shuffle = trtllm.shuffle_rows

    def planted(tensor: Tensor, gated: bool) -> Tensor:
        whole = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        rolled = whole.roll(len(whole) // 2, 0).view(tensor.dtype) if gated else tensor
        return shuffle(rolled, gated=gated)

    monkeypatch.setattr(trtllm, "shuffle_rows", planted)
    assert ratio(name) > 1


def test_gate_first_blocks_are_seen(monkeypatch):
    monkeypatch.setattr(trtllm, "swap_halves", lambda tensor: tensor)
    assert ratio("fp8_block") > 1


@pytest.mark.parametrize("name", SWIZZLED)
def test_scales_that_are_not_swizzled_are_seen(name, monkeypatch):
    monkeypatch.setattr(trtllm, "arrange", lambda scales, layout: scales)
    assert ratio(name) > 1


@pytest.mark.parametrize("name", SWIZZLED)
def test_scales_that_stay_while_their_rows_move_are_seen(name, monkeypatch):
    stored = trtllm.Trtllm._stored

    def planted(self, key: str, tensor: Tensor) -> Tensor:
        if not key.endswith("_scale") or not tensor.dim():
            return stored(self, key, tensor)
        return trtllm.arrange(tensor, trtllm.ScaleLayout.SWIZZLED_128X4)

    monkeypatch.setattr(trtllm.Trtllm, "_stored", planted)
    assert ratio(name) > 1


@pytest.mark.parametrize("name", BLOCKED)
def test_rows_that_are_not_in_blocks_are_seen(name, monkeypatch):
    config = dataclasses.replace(shape(inner=512), hidden_size=512)  # two blocks of INT4
    assert ratio(name, config) <= 1
    monkeypatch.setattr(trtllm, "block_major", lambda tensor: tensor.reshape(-1, len(tensor), 128 // tensor.itemsize))
    assert ratio(name, config) > 1


@pytest.mark.parametrize("name", trtllm_op.FP4)
def test_a_bias_in_another_order_is_seen(name, monkeypatch):
    stored = trtllm.Trtllm._stored

    def planted(self, key: str, tensor: Tensor) -> Tensor:
        return tensor.float() if key == "w13_bias" else stored(self, key, tensor)

    assert ratio(name, shape(bias=True)) <= 1
    monkeypatch.setattr(trtllm.Trtllm, "_stored", planted)
    assert ratio(name, shape(bias=True)) > 1


@pytest.mark.parametrize("which", ["w13", "w2"])
@pytest.mark.parametrize("name", [name for name in trtllm_op.ENTRIES if name != "none"])
def test_a_scale_twice_as_large_is_seen(name, which):
    experts, tensors = build(shape(), name)
    stored = experts.weights.get_parameter(f"{which}_scale")
    if stored.dtype == torch.uint8:
        stored.add_(1)  # E8M0: one exponent more
    else:
        stored.copy_((stored.float() * 2).clamp(max=448).to(stored.dtype))
    assert times_the_limit(experts, tensors, rows()) > 1


# --- in derived scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(3), ids=["output1", "gate", "output2"])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
@pytest.mark.parametrize("name", CALIBRATED)
def test_a_wrong_output_scale_is_seen(name, activation, which, monkeypatch):
    output_scales = trtllm_op.output_scales

    def planted(*given):
        found = list(output_scales(*given))
        found[which] = found[which] * 2
        return tuple(found)

    monkeypatch.setattr(trtllm_op, "output_scales", planted)
    assert ratio(name, shape(activation)) > 1


@pytest.mark.parametrize("key", ["w13_global_scale", "w2_global_scale"])
def test_another_experts_global_scale_is_seen(key):
    experts, tensors = build(shape(), "nvfp4")
    stored = experts.weights.get_parameter(key)
    stored.copy_(stored.roll(1, 0))
    assert times_the_limit(experts, tensors, rows()) > 1


@pytest.mark.parametrize("name", CALIBRATED)
def test_each_experts_own_input_scale_for_the_first_product_is_seen(name, monkeypatch):
    """An expert that scales the first product by its own input scale is detected. Rows have one scale, the largest."""
    output_scales = trtllm_op.output_scales

    def planted(scheme, stored, gated):
        first, gate, second = output_scales(scheme, stored, gated)
        share = stored["w13_input_scale"] / stored["w13_input_scale"].amax(0)
        return first * (share if gated else 1), gate * share, second

    experts, tensors = build(shape(), name)
    for expert, own in enumerate(tensors):  # input scales far apart, so that the error exceeds the bound
        own["w13_input_scale"] = own["w13_input_scale"] * (1 + expert % 2)
        experts.weights.update_expert(expert, own)
    assert times_the_limit(experts, tensors, rows()) <= 1
    monkeypatch.setattr(trtllm_op, "output_scales", planted)
    assert times_the_limit(experts, tensors, rows()) > 1


def test_the_gate_left_out_of_a_gated_first_scale_is_seen(monkeypatch):
    output_scales = trtllm_op.output_scales
    monkeypatch.setattr(trtllm_op, "output_scales", lambda scheme, stored, gated: output_scales(scheme, stored, False))
    for name in CALIBRATED:
        assert ratio(name) > 1


# --- in the call ----------------------------------------------------------------------------------------------------

CLAMPED = dataclasses.replace(shape(Activation.SWIGLU_CLAMPED), activation_alpha=3.0)


def times_gate_scale(key: str):
    """Return a change that multiplies a constant by the gate scale.

    The constant is then in units of values where the kernel expects units of code sums, or the opposite.
    """

    def planted(given: dict) -> None:
        factor = given["output1_scale_gate_scalar"]
        given[key] = given[key] * (factor.unsqueeze(1) if given[key].dim() == 2 else factor)

    return planted


def without(key: str):
    return lambda given: given.update({key: None})


def next_expert(given: dict) -> None:
    packed = given["topk_ids"]
    local = (packed >> 16) < SLOTS
    given["topk_ids"] = torch.where(local, ((packed >> 16) + 1) % SLOTS << 16 | packed & 0xFFFF, packed)


def next_rows_weights(given: dict) -> None:
    packed = given["topk_ids"]
    given["topk_ids"] = (packed & ~0xFFFF) | (packed.roll(1, 0) & 0xFFFF)


def next_rows_scale(given: dict) -> None:
    scale = given["hidden_states_scale"]
    raw = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    # fp8_block has transposed scales: float32 [H / 128, T]
    given["hidden_states_scale"] = raw.roll(1, 1 if scale.dtype == torch.float32 else 0).view(scale.dtype)


# planted error -> (change of the call's arguments, schemes, configuration)
IN_THE_CALL = {
    "a bias in units of values": (times_gate_scale("gemm1_bias"), ["nvfp4"], shape(bias=True)),
    **{
        f"no {key}": (without(key), [name for name in trtllm_op.ENTRIES if name != "fp8_static"], CLAMPED)
        for key in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    },
    **{
        f"{key} in units of values": (times_gate_scale(key), ["nvfp4"], shape(Activation.SWIGLU_CLAMPED))
        for key in ("gemm1_beta", "gemm1_clamp_limit")
    },
    "ids that are one off": (next_expert, trtllm_op.ENTRIES, shape()),
    "weights of the next row": (next_rows_weights, ["none"], shape()),
    "row scales of the next row": (next_rows_scale, ["mxfp8", "nvfp4", "mxfp4_mxfp8", "fp8_block"], shape()),
}


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, (_, names, _) in IN_THE_CALL.items() for name in names]
)
def test_a_fault_in_the_call_is_seen(fault, name, monkeypatch):
    change, _, config = IN_THE_CALL[fault]
    before_call(monkeypatch, change)
    assert ratio(name, config) > 1


def turned(given: dict) -> None:
    given["hidden_states_scale"] = given["hidden_states_scale"].T.contiguous()


# planted error -> (change of the call's arguments, schemes, the emulation's error)
REFUSED = {
    # routes without an expert become routes of the last expert
    "an offset of one": (lambda given: given.update(local_expert_offset=1), ["nvfp4"], "one row has an expert twice"),
    "row scales that are not turned": (turned, ["fp8_block"], "hidden_states_scale must have shape"),
    "weights said not to be shuffled": (
        lambda given: given.update(use_shuffled_weight=False), ["none", "mxfp8"], r"BlockMajorK|shuffled",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, (_, names, _) in REFUSED.items() for name in names]
)
def test_a_fault_in_the_call_is_refused(fault, name, monkeypatch):
    change, _, sentence = REFUSED[fault]
    before_call(monkeypatch, change)
    with pytest.raises(AssertionError, match=sentence):
        ratio(name)


PACK = trtllm_op.pack


def packed(bits):
    """Return a `pack` that packs ids correctly, and the weights by `bits`."""

    def planted(ids: Tensor, weights: Tensor, slots: int, out: Tensor) -> None:
        out.copy_(torch.where(ids < 0, slots << 16, (ids << 16) | bits(weights)))

    return planted


# planted error -> (another `pack`, the emulation's error, or None if only the results are wrong)
PACKED = {
    "a route of none names a local expert": (
        lambda ids, weights, slots, out: PACK(ids.clamp(min=0), None, slots, out), "one row has an expert twice",
    ),
    "minus one for a route of none": (
        lambda ids, weights, slots, out: PACK(ids, weights, -1, out), "ids must be in",
    ),
    # not masked; the error depends on where the sign bit lands
    "a weight's sign runs into the id": (packed(lambda w: w.to(torch.bfloat16).view(torch.int16).int()), "."),
    "weights in half precision": (packed(lambda w: w.half().view(torch.int16).int() & 0xFFFF), None),
}  # fmt: skip


@pytest.mark.parametrize("fault", PACKED)
def test_a_fault_in_packed_routes_is_seen(fault, monkeypatch):
    pack, sentence = PACKED[fault]
    monkeypatch.setattr(trtllm_op, "pack", pack)
    if sentence is None:
        assert ratio("none") > 1
        return
    with pytest.raises(AssertionError, match=sentence):
        assert ratio("none") <= 1


@pytest.mark.parametrize("experts", [TOP_K, SLOTS + 1])
def test_a_number_of_experts_that_the_launcher_refuses_is_refused(experts, monkeypatch):
    monkeypatch.setattr(trtllm_op, "expert_count", lambda slots, top_k: experts)
    with pytest.raises(AssertionError, match=r"expert offset and count|divisible by 4"):
        ratio("fp8_block")


def test_a_kernel_of_another_layout_is_seen(monkeypatch):
    monkeypatch.setitem(trtllm.LAYOUTS, "mxfp8", LAYOUTS["fp8_static"])
    assert ratio("mxfp8") > 1


def test_schemes_are_those_of_the_capabilities():
    assert set(LAYOUTS) == set(trtllm_op.ENTRIES) == FlashInferTrtllmExperts.capabilities.schemes
    assert SCHEMES.keys() >= LAYOUTS.keys()
