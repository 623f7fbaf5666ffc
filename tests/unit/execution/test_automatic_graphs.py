"""Test what automatic CUDA graphs launch, without a GPU (`tests.emulations.automatic_graphs`): the eager launches."""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import ExpertMap, ExpertsOptions, MoELayer, RoutingConfig, RoutingMethod, Wire
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.execution import recorded_calls
from ep_moe.experts.hopper import fused_4bit
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.placement.deferred import DeferredRouting
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.types import Routing
from tests.emulations.automatic_graphs import (  # noqa: F401 (fixtures)
    CONFIG,
    MOST,
    built,
    context,
    driver,
    forward,
    given,
    layer,
    repeats,
    shifted,
)
from tests.fixtures.launches import INTERPRETED, Driver

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="stands in for a GPU, and compiles")
KINDS = {
    "bf16": {},
    "answers in fp8": {"wire": Wire(combine="fp8")},
    "answers given": {},
    "fp8 in blocks": {
        "experts": "fp8_block_triton", "quantization": "fp8_block", "wire": Wire(dispatch="fp8_block"),
    },
    "fp8 without calibration": {"experts": "fp8_dynamic_triton", "quantization": "fp8_dynamic"},
    "fp8 rows without calibration": {
        "experts": "fp8_dynamic_triton", "quantization": "fp8_dynamic", "wire": Wire(dispatch="fp8_row"),
    },
    "fp8 per channel": {
        "experts": "fp8_channel_triton", "quantization": "fp8_channel", "wire": Wire(dispatch="fp8_row"),
    },
    "exact": {"options": ExpertsOptions(exact=True)},
    "exact, fp8 per channel": {
        "experts": "fp8_channel_triton", "quantization": "fp8_channel", "options": ExpertsOptions(exact=True),
    },
    "4 bits": {"experts": "w4a16_triton", "quantization": "mxfp4"},
    "fp8 per tensor": {
        "experts": "fp8_tensor_triton", "quantization": "fp8_static",
        "wire": Wire(dispatch="fp8_tensor", input_scale=0.1),
    },
}  # fmt: skip


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("low_latency_bytes", [0, 1 << 18], ids=["by flags", "by packets"])
@pytest.mark.parametrize("experts", KINDS)
def test_the_launches_of_the_layer_itself(experts, low_latency_bytes, ids, driver, context, monkeypatch):
    """A replay launches the same kernels as the eager call, in the same order and with the same arguments.

    Only the address of the output differs.
    """
    monkeypatch.setattr(NVLinkP2PDispatcher, "low_latency_bytes", low_latency_bytes)
    if experts == "answers given":
        able = dataclasses.replace(Bf16TritonExperts.capabilities, peer_out=False)
        monkeypatch.setattr(Bf16TritonExperts, "capabilities", able)
    monkeypatch.setattr(fused_4bit, "MOST_ROUTES", 0)  # the CUDA kernel for few routes is not compiled here
    layer = built(context, **KINDS[experts])
    # additional kernels: to send; to round; to sort; to sort and to activate; to sort, and to round twice
    more = {"answers given": low_latency_bytes == 0, "fp8 without calibration": True, "4 bits": True}
    more |= {"exact": 2, "exact, fp8 per channel": 3}
    for _ in range(2):
        forward(layer, *given(MOST, dtype=ids))
    for tokens in (1, MOST, 0, 2):
        x, routing = given(tokens, tokens, ids)
        for rows in (x, x.view(tokens, 1, CONFIG.hidden_size)):
            assert repeats(layer, rows, routing)
            made = launches(driver, layer, layer.forward_routed, rows, routing)
            assert made == launches(driver, layer, layer.run, rows, routing)
            assert len(made[0]) == 5 + more.get(experts, False)


@torch.no_grad()
def launches(
    driver: Driver, layer: MoELayer, call: Callable[..., Tensor], x: Tensor, routing: Routing, *, sums: bool = True
) -> tuple:
    """Return all launches of a call, except the output address, and the newest record of the flight recorder.

    The output address must be that of the returned tensor. sums: whether the kernels' sums are all that is returned.
    """
    driver.found.clear(), driver.functions.clear()
    before = layer.context.flight_recorder.number
    out = call(x, routing)
    assert out.shape == x.shape
    assert layer.context.flight_recorder.number == before + 2
    last = driver.found[-1]
    assert not sums or last[2] == out.data_ptr()
    return driver.functions[:], driver.found[:-1], last[:2], last[3:], layer.context.flight_recorder.newest[1:]


def test_layers_in_turns_under_bounds_and_maps_that_change(driver, context):
    """Layers called in turn launch what an eager call would, under changing token limits and expert maps.

    Two layers share the transport's memory, and one has its own.
    """
    draw, made = random.Random(0), []
    layers = [built(context), built(context), built(context, **KINDS["fp8 in blocks"])]
    for step in range(300):
        layer, bound = draw.choice(layers), draw.randint(1, MOST)
        x, routing = given(draw.randint(0, bound), step, draw.choice((torch.int32, torch.int64)))
        x = x if draw.random() < 0.8 else shifted(x)
        if draw.random() < 0.1:
            layer.placement.update(draw.choice((layer.placement.expert_map, ExpertMap.linear(CONFIG.num_experts, 1))))
        if draw.random() < 0.05:
            layer.expert_weights.w2.data = layer.expert_weights.w2.data.clone()
        with context.token_limit(bound):
            made.append(repeats(layer, x, routing))
            found, expected = (launches(driver, layer, call, x, routing) for call in (layer.forward_routed, layer.run))
        if x.data_ptr() % 16:  # an unaligned x is copied first, to an address that may differ
            assert not made[-1], step
        else:
            assert found == expected, step
    assert 100 < sum(made) < 250


def test_a_router_of_ours_is_part_of_the_graph(layer, driver):
    x, _ = given(2)
    assert [repeats(layer, x, None) for _ in range(3)] == [False, False, True]
    logits, choice, send, *_, receive = driver.found[-7:]
    assert logits[2:5] == (x.data_ptr(), 2, layer.router.weight.data_ptr())
    assert choice[2] == logits[5], "the sums over parts of H"
    assert send[2:6] == (x.data_ptr(), None, *choice[4:6])
    assert send[2 + 10] == receive[3] == 2, "tokens"
    layer.router.weight.data = layer.router.weight.data.clone()
    assert [repeats(layer, x, None) for _ in range(3)] == [False, False, True]
    assert driver.found[-7][4] == layer.router.weight.data_ptr()


@pytest.mark.parametrize("seen_by", ["hook", "hook before", "mask", "groups"])
def test_a_router_of_ours_chooses_before_the_graph(seen_by, driver, context):
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, num_groups=3, top_groups=1)
    config = dataclasses.replace(CONFIG, num_experts=6, routing=routing) if seen_by == "groups" else CONFIG
    layer, x, mask = built(context, config), given(2)[0], None
    if seen_by == "hook":
        layer.router.register_forward_hook(lambda module, args, out: None)
    if seen_by == "hook before":
        layer.router.register_forward_pre_hook(lambda module, args: None)
    if seen_by == "mask":
        mask = torch.tensor([True, False])
    with mock.patch.object(Router, "forward", autospec=True, side_effect=Router.forward) as chooses:
        for call in range(4):
            with mock.patch.object(MoELayer, "run", autospec=True, side_effect=MoELayer.run) as run, torch.no_grad():
                layer(x, mask)
            assert run.called == (call < 2)
    assert chooses.call_count == 4
    assert driver.found[-5][2] == x.data_ptr()


def test_a_router_of_the_users_is_not_recorded(layer):
    class Other(Router):
        def forward(self, x: Tensor) -> Routing:
            return given(len(x))[1]

    layer.router = Other(CONFIG, dtype=torch.bfloat16)
    layer._graphs.drop()
    assert [repeats(layer, given(2)[0], None) for _ in range(3)] == [False] * 3
    assert len(layer._graphs) == 0


@pytest.mark.parametrize("low_latency_bytes", [0, 1 << 18], ids=["by flags", "by packets"])
def test_shared_experts_are_called_behind_few_rows(low_latency_bytes, driver, context, monkeypatch):
    """With few rows, shared experts run after the recorded launches. With many, they overlap, and nothing is recorded.

    The emulation computes only the shared experts.
    """
    monkeypatch.setattr(NVLinkP2PDispatcher, "low_latency_bytes", low_latency_bytes)
    monkeypatch.setattr(recorded_calls.torch, "empty_like", torch.zeros_like)
    config = dataclasses.replace(CONFIG, shared_intermediate_size=64)
    layer = built(context, config)
    x, routing = given(2)
    for _ in range(2):
        forward(layer, x, routing)
    for rows in (x, x.view(2, 1, -1)):
        assert repeats(layer, rows, routing) == (low_latency_bytes > 0) == (len(layer._graphs) > 0)
        if low_latency_bytes:
            with torch.no_grad():
                assert torch.equal(forward(layer, rows, routing), layer.shared_experts(x).view(rows.shape))
                found = launches(driver, layer, layer.forward_routed, rows, routing, sums=False)
                assert found == launches(driver, layer, layer.run, rows, routing, sums=False)


def test_whoever_looks_at_the_placement_goes_on_looking(layer, driver):
    seen = []
    hook = layer.placement.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    x, routing = given(1, 5)
    assert repeats(layer, x, routing)
    assert seen == [routing]
    hook.remove()
    twice = 2 * routing.weights
    hook = layer.placement.register_forward_hook(
        lambda module, args, out: DeferredRouting(out.logical, twice, out.tables)
    )
    assert repeats(layer, x, routing)
    assert driver.found[-5][5] == twice.data_ptr()
    hook.remove()
    layer.placement.register_forward_hook(lambda module, args, out: out.materialize())
    assert not repeats(layer, x, routing)


def test_the_map_in_force(layer, driver):
    """A replay reads the tables of the current expert map, which are rewritten in place."""
    x, routing = given(1)
    assert repeats(layer, x, routing)
    tables = [table.data_ptr() for table in layer.placement.tables[:5]]
    assert list(driver.found[-5][6:12]) == [*tables, layer.placement.invalid_ids.address]
    layer.placement.update(layer.placement.expert_map)
    assert repeats(layer, x, routing)
    # another rank chooses other replicas
    layer._modules["placement"] = Placement(layer.placement.expert_map, ep_rank=1)
    assert [repeats(layer, x, routing) for _ in range(2)] == [False, True]
