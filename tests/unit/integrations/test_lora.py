"""Test PEFT's LoRA on one rank: new factors, what is trained of an adapter, and which adapters are refused."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ep_moe import CheckpointError, ConfigError, EPContext, ExpertMap
from ep_moe.integrations import lora, lora_targets
from ep_moe.integrations.lora import add_lora, load_lora, merge_lora, save_lora
from ep_moe.integrations.lora_targets import LoraTarget, check_config
from ep_moe.integrations.transformers import (
    expert_parallel,
    export_weights,
    load_pretrained,
    moe_layers,
    save_pretrained,
)
from ep_moe.testing import rank_device
from ep_moe.weights.lora import LowRank
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.interface_models import interface_model
from tests.fixtures.lora_models import lora_config, plain_twin


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    quiet()
    folder = tmp_path_factory.mktemp("lora")
    interface_model("olmoe").save_pretrained(folder / "olmoe")
    return folder


def test_layers_begin_with_numbers_of_their_own(models):
    """Each layer's factors depend only on the seed and the layer's name."""

    def factors(**seed):
        with EPContext.local(torch.device("cpu")) as context:
            model = load_pretrained(models / "olmoe", context, progress=False)
            add_lora(model, lora_config("olmoe", target_modules=[]), **seed)
            weights = [layer.expert_weights for layer in moe_layers(model)]
            return [held.lora.factors("w2", held.stored_tensors()["w2"])[0].detach() for held in weights]

    first, again, other = factors(seed=0), factors(), factors(seed=1)
    assert len(first) == 2
    assert all(map(torch.equal, first, again))
    rows = torch.cat([*first, *other]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows), "nor do experts share theirs"
    # equal in every process: ranks of several EP groups hold the same experts, but `hash` differs between processes
    torch.testing.assert_close(first[0].flatten()[:3], torch.tensor([-0.0569672063, 0.0174512416, 0.0497770198]))


def test_a_refusal_leaves_the_model_as_it_was():
    with EPContext.local(torch.device("cpu")) as context:
        plain = interface_model("olmoe")
        experts = plain.config.num_experts
        twice = ExpertMap.from_ranks([[*range(experts), 0]], experts, allow_duplicates=True)
        model = expert_parallel(plain, context, expert_map=twice)
        before = {name: (type(p), p.requires_grad) for name, p in model.named_parameters()}
        with pytest.raises(ConfigError, match="the expert map has redundant experts; choose one without"):
            add_lora(model, lora_config("olmoe"))
        assert {name: (type(p), p.requires_grad) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    "leave", [lambda model, to: save_pretrained(model, to), lambda model, _: list(export_weights(model))]
)
def test_weights_with_factors_beside_them_are_neither_saved_nor_pushed(models, tmp_path, leave):
    with EPContext.local(torch.device("cpu")) as context:
        model = add_lora(load_pretrained(models / "olmoe", context, progress=False), lora_config("olmoe"))
        with pytest.raises(
            ConfigError, match=r"PeftModel\w* holds LoRA factors beside weights .* call .*merge_lora\(model\)"
        ):
            leave(model, tmp_path)
        leave(merge_lora(model), tmp_path)


def test_a_configuration_that_names_nothing_is_refused_as_pefts():
    """A configuration without targets is refused as PEFT refuses it, and no parameter is frozen."""
    with EPContext.local(torch.device("cpu")) as context:
        model = expert_parallel(interface_model("olmoe"), context)
        with pytest.raises(ValueError, match="target_modules"):
            add_lora(model, lora_config("olmoe", target_modules=None, target_parameters=None))
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_parameter_beside_experts_needs_no_module():
    with EPContext.local(torch.device("cpu")) as context:
        wanted = {"target_modules": None, "target_parameters": ["experts.down_proj", "self_attn.q_proj.weight"]}
        model = add_lora(expert_parallel(interface_model("olmoe"), context), lora_config("olmoe", **wanted))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert {name.split(".")[-1] for name in trained if "experts" in name} == {"lora_A_w2", "lora_B_w2"}
        assert {name.split(".lora_")[0].split(".")[-1] for name in trained if "experts" not in name} == {"q_proj"}


def test_patterns_of_ranks_and_of_alphas_are_apart():
    of, name = SimpleNamespace(name="layers.0.mlp"), "experts.down_proj"
    target = LoraTarget(of=of, parameter=name, stored="w2", depth=0, turned=False)  # r is 4, lora_alpha is 8
    assert target.low_rank(lora_config("olmoe", alpha_pattern={name: 12})) == LowRank(4, 3.0)
    assert target.low_rank(lora_config("olmoe", rank_pattern={name: 2})) == LowRank(2, 4.0)
    assert target.low_rank(lora_config("olmoe", rank_pattern={name: 2}, alpha_pattern={name: 5})) == LowRank(2, 2.5)
    assert target.low_rank(lora_config("olmoe", use_rslora=True)) == LowRank(4, 4.0), "alpha / sqrt(r)"


def test_wrappers_leave_factors_of_experts_alone(models):
    """Data-parallel wrappers ignore the factors of experts, and average all others.

    Each rank has its experts' factors.
    """
    with EPContext.local(torch.device("cpu")) as context:
        model = add_lora(load_pretrained(models / "olmoe", context, progress=False), lora_config("olmoe"))
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        of_experts = {name for name in learning if ".expert_weights.lora." in name}
        assert learning > of_experts > set()
        assert learning & set(model._ddp_params_and_buffers_to_ignore) == of_experts


def test_the_scale_of_some_layers_of_peft_may_change(models):
    """The scale of some PEFT layers may change, but not of all at once.

    A change of all is meant for the experts too, whose scale does not follow.
    """
    from peft.tuners.lora import LoraLayer

    ids = torch.arange(4).view(1, 4)
    with EPContext.local(torch.device("cpu")) as context, torch.no_grad():
        model = add_lora(load_pretrained(models / "olmoe", context, progress=False), lora_config("olmoe"))
        first, *others = (module for module in model.modules() if isinstance(module, LoraLayer))
        first.scale_layer(0.5)
        model(input_ids=ids)
        for module in others:
            module.scale_layer(0.5)
        with pytest.raises(ConfigError, match="scale of all LoRA layers of PEFT was changed"):
            model(input_ids=ids)


def test_what_is_trained_of_an_adapter_and_what_is_left_when_it_is_merged(models, tmp_path):
    config = lora_config("olmoe", target_modules=[])
    with EPContext.local(torch.device("cpu")) as context:

        def model():
            return load_pretrained(models / "olmoe", context, progress=False)

        save_lora(add_lora(model(), config), tmp_path)
        trained = {}
        for trainable in (False, True):
            loaded = load_lora(model(), tmp_path, trainable=trainable)
            trained[trainable] = {name.rpartition(".")[2] for name, p in loaded.named_parameters() if p.requires_grad}
        assert trained[False] == set()
        assert not any(parameter.requires_grad for parameter in load_lora(model(), tmp_path).parameters())
        assert trained[True] == {f"lora_{factor}_{matrix}" for factor in "AB" for matrix in ("w13", "w2")}
        with pytest.raises(ConfigError, match="its factors may be merged already"):
            save_lora(merge_lora(loaded), tmp_path)


def test_factors_of_peft_are_trained_where_those_of_experts_are(models, tmp_path):
    with EPContext.local(torch.device("cpu")) as context:

        def model():
            return load_pretrained(models / "olmoe", context, progress=False)

        save_lora(add_lora(model(), lora_config("olmoe")), tmp_path)
        for trainable in (False, True):
            loaded = load_lora(model(), tmp_path, trainable=trainable)
            learning = [name for name, parameter in loaded.named_parameters() if parameter.requires_grad]
            assert {"self_attn" in name for name in learning} == ({True, False} if trainable else set())


@pytest.mark.parametrize("initial", [False, "gaussian", "orthogonal", "eva", "pissa"])
def test_adapters_that_began_otherwise_are_loaded(models, tmp_path, initial):
    """Adapters with another initialization are loaded, because the file has all factors.

    Only initializations that also change the weights are refused.
    """
    import peft

    plain = plain_twin(models, "olmoe").eval()
    plain.peft_config["default"].init_lora_weights = initial
    plain.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(12).view(1, 12)
    with EPContext.local(torch.device("cpu")) as context, torch.no_grad():
        model = load_pretrained(models / "olmoe", context, experts="reference", progress=False)
        if initial == "pissa":
            with pytest.raises(ConfigError, match="init_lora_weights must be True for experts"):
                load_lora(model, tmp_path / "theirs")
            return
        model = load_lora(model, tmp_path / "theirs")
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        save_lora(model, tmp_path / "ours")
    assert peft.LoraConfig.from_pretrained(str(tmp_path / "ours")).init_lora_weights == initial


def test_adapters_that_do_not_fit_are_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    quiet()
    plain_twin(models, "olmoe").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    attention = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    for changed, text in (
        ({k: v for k, v in tensors.items() if k != key}, f"{key} is missing"),
        (tensors | {key: tensors[key][1:]}, f"{key} and .* must be of"),
        ({k: v for k, v in tensors.items() if k != attention}, f"{attention} is missing"),
        (tensors | {f"{key}.more": tensors[key].clone()}, "more is in no module"),
        (
            tensors | {key.replace("lora_A", "3.up_proj.lora_A"): tensors[key].clone()},
            "PEFT cannot join the factors",
        ),
    ):
        save_file(changed, file)
        model = load_pretrained(models / "olmoe", EPContext.local(rank_device()), progress=False)
        with pytest.raises(CheckpointError, match=text):
            load_lora(model, tmp_path)
    file.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read: "):
        load_lora(model, tmp_path)


def test_other_methods_of_peft_are_named(models, tmp_path):
    import peft

    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    plain = interface_model("olmoe")
    peft.get_peft_model(plain, config).save_pretrained(tmp_path)
    with EPContext.local(torch.device("cpu")) as context:
        model = load_pretrained(models / "olmoe", context, progress=False)
        for call in (lambda: add_lora(model, config), lambda: load_lora(model, tmp_path)):
            with pytest.raises(ConfigError, match=r"_lora takes a LoraConfig of peft, got a IA3Config; for adapters"):
                call()


def test_another_peft_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft.utils.transformers_weight_conversion", None)
    words = rf"{tmp_path} has separate factors of each expert, which this peft .*; install peft 0\.21 or newer$"
    with pytest.raises(CheckpointError, match=words):
        lora._fused({}, None, None, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"^LoRA needs peft, which is not installed \(.*\); pip install peft$"):
        add_lora(None, None)


@pytest.mark.parametrize("kind", ["olmoe", "llama4_text"])
@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("pattern", [".*proj", "down_proj", r".*shared_expert\..*", ".*(v_proj|experts.down_proj)"])
def test_patterns_select_what_they_select_for_peft(pattern, field, kind, models, tmp_path):
    """A pattern may match experts, attention, and shared experts, whose modules have another name in our block."""
    if kind == "llama4_text":
        tiny_model(kind).save_pretrained(tmp_path / kind)
        models = tmp_path
    plain = plain_twin(models, kind, **{field: {pattern: 3}}).eval()
    plain.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(12).view(1, 12)
    with EPContext.local(torch.device("cpu")) as context, torch.no_grad():
        model = load_pretrained(models / kind, context, experts="reference", progress=False)
        model = load_lora(model, tmp_path / "theirs").eval()
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


UNSERVED = {
    "fan_in_fan_out": True, "lora_bias": True, "layers_to_transform": [0], "layer_replication": [(0, 1)],
    "exclude_modules": ["q_proj"], "modules_to_save": ["lm_head"], "alora_invocation_tokens": [5], "use_qalora": True,
}  # fmt: skip


def test_fields_that_experts_do_not_serve_are_named(models):
    with EPContext.local(rank_device()) as context:
        model = load_pretrained(models / "olmoe", context, progress=False)
        for changes, words in (
            ({"lora_dropout": 0.1}, r"LoraConfig.lora_dropout=0.1 is not served with target_parameters of experts"),
            ({"use_rslora": True, "use_dora": True}, r"LoraConfig.use_dora=True is not served"),
            ({"init_lora_weights": "gaussian"}, r"init_lora_weights must be True for experts .*, got 'gaussian'"),
        ):
            with pytest.raises(ConfigError, match=words):
                check_config(lora_config("olmoe", **changes))
        for name, value in UNSERVED.items():
            config = lora_config("olmoe")
            setattr(config, name, value)
            with pytest.raises(ConfigError, match=rf"LoraConfig\.{name}=.* is not served"):
                check_config(config)
        for changes in ({"bias": "all"}, {"trainable_token_indices": [1]}):
            with pytest.raises(ConfigError, match="is not served where experts are the only targets"):
                add_lora(model, lora_config("olmoe", target_modules=[], **changes))
        absent = lora_config("olmoe", target_parameters=["experts.down_proj", "mlp.gate_up"])
        with pytest.raises(ConfigError, match=r"target_parameters names 'mlp\.gate_up', which is no parameter"):
            add_lora(model, absent)


def test_biases_of_replaced_blocks_are_not_trained(tmp_path):
    """PEFT's bias="all" trains every parameter with that word in its name. One rank's would be saved by our names."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    with EPContext.local(torch.device("cpu")) as context:
        model = load_pretrained(tmp_path, context, experts="reference", progress=False)
        for config in (lora_config("gpt_oss", bias="all"), lora_config("gpt_oss", bias="all", target_parameters=None)):
            with pytest.raises(ConfigError, match=r"bias='all' would train model\.layers\.0\.mlp\.moe\.router"):
                add_lora(model, config)
        add_lora(model, lora_config("gpt_oss", bias="lora_only"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 0}, r"LoraConfig\.r .* of model\.layers\.0\.mlp\.experts\..* must be an integer of at least 1, got 0"),
        ({"rank_pattern": {"experts.down_proj": -1}}, r"rank_pattern.* of .*down_proj must be .* at least 1, got -1"),
        ({"lora_alpha": float("nan")}, r"LoraConfig\.lora_alpha .* must be a number, got nan"),
        ({"alpha_pattern": {"experts.down_proj": "8"}}, r"alpha_pattern.* of .*down_proj must be a number, got '8'"),
    ],
)
def test_factors_without_a_rank_or_a_scale_are_refused(changes, words, models):
    with EPContext.local(rank_device()) as context:
        model = load_pretrained(models / "olmoe", context, progress=False)
        with pytest.raises(ConfigError, match=words):
            add_lora(model, lora_config("olmoe", **changes))


@pytest.mark.parametrize("modules", [["q_proj"], []], ids=["of PEFT", "of experts alone"])
def test_a_second_adapter_is_refused(models, tmp_path, modules):
    """A second adapter is refused until the first one is merged."""
    with EPContext.local(rank_device()) as context:
        model = add_lora(
            load_pretrained(models / "olmoe", context, progress=False), lora_config("olmoe", target_modules=modules)
        )
        save_lora(model, tmp_path)
        with pytest.raises(ConfigError, match=r"add_lora: model must be without an adapter.*merge_lora\(model\) first"):
            add_lora(model, lora_config("olmoe"))
        with pytest.raises(ConfigError, match=r"load_lora: .*model must be without an adapter"):
            load_lora(model, tmp_path)
        if modules:
            with pytest.raises(
                ConfigError, match="add_weighted_adapter of PEFT would leave out the factors of experts"
            ):
                model.add_weighted_adapter(["default"], [1.0], "other")
        load_lora(merge_lora(model), tmp_path)


def test_shared_experts_go_by_transformers_names():
    """Shared experts keep transformers' names, though they are in our block.

    A name that only starts with theirs belongs to another module.
    """
    kept = object.__new__(lora_targets._Kept)
    kept._shared = [("layers.0.mlp.shared", "layers.0.mlp.moe.shared_experts")]
    names = ("layers.0.mlp.shared", "layers.0.mlp.shared.up_proj", "layers.0.mlp.shared_gate", "layers.0.mlp.gate")
    ours = "layers.0.mlp.moe.shared_experts"
    assert [kept.name_of(name) for name in names] == [ours, f"{ours}.up_proj", *names[2:]]
