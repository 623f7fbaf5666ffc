"""Test what ends captured calls, and how replays count as load and steps, without a GPU (`captured_emulation`)."""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, InputError, MoELayer
from ep_moe.all2all.buffer_slots import BufferPool
from ep_moe.types import Routing
from tests.emulations.captured import CONFIG, layer, replayed, rows  # noqa: F401 (a fixture)
from tests.emulations.graph import EmulatedRecorder
from tests.fixtures.helpers import assert_same, fill, integer_routing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")


def other_parameter(layer: MoELayer) -> None:
    layer.router.weight = nn.Parameter(torch.randn_like(layer.router.weight))


def other_data(layer: MoELayer) -> None:
    layer.expert_weights.w13.data = torch.randn_like(layer.expert_weights.w13)


def other_router(layer: MoELayer) -> None:
    layer.router = type(layer.router)(CONFIG)


def assigned(layer: MoELayer) -> None:
    tensors = {name: torch.randn_like(tensor) for name, tensor in layer.shared_experts.state_dict().items()}
    layer.shared_experts.load_state_dict(tensors, assign=True)


def inner(layer: MoELayer) -> None:
    """Replace a submodule, as an adapter does that wraps a matrix."""
    layer.shared_experts.adapter = nn.Identity()


def one_more(layer: MoELayer) -> None:
    layer.shared_experts.register_parameter("more", nn.Parameter(torch.ones(1)))


def retuned(layer: MoELayer) -> None:
    layer.tune([4])


@pytest.mark.parametrize("change", [other_parameter, other_data, other_router, assigned, inner, one_more, retuned])
def test_what_takes_the_place_of_what_was_captured(change, layer):
    layer.capture([4])
    assert replayed(layer, rows(4))
    change(layer)
    assert not replayed(layer, rows(4))
    layer.capture([4])
    assert replayed(layer, rows(4, seed=1))


def test_sharded_experts_are_not_captured(layer):
    """Sharded experts are not captured, because each call gathers their parameters at another address."""
    layer.capture([4])
    assert replayed(layer, rows(4))
    layer.expert_weights.unstack()
    assert not replayed(layer, rows(4))
    with pytest.raises(ConfigError, match="fully_shard has sharded its expert parameters"):
        layer.capture([4])


def test_a_new_capture_forgets_what_is_gone(layer):
    layer.capture([4])
    other_data(layer)
    layer.capture([2])
    assert not replayed(layer, rows(4))
    assert replayed(layer, rows(2))
    assert len(layer._graphs) == 1


def test_another_dtype(layer):
    layer.capture([4])
    layer.to(torch.bfloat16)
    with torch.no_grad():
        assert layer(rows(4).bfloat16()).dtype == torch.bfloat16
        with pytest.raises(InputError, match="x must be bfloat16 as the layer is"):
            layer(rows(4))
    assert not EmulatedRecorder.replays


def test_what_changes_in_place_is_seen(layer):
    layer.capture([4])
    for seed in range(2):
        fill(layer, lambda config, expert, seed: {"w13": torch.randn(32, 16), "w2": torch.randn(16, 16)}, seed)
        assert replayed(layer, rows(4, seed=seed))


def test_a_parameter_of_an_expert_that_is_replaced_is_seen(layer):
    """New data of an expert's parameter changes the next replay: it is copied to where the graph reads."""
    layer.capture([4])
    assert replayed(layer, rows(4))
    for name in ("w1", "w2"):
        before = layer(rows(4)).detach()
        for expert in range(CONFIG.num_experts):
            parameter = layer.expert_weights.get_parameter(f"{expert}.{name}")
            parameter.data = torch.randn_like(parameter)
        with torch.no_grad():
            count = EmulatedRecorder.replays
            y = layer(rows(4))
            assert EmulatedRecorder.replays == count + 1
        assert not torch.equal(y, before), name
        assert_same(y, layer.run(rows(4), None))


def test_the_context_tunes_all_its_layers(layer):
    second = MoELayer(CONFIG, layer.context)
    for each in (layer, second):
        each.capture([4])
    layer.context.tune([4])
    assert not len(layer._graphs)
    assert not len(second._graphs), "of the same shape, and so not measured"


def test_the_context_captures_all_its_layers(layer):
    second = MoELayer(CONFIG, layer.context)
    layer.context.capture([4])
    layer.context.capture_routed([2, 1])
    for each in (layer, second):
        assert len(each._graphs) == 3
        assert replayed(each, rows(3))
        assert replayed(each, rows(2), integer_routing(2, CONFIG, 0))
        assert not replayed(each, rows(3), integer_routing(3, CONFIG, 0))


def test_after_the_context(layer):
    layer.capture([4])
    layer.context.destroy()
    assert not len(layer._graphs)
    assert not layer.context._recorders
    with torch.no_grad(), pytest.raises(RuntimeError, match="this EPContext was destroyed"):
        layer(rows(4))


def test_replays_are_counted_as_calls_and_a_capture_is_not(layer):
    layer.capture_routed([4])
    layer.capture([4])  # chooses routes by the layer's own router
    assert not any(layer.stats().expert_load)
    one = Routing(torch.tensor([[0, 1, -1]] * 4), torch.ones(4, 3))
    with torch.no_grad():
        layer.forward_routed(rows(4), one)
        assert layer.stats().expert_load == (4, 4, 0, 0, 0, 0)
        with layer.no_stats():
            layer.forward_routed(rows(4), one)
    assert layer.stats().expert_load == (4, 4, 0, 0, 0, 0)
    assert EmulatedRecorder.replays == 2


def test_rows_of_a_capture_are_no_load_of_a_users_router(layer):
    """The rows of a capture do not count as load, though the user's router routes them.

    The router is called with all rows, because it may mix rows.
    """
    layer = MoELayer(CONFIG, layer.context, router=lambda x: integer_routing(len(x), CONFIG, 0))
    layer.capture([4])
    assert not any(layer.stats().expert_load)


def test_what_replays_of_another_layer_left_is_no_input_of_a_capture(layer):
    """A capture does not read what replays of another layer left in the shared input tensors.

    The other layer has more experts, so its ids are out of range for this one.
    """
    config = dataclasses.replace(CONFIG, num_experts=64)
    larger = MoELayer(config, layer.context)
    larger.capture_routed([4])
    routing = Routing(torch.full((4, 3), 63), torch.ones(4, 3))
    with torch.no_grad():
        larger.forward_routed(rows(4), routing)
    layer.capture_routed([4])
    assert replayed(layer, rows(4), integer_routing(4, CONFIG, 0))


def test_a_capture_that_fails_leaves_no_workspace_busy(layer, monkeypatch):
    """A capture that fails marks its workspaces as free, because the call that it began never ends."""
    pool = BufferPool("own", lambda device: None)
    monkeypatch.setattr(layer._dispatcher(), "buffer_pool", pool, raising=False)

    def record(self, call):
        pool.take(layer.device).busy = True
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(EmulatedRecorder, "record", record)
    with pytest.raises(ConfigError, match="the call could not be captured"):
        layer.capture([4])
    assert [slot.busy for slot in pool.buffer_slots] == [False]


@torch.no_grad()
def test_replays_are_steps_as_calls_are_and_a_recording_is_none(layer):
    """A replay counts as many steps as a call, and a recording counts none.

    Peers may make eager calls, so the flight recorder must show this rank at the same step.
    """
    recorder = layer.context.flight_recorder

    def steps(call) -> tuple:
        before = recorder.number
        call()
        return recorder.number - before, recorder.newest[1:]

    alone = steps(lambda: layer(rows(4)))
    assert alone[0] > 1
    assert steps(lambda: layer.capture([4])) == alone, "the warm call's, which peers make too"
    assert steps(lambda: layer(rows(4))) == alone
    assert EmulatedRecorder.replays == 1


def python_calls(call) -> int:
    made = 0

    def seen(frame, event, argument) -> None:
        nonlocal made
        made += event == "call"

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return made


def test_functions_of_python_that_a_replay_calls(layer, monkeypatch):
    """A replay calls at most 30 Python functions.

    A call of a small Python function takes 0.5 us on a fast host and 2 us on a slow one. On the slow host, 30 calls fit
    into the 60 us that an eager call may cost.
    """
    routing = integer_routing(4, CONFIG, 0)
    x = rows(4)
    with torch.no_grad():
        layer.forward_routed(x, routing)
        uncaptured = python_calls(lambda: layer.forward_routed(x, routing))
        monkeypatch.setattr(EmulatedRecorder, "record", lambda self, call: (lambda: None, call()))
        layer.capture_routed([4])
        layer.forward_routed(x, routing)  # the first replay with this number of tokens prepares its copies
        replayed = python_calls(lambda: layer.forward_routed(x, routing))
    assert replayed <= 30, replayed
    assert uncaptured > 4 * replayed, uncaptured
