"""Test block-scaled formats against independent formulas: codes by definition, and rounding by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ep_moe.quant import microscale
from ep_moe.quant.microscale import (
    MX_BLOCK,
    NVFP4_BLOCK,
    NVFP4_RANGE,
    dequantize_int4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    e2m1_codes,
    quantize_int4,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    rescale_nvfp4,
)

FP8 = torch.float8_e4m3fn
F32 = np.float32


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Return a number from its bits as IEEE 754 defines it, without infinities."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))


E2M1 = np.array([minifloat(code, 2, 1, 1) for code in range(16)])
E4M3 = np.array([minifloat(code, 4, 3, 7) for code in range(127)])  # the positive numbers; code 127 is NaN


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return codes of the nearest magnitudes in a sorted table; ties go to the even code, and overflow to the last."""
    distance = np.abs(np.abs(values)[..., None].astype(np.float64) - table)
    odd = np.arange(len(table)) % 2
    return np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=-1)[..., 0]


def nibbles(packed: Tensor) -> np.ndarray:
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.int64)
    codes[..., 0::2], codes[..., 1::2] = packed.numpy() & 15, packed.numpy() >> 4
    return codes


def every_bfloat16() -> Tensor:
    """Return all finite bfloat16 numbers of either sign."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    return every[every.isfinite()]


def shuffled(values: Tensor, block: int, seed: int = 0) -> Tensor:
    """Return [rows, 4 * block] with as many of the values as fit, in random order."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    return values[order][: len(values) // (4 * block) * 4 * block].view(-1, 4 * block)


def rows(block: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes = torch.exp2(torch.randint(-40, 41, (64, 4), generator=generator).float()).repeat_interleave(block, 1)
    every = every_bfloat16()
    ordinary = every[(every.abs() < 2.0**16) & (every.abs() > 2.0**-24)]
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties = torch.cat([midpoints, -midpoints]).repeat(4 * block // 16).repeat(9, 1)
    return {
        "normal": normal(64, 4 * block),
        "sizes by block": normal(64, 4 * block) * sizes,
        "ties": ties * torch.exp2(torch.arange(-4, 5).float())[:, None],
        "all of bfloat16": shuffled(every, block),
        "neighbours": ordinary.sort().values[: len(ordinary) // (4 * block) * 4 * block].view(-1, 4 * block),
        "zeros": torch.zeros(2, 4 * block),
        "negative zeros": -torch.zeros(2, 4 * block),
        "one number": torch.eye(4 * block) * -3.3,
        "tiny": normal(8, 4 * block) * 2.0**-130,
        "huge": normal(8, 4 * block).clamp(-3, 3) * 2.0**125,
    }


def case(block: int):
    found = rows(block)
    return pytest.mark.parametrize("x", found.values(), ids=found)


# --- E2M1 and its packing -------------------------------------------------------------------------------------------


def test_e2m1_is_the_nearest_with_ties_to_even():
    steps = torch.cat([torch.linspace(-7, 7, 28001), every_bfloat16(), torch.tensor([float("inf"), -float("inf")])])
    beside = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.cat([torch.nextafter(beside, torch.tensor(0.0)), beside, torch.nextafter(beside, torch.tensor(9.0))])
    values = torch.cat([steps, beside, -beside])
    codes = nearest(values.clamp(-8, 8).numpy(), E2M1[:8]) + 8 * np.signbit(values.numpy())
    assert np.array_equal(e2m1_codes(values).numpy(), codes)


def test_every_byte_is_its_two_numbers():
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    found = microscale.e2m1_values(packed)
    wanted = E2M1[nibbles(packed)]
    assert np.array_equal(found.numpy(), wanted)
    assert np.array_equal(np.signbit(found.numpy()), np.signbit(wanted))  # -0 and 0 have different codes
    assert torch.equal(microscale.pack_nibbles(microscale.unpack_nibbles(packed)), packed)


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def nvfp4_by_hand(x: Tensor, global_scale: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return NVFP4 codes [..., c] and scale codes, by FlashInfer's formula in numpy's float32.

    Rounding is by brute force.
    """
    with np.errstate(all="ignore"):
        blocks = x.numpy().astype(F32).reshape(*x.shape[:-1], -1, NVFP4_BLOCK)
        encode = F32(1) / global_scale.numpy().astype(F32)
        wanted = encode * (np.abs(blocks).max(-1) * F32(1 / 6))
        codes = nearest(np.minimum(wanted, F32(448)), E4M3)
        scale = E4M3[codes].astype(F32)
        factor = np.where(codes == 0, F32(0), F32(1) / (scale * (F32(1) / encode)))
        scaled = blocks * factor[..., None]
    magnitude = nearest(np.minimum(np.abs(scaled), F32(8)), E2M1[:8])
    return (magnitude + 8 * np.signbit(scaled)).reshape(x.shape), codes


@pytest.mark.parametrize("of", ["amax", 1.0, 2.0**-11, 0.0037])
@case(NVFP4_BLOCK)
def test_nvfp4_by_brute_force(x, of):
    """NVFP4 equals brute force, with the matrix's own global scale and with given ones.

    Some blocks exceed a given scale, and others do not use all of it.
    """
    amax = x.abs().max() / NVFP4_RANGE
    global_scale = torch.tensor(of) if of != "amax" else torch.where(amax >= 2.0**-120, amax, 1.0)
    data, scale = quantize_nvfp4(x, global_scale)
    assert (data.dtype, data.shape) == (torch.uint8, (len(x), x.shape[1] // 2))
    assert (scale.dtype, scale.shape) == (FP8, (len(x), x.shape[1] // 16))
    codes, scale_codes = nvfp4_by_hand(x, global_scale)
    assert np.array_equal(scale.view(torch.uint8).numpy(), scale_codes)
    assert np.array_equal(nibbles(data), codes)
    back = dequantize_nvfp4(data, scale, global_scale)
    factor = E4M3[scale_codes].astype(F32) * global_scale.numpy()
    assert np.array_equal(back.numpy(), E2M1[codes].astype(F32) * np.repeat(factor, 16, -1))


def test_nvfp4_scale_is_the_nearest_of_the_exact_quotient():
    """An NVFP4 scale is the nearest to amax / (6 * global_scale) for every amax, if the global scale is a power of two.

    No bit is lost, also if the quotient is halfway between two scales.
    """
    every = every_bfloat16()
    amax = every[(every >= 2.0**-9) & (every <= 448 * 6)]
    x = amax[:, None] * torch.tensor([0.0] * 15 + [-1.0])
    sixths = nearest(amax.numpy(), 6 * E4M3)
    assert np.array_equal(quantize_nvfp4(x, 1.0)[1].view(torch.uint8)[:, 0].numpy(), sixths)
    assert np.array_equal(quantize_nvfp4(x / 32, 1 / 32)[1].view(torch.uint8)[:, 0].numpy(), sixths)
    ties = np.isin(amax.numpy() / 6, (E4M3[1:] + E4M3[:-1]) / 2)
    assert ties.sum() > 20


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (2, 3, 1)], ids=str)
def test_nvfp4_global_scales_by_matrix_or_row(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 64, generator=generator)
    global_scale = torch.rand(shape, generator=generator) + 0.001
    data, scale = quantize_nvfp4(x, global_scale)
    back = dequantize_nvfp4(data, scale, global_scale)
    for one in range(2):
        for row in range(3):
            own = global_scale.expand(2, 3, 1)[one, row, 0] if shape else global_scale
            alone = quantize_nvfp4(x[one, row], own)
            assert torch.equal(data[one, row], alone[0])
            assert torch.equal(scale[one, row].view(torch.uint8), alone[1].view(torch.uint8))
            assert torch.equal(back[one, row], dequantize_nvfp4(*alone, own))


def test_nvfp4_keeps_its_own_numbers():
    """Quantizing an NVFP4 matrix again gives the same bytes.

    Exception: below 2**-6, E4M3 is too coarse for a block's largest number to be 6 times its scale.
    """
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * torch.exp2(torch.arange(-32, 32.0))[:, None]
    global_scale = x.abs().max() / NVFP4_RANGE
    data, scale = quantize_nvfp4(x, global_scale)
    again, scale_again = quantize_nvfp4(dequantize_nvfp4(data, scale, global_scale), global_scale)
    kept = scale.float() >= 2.0**-6
    assert 0.1 < kept.float().mean() < 0.9
    assert torch.equal(again.unflatten(1, (-1, 8))[kept], data.unflatten(1, (-1, 8))[kept])
    assert torch.equal(scale_again.float()[kept], scale.float()[kept])
    zeros = nibbles(data).reshape(64, -1, 16)[(scale.float() == 0).numpy()]
    assert len(zeros) > 0
    assert (zeros % 8 == 0).all()


def test_nvfp4_under_a_larger_global_scale_are_the_same_numbers():
    """`rescale_nvfp4` keeps the values under a larger global scale, as exactly as block scales can represent.

    Here the new scale is a power of two times the old one.
    """
    data, scale = quantize_nvfp4(torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), torch.tensor(0.01))
    assert bool((scale.float() >= 2.0**-4).all())
    larger = torch.tensor(0.04)
    again, scale_again = rescale_nvfp4(data, scale, torch.tensor(0.01), larger)
    assert torch.equal(scale_again.float(), scale.float() / 4)
    assert torch.equal(dequantize_nvfp4(again, scale_again, larger), dequantize_nvfp4(data, scale, torch.tensor(0.01)))


# --- MXFP8 ----------------------------------------------------------------------------------------------------------


@case(MX_BLOCK)
def test_mxfp8_by_brute_force(x):
    data, scale = quantize_mxfp8(x)
    assert (data.dtype, data.shape) == (FP8, x.shape)
    assert (scale.dtype, scale.shape) == (torch.uint8, (len(x), x.shape[1] // 32))
    blocks = x.numpy().astype(np.float64).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(-1)
    wanted = amax.astype(F32) * F32(1 / 448)
    # the smallest exponent that suffices
    exponent = np.select([wanted <= 2.0**e for e in range(-126, 127)], range(-126, 127))
    none = wanted < 2.0**-126
    assert np.array_equal(scale.numpy(), np.where(none, 0, exponent + 127))
    scaled = np.where(none[..., None], 0, blocks / 2.0 ** exponent[..., None])
    codes = (nearest(scaled, E4M3) + 128 * np.signbit(scaled)).reshape(x.shape)
    found = data.view(torch.uint8).numpy()
    assert np.array_equal(np.where(none.repeat(32, -1), found & 127, found), codes)
    back = dequantize_mxfp8(data, scale)
    signed = E4M3[codes & 127] * np.where(codes & 128, -1, 1)
    with np.errstate(over="ignore"):  # the largest float32 may round up to 2**128
        assert np.array_equal(back.numpy(), (signed * 2.0 ** (scale.numpy().repeat(32, -1) - 127.0)).astype(F32))


def test_mxfp8_exponent_is_that_of_the_exact_quotient():
    """The MXFP8 exponent is the smallest with 2**e at least amax / 448, for every amax. 448 itself gets scale 1."""
    every = every_bfloat16()
    amax = every[every >= 448 * 2.0**-126]
    x = amax[:, None] * torch.tensor([0.0] * 31 + [-1.0])
    scale = 2.0 ** (quantize_mxfp8(x)[1][:, 0].double() - 127)
    assert (448 * scale >= amax.double()).all()
    assert (448 * scale / 2 < amax.double()).all()
    assert (quantize_mxfp8(x)[0][:, -1].float() >= -448).all()


# --- INT4 and MXFP4 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["normal", "sizes by block", "zeros", "one number", "tiny", "huge"])
def test_mxint4_by_its_definition(name):
    x = rows(MX_BLOCK)[name]
    data, scale = quantize_int4(x, MX_BLOCK)
    assert (data.shape, scale.shape, scale.dtype) == ((len(x), 64), (len(x), 4), torch.bfloat16)
    blocks = x.double().view(len(x), 4, 32)
    amax = blocks.abs().amax(-1)
    used = amax / 7 >= 2.0**-126
    assert torch.equal(scale.double(), torch.where(used, amax.float() / 7, 1.0).bfloat16().double())
    codes = torch.tensor([c - 16 if c > 7 else c for c in nibbles(data).flatten().tolist()]).view(blocks.shape)
    assert (
        (codes * scale.double()[..., None] - blocks).abs() <= scale.double()[..., None] * 0.5 * (1 + 2.0**-20)
    ).all()
    assert torch.equal(dequantize_int4(data, scale).double(), (codes * scale.double()[..., None]).flatten(1))


def test_mxfp4_takes_the_largest_exponent_rounded_down():
    """MXFP4 rounds the largest exponent down, by the OCP rule. FlashInfer rounds differently for activations.

    Numbers between 6 and 8 times the scale saturate.
    """
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([7.9, 6.0, 4.0])
    data, scale = quantize_mxfp4(x)
    assert scale[:, 0].tolist() == [127, 127, 127]
    assert nibbles(data)[:, 0].tolist() == [7, 7, 6]


def test_the_power_of_two_above_is_the_least_that_is_not_below():
    powers = torch.tensor(2.0).pow(torch.arange(-126, 127))
    above, below = (torch.nextafter(powers, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    assert torch.equal(microscale.power_of_two_above(powers), powers)
    assert torch.equal(microscale.power_of_two_above(above), 2 * powers)
    assert torch.equal(microscale.power_of_two_above(1.5 * powers), 2 * powers)
    assert torch.equal(microscale.power_of_two_above(below[1:]), powers[1:])
