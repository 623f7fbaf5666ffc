"""Names and arrangements that published checkpoints have: numbers by the formats' own descriptions, bytes kept."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import CheckpointError, EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.reader import load_layers
from ep_moe.checkpoint.source import SINGLE
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures import packed_codes
from tests.fixtures.checkpoint_files import same_bytes, stored

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
BLOCKS = {"qwen3_moe": "model.layers.0.mlp", "mixtral": "model.layers.0.block_sparse_moe",
          "llama4_text": "model.layers.0.feed_forward", "deepseek_v3": "model.layers.0.mlp"}  # fmt: skip
ROUTERS = {"llama4_text": "router.weight"}
NAMES = {"mixtral": ("w1", "w3", "w2")}
HIDDEN, INNER, EXPERTS = 256, 128, 2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def config(hidden: int = HIDDEN, inner: int = INNER) -> MoEConfig:
    return MoEConfig(hidden_size=hidden, intermediate_size=inner, num_experts=EXPERTS, top_k=1)


def numbers(hidden: int = HIDDEN, inner: int = INNER) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "gate": torch.randn(EXPERTS, inner, hidden, generator=generator),
        "up": torch.randn(EXPERTS, inner, hidden, generator=generator),
        "down": torch.randn(EXPERTS, hidden, inner, generator=generator),
    }


def write(folder, tensors: dict[str, Tensor], quantization: dict | None = None, family="qwen3_moe") -> None:
    """tensors: by their names in the block; the router's is added where there is none"""
    block = BLOCKS[family]
    router = ROUTERS.get(family, "gate.weight")
    if not any(name.endswith(("wg.weight", "layer.weight", router)) for name in tensors):
        tensors = tensors | {router: torch.randn(EXPERTS, HIDDEN)}
    named = {name if "layers" in name else f"{block}.{name}": t.contiguous() for name, t in tensors.items()}
    save_file(named, folder / SINGLE)
    stated = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(stated))


def load(folder, family="qwen3_moe", quantization="none", made: MoEConfig | None = None) -> MoELayer:
    dtype = torch.float32 if quantization == "none" else torch.bfloat16
    layer = MoELayer(made or config(), EPContext.local(CPU), quantization=quantization, dtype=dtype)
    load_layers({0: layer}, folder, family, progress=False)
    return layer


def check(layer: MoELayer, wanted: dict[str, Tensor], *, rounded: bool = False) -> None:
    """wanted: numbers [E, rows, columns] of gate, up and down. rounded: quantized by the layer's scheme"""
    scheme = layer.expert_weights.scheme
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        gate, up, down = (wanted[name][expert] for name in ("gate", "up", "down"))
        for name, tensor in (("w13", torch.cat([gate, up])), ("w2", down)):
            if rounded:
                tensor = scheme.weights.dequantize(scheme.weights.quantize(tensor, torch.bfloat16))
            assert torch.equal(scheme.dequantize(own, name), tensor), (expert, name)


def each(wanted: dict[str, Tensor], make, family="qwen3_moe") -> dict[str, Tensor]:
    """A matrix per expert and projection. make: numbers -> what follows the projection's name"""
    found = {}
    for key, name in zip(("gate", "up", "down"), NAMES.get(family, ("gate_proj", "up_proj", "down_proj")), strict=True):
        for expert in range(EXPERTS):
            found |= {f"experts.{expert}.{name}.{end}": t for end, t in make(wanted[key][expert]).items()}
    return found


def plain(matrix: Tensor) -> dict[str, Tensor]:
    return {"weight": matrix.clone()}


# --- plain numbers under other names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.", "thinker.model.", "thinker.", "language_model.model.", "language_model.", "model.",
     "model.text_model.", "thinker.model.language_model.", ""],
)  # fmt: skip
def test_a_text_model_inside_another(prefix, tmp_path):
    wanted = numbers()
    tensors = each(wanted, plain) | {"gate.weight": torch.randn(EXPERTS, HIDDEN)}
    tensors = {f"{prefix}layers.0.mlp.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model.visual.layers.0.mlp.{name}": torch.zeros(1) for name in ("gate.weight", "experts.gate_up_proj")}
    tensors |= {"talker.model.layers.0.mlp.gate.weight": torch.zeros(1)}
    write(tmp_path, tensors)
    check(load(tmp_path), wanted)


def test_two_of_one_name_are_refused(tmp_path):
    tensors = each(numbers(), plain)
    tensors |= {"language_model.model.layers.0.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN)}
    write(tmp_path, tensors | {"model.layers.0.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN)})
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.mlp\.gate\.weight twice, as .* and as"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_routers_as_hunyuan_names_them(family, tmp_path):
    wanted, router = numbers(), torch.randn(EXPERTS, HIDDEN)
    write(tmp_path, each(wanted, plain, family) | {"gate.wg.weight": router}, family=family)
    layer = load(tmp_path, family)
    check(layer, wanted)
    assert torch.equal(layer.router.weight, router)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_as_granite_names_them(family, tmp_path):
    wanted, router = numbers(), torch.randn(EXPERTS, HIDDEN)
    gate_up = torch.cat([wanted["gate"], wanted["up"]], 1)
    names = {"input_linear.weight": gate_up, "output_linear.weight": wanted["down"]}
    names["router.layer.weight" if family == "mixtral" else "gate.weight"] = router
    write(tmp_path, names, family=family)
    layer = load(tmp_path, family)
    check(layer, wanted)
    assert torch.equal(layer.router.weight, router)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text"])
def test_experts_as_mlx_names_them(family, tmp_path):
    wanted = numbers()
    write(tmp_path, {f"switch_mlp.{name}_proj.weight": tensor for name, tensor in wanted.items()}, family=family)
    check(load(tmp_path, family), wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text"])
@pytest.mark.parametrize("sizes", [(256, 128), (128, 128), (128, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_either_way_round(turned, sizes, family, tmp_path):
    """Also where one of the two matrices is square."""
    wanted = numbers(*sizes)
    both = {"experts.gate_up_proj": torch.cat([wanted["gate"], wanted["up"]], 1), "experts.down_proj": wanted["down"]}
    router = {ROUTERS.get(family, "gate.weight"): torch.randn(EXPERTS, sizes[0])}
    write(tmp_path, router | {n: t.mT if turned else t for n, t in both.items()}, family=family)
    check(load(tmp_path, family, made=config(*sizes)), wanted)


@pytest.mark.parametrize("shape", [(), (EXPERTS,), (EXPERTS, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, FP8, torch.uint8])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_other_shapes_of_fused_experts_are_refused(name, family, dtype, shape, tmp_path):
    wanted = numbers()
    both = {"experts.gate_up_proj": torch.cat([wanted["gate"], wanted["up"]], 1), "experts.down_proj": wanted["down"]}
    tensors = both | {f"experts.{name}": torch.ones(shape).to(dtype)}
    if dtype != torch.float32:
        tensors |= {f"experts.{name}_weight_scale{end}": torch.ones(()) for end in ("", "_2")}
    write(tmp_path, tensors, family=family)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, family)


# --- fp8 ---------------------------------------------------------------------------------------------------------


def in_blocks(matrix: Tensor, rows: int = 128, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, factors, and the numbers that they stand for, block by block."""
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
    """torch.stack, also of float8."""
    found = [torch.stack([part[i].float() for part in parts]) for i in range(len(parts[0]))]
    return [tensor.to(parts[0][i].dtype) for i, tensor in enumerate(found)]


@pytest.mark.parametrize("name", ["scale_inv", "weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("inner", [128, 192, 160, 48])
def test_fused_experts_in_fp8_blocks(inner, name, tmp_path):
    """As transformers saves them. Where gate's rows are no whole blocks both halves have blocks of their own, unless
    their sum is whole ones."""
    wanted, apart = numbers(HIDDEN, inner), inner in (160, 48)
    gate_ups, downs = [], [in_blocks(matrix) for matrix in wanted["down"]]
    for gate, up in zip(wanted["gate"], wanted["up"], strict=True):
        halves = [in_blocks(gate), in_blocks(up)] if apart else [in_blocks(torch.cat([gate, up]))]
        gate_ups.append(tuple(torch.cat([half[i].float() for half in halves]) for i in range(3)))
    gate_up, down = stacked(gate_ups), stacked(downs)
    tensors = {"experts.gate_up_proj": gate_up[0].to(FP8), f"experts.gate_up_proj_{name}": gate_up[1]}
    write(tmp_path, tensors | {"experts.down_proj": down[0], f"experts.down_proj_{name}": down[1]})
    found = {"gate": gate_up[2][:, :inner], "up": gate_up[2][:, inner:], "down": down[2]}
    check(load(tmp_path, made=config(HIDDEN, inner)), found)
    if inner == 128:
        layer = load(tmp_path, quantization="fp8_block")
        check(layer, found)
        assert same_bytes(stored(layer, 1)["w13"], gate_up[0][1].to(FP8))
        assert torch.equal(stored(layer, 1)["w2_scale"], down[1][1])


@pytest.mark.parametrize("shape", [(), (1,), (EXPERTS,), (EXPERTS, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_fused_experts_with_a_scale_for_each_matrix(family, turned, shape, tmp_path):
    wanted, count = numbers(), int(torch.Size(shape).numel())
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
    write(tmp_path, tensors, family=family)
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    check(load(tmp_path, family), found)
    for quantization in ("fp8_dynamic", "fp8_static"):
        if len(shape) < 3 or quantization == "fp8_dynamic":
            layer = load(tmp_path, family, quantization)
            check(layer, found)
            codes = tensors["experts.gate_up_proj"][1]
            assert same_bytes(stored(layer, 1)["w13"], codes.mT if turned else codes)
    if len(shape) < 3:
        assert stored(layer, 1)["w2_input_scale"] == (2.0 if count > 1 else 1.0)


def test_fused_experts_with_a_scale_for_each_output(tmp_path):
    """As FBGEMM writes Llama-4: codes [E, H, 2I] and [E, I, H], scales [E, 1, 2I] and [E, H, 1]."""
    wanted = numbers()
    both = torch.cat([wanted["gate"], wanted["up"]], 1)
    tensors, found = {}, {}
    for name, matrix, shape in (("gate_up", both, (EXPERTS, 1, -1)), ("down", wanted["down"], (EXPERTS, -1, 1))):
        scale = 1 + torch.arange(EXPERTS * matrix.shape[1]).view(EXPERTS, -1) % 7
        codes = (matrix * 50).to(FP8)
        found[name] = codes.float() * scale.unsqueeze(2)
        tensors |= {f"experts.{name}_proj": codes.mT, f"experts.{name}_proj_scale": scale.float().reshape(shape)}
    write(tmp_path, tensors, family="llama4_text")
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    check(load(tmp_path, "llama4_text"), found)
    layer = load(tmp_path, "llama4_text", "fp8_channel")
    check(layer, found)
    assert same_bytes(stored(layer, 1)["w13"], tensors["experts.gate_up_proj"][1].mT)


@pytest.mark.parametrize("family", ["llama4_text", "mixtral"])
def test_a_matrix_for_each_expert_of_llama4(family, tmp_path):
    """compressed-tensors, a bf16 factor for each row."""
    wanted, found = numbers(), {name: torch.empty_like(tensor) for name, tensor in numbers().items()}
    scale = {name: (1 + torch.arange(t.shape[1]) % 5).bfloat16().unsqueeze(1) for name, t in wanted.items()}
    for name in wanted:
        found[name] = (wanted[name] * 50).to(FP8).float() * scale[name].float()
    tensors = each(
        wanted,
        lambda m: {"weight": (m * 50).to(FP8), "weight_scale": (1 + torch.arange(len(m)) % 5).bfloat16().unsqueeze(1)},
        family,
    )
    write(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"}, family)
    check(load(tmp_path, family), found)
    check(load(tmp_path, family, "fp8_channel"), found)


@pytest.mark.parametrize("end", ["weight_scale", "scale", "qscale_weight"])
def test_blocks_under_other_names(end, tmp_path):
    """compressed-tensors' strategy "block", DeepSeek-V4, Mistral."""
    wanted = numbers()
    parts = {name: [in_blocks(matrix) for matrix in tensor] for name, tensor in wanted.items()}
    order = iter([part for name in ("gate", "up", "down") for part in parts[name]])
    tensors = each(wanted, lambda _: dict(zip(("weight", end), next(order)[:2], strict=True)))
    write(tmp_path, tensors)
    found = {name: torch.stack([part[2] for part in each_one]) for name, each_one in parts.items()}
    check(load(tmp_path), found)
    layer = load(tmp_path, quantization="fp8_block")
    check(layer, found)
    assert same_bytes(stored(layer, 0)["w2"], parts["down"][0][0])


# --- 4 bits ------------------------------------------------------------------------------------------------------


def nibbles(packed: Tensor) -> Tensor:
    """Numbers of E2M1, two to a byte, the even column low."""
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
    """Its global scales are the reciprocals of ModelOpt's."""
    tensors, found = compressed_nvfp4(numbers())
    write(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    layer = load(tmp_path, quantization=quantization)
    if quantization != "nvfp4":
        return check(layer, found, rounded=quantization != "none")
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        data = [tensors[f"experts.{expert}.{name}_proj.weight_packed"] for name in ("gate", "up")]
        assert torch.equal(own["w13"], torch.cat(data))
        assert own["w13_global_scale"] == 1 / torch.tensor(3000.0 + 100 * expert)
        assert own["w13_input_scale"] == 1 / torch.tensor(50.0)
        # the reciprocal is rounded: half a unit in the last place, and as much for each product
        down = SCHEMES["nvfp4"].dequantize(own, "w2")
        torch.testing.assert_close(down, found["down"][expert], rtol=3 * 2.0**-24, atol=0)
    return None


def test_a_global_scale_of_0_has_no_reciprocal(tmp_path):
    tensors, _ = compressed_nvfp4(numbers())
    tensors["experts.1.up_proj.weight_global_scale"] = torch.zeros(1)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight_global_scale must be finite and greater"):
        load(tmp_path)


@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_in_nvfp4(turned, tmp_path):
    """As ModelOpt exports Llama-4: packed along the columns, [E, H / 2, 2I], whichever way round."""
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
    write(tmp_path, tensors, family="llama4_text")
    found |= {"gate": found["gate_up"][:, :INNER], "up": found["gate_up"][:, INNER:]}
    for quantization in ("none", "nvfp4"):
        layer = load(tmp_path, "llama4_text", quantization)
        check(layer, found)
    data = tensors["experts.down_proj"][1]
    assert torch.equal(stored(layer, 1)["w2"], data.mT if turned else data)


def int4(matrix: Tensor, group: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' pack-quantized: number + 8 in each 4 bits of an int32, the first column lowest."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, matrix.shape, generator=generator)
    scale = (0.01 + torch.rand(matrix.shape[0], matrix.shape[1] // group, generator=generator)).bfloat16()
    words = torch.zeros(matrix.shape[0], matrix.shape[1] // 8, dtype=torch.int64)
    for column in range(matrix.shape[1]):
        words[:, column // 8] |= (codes[:, column] + 8) << (4 * (column % 8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    parts = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(matrix.shape)}
    return parts, codes * scale.float().repeat_interleave(group, 1)


def kimi(group: int, family="deepseek_v3") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    wanted = numbers()
    made = {name: [int4(m, group, 10 * e + len(name)) for e, m in enumerate(t)] for name, t in wanted.items()}
    order = iter([parts for name in ("gate", "up", "down") for parts, _ in made[name]])
    found = {name: torch.stack([matrix for _, matrix in each_one]) for name, each_one in made.items()}
    return each(wanted, lambda _: next(order), family), found


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("quantization", ["none", "mxint4", "mxint4_fp8", "int4", "int4_fp8", "mxfp4"])
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_int4_in_groups(quantization, group, tmp_path):
    """Kimi-K2-Thinking has groups of 32, whose bytes are those of mxint4."""
    tensors, found = kimi(group)
    write(tmp_path, tensors, family="deepseek_v3")
    layer = load(tmp_path, "deepseek_v3", quantization)
    kept = {"mxint4": 32, "mxint4_fp8": 32, "int4": 128, "int4_fp8": 128}.get(quantization) == group
    check(layer, found, rounded=quantization != "none" and not kept)
    if kept:
        assert torch.equal(stored(layer, 1)["w2_scale"], tensors["experts.1.down_proj.weight_scale"])


def test_mxfp4_of_compressed_tensors(tmp_path):
    generator, tensors = torch.Generator().manual_seed(3), {}
    found = {name: torch.empty_like(tensor) for name, tensor in numbers().items()}
    for name in found:
        for expert, matrix in enumerate(found[name]):
            packed = torch.randint(0, 256, (len(matrix), matrix.shape[1] // 2), dtype=torch.uint8, generator=generator)
            scale = torch.randint(110, 130, (len(matrix), matrix.shape[1] // 32), generator=generator)
            found[name][expert] = nibbles(packed) * (2.0 ** (scale - 127)).repeat_interleave(32, 1)
            tensors[f"experts.{expert}.{name}_proj.weight_packed"] = packed
            tensors[f"experts.{expert}.{name}_proj.weight_scale"] = scale.to(torch.uint8)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"weight_scale must be factors.*got uint8; bytes are exponents"):
        load(tmp_path)
    write(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    check(load(tmp_path), found)
    layer = load(tmp_path, quantization="mxfp4")
    check(layer, found)
    assert torch.equal(stored(layer, 1)["w2"], tensors["experts.1.down_proj.weight_packed"])


# --- quantizations that are not read -----------------------------------------------------------------------------


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
    write(tmp_path, each(numbers(), make, family), stated, family)
    block = BLOCKS[family]
    sentence = rf"{block}\S* is quantized by {called}.*is not read: .* is there; dequantize the checkpoint to bf16"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, family)


@pytest.mark.parametrize("make", [awq, gptq])
def test_awq_and_gptq_are_read_as_config_json_says(make, tmp_path):
    write(tmp_path, each(numbers(), make, "mixtral"), None, "mixtral")
    with pytest.raises(CheckpointError, match=r"is quantized by AWQ or GPTQ, and config\.json does not state which"):
        load(tmp_path, "mixtral")


@pytest.mark.parametrize(("make", "stated"), [(packed_codes.awq, "awq"), (packed_codes.gptq, "gptq")])
def test_awq_and_gptq_of_a_known_family(make, stated, tmp_path):
    generator, tensors = torch.Generator().manual_seed(3), {}
    found = {name: torch.empty_like(tensor) for name, tensor in numbers().items()}
    for name in found:
        for expert, matrix in enumerate(found[name]):
            parts, found[name][expert] = make(*matrix.shape, generator, group=32)
            tensors |= {f"experts.{expert}.{name}_proj.{end}": part.contiguous() for end, part in parts.items()}
    write(tmp_path, tensors, {"quant_method": stated, "bits": 4, "group_size": 32})
    check(load(tmp_path), found)


def int8_channels(matrix: Tensor) -> dict[str, Tensor]:
    return {"weight": matrix.to(torch.int8), "weight_scale": torch.ones(len(matrix), 1)}


@pytest.mark.parametrize("quantization", ["none", "fp8_dynamic"])
def test_codes_that_nothing_is_known_of(quantization, tmp_path):
    how = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    write(tmp_path, each(numbers(), int8_channels), how)
    sentence = (
        r"must be bfloat16 or .*, got int8, codes of a quantization that is not read; config\.json states .*int-q"
    )
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, quantization=quantization)
    write(tmp_path, each(numbers(), lambda matrix: {"strange": matrix.clone()}), {"quant_method": "strange"})
    with pytest.raises(CheckpointError, match=r"is missing; config\.json states the quantization 'strange'; dequan"):
        load(tmp_path, quantization=quantization)


def test_mlx_is_named(tmp_path):
    parts = {"weight": torch.zeros(EXPERTS, INNER, HIDDEN // 8, dtype=torch.uint32)}
    parts |= {end: torch.ones(EXPERTS, INNER, HIDDEN // 64) for end in ("scales", "biases")}
    names = [f"switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
    write(tmp_path, {f"{name}.{end}": tensor.clone() for name in names for end, tensor in parts.items()})
    with pytest.raises(CheckpointError, match=r"quantized by MLX, which is not read: .*switch_mlp"):
        load(tmp_path)


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
    tensors, _ = kimi(32)
    name = "experts.1.up_proj."
    own = {end.removeprefix(name): tensors.pop(end) for end in list(tensors) if end.startswith(name)}
    write(tmp_path, tensors | {f"{name}{end}": tensor for end, tensor in change(own).items()}, family="deepseek_v3")
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "deepseek_v3")


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
    tensors, _ = kimi(group)
    weights = STATED | stated
    how = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    write(tmp_path, tensors, how, "deepseek_v3")
    with pytest.raises(CheckpointError, match=sentence) if sentence else contextlib.nullcontext():
        load(tmp_path, "deepseek_v3")


# --- a whole model -----------------------------------------------------------------------------------------------


def as_int4(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return int4(matrix, 32, matrix.shape[0])


def as_bytes(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """fp8 under exponents of blocks, one for each."""
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
    """Attention and shared experts too, under the names of a multimodal model."""
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
