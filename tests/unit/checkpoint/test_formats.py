"""Test an expert's tensors in each layout of a checkpoint. Each number tells where it was stored."""

import pytest
import torch
from safetensors.torch import save_file

from ep_moe import MoEConfig
from ep_moe.checkpoint.formats import Fused, PerExpert
from ep_moe.checkpoint.source import SINGLE, CheckpointSource, MemorySource

EXPERTS, INNER, HIDDEN = 3, 4, 5
CONFIG = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, top_k=1, expert_bias=True)
GATE = torch.arange(EXPERTS * INNER).view(EXPERTS, INNER).float()  # [E, I]
UP, DOWN = GATE + 100, torch.arange(EXPERTS * HIDDEN).view(EXPERTS, HIDDEN).float() - 50


@pytest.mark.parametrize("inner", [(0, INNER), (1, 3)], ids=["whole", "cut"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_biases_of_experts_in_one_tensor(tmp_path, interleaved, inner):
    both = torch.stack([GATE, UP], 2).flatten(1) if interleaved else torch.cat([GATE, UP], 1)
    stored = {"block.experts.gate_up_proj_bias": both, "block.experts.down_proj_bias": DOWN}
    save_file(stored, tmp_path / SINGLE)
    form = Fused(interleaved=interleaved, bias=True)
    for expert in range(EXPERTS):
        found = form.biases(CheckpointSource(tmp_path), "block", CONFIG, expert, inner)
        rows = slice(*inner)
        assert torch.equal(found["w13_bias"], torch.cat([GATE[expert, rows], UP[expert, rows]]))
        assert torch.equal(found["w2_bias"], DOWN[expert])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_in_one_tensor_have_the_shapes_of_the_layer(interleaved, transposed):
    both, down = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    found = Fused(transposed=transposed, interleaved=interleaved).shapes(CONFIG)
    turned = [(one[0], one[2], one[1]) if transposed else one for one in (both, down)]
    assert list(found.values()) == turned
    biases = Fused(transposed=transposed, interleaved=interleaved, bias=True).shapes(CONFIG)
    assert biases == found | {
        "experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
        "experts.down_proj_bias": (EXPERTS, HIDDEN),
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_that_is_missing_are_named(transposed):
    source = MemorySource({"block.experts.down_proj": torch.ones(EXPERTS, HIDDEN, INNER)}, "here")
    wrong = Fused(transposed=transposed).unreadable_reason(source, "block", CONFIG)
    assert wrong.startswith("block.experts.gate_up_proj is missing")


def test_experts_of_their_own_have_the_shapes_of_the_layer():
    names = [f"experts.{{e}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    found = PerExpert(*names).shapes(CONFIG)
    for expert in range(EXPERTS):
        shapes = [found[name.format(e=expert)] for name in names]
        assert shapes == [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    assert len(found) == 3 * EXPERTS
