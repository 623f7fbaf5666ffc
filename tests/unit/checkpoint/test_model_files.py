"""Test a model's folder: tied weights as in transformers, links out of the folder, and code in it."""

from __future__ import annotations

import ast
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_moe import CheckpointError
from ep_moe.checkpoint.source import INDEX, SINGLE, CheckpointSource
from ep_moe.checkpoint.unexpected_tensors import unexpected
from ep_moe.integrations.config_file import read_config
from ep_moe.integrations.transformers import export_weights, load_weights
from tests.fixtures.checkpoint_files import change, quiet, save, tiny_model, written
from tests.fixtures.checkpoint_files import load_locally as load

transformers = pytest.importorskip("transformers")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(24).reshape(2, 12)).logits


def test_a_matrix_that_was_seen_as_one_is_seen_as_two(tmp_path):
    """A matrix can be viewed as one and later as two stacked matrices.

    In a fused gate_up tensor, blocks of scales are counted from the start of each half.
    """
    save_file({"gate_up": torch.ones(8, 4)}, tmp_path / SINGLE)
    source = CheckpointSource(tmp_path)
    seen = [
        source.matrix("gate_up", transposed=turned, stacked=stacked) for stacked in (1, 2) for turned in (False, True)
    ]
    assert [(matrix.stacked, matrix.transposed) for matrix in seen] == [(1, False), (1, True), (2, False), (2, True)]


# --- tied weights ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    save(tiny_model("qwen3_moe"), folder)
    return folder


def with_tensors(source, folder, change):
    shutil.copytree(source, folder)
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


TIES = {
    "no head": (lambda t: t.pop(HEAD, None), True),
    "an equal head": (lambda t: t.update({HEAD: t[EMBEDDING].clone()}), True),
    "another head": (lambda t: t.update({HEAD: t[EMBEDDING] + 1.0}), False),
    "one number apart": (lambda t: (t.update({HEAD: t[EMBEDDING].clone()}), t[HEAD][3, 3].add_(1.0)), False),
    "no embedding": (lambda t: t.update({HEAD: t.pop(EMBEDDING)}), True),
}


@pytest.mark.parametrize("what", TIES)
def test_tied_weights_are_those_of_transformers(what, tied, tmp_path):
    quiet()
    change, stays = TIES[what]
    folder = with_tensors(tied, tmp_path / "model", change)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = load(folder, dtype=torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == stays
    assert (wanted.lm_head.weight is wanted.model.embed_tokens.weight) == stays
    torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_tied_tensor_is_pushed_by_either_name(name, tied):
    model = load(tied, dtype=torch.float32)
    weights = {key: tensor + 1.0 for key, tensor in export_weights(model) if key not in (EMBEDDING, HEAD)}
    weights[name] = model.lm_head.weight.detach() + 1.0
    assert load_weights(model, weights) == set(weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights[name])


def test_what_a_model_has_no_place_for_is_not_among_the_pushed_names(tied):
    """`load_weights` does not return names of tensors that the model has no place for, whatever their order."""
    model = load(tied, dtype=torch.float32)
    weights = dict(export_weights(model))
    more = {"score.weight": torch.ones(2, 32), "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    with pytest.warns(UserWarning, match="is not loaded"):
        assert load_weights(model, more | weights) == set(weights)


def test_weights_that_must_be_there(tied, tmp_path):
    neither = with_tensors(tied, tmp_path / "neither", lambda t: [t.pop(name, None) for name in (HEAD, EMBEDDING)])
    with pytest.raises(CheckpointError, match=rf"{HEAD} and {EMBEDDING} are missing"):
        load(neither)
    apart = with_tensors(tied, tmp_path / "apart", lambda t: t.pop(HEAD, None))
    change(tie_word_embeddings=False)(apart)
    with pytest.raises(CheckpointError, match=rf"{HEAD} must have shape \[64, 32\], got nothing"):
        load(apart)


def test_weights_that_the_model_has_no_place_for_are_one_warning(tied, tmp_path):
    more = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(32),
        "model.layers.7.input_layernorm.weight": torch.ones(32),
        "model.layers.8.input_layernorm.weight": torch.ones(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "score.weight": torch.ones(2, 32),
    }
    folder = with_tensors(tied, tmp_path / "model", lambda t: t.update(more))
    with pytest.warns(UserWarning, match="is not loaded") as found:
        load(folder)
    (said,) = [str(one.message) for one in found if "is not loaded" in str(one.message)]
    assert "model.layers.0.self_attn.q_proj.bias, model.layers.{n}.input_layernorm.weight (2 tensors)" in said
    assert "score.weight" in said
    assert "inv_freq" not in said


@pytest.mark.parametrize("nested", [False, True])
def test_other_parts_are_those_of_a_multimodal_model(nested, tied, tmp_path):
    """Tensors of other parts of a multimodal model are ignored, if config.json nests the text model at any depth."""
    more = {name: torch.ones(32) for name in ("vision_model.norm.weight", "model.visual.merger.norm.weight")}
    folder = with_tensors(
        tied, tmp_path / "model", lambda t: t.update(more | {"model.layers.7.norm.weight": torch.ones(32)})
    )
    model = load(tied)
    if nested:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": "other", "text_config": config}))
    said = unexpected(model, CheckpointSource(folder), ["model.layers.0.mlp", "model.layers.1.mlp"])
    assert said is not None
    assert "model.layers.7.norm.weight" in said
    assert all((name in said) != nested for name in more)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama4_text"])
def test_a_whole_model_is_loaded_without_a_word(family, checkpoints):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoints[f"{family} shards"].folder)


# --- names that leave the folder ---------------------------------------------------------------------------------


def moved(folder, elsewhere, name):
    """Move the weights out of the folder, and write an index that names them."""
    elsewhere.mkdir()
    shutil.move(folder / SINGLE, elsewhere / "x.safetensors")
    names = load_file(elsewhere / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))


def indexed(folder, *left_out, single=False):
    """Write the weights as one shard, and an index that leaves some out."""
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, folder / "one.safetensors")
    names = dict.fromkeys(tensors.keys() - set(left_out), "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    if not single:
        (folder / SINGLE).unlink()


def test_tensors_that_the_index_does_not_name(checkpoints, tmp_path):
    """Tensors in a shard that the index leaves out are named in a warning.

    A tied head used to be taken from the embedding silently, though the shard has another.
    """
    shutil.copytree(checkpoints["qwen3_moe single"].folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / SINGLE) | {"lm_head.weight": torch.randn(64, 32)}
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    indexed(tmp_path, "lm_head.weight")
    with pytest.warns(UserWarning, match=rf"lm_head\.weight, model.*q_proj\.bias is not loaded: {INDEX} does not name"):
        load(tmp_path)


def test_a_tensor_in_two_shards(checkpoints, tmp_path):
    """A tensor in two shards is read from the one that the index names, and a warning names the other.

    transformers reads the last shard, whatever the index names.
    """
    shutil.copytree(checkpoints["qwen3_moe single"].folder, tmp_path, dirs_exist_ok=True)
    indexed(tmp_path)
    tensors = load_file(tmp_path / "one.safetensors")
    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    save_file({norm: tensors.pop(norm)}, tmp_path / "a.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != bias} | {norm: torch.ones(32)},
        tmp_path / "b.safetensors",
    )
    files = dict.fromkeys(tensors.keys() - {bias}, "b.safetensors") | {norm: "a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.warns(UserWarning, match=rf"b\.safetensors: model\.norm\.weight is not loaded: {INDEX} has it in a\.s"):
        load(tmp_path)


def test_a_single_file_beside_shards_is_refused(checkpoints, tmp_path):
    """A single file beside an index of shards is refused.

    transformers reads the single file, and this package used to read the shards.
    """
    shutil.copytree(checkpoints["mixtral single"].folder, tmp_path, dirs_exist_ok=True)
    indexed(tmp_path, single=True)
    with pytest.raises(CheckpointError, match=rf"holds {SINGLE}, and {INDEX} with other files; remove the one"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../other/x.safetensors", "{other}/x.safetensors", "a/../../other/x.safetensors"])
def test_names_that_leave_the_folder(name, checkpoints, tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(checkpoints["mixtral single"].folder, folder)
    moved(folder, other, name.format(other=other))
    with pytest.raises(CheckpointError, match=r"x\.safetensors', which is outside the folder; put the file into"):
        load(folder)


def test_links(checkpoints, tmp_path):
    """Links into the folder and to the blobs of a cache are followed. Other links are refused."""
    good, other = checkpoints["mixtral single"].folder, tmp_path / "other"
    shutil.copytree(good, other)
    for name in ("model", "inside", "cache/models--org--model/snapshots/abc"):
        shutil.copytree(good, tmp_path / name)
        (tmp_path / name / SINGLE).unlink()
    (tmp_path / "model" / SINGLE).symlink_to(other / SINGLE)
    with pytest.raises(CheckpointError, match=r"is a link to .*other.*, outside the folder; copy the file"):
        load(tmp_path / "model")
    (tmp_path / "through").symlink_to(other)  # the folder itself may be a link
    load(tmp_path / "through")
    (tmp_path / "inside" / "weights").mkdir()
    shutil.copy(Path(good) / SINGLE, tmp_path / "inside" / "weights")
    (tmp_path / "inside" / SINGLE).symlink_to(f"weights/{SINGLE}")
    load(tmp_path / "inside")
    # huggingface_hub's layout: a snapshot links to a blob, which may link to a blob shared by repositories
    repository = tmp_path / "cache" / "models--org--model"
    (repository / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "ab").mkdir(parents=True)
    shutil.copy(Path(good) / SINGLE, tmp_path / "cache" / "blobs" / "ab" / "shared")
    (repository / "blobs" / "etag").symlink_to("../../blobs/ab/shared")
    (repository / "snapshots" / "abc" / SINGLE).symlink_to("../../blobs/etag")
    load(repository / "snapshots" / "abc")


# --- code of the repository --------------------------------------------------------------------------------------


def planted(folder, **fields):
    """Put code into the folder that creates a file when it runs."""
    (folder / "configuration_own.py").write_text(
        f"open({str(folder / 'it ran')!r}, 'w')\nfrom transformers import MixtralConfig as Own\n"
    )
    change(auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "configuration_own.Own"}, **fields)(
        folder
    )


def test_a_models_own_code_is_not_run(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["mixtral single"].folder, folder)
    planted(folder)
    load(folder)  # transformers has this class
    planted(folder, model_type="own_kind")
    with pytest.raises(CheckpointError, match=r"config\.json: model_type 'own_kind' .*needs code of its repository"):
        read_config(folder)
    assert not (folder / "it ran").exists()


def test_every_from_pretrained_states_it():
    """Every `from_pretrained` call of an Auto class in the package passes trust_remote_code=False."""
    for file in (Path(__file__).parents[3] / "ep_moe").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name.endswith(".from_pretrained") and "Auto" in name:
                assert "trust_remote_code=False" in ast.unparse(call), f"{file}: {ast.unparse(call)}"
