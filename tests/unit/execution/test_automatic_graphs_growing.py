"""Test automatic CUDA graphs over buffers that grow, by `tests.emulations.automatic_graphs`.

Each call uses its own token limit. Graphs are recorded again once larger buffers replace the recorded ones.
"""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import EPContext, InputError, MoELayer
from ep_moe.all2all import base
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.execution import graphs
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from tests.emulations.automatic_graphs import CONFIG, CPU, built, driver, given, repeats, shifted  # noqa: F401 (fixtures)
from tests.fixtures.launches import INTERPRETED, Driver

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="stands in for a GPU, and compiles")


@pytest.fixture
def context(monkeypatch):
    monkeypatch.setattr(NVLinkP2PDispatcher, "least_room", 4)
    layout, flight_recorder = RankLayout(world=1, rank=0), FlightRecorder()
    with EPContext(layout, CPU, None, RankGroups(layout, flight_recorder, CPU), flight_recorder) as made:
        yield made


def room(layer: MoELayer) -> int:
    return layer._dispatcher().buffer_pool.buffer_slots[0].workspace.room


def test_each_bound_from_its_third_call_on(driver, context):
    layer = built(context)
    assert [repeats(layer, *given(1, seed)) for seed in range(4)] == [False, False, True, True]
    assert [repeats(layer, *given(tokens)) for tokens in (4, 3, 4, 3)] == [False, False, True, True]
    assert repeats(layer, *given(1)), "recorded under another bound"
    assert repeats(layer, *given(0)), "of a rank without tokens, under the same"
    assert [repeats(layer, *given(2)) for _ in range(3)] == [False, False, True]
    assert not repeats(layer, shifted(given(2)[0]), given(2)[1])
    assert room(layer) == 4


def test_larger_buffers_are_recorded_anew(driver, context):
    layer, second = built(context), built(context)
    for made in (layer, second):
        assert [repeats(made, *given(1)) for _ in range(3)] == [False, False, True]
    before = layer._dispatcher().buffer_pool.buffer_slots[0]
    assert not repeats(second, *given(5))
    assert room(layer) == 8
    assert before.is_freed
    for made in (layer, second):
        assert [repeats(made, *given(1)) for _ in range(3)] == [False, False, True], "on memory that is there"
        assert [call.buffer_slots[0].is_freed for calls in made._graphs._calls.values() for call in calls.calls] == [
            False
        ]
    assert [repeats(second, *given(7)) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("changed", ["buffers", "weights"])
def test_what_changes_where_nothing_is_replayed(changed, driver, context):
    """A change of buffers or weights during calls with gradients is noticed.

    Such calls replay nothing but are recorded, so the graphs of one layer differ in age.
    """
    layer = built(context).requires_grad_(False)
    assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]
    if changed == "weights":
        layer.expert_weights.w2.data = layer.expert_weights.w2.data.clone()
    with torch.enable_grad():
        for _ in range(2):
            layer.forward_routed(*given(4 if changed == "weights" else 7))
    assert len(layer._graphs) == 2
    assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]


def test_the_launches_of_the_layer_itself_whatever_grew(driver, context):
    """Replays launch what eager calls launch after any growth, and ranks agree on a limit once per call."""
    draw, layers, most, repeated = random.Random(0), [built(context), built(context)], 0, 0
    agrees = mock.patch.object(RankGroup, "begin_most_tokens", autospec=True, side_effect=RankGroup.begin_most_tokens)
    for step in range(200):
        layer = draw.choice(layers)
        x, routing = given(draw.choice((0, 1, 2, 3, 4, 5 if step > 60 else 1, 9 if step > 120 else 2)), step)
        x = x if draw.random() < 0.8 else shifted(x)
        most, moved = max(most, len(x)), draw.random() < 0.05
        if moved:
            layer.expert_weights.w2.data = layer.expert_weights.w2.data.clone()
        with agrees as agreed:
            repeats_now = repeats(layer, x, routing)
        repeated += repeats_now
        assert not (moved and repeats_now), step
        assert agreed.call_count == 1, step
        assert context._agreed_limit is None
        assert context.flight_recorder.call_name == "", "the watch would take the time until the next call for a step"
        assert room(layer) == max(4, 1 << max(most - 1, 0).bit_length())
        replayed, run = (launched(driver, call, x, routing) for call in (layer.forward_routed, layer.run))
        if x.data_ptr() % 16 == 0:
            assert replayed == run, step
    assert 50 < repeated < 190, repeated


def test_addresses_are_looked_up_while_the_peers_numbers_come(driver, context):
    layer, order = built(context), []
    assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]
    (agreement,) = layer._graphs._bound_agreements.values()
    addresses, begin = agreement.reference_call.addresses, RankGroup.begin_most_tokens

    def posts(*arguments, **options):
        collect = begin(*arguments, **options)
        order.append("post")
        return lambda: (order.append("collect"), collect())[1]

    looks = mock.Mock(side_effect=lambda layer: (order.append("look"), type(addresses).unchanged(addresses, layer))[1])
    with mock.patch.object(RankGroup, "begin_most_tokens", posts), mock.patch.object(addresses, "unchanged", looks):
        assert repeats(layer, *given(1))
    assert order == ["post", "look", "collect"]


@torch.no_grad()
def launched(driver: Driver, call, x, routing) -> tuple:
    """Return all launches of a call, except the output address."""
    driver.found.clear(), driver.functions.clear()
    call(x, routing)
    last = driver.found[-1]
    return driver.functions[:], driver.found[:-1], last[:2], last[3:]


@torch.no_grad()
def test_the_first_call_looks_at_ids(driver, context):
    """Only the first call without `max_tokens` checks ids.

    A check in each later call would wait for the device.
    """
    x, routing = given(2)
    far = dataclasses.replace(routing, ids=routing.ids + CONFIG.num_experts)
    layer = built(context)
    for _ in range(2):
        with pytest.raises(InputError, match=r"routing.ids must be -1 or in \[0, 4\), got "):
            layer.forward_routed(x, far)
    layer.forward_routed(x, routing)
    for _ in range(3):
        layer.forward_routed(x, far)
    flight_recorder = FlightRecorder()
    links = RankGroups(context.layout, flight_recorder, CPU)
    with EPContext(context.layout, CPU, None, links, flight_recorder, max_tokens=4) as fixed:
        built(fixed).forward_routed(x, far)


def test_a_capture_names_max_tokens(driver, context):
    """A capture without `max_tokens` raises an error that names it, in a CUDA graph around the layer and in its own."""
    layer = built(context)
    for _ in range(3):
        repeats(layer, *given(2))
    x, routing = given(2)
    with (
        mock.patch.object(base, "capturing", return_value=True),
        mock.patch.object(graphs, "capturing", return_value=True),
        pytest.raises(
            InputError, match=r"a captured call has one size; set .* EPContext.from_torchrun\(max_tokens=\.\.\.\)"
        ),
        torch.no_grad(),
    ):
        layer.forward_routed(x, routing)
    assert repeats(layer, x, routing), "and the layer goes on"
    with pytest.raises(ValueError, match=r"capture_routed: .* a replay has one size; set .*\(max_tokens=\.\.\.\)"):
        layer.capture_routed([2])
