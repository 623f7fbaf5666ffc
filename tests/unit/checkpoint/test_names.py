"""Test plain numbers under the names of published checkpoints, and a whole model nested in another."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import CheckpointError, EPContext
from ep_moe.checkpoint.source import SINGLE
from tests.fixtures.checkpoint_names import (
    CPU,
    EXPERTS,
    FP8,
    HIDDEN,
    ROUTER_NAMES,
    check_numbers,
    each_matrix,
    expert_numbers,
    layer_config,
    load_block,
    pack_quantized,
    plain_weight,
    write_block,
)

# --- plain numbers under other names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.", "thinker.model.", "thinker.", "language_model.model.", "language_model.", "model.",
     "model.text_model.", "thinker.model.language_model.", "llm.", "llm.model.", ""],
)  # fmt: skip
def test_a_text_model_inside_another(prefix, tmp_path):
    wanted = expert_numbers()
    tensors = each_matrix(wanted, plain_weight) | {"gate.weight": torch.randn(EXPERTS, HIDDEN)}
    tensors = {f"{prefix}layers.0.mlp.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model.visual.layers.0.mlp.{name}": torch.zeros(1) for name in ("gate.weight", "experts.gate_up_proj")}
    tensors |= {"talker.model.layers.0.mlp.gate.weight": torch.zeros(1)}
    write_block(tmp_path, tensors)
    check_numbers(load_block(tmp_path), wanted)


def test_two_of_one_name_are_refused(tmp_path):
    tensors = each_matrix(expert_numbers(), plain_weight)
    tensors |= {"language_model.model.layers.0.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN)}
    write_block(tmp_path, tensors | {"model.layers.0.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN)})
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.mlp\.gate\.weight twice, as .* and as"):
        load_block(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_routers_as_hunyuan_names_them(family, tmp_path):
    wanted, router = expert_numbers(), torch.randn(EXPERTS, HIDDEN)
    write_block(tmp_path, each_matrix(wanted, plain_weight, family) | {"gate.wg.weight": router}, family=family)
    layer = load_block(tmp_path, family)
    check_numbers(layer, wanted)
    assert torch.equal(layer.router.weight, router)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_as_granite_names_them(family, tmp_path):
    wanted, router = expert_numbers(), torch.randn(EXPERTS, HIDDEN)
    gate_up = torch.cat([wanted["gate"], wanted["up"]], 1)
    names = {"input_linear.weight": gate_up, "output_linear.weight": wanted["down"]}
    names["router.layer.weight" if family == "mixtral" else "gate.weight"] = router
    write_block(tmp_path, names, family=family)
    layer = load_block(tmp_path, family)
    check_numbers(layer, wanted)
    assert torch.equal(layer.router.weight, router)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text"])
def test_experts_as_mlx_names_them(family, tmp_path):
    wanted = expert_numbers()
    write_block(tmp_path, {f"switch_mlp.{name}_proj.weight": tensor for name, tensor in wanted.items()}, family=family)
    check_numbers(load_block(tmp_path, family), wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text"])
@pytest.mark.parametrize("sizes", [(256, 128), (128, 128), (128, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_either_way_round(turned, sizes, family, tmp_path):
    """Fused experts are read in either orientation, even if one of the two matrices is square."""
    wanted = expert_numbers(*sizes)
    both = {"experts.gate_up_proj": torch.cat([wanted["gate"], wanted["up"]], 1), "experts.down_proj": wanted["down"]}
    router = {ROUTER_NAMES.get(family, "gate.weight"): torch.randn(EXPERTS, sizes[0])}
    write_block(tmp_path, router | {n: t.mT if turned else t for n, t in both.items()}, family=family)
    check_numbers(load_block(tmp_path, family, made=layer_config(*sizes)), wanted)


@pytest.mark.parametrize("shape", [(), (EXPERTS,), (EXPERTS, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, FP8, torch.uint8])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_other_shapes_of_fused_experts_are_refused(name, family, dtype, shape, tmp_path):
    wanted = expert_numbers()
    both = {"experts.gate_up_proj": torch.cat([wanted["gate"], wanted["up"]], 1), "experts.down_proj": wanted["down"]}
    tensors = both | {f"experts.{name}": torch.ones(shape).to(dtype)}
    if dtype != torch.float32:
        tensors |= {f"experts.{name}_weight_scale{end}": torch.ones(()) for end in ("", "_2")}
    write_block(tmp_path, tensors, family=family)
    with pytest.raises(CheckpointError, match=name):
        load_block(tmp_path, family)


# --- a whole model -----------------------------------------------------------------------------------------------


def as_int4(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return pack_quantized(matrix, 32, matrix.shape[0])


def as_bytes(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize to fp8 with one exponent per block."""
    exponents = torch.tensor([[118 + i + j for j in range(-(-matrix.shape[1] // 128))]
                              for i in range(-(-matrix.shape[0] // 128))], dtype=torch.uint8)  # fmt: skip
    codes = (matrix * 50).to(FP8)
    factors = (2.0 ** (exponents.float() - 127)).repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = codes.float() * factors[: matrix.shape[0], : matrix.shape[1]]
    return {"weight": codes, "weight_scale_inv": exponents}, found


@pytest.mark.parametrize(("make", "stated"), [
    (as_int4, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    (as_bytes, {"quant_method": "fp8", "scale_fmt": "ue8m0"}),
])  # fmt: skip
def test_a_model_inside_another_is_read_whole(make, stated, tmp_path):
    """A model nested in a multimodal model is read whole, with attention and shared experts."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from ep_moe.integrations.transformers import load_pretrained
    from tests.fixtures.checkpoint_files import quiet, save, saved_twice, tiny_model

    quiet()
    save(tiny_model("deepseek_v3", hidden_size=64, intermediate_size=64, moe_intermediate_size=64), tmp_path / "source")
    file, found = {}, {}
    for name, tensor in load_file(tmp_path / "source" / SINGLE).items():
        file[name] = found[name] = tensor
        if (
            ".layers." in name
            and tensor.dim() == 2
            and tensor.shape[1] % 32 == 0
            and not name.endswith("mlp.gate.weight")
        ):
            parts, found[name] = make(tensor / 4)
            del file[name]
            file |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in file.items()}
    saved_twice(tmp_path, wrapped, found, stated)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()(tokens).logits
        logits = load_pretrained(tmp_path / "quantised", EPContext.local(CPU), dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)

    name = "model.language_model.layers.0.self_attn.o_proj.weight"
    for end in [end for end in wrapped if end.startswith(name)]:
        del wrapped[end]
    wrapped[f"{name.removesuffix('weight')}qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    save_file(wrapped, tmp_path / "quantised" / SINGLE)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj\.\S* is quantized by AWQ or GPTQ"):
        load_pretrained(tmp_path / "quantised", EPContext.local(CPU), dtype=torch.float32)
