"""Test `layouts.base.PerBlock`: one scale per matrix, expanded to blocks and reduced again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.quant.schemes import SCHEMES, Fp8Blocks
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.base import PerBlock
from tests.fixtures.expert_weights import etp_link, stored_weights

CONFIG = MoEConfig(hidden_size=256, intermediate_size=384, num_experts=3, top_k=2)
DYNAMIC = SCHEMES["fp8_dynamic"]
BF16, CPU = torch.bfloat16, torch.device("cpu")


def made(config: MoEConfig = CONFIG, **rank_group) -> ExpertWeights:
    return stored_weights(config, "fp8_dynamic", PerBlock, **rank_group)


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
def test_the_same_numbers_and_back(activation):
    config = dataclasses.replace(CONFIG, activation=activation)
    weights = made(config)
    for expert in range(3):
        given = random_expert(config, DYNAMIC, expert, BF16, CPU)
        weights.update_expert(expert, given)
        for name in ("w13", "w2"):
            stored = {"": getattr(weights, name)[expert], "_scale": getattr(weights, f"{name}_scale")[expert]}
            assert torch.equal(Fp8Blocks().dequantize(stored), DYNAMIC.dequantize(given, name))
        back = weights.slot(expert)
        assert back.keys() == given.keys()
        assert all(torch.equal(back[name], given[name]) for name in given)


def test_each_rank_has_the_blocks_of_its_piece():
    weights = made(etp=etp_link(3, 1))
    assert weights.w13_scale.shape == (3, 2, 2)
    assert weights.w2_scale.shape == (3, 2, 1)
