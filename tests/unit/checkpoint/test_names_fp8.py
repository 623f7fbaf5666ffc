"""Test FP8 as published checkpoints name and arrange it. Values follow the formats' definitions, and bytes are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe.errors import CheckpointError
from tests.fixtures.checkpoint_files import same_bytes, stored
from tests.fixtures.checkpoint_names import (
    EXPERTS,
    FP8,
    HIDDEN,
    INNER,
    check_numbers,
    each_matrix,
    expert_numbers,
    layer_config,
    load_block,
    write_block,
)


def in_blocks(matrix: Tensor, rows: int = 128, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and the values that they stand for, block by block."""
    codes, found = torch.empty_like(matrix, dtype=FP8), torch.empty_like(matrix)
    factors = torch.empty(-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            block = (slice(rows * i, rows * i + rows), slice(columns * j, columns * j + columns))
            factors[i, j] = (i + 2 * j + 1) / 64
            codes[block] = (matrix[block] / factors[i, j]).clamp(-448, 448).to(FP8)
            found[block] = codes[block].float() * factors[i, j]
    return codes, factors, found


def stacked(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Stack tensors as torch.stack does, float8 included."""
    found = [torch.stack([part[i].float() for part in parts]) for i in range(len(parts[0]))]
    return [tensor.to(parts[0][i].dtype) for i, tensor in enumerate(found)]


@pytest.mark.parametrize("name", ["scale_inv", "weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("inner", [128, 192, 160, 48])
def test_fused_experts_in_fp8_blocks(inner, name, tmp_path):
    """Fused experts in fp8 blocks are read as transformers saves them.

    If gate does not end at a block boundary, gate and up have separate blocks, unless their sum is a multiple of the
    block
    size.
    """
    wanted, apart = expert_numbers(HIDDEN, inner), inner in (160, 48)
    gate_ups, downs = [], [in_blocks(matrix) for matrix in wanted["down"]]
    for gate, up in zip(wanted["gate"], wanted["up"], strict=True):
        halves = [in_blocks(gate), in_blocks(up)] if apart else [in_blocks(torch.cat([gate, up]))]
        gate_ups.append(tuple(torch.cat([half[i].float() for half in halves]) for i in range(3)))
    gate_up, down = stacked(gate_ups), stacked(downs)
    tensors = {"experts.gate_up_proj": gate_up[0].to(FP8), f"experts.gate_up_proj_{name}": gate_up[1]}
    write_block(tmp_path, tensors | {"experts.down_proj": down[0], f"experts.down_proj_{name}": down[1]})
    found = {"gate": gate_up[2][:, :inner], "up": gate_up[2][:, inner:], "down": down[2]}
    check_numbers(load_block(tmp_path, made=layer_config(HIDDEN, inner)), found)
    if inner == 128:
        layer = load_block(tmp_path, quantization="fp8_block")
        check_numbers(layer, found)
        assert same_bytes(stored(layer, 1)["w13"], gate_up[0][1].to(FP8))
        assert torch.equal(stored(layer, 1)["w2_scale"], down[1][1])


@pytest.mark.parametrize("shape", [(), (1,), (EXPERTS,), (EXPERTS, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_fused_experts_with_a_scale_for_each_matrix(family, turned, shape, tmp_path):
    wanted, count = expert_numbers(), int(torch.Size(shape).numel())
    both = {"gate_up": torch.cat([wanted["gate"], wanted["up"]], 1), "down": wanted["down"]}
    tensors, found = {}, {}
    for number, (name, matrix) in enumerate(both.items(), 1):
        scale = torch.arange(1, 1 + count) * 0.125 * number
        codes = (matrix * 50).to(FP8)
        found[name] = codes.float() * scale.view(-1, 1, 1)
        tensors |= {
            f"experts.{name}_proj": codes.mT if turned else codes,
            f"experts.{name}_proj_weight_scale": scale.reshape(shape),
            f"experts.{name}_proj_input_scale": torch.arange(1, 1 + count).reshape(shape) * 0.5 * number,
        }
    write_block(tmp_path, tensors, family=family)
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    check_numbers(load_block(tmp_path, family), found)
    for quantization in ("fp8_dynamic", "fp8_static"):
        if len(shape) < 3 or quantization == "fp8_dynamic":
            layer = load_block(tmp_path, family, quantization)
            check_numbers(layer, found)
            codes = tensors["experts.gate_up_proj"][1]
            assert same_bytes(stored(layer, 1)["w13"], codes.mT if turned else codes)
    if len(shape) < 3:
        assert stored(layer, 1)["w2_input_scale"] == (2.0 if count > 1 else 1.0)


def one_factor_for_gate_and_one_for_up(shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors with one scale for gate and one for up, and their values.

    transformers saves this for blocks as large as a matrix. `shape` may request gate_up scales of another shape.
    """
    wanted = expert_numbers()
    gate_up = (torch.cat([wanted["gate"], wanted["up"]], 1) * 50).to(FP8)
    down, factors = (wanted["down"] * 50).to(FP8), torch.arange(1, 1 + 2 * EXPERTS).view(EXPERTS, 2, 1) / 64
    tensors = {
        "experts.gate_up_proj": gate_up, "experts.down_proj": down,
        "experts.gate_up_proj_scale_inv": torch.ones(shape) if shape != factors.shape else factors,
        "experts.down_proj_scale_inv": factors[:, :1],
    }  # fmt: skip
    found = {"down": down.float() * factors[:, :1]}
    for number, name in enumerate(("gate", "up")):
        rows = gate_up[:, number * INNER : (number + 1) * INNER].float()
        found[name] = rows * factors[:, number : number + 1]
    return tensors, found


def test_one_factor_for_gate_and_one_for_up(tmp_path):
    tensors, found = one_factor_for_gate_and_one_for_up((EXPERTS, 2, 1))
    write_block(tmp_path, tensors)
    check_numbers(load_block(tmp_path), found)


@pytest.mark.parametrize("grid", [(3, 1), (2, 3), (1, 2), (4, 7)])
def test_factors_that_fit_neither_blocks_nor_halves_are_refused(grid, tmp_path):
    write_block(tmp_path, one_factor_for_gate_and_one_for_up((EXPERTS, *grid))[0])
    with pytest.raises(CheckpointError, match=r"gate_up_proj is float8 of shape .*can be read, got \["):
        load_block(tmp_path)


def test_fused_experts_with_a_scale_for_each_output(tmp_path):
    """Fused experts with a scale per output are read as FBGEMM writes Llama-4.

    Codes are [E, H, 2I] and [E, I, H]; scales are [E, 1, 2I] and [E, H, 1].
    """
    wanted = expert_numbers()
    both = torch.cat([wanted["gate"], wanted["up"]], 1)
    tensors, found = {}, {}
    for name, matrix, shape in (("gate_up", both, (EXPERTS, 1, -1)), ("down", wanted["down"], (EXPERTS, -1, 1))):
        scale = 1 + torch.arange(EXPERTS * matrix.shape[1]).view(EXPERTS, -1) % 7
        codes = (matrix * 50).to(FP8)
        found[name] = codes.float() * scale.unsqueeze(2)
        tensors |= {f"experts.{name}_proj": codes.mT, f"experts.{name}_proj_scale": scale.float().reshape(shape)}
    write_block(tmp_path, tensors, family="llama4_text")
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    check_numbers(load_block(tmp_path, "llama4_text"), found)
    layer = load_block(tmp_path, "llama4_text", "fp8_channel")
    check_numbers(layer, found)
    assert same_bytes(stored(layer, 1)["w13"], tensors["experts.gate_up_proj"][1].mT)


@pytest.mark.parametrize("family", ["llama4_text", "mixtral"])
def test_a_matrix_for_each_expert_of_llama4(family, tmp_path):
    """Llama-4 with a matrix per expert is read: compressed-tensors with a bf16 scale per row."""
    wanted, found = expert_numbers(), {name: torch.empty_like(tensor) for name, tensor in expert_numbers().items()}
    scale = {name: (1 + torch.arange(t.shape[1]) % 5).bfloat16().unsqueeze(1) for name, t in wanted.items()}
    for name in wanted:
        found[name] = (wanted[name] * 50).to(FP8).float() * scale[name].float()
    tensors = each_matrix(
        wanted,
        lambda m: {"weight": (m * 50).to(FP8), "weight_scale": (1 + torch.arange(len(m)) % 5).bfloat16().unsqueeze(1)},
        family,
    )
    write_block(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"}, family)
    check_numbers(load_block(tmp_path, family), found)
    check_numbers(load_block(tmp_path, family, "fp8_channel"), found)


@pytest.mark.parametrize("end", ["weight_scale", "scale", "qscale_weight"])
def test_blocks_under_other_names(end, tmp_path):
    """Block scales are read under other names: compressed-tensors' strategy "block", DeepSeek-V4, Mistral."""
    wanted = expert_numbers()
    parts = {name: [in_blocks(matrix) for matrix in tensor] for name, tensor in wanted.items()}
    order = iter([part for name in ("gate", "up", "down") for part in parts[name]])
    tensors = each_matrix(wanted, lambda _: dict(zip(("weight", end), next(order)[:2], strict=True)))
    write_block(tmp_path, tensors)
    found = {name: torch.stack([part[2] for part in each_one]) for name, each_one in parts.items()}
    check_numbers(load_block(tmp_path), found)
    layer = load_block(tmp_path, quantization="fp8_block")
    check_numbers(layer, found)
    assert same_bytes(stored(layer, 0)["w2"], parts["down"][0][0])
