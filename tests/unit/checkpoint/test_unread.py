"""Test tensors under a loaded block that the loader does not read: refused, named in one warning, or harmless."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from ep_moe import CheckpointError, EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint import model_names
from ep_moe.checkpoint.model_names import names_of
from ep_moe.checkpoint.reader import check_layer_block, load_layers
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.checkpoint.unexpected_tensors import summarize_names
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Routing
from tests.fixtures.checkpoint_files import CONFIGS, FAMILIES, LAYERS, make_layers, tiny_model, written

H, I, E = 128, 128, 4  # noqa: E741
P = "model.layers.0.mlp"
MATRIX = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
CONFIG = MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, top_k=2)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


@pytest.fixture
def context():
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def qwen(experts=E) -> dict[str, torch.Tensor]:
    found = {f"{P}.gate.weight": torch.randn(E, H)}
    for expert in range(experts):
        found |= {f"{P}.experts.{expert}.{name}.weight": torch.randn(shape) for name, shape in MATRIX.items()}
    return found


def load(folder, layer, tensors, family="qwen3_moe"):
    save_file(tensors, folder / SINGLE)
    return load_layers({0: layer}, folder, family, progress=False)


# what a qwen3_moe block may contain that the reader has no place for
CHANGING = {
    "a shared expert": {f"shared_expert.{name}.weight": shape for name, shape in MATRIX.items()},
    "another's shared experts": {"shared_experts.up_proj.weight": (I, H)},
    "a shared expert's gate": {"shared_expert_gate.weight": (1, H)},
    "a selection bias": {"gate.e_score_correction_bias": (E,)},
    "a selection bias in a place of its own": {"moe_statics.e_score_correction_bias": (1, E)},
    "a router's bias": {"gate.bias": (E,)},
    "a fifth expert": {f"experts.{E}.{name}.weight": shape for name, shape in MATRIX.items()},
    "an expert's bias": {"experts.2.down_proj.bias": (H,)},
    "a factor that plain numbers have not": {"experts.1.up_proj.weight_scale": (1,)},
    "a block factor that plain numbers have not": {"experts.1.up_proj.weight_scale_inv": (1, 1)},
    "a global factor": {"experts.1.up_proj.weight_global_scale": (1,)},
    "a factor of the input": {"experts.3.gate_proj.pre_quant_scale": (H,)},
    "a factor per expert": {"router.per_expert_scale": (E,)},
    "a norm": {"norm.weight": (H,)},
    "a second copy of the experts": {"experts.gate_up_proj": (E, 2 * I, H)},
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_would_change_outputs_is_refused_by_name(what, context, tmp_path):
    more = {f"{P}.{name}": torch.randn(shape) for name, shape in CHANGING[what].items()}
    with pytest.raises(CheckpointError, match=r"family 'qwen3_moe' does not read|would scale them") as caught:
        load(tmp_path, MoELayer(CONFIG, context), qwen() | more)
    assert all(name in str(caught.value) for name in more)
    assert str(tmp_path) in str(caught.value)


def test_what_is_outside_the_loaded_blocks_is_not_asked_for(context, tmp_path):
    others = ("model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.0.mlp_norm.weight", "mtp.mlp.gate.weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, MoELayer(CONFIG, context), qwen() | {name: torch.ones(2) for name in others})


def test_harmless_tensors_are_quiet(context, tmp_path):
    ends = ("input_scale", "weight_shape", "rotary_emb.inv_freq")
    more = {f"{P}.experts.0.up_proj.{end}": torch.ones(2) for end in ends}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, MoELayer(CONFIG, context), qwen() | more)


def router(x):
    ids = torch.arange(2).expand(len(x), 2)
    return Routing(ids, torch.ones(len(x), 2))


def test_what_the_caller_loads_is_one_warning(context, tmp_path):
    shared = {f"{P}.shared_experts.{name}.weight": torch.randn(shape) for name, shape in MATRIX.items()}
    bias = {f"{P}.gate.e_score_correction_bias": torch.randn(E)}
    tensors = qwen() | shared | bias
    tensors |= {name.replace("layers.0", "layers.3"): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / SINGLE)
    layers = {number: MoELayer(CONFIG, context, router=router) for number in (0, 3)}
    with pytest.warns(UserWarning, match="is not loaded") as found:
        load_layers(layers, tmp_path, "deepseek_v3", progress=False)
    (said,) = [str(one.message) for one in found]
    assert "model.layers.{n}.mlp.shared_experts (2 tensors) is not loaded: the layer has no shared experts" in said
    assert "model.layers.{n}.mlp.gate.weight (2 tensors)" in said
    assert "model.layers.{n}.mlp.gate.e_score_correction_bias (2 tensors)" in said


def test_names_of_the_callers(context, tmp_path):
    """Names in the entry's `elsewhere` are left to the caller with a warning, as the refusal suggests."""
    more = {f"{P}.shared_expert.{name}.weight": torch.randn(shape) for name, shape in MATRIX.items()}
    mine = dataclasses.replace(names_of("qwen3_moe"), elsewhere=("shared_expert",))
    with pytest.warns(UserWarning, match="mlp.shared_expert is not loaded: the family's entry leaves it to the caller"):
        load(tmp_path, MoELayer(CONFIG, context), qwen() | more, mine)
    with pytest.raises(CheckpointError, match=r"does not read .*shared_expert_gate\.weight"):
        load(tmp_path, MoELayer(CONFIG, context), qwen() | {f"{P}.shared_expert_gate.weight": torch.ones(1, H)}, mine)


def test_a_configuration_of_another_model_is_named(context, tmp_path):
    for text in ({"model_type": "olmoe"}, {"model_type": "outer", "text_config": {"model_type": "olmoe"}}):
        (tmp_path / "config.json").write_text(json.dumps(text))
        with pytest.warns(UserWarning, match="model_type 'olmoe', and the names of 'qwen3_moe' are read"):
            load(tmp_path, MoELayer(CONFIG, context), qwen())
    for same in ('{"model_type": "qwen3_moe"}', "{", "[]", "{}"):
        (tmp_path / "config.json").write_text(same)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(tmp_path, MoELayer(CONFIG, context), qwen())


@distributed(2)
def test_one_ranks_file_is_refused_on_all(checkpoints):
    """An additional tensor in one rank's file is refused on all ranks. Rank 1's copy has a matrix of a ninth expert."""
    good = checkpoints["qwen3_moe single"]
    with tempfile.TemporaryDirectory() as place, EPContext.from_groups(device=rank_device()) as context:
        folder = Path(place) / "copy"
        shutil.copytree(good.folder, folder)
        if dist.get_rank() == 1:
            tensors = load_file(folder / SINGLE)
            tensors["model.layers.2.mlp.experts.8.up_proj.weight"] = torch.ones(48, 32)
            save_file(tensors, folder / SINGLE)
        with pytest.raises(CheckpointError, match=r"rank 1: .*does not read .*layers\.2\.mlp\.experts\.8\.up_proj"):
            load_layers(make_layers(good, context, [0, 2]), folder, "qwen3_moe", progress=False)


# --- entries of families -----------------------------------------------------------------------------------------


def test_every_family_of_models_has_names():
    from ep_moe.integrations import families as blocks

    assert model_names.CHECKPOINT_NAMES.keys() == blocks.FAMILIES.keys() == set(FAMILIES)


def entry_without(family):
    """Yield a family's entry several times, each time without one thing."""
    names = model_names.CHECKPOINT_NAMES[family]
    for key in names.router:
        yield key, dataclasses.replace(names, router={k: v for k, v in names.router.items() if k != key})
    if names.shared is not None:
        yield "shared", dataclasses.replace(names, shared=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_entry_accounts_for_what_transformers_saves(family, checkpoints, context):
    """Each family's entry covers all tensors that transformers saves in a block.

    An entry that leaves out a tensor is refused, and the error names the tensor.
    """
    checkpoint = checkpoints[f"{family} single"]
    layers = make_layers(checkpoint, context, LAYERS[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_layers(layers, checkpoint.folder, family, progress=False)
    source = CheckpointSource(checkpoint.folder)
    number = LAYERS[family][0]
    for what, names in entry_without(family):
        layer = MoELayer(CONFIGS[family], context, router=router)
        if what == "shared":
            layer.shared_experts = torch.nn.Identity()  # provided by the caller
        block = names.block.format(layer=number)
        with pytest.raises(CheckpointError, match="does not read") as caught:
            check_layer_block(source, names, number, layer, family)
        forgotten = "shared_expert" if what == "shared" else names_of(family).router[what]
        assert f"{block}.{forgotten}" in str(caught.value), what


@pytest.mark.parametrize("kind", ["deepseek_v3 fp8", "gpt_oss mxfp4", "qwen3_moe fused", "mixtral shards"])
def test_what_counts_as_read_is_read(kind, checkpoints, context, monkeypatch):
    """On one rank, which holds all experts, the tensors that are read are those of the blocks."""
    checkpoint, seen = checkpoints[kind], set()
    raw = CheckpointSource.raw
    monkeypatch.setattr(CheckpointSource, "raw", lambda self, name, *i: (seen.add(name), raw(self, name, *i))[1])
    layers = make_layers(checkpoint, context, LAYERS[checkpoint.family])
    source = load_layers(layers, checkpoint.folder, checkpoint.family, progress=False)
    blocks = [names_of(checkpoint.family).block.format(layer=number) for number in layers]
    assert seen == {name for block in blocks for name in source.under(block)}


def test_a_block_in_memory_that_has_more():
    from ep_moe.integrations.transformers import expert_parallel

    model = tiny_model("qwen3_moe")
    model.model.layers[2].mlp.shared_expert_gate = torch.nn.Linear(32, 1, bias=False)
    ids = torch.arange(1, 7)[None]
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.warns(UserWarning, match=r"layers\.2\.mlp\.shared_expert_gate is Linear, and nothing by the conf"):
        model = expert_parallel(model, EPContext.local(torch.device("cpu")))
    with torch.no_grad():  # the block does not use the gate itself
        torch.testing.assert_close(model(ids).logits, expected)


# models with more tensors than the family whose names are closest: configuration class, fields
NEAREST = {
    "qwen2_moe": ("Qwen2MoeConfig", "qwen3_moe", {
        "num_experts": E, "moe_intermediate_size": I, "shared_expert_intermediate_size": I, "num_experts_per_tok": 2,
    }, ("shared_expert.", "shared_expert_gate.weight")),
    "qwen3_next": ("Qwen3NextConfig", "qwen3_moe", {
        "num_experts": E, "moe_intermediate_size": I, "shared_expert_intermediate_size": I, "num_experts_per_tok": 2,
    }, ("shared_expert.", "shared_expert_gate.weight")),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "qwen3_moe", {
        "moe_num_experts": E, "moe_intermediate_size": I, "moe_num_shared_experts": 1, "moe_k": 2,
        "moe_layer_start_index": 0, "moe_layer_end_index": 0,
    }, ("shared_experts.", "e_score_correction_bias")),
    "minimax_m2": ("MiniMaxM2Config", "mixtral", {
        "num_local_experts": E, "intermediate_size": I, "num_experts_per_tok": 2,
    }, ("e_score_correction_bias",)),
}  # fmt: skip


@pytest.mark.parametrize("model_type", NEAREST)
def test_a_file_of_another_family_under_the_nearest_names(model_type, context, tmp_path):
    transformers = pytest.importorskip("transformers")
    name, family, fields, missed = NEAREST[model_type]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    common = {"vocab_size": 16, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32}
    config = getattr(transformers, name)(**(common | {"num_key_value_heads": 2} | fields))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"family '{family}' does not read") as caught:
        load_layers({0: MoELayer(CONFIG, context)}, tmp_path, family, progress=False)
    assert all(part in str(caught.value) for part in missed), caught.value


def test_many_names_are_one_line():
    many = [f"model.layers.{n}.mlp.experts.{e}.up_proj.bias" for n in range(3) for e in range(4)]
    assert summarize_names(many) == "model.layers.{n}.mlp.experts.{n}.up_proj.bias (12 tensors)"
    assert summarize_names(["a.1.b"]) == "a.1.b"
    assert summarize_names(f"t{i}" for i in range(11)).endswith("t7, 3 more kinds")
