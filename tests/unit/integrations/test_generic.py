"""Test how the experts of a transformers model are identified and replaced, and which are refused."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from ep_moe import Activation, ConfigError, EPContext, InputError
from ep_moe.integrations.find_experts import config_of, find_experts, numbers_of
from ep_moe.integrations.generic import replace_experts
from ep_moe.integrations.transformers import expert_parallel, moe_layers, read_moe_config
from ep_moe.training import router_logits
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.transformers_models import tiny_ids, tiny_transformers_model

CPU = torch.device("cpu")


@pytest.fixture
def context():
    quiet()
    with EPContext.local(CPU) as made:
        yield made


def replaced(kind, context):
    """Return the first experts module, its replacement, and rows for both."""
    model = tiny_transformers_model(kind)
    theirs = model.get_submodule(next(iter(find_experts(model))))
    ours = next(iter(replace_experts(model, context).values()))
    return theirs, ours, torch.randn(6, ours.moe.config.hidden_size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_ids_of_no_expert_fewer_and_repeated_ones(context):
    if transformers.__version__ < "5.18":
        pytest.skip("its experts take no id of no expert")
    theirs, ours, x = replaced("olmoe", context)
    # other implementations accept the id of no expert only under expert parallelism
    theirs.config._experts_implementation = "eager"
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 8], [8, 3], [8, 8], [1, 2], [7, 0], [5, 8]])  # in transformers, id 8 means no expert here
    torch.testing.assert_close(ours(x, ids, weights), theirs(x, ids, weights), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x, ids[:, :1], weights[:, :1]), theirs(x, ids[:, :1], weights[:, :1]))
    assert sum(ours.moe.stats().expert_load) == 7 + 4
    ours._table = True
    twice = torch.tensor([[3, 3]] * 6)
    torch.testing.assert_close(ours(x, twice, weights), theirs(x, twice, weights), rtol=1e-5, atol=1e-5)
    assert ours.moe.stats().expert_load[3] == 1 + 6
    with pytest.raises(InputError, match=r"chooses 3 experts a token, and the layer was built for 2"):
        ours(x, torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3))


def test_a_layer_of_experts_alone_has_no_router(context):
    _, ours, x = replaced("olmoe", context)
    with pytest.raises(ConfigError, match=r"^the model routes its tokens itself; call forward_routed$"):
        ours.moe(x)


@pytest.mark.parametrize("kind", ["dbrx", "olmoe"])
@torch.no_grad()
def test_inputs_by_the_names_of_the_replaced_module(kind, context):
    theirs, ours, x = replaced(kind, context)
    names = list(inspect.signature(type(theirs).forward).parameters)[1:4]
    given = [x, torch.tensor([[0, 1]] * 6), torch.rand(6, 2, generator=torch.Generator().manual_seed(1))]
    expected = ours(*given)
    for count in range(3):
        named = dict(zip(names[count:], given[count:], strict=True))
        assert torch.equal(ours(*given[:count], **named), expected)
    for inputs, more in (
        (given[:2], {"other": given[2]}),
        (given, {"other": x}),
        (given[:2], {}),
        (given[:2], {names[0]: x}),
    ):
        with pytest.raises(InputError, match=rf"its experts take {', '.join(names)}, got \d inputs and"):
            ours(*inputs, **more)


def test_experts_of_the_interface_with_a_forward_of_their_own_are_refused(context):
    model = tiny_transformers_model("olmoe")
    experts = model.model.layers[1].mlp.experts
    kind = type(experts)
    experts.__class__ = type("Doubled", (kind,), {"forward": lambda self, *given: 2 * kind.forward(self, *given)})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts: Doubled has a forward of its own in place of"):
        expert_parallel(model, context)
    experts.__class__ = type("Renamed", (kind,), {})
    expert_parallel(model, context)


@torch.no_grad()
def test_routes_may_have_the_shape_of_the_rows(context):
    _, ours, x = replaced("olmoe", context)
    ids, weights = torch.tensor([[0, 1]] * 6), torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    expected = ours(x, ids, weights)
    found = ours(x.view(2, 3, -1), ids.view(2, 3, 2), weights.view(2, 3, 2))
    assert torch.equal(found, expected.view(2, 3, -1))
    with pytest.raises(InputError, match=r"routing\.ids must be"):
        ours(x, ids.view(2, 3, 2), weights.view(2, 3, 2))


def test_a_table_of_routes_is_seen(context):
    model = tiny_transformers_model("deepseek_v4")
    tables = [ours._table for ours in replace_experts(model, context).values()]
    assert tables == ["tid2eid" in dict(layer.mlp.gate.named_buffers()) for layer in model.model.layers]
    assert any(tables)


def test_experts_under_two_names_are_replaced_under_both(context):
    model = tiny_transformers_model("olmoe")
    first, second = (layer.mlp for layer in model.model.layers)
    second.experts = first.experts
    with torch.no_grad():
        expected = model(tiny_ids()).logits
        expert_parallel(model, context)
        assert first.experts is second.experts
        assert len(moe_layers(model)) == 1
        torch.testing.assert_close(model(tiny_ids()).logits, expected, rtol=1e-5, atol=1e-5)


def test_modules_of_the_same_parameters_share_a_layer(context):
    model = tiny_transformers_model("olmoe")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    dense = {"lm_head.weight": "model.embed_tokens.weight"}
    both = {"model.layers.1.mlp.experts.down_proj": "model.layers.0.mlp.experts.down_proj"}
    model.all_tied_weights_keys = dense | both
    with torch.no_grad():
        expected = model(tiny_ids()).logits
        expert_parallel(model, context)
        assert model.model.layers[0].mlp.experts is model.model.layers[1].mlp.experts
        assert model.all_tied_weights_keys == dense, "names that are gone"
        torch.testing.assert_close(model(tiny_ids()).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_dtypes_and_modes_stay(context):
    model = tiny_transformers_model("olmoe").bfloat16().train()
    model.model.layers[1].mlp.experts.eval()
    made = list(replace_experts(model, context).values())
    assert [(one.training, one.moe.training) for one in made] == [(True, True), (False, False)]
    x, ids, weights = torch.ones(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    assert {one.moe.dtype for one in made} == {made[0](x.bfloat16(), ids, weights).dtype} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert made[0](x, ids, weights).dtype == torch.float32, "as transformers' module"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gate_up_proj", {"w1", "w3"}),
        ("down_proj", {"w2"}),
        ("gate_up_proj_bias", {"w1_bias", "w3_bias"}),
        ("down_proj_bias", {"w2_bias"}),
    ],
)
def test_a_frozen_tensor_stays_frozen(name, parts, context):
    """A frozen tensor stays frozen, and all others require gradients."""
    model = tiny_transformers_model("gpt_oss")
    for experts in find_experts(model):
        model.get_submodule(experts).get_parameter(name).requires_grad_(False)
    for ours in replace_experts(model, context).values():
        named = ours.moe.expert_weights.named_parameters()
        frozen = {each.rpartition(".")[2] for each, parameter in named if not parameter.requires_grad}
        assert frozen == parts


def test_there_is_room_for_the_most_experts_that_a_token_may_take(context):
    model = tiny_transformers_model("olmoe")
    first, second = (layer.mlp for layer in model.model.layers)
    first.gate.top_k, second.top_k = 100, 1
    assert [one.moe.config.top_k for one in replace_experts(model, context).values()] == [8, 2]


def test_constants_of_an_activation_are_the_modules_own(context):
    model = tiny_transformers_model("gpt_oss")
    experts = model.model.layers[1].mlp.experts
    experts.alpha, experts.limit = 1.3, 5.0
    found = [one.moe.config for one in replace_experts(model, context).values()]
    assert [(one.activation_alpha, one.activation_limit) for one in found] == [(1.702, 7.0), (1.3, 5.0)]


def tied(model):
    model.model.layers[1].mlp.experts.down_proj = model.model.layers[0].mlp.experts.down_proj


def scaled(model):
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(8))


def coded(model):
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


def normed(model):
    model.model.layers[0].mlp.experts.has_post_expert_norm = True


def narrower(model):
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[..., :-1].detach())


def another(model):
    model.model.layers[1].mlp.experts.act_fn = nn.Tanh()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (tied, r"layers\.1\.mlp\.experts\.down_proj is tied to model\.layers\.0\.mlp\.experts\.down_proj"),
        (scaled, r"must hold down_proj, gate_up_proj alone, and differs in scale"),
        (coded, r"layers\.0\.mlp\.experts\.down_proj must be bfloat16, .* got float8_e4m3fn; give expert_parallel"),
        (narrower, r"OlmoeExperts must hold matrices of one hidden and one intermediate size, got gate_up_proj \[8, "),
        (normed, r"OlmoeExperts must have a module post_expert_norm, .* got none"),
        (another, r"layers\.1\.mlp\.experts: OlmoeExperts computes none of"),
    ],
)
def test_what_is_refused(change, sentence, context):
    model = tiny_transformers_model("olmoe")
    change(model)
    before = {id(module) for module in model.modules()}
    with pytest.raises(ConfigError, match=sentence):
        expert_parallel(model, context)
    assert {id(module) for module in model.modules()} == before, "the model was changed"


@torch.no_grad()
def test_a_model_is_quantised_where_no_calibration_is_needed(context):
    model, ids = tiny_transformers_model("olmoe"), tiny_ids()
    for scheme in ("fp8_static", "nvfp4"):
        with pytest.raises(ConfigError, match=f"quantization={scheme} needs input scales"):
            expert_parallel(model, context, quantization=scheme)
    plain = model(ids).logits
    expert_parallel(model, context, quantization="fp8_dynamic")
    scale = plain.std()  # E4M3 rounds to 2**-4 of a number: the logits differ, but by less than with other experts
    assert 1e-4 < (model(ids).logits - plain).std() / scale < 2**-4


def test_models_without_such_experts(context, tmp_path):
    with pytest.raises(ConfigError, match=r"DogeForCausalLM .*'doge'. has no module that computes experts from rows"):
        expert_parallel(tiny_transformers_model("doge"), context)
    model = expert_parallel(tiny_transformers_model("olmoe"), context)
    with pytest.raises(ConfigError, match="were replaced already"):
        expert_parallel(model, context)
    with router_logits(model), torch.no_grad(), pytest.raises(InputError, match="output_router_logits=True"):
        model(tiny_ids())
    tiny_transformers_model("olmoe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'olmoe' is not among the families .* load_pretrained loads the model"):
        read_moe_config(tmp_path, context)


# --- modules that are not on the interface --------------------------------------------------------------------------


def test_what_modules_hold_that_are_not_on_the_interface():
    found = {
        kind: next(iter(find_experts(tiny_transformers_model(kind)).values()))
        for kind in ("step3p7", "longcat_flash", "dbrx", "jetmoe", "muse_spark_text")
    }
    assert [kind for kind, one in found.items() if one.zero_experts] == ["longcat_flash"]
    assert [kind for kind, one in found.items() if one.norm] == ["muse_spark_text"]
    assert [kind for kind, one in found.items() if one.block] == ["jetmoe"]
    assert [kind for kind, one in found.items() if one.layout.tensors[0].flat] == ["dbrx"]
    assert [one.part for one in found["dbrx"].layout.tensors] == ["w1", "w3", "w2"]
    second = list(find_experts(tiny_transformers_model("step3p7")).values())[1]
    assert second.activation == (Activation.SWIGLU_LIMITED_AFTER, 1.702, 0.05)


@torch.no_grad()
def test_ids_that_stand_for_the_row_itself(context):
    theirs, ours, x = replaced("longcat_flash", context)
    ids = torch.tensor([[0, 8], [11, 3], [8, 9], [1, 2], [7, 0], [5, 10]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x, ids, weights), theirs(x, ids, weights), rtol=1e-5, atol=1e-5)
    assert sum(ours.moe.stats().expert_load) == 7, "what goes to no expert is no load"


def test_each_experts_output_is_normalised(context):
    """The output of each expert is normalized, with gradients of the norm and of the routing weights.

    A row may name fewer experts than other rows.
    """
    theirs, ours, x = replaced("muse_spark_text", context)
    theirs.config._experts_implementation = "eager"
    ids = torch.tensor([[0, 8], [1, 3], [8, 8], [1, 2], [7, 0], [5, 6]])
    found, expected = [], []
    for module, into in ((theirs, expected), (ours, found)):
        weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = module(x, ids, weights)
        (out * torch.linspace(0, 1, out.shape[1])).sum().backward()
        into += [out.detach(), weights.grad, module.post_expert_norm.weight.grad.clone()]
        module.post_expert_norm.weight.grad = None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert sum(ours.moe.stats().expert_load) == 9


def test_a_norm_of_each_output_is_no_part_of_one_layer(context):
    model = tiny_transformers_model("muse_spark_text")
    experts = next(one for one in model.modules() if hasattr(one, "post_expert_norm"))
    with pytest.raises(ConfigError, match="normalizes each expert's output, which one call of MoELayer does not"):
        config_of(experts, "experts", 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("kind", "which"), [("qwen3_moe", "down_proj"), ("dbrx", "mlp.v1"), ("jetmoe", "output_linear.weight")]
)
def test_experts_of_mixed_or_quantized_numbers_are_refused(kind, which, dtype):
    """Experts of mixed or quantized dtypes are refused, on transformers' interface and off it."""
    model = tiny_transformers_model(kind)
    name = next(iter(find_experts(model)))
    owner, _, parameter = f"{name}.{which}".rpartition(".")
    module = model.get_submodule(owner)
    module._parameters[parameter] = nn.Parameter(getattr(module, parameter).detach().to(dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=rf"{name}.*{which}.*give expert_parallel the model as it was before it was"):
        find_experts(model)


def test_counts_of_nothing_are_no_number_of_experts():
    model = tiny_transformers_model("dbrx")
    for module in list(find_experts(model)):
        vars(model.get_submodule(module))["num_shared_experts"] = 0
    assert find_experts(model).keys() == find_experts(tiny_transformers_model("dbrx")).keys()


def test_numbers_of_experts_may_be_stated_layer_by_layer():
    stated = [SimpleNamespace(num_experts_per_tok=[2, 4]), SimpleNamespace(num_experts_per_tok=3), SimpleNamespace()]
    assert numbers_of(stated) == [2, 4, 3]
