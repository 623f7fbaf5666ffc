"""Test a fused kernel that routes inside, in a layer.

It stands in for FlashInfer's monolithic kernels, in plain torch.
"""

# ruff: noqa: F811

import pytest
import torch

from ep_moe import (
    BackendUnavailable,
    ConfigError,
    EPContext,
    ExpertMap,
    MoEConfig,
    MoELayer,
    RankLayout,
    RoutingBuffer,
)
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.errors import InputError
from ep_moe.experts.fused import base
from ep_moe.experts.fused.base import FusedDispatchShape, RouterLogits
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.router import Router
from ep_moe.selection.explain import choose, explain
from ep_moe.training import BiasUpdate, router_logits
from ep_moe.types import Routing
from tests.fixtures.fused_routes import RoutesInside
from tests.fixtures.helpers import fill
from tests.fixtures.plugins import plugins  # noqa: F401 (a fixture)

CPU = torch.device("cpu")
CONFIG = MoEConfig(
    hidden_size=16,
    intermediate_size=16,
    num_experts=6,
    top_k=2,
    shared_intermediate_size=16,
    routing=RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, float32_logits=True),
)


@pytest.fixture(autouse=True)
def _registered(plugins):
    plugins(fused={"routes_inside": "tests.fixtures.fused_routes:RoutesInside"})


def layer_of(**options) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, EPContext.local(CPU), **{"experts": "routes_inside"} | options)
    with torch.no_grad():
        layer.router.e_score_correction_bias.uniform_(-1, 1)
    return fill(layer).requires_grad_(False)


def test_it_gives_what_routing_and_experts_give():
    layer, other = layer_of(), layer_of(experts="reference")
    x = torch.randn(7, 16)
    assert layer.choice.all2all == "inside"
    torch.testing.assert_close(layer(x), other(x), rtol=1e-4, atol=1e-4)
    assert layer(x[:0]).shape == (0, 16)
    with torch.no_grad():
        layer.router.e_score_correction_bias.neg_()
    assert not torch.allclose(layer(x), other(x)), "the correction bias is not heard"


def test_logits_are_recorded_before_it_routes():
    layer, x = layer_of(), torch.randn(5, 16)
    with router_logits(layer) as logits:
        layer(x)
    (found,) = logits
    assert torch.equal(found, layer.router._logits(x, layer.router.weight))


def test_what_has_no_meaning_for_it_is_refused_by_name():
    layer = layer_of()
    x, ids = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(InputError, match="experts=routes_inside has a built-in router: call forward"):
        layer.forward_routed(x, Routing(ids, ids.float()))
    for asked in (layer.record_routing(RoutingBuffer(3, 2)), layer.replay_routing(ids)):
        with (
            asked,
            pytest.raises(InputError, match="experts=routes_inside has a built-in router and returns no routes"),
        ):
            layer(x)
    with pytest.raises(ConfigError, match="experts=routes_inside has a built-in router and counts no load"):
        layer.stats()
    with pytest.raises(ConfigError, match="train_tokens=4: experts=routes_inside has no backward; leave train_tokens"):
        layer.plan(train_tokens=4)
    with pytest.raises(
        ConfigError, match=r"experts=routes_inside has a built-in router, which computes as .*Router; .* got function"
    ):
        layer_of(router=lambda x: Routing(ids, ids.float()))
    assert layer_of(router=Router(CONFIG))(x).shape == (3, 16)
    assert layer(x).shape == (3, 16), "a refused call does not end the context"


def test_maps_that_it_does_not_see_are_refused():
    placed = ExpertMap.from_ranks([[5, 4, 3, 2, 1, 0]], 6)
    with pytest.raises(
        BackendUnavailable, match=r"supports only the linear expert map without replicas, got ExpertMap"
    ):
        layer_of(expert_map=placed)
    layer = layer_of()
    layer.placement.update(placed)  # as a balancer does
    with pytest.raises(InputError, match="has a built-in router: call forward, with the expert map of construction"):
        layer(torch.randn(3, 16))


def test_several_ranks_are_refused():
    layout = RankLayout(world=2, rank=0, dp=2, ep=2)
    with pytest.raises(BackendUnavailable, match="it has no built-in all2all and needs ep=1, got ep=2"):
        choose(CONFIG, layout, CPU, torch.float32, experts="routes_inside")
    rows = explain(CONFIG, RankLayout(world=1, rank=0), CPU, torch.float32)
    assert [row.status for row in rows if row.experts == "routes_inside"] == ["possible"]


@pytest.mark.parametrize(
    ("routed", "sentence"),
    [
        (RouterLogits(torch.zeros(3, 5)), r"logits must be \[T, E\] = \[3, 6\], got \[3, 5\]"),
        (torch.zeros(3, 6), "has a built-in router and takes RouterLogits, got Tensor"),
    ],
)
def test_a_call_of_another_kind(routed, sentence):
    layer = layer_of()
    kernel = layer.experts
    sizes = {"hidden_size": 16, "top_k": 2, "slots_per_rank": 6, "num_ranks": 1, "dtype": torch.float32}
    assert layer._dispatch_shape() == FusedDispatchShape(**sizes, kernel="routes_inside", intermediate_size=16)
    alone = RoutesInside(CONFIG, layer.expert_weights, RankGroup.alone(), layer._dispatch_shape())
    for each in (kernel, alone):
        with pytest.raises(InputError, match=sentence):
            each(torch.zeros(3, 16), routed)


def test_its_buffers_hold_what_a_rank_sends(monkeypatch):
    """Buffers have room for the tokens that a rank sends: a part of a call's tokens in a tp group, or all of them."""
    monkeypatch.setattr(EPContext, "_max_dispatch_tokens", property(lambda self: 12))
    layer = layer_of()
    assert layer.context.max_tokens != 12
    assert layer.experts.dispatch_shape.max_tokens == 12


def test_it_has_no_dispatcher():
    with pytest.raises(ConfigError, match="experts=routes_inside has a built-in all2all, and the layer has no disp"):
        layer_of()._dispatcher()


def test_it_counts_no_load_for_a_bias_update():
    layer = layer_of()
    with pytest.raises(ConfigError, match=r"BiasUpdate: experts=routes_inside of .* counts no load; choose another"):
        BiasUpdate(layer, layer.context)


def test_a_capture_that_it_cannot_be_part_of_is_refused(monkeypatch):
    monkeypatch.setattr(base, "capturing", lambda device: True)
    layer, x = layer_of(), torch.randn(3, 16)
    with pytest.raises(InputError, match="routes_inside cannot be captured in a CUDA graph; choose other experts"):
        layer.experts(x, RouterLogits(torch.randn(3, 6)))
