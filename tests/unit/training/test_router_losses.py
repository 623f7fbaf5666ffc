"""Test losses of routers and recorded logits in one process."""

# ruff: noqa: F811

import math

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, InputError, MoELayer, Routing
from ep_moe.training import load_balancing_loss, router_logits, router_z_loss, sequence_balancing_loss
from tests.fixtures.helpers import fill
from tests.fixtures.single_layer import EXPERTS, HIDDEN, TOP_K, Model, context, routing, rows_of, shape  # noqa: F401 (a fixture)

U = 2.0**-24  # a float32 rounding error


def random_logits(*shape, seed=0, dtype=torch.float64):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return made.to(dtype).requires_grad_()


def padding(batch, length):
    """Return a mask [B, S] in which the first i tokens of sequence i are padding."""
    return (torch.arange(length) >= torch.arange(batch).unsqueeze(1)).long()


def best(row, top_k):
    return sorted(range(len(row)), key=lambda expert: -row[expert])[:top_k]


def softmax(row):
    whole = sum(math.exp(value) for value in row)
    return [math.exp(value) / whole for value in row]


def switch_by_hand(layers, top_k, mask):
    """Compute Switch's loss, E * sum of f * p, one token at a time."""
    experts, tokens = len(layers[0][0]), 0
    routes, scores = [0] * experts, [0.0] * experts
    for layer in layers:
        for row, real in zip(layer, mask, strict=True):
            if real:
                tokens += 1
                for expert in best(row, top_k):
                    routes[expert] += 1
                scores = [total + one for total, one in zip(scores, softmax(row), strict=True)]
    return experts * sum(f / tokens * p / tokens for f, p in zip(routes, scores, strict=True))


def sequence_by_hand(sequences, top_k, scoring, mask):
    """Compute DeepSeek-V3's equations 17 to 20, one token at a time."""
    losses = []
    for sequence, real in zip(sequences, mask, strict=True):
        rows = [row for row, one in zip(sequence, real, strict=True) if one]
        if not rows:
            continue
        experts = len(rows[0])
        f, p = [0.0] * experts, [0.0] * experts
        for row in rows:
            scores = softmax(row) if scoring == "softmax" else [1 / (1 + math.exp(-value)) for value in row]
            for expert in best(scores, top_k):
                f[expert] += experts / (top_k * len(rows))
            p = [total + one / sum(scores) / len(rows) for total, one in zip(p, scores, strict=True)]
        losses.append(sum(one * other for one, other in zip(f, p, strict=True)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_load_balancing_loss_is_switchs(layers, masked):
    logits = [random_logits(3, 7, 5, seed=seed) for seed in range(layers)]
    mask = padding(3, 7) if masked else torch.ones(3, 7)
    given = logits if layers > 1 else logits[0]
    found = load_balancing_loss(given, 2, attention_mask=mask if masked else None)
    expected = switch_by_hand([layer.flatten(0, 1).tolist() for layer in logits], 2, mask.flatten().tolist())
    assert found.item() == pytest.approx(expected, rel=1e-13)
    alone = torch.full((4, 6), 0.0)
    assert float(load_balancing_loss(alone, 3)) == pytest.approx(3.0)  # uniform probabilities


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss_is_that_of_transformers(masked):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    batch, length, experts, layers = 3, 11, 8, 2
    mask = padding(batch, length) if masked else None
    ours, theirs = (
        [random_logits(batch * length, experts, seed=s, dtype=torch.float32) for s in range(2)] for _ in "ab"
    )
    found = load_balancing_loss(ours, 2, attention_mask=mask)
    expected = load_balancing_loss_func(tuple(theirs), experts, 2, mask)
    # every term is positive, and each sum has this many roundings
    roundings = (layers * batch * length + 3 * experts + 8) * U
    torch.testing.assert_close(found, expected, rtol=2 * roundings, atol=0)
    found.backward()
    expected.backward()
    for one, other in zip(ours, theirs, strict=True):
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=16 * experts * U * largest)
        assert largest > 0


@pytest.mark.parametrize(("sequences", "length"), [(4, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_sequence_balancing_loss_is_deepseeks(scoring, masked, sequences, length):
    logits = random_logits(sequences, length, 5)
    # the last sequence of several is padding alone
    mask = padding(sequences, length) if masked else torch.ones(sequences, length)
    given = {} if scoring == "softmax" else {"scoring": scoring}  # softmax is the default
    found = sequence_balancing_loss(logits, 2, **given, attention_mask=mask if masked else None)
    assert found.item() == pytest.approx(sequence_by_hand(logits.tolist(), 2, scoring, mask.tolist()), rel=1e-13)
    found.backward()
    assert bool((logits.grad != 0).any(-1).eq(mask.bool()).all())


@pytest.mark.parametrize("masked", [False, True])
def test_router_z_loss_is_st_moes(masked):
    logits = [random_logits(3, 5, 4, seed=seed) for seed in range(2)]
    mask = padding(3, 5) if masked else torch.ones(3, 5)
    rows = [
        row for layer in logits for row, real in zip(layer.flatten(0, 1).tolist(), mask.flatten(), strict=True) if real
    ]
    expected = sum(math.log(sum(math.exp(value) for value in row)) ** 2 for row in rows) / len(rows)
    assert router_z_loss(logits, attention_mask=mask if masked else None).item() == pytest.approx(expected, rel=1e-13)


def test_whatever_is_not_0_in_a_mask_is_a_token():
    """Any nonzero number in a mask marks a token. Packed sequences are numbered there."""
    logits, mask = random_logits(2, 3, 4), torch.tensor([[0, 1, 1], [1, 0, 1]])
    for given in (mask * 3, mask.bool(), mask * 0.5):
        for loss in (sequence_balancing_loss, load_balancing_loss):
            assert torch.equal(loss(logits, 2, attention_mask=given), loss(logits, 2, attention_mask=mask))
        assert torch.equal(router_z_loss(logits, attention_mask=given), router_z_loss(logits, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_in_float32(dtype):
    logits = random_logits(2, 64, 8, dtype=dtype)
    wide = logits.detach().float()
    assert torch.equal(load_balancing_loss(logits, 2), load_balancing_loss(wide, 2))
    assert torch.equal(sequence_balancing_loss(logits, 2), sequence_balancing_loss(wide, 2))
    assert torch.equal(router_z_loss(logits), router_z_loss(wide))


def test_no_tokens_are_no_loss():
    nothing = random_logits(0, 4)
    mask = torch.zeros(2, 3)
    for loss in (
        load_balancing_loss(nothing, 2),
        router_z_loss(nothing),
        load_balancing_loss(random_logits(2, 3, 4), 2, attention_mask=mask),
        sequence_balancing_loss(random_logits(2, 3, 4), 2, attention_mask=mask),
        router_z_loss(random_logits(2, 3, 4), attention_mask=mask),
    ):
        assert loss.item() == 0
        loss.backward()


def test_wrong_arguments_of_losses_are_refused():
    logits = torch.zeros(6, 4)
    for call, pattern in (
        (lambda: load_balancing_loss([], 2), "at least one layer's, got none"),
        (lambda: load_balancing_loss([logits, torch.zeros(6, 5)], 2), r"the same E, got \[\[6, 4\], \[6, 5\]\]"),
        (lambda: load_balancing_loss(torch.zeros(4), 2), r"must be \[T, E\]"),
        (lambda: load_balancing_loss(logits, 5), r"top_k must be an integer in \[1, 4\].*got 5"),
        (lambda: load_balancing_loss(logits, True), r"top_k must be an integer in \[1, 4\].*got True"),
        (lambda: load_balancing_loss(logits, 2, attention_mask=torch.ones(2, 4)), r"each of the 6 rows.*\[2, 4\]"),
        (lambda: sequence_balancing_loss(logits, 2), r"must be \[B, S, E\], got \[6, 4\]"),
        (lambda: sequence_balancing_loss(logits.view(2, 3, 4), 0), "top_k must be"),
        (
            lambda: sequence_balancing_loss(logits.view(2, 3, 4), 2, scoring="tanh"),
            "'softmax' or 'sigmoid', got 'tanh'",
        ),
        (lambda: router_z_loss([]), "at least one layer's, got none"),
    ):
        with pytest.raises(InputError, match=pattern):
            call()


# --- recorded logits -------------------------------------------------------------------------------------------------


def test_logits_are_recorded_in_call_order(context):
    model, x = Model(context), rows_of(5)
    with router_logits(model) as recorded:
        y = model(x)
        model.layers[0](x.view(1, 5, HIDDEN))
    middle = x + model.layers[0](x) / 64
    inputs = [(0, x), (1, middle), (0, x)]
    assert len(recorded) == 3
    for found, (layer, rows) in zip(recorded, inputs, strict=True):
        assert torch.equal(found, model.layers[layer].router.logits(rows))
    model(x)
    assert len(recorded) == 3
    assert torch.equal(y, model(x))
    assert not any(layer._logit_taps or layer.router.keeps_logits for layer in model.layers)
    recorded[1].sum().backward()
    wanted = torch.autograd.grad(model.layers[1].router.logits(middle).sum(), model.layers[1].router.weight)[0]
    assert torch.equal(model.layers[1].router.weight.grad, wanted)
    assert model.layers[0].router.weight.grad is not None  # through the output of layer 0


def test_recordings_nest(context):
    model, x = Model(context, layers=1), rows_of(3)
    with router_logits(model) as outer:
        model(x)
        with router_logits(model) as inner, torch.no_grad():
            model.eval()(x)
        model(x)
    assert (len(outer), len(inner)) == (3, 1)


def test_a_recording_that_raises_has_ended(context):
    model, x = Model(context, layers=1), rows_of(3)
    with pytest.raises(KeyError), router_logits(model) as recorded:
        raise KeyError(model(x))
    model(x)
    assert len(recorded) == 1
    assert not model.layers[0].router.keeps_logits


def test_an_idle_step_records_no_rows(context):
    """An idle step records logits without rows. However it ends, the next step records its own rows."""
    model, x = Model(context, layers=1), rows_of(3)
    with router_logits(model) as recorded:
        with model.layers[0]._rows_as_padding():
            model(x)
        with pytest.raises(KeyError), model.layers[0]._rows_as_padding():
            raise KeyError
        model(x)
    assert [len(logits) for logits in recorded] == [0, 3]


def test_recordings_of_two_threads_end_in_any_order(context):
    layer, x = MoELayer(shape(), context), rows_of(3)
    first, second = router_logits(layer), router_logits(layer)
    with first:
        later = second.__enter__()
    layer(x)
    assert len(later) == 1
    second.__exit__(None, None, None)
    assert not layer.router.keeps_logits


def test_what_is_recorded_is_not_replayed(context, monkeypatch):
    model, x = Model(context, layers=1).eval(), rows_of(3)
    layer = model.layers[0]
    monkeypatch.setattr(layer._graphs, "replay", lambda *_: torch.zeros(3, HIDDEN))
    with torch.no_grad():
        assert not layer(x).any()
        with router_logits(model) as recorded:
            assert layer(x).any()
        assert len(recorded) == 1


def test_routers_of_the_users(context):
    weight = nn.Parameter(rows_of(EXPERTS))

    class Gate(nn.Module):
        def __init__(self, says):
            super().__init__()
            self.weight, self.says = weight, says

        def forward(self, x):
            logits = x @ self.weight.T
            weights, ids = logits.softmax(-1).topk(TOP_K)
            return Routing(ids, weights, logits if self.says == "all" else logits[:1] if self.says == "one" else None)

    x = rows_of(4)
    layer = fill(MoELayer(shape(), context, router=Gate("all")))
    with router_logits(layer) as recorded:
        layer(x).sum().backward()
    assert torch.equal(recorded[0], x @ weight.T)
    for says, pattern in (("none", "Routing.logits, which is None; let the router return"), ("one", r"\[4, 6\], got")):
        layer = fill(MoELayer(shape(), context, router=Gate(says)))
        layer(x)
        with router_logits(layer) as recorded, pytest.raises(InputError, match=pattern):
            layer(x)
        layer(x)


def test_forward_routed_brings_its_logits(context):
    layer, x, chosen = fill(MoELayer(shape(), context)), rows_of(4), routing(4)
    logits = rows_of(4)[:, :EXPERTS]
    with router_logits(layer) as recorded:
        layer.forward_routed(x, Routing(chosen.ids, chosen.weights, logits))
        with pytest.raises(InputError, match="which is None"):
            layer.forward_routed(x, chosen)
    assert recorded[0] is logits
    assert len(recorded) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints_are_recorded_once(context, inside):
    """Checkpointed layers record logits once.

    Gradients equal those without checkpoints, with backward inside and after the `with`.
    """
    gradients = {}
    for checkpointed in (None, False):
        model, x = Model(context, checkpointed=checkpointed), rows_of(6).requires_grad_()
        with router_logits(model) as recorded:
            loss = model(x).square().sum() + load_balancing_loss(recorded, TOP_K) + router_z_loss(recorded)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert len(recorded) == 2
        gradients[checkpointed] = [x.grad, *[p.grad for p in model.parameters()]]
    for plain, again in zip(gradients[None], gradients[False], strict=True):
        assert torch.equal(plain, again)


def test_reentrant_checkpoints_are_refused(context):
    model, x = Model(context, checkpointed=True), rows_of(6).requires_grad_()
    with router_logits(model), pytest.raises(ConfigError, match="use_reentrant=True; set use_reentrant=False"):
        model(x)
    with torch.no_grad(), router_logits(model) as recorded:
        model(x)
    assert len(recorded) == 2


def test_models_without_layers_are_refused(context):
    with (
        pytest.raises(ConfigError, match="router_logits needs a model with MoELayers, got Linear"),
        router_logits(nn.Linear(2, 2)),
    ):
        pass


def test_logits_of_padding_are_recorded_as_the_router_gives_them(context):
    """Logits of padding are recorded as the router returns them. A z-loss over all rows has them in its gradient."""
    layer, mask = fill(MoELayer(shape(), context)), torch.tensor([True, False, True, False])
    x = rows_of(4).requires_grad_()
    with router_logits(layer) as whole:
        layer(x)
    with router_logits(layer) as masked:
        layer(x, mask)
    assert torch.equal(masked[0], whole[0])
    masked[0].sum().backward()
    assert bool(x.grad[~mask].any(1).all())


def test_logits_beside_weights_of_another_class_are_recorded(context):
    layer, given = fill(MoELayer(shape(), context)), routing(3)
    logits = torch.randn(3, EXPERTS)
    with router_logits(layer) as recorded:
        layer.forward_routed(rows_of(3), Routing(given.ids, nn.Parameter(given.weights), logits))
    assert torch.equal(recorded[0], logits)
