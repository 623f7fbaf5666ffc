"""Test `register_family` and `check_family`: each thing that an entry can leave out is reported."""

import dataclasses
import warnings

import pytest
import torch

from ep_moe import CheckpointError, ConfigError, EPContext, MoEConfig
from ep_moe.checkpoint import model_names as names_module
from ep_moe.checkpoint.formats import Fused, PerExpert
from ep_moe.checkpoint.model_names import CheckpointNames
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.integrations.blocks import ExpertParallelBlock
from ep_moe.integrations.families import FAMILIES, Family, register_family
from ep_moe.integrations.transformers import expert_parallel, load_pretrained
from ep_moe.testing import check_family
from ep_moe.types import Activation
from tests.fixtures.checkpoint_files import FAMILIES as FIVE
from tests.fixtures.checkpoint_files import quiet, tiny_config

transformers = pytest.importorskip("transformers")
MATRICES = ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight")
FORMATS = (PerExpert(*MATRICES), Fused())
NAMES = CheckpointNames(
    block="model.layers.{layer}.mlp",
    experts=FORMATS,
    router={"weight": "gate.weight", "e_score_correction_bias": "gate.e_score_correction_bias"},
    shared="shared_experts",
)
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_families():
    quiet()
    tables = (FAMILIES, names_module.CHECKPOINT_NAMES)
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def context():
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def glm_config(**changes):
    own = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.Glm4MoeConfig(**COMMON | own | {"routed_scaling_factor": 1.0} | changes)


def glm_blocks(c, *, activation=Activation.SWIGLU, shared=None, **routing):
    """Return a GLM-4 layer configuration. routing: fields that the entry sets wrongly."""
    right = {
        "method": RoutingMethod.SIGMOID_TOPK, "renormalize": c.norm_topk_prob, "num_groups": c.n_group,
        "scaling_factor": c.routed_scaling_factor, "top_groups": c.topk_group, "correction_bias": True,
        "float32_logits": True,
    }  # fmt: skip
    return MoEConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.moe_intermediate_size,
        num_experts=c.n_routed_experts,
        top_k=c.num_experts_per_tok,
        activation=activation,
        shared_intermediate_size=c.moe_intermediate_size * c.n_shared_experts if shared is None else shared,
        routing=RoutingConfig(**right | routing),
    )


GLM = Family(block="Glm4MoeMoE", config=glm_blocks, shared="shared_experts")


def without(*keys):
    return {key: value for key, value in NAMES.router.items() if key not in keys}


def written(**routing):
    return dataclasses.replace(GLM, config=lambda c: glm_blocks(c, **routing))


def test_a_complete_entry_is_right_and_is_used(context):
    register_family("glm4_moe", GLM, NAMES)
    found = check_family(glm_config(), context=context)
    changed = {"routed_scaling_factor=1.6", "norm_topk_prob=False", "num_experts_per_tok=3", "topk_group=2"}
    assert {"memory", "save_original_format=True", "save_original_format=False"} | changed <= found.keys()
    model = expert_parallel(transformers.AutoModelForCausalLM.from_config(glm_config()), context)
    assert sum(isinstance(module, ExpertParallelBlock) for module in model.modules()) == 1


@pytest.mark.parametrize("kind", FIVE)
def test_entries_of_this_package_are_right(kind, context):
    assert len(check_family(tiny_config(kind), context=context)) > 5


def test_models_without_an_entry_are_compared_too(context):
    config = transformers.OlmoeConfig(**COMMON | {"num_experts": 8})
    assert "norm_topk_prob=True" in check_family(config, context=context)


# what an entry leaves out or gets wrong -> family, names, error, pattern of its message
FORGOTTEN = {
    "a selection bias": (
        written(correction_bias=False), dataclasses.replace(NAMES, router=without("e_score_correction_bias")),
        ConfigError, r"does not read model\.layers\.1\.mlp\.gate\.e_score_correction_bias",
    ),
    "a selection bias's name": (
        GLM, dataclasses.replace(NAMES, router=without("e_score_correction_bias")),
        ConfigError, "router has no e_score_correction_bias in this family",
    ),
    "a selection bias's use": (
        written(correction_bias=False), NAMES, ConfigError, "is there, and RoutingConfig.correction_bias=False leaves",
    ),
    "shared experts": (
        dataclasses.replace(written(shared=0), shared=None), dataclasses.replace(NAMES, shared=None),
        ConfigError, r"does not read model\.layers\.1\.mlp\.shared_experts\.gate_proj\.weight",
    ),
    "the module of shared experts": (
        dataclasses.replace(GLM, shared="shared_expert"), NAMES, ConfigError, "has no module 'shared_expert'",
    ),
    "the router's place": (
        GLM, dataclasses.replace(NAMES, router=NAMES.router | {"weight": "router.weight"}),
        ConfigError, r"mlp\.router\.weight is missing",
    ),
    "the layout of experts": (
        GLM, dataclasses.replace(NAMES, experts=(FORMATS[0], Fused(transposed=True))),
        ConfigError, r"gate_up_proj must have shape|are held with transposed=False",
    ),
    "names in the file": (
        GLM, dataclasses.replace(NAMES, block="model.layers.{layer}.moe"), CheckpointError, "has no experts",
    ),
    "names of matrices in the file": (
        GLM, dataclasses.replace(NAMES, experts=(PerExpert(MATRICES[1], MATRICES[0], MATRICES[2]), Fused())),
        AssertionError, "save_original_format=True: logits of Glm4MoeForCausalLM .* differ",
    ),
    "the activation": (
        written(activation=Activation.GEGLU), NAMES, ConfigError, "compute swiglu .*Family.config says geglu",
    ),
    "a scaling factor of 1": (written(scaling_factor=1.0), NAMES, AssertionError, r"factor=1\.6: logits"),
    "a flag": (written(renormalize=True), NAMES, AssertionError, "norm_topk_prob=False: logits"),
    "groups": (written(num_groups=1, top_groups=1), NAMES, AssertionError, "memory: logits"),
    "the method": (written(method=RoutingMethod.SOFTMAX_TOPK, correction_bias=False, num_groups=1, top_groups=1),
                   NAMES, ConfigError, "correction_bias=False"),
    "what the block returns": (
        dataclasses.replace(GLM, returns=lambda out, x: out * 2), NAMES, AssertionError, "memory: logits",
    ),
    "a field": (dataclasses.replace(GLM, config=lambda c: c.experts_in_all), NAMES, ConfigError, "for what it lacks"),
    "a configuration": (dataclasses.replace(GLM, config=lambda c: None), NAMES, ConfigError, "must be a MoEConfig"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_forgotten_is_named(what, context):
    family, names, error, text = FORGOTTEN[what]
    register_family("glm4_moe", family, names)
    with pytest.raises(error, match=text):
        check_family(glm_config(), context=context)


@pytest.mark.parametrize("kind", ["Qwen2MoeConfig", "Qwen3NextConfig"])
def test_a_gate_is_not_forgotten(kind, context, tmp_path):
    """A missing gate of the shared experts is refused, in memory and from a file, before anything is computed."""
    own = {"num_experts": 8, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2}
    own |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = getattr(transformers, kind)(**COMMON | own)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    register_family(
        config.model_type,
        Family(
            block=kind.replace("Config", "SparseMoeBlock"),
            shared="shared_expert",
            config=lambda c: MoEConfig(
                hidden_size=c.hidden_size,
                intermediate_size=c.moe_intermediate_size,
                num_experts=c.num_experts,
                top_k=c.num_experts_per_tok,
                shared_intermediate_size=c.shared_expert_intermediate_size,
                routing=RoutingConfig(renormalize=c.norm_topk_prob),
            ),
        ),
        CheckpointNames(block="model.layers.{layer}.mlp", experts=FORMATS, shared="shared_expert"),
    )
    for load in (lambda: expert_parallel(model, context), lambda: load_pretrained(tmp_path, context)):
        with pytest.raises(ConfigError, match=r"does not read model\.layers\.0\.mlp\.shared_expert_gate\.weight"):
            load()


def test_a_scale_in_the_file_is_not_forgotten(context, tmp_path):
    """A scale in the file is refused. A published model may have tensors that transformers' class lacks."""
    from safetensors.torch import load_file, save_file

    register_family("glm4_moe", GLM, NAMES)
    transformers.AutoModelForCausalLM.from_config(glm_config()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_pretrained(tmp_path, context, progress=False)
    for scale in ("gate.per_expert_scale", "experts.3.up_proj.weight_scale_inv", "expert_scale"):
        more = tensors | {f"model.layers.1.mlp.{scale}": torch.ones(8, 1)}
        save_file(more, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=scale.replace(".", r"\.")):
            load_pretrained(tmp_path, context, progress=False)


def test_what_no_file_has_is_not_forgotten(context):
    """A buffer that the class computes, and that is in no file, is refused."""
    register_family("glm4_moe", GLM, NAMES)
    model = transformers.AutoModelForCausalLM.from_config(glm_config())
    model.model.layers[1].mlp.gate.register_buffer("scale", torch.ones(8), persistent=False)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.gate\.scale of Glm4MoeMoE is computed"):
        expert_parallel(model, context)


def test_a_tensor_that_the_probe_cannot_see_is_named(context):
    """`check_family` names a tensor whose change does not affect the logits.

    With as many experts per token as experts in total, the correction bias changes nothing.
    """
    register_family("glm4_moe", GLM, NAMES)
    with pytest.raises(AssertionError, match=r"other numbers in .*e_score_correction_bias do not change the logits"):
        check_family(glm_config(num_experts_per_tok=8, n_group=1), context=context)


@pytest.mark.parametrize(
    ("kind", "family", "names", "text"),
    [
        ("qwen3_moe", GLM, NAMES, "registered already"),
        ("glm4_moe", dataclasses.replace(GLM, shared=None), NAMES, "must both name the shared experts"),
        ("glm4_moe", GLM, dataclasses.replace(NAMES, shared=None), "must both name the shared experts"),
        ("glm4_moe", GLM, dataclasses.replace(NAMES, elsewhere=("gate",)), "elsewhere=.* has no caller"),
        ("glm4_moe", GLM, dataclasses.replace(NAMES, experts=FORMATS[:1]), r"add ep_moe.checkpoint.formats.Fused\(\)"),
        ("glm4_moe", "GLM", NAMES, "must be a Family"),
        ("glm4_moe", GLM, "GLM", "must be a CheckpointNames"),
    ],
)
def test_entries_that_cannot_be_right_are_refused(kind, family, names, text):
    before = dict(FAMILIES)
    with pytest.raises(ConfigError, match=text):
        register_family(kind, family, names)
    assert before == FAMILIES


@pytest.mark.parametrize("attribute", ["forward", "missing"])
def test_shared_experts_that_are_no_module_are_refused(attribute, context):
    register_family(
        "glm4_moe", dataclasses.replace(GLM, shared=attribute), dataclasses.replace(NAMES, shared=attribute)
    )
    model = transformers.AutoModelForCausalLM.from_config(glm_config())
    with pytest.raises(ConfigError, match=rf"has no module '{attribute}'; mend Family.shared"):
        expert_parallel(model, context)
