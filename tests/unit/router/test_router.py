"""Test routing methods against the implementations of the models that use them."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ep_moe import (
    ConfigError,
    EPContext,
    InputError,
    MoEConfig,
    MoELayer,
    Router,
    Routing,
    RoutingConfig,
    RoutingMethod,
)
from ep_moe.router import route, routing_weights, sigmoid_topk, softmax_topk, topk_sigmoid, topk_softmax
from tests.fixtures.helpers import fill, integer_rows

deepseek_v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

TOKENS, HIDDEN, EXPERTS, TOP_K = 128, 32, 16, 4
EXACT = dict.fromkeys(("rtol", "atol"), 0)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def shape(top_k: int = TOP_K, **routing) -> MoEConfig:
    return MoEConfig(
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_experts=EXPERTS,
        top_k=top_k,
        routing=RoutingConfig(**routing),
    )


def theirs(kind: type[nn.Module], top_k: int = TOP_K, **fields) -> nn.Module:
    """Return a transformers router of the size of `shape`, with random parameters and buffers."""
    names = ("num_experts", "num_local_experts")
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": top_k, **dict.fromkeys(names, EXPERTS)}
    module = kind(SimpleNamespace(**sizes, **fields))
    generator = torch.Generator().manual_seed(3)
    for tensor in module.state_dict().values():
        tensor.normal_(generator=generator).mul_(0.3)
    return module


def ours(module: nn.Module, config: MoEConfig, dtype: torch.dtype = torch.float32) -> Router:
    """Return this package's router with the parameters of theirs."""
    router = Router(config, dtype=dtype)
    assert router.state_dict().keys() == module.state_dict().keys()
    router.load_state_dict(module.state_dict())
    return router


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)


def table(ids: Tensor, weights: Tensor) -> Tensor:
    """Return [T, E]: the weight of each chosen expert, NaN for others. It does not depend on the order of the K."""
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return torch.full((len(ids), EXPERTS), torch.nan).scatter(1, ids, weights.float())


def assert_same(routing: Routing, ids: Tensor, weights: Tensor, tolerance: dict = CLOSE) -> None:
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(table(routing.ids, routing.weights), table(ids, weights), equal_nan=True, **tolerance)


# --- float32, method by method --------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_topk_is_qwen3(renormalize):
    module = theirs(qwen3_moe.Qwen3MoeTopKRouter, norm_topk_prob=renormalize)
    routing = ours(module, shape(renormalize=renormalize))(rows())
    _, weights, ids = module(rows())
    assert_same(routing, ids, weights)
    total = routing.weights.sum(1)
    assert ((total - 1).abs() < 1e-6).all() if renormalize else (total < 0.999).all()


def test_softmax_topk_is_mixtral():
    module = theirs(mixtral.MixtralTopKRouter)
    _, weights, ids = module(rows())
    assert_same(ours(module, shape(renormalize=True))(rows()), ids, weights)


def test_topk_softmax_is_gpt_oss():
    module = theirs(gpt_oss.GptOssTopKRouter)
    _, weights, ids = module(rows())
    assert_same(ours(module, shape(method=RoutingMethod.TOPK_SOFTMAX, bias=True))(rows()), ids, weights)
    assert module.bias.abs().min() > 0


DEEPSEEK = {
    "DeepSeek-V3": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "Kimi-K2": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True},
    "one group of many": {"n_group": 4, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "not renormalized": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
}


def deepseek(name: str) -> tuple[nn.Module, MoEConfig]:
    fields = DEEPSEEK[name]
    config = shape(
        method=RoutingMethod.SIGMOID_TOPK,
        renormalize=fields["norm_topk_prob"],
        scaling_factor=fields["routed_scaling_factor"],
        num_groups=fields["n_group"],
        top_groups=fields["topk_group"],
        correction_bias=True,
        float32_logits=True,
    )
    return theirs(deepseek_v3.DeepseekV3TopkRouter, **fields), config


@pytest.mark.parametrize("name", DEEPSEEK)
def test_sigmoid_topk_is_deepseek(name):
    module, config = deepseek(name)
    assert module.e_score_correction_bias.abs().min() > 0
    _, weights, ids = module(rows())
    assert_same(ours(module, config)(rows()), ids, weights)


def test_correction_bias_and_groups_matter_in_these_cases():
    """Correction bias and groups change the choice in these cases. Otherwise the test above would pass without them."""
    module, _ = deepseek("DeepSeek-V3")
    logits, _, ids = module(rows())
    groups = {"num_groups": 4, "top_groups": 2}
    chosen = [
        sigmoid_topk(logits, TOP_K, renormalize=True, **groups)[1],
        sigmoid_topk(logits, TOP_K, renormalize=True, correction_bias=module.e_score_correction_bias)[1],
    ]
    for other in chosen:
        assert (other.sort(1).values != ids.sort(1).values).any(1).sum() > TOKENS / 4


def test_correction_bias_is_not_in_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, ids = sigmoid_topk(logits, 2, renormalize=False, correction_bias=bias)
    chosen = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert chosen == pytest.approx({0: torch.tensor(2.0).sigmoid().item(), 3: torch.tensor(-1.0).sigmoid().item()})


@pytest.mark.parametrize("top_k", [1, 2])
def test_topk_sigmoid_is_llama4(top_k):
    """TOPK_SIGMOID equals Llama-4's router, whose scores are [T, E] and zero for experts that are not chosen."""
    module = theirs(llama4.Llama4Router, top_k)
    scores, _ = module(rows())
    ids = scores.topk(top_k).indices
    routing = ours(module, shape(top_k, method=RoutingMethod.TOPK_SIGMOID))(rows())
    assert_same(routing, ids, scores.gather(1, ids))
    assert ((scores > 0).sum(1) == top_k).all()


def test_weight_on_input_is_llama4s_whole_block():
    inner = 24
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        intermediate_size=inner,
        hidden_act="silu",
    )
    block = llama4.Llama4TextMoe(config)
    generator = torch.Generator().manual_seed(3)
    for tensor in block.state_dict().values():
        tensor.normal_(generator=generator).mul_(HIDDEN**-0.5)
    routing = {"method": RoutingMethod.TOPK_SIGMOID}

    def layer(**fields) -> MoELayer:
        made = MoELayer(
            MoEConfig(
                hidden_size=HIDDEN,
                intermediate_size=inner,
                num_experts=EXPERTS,
                top_k=1,
                shared_intermediate_size=inner,
                routing=RoutingConfig(**routing, **fields),
            ),
            EPContext.local(torch.device("cpu")),
        )
        made.router.load_state_dict(block.router.state_dict())
        made.shared_experts.load_state_dict(block.shared_expert.state_dict())
        for expert in range(EXPERTS):
            made.update_expert(
                expert, w13=block.experts.gate_up_proj[expert].t(), w2=block.experts.down_proj[expert].t()
            )
        return made

    with torch.no_grad():
        expected, _ = block(rows())
        torch.testing.assert_close(layer(weight_on_input=True)(rows()), expected)
        assert not torch.allclose(layer()(rows()), expected, atol=1e-2)


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(RoutingMethod), ids=lambda m: m.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_are_float32_for_any_input(method, dtype):
    routing = Router(shape(method=method, scaling_factor=2.0), dtype=dtype)(rows(dtype))
    assert routing.weights.dtype == torch.float32
    assert routing.ids.dtype == torch.int64
    assert routing.ids.shape == routing.weights.shape == (TOKENS, TOP_K)
    assert routing.weights.isfinite().all()


def test_softmax_topk_is_qwen3_in_bfloat16():
    """SOFTMAX_TOPK equals Qwen3's router in bfloat16, except that Qwen3 rounds the weights to bfloat16 at the end."""
    module = theirs(qwen3_moe.Qwen3MoeTopKRouter, norm_topk_prob=True).bfloat16()
    routing = ours(module, shape(renormalize=True), torch.bfloat16)(rows(torch.bfloat16))
    _, weights, ids = module(rows(torch.bfloat16))
    assert weights.dtype == torch.bfloat16
    assert_same(Routing(routing.ids, routing.weights.bfloat16().float()), ids, weights, EXACT)
    assert not torch.equal(routing.weights, routing.weights.bfloat16().float())


def test_topk_softmax_is_gpt_oss_in_bfloat16():
    module = theirs(gpt_oss.GptOssTopKRouter).bfloat16()
    config = shape(method=RoutingMethod.TOPK_SOFTMAX, bias=True)
    _, weights, ids = module(rows(torch.bfloat16))
    assert_same(ours(module, config, torch.bfloat16)(rows(torch.bfloat16)), ids, weights, EXACT)


def test_topk_sigmoid_is_llama4_in_bfloat16():
    module = theirs(llama4.Llama4Router, 1).bfloat16()
    scores, _ = module(rows(torch.bfloat16))
    ids = scores.topk(1).indices
    routing = ours(module, shape(1, method=RoutingMethod.TOPK_SIGMOID), torch.bfloat16)(rows(torch.bfloat16))
    assert_same(Routing(routing.ids, routing.weights.bfloat16().float()), ids, scores.gather(1, ids), EXACT)


def test_float32_logits_are_deepseeks_in_bfloat16():
    """Float32 logits equal DeepSeek's with a bfloat16 weight and input.

    The product and the correction bias are float32.
    """
    module, config = deepseek("DeepSeek-V3")
    module.weight.data = module.weight.data.bfloat16()
    _, weights, ids = module(rows(torch.bfloat16))
    assert_same(ours(module, config, torch.bfloat16)(rows(torch.bfloat16)), ids, weights)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().cpu()])
def test_a_router_with_float32_logits_keeps_float32(cast):
    """A router with float32 logits stays in float32 in a 16-bit layer, and after any cast of the model.

    Scores of experts differ by less than a 16-bit step.
    """
    config = shape(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, bias=True, float32_logits=True)
    assert {t.dtype for t in Router(config, dtype=torch.bfloat16).state_dict().values()} == {torch.float32}
    router = Router(config)
    for tensor in router.state_dict().values():
        tensor.normal_()
    router.weight.grad = torch.randn_like(router.weight)
    before = {name: tensor.clone() for name, tensor in [*router.state_dict().items(), ("grad", router.weight.grad)]}
    weight = router.weight
    cast(router)
    assert router.weight is weight
    for name, tensor in [*router.state_dict().items(), ("grad", router.weight.grad)]:
        assert torch.equal(tensor, before[name]), name
    assert router.double().weight.dtype == Router(config, dtype=torch.float64).weight.dtype == torch.float64
    assert router.float().weight.dtype == torch.float32, "of float64"
    plain = Router(shape(), dtype=torch.bfloat16)
    assert plain.weight.dtype == torch.bfloat16
    assert cast(Router(shape())).weight.itemsize == 2


def test_without_float32_logits_the_map_is_in_the_inputs_dtype():
    module = theirs(qwen3_moe.Qwen3MoeTopKRouter, norm_topk_prob=True).bfloat16()
    x = rows(torch.bfloat16)
    plain, wide = (ours(module, shape(float32_logits=wide), torch.bfloat16)(x) for wide in (False, True))
    logits = x.float() @ module.weight.float().t()
    torch.testing.assert_close(wide.weights, logits.softmax(-1).topk(TOP_K).values)
    torch.testing.assert_close(plain.weights, logits.bfloat16().float().softmax(-1).topk(TOP_K).values)
    assert not torch.allclose(plain.weights, wide.weights, rtol=1e-4)


def test_float32_logits_include_the_bias():
    module = theirs(gpt_oss.GptOssTopKRouter).bfloat16()
    config = shape(method=RoutingMethod.TOPK_SOFTMAX, bias=True, float32_logits=True)
    routing = ours(module, config, torch.bfloat16)(rows(torch.bfloat16))
    _, weights, ids = module.float()(rows(torch.bfloat16).float())
    assert_same(routing, ids, weights)


@pytest.mark.parametrize("change", ["to", "default dtype"])
def test_correction_bias_is_float32_whatever_the_model_is(change):
    """The correction bias stays in float32 in any model. In bfloat16 it would choose other experts.

    The scores that it is added to differ by less than a bfloat16 step.
    """
    config = shape(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)
    if change == "to":
        router = Router(config)
        router.e_score_correction_bias.fill_(1 / 3)
        router = router.to(torch.bfloat16)
        assert router.e_score_correction_bias.eq(torch.tensor(1 / 3)).all()
    else:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            router = Router(config)
        finally:
            torch.set_default_dtype(before)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32


# --- the functions alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_scores_that_vanish_have_no_weight(exact):
    """Scores that underflow to 0 get weight 0.

    In float32 the sigmoid of -200 is 0, and so is the sum that weights are divided by.
    """
    config = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, renormalize=True)
    logits = torch.full((2, EXPERTS), -200.0)
    chosen = route(logits, TOP_K, config, exact=exact)
    assert (chosen.weights == 0).all()
    assert (routing_weights(logits, chosen.ids, config, exact=exact) == 0).all()


def test_scaling_factor_is_multiplied_in_last():
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    config = RoutingConfig(renormalize=True, scaling_factor=2.5)
    torch.testing.assert_close(route(logits, TOP_K, config).weights.sum(1), torch.full((TOKENS,), 2.5))


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("top_k", [1, EXPERTS])
def test_few_tokens_and_all_experts(tokens, top_k):
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(0))
    for weights, ids in (
        softmax_topk(logits, top_k, renormalize=True),
        topk_softmax(logits, top_k),
        topk_sigmoid(logits, top_k),
        sigmoid_topk(logits, top_k, renormalize=True),
        sigmoid_topk(logits, top_k, renormalize=True, num_groups=2, top_groups=2),
    ):
        assert ids.shape == weights.shape == (tokens, top_k)


@pytest.mark.parametrize("method", list(RoutingMethod), ids=lambda m: m.value)
def test_gradients_reach_the_router(method):
    router = Router(shape(method=method, bias=True))
    router(rows()).weights.square().sum().backward()
    assert router.weight.grad.abs().max() > 0
    assert router.bias.grad.abs().max() > 0


def test_parameters_are_named_as_in_checkpoints():
    config = shape(method=RoutingMethod.SIGMOID_TOPK, bias=True, correction_bias=True)
    assert set(Router(config).state_dict()) == {"weight", "bias", "e_score_correction_bias"}
    assert set(Router(shape()).state_dict()) == {"weight"}


# --- routers of the user's ------------------------------------------------------------------------------------------


def every_other(x: Tensor) -> Routing:
    ids = (x.sum(1).long().unsqueeze(1) + 2 * torch.arange(TOP_K)) % EXPERTS
    return Routing(ids, torch.ones(len(x), TOP_K))


def test_a_router_needs_a_layers_configuration():
    with pytest.raises(ConfigError, match="Router: config must be a MoEConfig, got RoutingConfig"):
        Router(RoutingConfig())


def test_any_callable_is_a_router():
    layer = fill(MoELayer(shape(), EPContext.local(torch.device("cpu")), router=every_other))
    x = integer_rows(9, HIDDEN, 0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.forward_routed(x, every_other(x)), **EXACT)
    assert not any(name.startswith("router") for name in layer.state_dict())
    assert "router" not in layer.plan()


def test_a_module_as_router_belongs_to_the_layer():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(4.0))

        def forward(self, x: Tensor) -> Routing:
            routing = every_other(x)
            return Routing(routing.ids, routing.weights * self.scale)

    router = Scaled()
    layer = fill(MoELayer(shape(), EPContext.local(torch.device("cpu")), router=router))
    x = integer_rows(9, HIDDEN, 0)
    y = layer(x)
    once = layer.forward_routed(x, every_other(x))
    torch.testing.assert_close(y, 4 * once, **EXACT)
    y.sum().backward()
    # two sums of 9 x HIDDEN terms in different orders
    apart = 9 * HIDDEN * torch.finfo(torch.float32).eps * float(once.detach().abs().sum())
    torch.testing.assert_close(router.scale.grad, once.sum().detach(), rtol=0, atol=apart)
    assert "router.scale" in layer.state_dict()
    assert layer.plan()["router"] == 4


def bad_results(x: Tensor) -> dict[str, tuple[object, str]]:
    good = every_other(x)
    return {
        "tuple": ((good.ids, good.weights), "Routing"),
        "K": (Routing(good.ids[:, 1:], good.weights[:, 1:]), "routing.ids"),
        "one dimension": (Routing(good.ids[:, 0], good.weights[:, 0]), "routing.ids"),
        "rows": (Routing(good.ids[1:], good.weights[1:]), "routing.ids"),
        "float ids": (Routing(good.ids.float(), good.weights), "routing.ids"),
        "weights of other shape": (Routing(good.ids, good.weights[:, :1]), "routing.weights"),
        "bfloat16 weights": (Routing(good.ids, good.weights.bfloat16()), "routing.weights"),
        "id out of range": (Routing(good.ids + EXPERTS, good.weights), "routing.ids"),
    }


@pytest.mark.parametrize("name", bad_results(torch.zeros(2, HIDDEN)))
def test_bad_result_of_a_users_router_is_named(name):
    """A bad result of a user's router raises InputError. Any other error on one rank would leave its peers waiting."""
    message = bad_results(torch.zeros(2, HIDDEN))[name][1]
    layer = MoELayer(shape(), EPContext.local(torch.device("cpu")), router=lambda x: bad_results(x)[name][0])
    with pytest.raises(InputError) as error:
        layer(integer_rows(9, HIDDEN, 0))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("method", "renormalize"),
    [
        *((method, False) for method in RoutingMethod),
        (RoutingMethod.SOFTMAX_TOPK, True),
        (RoutingMethod.SIGMOID_TOPK, True),
    ],
)
def test_an_exact_choice_is_the_first_of_equal_scores_and_of_its_row_alone(method, renormalize):
    """An exact choice takes the first of equal scores, and depends on its row only.

    Logits are integers from -3 to 3 for 16 experts, so each row has equal ones.
    """
    config = RoutingConfig(method=method, renormalize=renormalize)
    logits = torch.randint(-3, 4, (37, EXPERTS), generator=torch.Generator().manual_seed(7)).float()
    whole = route(logits, TOP_K, config, exact=True)
    assert torch.equal(whole.ids, logits.argsort(dim=1, descending=True, stable=True)[:, :TOP_K])
    assert torch.equal(routing_weights(logits, whole.ids, config, exact=True), whole.weights)
    for row in range(len(logits)):
        alone = route(logits[row : row + 1], TOP_K, config, exact=True)
        assert torch.equal(alone.ids[0], whole.ids[row])
        assert torch.equal(alone.weights[0], whole.weights[row])
