"""Test the arguments of transformers' `from_pretrained` that `load_pretrained` takes, or refuses by name."""

import inspect
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from ep_moe import ConfigError, EPContext
from ep_moe.errors import CheckpointError
from ep_moe.integrations.pretrained_arguments import check_arguments
from ep_moe.integrations.transformers import load_pretrained
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet, save, tiny_model
from tests.fixtures.interface_models import interface_model

IDS = torch.arange(20).reshape(2, 10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model whose blocks are replaced and one whose experts alone are, each within the folder "models"."""
    quiet()
    models = tmp_path_factory.mktemp("hub") / "models"
    save(tiny_model("qwen3_moe").to(torch.bfloat16), models / "blocks")
    save(interface_model("olmoe").to(torch.bfloat16), models / "experts")
    return models


@pytest.fixture
def context():
    with EPContext.local(torch.device("cpu")) as made:
        yield made


@torch.no_grad()
def compare(context, folder, given):
    loaded = load_pretrained(folder, context, progress=False, **given)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
    assert loaded.dtype == plain.dtype
    assert loaded.config._attn_implementation == plain.config._attn_implementation
    if plain.dtype == torch.float32:  # rounding to bf16 may choose other experts
        torch.testing.assert_close(loaded(IDS).logits, plain(IDS).logits, rtol=1e-5, atol=1e-5)
    return loaded


@pytest.mark.parametrize("name", ["blocks", "experts"])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": torch.float32}, torch.float32),
        ({"torch_dtype": "auto", "dtype": None}, torch.bfloat16),
        ({"attn_implementation": "eager", "dtype": "float32"}, torch.float32),
        ({"trust_remote_code": False, "low_cpu_mem_usage": True, "use_safetensors": True}, torch.bfloat16),
    ],
)
def test_arguments_mean_what_they_mean_in_transformers(name, given, dtype, folders, context):
    assert compare(context, folders / name, given).dtype == dtype


@pytest.mark.parametrize("name", ["blocks", "experts"])
def test_a_given_configuration_replaces_that_of_the_folder(name, folders, context):
    config = transformers.AutoConfig.from_pretrained(
        folders / name, num_experts_per_tok=3, rms_norm_eps=0.1, dtype="float32"
    )
    before = config.to_dict()
    model = compare(context, folders / name, {"config": config, "attn_implementation": "eager"})
    assert model.config.num_experts_per_tok == 3
    assert config.to_dict() == before
    assert config._attn_implementation != "eager"


def test_a_subfolder_of_a_folder(folders, context):
    compare(context, folders, {"subfolder": "blocks", "dtype": "float32"})
    for wrong, error in (("none", CheckpointError), ("../models", ConfigError), (str(folders), ConfigError)):
        with pytest.raises(error, match="subfolder"):
            load_pretrained(folders, context, subfolder=wrong)


def test_a_dtype_that_no_configuration_states_is_that_of_the_files(folders, context, tmp_path):
    """The first float tensor counts, whatever codes are before it."""
    file = next((folders / "blocks").glob("*.safetensors"))
    save_file(load_file(file), tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folders / "blocks" / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compare(context, tmp_path, {"dtype": "auto"}).dtype == torch.bfloat16
    assert compare(context, tmp_path, {}).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "bf16"}, r"dtype must be a torch\.dtype, its name such as 'bfloat16', or 'auto', got 'bf16'"),
        ({"dtype": {"": "float32"}}, "dtype must be"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "differ; pass dtype alone"),
        ({"device_map": "auto"}, "does not take device_map='auto'; leave it out: the model is on the context's device"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config=.*; pass quantization="),
        ({"trust_remote_code": True}, "trust_remote_code=True; leave it out"),
        ({"use_safetensors": False}, "use_safetensors=False; leave it out"),
        ({"use_cache": False}, "'use_cache'; .* config=AutoConfig.from_pretrained.path, use_cache=...."),
        ({"expert_maps": None}, r"no argument 'expert_maps' \(did you mean 'expert_map'\?\)"),
        ({"config": "config.json"}, "config must be a configuration, .*, got 'config.json'"),
        ({"config": {"hidden_size": 32}}, "config must be a configuration"),
        ({"attn_implementation": "fast"}, 'config and attn_implementation: .*attn_implementation="fast".*other values'),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(given, message, folders, context):
    with pytest.raises(ConfigError, match=message):
        load_pretrained(folders / "blocks", context, **given)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", -1), ("rms_norm_eps", float("nan"))])
def test_a_field_of_a_given_configuration_that_is_refused(field, value, folders, context):
    config = transformers.AutoConfig.from_pretrained(folders / "blocks")
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=rf"config: {field} must be .*, got {value}; pass another value"):
        load_pretrained(folders / "blocks", context, config=config)


def refusal(name, named):
    try:
        check_arguments({name: "something"}, named)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_argument_of_transformers_is_known():
    """Each argument of `from_pretrained` is an argument of `load_pretrained`, or refused with a remedy of its own."""
    source = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    popped = {part.split('"')[0] for part in source.split('kwargs.pop("')[1:]}
    theirs = {*popped, *inspect.signature(transformers.PreTrainedModel.from_pretrained).parameters}
    assert {"torch_dtype", "device_map", "config", "subfolder"} <= theirs
    ours = inspect.signature(load_pretrained).parameters
    named_alike = {"pretrained_model_name_or_path", "model_args", "kwargs"}
    private = {name for name in theirs if name.startswith("_")}
    for name in theirs - ours.keys() - named_alike - private:
        assert "has no argument" not in refusal(name, ours), name
    assert "has no argument" in refusal("use_cache", ours)


@distributed(2)
def test_arguments_of_one_rank_are_refused_on_all(folders):
    """An argument that one rank alone passes is refused on all ranks, and so is another configuration."""
    other = transformers.AutoConfig.from_pretrained(folders / "experts", rms_norm_eps=0.1)
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        for given, message in (
            ({"device_map": "auto"}, "rank 1: load_pretrained does not take device_map='auto'"),
            ({"config": other}, r"config\.rms_norm_eps: 1e-05 on rank 0, 0\.1 on rank 1"),
            ({"dtype": "float32"}, r"config\.dtype: \"bfloat16\" on rank 0, \"float32\" on rank 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                load_pretrained(folders / "experts", context, progress=False, **(given if dist.get_rank() else {}))
