"""Test the layouts of FlashInfer's TRTLLM kernels, by inverses and by index formulas in the opposite direction.

`tests/emulations/trtllm.py` computes where a row goes, and these tests compute where it comes from.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.trtllm import (
    LAYOUTS,
    Trtllm,
    block_major,
    row_major,
    row_order,
    shuffle_rows,
    unshuffle_rows,
)
from ep_moe.weights.parts import etp_shard
from tests.emulations.trtllm import row_places, scale_places

BF16 = torch.bfloat16
# FlashInfer 0.7.2, flashinfer/utils.py: the destination of each row in a block of 32
ROW_MAP = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]  # noqa: E501  # fmt: skip
each_scheme = pytest.mark.parametrize("name", LAYOUTS)
each_activation = pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)


def expert(name: str, activation: Activation, etp: int = 1) -> tuple[Trtllm, dict[str, Tensor]]:
    config = MoEConfig(
        hidden_size=512, intermediate_size=256 * etp, num_experts=2, top_k=1, activation=activation, expert_bias=True
    )
    tensors = random_expert(config, SCHEMES[name], 0, BF16)
    pieces = {key: etp_shard(config, key, tensor, etp, etp - 1) for key, tensor in tensors.items()}
    return Trtllm(config, SCHEMES[name], BF16, etp), pieces


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


# --- rows and blocks ------------------------------------------------------------------------------------------------


def test_rows_go_where_the_kernels_table_says():
    order = row_order(96, gated=False).tolist()
    for row in range(96):
        assert order[row - row % 32 + ROW_MAP[row % 32]] == row


def test_an_up_row_lies_before_its_gate_row():
    rows = 128
    order = row_order(rows, gated=True).tolist()
    assert sorted(order) == list(range(rows))
    for i in range(rows // 2):
        for canonical, interleaved in ((rows // 2 + i, 2 * i), (i, 2 * i + 1)):
            assert order[interleaved - interleaved % 32 + ROW_MAP[interleaved % 32]] == canonical


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "gated"), [(32, False), (64, True), (160, False), (160, True)])
def test_shuffled_rows_come_back(rows, gated, dtype):
    tensor = torch.arange(rows * 3).view(rows, 3).to(dtype)
    stored = shuffle_rows(tensor, gated=gated)
    assert stored.dtype == dtype
    assert not torch.equal(raw(stored), raw(tensor))
    assert torch.equal(raw(unshuffle_rows(stored, gated=gated)), raw(tensor))


@pytest.mark.parametrize("dtype", [BF16, torch.uint8])
def test_a_block_is_128_bytes_of_each_row(dtype):
    tensor = torch.randint(0, 200, (32, 256)).to(dtype)
    stored, width = block_major(tensor), 128 // dtype.itemsize
    assert stored.shape == (256 // width, 32, width)
    for row, column in ((0, 0), (3, 70), (31, 255), (17, 128)):
        assert stored[column // width, row, column % width] == tensor[row, column]
    assert torch.equal(row_major(stored), tensor)


# --- whole experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etp", [1, 2])
@each_activation
@each_scheme
def test_prepared_tensors_fit_their_specs_and_come_back(name, activation, etp):
    weight_layout, pieces = expert(name, activation, etp)
    stored = weight_layout.prepare(pieces)
    specs = weight_layout.specs()
    assert stored.keys() == specs.keys() == pieces.keys()
    for key, spec in specs.items():
        assert (tuple(stored[key].shape), stored[key].dtype) == (spec.shape, spec.dtype), key
        assert stored[key].is_contiguous(), key
    back = weight_layout.restore(stored)
    for key, tensor in pieces.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(raw(back[key]), raw(tensor)), key


@each_scheme
def test_what_is_given_stays_as_it_was(name):
    weight_layout, pieces = expert(name, Activation.SWIGLU)
    before = {key: tensor.clone() for key, tensor in pieces.items()}
    weight_layout.restore(weight_layout.prepare(pieces))
    for key, tensor in pieces.items():
        assert torch.equal(raw(tensor), raw(before[key])), key


def flashinfers(tensor: Tensor, gated: bool) -> Tensor:
    """Return canonical rows in FlashInfer's order, up first."""
    if not gated:
        return tensor
    half = len(tensor) // 2
    return torch.cat([tensor[half:], tensor[:half]])


@each_activation
@each_scheme
def test_each_number_lies_where_the_kernel_looks(name, activation):
    weight_layout, pieces = expert(name, activation)
    stored, layout = weight_layout.prepare(pieces), LAYOUTS[name]
    for key, tensor in pieces.items():
        if tensor.dim() == 0:
            assert stored[key] is tensor
            continue
        gated = key.startswith("w13") and activation.gated
        wanted, found = flashinfers(tensor, gated), stored[key]
        if layout.blocked and key in ("w13", "w2"):
            found = torch.cat(list(found), 1)
        if layout.swizzled and key.endswith("_scale"):
            found = found.flatten()[scale_places(*found.shape).flatten()].view(found.shape)
        if layout.shuffled:
            places = row_places(len(wanted), gated)
            found = found.view(torch.uint8)[places].view(found.dtype) if found.itemsize == 1 else found[places]
        assert torch.equal(raw(found), raw(wanted.to(found.dtype))), key


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].swizzled])
def test_every_scale_moves_with_its_row(name):
    """A changed scale in one canonical block changes only the stored byte of that block."""
    weight_layout, pieces = expert(name, Activation.SWIGLU)
    for key, row, block in (("w13_scale", 0, 0), ("w13_scale", 300, 5), ("w2_scale", 511, 3)):
        changed = pieces | {key: pieces[key].clone()}
        numbers = changed[key].view(torch.uint8) if changed[key].itemsize == 1 else changed[key].view(torch.int16)
        numbers[row, block] ^= 1
        before, after = (weight_layout.prepare(tensors)[key].view(numbers.dtype) for tensors in (pieces, changed))
        (at,) = (before != after).flatten().nonzero().flatten().tolist()
        gated = key == "w13_scale"
        half = len(before) // 2
        flashinfer_row = (row + half) % (2 * half) if gated else row
        place = int(row_places(len(before), gated)[flashinfer_row])
        assert at == int(scale_places(*before.shape)[place, block])
