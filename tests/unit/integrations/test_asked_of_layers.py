"""Test what `expert_parallel` and `load_pretrained` pass on: options to layers, and Hub options to the model lookup."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, ExpertMap, Wire
from ep_moe.integrations import config_file, load
from ep_moe.integrations import transformers as module
from ep_moe.integrations.families import FAMILIES
from tests.fixtures.checkpoint_files import quiet, save, tiny_model
from tests.fixtures.interface_models import interface_model

OPTIONS = {
    "expert_map": ExpertMap.linear(8, 1), "all2all": "local", "experts": "reference", "quantization": "fp8_dynamic",
    "wire": Wire(dispatch="fp8_row"), "pipeline": 2, "options": "how kernels run", "tuned": "a file",
}  # fmt: skip
HUB = {"revision": "v2", "token": "t", "cache_dir": "c", "local_files_only": True}


class Asked(Exception):
    """Raised with the arguments that were passed on."""


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def raises(*given, **how):
    raise Asked(given, how)


@pytest.mark.parametrize("made_of", ["blocks", "experts"])
def test_every_option_of_layers_reaches_them(made_of, context, monkeypatch):
    monkeypatch.setattr(module, "replace_blocks", raises)
    monkeypatch.setattr(module, "replace_experts", raises)
    model = tiny_model("mixtral") if made_of == "blocks" else interface_model("olmoe")
    with pytest.raises(Asked) as asked:
        module.expert_parallel(model, context, **OPTIONS)
    given, how = asked.value.args
    if made_of == "blocks":
        assert given == (model, context, FAMILIES["mixtral"], OPTIONS)
    else:
        assert (given, how) == ((model, context), OPTIONS)


def test_every_option_of_layers_reaches_those_of_a_checkpoint(context, tmp_path, monkeypatch):
    save(tiny_model("mixtral"), tmp_path)
    asked = []

    def parallel(model, *given):
        asked.append(given)
        raise ConfigError("asked")

    monkeypatch.setattr(module, "_parallel", parallel)
    with pytest.raises(ConfigError, match="asked"):
        module.load_pretrained(tmp_path, context, **OPTIONS)
    assert asked == [(context, FAMILIES["mixtral"], OPTIONS)]


@pytest.mark.parametrize(
    ("call", "weights"),
    [
        (lambda context: module.load_pretrained("org/m", context, **HUB), True),
        (lambda context: module.calibrated_wire("org/m", context, **HUB), True),
        (lambda context: module.read_moe_config("org/m", context, **HUB), False),
        (lambda context: module.num_experts("org/m", context, **HUB), False),
    ],
    ids=["load_pretrained", "calibrated_wire", "read_moe_config", "num_experts"],
)
def test_a_model_is_looked_up_by_all_ranks_as_was_asked(call, weights, context, monkeypatch):
    """All ranks look up a model with the given options. Weights are not downloaded if only sizes are needed."""
    monkeypatch.setattr(module, "model_folder", raises)
    with pytest.raises(Asked) as asked:
        call(context)
    assert asked.value.args == (("org/m", context.consensus), HUB | ({} if weights else {"weights": False}))


def test_a_configuration_is_looked_up_without_weights(monkeypatch):
    monkeypatch.setattr(config_file, "model_folder", raises)
    with pytest.raises(Asked) as asked:
        config_file.read_config("org/m", **HUB)
    assert asked.value.args == (("org/m",), HUB | {"weights": False})


def test_a_calibrated_wire_has_the_scale_of_the_models_own_layers(context, tmp_path, monkeypatch):
    """`calibrated_wire` takes the input scale of the model's own layers, up to the format's largest number.

    Layers that the model does not have are ignored.
    """
    save(tiny_model("qwen3_moe"), tmp_path)
    asked = []
    monkeypatch.setattr(module, "largest_input_scale", lambda *given, **how: asked.append((given, how)) or 0.25)
    wire = module.calibrated_wire(tmp_path, context, "nvfp4", "fp8")
    assert wire == Wire(dispatch="nvfp4", combine="fp8", input_scale=0.25)
    top = module.ONE_SCALE["nvfp4"]
    assert asked == [((tmp_path, "qwen3_moe"), {"layers": {0, 2}, "num_experts": 8, "top": top})]


@pytest.mark.parametrize("stated", [None, "its own"])
def test_a_loaded_model_generates_as_its_folder_says(stated, context, tmp_path, monkeypatch):
    """A loaded model generates by its folder's generation config, or by the class's defaults without one."""
    save(tiny_model("mixtral"), tmp_path)
    kept = []
    monkeypatch.setattr(module, "read_generation_config", lambda folder: stated)
    monkeypatch.setattr(module, "mark_initialized", lambda model: kept.append(model.generation_config))
    model = module.load_pretrained(tmp_path, context, progress=False)
    assert model.generation_config == (stated or kept[0])
    assert not model.training


@pytest.mark.parametrize(
    ("asked", "whole", "text", "found"),
    [
        (torch.float16, torch.bfloat16, torch.bfloat16, torch.float16),
        (None, torch.bfloat16, torch.float16, torch.bfloat16),
        (None, None, torch.float16, torch.float16),
        (None, None, None, torch.float64),
    ],
)
def test_a_dtype_that_is_not_asked_for_is_the_configurations(asked, whole, text, found, monkeypatch):
    configs = SimpleNamespace(dtype=whole), SimpleNamespace(dtype=text, model_type="no family of ours")
    monkeypatch.setattr(load, "read_whole_config", lambda folder: configs)
    monkeypatch.setattr(load, "on_meta", lambda *given, asked: given)
    monkeypatch.setattr(load, "_stored_dtype", lambda folder: torch.float64)
    model, family, dtype = load.build_model_on_meta(Path("m"), asked, "a class", None)
    assert model == (Path("m"), configs[0], found, "a class")
    assert (family, dtype) == (None, found)


def test_labels_that_are_asked_for_are_the_models(monkeypatch):
    config = SimpleNamespace(dtype=torch.float32, model_type="no family of ours", num_labels=2)
    monkeypatch.setattr(load, "read_whole_config", lambda folder: (config, config))
    monkeypatch.setattr(load, "on_meta", lambda *given, asked: contextlib.nullcontext())
    load.build_model_on_meta(Path("m"), None, None, None)
    assert config.num_labels == 2
    load.build_model_on_meta(Path("m"), None, None, 7)
    assert config.num_labels == 7
