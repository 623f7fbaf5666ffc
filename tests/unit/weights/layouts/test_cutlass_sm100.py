"""Test weights as the Blackwell kernels of FlashInfer's CUTLASS backend read them: by the inverse, and by indices."""

from __future__ import annotations

import pytest
import torch

from ep_moe import Activation, ExpertMap
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutlass as cutlass_layouts
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES, SM100_SCHEMES, CutlassSm90, CutlassSm100
from ep_moe.weights.parts import etp_shard
from tests.fixtures.cutlass_sm100_preparation import config, same, with_and_without_a_gate

BF16 = torch.bfloat16
SIZES = [(256, 128), (192, 320), (128, 384)]  # the second size leaves tiles of scales half filled
each_scheme = pytest.mark.parametrize("name", SM100_SCHEMES)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@with_and_without_a_gate
@each_scheme
def test_what_is_prepared_comes_back(name, activation, sizes, bias):
    shape, scheme = config(*sizes, activation, bias=bias), SCHEMES[name]
    weight_layout = CutlassSm100(shape, scheme, BF16)
    tensors = random_expert(shape, scheme, 1, BF16)
    stored = weight_layout.prepare(tensors)
    specs = {name: (spec.shape, spec.dtype) for name, spec in weight_layout.specs().items()}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == specs
    assert all(tensor.is_contiguous() for tensor in stored.values())
    same(weight_layout.restore(stored), tensors)


@each_scheme
def test_a_piece_of_an_expert_comes_back(name):
    shape, scheme = config(256, 256), SCHEMES[name]
    whole = random_expert(shape, scheme, 1, BF16)
    weight_layout = CutlassSm100(shape, scheme, BF16, 2)
    for rank in range(2):
        piece = {part: etp_shard(shape, part, tensor, 2, rank) for part, tensor in whole.items()}
        same(weight_layout.restore(weight_layout.prepare(piece)), piece)


def check_every_byte(name: str, activation: Activation, sizes: tuple[int, int]) -> None:
    """Check each byte by cuBLAS' formula for scales, and that up comes before gate."""
    shape, scheme = config(*sizes, activation, bias=True), SCHEMES[name]
    given = random_expert(shape, scheme, 2, BF16)
    stored = CutlassSm100(shape, scheme, BF16).prepare(given)
    inner, rows = shape.intermediate_size, torch.arange(shape.w13_rows)
    canonical = (rows + inner) % (2 * inner) if activation.gated else rows
    assert torch.equal(stored["w13"].view(torch.uint8), given["w13"].view(torch.uint8)[canonical])
    assert torch.equal(stored["w13_bias"], given["w13_bias"][canonical])
    for matrix, order in (("w13", canonical), ("w2", torch.arange(shape.hidden_size))):
        scale = given[f"{matrix}_scale"].view(torch.uint8)[order]
        found, blocks = stored[f"{matrix}_scale"].view(torch.uint8).flatten(), scale.shape[1]
        row, block = torch.arange(len(scale)).unsqueeze(1), torch.arange(blocks)
        tile = row // 128 * -(-blocks // 4) + block // 4
        wanted = torch.zeros_like(found)
        wanted[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scale
        assert torch.equal(found, wanted), f"scales of {matrix} are not where the tensor cores look for them"
    rest = given.keys() - {"w13", "w13_bias", "w13_scale", "w2_scale"}
    same({part: stored[part] for part in rest}, {part: given[part] for part in rest})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@with_and_without_a_gate
@each_scheme
def test_every_byte_is_where_the_tensor_cores_look_for_it(name, activation, sizes):
    check_every_byte(name, activation, sizes)


def test_the_schemes_of_hopper_are_stored_as_before():
    shape = config(256, 128)
    for name in SM90_SCHEMES:
        tensors = random_expert(shape, SCHEMES[name], 0, BF16)
        kinds = (kind(shape, SCHEMES[name], BF16) for kind in (CutlassSm90, CutlassSm100))
        hopper, both = (kind.prepare(tensors) for kind in kinds)
        same(both, hopper)


@each_scheme
def test_a_slot_moves_as_bytes(name):
    """A slot's expert moves with the bytes of all its tensors, [L, ...] each, as EPLB moves it."""
    shape, scheme = config(192, 128), SCHEMES[name]
    weights = ExpertWeights(
        shape, ExpertMap.uneven([4]), dtype=BF16, scheme=scheme, weight_layout=CutlassSm100, trainable=False
    )
    tensors = random_expert(shape, scheme, 3, BF16)
    weights.update_expert(3, tensors)
    for tensor in weights.slot_tensors().values():
        tensor[0].view(-1).view(torch.uint8).copy_(tensor[3].reshape(-1).view(torch.uint8))
    same(weights.slot(0), tensors)


@each_scheme
def test_one_tensor_can_be_updated_alone(name):
    shape, scheme = config(192, 128), SCHEMES[name]
    weights = ExpertWeights(
        shape, ExpertMap.uneven([4]), dtype=BF16, scheme=scheme, weight_layout=CutlassSm100, trainable=False
    )
    first, second = (random_expert(shape, scheme, expert, BF16) for expert in (1, 2))
    weights.update_expert(1, first)
    weights.update_expert(1, {"w13_scale": second["w13_scale"]})
    same(weights.slot(1), first | {"w13_scale": second["w13_scale"]})


def test_scales_that_are_not_swizzled_are_seen(monkeypatch):
    monkeypatch.setattr(cutlass_layouts, "arrange", lambda scales, layout: scales)
    with pytest.raises(AssertionError, match="scales of w13 are not where"):
        check_every_byte("nvfp4", Activation.SWIGLU, (256, 128))
