"""Test how kernels decode 4-bit codes: the CUDA tables for E4M3 rows, and the scales of INT4 in bf16.

torch's E4M3 is the reference.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ep_moe.experts.hopper import gemm_4bit
from ep_moe.experts.hopper.gemm_grouped_4bit import UNIT
from ep_moe.experts.hopper.numbers_4bit import EXPONENTS, numbers_text
from ep_moe.quant.microscale import dequantize_mxfp4, quantize_mxfp4
from ep_moe.weights.layouts.hopper_4bit import ROW_SCALE, pack_for_e4m3, row_scale

TEXT = numbers_text("numbers_4bit.cu")


def e4m3(words: list[int], size: int) -> torch.Tensor:
    """Return the values of little-endian words of E4M3."""
    found = torch.tensor([list(word.to_bytes(size, "little")) for word in words], dtype=torch.uint8)
    return found.view(torch.float8_e4m3fn).float()


def table() -> torch.Tensor:
    """Return the CUDA source's table as values, [EXPONENTS, 8]."""
    listed = re.search(r"NUMBERS_OF\[EXPONENTS\] = \{(.*?)\};", TEXT, re.DOTALL)
    return e4m3([int(word, 16) for word in re.findall(r"0x[0-9a-f]+(?=ull)", listed[1])], 8)


def test_numbers_of_each_exponent_are_the_nearest():
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for below, row in enumerate(table()):
        exact = codes * 2.0 ** (6 - below)
        assert (row - exact).abs().max() <= (0 if below <= 14 else 2.0**-10), below
    assert len(table()) == EXPONENTS
    assert f"EXPONENTS = {EXPONENTS};" in TEXT
    assert not table()[-1].any()
    assert table()[-2].any()


def test_codes_of_int4():
    above, below = (
        e4m3([int(word, 16) for word in found], 4).flatten().tolist()
        for found in re.findall(r"four_of\((0x\w{8})u, (0x\w{8})u, which\)", TEXT)
    )
    assert above == list(range(8))
    assert below == list(range(-8, 0))


@pytest.mark.parametrize("text", [TEXT, Path(gemm_4bit.__file__).read_text()], ids=["CUDA", "Triton"])
def test_int4_by_its_scale_is_rounded_once(text):
    factor, eight = (
        torch.tensor([int(word, 0) >> 16]).to(torch.int16).view(torch.bfloat16).double()
        for word in re.findall(r"times\(scale, (-?\w+?)u?\)", text)
    )
    scale = torch.randn(4096, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes = torch.arange(-8, 8)
    found = ((codes + 8).double() * 2.0**-133 * (scale.double() * factor) + scale.double() * eight).bfloat16()
    assert torch.equal(found.double() * UNIT, (codes * scale).double()), "as a dequantized checkpoint has it"


def decoded(words: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Decode a row's words and exponents as the CUDA function `numbers` does for E2M1."""
    numbers, largest = table(), int(factor.log2()) + ROW_SCALE
    found = torch.zeros(words.shape[0] * 128)
    for block, row in enumerate(words[:, 0].tolist()):
        for at, word in enumerate(row):
            t, g = at // 4, at % 4
            own = numbers[min(max(largest - int(scale[4 * block + g]), -1) % 2**32, EXPONENTS - 1)]
            for i in range(2):
                for h in range(4):
                    sign = -1 if word << 4 * i >> 8 * h + 7 & 1 else 1
                    found[128 * block + 32 * g + 16 * i + 4 * t + h] = sign * own[word >> 16 * i + 4 * h & 7]
    return found * factor


@pytest.mark.parametrize("spread", [0, 11])
def test_weights_are_what_the_checkpoint_says(spread):
    w = torch.randn(3, 256, generator=torch.Generator().manual_seed(spread))
    w = w * torch.exp2(-torch.arange(8) % (spread + 1)).repeat_interleave(32)
    data, scale = quantize_mxfp4(w)
    factors, expected = row_scale(data, scale), dequantize_mxfp4(data, scale)
    for row in range(3):
        words = pack_for_e4m3(data[row : row + 1])
        assert torch.equal(decoded(words, scale[row], factors[row]), expected[row])
