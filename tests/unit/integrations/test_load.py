"""Test loaded models: heads that a checkpoint lacks, invalid model classes, and tensors without a place."""

import shutil
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ep_moe import CheckpointError, ConfigError, EPContext, RankLayout
from ep_moe.checkpoint.source import SINGLE
from ep_moe.integrations.load import draw_head, head_names, made_by, mark_initialized
from ep_moe.integrations.lora import load_lora
from ep_moe.integrations.transformers import _number, expert_parallel, load_pretrained
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.testing import rank_device
from tests.fixtures.checkpoint_files import quiet, tiny_config, tiny_model
from tests.fixtures.interface_models import interface_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    quiet()
    return interface_checkpoints(tmp_path_factory.mktemp("interface_load"), ["olmoe"])


def test_a_head_that_is_drawn_is_alike_on_all_ranks_and_leaves_the_random_state():
    quiet()
    model = tiny_model("mixtral")
    drawn = []
    for seed in (1, 2):  # ranks may have different seeds
        torch.manual_seed(seed)
        wanted = torch.rand(3)
        torch.manual_seed(seed)
        draw_head(model, head_names(model))
        assert torch.equal(torch.rand(3), wanted)
        drawn.append(model.lm_head.weight.clone())
    assert torch.equal(*drawn)


def test_a_head_is_drawn_alike_in_whatever_order_its_tensors_are_named():
    """A head is initialized equally on all ranks, in any order of its names.

    The names are a set, whose order differs between ranks. It is initialized even if transformers marks it as
    initialized.
    """
    quiet()
    model = transformers.AutoModelForQuestionAnswering.from_config(tiny_config("mixtral"))
    names, drawn = ["model.layers.0.self_attn.q_proj.weight", "qa_outputs.weight", "qa_outputs.bias"], []
    for order in (names, names[::-1]):
        for name in names:
            model.get_parameter(name).data.fill_(5.0)
            model.get_parameter(name)._is_hf_initialized = True
        mark_initialized(model)
        draw_head(model, order)
        drawn.append([model.get_parameter(name).clone() for name in names])
    for first, second in zip(*drawn, strict=True):
        assert torch.equal(first, second)
        assert not (first == 5.0).any()


@pytest.mark.parametrize("has", [("embed",), ("head",), ("embed", "head"), ()], ids="-".join)
def test_tied_weights_may_be_in_the_file_under_either_name(has, tmp_path):
    quiet()
    plain = tiny_model("qwen3_moe")
    plain.save_pretrained(tmp_path)
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    tensors = load_file(tmp_path / SINGLE)
    tied = tensors[names["embed"]]
    rest = {name: tensor for name, tensor in tensors.items() if name not in names.values()}
    save_file(rest | {names[one]: tied.clone() for one in has}, tmp_path / SINGLE, {"format": "pt"})
    load = lambda: load_pretrained(tmp_path, EPContext.local(torch.device("cpu")), progress=False)  # noqa: E731
    if not has:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight are missing"):
            load()
        return
    model = load()
    assert torch.equal(model.model.embed_tokens.weight, tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_rank_of_a_job_says_how_much_it_holds(rank, tmp_path, caplog):
    """The first rank of the job logs how much memory the weights take, buffers included."""
    quiet()
    tiny_model("mixtral").save_pretrained(tmp_path)
    layout, recorder, cpu = RankLayout(world=1, rank=rank, ranks=(rank,)), FlightRecorder(), torch.device("cpu")
    with (
        EPContext(layout, cpu, None, RankGroups(layout, recorder, cpu), recorder) as context,
        caplog.at_level("INFO", "ep_moe.integrations"),
        mock.patch.object(torch.Tensor, "nbytes", 2**30),
    ):
        model = load_pretrained(tmp_path, context, progress=False)
    count = len({*model.parameters(), *model.buffers()})
    said = [record.message for record in caplog.records if "weights loaded" in record.message]
    assert said == [f"{tmp_path}: weights loaded, {count:.2f} GiB on rank 0"] * (rank == 0)


@pytest.mark.parametrize(
    ("block", "number"), [("model.layers.3.mlp", 3), ("model.layers.12.feed_forward", 12), ("h.1.parts.7", 1)]
)
def test_a_layers_number_is_the_first_in_the_name_of_its_block(block, number):
    assert _number(block) == number


def test_classes_that_are_none_are_refused(tmp_path):
    quiet()
    tiny_config("mixtral", dtype="float32").save_pretrained(tmp_path)
    context = EPContext.local(rank_device())
    with pytest.raises(ConfigError, match="model_class must be a model class of transformers or an auto class"):
        load_pretrained(tmp_path, context, model_class=torch.nn.Linear, progress=False)
    with pytest.raises(ConfigError, match="model_class=AutoModelForImageClassification: Unrecognized"):
        load_pretrained(tmp_path, context, model_class=transformers.AutoModelForImageClassification, progress=False)


def test_the_user_is_not_asked_to_run_code_of_a_checkpoint(monkeypatch):
    """The user is not asked to run code of a checkpoint.

    Ranks have no terminal, and code that a checkpoint names is never run.
    """
    config, asked = tiny_config("mixtral"), []
    config.auto_map = {"AutoModelForImageClassification": "someone/model--modeling.Model"}
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(ConfigError, match=r"model_class=AutoModelForImageClassification: .* custom code"):
        made_by(transformers.AutoModelForImageClassification, config, torch.float32)
    assert not asked


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"])
def test_a_head_that_is_no_language_models_is_asked_for_by_its_class(task, tmp_path):
    quiet()
    config = tiny_config("mixtral")
    config.architectures, config.dtype = [f"Mixtral{task}"], torch.float32
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"another head, Mixtral{task}; .* model_class=transformers\.AutoModel{task}"
    ):
        load_pretrained(tmp_path, EPContext.local(rank_device()), progress=False)


class Scorer(transformers.PreTrainedModel):
    """A user's model around a language model. It initializes its own parameters by `post_init`."""

    config_class = transformers.PretrainedConfig

    def __init__(self, model):
        super().__init__(transformers.PretrainedConfig())
        self.model, self.score = model, torch.nn.Linear(model.config.hidden_size, 1)
        self.post_init()


@pytest.mark.parametrize("loaded", ["mixtral", "olmoe", "in place"])
def test_post_init_leaves_the_numbers_of_a_loaded_model(loaded, checkpoints, tmp_path):
    """`post_init` keeps the weights of a loaded model, called on it or on a model around it.

    The cases are a block replaced whole, experts only, and a model converted in memory.
    """
    quiet()
    context = EPContext.local(rank_device())
    if loaded == "in place":
        model = expert_parallel(tiny_model("mixtral").to(context.device), context)
    else:
        tiny_model("mixtral").save_pretrained(tmp_path)
        folder = tmp_path if loaded == "mixtral" else checkpoints / loaded / "per_expert"
        model = load_pretrained(folder, context, progress=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.post_init()
    scorer = Scorer(model)
    for name, tensor in scorer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_the_model_has_no_place_for_is_one_warning(checkpoints, tmp_path):
    good = checkpoints / "olmoe" / "per_expert"
    tensors = load_file(good / SINGLE) | {"model.layers.9.mlp.gate.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    shutil.copy(good / "config.json", tmp_path)
    with pytest.warns(UserWarning, match=r"layers.9.mlp.gate.weight is not loaded: OlmoeForCausalLM has no such"):
        load_pretrained(tmp_path, EPContext.local(torch.device("cpu")), progress=False)


def test_an_adapter_beside_a_model_is_one_warning(tmp_path):
    """An adapter in a model's folder causes one warning.

    transformers would apply it silently, and so change the model's weights.
    """
    peft = pytest.importorskip("peft")
    quiet()
    plain = tiny_model("mixtral")
    plain.save_pretrained(tmp_path)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(plain, config).save_pretrained(tmp_path)
    context, ids = EPContext.local(torch.device("cpu")), torch.arange(1, 9)[None]
    with pytest.warns(
        UserWarning, match=r"the adapter of adapter_config.json .*, and load_pretrained does not; .*load_lora"
    ):
        model = load_pretrained(tmp_path, context, dtype=torch.float32, progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(load_lora(model, tmp_path)(ids).logits, theirs(ids).logits)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config.json; it has an adapter: .*lora.load_lora\(model"):
        load_pretrained(tmp_path, context, progress=False)


def test_a_models_own_class_may_be_named(tmp_path):
    quiet()
    plain = tiny_model("mixtral")
    plain.save_pretrained(tmp_path)
    context, ids = EPContext.local(torch.device("cpu")), torch.arange(1, 9)[None]
    for asked in (transformers.MixtralForCausalLM, transformers.AutoModelForCausalLM):
        model = load_pretrained(tmp_path, context, dtype=torch.float32, model_class=asked, progress=False)
        assert type(model) is transformers.MixtralForCausalLM
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
