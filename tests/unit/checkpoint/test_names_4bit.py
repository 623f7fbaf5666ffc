"""Test 4-bit codes as published checkpoints name and arrange them.

Values follow the formats' own definitions, and bytes are kept.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import CheckpointError
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures.checkpoint_files import stored
from tests.fixtures.checkpoint_names import (
    EXPERTS,
    FP8,
    HIDDEN,
    INNER,
    check_numbers,
    expert_numbers,
    int4_experts,
    load_block,
    write_block,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(packed: Tensor) -> Tensor:
    """Return E2M1 values, two per byte, with the even column in the low bits."""
    return torch.stack([E2M1[(packed & 0xF).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)


def compressed_nvfp4(wanted: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator, found = torch.Generator().manual_seed(1), {name: torch.empty_like(t) for name, t in wanted.items()}
    tensors = {}
    for key in wanted:
        for expert in range(EXPERTS):
            rows, columns = wanted[key][expert].shape
            packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
            scale = (1 + 400 * torch.rand(rows, columns // 16, generator=generator)).to(FP8)
            number = torch.tensor([3000.0 + 100 * expert + (key == "down")])
            found[key][expert] = nibbles(packed) * (scale.float() / number).repeat_interleave(16, 1)
            tensors |= {f"experts.{expert}.{key}_proj.{end}": tensor for end, tensor in {
                "weight_packed": packed, "weight_scale": scale, "weight_global_scale": number,
                "input_global_scale": torch.tensor([50.0 + (key == "up")]),
            }.items()}  # fmt: skip
    return tensors, found


@pytest.mark.parametrize("quantization", ["none", "mxfp8", "nvfp4"])
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_nvfp4_of_compressed_tensors(quantization, tmp_path):
    """NVFP4 of compressed-tensors is read. Its global scales are the reciprocals of ModelOpt's."""
    tensors, found = compressed_nvfp4(expert_numbers())
    write_block(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    layer = load_block(tmp_path, quantization=quantization)
    if quantization != "nvfp4":
        return check_numbers(layer, found, rounded=quantization != "none")
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        data = [tensors[f"experts.{expert}.{name}_proj.weight_packed"] for name in ("gate", "up")]
        assert torch.equal(own["w13"], torch.cat(data))
        assert own["w13_global_scale"] == 1 / torch.tensor(3000.0 + 100 * expert)
        assert own["w13_input_scale"] == 1 / torch.tensor(50.0)
        # the reciprocal is rounded by half a unit in the last place, and each product by as much
        down = SCHEMES["nvfp4"].dequantize(own, "w2")
        torch.testing.assert_close(down, found["down"][expert], rtol=3 * 2.0**-24, atol=0)
    return None


def test_a_global_scale_of_0_has_no_reciprocal(tmp_path):
    tensors, _ = compressed_nvfp4(expert_numbers())
    tensors["experts.1.up_proj.weight_global_scale"] = torch.zeros(1)
    write_block(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight_global_scale must be finite and greater"):
        load_block(tmp_path)


@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_in_nvfp4(turned, tmp_path):
    """Fused NVFP4 experts are read as ModelOpt exports Llama-4.

    They are packed along the columns, [E, H / 2, 2I], in either orientation.
    """
    generator, tensors, found = torch.Generator().manual_seed(2), {}, {}
    for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        packed = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scale = torch.rand(EXPERTS, rows, columns // 16, generator=generator).to(FP8)
        found[name] = nibbles(packed) * (scale.float() * 0.25).repeat_interleave(16, 2)
        tensors |= {
            f"experts.{name}_proj": packed.mT if turned else packed,
            f"experts.{name}_proj_weight_scale": scale.mT if turned else scale,
            f"experts.{name}_proj_weight_scale_2": torch.tensor(0.25),
            f"experts.{name}_proj_input_scale": torch.tensor(0.5),
        }
    write_block(tmp_path, tensors, family="llama4_text")
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    for quantization in ("none", "nvfp4"):
        layer = load_block(tmp_path, "llama4_text", quantization)
        check_numbers(layer, found)
    data = tensors["experts.down_proj"][1]
    assert torch.equal(stored(layer, 1)["w2"], data.mT if turned else data)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("quantization", ["none", "mxint4", "mxint4_fp8", "int4", "int4_fp8", "mxfp4"])
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_int4_in_groups(quantization, group, tmp_path):
    """INT4 in groups is read. Kimi-K2-Thinking has groups of 32, whose bytes are those of mxint4."""
    tensors, found = int4_experts(group)
    write_block(tmp_path, tensors, family="deepseek_v3")
    layer = load_block(tmp_path, "deepseek_v3", quantization)
    kept = {"mxint4": 32, "mxint4_fp8": 32, "int4": 128, "int4_fp8": 128}.get(quantization) == group
    check_numbers(layer, found, rounded=quantization != "none" and not kept)
    if kept:
        assert torch.equal(stored(layer, 1)["w2_scale"], tensors["experts.1.down_proj.weight_scale"])


def test_mxfp4_of_compressed_tensors(tmp_path):
    generator, tensors = torch.Generator().manual_seed(3), {}
    found = {name: torch.empty_like(tensor) for name, tensor in expert_numbers().items()}
    for name in found:
        for expert, matrix in enumerate(found[name]):
            packed = torch.randint(0, 256, (len(matrix), matrix.shape[1] // 2), dtype=torch.uint8, generator=generator)
            scale = torch.randint(110, 130, (len(matrix), matrix.shape[1] // 32), generator=generator)
            found[name][expert] = nibbles(packed) * (2.0 ** (scale - 127)).repeat_interleave(32, 1)
            tensors[f"experts.{expert}.{name}_proj.weight_packed"] = packed
            tensors[f"experts.{expert}.{name}_proj.weight_scale"] = scale.to(torch.uint8)
    write_block(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"weight_scale must be factors.*got uint8; bytes are exponents"):
        load_block(tmp_path)
    write_block(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    check_numbers(load_block(tmp_path), found)
    layer = load_block(tmp_path, quantization="mxfp4")
    check_numbers(layer, found)
    assert torch.equal(stored(layer, 1)["w2"], tensors["experts.1.down_proj.weight_packed"])
