"""What the experts of a transformers model compute, how they are replaced, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

from ep_moe import Activation, ConfigError, EPContext, InputError
from ep_moe.integrations.gate_functions import find_activation
from ep_moe.integrations.generic import replace_experts
from ep_moe.integrations.transformers import expert_parallel, moe_layers, read_moe_config
from ep_moe.training import router_logits
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.transformers_models import tiny_ids, tiny_transformers_model

CPU = torch.device("cpu")


class Gated(nn.Module):
    """As a class of transformers' experts interface, as far as its activation goes."""

    has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm = True, False, False, True, False

    def __init__(self, function):
        super().__init__()
        self._function = function

    def _apply_gate(self, h):
        return self._function(*h.chunk(2, -1))


def limited(gate, up, limit):
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def softcapped(gate, up):
    return 25 * (gate / 25).tanh() * gate.sigmoid() * 11 * (up / 11).tanh()


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda g, u: silu(g) * u, (Activation.SWIGLU, 1.702, 7.0)),
        (lambda g, u: (silu(g.float()) * u.float()).to(g.dtype), (Activation.SWIGLU, 1.702, 7.0)),
        (lambda g, u: gelu(g) * u, (Activation.GEGLU, 1.702, 7.0)),
        (lambda g, u: gelu(g, approximate="tanh") * u, (Activation.GEGLU_TANH, 1.702, 7.0)),
        (lambda g, u: limited(g, u, 10.0), (Activation.SWIGLU_LIMITED, 1.702, 10.0)),
        (lambda g, u: limited(g, u, 50000.0), (Activation.SWIGLU_LIMITED, 1.702, 50000.0)),
        (softcapped, (Activation.SWIGLU_SOFTCAPPED, 25.0, 11.0)),
        (lambda g, u: softcapped(g.float(), u.float()).to(g.dtype), (Activation.SWIGLU_SOFTCAPPED, 25.0, 11.0)),
        (lambda g, u: silu(g) * (u + 1), (Activation.SWIGLU_CLAMPED, 1.0, 1e6)),
        (
            lambda g, u: (u.clamp(-5, 5) + 1) * g.clamp(max=5) * (1.3 * g.clamp(max=5)).sigmoid(),
            (Activation.SWIGLU_CLAMPED, 1.3, 5.0),
        ),
    ],
)
def test_an_activation_is_found_by_its_numbers(function, found):
    assert find_activation(Gated(function), "experts") == found


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: silu(u) * g,
        lambda g, u: silu(g) * (u + 2),
        lambda g, u: silu(g) * u * 1.0001,
        lambda g, u: silu(g).clamp(max=7) * u.clamp(-7, 7),
        lambda g, u: silu(g) * u.clamp(max=500000),
        lambda g, u: gelu(g) * u.roll(1, -1),
        lambda g, u: silu(g) * u / u.norm(dim=-1, keepdim=True),
        lambda g, u: g * (1.702 * g).sigmoid() * u,
    ],
)
def test_another_activation_is_refused(function):
    with pytest.raises(ConfigError, match=r"here: Gated computes none of swiglu, geglu, .* add its activation to"):
        find_activation(Gated(function), "here")


def test_an_activation_that_cannot_be_computed_alone():
    def fails(gate, up):
        raise RuntimeError("only on a GPU")

    with pytest.raises(ConfigError, match=r"cannot be computed alone .RuntimeError: only on a GPU"):
        find_activation(Gated(fails), "here")


@pytest.fixture
def context():
    quiet()
    with EPContext.local(CPU) as made:
        yield made


def replaced(kind, context):
    """The first experts module and what replaces it, and rows for both."""
    model = tiny_transformers_model(kind)
    theirs = next(module for module in model.modules() if hasattr(type(module), "_apply_gate"))
    ours = next(iter(replace_experts(model, context).values()))
    return theirs, ours, torch.randn(6, ours.moe.config.hidden_size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_ids_of_no_expert_fewer_and_repeated_ones(context):
    theirs, ours, x = replaced("olmoe", context)
    theirs.config._experts_implementation = "eager"  # others heed the id of no expert under expert parallelism alone
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 8], [8, 3], [8, 8], [1, 2], [7, 0], [5, 8]])  # 8 is transformers' id of no expert
    torch.testing.assert_close(ours(x, ids, weights), theirs(x, ids, weights), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x, ids[:, :1], weights[:, :1]), theirs(x, ids[:, :1], weights[:, :1]))
    assert sum(ours.moe.stats().expert_load) == 7 + 4
    ours._table = True
    twice = torch.tensor([[3, 3]] * 6)
    torch.testing.assert_close(ours(x, twice, weights), theirs(x, twice, weights), rtol=1e-5, atol=1e-5)
    assert ours.moe.stats().expert_load[3] == 1 + 6
    with pytest.raises(InputError, match=r"chooses 3 experts a token, and the layer was built for 2"):
        ours(x, torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3))


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


def another(model):
    model.model.layers[1].mlp.experts.act_fn = nn.Tanh()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (tied, r"layers\.1\.mlp\.experts\.down_proj is tied to model\.layers\.0\.mlp\.experts\.down_proj"),
        (scaled, r"must hold down_proj, gate_up_proj alone, and differs in scale"),
        (coded, r"layers\.0\.mlp\.experts\.down_proj must be bfloat16, .* got float8_e4m3fn; give expert_parallel"),
        (normed, r"OlmoeExperts normalises each expert's output"),
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
    scale = plain.std()  # E4M3 rounds to 2**-4 of a number: far from equal, and far from other experts
    assert 1e-4 < (model(ids).logits - plain).std() / scale < 2**-4


def test_models_without_such_experts(context, tmp_path):
    with pytest.raises(ConfigError, match=r"JetMoeForCausalLM .*'jetmoe'. has no experts of transformers' experts int"):
        expert_parallel(tiny_transformers_model("jetmoe"), context)
    model = expert_parallel(tiny_transformers_model("olmoe"), context)
    with pytest.raises(ConfigError, match="were replaced already"):
        expert_parallel(model, context)
    with router_logits(model), torch.no_grad(), pytest.raises(InputError, match="output_router_logits=True"):
        model(tiny_ids())
    tiny_transformers_model("olmoe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'olmoe' is not among the families .* load_pretrained loads the model"):
        read_moe_config(tmp_path, context)
