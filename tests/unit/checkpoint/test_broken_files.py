"""Test a model's folder with broken files, on one rank or on all: one sentence names the file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from ep_moe import CheckpointError, ConfigError, EPContext, EPMoEError
from ep_moe.checkpoint.source import INDEX, SINGLE, CheckpointSource
from ep_moe.integrations.config_file import read_config
from ep_moe.integrations.families import checked_config
from ep_moe.integrations.transformers import load_pretrained, read_moe_config
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import change, local, written
from tests.fixtures.checkpoint_files import load_locally as load

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


def text(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def without(field):
    def write(folder):
        found = json.loads((folder / "config.json").read_text())
        del found[field]
        (folder / "config.json").write_text(json.dumps(found))

    return write


def other_dtype(folder):
    """Replace the dtype in the header by one that torch does not have. Sizes stay right."""
    path = next(folder.glob("*.safetensors"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"F32"', b'"X32"')
    path.write_bytes(data[:8] + header + data[8 + length :])


DEEP = b'{"a":' * 50_000
CONFIG = "config.json"
# what is broken -> (how to break it, pattern of the error)
BROKEN = {
    "deep config": (text(CONFIG, DEEP), r"config\.json is nothing that transformers can read: RecursionError"),
    "deep config that ends": (text(CONFIG, b'{"a":' * 800 + b"1" + b"}" * 800), r"config\.json"),
    "list": (text(CONFIG, b"[1]"), r"config\.json is nothing .*must hold an object, got list"),
    "empty config": (text(CONFIG, b""), r"config\.json is nothing"),
    "no utf-8": (text(CONFIG, b"\xff\xfe{"), r"config\.json is nothing"),
    "no model_type": (without("model_type"), r"config\.json is nothing"),
    "model_type 5": (change(model_type=5), r"config\.json is nothing"),
    "model_type list": (change(model_type=["mixtral"]), r"config\.json is nothing"),
    "hidden_size -1": (change(hidden_size=-1), r"config\.json: hidden_size must be a positive integer, got -1"),
    "hidden_size 0": (change(hidden_size=0), r"config\.json: hidden_size must be a positive integer, got 0"),
    "hidden_size 32.5": (change(hidden_size=32.5), r"config\.json.*hidden_size"),
    "hidden_size text": (change(hidden_size="32"), r"config\.json.*hidden_size"),
    "hidden_size null": (change(hidden_size=None), r"config\.json.*hidden_size"),
    "hidden_size true": (change(hidden_size=True), r"config\.json.*hidden_size"),
    "hidden_size NaN": (
        change(hidden_size=float("nan")),
        r"config\.json: hidden_size must be a finite number, got nan",
    ),
    "epsilon NaN": (change(rms_norm_eps=float("nan")), r"config\.json: rms_norm_eps must be a finite number, got nan"),
    "epsilon infinite": (
        change(rms_norm_eps=float("inf")),
        r"config\.json: rms_norm_eps must be a finite number, got inf",
    ),
    "vocab_size -5": (change(vocab_size=-5), r"config\.json: vocab_size must be a positive integer, got -5"),
    "no layers": (change(num_hidden_layers=0), r"config\.json: num_hidden_layers must be a positive integer, got 0"),
    "heads 0": (change(num_attention_heads=0), r"config\.json: num_attention_heads must be a positive integer, got 0"),
    "experts -8": (change(num_local_experts=-8), r"config\.json: num_local_experts must be a positive integer, got -8"),
    "more routes than experts": (change(num_experts_per_tok=9), r"config\.json: MoEConfig\.top_k must not exceed"),
    "hidden_act": (change(hidden_act="siluu"), r"config\.json: hidden_act must be one of silu, .*got 'siluu'"),
    "hidden_act 3": (change(hidden_act=3), r"config\.json.*hidden_act"),
    "dtype int64": (change(dtype="int64"), r"config\.json: dtype must be one of bfloat16, .*got 'int64'"),
    "dtype float8": (
        change(dtype="float8_e4m3fn"),
        r"config\.json: dtype must be one of bfloat16, .*got 'float8_e4m3fn'",
    ),
    "dtype nonsense": (change(torch_dtype="float33"), r"config\.json: torch_dtype must be .*'float33'"),
    "dtype a module": (change(dtype="nn"), r"config\.json: dtype must be one of .*'nn'"),
    "dtype a number": (change(dtype=5), r"config\.json: dtype must be one of .*got 5"),
    "rope nonsense": (change(rope_parameters={"rope_type": "twisted", "rope_theta": 1e4}), r"config\.json"),
    "generation not JSON": (text("generation_config.json", b"{"), r"generation_config\.json is nothing"),
    "generation list": (text("generation_config.json", b"[]"), r"generation_config\.json is nothing"),
    "generation deep": (text("generation_config.json", DEEP), r"generation_config\.json is nothing"),
    "index 5": (
        text(INDEX, b'{"weight_map": {"lm_head.weight": 5}}'),
        r"weight_map\['lm_head\.weight'\] must be the .*5",
    ),
    "index deep": (text(INDEX, DEEP), rf"{INDEX} is not a safetensors index: RecursionError"),
    "index leaves": (
        text(INDEX, b'{"weight_map": {"a": "../x.safetensors"}}'),
        r"'\.\./x\.safetensors', which is outside",
    ),
    "no file": (lambda f: (f / SINGLE).unlink(), "holds neither"),
    "cut file": (lambda f: os.truncate(f / SINGLE, 5000), "not a readable safetensors file"),
    "cut header": (lambda f: os.truncate(f / SINGLE, 100), "not a readable safetensors file"),
    "empty file": (text(SINGLE, b""), "not a readable safetensors file"),
    "no safetensors": (text(SINGLE, b"garbage" * 1000), "not a readable safetensors file"),
    "unknown dtype": (other_dtype, SINGLE),
}


def broken(folder, what):
    BROKEN[what][0](folder)
    return BROKEN[what][1]


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_one_sentence(what, checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["mixtral single"].folder, folder)
    pattern = broken(folder, what)
    with pytest.raises((CheckpointError, ConfigError), match=pattern) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("what", ["hidden_size -1", "list", "deep config", "dtype int64", "hidden_act", "heads 0"])
def test_a_configuration_alone(what, checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["mixtral single"].folder, folder)
    pattern = broken(folder, what)
    with local() as context, pytest.raises((CheckpointError, ConfigError), match=pattern):
        read_moe_config(folder, context)


def test_the_text_model_of_a_multimodal_configuration_is_read(checkpoints):
    with local() as context:
        alone, beside = (
            read_moe_config(checkpoints[f"llama4_text {how}"].folder, context) for how in ("single", "wrapped")
        )
    assert alone == beside
    config, _ = checked_config(Path(checkpoints["llama4_text wrapped"].folder))
    assert config.model_type == "llama4_text"


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_dtype_that_no_model_has_is_named_in_each_part(inside, field, checkpoints, tmp_path):
    """A dtype that no model can have is named, in each part of config.json.

    transformers accepts any attribute of torch as a dtype, in the text model's configuration too.
    """
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["llama4_text wrapped"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if inside else config)[field] = "float8_e4m3fn"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} must be one of bfloat16, .*got 'float8_e4m3fn'"):
        read_config(folder)


@pytest.mark.parametrize("own", [None, "float16"])
def test_a_text_model_without_a_dtype_has_that_of_the_whole(own, checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["llama4_text wrapped"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for part, dtype in ((config, "bfloat16"), (config["text_config"], own)):
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config))
    assert read_config(folder).dtype == (torch.float16 if own else torch.bfloat16)


@pytest.mark.parametrize("path", [5, None, "", "a\0b", "x" * 5000, b"bytes", ["list"]])
def test_paths_that_are_none(path):
    with pytest.raises(EPMoEError, match="folder"):
        load(path)


@pytest.mark.parametrize(
    "name", ["block_sparse_moe.experts.1.w3.weight", "block_sparse_moe.gate.weight", "self_attn.q_proj.weight"]
)
def test_numbers_that_a_dtype_cannot_hold(name, checkpoints, tmp_path):
    """Numbers that the requested dtype cannot hold are refused. They used to become infinite silently."""
    shutil.copytree(checkpoints["mixtral single"].folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / SINGLE)
    full = next(one for one in tensors if one.endswith(f"layers.1.{name}"))
    tensors[full][0, 0] = -1e6
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    load(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"has numbers up to 1e\+06, and torch\.float16 ends at 6\.55e\+04; choose"
    ):
        load(tmp_path, dtype=torch.float16)


def test_dtypes_that_no_model_has(checkpoints):
    with pytest.raises(ConfigError, match=r"dtype must be torch\.bfloat16, .*got torch\.int8"):
        load(checkpoints["mixtral single"].folder, dtype=torch.int8)


ON_ONE_RANK = ("deep config", "heads 0", "hidden_act", "dtype int64", "generation list", "index 5", "cut file")


@distributed(2)
def test_a_broken_file_of_one_rank_is_one_sentence_on_all(checkpoints):
    """A broken file on one rank raises the same sentence on all ranks.

    The other rank has meanwhile gone on to make layers.
    """
    good = checkpoints["mixtral single"].folder
    with tempfile.TemporaryDirectory() as place, EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        for what in ON_ONE_RANK:
            folder = Path(place) / what
            shutil.copytree(good, folder)
            pattern = BROKEN[what][1]
            if dist.get_rank() == 1:
                broken(folder, what)
            with pytest.raises((CheckpointError, ConfigError), match=rf"rank 1: .*{pattern}") as caught:
                load_pretrained(folder, context, progress=False)
            said = [None, None]
            dist.all_gather_object(said, (type(caught.value).__name__, str(caught.value)))
            assert said[0] == said[1], what
        assert load_pretrained(good, context, progress=False) is not None  # the ranks are still in step


class Surprise(Exception):
    pass


@distributed(2)
def test_any_exception_of_one_rank_is_raised_on_all(checkpoints):
    """An exception of any type on one rank, at any stage of loading, is raised on all ranks."""
    from ep_moe.integrations import load as meta_model
    from ep_moe.integrations import transformers as integration

    good = checkpoints["mixtral single"].folder
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        for owner, name in (
            (meta_model, "checked_config"),
            (meta_model, "on_meta"),
            (integration, "_parallel"),
            (integration, "read_generation_config"),
            (integration, "_load_rest"),
            (CheckpointSource, "shape"),
            (CheckpointSource, "read"),
        ):
            for error in (Surprise("what is this"), RecursionError("what is this"), KeyError("what is this")):
                with pytest.MonkeyPatch.context() as patch:

                    def fail(*_, error=error, **__):
                        raise error

                    if dist.get_rank() == 1:
                        patch.setattr(owner, name, fail)
                    with pytest.raises(CheckpointError, match=rf"rank 1: .*{type(error).__name__}: .?what is this"):
                        load_pretrained(good, context, progress=False)
