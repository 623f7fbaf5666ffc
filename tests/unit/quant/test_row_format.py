"""Test rows in the wire formats: how they are rounded and widened."""

import pytest
import torch

from ep_moe import Wire
from ep_moe.errors import ConfigError
from ep_moe.quant.fp8 import round_blocks, round_by, widen_blocks
from ep_moe.quant.row_format import ROW_FORMATS, dequantize_from_wire, quantize_for_wire
from tests.fixtures.helpers import assert_same


def test_every_format_of_the_wire_is_one_of_rows():
    with pytest.raises(ConfigError) as refusal:
        Wire(dispatch="none")
    assert str(refusal.value).partition("one of ")[2].partition(", got")[0].split(", ") == list(ROW_FORMATS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype):
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2], x[3, 130], x[4, 5] = 0, torch.nan, 3e4
    data, scale = round_blocks(x)
    assert (data.dtype, scale.dtype, list(scale.shape)) == (torch.float8_e4m3fn, torch.float32, [7, 3])
    whole, of_rows = quantize_for_wire(x, Wire(dispatch="fp8_row"))
    assert torch.equal(of_rows[:3], x[:3].float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448)
    assert torch.equal(whole[4, 128:].float(), round_by(x[4, 128:], float(of_rows[4])).float()), "small beside 3e4"
    back = widen_blocks(data, scale, torch.float32)
    assert (back[2] == 0).all()
    assert back[3, 128:256].isnan().any()
    assert not back[3, :128].isnan().any()
    fine = torch.ones(7, dtype=torch.bool).index_fill(0, torch.tensor([3]), False)
    error = (back - x.float())[fine].abs().unflatten(1, (3, 128))
    largest = x.float()[fine].abs().unflatten(1, (3, 128))
    # half a unit in the fourth bit, or half of the smallest step, 2**-9, at a range of 448
    assert (error <= torch.maximum(largest * 2**-4, largest.amax(-1, keepdim=True) * 2**-10 / 448) * 1.001).all()


every_wire = pytest.mark.parametrize(
    "wire",
    [Wire(dispatch="fp8_block"), Wire(dispatch="fp8_row"), Wire(dispatch="fp8_tensor", input_scale=0.1),
     Wire(dispatch="mxfp8"), Wire(dispatch="nvfp4", input_scale=0.1)],
    ids=lambda wire: wire.dispatch,
)  # fmt: skip


@every_wire
def test_a_row_has_the_sizes_of_its_format_and_comes_back_in_the_layers_dtype(wire):
    x, form = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)), ROW_FORMATS[wire.dispatch]
    data, scale = quantize_for_wire(x, wire)
    assert (data.dtype, list(data.shape)) == (form.number, [3, form.columns(256)])
    assert (0 if scale is None else scale.shape[1]) == form.scales(256)
    assert scale is None or scale.dtype == form.scale
    for dtype in (torch.float32, torch.bfloat16):
        back = dequantize_from_wire(data, scale, wire, dtype)
        assert (back.dtype, back.shape) == (dtype, x.shape)


# --- where torch makes new tensors elsewhere than on the host by default ---------------------------------------------


@every_wire
def test_rows_of_the_wire(wire):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    expected = dequantize_from_wire(*quantize_for_wire(x, wire), wire, torch.float32)
    with torch.device("meta"):
        assert_same(dequantize_from_wire(*quantize_for_wire(x, wire), wire, torch.float32), expected)
