"""Test what `save_pretrained` writes on one rank, what a failure leaves, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from ep_moe import Activation, EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.source import INDEX, SINGLE
from ep_moe.errors import CheckpointError, ConfigError, PeerTimeout
from ep_moe.integrations import save as saving
from ep_moe.integrations.transformers import expert_parallel, export_weights, save_pretrained
from tests.fixtures.checkpoint_files import check_equal, tensors_of
from tests.fixtures.interface_models import MODELS, interface_model


def local():
    return EPContext.local(torch.device("cpu"))


def test_what_training_changed_is_saved(tmp_path):
    model = expert_parallel(interface_model("olmoe"), local())
    before = interface_model("olmoe").state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    older, others = (INDEX, SINGLE, "model-00002-of-00002.safetensors"), {"adapter_model.safetensors", f"{SINGLE}.bak"}
    for name in (*older, *others):
        (tmp_path / name).write_text("an older checkpoint's, or another's")
    save_pretrained(model, tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {SINGLE, "config.json", "generation_config.json", *others}
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    check_equal(found.state_dict(), {name: tensor + 1.0 for name, tensor in before.items()})


def test_the_published_names_are_the_default(tmp_path):
    model = expert_parallel(interface_model("olmoe"), local())
    save_pretrained(model, tmp_path)
    names = set(tensors_of(tmp_path))
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in names
    assert {name for name, _ in export_weights(model)} == names


def test_a_save_that_fails_leaves_no_files(tmp_path, monkeypatch):
    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"a part")
        if len(list(tmp_path.iterdir())) == 2:
            raise OSError("no space left")

    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"the model cannot be saved: .*no space left"):
        save_pretrained(expert_parallel(interface_model("olmoe"), local()), tmp_path, max_shard_bytes=60_000)
    assert not list(tmp_path.iterdir())


def test_a_failure_is_not_forgotten_for_what_is_written_after_it(tmp_path, monkeypatch):
    """A failed write is reported even if later writes succeed, because disk space may be free again."""
    write, failed = saving.save_file, []

    def full_once(tensors, path, metadata):
        if not failed:
            failed.append(path)
            raise OSError("no space left")
        write(tensors, path, metadata)

    monkeypatch.setattr(saving, "save_file", full_once)
    with pytest.raises(CheckpointError, match="no space left"):
        save_pretrained(expert_parallel(interface_model("olmoe"), local()), tmp_path, max_shard_bytes=60_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ConfigError("another map"), PeerTimeout("rank 1 is gone")], ids=str)
def test_an_error_of_a_gather_is_raised_on_all_ranks_unless_they_are_gone(error, tmp_path, monkeypatch):
    asked = []

    def fails(one):
        raise error

    with local() as context:
        model = expert_parallel(interface_model("olmoe"), context)
        raise_on_all_ranks = context.consensus.raise_on_all_ranks

        def noted(what, problem, **options):
            asked.extend([problem] if what == "save" else [])
            raise_on_all_ranks(what, problem, **options)

        monkeypatch.setattr(saving, "_gathered", fails)
        monkeypatch.setattr(context.consensus, "raise_on_all_ranks", noted)
        with pytest.raises(type(error), match=str(error)):
            save_pretrained(model, tmp_path, max_shard_bytes=1000)
    assert asked == ([error] if isinstance(error, ConfigError) else [])
    assert bool(list(tmp_path.iterdir())) is isinstance(error, PeerTimeout), "unfinished files are removed"


def test_ranks_wait_long_for_the_one_that_writes(tmp_path, monkeypatch):
    """Ranks wait for the writing rank with a long deadline.

    They wait before each layer's experts, and at the end for the files' names.
    """
    with local() as context:
        model = expert_parallel(interface_model("olmoe"), context)
        waits, step = [], context.flight_recorder.step

        def entered(*names, **options):
            waits.append(options["more_s"])
            return step(*names, **options)

        def raise_on_all_ranks(what, problem, *, deadline_s=None):
            waits.extend([deadline_s] if what == "save" else [])

        monkeypatch.setattr(context.flight_recorder, "step", entered)
        monkeypatch.setattr(context.consensus, "raise_on_all_ranks", raise_on_all_ranks)
        save_pretrained(model, tmp_path)
    assert waits == [saving._LONGEST_S] * (len(model.model.layers) + 1)


def test_what_waits_to_be_written_keeps_its_own_memory_alone(tmp_path):
    """A tensor that waits to be written is copied if it is a view. A view would keep its layer's experts in memory."""
    writer, whole = saving._Writer(tmp_path, 1000), torch.ones(8, 100)
    writer.write({"first": whole[0], "all": whole[:1]})
    assert [tensor.untyped_storage().nbytes() for tensor in writer._pending.values()] == [400, 400]


@pytest.mark.parametrize(("shard_bytes", "files"), [(1600, 1), (1599, 2), (10, 3)])
def test_a_file_has_at_most_the_bytes_that_are_asked_for(tmp_path, shard_bytes, files):
    """A file has at most the requested bytes. A larger tensor has its own file."""
    writer = saving._Writer(tmp_path, shard_bytes)
    writer.write({"a": torch.ones(100), "b": torch.ones(100, dtype=torch.int64)})
    writer.write({"c": torch.ones(200, dtype=torch.int16)})
    writer._flush()
    assert len(list(tmp_path.iterdir())) == files


def test_an_index_says_how_many_bytes_its_files_hold(tmp_path):
    model = expert_parallel(interface_model("olmoe"), local())
    save_pretrained(model, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / INDEX).read_text())
    tensors = tensors_of(tmp_path)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_tensor_that_is_transposed_is_written_as_it_is_seen(tmp_path):
    writer, tensor = saving._Writer(tmp_path, 1000), torch.arange(6.0).view(2, 3)
    writer.write({"turned": tensor.mT})
    writer._flush()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / SINGLE)
    assert torch.equal(tensors_of(tmp_path)["turned"], tensor.mT)


@pytest.mark.parametrize(
    ("error", "kept"), [(ConfigError("no"), True), (OSError("no space left"), False)], ids=lambda value: str(value)
)
def test_a_users_error_is_raised_as_it_is(error, kept):
    """An error of the user is raised unchanged, and any other as a CheckpointError."""

    def act():
        raise error

    found = saving._tried(act)
    assert (found is error) is kept
    assert kept or isinstance(found, CheckpointError)
    assert saving._tried(lambda: None) is None


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_exported_is_what_transformers_holds(kind):
    """Exported weights are those that transformers holds, including other parts of the experts' module.

    Such a part is a router or a norm.
    """
    plain = interface_model(kind)
    model = expert_parallel(interface_model(kind), local())
    found = dict(export_weights(model, save_original_format=False))
    wanted = plain.state_dict()
    tied = set(getattr(plain, "all_tied_weights_keys", None) or {})
    assert wanted.keys() - tied <= found.keys() <= wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_the_dtype_that_is_saved_is_the_models(tmp_path):
    model = expert_parallel(interface_model("olmoe").bfloat16(), local())
    model.config.dtype = "float32"
    before = model.config.to_dict()
    save_pretrained(model, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["dtype"], found["architectures"]) == ("bfloat16", ["OlmoeForCausalLM"])
    assert {tensor.dtype for tensor in tensors_of(tmp_path).values()} == {torch.bfloat16}
    assert model.config.to_dict() == before


def test_what_the_class_does_not_save_is_left_out(tmp_path):
    model = expert_parallel(interface_model("olmoe"), local())
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    save_pretrained(model, tmp_path)
    assert interface_model("olmoe").state_dict().keys() > {"model.norm.weight"}
    assert "model.norm.weight" not in tensors_of(tmp_path)


def test_quantised_layers_are_refused(tmp_path):
    model = expert_parallel(interface_model("olmoe"), local(), quantization="fp8_dynamic", experts="reference")
    with pytest.raises(ConfigError, match=r"quantization must be none for save_pretrained, got fp8_dynamic"):
        save_pretrained(model, tmp_path)


def test_models_without_layers_and_their_own_method_are_refused(tmp_path):
    model = interface_model("olmoe")
    with pytest.raises(ConfigError, match="must have expert-parallel layers, got none"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ConfigError, match=r"call ep_moe.integrations.transformers.save_pretrained\(model, folder\)"):
        expert_parallel(model, local()).save_pretrained(tmp_path)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2])
def test_sizes_of_a_modules_experts_are_those_of_the_layers(activation, bias):
    """The sizes of `LayerWithLayout` are those of the layer's tensors: gate, up and down rows, biases included."""
    config = MoEConfig(
        hidden_size=16, intermediate_size=24, num_experts=4, top_k=2, activation=activation, expert_bias=bias
    )
    with local() as context:
        layer = MoELayer(config, context)
        layout = SimpleNamespace(from_canonical=lambda tensors: tensors)
        sizes = saving.LayerWithLayout("experts", layer, layout).sizes()
        held = layer.expert_weights.slot(0)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in sizes.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in held.items()
    }
    assert all(tensor.is_meta for tensor in sizes.values())
