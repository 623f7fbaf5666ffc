"""Test the layout of FlashInfer's bf16 mega kernel: its inverse, an index formula, and FlashInfer's function."""

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig
from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaFp8
from ep_moe.quant.schemes import PLAIN
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import MegaBf16, WeightLayout, in_halves, interleave_halves

CONFIG = MoEConfig(hidden_size=8, intermediate_size=128, num_experts=2, top_k=1)


def random_w13() -> torch.Tensor:
    return torch.randn(256, 8, generator=torch.Generator().manual_seed(0))


def test_rows_are_interleaved_and_back():
    w13 = random_w13()
    stored = interleave_halves(w13)
    for row in range(256):
        gate, at = row < 128, row % 128
        assert torch.equal(stored[64 * (at // 32) + at % 32 + (0 if gate else 32)], w13[row])
    assert torch.equal(in_halves(stored), w13)
    assert not torch.equal(stored, w13)


def test_weights_keep_their_canonical_form_outside():
    experts = [{"w13": random_w13() + e, "w2": torch.full((8, 128), float(e))} for e in range(2)]
    held = ExpertWeights(CONFIG, ExpertMap.linear(2, 1), weight_layout=MegaBf16, trainable=False)
    for number, expert in enumerate(experts):
        held.update_expert(number, expert)
        assert torch.equal(held.get_parameter("w13")[number], interleave_halves(expert["w13"]))
        assert all(torch.equal(held.slot(number)[name], tensor) for name, tensor in expert.items())
    state = held.state_dict()
    assert torch.equal(torch.cat([state["1.w1"], state["1.w3"]]), experts[1]["w13"])
    assert {name: spec.shape for name, spec in held.weight_layout.specs().items()} == {"w13": (256, 8), "w2": (8, 128)}
    assert type(held.weight_layout)(CONFIG, PLAIN, torch.float32, 2).specs()["w13"].shape == (128, 8)


def test_the_fp8_kernel_reads_canonical_tensors():
    assert FlashInferMegaFp8.weight_layout is WeightLayout


def test_as_flashinfer_interleaves():
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim.cake_weights import interleave_gate_up

    w13 = random_w13()
    assert torch.equal(interleave_gate_up(w13.unsqueeze(0), 128)[0], interleave_halves(w13))
