"""Test correction biases that follow the load, in one process."""

# ruff: noqa: F811

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ep_moe import ConfigError, EPContext, MoELayer, Routing, RoutingConfig, RoutingMethod
from ep_moe.training import BiasUpdate
from tests.fixtures.helpers import fill, integer_rows
from tests.fixtures.single_layer import CPU, EXPERTS, HIDDEN, TOP_K, Model, context, rows_of, shape  # noqa: F401 (a fixture)

BIASED = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)


def loads(model, batches):
    """Return routes per layer and expert of these batches, by the routers."""
    found = [[0] * EXPERTS for _ in model.layers]
    with torch.no_grad():
        for x in batches:
            for number, layer in enumerate(model.layers):
                for expert in layer.router(x).ids.flatten().tolist():
                    found[number][expert] += 1
                x = x + layer(x) / 64
    return found


def steps(model, optimizer, batches, accumulate):
    """Train with one optimizer step per `accumulate` batches."""
    for number, x in enumerate(batches):
        model(x).square().mean().backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_by_which_torch_makes_a_state_moves_no_bias(context):
    model = Model(context, routing=BIASED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(BiasUpdate(model, context, speed=0.25))
    with torch.no_grad():
        model(rows_of(50, 9))
    biases = [layer.router.e_score_correction_bias for layer in model.layers]
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)
    assert not any(bias.any() for bias in biases)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # as a warm-up starts
    optimizer.step()
    assert all(bias.any() for bias in biases), "the load before is still counted"


def test_a_step_of_some_groups_moves_the_bias(context):
    """A step moves the bias if some parameter group has a rate above 0.

    A wrapper of the optimizer may pass `closure=None` on.
    """
    model = Model(context, layers=1, routing=BIASED)
    (layer,) = model.layers
    groups = [{"params": layer.expert_weights.parameters(), "lr": 0.0}, {"params": layer.router.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_pre_hook(BiasUpdate(model, context, speed=0.25))
    with torch.no_grad():
        model(rows_of(50, 9))
    optimizer.step(closure=None)
    assert layer.router.e_score_correction_bias.any()
    assert BiasUpdate(model, context).speed == 1e-3, "as DeepSeek-V3"


def test_bias_follows_the_load_of_a_step(context):
    model = Model(context, routing=BIASED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(rows_of(50, 9))  # before the update was made, so not counted
    update = BiasUpdate(model, context, speed=0.25)
    optimizer.register_step_pre_hook(update)
    biases = [layer.router.e_score_correction_bias for layer in model.layers]
    assert not any(bias.any() for bias in biases)
    expected = [[0.0] * EXPERTS for _ in biases]
    for step in range(3):
        batches = [rows_of(7, 2 * step), rows_of(4, 2 * step + 1)]
        counters = [layer.placement.expert_load.clone() for layer in model.layers]
        counted = loads(model, batches)
        for layer, before in zip(model.layers, counters, strict=True):
            layer.placement.expert_load.copy_(before)  # `loads` called the layers too
        steps(model, optimizer, batches, 2)
        for number, load in enumerate(counted):
            mean = sum(load) / EXPERTS
            expected[number] = [
                b + 0.25 * ((mean > c) - (mean < c)) for b, c in zip(expected[number], load, strict=True)
            ]
            assert biases[number].tolist() == expected[number], f"layer {number}, step {step}"
    assert all(bias.any() for bias in biases)
    assert all(b is layer.router.e_score_correction_bias for b, layer in zip(biases, model.layers, strict=True))
    assert all(bias.grad is None and not bias.requires_grad and bias.dtype == torch.float32 for bias in biases)
    assert torch.equal(model.state_dict()["layers.1.router.e_score_correction_bias"], biases[1])
    # counters are never reset
    assert all(layer.placement.expert_load.sum() == TOP_K * (50 + 3 * 11) for layer in model.layers)
    update.speed = 0
    steps(model, optimizer, [rows_of(7)], 1)
    assert biases[0].tolist() == expected[0]


def test_no_load_moves_nothing(context):
    model = Model(context, routing=BIASED)
    update = BiasUpdate(model, context)
    update()
    with model.layers[0].placement.no_stats():
        model(rows_of(9))
    update()
    assert not model.layers[0].router.e_score_correction_bias.any()
    assert model.layers[1].router.e_score_correction_bias.any()


@pytest.mark.parametrize("reset", [lambda layer: layer.placement.reset_load(), lambda layer: layer.to(torch.bfloat16)])
def test_counters_that_others_reset(context, reset):
    """After others reset a counter, load from before the reset is lost, and later load counts once."""
    layer = fill(MoELayer(shape(routing=BIASED), context))
    layer(rows_of(20))
    update = BiasUpdate(layer, context, speed=1.0)
    ids = torch.tensor([[0, 1]] * 3)
    layer.forward_routed(rows_of(3), Routing(ids, torch.ones(3, 2)))
    reset(layer)
    ids = torch.tensor([[4, 5]] * 2)
    layer.forward_routed(rows_of(2).to(layer.dtype), Routing(ids, torch.ones(2, 2)))
    update()
    assert layer.router.e_score_correction_bias.tolist() == [1, 1, 1, 1, -1, -1]
    update()
    assert layer.router.e_score_correction_bias.tolist() == [1, 1, 1, 1, -1, -1]
    assert layer.router.e_score_correction_bias.dtype == torch.float32


def test_a_recompute_is_no_load(context):
    model = Model(context, checkpointed=False, routing=BIASED)
    plain = Model(context, routing=BIASED)
    for one in (model, plain):
        update = BiasUpdate(one, context)
        x = rows_of(8)
        one(x.requires_grad_()).square().sum().backward()
        with torch.no_grad():
            one(rows_of(5, 1))  # with these rows, a second count would change the weights
        assert [int(seen.since().sum()) for seen in update._seen] == [TOP_K * 13] * 2


def test_what_has_no_bias_is_refused(context):
    with pytest.raises(ConfigError, match="BiasUpdate needs a model with MoELayers, got Linear"):
        BiasUpdate(nn.Linear(2, 2), context)
    with pytest.raises(
        ConfigError, match=r"RoutingConfig.correction_bias must be True, got .* without one; build it with Rout"
    ):
        BiasUpdate(Model(context), context)
    model = Model(context, routing=BIASED)
    for speed in (-1, float("nan"), float("inf"), True, "fast"):
        with pytest.raises(ConfigError, match="speed must be a finite number of at least 0, got"):
            BiasUpdate(model, context, speed)
    with pytest.raises(ConfigError, match="belongs to another EPContext"):
        BiasUpdate(model, EPContext.local(CPU))
    router = model.layers[0].router
    router.e_score_correction_bias = router.e_score_correction_bias.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"must be a float32 buffer without gradient, got torch\.bfloat16"):
        BiasUpdate(model, context)


def test_a_bfloat16_layer_keeps_its_bias_in_float32(context):
    layer = MoELayer(shape(routing=BIASED), context).to(torch.bfloat16)
    update = BiasUpdate(layer, context, speed=0.5)
    layer(integer_rows(9, HIDDEN, 0).to(torch.bfloat16))
    update()
    bias = layer.router.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert set(bias.abs().tolist()) <= {0.0, 0.5}
    assert bias.any()
