"""Test that a layer in a checkpoint's own scheme keeps its bytes, and any other layer its values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import Activation, MoEConfig, MoELayer
from ep_moe.checkpoint.formats import find_format
from ep_moe.checkpoint.model_names import names_of
from ep_moe.checkpoint.quantized_experts import _one_half, read_quantized
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.errors import CheckpointError
from ep_moe.quant.schemes import SCHEMES
from ep_moe.quant.weight_formats import Mxfp4
from ep_moe.weights.parts import etp_shard
from tests.fixtures.checkpoint_files import load_one

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS = 256, 128, 3
BLOCK = "model.layers.0.mlp"
# checkpoint -> (family, the scheme that has its bytes)
KINDS = {"fp8": ("deepseek_v3", "fp8_block"), "mxfp4": ("gpt_oss", "mxfp4"), "int4": ("qwen3_moe", "int4_fp8")}


def config(kind: str) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k": 2}
    if kind == "mxfp4":
        return MoEConfig(**sizes, activation=Activation.SWIGLU_CLAMPED, expert_bias=True)
    return MoEConfig(**sizes)


def canonical(kind: str, expert: int) -> dict[str, Tensor]:
    """Return an expert in the checkpoint's scheme, as a user would quantize it."""
    torch.manual_seed(expert)
    tensors = {"w13": torch.randn(2 * INNER, HIDDEN), "w2": torch.randn(HIDDEN, INNER)}
    if kind == "mxfp4":
        tensors |= {"w13_bias": torch.randn(2 * INNER).bfloat16(), "w2_bias": torch.randn(HIDDEN).bfloat16()}
    return SCHEMES[KINDS[kind][1]].quantize(tensors, torch.bfloat16)


def interleaved(rows: Tensor) -> Tensor:
    """Convert [gate; up] to alternating rows."""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


def save(kind: str, folder) -> None:
    """Write a checkpoint by the formats' own definitions, independently of the readers."""
    tensors: dict[str, Tensor] = {}
    experts = [canonical(kind, expert) for expert in range(EXPERTS)]
    if kind == "mxfp4":
        for name, ours in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            order = interleaved if ours == "w13" else torch.clone
            data = torch.stack([order(e[ours]) for e in experts])
            tensors |= {
                f"{BLOCK}.experts.{name}_blocks": data.view(EXPERTS, data.shape[1], -1, 16),
                f"{BLOCK}.experts.{name}_scales": torch.stack([order(e[f"{ours}_scale"]) for e in experts]),
                f"{BLOCK}.experts.{name}_bias": torch.stack([order(e[f"{ours}_bias"]) for e in experts]),
            }
        tensors |= {f"{BLOCK}.router.weight": torch.randn(EXPERTS, HIDDEN)}
    else:
        for number, e in enumerate(experts):
            halves = {"gate_proj": 0, "up_proj": 1}
            for name in ("gate_proj", "up_proj", "down_proj"):
                full = f"{BLOCK}.experts.{number}.{name}.weight"
                data, scale = e["w2"], e["w2_scale"]
                if name in halves:
                    data, scale = (e[part].chunk(2)[halves[name]] for part in ("w13", "w13_scale"))
                if kind == "fp8":
                    tensors |= {full: data.clone(), f"{full}_scale_inv": scale.clone()}
                else:
                    tensors |= {f"{full}_packed": packed_words(data), f"{full}_scale": scale.clone()}
        tensors |= {f"{BLOCK}.gate.weight": torch.randn(EXPERTS, HIDDEN)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def packed_words(data: Tensor) -> Tensor:
    """Pack as compressed-tensors does: number + 8, eight to an int32, from the low bits up."""
    codes = torch.stack([data & 0xF, data >> 4], -1).flatten(-2).long()
    numbers = torch.where(codes > 7, codes - 16, codes) + 8
    words = sum(numbers[..., place::8] << (4 * place) for place in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def load(kind: str, folder, quantization: str) -> MoELayer:
    return load_one(config(kind), folder, quantization, KINDS[kind][0])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_kept(kind, tmp_path):
    save(kind, tmp_path)
    layer = load(kind, tmp_path, KINDS[kind][1])
    for expert in range(EXPERTS):
        for name, tensor in canonical(kind, expert).items():
            found = layer.state_dict()[f"expert_weights.{expert}.{name}"]
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), (expert, name)


def test_gpt_oss_has_the_bytes_of_all_that_weigh_alike(tmp_path):
    save("mxfp4", tmp_path)
    stored = CheckpointSource(tmp_path).matrix(f"{BLOCK}.experts.down_proj")
    alike = [name for name, scheme in SCHEMES.items() if isinstance(scheme.weights, Mxfp4)]
    assert [name for name in SCHEMES if stored.matches_scheme(name)] == alike
    assert alike == ["mxfp4", "mxfp4_fp8", "mxfp4_mxfp8"]


@pytest.mark.parametrize("quantization", ["none", "fp8_block", "fp8_channel", "fp8_dynamic", "mxfp4_fp8", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_kept_in_another_scheme(kind, quantization, tmp_path):
    save(kind, tmp_path)
    layer = load(kind, tmp_path, quantization)
    scheme, stored = SCHEMES[quantization], SCHEMES[KINDS[kind][1]]
    for expert in range(EXPERTS):
        state = layer.expert_weights.gather_slot(layer.expert_weights.slots_of_expert[expert][0])
        for name in ("w13", "w2"):
            numbers = stored.dequantize(canonical(kind, expert), name)
            parts = scheme.weights.quantize(numbers, torch.bfloat16)
            assert torch.equal(scheme.dequantize(state, name), scheme.weights.dequantize(parts))


def test_pieces_of_etp_are_those_of_the_whole_in_another_scheme(tmp_path):
    """Pieces for etp ranks are pieces of the whole expert in another scheme, biases included."""
    save("mxfp4", tmp_path)
    source, of = CheckpointSource(tmp_path), config("mxfp4")
    found = find_format(source, BLOCK, names_of("gpt_oss").experts)
    given = (found, source, BLOCK, of, 1, SCHEMES["fp8_channel"])
    whole = read_quantized(*given, dtype=torch.bfloat16, device=CPU)
    assert whole.keys() == SCHEMES["fp8_channel"].expert(of, torch.bfloat16).keys()
    for rank in range(2):
        piece = read_quantized(*given, dtype=torch.bfloat16, device=CPU, etp=(2, rank))
        for name, tensor in whole.items():
            assert torch.equal(piece[name].float(), etp_shard(of, name, tensor, 2, rank).float()), name


@pytest.mark.parametrize(
    ("name", "quantization", "sentence"),
    [
        ("experts.1.up_proj.weight", "fp8_channel", r"expert 1, w13 .*finite"),
        ("gate.weight", "none", r"gate\.weight .*finite"),
    ],
)
def test_numbers_that_are_not_finite_are_neither_quantised_nor_routed_by(name, quantization, sentence, tmp_path):
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    experts = [(expert, part) for expert in range(EXPERTS) for part in sizes]
    tensors = {f"{BLOCK}.experts.{expert}.{part}.weight": torch.ones(sizes[part]) for expert, part in experts}
    tensors |= {f"{BLOCK}.gate.weight": torch.ones(EXPERTS, HIDDEN)}
    tensors[f"{BLOCK}.{name}"][1, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load("int4", tmp_path, quantization)


def test_static_scales_cannot_come_from_these_checkpoints(tmp_path):
    save("fp8", tmp_path)
    with pytest.raises(CheckpointError, match=r"needs calibrated input scales.*update_expert, or choose fp8_dynamic"):
        load("fp8", tmp_path, "fp8_static")


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_half_a_matrix_that_is_quantized_must_be_finite(wrong):
    """A half of w13 that is quantized must be finite, even if the other half keeps its bytes."""
    scheme = SCHEMES["fp8_channel"]
    codes = scheme.weights.quantize(torch.ones(16, 32), torch.bfloat16)
    numbers = torch.ones(16, 32)
    numbers[3, 5] = wrong
    gate = SimpleNamespace(matches_scheme=lambda name: True, codes=lambda rows: codes)
    matrix = SimpleNamespace(name="up_proj.weight", tensors=SimpleNamespace(location=lambda name: f"file of {name}"))
    up = SimpleNamespace(matches_scheme=lambda name: False, read_values=lambda rows: numbers, matrix=matrix)
    with pytest.raises(CheckpointError, match=r"file of up_proj\.weight .*finite"):
        _one_half(SimpleNamespace(gate=gate, up=up), (0, 16), scheme, torch.bfloat16, torch.device("cpu"))
