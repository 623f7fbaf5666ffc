"""Gate and up of a quantized expert become one matrix of the same numbers."""

import warnings

import pytest
import torch

from ep_moe.checkpoint.halves import join_halves
from ep_moe.quant.microscale import dequantize_nvfp4, e2m1_codes, pack_nibbles

ONE = torch.tensor(1.0)


def fp8(numbers, factor):
    return {"": (numbers / factor).to(torch.float8_e4m3fn), "_scale": factor}


def nvfp4(numbers, factor):
    """With scales of 1 for each 16 columns."""
    codes = pack_nibbles(e2m1_codes(numbers / factor))
    scale = torch.ones(len(numbers), numbers.shape[1] // 16).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale, "_global_scale": factor}


def decoded(parts):
    if "_global_scale" in parts:
        return dequantize_nvfp4(parts[""], parts["_scale"], parts["_global_scale"])
    return parts[""].float() * parts["_scale"]


@pytest.mark.parametrize("kind", [fp8, nvfp4], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.5), (0.5, 2.0)], ids=str)
def test_halves_of_two_scales_are_of_the_larger_one(kind, factors):
    """Numbers that both scales hold come back as they were; equal scales keep the bytes, and warn of nothing."""
    numbers = torch.tensor([0.0, 1.0, -2.0, 3.0]).repeat(2, 3, 8)
    numbers[1] = numbers[1].flip(1)
    gate, up = (kind(half * factor, ONE * factor) for half, factor in zip(numbers, factors, strict=True))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        w13 = join_halves(gate, up)
    expected = torch.cat([half * factor for half, factor in zip(numbers, factors, strict=True)])
    assert torch.equal(decoded(w13), expected)
    assert w13["_global_scale" if kind is nvfp4 else "_scale"] == max(factors)
    assert len(said) == (factors[0] != factors[1])
    for name, tensor in w13.items():
        if tensor.dim() and factors[0] == factors[1]:
            bytes_of = [part[name].view(torch.uint8) for part in (gate, up)]
            assert torch.equal(tensor.view(torch.uint8), torch.cat(bytes_of))


def test_a_scale_for_each_row_or_block_stays_with_its_half():
    gate, up = ({"": torch.full((4, 6), n).to(torch.float8_e4m3fn), "_scale": torch.full((4,), n)} for n in (1.0, 2.0))
    w13 = join_halves(gate, up)
    assert w13[""].float()[:, 0].tolist() == w13["_scale"].tolist() == [1.0] * 4 + [2.0] * 4
