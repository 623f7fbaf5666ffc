"""Checkpoints of five families, as transformers writes them, into layers on ranks.

The parent process writes them with `save_pretrained` and beside them the model's own weights in canonical form; the
ranks need no transformers. `tests/distributed/test_transformers.py` uses the same tiny models.
"""

import dataclasses
import functools
import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.testing import distributed, rank_device
from ep_moe.weights import checkpoint as reader
from ep_moe.weights.checkpoint import INDEX, SINGLE, CheckpointSource, load_layers

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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


# --- weights -----------------------------------------------------------------------------------------------------

# sizes and the map: None is linear
LAYOUTS = {
    1: [({}, None)],
    2: [({"dp": 2}, ExpertMap.redundant(8, 2, 3)), ({"tp": 2, "ep": 1, "etp": 2}, None)],
    4: [
        ({"dp": 4}, None),
        ({"dp": 4}, ExpertMap.from_ranks([[7, 1, 0], [], [2, -1, 7, 3], [4, 5, 6]], 8)),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, ExpertMap.round_robin(8, 2)),
        ({"dp": 2, "tp": 2, "ep": 1, "etp": 4}, None),
    ],
}


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


KINDS = [f"{family} {way}" for family in FAMILIES for way in ("shards", "single", "fused")]
# transformers' own names for Mixtral's experts are in no published checkpoint
KINDS.remove("mixtral fused")
KINDS += ["llama4_text wrapped", "deepseek_v3 fp8", "gpt_oss mxfp4"]


@distributed(1, 2, 4)
def test_layers_hold_the_models_weights(checkpoints, world_size):
    for sizes, expert_map in LAYOUTS[world_size]:
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            for kind in KINDS:
                checkpoint, expected = checkpoints[kind], checkpoints[kind].expected
                layers = make_layers(checkpoint, context, expected, expert_map)
                load_layers(layers, checkpoint.folder, checkpoint.family, progress=False)
                for number, layer in layers.items():
                    check_layer(layer, expected[number], f"{kind} {sizes} {expert_map} layer {number}")


@distributed(2)
def test_any_layer_of_a_checkpoint_in_another_dtype(checkpoints):
    """One layer of two, in bfloat16, with a shared expert left out."""
    checkpoint = checkpoints["deepseek_v3 shards"]
    expected = checkpoint.expected[2]
    config = dataclasses.replace(checkpoint.config, shared_intermediate_size=0)
    with EPContext.from_groups(device=rank_device()) as context:
        layer = MoELayer(config, context, dtype=torch.bfloat16)
        load_layers({2: layer}, checkpoint.folder, checkpoint.family, progress=False)
        for slot, expert in enumerate(layer.expert_weights.local_experts):
            assert torch.equal(layer.expert_weights.w13[slot].cpu(), expected["experts"]["w13"][expert].bfloat16())
        # the correction bias stays in float32, whose last bits decide between experts
        assert torch.equal(layer.router.e_score_correction_bias.cpu(), expected["router"]["e_score_correction_bias"])


# --- bytes -------------------------------------------------------------------------------------------------------


def header(folder):
    """Name -> (shape, bytes) of all tensors in a folder, from the files' headers as the format describes them."""
    tensors = {}
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        tensors |= {
            n: (entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]) for n, entry in table.items()
        }
    return tensors


class Watched:
    """A safetensors file, or a slice of it, that notes every read as (tensor, index, bytes)."""

    def __init__(self, inner, reads, name=None):
        self._inner, self._reads, self._name = inner, reads, name

    def __getattr__(self, attribute):
        if attribute not in ("keys", "get_shape", "get_dtype"):
            raise AssertionError(f"a read that nobody counts: {attribute}")
        return getattr(self._inner, attribute)

    def get_slice(self, name):
        return Watched(self._inner.get_slice(name), self._reads, name)

    def __getitem__(self, index):
        part = self._inner[index]
        self._reads.append((self._name, index, part.numel() * part.element_size()))
        return part


def watched_load(checkpoint, layers):
    """load_layers with every read noted: (its source, the reads)."""
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "safe_open", lambda *args, **kwargs: Watched(safe_open(*args, **kwargs), reads))
        source = load_layers(layers, checkpoint.folder, checkpoint.family, progress=False)
    return source, reads


def visits(reads, tensors, device):
    """How often each element of each tensor was read, over all ranks."""
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, (shape, _) in tensors.items()}
    for name, index, _ in reads:
        counts[name][index] += 1
    flat = torch.cat([count.flatten() for count in counts.values()]).to(device)
    dist.all_reduce(flat)
    sizes = [math.prod(shape) for shape, _ in tensors.values()]
    return dict(zip(tensors, flat.cpu().split(sizes), strict=True))


def in_block(name, layers):
    """Does a tensor belong to the experts' blocks of these layers, and to what: "expert", "rest" or None."""
    names = name.removeprefix("language_model.").split(".")
    block = names[3:4] and names[3] in ("mlp", "block_sparse_moe", "feed_forward")
    if not block or int(names[2]) not in layers:
        return None
    return "expert" if names[4] == "experts" else "rest"


def number_of(name):
    """The expert's number in a tensor's name; None for a tensor of all experts."""
    part = name.split("experts.")[1].split(".")[0]
    return int(part) if part.isdigit() else None


@distributed(1, 2, 4)
def test_each_rank_reads_its_own_experts_bytes(checkpoints, world_size):
    """Every expert's bytes once over all ranks, router and shared expert on each, nothing else at all."""
    with EPContext.from_groups(device=rank_device()) as context:
        for kind in KINDS:
            checkpoint = checkpoints[kind]
            tensors = header(checkpoint.folder)
            layers = make_layers(checkpoint, context, LAYERS[checkpoint.family])
            source, reads = watched_load(checkpoint, layers)
            own = range(8 * dist.get_rank() // world_size, 8 * (dist.get_rank() + 1) // world_size)
            expected = 0
            for name, (_, size) in tensors.items():
                match in_block(name, layers):
                    case "expert":
                        number = number_of(name)
                        expected += size * len(own) // 8 if number is None else size * (number in own)
                    case "rest":
                        expected += size
            assert sum(size for _, _, size in reads) == expected, kind
            assert source.bytes_read == expected, kind
            times = {"expert": 1, "rest": world_size, None: 0}
            for name, seen in visits(reads, tensors, context.device).items():
                assert (seen == times[in_block(name, layers)]).all(), f"{kind}: {name}"


@distributed(2, 4)
def test_etp_halves_the_bytes(checkpoints, world_size):
    """etp = 2: half of each matrix on each of the two; an output bias is whole on both."""
    sizes = ParallelConfig(dp=world_size // 2, tp=2, etp=2)
    with EPContext.from_groups(sizes, device=rank_device()) as context:
        for kind in KINDS:
            checkpoint = checkpoints[kind]
            tensors = header(checkpoint.folder)
            layers = make_layers(checkpoint, context, LAYERS[checkpoint.family])
            source, reads = watched_load(checkpoint, layers)
            counts = visits(reads, tensors, context.device)
            expected = 0
            for name, (_, size) in tensors.items():
                part, whole = in_block(name, layers), name.endswith("down_proj_bias")
                # factors and blocks of quantised matrices do not end where the pieces do
                quantised = name.endswith(("_scale_inv", "down_proj_blocks", "down_proj_scales"))
                if part == "expert":
                    expected += size // (world_size // 2) // (1 if whole else 2)
                    most = 2 if whole or quantised else 1
                    assert counts[name].min() == (2 if whole else 1), f"{kind}: {name}"
                    assert counts[name].max() <= most, f"{kind}: {name}"
                else:
                    expected += size * (part == "rest")
                    assert (counts[name] == (world_size if part == "rest" else 0)).all(), f"{kind}: {name}"
            read = sum(size for _, _, size in reads)
            assert source.bytes_read == read, kind
            if "fp8" in kind or "mxfp4" in kind:
                assert expected <= read < 1.35 * expected, kind
            else:
                assert read == expected, kind


@distributed(2)
def test_replicas_are_read_once(checkpoints):
    """A rank that holds an expert three times reads it once; what no rank holds twice is read once over all."""
    checkpoint = checkpoints["mixtral shards"]
    ranks = [[0, 1, 0, 2, 3, 0], [4, 5, 6, 7, 0]]
    with EPContext.from_groups(device=rank_device()) as context:
        expert_map = ExpertMap.from_ranks(ranks, 8, allow_duplicates=True)
        layers = make_layers(checkpoint, context, [0, 1], expert_map)
        _, reads = watched_load(checkpoint, layers)
        for name, seen in visits(reads, header(checkpoint.folder), context.device).items():
            if in_block(name, layers) == "expert":
                assert (seen == (2 if number_of(name) == 0 else 1)).all(), name
        for number, layer in layers.items():
            check_layer(layer, checkpoint.expected[number], number)


# --- the bar -----------------------------------------------------------------------------------------------------


class Bar:
    """Stands for tqdm."""

    def __init__(self, *, total, disable, **_):
        self.total, self.disable, self.done = total, disable, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, count):
        self.done += count


@distributed(1, 2)
def test_only_rank_0_shows_a_bar(checkpoints, world_size):
    checkpoint = checkpoints["llama4_text shards"]
    with EPContext.from_groups(device=rank_device()) as context, pytest.MonkeyPatch.context() as patch:
        bars = []
        patch.setattr(reader, "tqdm", lambda **options: bars.append(Bar(**options)) or bars[-1])
        ranks = {1: [[*range(8), 0, 0]], 2: [[0, 1, 0, 2, 3], [4, 5, 6, 7, -1, 6, 6]]}[world_size]
        layers = make_layers(checkpoint, context, [0, 2], ExpertMap.from_ranks(ranks, 8, allow_duplicates=True))
        for progress in (True, False):
            load_layers(layers, checkpoint.folder, checkpoint.family, progress=progress)
        shown, hidden = bars
        # None: tqdm shows it on a terminal only
        assert shown.disable is (None if dist.get_rank() == 0 else True)
        assert hidden.disable is True
        # an expert in two slots is read once and counts twice
        slots = 2 * sum(expert >= 0 for expert in ranks[dist.get_rank()])
        assert (shown.total, shown.done) == (slots, slots)


# --- errors ------------------------------------------------------------------------------------------------------


def damage(root, checkpoints):
    """name -> (folder, family, what the error must say); each a copy of a good checkpoint with one thing wrong."""
    good = checkpoints["qwen3_moe shards"]
    tensors = load_file(Path(checkpoints["qwen3_moe single"].folder) / SINGLE)
    experts = "model.layers.2.mlp.experts"
    cases = {}

    def changed(name, change, pattern, *, base=tensors, family="qwen3_moe"):
        copy = dict(base)
        change(copy)
        write_tensors(root / name, copy, shards=3)
        cases[name] = (str(root / name), family, pattern)

    def spoiled(name, change, pattern):
        shutil.copytree(good.folder, root / name)
        change(root / name)
        cases[name] = (str(root / name), "qwen3_moe", pattern)

    changed(
        "missing expert",
        lambda t: t.pop(f"{experts}.5.up_proj.weight"),
        rf"{experts}\.5\.up_proj\.weight is missing; expected shape \[48, 32\]",
    )
    changed(
        "misshapen expert",
        lambda t: t.update({f"{experts}.7.down_proj.weight": torch.zeros(32, 20)}),
        rf"{experts}\.7\.down_proj\.weight must have shape \[32, 48\], got \[32, 20\]",
    )
    changed(
        "missing router",
        lambda t: t.pop("model.layers.0.mlp.gate.weight"),
        r"model\.layers\.0\.mlp\.gate\.weight is missing; expected shape \[8, 32\]",
    )
    changed(
        "too many experts",
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(9, 32)}),
        r"model\.layers\.0\.mlp\.gate\.weight must have shape \[8, 32\], got \[9, 32\]",
    )
    changed(
        "no such layer",
        lambda t: [t.pop(name) for name in list(t) if "layers.2" in name],
        r"model\.layers\.2\.mlp has no experts, experts\.0\.gate_proj\.weight_scale_2 or .* or experts\.gate_up_proj "
        r"or .* missing",
    )
    deepseek = load_file(Path(checkpoints["deepseek_v3 single"].folder) / SINGLE)
    for what, name, shape in (
        ("missing correction bias", "gate.e_score_correction_bias", r"\[8\]"),
        ("missing shared expert", "shared_experts.down_proj.weight", r"\[32, 96\]"),
    ):
        changed(
            what,
            lambda t, name=name: t.pop(f"model.layers.1.mlp.{name}"),
            rf"model\.layers\.1\.mlp\.{name} is missing; expected shape {shape}",
            base=deepseek,
            family="deepseek_v3",
        )
    shard = "model-00002-of-0000"
    spoiled("missing shard", lambda f: next(f.glob(f"{shard}*")).unlink(), rf"{shard}.*is missing, though {INDEX}")
    spoiled(
        "truncated shard",
        lambda f: (path := next(f.glob(f"{shard}*"))).write_bytes(path.read_bytes()[:-100]),
        rf"{shard}.*is not a readable safetensors file",
    )
    spoiled(
        "empty shard",
        lambda f: next(f.glob(f"{shard}*")).write_bytes(b""),
        rf"{shard}.*is not a readable safetensors file",
    )
    indices = (b'{"weight_map": ', b"{}", b"[]", b'{"weight_map": 3}', b'{"weight_map": ["a"]}', b"\xff\xfe")
    for number, text in enumerate(indices):
        pattern = f"{INDEX} is not a safetensors index"
        spoiled(f"broken index {number}", lambda f, text=text: (f / INDEX).write_bytes(text), pattern)

    def swap(folder):
        index = json.loads((folder / INDEX).read_text())
        files = sorted(set(index["weight_map"].values()))
        name = f"{experts}.3.up_proj.weight"
        index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
        (folder / INDEX).write_text(json.dumps(index))

    spoiled(
        "index names another file", swap, rf"{experts}\.3\.up_proj\.weight is not in .*model-0000.*, though {INDEX}"
    )
    spoiled("no checkpoint", lambda f: [path.unlink() for path in f.iterdir()], f"holds neither {INDEX} nor {SINGLE}")
    cases["no folder"] = (str(root / "nothing here"), "qwen3_moe", f"holds neither {INDEX} nor {SINGLE}")
    cases["wrong family"] = (
        good.folder,
        "mixtral",
        r"has no experts, experts\.0\.w1\.weight_scale_2 or experts\.0\.w1",
    )
    cases["wrong fused family"] = (checkpoints["llama4_text shards"].folder, "gpt_oss", "has no experts, experts")

    quantised = {}
    for path in Path(checkpoints["deepseek_v3 fp8"].folder).glob("*.safetensors"):
        quantised |= load_file(path)
    name = "model.layers.1.mlp.experts.6.gate_proj.weight"
    for what, change, found in (
        ("missing factors", lambda t: t.pop(f"{name}_scale_inv"), "nothing"),
        ("misshapen factors", lambda t: t.update({f"{name}_scale_inv": torch.ones(144, 1)}), r"\[144, 1\]"),
    ):
        pattern = rf"{name} is float8 of shape \[144, 160\].*{name}_scale_inv of shape \[2, 2\].*got {found}"
        changed(what, change, pattern, base=quantised, family="deepseek_v3")
    return cases


@pytest.fixture(scope="session")
def damaged(checkpoints, tmp_path_factory):
    return damage(tmp_path_factory.mktemp("damaged"), checkpoints)


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "barrier",
    "reduce_scatter", "reduce_scatter_tensor", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


def refuse(*args, **kwargs):
    raise AssertionError("a collective was entered")


@distributed(1, 2)
def test_damage_is_one_error_on_all_ranks(checkpoints, damaged, world_size):
    """The whole checkpoint damaged, then rank 1's copy alone. No collective is entered; the context stays usable."""
    last = world_size - 1
    with EPContext.from_groups(device=rank_device()) as context:
        for name, (folder, family, pattern) in damaged.items():
            checkpoint = checkpoints["deepseek_v3 fp8" if "factors" in name else f"{family} shards"]
            for where in {"everywhere", "one rank"} if world_size > 1 else {"everywhere"}:
                layers = make_layers(checkpoint, context, LAYERS[family])
                before = {n: layer.expert_weights.w13.clone() for n, layer in layers.items()}
                hit = where == "everywhere" or dist.get_rank() == last
                with pytest.MonkeyPatch.context() as patch:
                    for collective in COLLECTIVES:
                        patch.setattr(dist, collective, refuse)
                    with pytest.raises(CheckpointError, match=pattern) as caught:
                        load_layers(layers, folder if hit else checkpoint.folder, family, progress=False)
                said = [None] * world_size
                dist.all_gather_object(said, (str(caught.value), folder))
                assert len({message for message, _ in said}) == 1, f"{name}, {where}: {said}"
                if where == "one rank":
                    assert f"rank {last}:" in said[0][0]
                    # the folder that is damaged is the one that is named
                    assert said[last][1] in said[0][0]
                for n, layer in layers.items():
                    assert torch.equal(layer.expert_weights.w13, before[n]), f"{name}: half loaded"
        good = checkpoints["qwen3_moe shards"]
        layers = make_layers(good, context, LAYERS["qwen3_moe"])
        load_layers(layers, good.folder, "qwen3_moe", progress=False)
        check_layer(layers[2], good.expected[2], "after the errors")


@distributed(2)
def test_ranks_may_read_copies_of_their_own(checkpoints):
    """Node-local copies lie under different paths."""
    ways = ["mixtral shards", "mixtral single"]
    checkpoint = checkpoints[ways[dist.get_rank()]]
    with EPContext.from_groups(device=rank_device()) as context:
        layers = make_layers(checkpoint, context, [1])
        load_layers(layers, checkpoint.folder, "mixtral", progress=False)
        check_layer(layers[1], checkpoint.expected[1], ways)


def test_unknown_family_is_named(checkpoints):
    layers = make_layers(checkpoints["mixtral single"], EPContext.local(torch.device("cpu")), [0])
    with pytest.raises(ConfigError, match=r"family must be one of .*mixtral.*, got 'mixtrel'"):
        load_layers(layers, checkpoints["mixtral single"].folder, "mixtrel")


def test_source_reads_parts(checkpoints):
    """The source alone: shapes, parts, and their bytes."""
    checkpoint = checkpoints["deepseek_v3 fp8"]
    source = CheckpointSource(checkpoint.folder)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert source.has(name)
    assert not source.has("model.layers.1.mlp.experts.8.up_proj.weight")
    assert source.shape(name) == (144, 160)
    assert source.bytes_read == 0
    plain = load_file(Path(checkpoint.plain) / SINGLE)[name]
    assert torch.equal(source.read(name, slice(100, 130), slice(127, 129)), plain[100:130, 127:129])
    assert source.bytes_read == 30 * 2 + 4 * 4  # fp8 and four float32 factors
    assert torch.equal(source.read(name), plain)
    with pytest.raises(CheckpointError, match="nowhere is missing in"):
        source.read("nowhere")
