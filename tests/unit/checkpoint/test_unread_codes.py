"""Test that unsupported quantizations are refused by name, and that config.json tells what tensors do not."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from ep_moe import CheckpointError
from tests.fixtures import packed_codes
from tests.fixtures.checkpoint_names import (
    BLOCK_NAMES,
    EXPERTS,
    HIDDEN,
    INNER,
    check_numbers,
    each_matrix,
    expert_numbers,
    int4_experts,
    load_block,
    write_block,
)


def awq(matrix: Tensor) -> dict[str, Tensor]:
    rows, columns = matrix.shape
    return {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(columns // 128, rows // 8, dtype=torch.int32),
        "scales": torch.ones(columns // 128, rows, dtype=torch.float16),
    }


def gptq(matrix: Tensor) -> dict[str, Tensor]:
    rows, columns = matrix.shape
    words = torch.zeros(columns // 8, rows, dtype=torch.int32)
    return awq(matrix) | {"qweight": words, "g_idx": torch.arange(columns, dtype=torch.int32)}


def bitsandbytes(matrix: Tensor) -> dict[str, Tensor]:
    return {
        "weight": torch.zeros(matrix.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(matrix.numel() // 64),
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
    }


def int8(matrix: Tensor) -> dict[str, Tensor]:
    return {"weight": matrix.to(torch.int8), "SCB": torch.ones(len(matrix))}


def hqq(matrix: Tensor) -> dict[str, Tensor]:
    return {"W_q": torch.zeros(8, 8, dtype=torch.uint8), "scale": torch.ones(8, 1), "zero": torch.ones(8, 1)}


@pytest.mark.parametrize(
    ("make", "stated", "called"),
    [
        (gptq, {"quant_method": "auto-round"}, "AutoRound"),
        (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes \(4 bits\)"),
        (int8, None, r"bitsandbytes \(LLM\.int8\)"),
        (hqq, {"quant_method": "hqq"}, "HQQ"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_other_quantisations_are_named(family, make, stated, called, tmp_path):
    write_block(tmp_path, each_matrix(expert_numbers(), make, family), stated, family)
    block = BLOCK_NAMES[family]
    sentence = rf"{block}\S* is quantized by {called}.*is not read: .* is there; dequantize the checkpoint to bf16"
    with pytest.raises(CheckpointError, match=sentence):
        load_block(tmp_path, family)


@pytest.mark.parametrize("make", [awq, gptq])
def test_awq_and_gptq_are_read_as_config_json_says(make, tmp_path):
    write_block(tmp_path, each_matrix(expert_numbers(), make, "mixtral"), None, "mixtral")
    with pytest.raises(CheckpointError, match=r"is quantized by AWQ or GPTQ, and config\.json does not state which"):
        load_block(tmp_path, "mixtral")


@pytest.mark.parametrize(("make", "stated"), [(packed_codes.awq, "awq"), (packed_codes.gptq, "gptq")])
def test_awq_and_gptq_of_a_known_family(make, stated, tmp_path):
    generator, tensors = torch.Generator().manual_seed(3), {}
    found = {name: torch.empty_like(tensor) for name, tensor in expert_numbers().items()}
    for name in found:
        for expert, matrix in enumerate(found[name]):
            parts, found[name][expert] = make(*matrix.shape, generator, group=32)
            tensors |= {f"experts.{expert}.{name}_proj.{end}": part.contiguous() for end, part in parts.items()}
    write_block(tmp_path, tensors, {"quant_method": stated, "bits": 4, "group_size": 32})
    check_numbers(load_block(tmp_path), found)


def int8_channels(matrix: Tensor) -> dict[str, Tensor]:
    return {"weight": matrix.to(torch.int8), "weight_scale": torch.ones(len(matrix), 1)}


@pytest.mark.parametrize("quantization", ["none", "fp8_dynamic"])
def test_codes_that_nothing_is_known_of(quantization, tmp_path):
    how = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    write_block(tmp_path, each_matrix(expert_numbers(), int8_channels), how)
    sentence = (
        r"must be bfloat16 or .*, got int8, codes of a quantization that is not read; config\.json states .*int-q"
    )
    with pytest.raises(CheckpointError, match=sentence):
        load_block(tmp_path, quantization=quantization)
    write_block(
        tmp_path, each_matrix(expert_numbers(), lambda matrix: {"strange": matrix.clone()}), {"quant_method": "strange"}
    )
    with pytest.raises(CheckpointError, match=r"is missing; config\.json states the quantization 'strange'; dequan"):
        load_block(tmp_path, quantization=quantization)


def test_mlx_is_named(tmp_path):
    parts = {"weight": torch.zeros(EXPERTS, INNER, HIDDEN // 8, dtype=torch.uint32)}
    parts |= {end: torch.ones(EXPERTS, INNER, HIDDEN // 64) for end in ("scales", "biases")}
    names = [f"switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
    write_block(tmp_path, {f"{name}.{end}": tensor.clone() for name in names for end, tensor in parts.items()})
    with pytest.raises(CheckpointError, match=r"quantized by MLX, which is not read: .*switch_mlp"):
        load_block(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p | {"weight_zero_point": torch.zeros(16, 2).int()}, "weight_zero_point changes what the numbers"),
        (lambda p: p | {"weight_g_idx": torch.zeros(256).int()}, "weight_g_idx changes what the numbers mean"),
        (lambda p: p | {"weight_packed": torch.zeros(128, 64).int()}, r"pack-quantized with the shape \[128, 256\]"),
        (lambda p: p | {"weight_packed": torch.zeros(128, 32).to(torch.int8)}, r"weight_packed is I8 of shape"),
        (lambda p: p | {"weight_scale": torch.ones(128, 3)}, r"only matrices with .*weight_scale of shape"),
    ],
)  # fmt: skip
def test_other_pack_quantized_is_named(change, sentence, tmp_path):
    tensors, _ = int4_experts(32)
    name = "experts.1.up_proj."
    own = {end.removeprefix(name): tensors.pop(end) for end in list(tensors) if end.startswith(name)}
    write_block(
        tmp_path, tensors | {f"{name}{end}": tensor for end, tensor in change(own).items()}, family="deepseek_v3"
    )
    with pytest.raises(CheckpointError, match=sentence):
        load_block(tmp_path, "deepseek_v3")


STATED = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}


@pytest.mark.parametrize(
    ("group", "stated", "sentence"),
    [
        (32, {"num_bits": 8}, "pack-quantized with 8 bits, which is not read"),
        (64, {}, r"weight_scale has a factor for each 64 columns, and config\.json states group_size 32"),
        (32, {"group_size": None, "strategy": "channel"}, r"each 32 columns, and config\.json states group_size 256"),
        (32, {"symmetric": False}, r"has no zero points, and config\.json states symmetric: false"),
        (32, {}, None),
    ],
)
def test_what_config_states_of_integers(group, stated, sentence, tmp_path):
    tensors, _ = int4_experts(group)
    weights = STATED | stated
    how = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    write_block(tmp_path, tensors, how, "deepseek_v3")
    with pytest.raises(CheckpointError, match=sentence) if sentence else contextlib.nullcontext():
        load_block(tmp_path, "deepseek_v3")
