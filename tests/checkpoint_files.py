"""Checkpoints of five families, as transformers writes them, and beside them the models' weights in canonical form."""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_moe import Activation, MoEConfig, MoELayer
from ep_moe.checkpoint.reader import INDEX, SINGLE
from ep_moe.config import RoutingConfig, RoutingMethod

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")
SIZES = {"hidden_size": 32, "num_experts": 8}
# written out and not taken from ep_moe.integrations, which is tested elsewhere
CONFIGS = {
    "mixtral": MoEConfig(**SIZES, intermediate_size=48, top_k=2, routing=RoutingConfig(renormalize=True)),
    "qwen3_moe": MoEConfig(**SIZES, intermediate_size=48, top_k=3, routing=RoutingConfig(renormalize=True)),
    "deepseek_v3": MoEConfig(
        **SIZES, intermediate_size=48, top_k=2, shared_intermediate_size=96,
        routing=RoutingConfig(
            method=RoutingMethod.SIGMOID_TOPK, renormalize=True, scaling_factor=2.5, num_groups=4, top_groups=2,
            correction_bias=True, float32_logits=True,
        ),
    ),
    "gpt_oss": MoEConfig(
        **SIZES, intermediate_size=48, top_k=2, activation=Activation.SWIGLU_CLAMPED, expert_bias=True,
        routing=RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True),
    ),
    "llama4_text": MoEConfig(
        **SIZES, intermediate_size=48, top_k=1, shared_intermediate_size=48,
        routing=RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True),
    ),
}  # fmt: skip
# the layers with experts; qwen3_moe, deepseek_v3 and llama4_text have dense ones beside them
LAYERS = {"mixtral": (0, 1), "qwen3_moe": (0, 2), "deepseek_v3": (1, 2), "gpt_oss": (0, 1), "llama4_text": (0, 2)}

# the models' own configurations: class and fields
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4,
}  # fmt: skip
MODELS = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        "intermediate_size": 40, "moe_intermediate_size": 48, "num_hidden_layers": 3, "mlp_only_layers": [1],
        "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": True,
    }),
    "deepseek_v3": ("DeepseekV3Config", {
        "intermediate_size": 40, "moe_intermediate_size": 48, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }),
    "gpt_oss": ("GptOssConfig", {
        "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": YARN,
    }),
    "llama4_text": ("Llama4TextConfig", {
        "intermediate_size": 48, "intermediate_size_mlp": 40, "num_hidden_layers": 3, "num_local_experts": 8,
        "moe_layers": [0, 2], "attention_chunk_size": 8,
    }),
}  # fmt: skip


def stored(layer: MoELayer, expert: int) -> dict[str, torch.Tensor]:
    """One expert's canonical tensors."""
    weights = layer.expert_weights
    return weights.whole(weights.held[expert][0])


def same_bytes(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
    )


# --- what the parent process writes ------------------------------------------------------------------------------


def tiny_config(family, **changes):
    """Two or three layers with 8 experts; `changes` go to the configuration's class."""
    import transformers

    name, own = MODELS[family]
    return getattr(transformers, name)(**(COMMON | own | changes))


def tiny_model(family, **changes):
    """A random float32 model with no zeros left in it: biases and correction biases count."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32).eval()
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn(tensor.shape) / 5)
    return model


def save(model, folder, **options):
    """`save_pretrained`, also on torchrun's ranks, which have folders of their own; it writes on rank 0 alone there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "should_save_on_this_rank", lambda *_: True, raising=False)
        model.save_pretrained(folder, **options)


def saved_twice(folder, stored, plain, how):
    """A model's folder at "source" as one with these tensors and `quantization_config`, at "quantised", and as one with
    the numbers that they stand for, at "plain"."""
    config = json.loads((folder / "source" / "config.json").read_text())
    for kind, tensors, more in (("quantised", stored, {"quantization_config": how}), ("plain", plain, {})):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / SINGLE, {"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(config | more))


def quiet():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def canonical(model, family):
    """{layer: {"experts": whole tensors [E, ...], "router": ..., "shared": ...}} of a transformers model."""
    weights = {}
    for number, layer in enumerate(model.model.layers):
        block = layer.feed_forward if family == "llama4_text" else layer.mlp
        if not hasattr(block, "experts"):
            continue
        experts = {name: tensor.clone() for name, tensor in block.experts.state_dict().items()}
        if family in ("gpt_oss", "llama4_text"):
            experts |= {name: experts[name].transpose(1, 2) for name in ("gate_up_proj", "down_proj")}
        if family == "gpt_oss":
            for name in ("gate_up_proj", "gate_up_proj_bias"):
                experts[name] = torch.cat([experts[name][:, 0::2], experts[name][:, 1::2]], dim=1)
        names = {"gate_up_proj": "w13", "down_proj": "w2", "gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"}
        router = block.router if hasattr(block, "router") else block.gate
        shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        weights[number] = {
            "experts": {names[name]: tensor.contiguous() for name, tensor in experts.items()},
            "router": router.state_dict(),
            "shared": {} if shared is None else shared.state_dict(),
        }
    return weights


def write_tensors(folder, tensors, shards):
    """The files of a checkpoint: `shards` of them with an index, or a single one."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / SINGLE, {"format": "pt"})
        return
    names = sorted(tensors)
    files = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name].contiguous() for name in names if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_config(folder, source, **changes):
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def quantise_fp8(tensors):
    """DeepSeek-V3's way, all matrices of a layer but the router's: (quantised tensors, the numbers they stand for)."""
    from tests.test_dequantize import block_loop

    packed, plain = {}, {}
    for name, tensor in tensors.items():
        packed[name] = plain[name] = tensor
        if ".layers." in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            rows, columns = (math.ceil(size / 128) for size in tensor.shape)
            scale = torch.empty(rows, columns)
            for i in range(rows):
                for j in range(columns):
                    block = tensor[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                    scale[i, j] = block.abs().max() / 448
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            packed[name] = (tensor / spread).to(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = scale
            plain[name] = block_loop(packed[name], scale)
    return packed, plain


def quantise_mxfp4(tensors):
    """Random blocks and scales in GPT-OSS's arrangement in place of the experts' matrices."""
    from tests.test_dequantize import mxfp4_loop

    packed, plain = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        packed[name] = plain[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = mxfp4_loop(blocks, scales).transpose(1, 2).contiguous()
    return packed, plain


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """folder: of the checkpoint under test; plain: the same numbers, as transformers reads them on any machine"""

    folder: str
    plain: str
    family: str
    config: MoEConfig

    @property
    def expected(self):
        return torch.load(f"{self.folder}/expected.pt")


def write_quantised(root, kind, family, config, quantise, quantization_config, **changes):
    from transformers import AutoModelForCausalLM

    source, folder, plain = root / f"{kind} source", root / kind, root / f"{kind} plain"
    save(tiny_model(family, **changes), source)
    packed, numbers = quantise(load_file(source / SINGLE))
    write_tensors(folder, packed, shards=3)
    write_config(folder, source, quantization_config=quantization_config)
    write_tensors(plain, numbers, shards=1)
    write_config(plain, source)
    torch.save(canonical(AutoModelForCausalLM.from_pretrained(plain), family), folder / "expected.pt")
    return Checkpoint(str(folder), str(plain), family, config)


def write_all(root):
    quiet()
    found = {}
    for family in FAMILIES:
        model = tiny_model(family)
        weights = canonical(model, family)
        assert tuple(weights) == LAYERS[family]
        ways = {"shards": {"max_shard_size": "30KB"}, "single": {}, "fused": {"save_original_format": False}}
        for way, options in ways.items():
            folder = root / f"{family} {way}"
            save(model, folder, **options)
            assert (folder / INDEX).is_file() == (way == "shards")
            torch.save(weights, folder / "expected.pt")
            found[folder.name] = Checkpoint(str(folder), str(root / f"{family} single"), family, CONFIGS[family])
    found |= {"llama4_text wrapped": write_wrapped(root, found["llama4_text single"])}
    sizes = {"hidden_size": 160, "moe_intermediate_size": 144, "n_shared_experts": 1}
    config = dataclasses.replace(
        CONFIGS["deepseek_v3"], hidden_size=160, intermediate_size=144, shared_intermediate_size=144
    )
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    kind = "deepseek_v3 fp8"
    found[kind] = write_quantised(root, kind, "deepseek_v3", config, quantise_fp8, how, **sizes)
    config = dataclasses.replace(CONFIGS["gpt_oss"], intermediate_size=96)
    kind, how = "gpt_oss mxfp4", {"quant_method": "mxfp4"}
    found[kind] = write_quantised(root, kind, "gpt_oss", config, quantise_mxfp4, how, intermediate_size=96)
    return found


def write_wrapped(root, single):
    """As published Llama-4 checkpoints: the text model below `language_model.`, an image model beside it."""
    tensors = {f"language_model.{name}": t for name, t in load_file(Path(single.folder) / SINGLE).items()}
    tensors["vision_model.layernorm_pre.weight"] = torch.ones(8)
    folder = root / "llama4_text wrapped"
    write_tensors(folder, tensors, shards=2)
    text = json.loads((Path(single.folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    shutil.copy(Path(single.folder) / "expected.pt", folder)
    return dataclasses.replace(single, folder=str(folder))


@functools.cache
def written(base):
    """Every checkpoint under test by name, written once however many test files want them."""
    return write_all(base / "checkpoints")


def piece(name, whole, etp, rank):
    """The etp rank's part of whole tensors [E, ...], by indices."""
    inner = whole.shape[2] if name == "w2" else whole.shape[1] // 2
    mine = range(rank * inner // etp, (rank + 1) * inner // etp)
    match name:
        case "w13" | "w13_bias":
            return whole[:, [*mine, *(inner + i for i in mine)]]
        case "w2":
            return whole[:, :, list(mine)]
        case "w2_bias":
            return whole


def make_layers(checkpoint, context, numbers, expert_map=None, dtype=torch.float32):
    return {n: MoELayer(checkpoint.config, context, expert_map=expert_map, dtype=dtype) for n in numbers}


def check_layer(layer, expected, where):
    exact = functools.partial(torch.testing.assert_close, rtol=0, atol=0, msg=lambda m: f"{where}: {m}")
    weights = layer.expert_weights
    assert set(weights.names) == set(expected["experts"])
    slots = [(slot, expert) for slot, expert in enumerate(weights.local_experts) if expert >= 0]
    for name, whole in expected["experts"].items():
        pieces = piece(name, whole, weights.etp.size, weights.etp.rank)
        for slot, expert in slots:
            exact(weights.get_parameter(name)[slot].detach().cpu(), pieces[expert])
    for found, named in ((layer.router, "router"), (layer.shared_experts, "shared")):
        tensors = {} if found is None else found.state_dict()
        assert tensors.keys() == expected[named].keys(), where
        for name, tensor in expected[named].items():
            exact(tensors[name].cpu(), tensor)
