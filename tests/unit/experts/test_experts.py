"""Test the reference experts against a loop over tokens and experts in float64, within a derived error bound."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from ep_moe import Activation, ExpertMap, MoEConfig
from ep_moe.experts.layouts import as_rank_major, expected_pairs, group_rows, reduce_rows, scaled_by_block
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.experts.shared_experts import activate
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.expert_weights import etp_link
from tests.fixtures.experts import (
    EPS32,
    EXPERTS,
    HIDDEN,
    INNER,
    LIMIT,
    ROWS,
    TOP_K,
    bound,
    experts,
    local_ids,
    loop,
    parameters,
    received,
    shape,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


IDS = ["some of them", "all rows to one expert", "experts without rows", "no rows", "rows without an expert"]


def gradient(weights: ExpertWeights, name: str) -> Tensor:
    """Return the gradient of a stored tensor, for all slots."""
    parts = [dict(weights.get_submodule(str(e)).named_parameters()) for e in weights.slots_of_expert]
    names = [part for part in (name.replace("w13", "w1"), name.replace("w13", "w3")) if part in parts[0]]
    return torch.stack([torch.cat([own[part].grad for part in dict.fromkeys(names)]) for own in parts])


# --- against the loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_equals_a_loop_over_tokens_and_experts(activation, bias, dtype):
    config = shape(activation, bias)
    run, call = experts(config, dtype), received(local_ids("some of them"), dtype)
    p = parameters(run.weights)
    with torch.no_grad():
        y = run(call)
    assert y.dtype == dtype
    error = (y.double() - loop(config, p, call.x.double(), call.local_ids, call.weights.double())).abs()
    limit = bound(config, p, call, dtype)
    assert (error <= limit).all(), f"{(error / limit.clamp(min=1e-30)).max():.2f} times the bound"
    assert limit.median() < y.double().std() / 4  # otherwise the bound would allow any result


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_any_spread_of_rows_over_experts(kind, ids_dtype):
    config = shape(bias=True)
    run, call = experts(config), received(local_ids(kind).to(ids_dtype))
    p = parameters(run.weights)
    with torch.no_grad():
        y = run(call)
    assert y.shape == call.x.shape
    expected = loop(config, p, call.x.double(), call.local_ids, call.weights.double())
    assert ((y.double() - expected).abs() <= bound(config, p, call, torch.float32)).all()


@pytest.mark.parametrize("kind", ["some of them", "rows without an expert"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_local_expert_are_exactly_zero(kind, dtype):
    ids = local_ids(kind)
    ids[4] = -1
    call = received(ids, dtype)
    without = (ids < 0).all(1)
    call.x[without] = torch.nan  # these rows are not read either
    y = experts(shape(bias=True), dtype)(call)
    assert (y[without] == 0).all()
    assert y[~without].isfinite().all()


def test_rows_do_not_touch_each_other():
    call = received(local_ids("some of them"))
    run = experts(shape(bias=True))
    before = run(call)
    bad = int((call.local_ids >= 0).all(1).nonzero()[0])
    call.x[bad] = torch.nan
    after = run(call)
    others = torch.arange(ROWS) != bad
    assert torch.equal(after[others], before[others])
    assert after[bad].isnan().all()


def test_rank_without_experts_returns_zeros():
    """A rank without experts (L = 0) returns zeros.

    It still gets rows from a transport that sends every row to every rank.
    """
    config = shape()
    weights = ExpertWeights(config, ExpertMap.uneven([0, EXPERTS]), ep_rank=0)
    call = received(local_ids("rows without an expert"))
    call.x.requires_grad_()
    y = ReferenceExperts(config, weights)(call)
    assert y.shape == (ROWS, HIDDEN)
    assert (y == 0).all()
    y.sum().backward()
    assert (call.x.grad == 0).all()


def test_equal_calls_give_equal_bits():
    run, call = experts(shape(bias=True), torch.bfloat16), received(local_ids("some of them"), torch.bfloat16)
    assert torch.equal(run(call), run(call))


@torch.no_grad()
def test_results_are_written_where_the_caller_wants_them():
    """Results are written into `out`, also by experts whose weights are parameters."""
    run, call = experts(shape(bias=True)), received(local_ids("some of them"))
    assert run.weights.has_expert_parameters
    out = torch.full_like(call.x, torch.nan)
    found = run(call, out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out, run(call))


def test_weights_are_read_at_each_call():
    """Weights are read at each call, so an in-place update takes effect. The kernel keeps no copy."""
    run, call = experts(shape()), received(local_ids("some of them"))
    before = run(call)
    with torch.no_grad():
        run.weights.w2.mul_(2)
    torch.testing.assert_close(run(call), 2 * before)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["some of them", "all rows to one expert", "experts without rows"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_gradients_equal_those_of_the_loop(activation, bias, kind):
    """Gradients equal those of the loop.

    Each is a sum of at most H + I + N * K products of 4 factors. Each factor is known to about 10 eps32.
    """
    config = shape(activation, bias)
    run, call = experts(config), received(local_ids(kind))
    call.x.requires_grad_()
    call.weights.requires_grad_()
    away = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(9))
    (run(call) * away).sum().backward()

    p = parameters(run.weights)
    x, weights = (t.detach().double().requires_grad_() for t in (call.x, call.weights))
    (loop(config, p, x, call.local_ids, weights) * away.double()).sum().backward()
    pairs = {"x": (call.x, x), "weights": (call.weights, weights)}
    pairs = {name: (mine.grad, wanted) for name, (mine, wanted) in pairs.items()}
    pairs |= {name: (gradient(run.weights, name), wanted) for name, wanted in p.items()}
    assert len(pairs) == (6 if bias else 4)
    for name, (mine, wanted) in pairs.items():
        error = (mine.double() - wanted.grad).abs().max()
        assert error <= (HIDDEN + INNER + ROWS * TOP_K) * 10 * EPS32 * wanted.grad.abs().max(), name
        assert wanted.grad.abs().max() > 0, name


def test_no_gradient_where_nothing_was_computed():
    ids = local_ids("experts without rows")
    ids[7] = -1
    run, call = experts(shape(bias=True)), received(ids)
    call.x.requires_grad_()
    run(call).square().sum().backward()
    assert (call.x.grad[7] == 0).all()
    for name in run.weights.stored_tensors():
        found = gradient(run.weights, name)
        assert (found[[0, 2, EXPERTS - 1]] == 0).all()
        assert found[1].abs().max() > 0


@pytest.mark.parametrize("kind", ["no rows", "rows without an expert"])
def test_output_stays_in_the_graph_without_rows(kind):
    """The output stays in the autograd graph without rows.

    Otherwise this rank would skip the collectives of its peers' backward.
    """
    call = received(local_ids(kind))
    call.x.requires_grad_()
    y = experts(shape())(call)
    assert y.requires_grad
    y.sum().backward()
    assert call.x.grad is not None
    assert (call.x.grad == 0).all()


@pytest.mark.parametrize("slots", [EXPERTS, 0])
def test_output_without_rows_hangs_on_the_parameters_too(slots):
    """The output without rows depends on the parameters too, as with rows, whose x may need no gradient."""
    weights = ExpertWeights(shape(), ExpertMap.uneven([slots, EXPERTS - slots]))
    y = ReferenceExperts(shape(), weights)(received(local_ids("rows without an expert")))
    assert y.requires_grad
    y.sum().backward()
    assert all(parameter.grad is None or (parameter.grad == 0).all() for parameter in weights.parameters())


def test_a_sum_as_the_loss():
    """The sum of the output can be the loss.

    Its gradient is an expanded scalar, which grouped_mm's backward refuses.
    """
    run, call = experts(shape()), received(local_ids("some of them"))
    run(call).sum().backward()
    assert gradient(run.weights, "w13").abs().max() > 0


# --- activations ----------------------------------------------------------------------------------------------------


def test_gate_comes_first():
    """w13 has the gate first. With 1 for the gate and 2 for up, the result is silu(x) * 2x and not silu(2x) * x."""
    config = shape(hidden_size=4, intermediate_size=4, num_experts=1, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(1, 1))
    eye = torch.eye(4)
    weights.update_expert(0, {"w13": torch.cat([eye, 2 * eye]), "w2": eye})
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    call = Received(
        x=x,
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(torch.zeros(1, 1, dtype=torch.int64)),
        weights=torch.ones(1, 1),
    )
    torch.testing.assert_close(ReferenceExperts(config, weights)(call), silu(x) * 2 * x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_activation_is_gpt_oss(dtype):
    """The clamped activation is GPT-OSS's. transformers alternates gate and up rows, and ours are in two halves."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    module = gpt_oss.GptOssExperts.__new__(gpt_oss.GptOssExperts)
    torch.nn.Module.__init__(module)
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=1, top_k=1, activation=Activation.SWIGLU_CLAMPED)
    module.alpha, module.limit = 1.702, 7.0
    h = torch.randn(50, 2 * INNER, generator=torch.Generator().manual_seed(0)).mul(8).to(dtype)
    assert (h.abs() > 7).any()
    by_turns = torch.stack(h.chunk(2, dim=-1), dim=-1).flatten(-2)
    torch.testing.assert_close(activate(h, config), module._apply_gate(by_turns), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activation", "module", "name"),
    [
        (Activation.SWIGLU_LIMITED, "deepseek_v4", "DeepseekV4Experts"),
        (Activation.SWIGLU_LIMITED_AFTER, "step3p7", "Step3p7Experts"),
    ],
)
def test_limited_activations_are_their_models_own(activation, module, name):
    kind = getattr(pytest.importorskip(f"transformers.models.{module}.modeling_{module}"), name)
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.limit, module.act_fn = LIMIT, silu
    h = torch.randn(50, 2 * INNER, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(activate(h, shape(activation)), module._apply_gate(h), rtol=0, atol=0)


@pytest.mark.parametrize(
    "activation", [Activation.SWIGLU_CLAMPED, Activation.SWIGLU_LIMITED, Activation.SWIGLU_LIMITED_AFTER]
)
def test_a_limit_beyond_half_precision_is_none(activation):
    h = torch.full((1, 2 * INNER), 100.0, dtype=torch.float16)
    far, near = (dataclasses.replace(shape(activation), activation_limit=limit) for limit in (1e6, 60000.0))
    torch.testing.assert_close(activate(h, far), activate(h, near), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (Activation.SWIGLU, "silu"),
        (Activation.GEGLU, "gelu"),
        (Activation.GEGLU_TANH, "gelu_pytorch_tanh"),
        (Activation.RELU2, "relu2"),
    ],
)
def test_activation_is_the_one_transformers_knows(activation, name):
    function = pytest.importorskip("transformers.activations").ACT2FN[name]
    h = torch.randn(50, 2 * INNER, generator=torch.Generator().manual_seed(0)) * 3
    gate, up = h.chunk(2, dim=-1)
    expected = function(gate) * up if activation.gated else function(h)
    torch.testing.assert_close(activate(h, shape(activation)), expected)


# --- rows by expert -------------------------------------------------------------------------------------------------


def test_rows_are_grouped_by_expert_in_their_order():
    call = received(torch.tensor([[2, -1], [0, 2], [-1, -1], [3, 0]]))
    grouped = group_rows(call, 5)
    assert grouped.expert.tolist() == [0, 0, 2, 2, 3]
    assert grouped.ends.tolist() == [2, 2, 4, 5, 5]
    assert grouped.ends.dtype == torch.int32
    assert grouped.slots.tolist() == [[2, 5], [0, 3], [5, 5], [4, 1]]
    assert torch.equal(grouped.x, call.x[[1, 3, 0, 1, 3]])
    assert torch.equal(grouped.weights, call.weights[[1, 3, 0, 1, 3], [0, 1, 0, 1, 0]])


def test_rows_are_grouped_alike_in_a_compiled_graph(monkeypatch):
    """There all N * K rows are kept. Those without an expert come last, and no entry of `slots` is one of them."""
    call = received(torch.tensor([[2, -1], [0, 2], [-1, -1], [3, 0]]))
    wanted = group_rows(call, 5)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = group_rows(call, 5)
    monkeypatch.undo()
    assert found.ends.tolist() == wanted.ends.tolist()
    assert found.ends.dtype == torch.int32
    assert (len(found.x), found.expert.tolist()) == (8, [*wanted.expert.tolist(), 0, 0, 0])
    assert torch.equal(found.x[:5], wanted.x)
    assert torch.equal(found.weights[:5], wanted.weights)
    assert found.slots.tolist() == [[2, 8], [0, 3], [8, 8], [4, 1]]


def test_products_without_rows_are_empty():
    ends, rows = torch.zeros(3, dtype=torch.int32), torch.ones(0, 4)
    assert torch.ops.ep_moe.grouped_mm(rows, torch.ones(3, 6, 4), ends).shape == (0, 6)
    found = torch.ops.ep_moe.grouped_mm_weight(rows, torch.ones(0, 6), ends)
    assert (found.shape, bool(found.any())) == ((3, 6, 4), False)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_expected_pairs_are_those_of_uniform_routes(ranks):
    """`expected_pairs` is within six deviations of the routes counted under uniform routing.

    The rows are those of all tokens, and many of their experts are on other ranks.
    """
    config, rows = shape(num_experts=32, top_k=4), 4000
    ids = torch.rand(rows, 32, generator=torch.Generator().manual_seed(2)).topk(4).indices
    found = int((ids < 32 // ranks).sum())
    assert abs(found - rows * expected_pairs(config, 32 // ranks, 4)) <= 6 * rows**0.5
    assert expected_pairs(config, 40, 4) == 4, "redundant experts are no further ones"
    assert expected_pairs(config, 8, 1) == 1, "rows that were repeated per expert"
    assert expected_pairs(config, 8, 1, everyone=True) == 8 / 32, "the same where all ranks' are here"


def test_scales_of_rows_are_also_those_of_their_blocks():
    x, scale = torch.ones(3, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0], [3.0]])
    rows = dataclasses.replace(received(local_ids("some of them", 3)), x=x, x_scale=scale, format="fp8_row")
    found = scaled_by_block(rows)
    assert (found.format, found.x_scale.tolist()) == ("fp8_block", [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert found.x_scale.data_ptr() == scale.data_ptr(), "nothing is copied"
    assert scaled_by_block(found) is found


def test_reducing_undoes_grouping():
    call = received(local_ids("some of them"))
    present = (call.local_ids >= 0).float()
    total = reduce_rows(group_rows(call, EXPERTS).x, group_rows(call, EXPERTS))
    torch.testing.assert_close(total, call.x * (call.weights * present).sum(1, keepdim=True))


def test_rows_are_weighted_and_summed_in_float32():
    """Rows are weighted and summed in float32. In bfloat16, 256 + 1 - 256 is 0, and so is 256 * 1.0039 - 256."""
    ids = torch.tensor([[0, 1, 2], [0, -1, 2]])
    call = dataclasses.replace(
        received(ids, torch.bfloat16), weights=torch.tensor([[1.0, 1.0, 1.0], [1.00390625, 1.0, 1.0]])
    )
    grouped = group_rows(call, 3)
    assert grouped.expert.tolist() == [0, 0, 1, 2, 2]
    y = torch.tensor([256.0, 256.0, 1.0, -256.0, -256.0]).unsqueeze(1).bfloat16()
    assert reduce_rows(y, grouped).tolist() == [[1.0], [1.0]]


# --- what is refused ------------------------------------------------------------------------------------------------


class Narrow(ReferenceExperts):
    capabilities = dataclasses.replace(
        ReferenceExperts.capabilities, activations=frozenset({Activation.SWIGLU}), biases=False, etp=False
    )


@pytest.mark.parametrize(
    ("kind", "config", "dtype", "etp", "reason"),
    [
        (ReferenceExperts, shape(), torch.float64, 1, "dtype float64 is not among bfloat16, float16, float32"),
        (Narrow, shape(Activation.GEGLU), torch.float32, 1, "activation geglu is not among swiglu"),
        (Narrow, shape(bias=True), torch.float32, 1, "it has no expert biases (expert_bias=True)"),
        (Narrow, shape(), torch.float32, 2, "it cannot cut experts over ranks (etp=2)"),
        (
            ReferenceExperts,
            shape(hidden_size=18),
            torch.float32,
            1,
            "hidden_size must be a multiple of 4 in float32, got 18",
        ),
        (
            ReferenceExperts,
            shape(hidden_size=12),
            torch.bfloat16,
            1,
            "hidden_size must be a multiple of 8 in bfloat16, got 12",
        ),
        (
            ReferenceExperts,
            shape(),
            torch.float32,
            12,
            "intermediate_size / etp must be a multiple of 4 in float32, got 2",
        ),
    ],
)
def test_refusal_has_a_reason(kind, config, dtype, etp, reason):
    assert kind.unsupported_reason(config, dtype, etp) == reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_reference_serves_every_activation_and_dtype(activation, dtype):
    assert ReferenceExperts.unsupported_reason(shape(activation, bias=True), dtype, 3) is None
    assert ReferenceExperts.available() is None


def test_rows_of_slots_that_this_rank_has_not_are_of_no_expert():
    """Rows of slots beyond this rank's count as rows without an expert.

    Ranks may have different numbers of slots, and a transport uses the same number for all.
    """
    rows = Received(
        x=torch.zeros(3, 2, 4), layout=RowLayout.BATCHED, weighting=Weighting.COMBINE, handle=None,
        expert_counts=torch.tensor([1, 2, 2]),
    )  # fmt: skip
    assert as_rank_major(rows, 2).local_ids.tolist() == [[0], [-1], [1], [1], [-1], [-1]]


def test_one_rank_of_etp_adds_the_bias_of_outputs():
    config = MoEConfig(hidden_size=8, intermediate_size=32, num_experts=1, top_k=1, expert_bias=True)
    rows = Received(
        x=torch.ones(1, 8), layout=RowLayout.RANK_MAJOR, weighting=Weighting.EXPERTS, handle=None,
        local_ids=LocalIds(torch.zeros(1, 1, dtype=torch.int64)), weights=torch.ones(1, 1),
    )  # fmt: skip
    for rank, added in ((0, 3.0), (1, 0.0)):
        weights = ExpertWeights(config, ExpertMap.linear(1, 1), etp=etp_link(2, rank))
        weights.update_expert(0, {"w2": torch.zeros(8, 32), "w2_bias": torch.full((8,), 3.0)})
        assert ReferenceExperts(config, weights)(rows).tolist() == [[added] * 8]


def test_what_a_call_does_not_use_has_a_gradient_of_zeros():
    """A parameter that a call does not use gets a gradient of zeros. A call without routes reads no weights."""
    config = MoEConfig(hidden_size=8, intermediate_size=32, num_experts=2, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(2, 1))
    kernel = ReferenceExperts(config, weights)
    rows = Received(
        x=torch.ones(3, 8), layout=RowLayout.RANK_MAJOR, weighting=Weighting.EXPERTS, handle=None,
        local_ids=LocalIds(torch.zeros(3, 1, dtype=torch.int64)), weights=torch.ones(3, 1),
    )  # fmt: skip
    kernel.compute = lambda received, out: received.x * received.weights
    stored = dict(weights.stored_tensors())
    found = kernel.gradients(rows, (), stored, torch.ones(3, 8), {"w13": True, "w2": False})
    assert torch.equal(found.stored["w13"], torch.zeros_like(stored["w13"]))
    assert found.stored["w2"] is None
    assert torch.equal(found.x, torch.ones(3, 8))
    assert torch.equal(found.weights, torch.full((3, 1), 8.0))
