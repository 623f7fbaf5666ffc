"""Test E4M3 rows with one scale: their values, and `flashinfer_cutlass` (fp8_static) on such rows.

An emulation of FlashInfer's kernel computes them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import Wire
from ep_moe.experts.flashinfer import call_scales
from ep_moe.quant import fp8
from ep_moe.quant.row_format import dequantize_from_wire, quantize_for_wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, PhysicalIds, Received, WireIds
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES
from tests.fixtures.flashinfer_cutlass import BF16, SLOTS, build, emulated, rows, shape  # noqa: F401 (a fixture)
from tests.fixtures.fp8_tensor_rows import empty_scales, scales_and_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")
E4M3 = torch.float8_e4m3fn
STATIC = SCHEMES["fp8_static"]


@pytest.mark.parametrize("scale", [0.25, 0.0137, 3e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_there_and_back(dtype, scale):
    wire = Wire(dispatch="fp8_tensor", input_scale=scale)
    x = torch.randn(9, 640, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, 640) * 400 * scale
    x[3] = 0
    x = x.clamp(-448 * scale, 448 * scale).to(dtype)
    data, beside = quantize_for_wire(x, wire)
    assert (data.dtype, data.shape, beside) == (E4M3, x.shape, None)
    assert (data.float().abs() < 2**-6).any(), "subnormal numbers are among them"
    back = dequantize_from_wire(data, beside, wire, torch.float32)
    # half a step of a 4-bit significand or of the smallest numbers, 2**-9 apart; plus float32's rounding of x / scale *
    # scale
    limit = torch.maximum(x.float().abs() * 2**-4, torch.tensor(2**-10 * scale)) + x.float().abs() * 2**-23
    assert ((back - x.float()).abs() <= limit).all()
    assert (back[3] == 0).all()
    assert dequantize_from_wire(data, beside, wire, dtype).dtype == dtype
    assert torch.equal(dequantize_from_wire(data, beside, wire, dtype), back.to(dtype))


def test_what_no_number_stands_for():
    wire = Wire(dispatch="fp8_tensor", input_scale=0.5)
    x = torch.tensor([[225.0, 1e30, torch.inf, -225.0, -torch.inf, torch.nan, 224.0]])
    back = dequantize_from_wire(*quantize_for_wire(x, wire), wire, torch.float32)
    assert back[0, :5].tolist() == [224.0] * 3 + [-224.0] * 2
    assert back[0, 5].isnan()
    assert back[0, 6] == 224


def test_a_part_of_a_wider_tensor_and_no_rows():
    wire = Wire(dispatch="fp8_tensor", input_scale=0.5)
    x = torch.randn(5, 64)
    data, _ = quantize_for_wire(x[:, 8:40], wire)
    assert torch.equal(data.float(), quantize_for_wire(x[:, 8:40].contiguous(), wire)[0].float())
    assert quantize_for_wire(x[:0], wire)[0].shape == (0, 64)


def test_the_same_bits_as_rows_that_the_kernels_adapter_rounds():
    x, inputs, w13, w2 = scales_and_rows()
    assert (x.float().abs() > 448 * inputs.first.max()).any(), "some saturate"
    out, wanted, found = torch.empty(x.shape, dtype=E4M3), empty_scales(), empty_scales()
    call_scales.round_rows(x, w13, w2, inputs, out, wanted)
    largest = float(inputs.first.max())
    assert torch.equal(fp8.round_by(x, largest).view(torch.uint8), out.view(torch.uint8))
    call_scales.fill_scales(largest, w13, w2, inputs.second, found)
    for name, value in vars(wanted).items():
        assert torch.equal(getattr(found, name), value), name


# --- flashinfer_cutlass ---------------------------------------------------------------------------------------------


def travelled(received: Received, input_scale: float) -> Received:
    """Round the rows as a transport does before it sends them."""
    wire = Wire(dispatch="fp8_tensor", input_scale=input_scale)
    data, _ = quantize_for_wire(received.x, wire)
    return dataclasses.replace(received, x=data, format=wire.dispatch, input_scale=wire.input_scale)


def largest_of(tensors: list[dict[str, Tensor]]) -> float:
    return max(float(own["w13_input_scale"]) for own in tensors)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [7, 16384])
def test_rows_that_arrive_rounded_give_the_same_bits(chunk, dtype, emulated):  # noqa: F811
    experts, tensors = build(shape(), STATIC, dtype, chunk_rows=chunk)
    y = experts(rows(shape(), dtype))
    plain = [[scale.clone() for scale in call["quant_scales"]] for call in emulated]
    emulated.clear()
    arrived = travelled(rows(shape(), dtype), largest_of(tensors))
    found = experts(arrived)
    assert found.dtype == dtype
    assert torch.equal(found, y)
    assert emulated[0]["input"].data_ptr() == arrived.x.data_ptr(), "read where they lie"
    assert len(emulated) == len(plain) == -(-24 // chunk)
    for call, scales in zip(emulated, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(call["quant_scales"], scales, strict=True))
    assert experts(travelled(rows(shape(), dtype, count=0), 1.0)).shape == (0, 256)


@pytest.mark.parametrize("factor", [0.8, 3.0])
def test_the_scale_that_they_were_divided_by_counts(factor):
    """The kernel uses the scale that the rows were divided by, and not the largest input scale of its slots."""
    experts, tensors = build(shape(), STATIC)
    received, input_scale = rows(shape()), factor * largest_of(tensors)
    arrived = travelled(received, input_scale)
    wire = Wire(dispatch="fp8_tensor", input_scale=input_scale)
    known = dequantize_from_wire(arrived.x, None, wire, torch.float32)
    expected, limit = expected_and_limit(shape(), STATIC, tensors, known, received.local_ids, received.weights, BF16)
    assert max_error_ratio(experts(arrived), expected, limit) <= 1
    wrong = dataclasses.replace(arrived, input_scale=largest_of(tensors))
    assert max_error_ratio(experts(wrong), expected, limit) > 1


def test_ids_as_they_travelled_and_rows_without_an_expert():
    experts, tensors = build(shape(), STATIC)
    received = rows(shape())
    arrived, y = travelled(received, largest_of(tensors)), experts(received)
    ids = torch.where(received.local_ids < 0, 3, received.local_ids + 40)
    assert torch.equal(experts(dataclasses.replace(arrived, local_ids=None, wire_ids=WireIds(PhysicalIds(ids), 40))), y)
    absent = (received.local_ids < 0).all(1, keepdim=True)
    junk = arrived.x.float().masked_fill(absent, torch.nan).to(E4M3)
    assert torch.equal(experts(dataclasses.replace(arrived, x=junk)), y)
    without = dataclasses.replace(arrived, local_ids=LocalIds(torch.full_like(received.local_ids, -1)))
    assert not experts(without).any()


def test_which_schemes_read_them():
    """Only fp8_static reads these rows. Other schemes round by another scale, or do not round."""
    reads = {name for name in SM90_SCHEMES if "fp8_tensor" in build(shape(), SCHEMES[name])[0].row_formats}
    assert reads == {"fp8_static"}
