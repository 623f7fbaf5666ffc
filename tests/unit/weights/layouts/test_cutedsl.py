"""Test weights as FlashInfer's CuteDSL kernels read them: by the inverse, by indices, and as slots that move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ExpertMap, MoEConfig
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.base import ScaleLayout, arrange
from ep_moe.weights.layouts.cutedsl import CuteDsl, deinterleave, interleave, mma_view
from ep_moe.weights.parts import etp_shard
from tests.fixtures.cutlass_sm100_preparation import config, same, with_and_without_a_gate

BF16, NVFP4 = torch.bfloat16, SCHEMES["nvfp4"]
SIZES = [(256, 128), (128, 320), (384, 64)]


def experts(shape: MoEConfig) -> list[dict[str, Tensor]]:
    return [random_expert(shape, NVFP4, expert, BF16) for expert in range(3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@with_and_without_a_gate
def test_what_is_prepared_comes_back(activation, sizes):
    shape = config(*sizes, activation)
    weight_layout = CuteDsl(shape, NVFP4, BF16)
    for tensors in experts(shape):
        stored = weight_layout.prepare(tensors)
        specs = {name: (spec.shape, spec.dtype) for name, spec in weight_layout.specs().items()}
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == specs
        assert all(tensor.is_contiguous() for tensor in stored.values())
        same(weight_layout.restore(stored), tensors)


def test_a_piece_of_an_expert_comes_back():
    shape = config(256, 256)
    (whole, *_), weight_layout = experts(shape), CuteDsl(shape, NVFP4, BF16, 2)
    for rank in range(2):
        piece = {name: etp_shard(shape, name, tensor, 2, rank) for name, tensor in whole.items()}
        same(weight_layout.restore(weight_layout.prepare(piece)), piece)


def test_sixty_four_rows_of_up_then_of_gate():
    rows = torch.arange(512).unsqueeze(1)
    mixed = interleave(rows)
    wanted = [start + half * 256 + i for start in range(0, 256, 64) for half in (0, 1) for i in range(64)]
    assert mixed.flatten().tolist() == wanted
    assert torch.equal(deinterleave(mixed), rows)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@with_and_without_a_gate
def test_every_byte_is_where_the_kernel_looks_for_it(activation, sizes):
    """Each byte is where the kernel reads it: scales by their six indices, for all slots, and numbers by their row."""
    shape = config(*sizes, activation)
    given = experts(shape)
    weights = ExpertWeights(
        shape, ExpertMap.uneven([3, 1]), dtype=BF16, scheme=NVFP4, weight_layout=CuteDsl, trainable=False
    )
    for expert, tensors in enumerate(given):
        weights.update_expert(expert, tensors)
    inner, row = shape.intermediate_size, torch.arange(shape.w13_rows)
    half = row % 128 < 64  # True for rows of up
    canonical = row // 128 * 64 + row % 64 + torch.where(half, inner, 0) if activation.gated else row
    for name, order in (("w13", canonical), ("w2", torch.arange(shape.hidden_size))):
        data, view = weights.get_parameter(name), mma_view(weights.get_parameter(f"{name}_scale"))
        for slot, tensors in enumerate(given):
            assert torch.equal(data[slot], tensors[name][order])
            scale = tensors[f"{name}_scale"].view(torch.uint8)[order]
            row, block = torch.arange(len(scale)).unsqueeze(1), torch.arange(scale.shape[1])
            found = view[row % 32, row % 128 // 32, row // 128, block % 4, block // 4, slot]
            assert torch.equal(found, scale)


def test_the_view_is_the_mma_layout_of_the_linear_scales():
    scales = torch.randint(0, 256, (3, 256, 12), dtype=torch.uint8)
    view = mma_view(arrange(scales, ScaleLayout.SWIZZLED_128X4))
    wanted = arrange(scales, ScaleLayout.MMA)
    assert torch.equal(view, wanted)
    assert view.stride() == wanted.stride() == (16, 4, 3 * 512, 1, 512, 6 * 512)


def test_a_slot_moves_as_bytes():
    shape = config(256, 128, Activation.SWIGLU)
    weights = ExpertWeights(
        shape, ExpertMap.uneven([4]), dtype=BF16, scheme=NVFP4, weight_layout=CuteDsl, trainable=False
    )
    tensors = random_expert(shape, NVFP4, 3, BF16)
    weights.update_expert(3, tensors)
    before = mma_view(weights.get_parameter("w13_scale"))
    for tensor in weights.slot_tensors().values():
        tensor[0].view(-1).view(torch.uint8).copy_(tensor[3].reshape(-1).view(torch.uint8))
    same(weights.slot(0), tensors)
    assert torch.equal(before[..., 0], before[..., 3]), "views made before see it: they are the stored bytes"
