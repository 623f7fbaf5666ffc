"""Test blocks of a known family that were changed in memory: the change is computed, or refused."""

import warnings

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext
from ep_moe.integrations.blocks import ExpertParallelBlock
from ep_moe.integrations.families import FAMILIES
from ep_moe.integrations.transformers import expert_parallel, load_pretrained
from ep_moe.integrations.user_changes import changed_methods, family_to_replace
from tests.fixtures.checkpoint_files import FAMILIES as FIVE
from tests.fixtures.checkpoint_files import quiet, save, tiny_model

pytest.importorskip("transformers")
IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def context():
    quiet()
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def router(model):
    return model.model.layers[-1].mlp.get_submodule(
        "router" if hasattr(model.model.layers[-1].mlp, "router") else "gate"
    )


def sets(**values):
    return lambda model: vars(router(model)).update(values)


def doubles(module, args, out):
    return (out[0], out[1] * 2, out[2])


def patched(model):
    own = router(model).forward
    router(model).forward = lambda x: doubles(None, None, own(x))


def subclassed(model):
    own = router(model)

    class Doubled(type(own)):
        def forward(self, x):
            return doubles(self, (x,), super().forward(x))

    own.__class__ = Doubled


def parametrized(model):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(router(model), "weight", Doubled(), unsafe=True)


def another_activation(model):
    model.model.layers[-1].mlp.experts.act_fn = nn.GELU()


CHANGED = {
    "top_k": ("mixtral", sets(top_k=1)),
    "flag": ("qwen3_moe", sets(norm_topk_prob=False)),
    "factor": ("deepseek_v3", sets(routed_scaling_factor=1.0)),
    "top_k of gpt_oss": ("gpt_oss", sets(top_k=1)),
    "hook": ("qwen3_moe", lambda model: router(model).register_forward_hook(doubles)),
    "hook of a block": (
        "qwen3_moe",
        lambda model: model.model.layers[-1].mlp.register_forward_pre_hook(lambda block, args: (args[0] * 2,)),
    ),
    "forward": ("deepseek_v3", patched),
    "subclass": ("qwen3_moe", subclassed),
    "parametrization": ("qwen3_moe", parametrized),
    "activation": ("qwen3_moe", another_activation),
}


@pytest.mark.parametrize("case", CHANGED)
@torch.no_grad()
def test_a_change_of_a_block_is_computed(case, context):
    family, change = CHANGED[case]
    models = [tiny_model(family) for _ in range(3)]
    for model in models[:2]:
        change(model)
    wanted = models[0](IDS).logits
    assert (models[2](IDS).logits - wanted).abs().max() > 1e-3, "the change shows"
    with pytest.warns(UserWarning, match=r"^model\.layers\.\d.* the blocks stay, with their own routers"):
        found = expert_parallel(models[1], context)(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@torch.no_grad()
def test_a_configuration_that_is_changed_afterwards_changes_nothing(context):
    plain, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    for one in (plain, model):
        one.config.num_experts_per_tok, one.config.norm_topk_prob = 1, False
    with pytest.warns(UserWarning, match=r"gate\.(top_k|norm_topk_prob) is .* by the configuration: the blocks stay"):
        expert_parallel(model, context)
    wanted = plain(IDS).logits
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def without_last_layer(model):
    model.config.num_hidden_layers -= 1


def another_router(model):
    model.model.layers[-1].mlp.gate = nn.Linear(4, 4)


def of_no_configuration(model):
    model.config.hidden_act = "none"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without_last_layer,
            r"^model\.layers\.2\.mlp is a Qwen3MoeSparseMoeBlock, and no block of its configuration: the ",
        ),
        (another_router, r"^model\.layers\.2\.mlp\.gate is Linear, and Qwen3MoeTopKRouter by the configuration: the "),
        (
            of_no_configuration,
            r"^Qwen3MoeForCausalLM cannot be made of its configuration to compare its blocks: 'none'",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_configuration_does_not_make_is_a_change(change, words, context):
    model = tiny_model("qwen3_moe")
    change(model)
    with pytest.warns(UserWarning, match=words):
        assert family_to_replace(model, FAMILIES["qwen3_moe"]) is None


@pytest.mark.parametrize("family", FIVE)
def test_what_nobody_changed_is_replaced_whole(family, context):
    model = tiny_model(family)
    shared = next(
        (one for name, one in model.named_modules() if name.endswith(("shared_experts", "shared_expert"))), None
    )
    if shared is not None:  # the shared experts stay a module of the layer
        shared.register_forward_hook(lambda *_: None)
    if family in ("mixtral", "qwen3_moe"):
        model(IDS, output_router_logits=True)  # transformers adds hooks to its routers
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert family_to_replace(model, FAMILIES[family]) is FAMILIES[family]
        assert torch.equal(torch.get_rng_state(), state), "a comparison draws no random number"
        expert_parallel(model, context)
    assert any(isinstance(module, ExpertParallelBlock) for module in model.modules())


def test_a_change_that_no_layer_can_keep_is_refused(context):
    model = tiny_model("llama4_text")
    model.model.layers[2].feed_forward.router.top_k = 2
    with pytest.raises(
        ConfigError, match=r"2\.feed_forward\.router\.top_k is 2, and 1 by the configuration, which a M"
    ):
        expert_parallel(model, context)


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_changed_methods_of_experts_are_refused(change, context):
    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    if change == "hook":
        experts.register_forward_hook(lambda module, args, out: out * 2)
    else:
        experts.forward = lambda *args: 2 * type(experts).forward(experts, *args)
    with (
        pytest.warns(UserWarning, match="the blocks stay"),
        pytest.raises(
            ConfigError, match=r"1\.mlp\.experts has .*, which the layer that replaces it would ignore; remove"
        ),
    ):
        expert_parallel(model, context)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_hook_of_any_kind_is_a_change(kind):
    module = nn.Linear(1, 1)
    assert changed_methods(module, "it") is None
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert changed_methods(module, "it") == "it has a hook"


@torch.no_grad()
def test_a_class_that_was_patched_is_computed(context, tmp_path, monkeypatch):
    save(tiny_model("qwen3_moe"), tmp_path)
    model = tiny_model("qwen3_moe")
    kind = type(router(model))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: doubles(None, None, own(self, x)))
    with pytest.warns(UserWarning, match=r"gate has another forward than Qwen3MoeTopKRouter was written with"):
        found = load_pretrained(tmp_path, context, progress=False)
    wanted = model(IDS).logits
    torch.testing.assert_close(found(IDS).logits, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
