"""Test the layout of 4-bit weights for Hopper: bytes come back, and numbers are where the kernel expects them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.errors import InputError
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.hopper_4bit import (
    Hopper4Bit,
    Hopper4BitFp8,
    pack,
    pack_for_e4m3,
    row_scale,
    unpack,
    unpack_from_e4m3,
)
from tests.fixtures.expert_weights import etp_link, stored_weights

CONFIG = MoEConfig(
    hidden_size=384, intermediate_size=256, num_experts=3, top_k=2, expert_bias=True, activation=Activation.SWIGLU
)
UNEVEN = dataclasses.replace(CONFIG, hidden_size=320, intermediate_size=192)
BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPES = [("mxfp4", CONFIG), ("mxfp4", UNEVEN), ("nvfp4a16", UNEVEN), ("mxint4", UNEVEN), ("int4", CONFIG)]
SHAPES += [("mxfp4_fp8", CONFIG), ("mxfp4_fp8", UNEVEN), ("mxint4_fp8", UNEVEN), ("int4_fp8", CONFIG)]
each_shape = pytest.mark.parametrize(("scheme", "config"), SHAPES, ids=lambda value: str(value)[:12])


def made(scheme: str, config: MoEConfig, **rank_group) -> ExpertWeights:
    return stored_weights(config, scheme, Hopper4BitFp8 if scheme.endswith("_fp8") else Hopper4Bit, **rank_group)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*as_bytes)


@each_shape
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
def test_bytes_come_back(activation, scheme, config):
    config = dataclasses.replace(config, activation=activation)
    weights = made(scheme, config)
    for expert in range(3):
        given = random_expert(config, SCHEMES[scheme], expert, BF16, CPU)
        weights.update_expert(expert, given)
        back = weights.slot(expert)
        assert back.keys() == given.keys()
        for name in given:
            assert same_bytes(back[name], given[name]), name


@each_shape
def test_state_dict_is_the_published_form(scheme, config):
    given = random_expert(config, SCHEMES[scheme], 1, BF16, CPU)
    weights = made(scheme, config)
    weights.update_expert(1, given)
    state = weights.state_dict()
    assert all(same_bytes(state[f"1.{name}"], tensor) for name, tensor in given.items())
    other = made(scheme, config)
    other.load_state_dict(state)
    for name, tensor in weights.stored_tensors().items():
        assert same_bytes(tensor, other.stored_tensors()[name]), name


@each_shape
def test_scales_are_held_in_no_more_words_than_they_fill(scheme, config):
    """Scales take no more words than they fill, including those that pad a block of 128 columns."""
    weights = made(scheme, config)
    given = random_expert(config, SCHEMES[scheme], 0, BF16, CPU)["w2_scale"]
    group = config.intermediate_size // given.shape[1]
    filled = -(-config.intermediate_size // 128) * (128 // group) * given.element_size()
    held = weights.stored_tensors()["w2_scale"]
    assert held[0].nbytes == config.hidden_size * -(-filled // 4) * 4


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("columns", [128, 320])
def test_every_code_comes_back(columns, int4):
    data = torch.randint(256, (16, columns // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack(data, int4=int4)
    assert words.shape == (-(-columns // 128), 16, 16)
    assert torch.equal(unpack(words, columns, int4=int4), data)


@pytest.mark.parametrize("column", [0, 1, 9, 34, 127, 128, 255])
def test_where_a_column_lies(column):
    """Each column is in one place, as the module documents. INT4 codes are shifted by 8, those of the padding too."""
    data = torch.zeros(2, 128, dtype=torch.uint8)
    data[1, column // 2] = 5 << column % 2 * 4
    within = column % 128
    g, i, t, h = within // 32, within // 8 % 4, within // 2 % 4, within % 2
    expected = torch.full((2, 2, 16), 0x8888, dtype=torch.int64)
    expected |= expected << 16
    expected[column // 128, 1, 4 * t + g] ^= 5 << 4 * i + 16 * h
    assert torch.equal(pack(data, int4=True).long() & 0xFFFFFFFF, expected)


def test_codes_of_e2m1_are_bf16_after_a_shift():
    """E2M1 codes become bf16 after a shift, for the first three of four.

    The fourth uses the bits that they leave free.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for code in range(16):
        for i in range(4):
            data = torch.zeros(1, 64, dtype=torch.uint8)
            data[0, 4 * i] = code
            half = int(pack(data, int4=False)[0, 0, 0])
            last = half << 1 & 0x8000 | half >> 3 & 0x0180 | half >> 7 & 0x0040
            bits = half << 3 * i & 0x81C0 if i < 3 else last
            number = torch.tensor([bits << 16], dtype=torch.int64).to(torch.int32).view(torch.float32)
            assert float(number) * 2.0**126 == float(values[code % 8]) * (-1 if code > 7 else 1), (code, i)


@pytest.mark.parametrize("columns", [128, 320])
def test_every_code_comes_back_from_the_order_of_e4m3(columns):
    data = torch.randint(256, (16, columns // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack_for_e4m3(data)
    assert words.shape == (-(-columns // 128), 16, 16)
    assert torch.equal(unpack_from_e4m3(words, columns), data)


@pytest.mark.parametrize("column", [0, 1, 6, 9, 16, 34, 63, 127, 128, 255])
def test_where_a_column_lies_in_the_order_of_e4m3(column):
    """In the order for E4M3, three bits of each code are where one instruction looks up four codes.

    The sign is where a shift by 4 i makes it the first bit of a byte.
    """
    data = torch.zeros(2, 128, dtype=torch.uint8)
    data[1, column // 2] = 13 << column % 2 * 4
    within = column % 128
    g, i, t, h = within // 32, within // 16 % 2, within // 4 % 4, within % 4
    expected = torch.zeros(2, 2, 16, dtype=torch.int64)
    expected[column // 128, 1, 4 * t + g] = 5 << 16 * i + 4 * h | 0x80 << 8 * h >> 4 * i
    assert torch.equal(pack_for_e4m3(data).long() & 0xFFFFFFFF, expected)


def test_the_largest_exponent_of_a_row_is_of_numbers_that_are_not_zero():
    data, scale = torch.full((4, 64), 0x77, dtype=torch.uint8), torch.full((4, 4), 120, dtype=torch.uint8)
    scale[1, 2], scale[2, 3], scale[3] = 125, 250, 0
    data[2, 48:] = 0x80  # zeros, one of them negative
    assert row_scale(data, scale).tolist() == [2.0**-13, 2.0**-8, 2.0**-13, 2.0**-126]


def test_each_rank_has_the_blocks_of_its_piece():
    weights = made("mxfp4", CONFIG, etp=etp_link(4, 1))
    assert weights.w13.shape == (3, 3, 128, 16)
    assert weights.w2.shape == (3, 1, 384, 16)
    assert weights.w2_scale.shape == (3, 1, 1, 384)


@pytest.mark.parametrize(("scheme", "value", "match"), [
    ("mxfp4", 161, "w13_scale must have exponents of at most 160 .* got others at 2 of"),
    ("mxfp4", 255, "exponents of at most 160"), ("nvfp4a16", 127, "scales that are numbers .* got others at 2 of"),
    ("int4", 0x7F, "scales of at most 2 .. 26 .* got others at"), ("mxint4", 0x60, "scales of at most 2 .. 26"),
])  # fmt: skip
def test_scales_that_the_kernel_would_take_for_others_are_refused(scheme, value, match):
    given = random_expert(CONFIG, SCHEMES[scheme], 0, BF16, CPU)
    given["w13_scale"].view(torch.uint8)[3, 1:3] = value
    with pytest.raises(InputError, match=match):
        made(scheme, CONFIG).write([0], given)
    if scheme != "nvfp4a16":
        given["w13_scale"][3] = 160 if scheme == "mxfp4" else -(2.0**26)
        made(scheme, CONFIG).write([0], given)
