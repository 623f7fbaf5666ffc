"""Test how a module of experts stores its tensors, in both directions. Each number tells where it was stored."""

import itertools

import pytest
import torch

from ep_moe.checkpoint.formats import Fused
from ep_moe.checkpoint.model_names import ModuleLayout, ParameterLayout, fused_layout

EXPERTS, INNER, HIDDEN = 2, 3, 5
W13 = torch.arange(2 * INNER * HIDDEN).view(2 * INNER, HIDDEN)  # gate above up
W2, W13_BIAS, W2_BIAS = W13[:INNER].T + 100, torch.arange(2 * INNER) + 200, torch.arange(HIDDEN) + 300
CANONICAL = {"w13": W13, "w2": W2, "w13_bias": W13_BIAS, "w2_bias": W2_BIAS}


@pytest.mark.parametrize(("transposed", "interleaved"), itertools.product([False, True], repeat=2))
def test_a_known_familys_module(transposed, interleaved):
    layout = fused_layout(Fused(transposed=transposed, interleaved=interleaved, bias=True), EXPERTS)
    held = layout.from_canonical(CANONICAL)
    turned = torch.tensor([0, 3, 1, 4, 2, 5]) if interleaved else torch.arange(2 * INNER)
    assert torch.equal(held["gate_up_proj"], W13[turned].T if transposed else W13[turned])
    assert torch.equal(held["down_proj"], W2.T if transposed else W2)
    assert torch.equal(held["gate_up_proj_bias"], W13_BIAS[turned])
    assert torch.equal(held["down_proj_bias"], W2_BIAS)
    back = layout.to_canonical(held)
    assert back.keys() == CANONICAL.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in CANONICAL.items())


def test_a_module_of_three_matrices():
    layout = ModuleLayout(
        EXPERTS, tuple(ParameterLayout(name=f"{part}.weight", part=part) for part in ("w1", "w3", "w2"))
    )
    held = layout.from_canonical({"w13": W13, "w2": W2})
    assert torch.equal(held["w1.weight"], W13[:INNER])
    assert torch.equal(held["w3.weight"], W13[INNER:])
    assert torch.equal(layout.to_canonical(held)["w13"], W13)


@pytest.mark.parametrize(("flat", "unused"), [(False, 0), (False, 2), (True, 0)])
def test_all_experts_in_one_parameter(flat, unused):
    one = ParameterLayout(name="w", part="w13", flat=flat, unused=unused)
    stacked = torch.stack([W13, W13 + 1000])
    whole = one.join(stacked)
    assert whole.shape == ((EXPERTS * 2 * INNER, HIDDEN) if flat else (EXPERTS + unused, 2 * INNER, HIDDEN))
    assert not whole[EXPERTS:].any() if unused else True
    assert all(torch.equal(one.expert_slice(whole, expert, EXPERTS), stacked[expert]) for expert in range(EXPERTS))
