"""Test which calls are replayed, what they leave behind, and what ends replays.

The calls run over `tests.emulations.automatic_graphs`.
"""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import ConfigError, EPContext, InputError, MoELayer, Wire
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.config import RoutingConfig
from ep_moe.errors import BackendUnavailable
from ep_moe.execution import graphs
from ep_moe.execution.recorded_calls import CallerInputs, CopiedInputs
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.placement import Placement
from ep_moe.runtime.profiling import StageTimes
from ep_moe.types import Routing
from tests.emulations.automatic_graphs import (  # noqa: F401 (fixtures)
    CONFIG,
    CPU,
    MOST,
    built,
    context,
    driver,
    every_other,
    forward,
    given,
    layer,
    repeats,
    shifted,
)
from tests.fixtures.launches import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="stands in for a GPU, and compiles")


# --- which calls ----------------------------------------------------------------------------------------------------


def test_from_the_third_on(driver, context):
    layer = built(context)
    assert layer._dispatcher().recordable_call(MOST) is None
    assert [repeats(layer, *given(1, seed)) for seed in range(4)] == [False, False, True, True]
    assert [repeats(layer, *given(1, seed, torch.int32)) for seed in range(3)] == [False, False, True]
    with context.token_limit(2):
        assert [repeats(layer, *given(2, seed)) for seed in range(4)] == [False, False, True, True]
    assert repeats(layer, *given(3))


def test_calls_unlike_others_have_nothing_recorded_again(layer):
    x, routing = given(2)
    for _ in range(5):
        assert not repeats(layer, shifted(x), routing)
        assert repeats(layer, x, routing)
    assert graphs.Recorder.recorded == 1


def test_nothing_is_recorded_of_sharded_experts(driver, context):
    """Calls over sharded experts are not recorded, because each call gathers the parameters at another address."""
    layer = built(context)
    layer.expert_weights.unstack()
    assert [repeats(layer, *given(1)) for _ in range(4)] == [False] * 4
    assert graphs.Recorder.recorded == 0


def test_nothing_is_recorded_in_a_capture_of_somebody_elses(driver, context):
    layer = built(context)
    with mock.patch.object(graphs, "capturing", return_value=True):
        assert [repeats(layer, *given(1)) for _ in range(4)] == [False] * 4
    assert graphs.Recorder.recorded == 0


def test_memory_that_another_thread_was_given_meanwhile(driver, context):
    layer, graph_of = built(context), graphs.Recorder.graph_of
    with mock.patch.object(graphs.Recorder, "graph_of", side_effect=[BackendUnavailable("it allocates")] * 2) as tried:
        assert [repeats(layer, *given(1)) for _ in range(3)] == [False] * 3
    assert tried.call_count == 2
    assert graphs.Recorder.graph_of == graph_of
    assert [repeats(layer, *given(1)) for _ in range(2)] == [False, True]


def test_few_are_kept(driver, context, monkeypatch):
    monkeypatch.setattr(graphs, "_AUTOMATIC", 2)
    layer = built(context)
    for bound in (1, 2, 3):
        with context.token_limit(bound):
            assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]
    assert len(layer._graphs) == 1
    for bound in (1, 2, 1, 2):  # each evicts the other's note of one call, but not the recorded graph
        with context.token_limit(bound):
            assert not repeats(layer, *given(1))
    with context.token_limit(3):
        assert repeats(layer, *given(1))


def test_compiled_graphs_note_nothing(driver, context):
    layer = built(context)
    for _ in range(2):
        forward(layer, *given(1))
    layer._graphs.drop()
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True), torch.no_grad():
        layer._graphs.record_if_repeated(layer, given(1)[1], None)
    assert len(layer._graphs) == 0


@pytest.mark.parametrize("change", [every_other, shifted])
@pytest.mark.parametrize("which", ["x", "ids", "weights"])
def test_tensors_that_binaries_do_not_take(which, change, layer):
    x, routing = given(2)
    parts = {"x": x, "ids": routing.ids, "weights": routing.weights}
    parts[which] = change(parts[which])
    assert not repeats(layer, parts["x"], Routing(parts["ids"], parts["weights"]))
    assert repeats(layer, x, routing)


WRONG = {
    "dtype of x": (lambda x, r: (x.float(), r), "x must be bfloat16 as the layer is, got float32"),
    "hidden size": (lambda x, r: (x[:, :128].contiguous(), r), "x must be [..., 256] (hidden_size), got [2, 128]"),
    "no tensor": (lambda x, r: (x.tolist(), r), "x must be a Tensor, got list"),
    "tokens of the ids": (
        lambda x, r: (x, Routing(r.ids[:1], r.weights)),
        "routing.ids must be [T, K] = [2, 2], got [1, 2]",
    ),
    "tokens of the weights": (
        lambda x, r: (x, Routing(r.ids, r.weights[:1])),
        "routing.weights must be [T, K] = [2, 2], got [1, 2]",
    ),
    "routes": (
        lambda x, r: (x, Routing(r.ids[:, :1].contiguous(), r.weights[:, :1].contiguous())),
        "routing.ids must be [T, K] = [2, 2], got [2, 1]",
    ),
    "dtype of the weights": (
        lambda x, r: (x, Routing(r.ids, r.weights.double())),
        "routing.weights must be float32, got float64",
    ),
    "dtype of the ids": (
        lambda x, r: (x, Routing(r.ids.short(), r.weights)),
        "routing.ids must be int32 or int64, got int16",
    ),
    "ids that are none": (
        lambda x, r: (x, Routing(r.ids.tolist(), r.weights)),
        "routing.ids must be a Tensor, got list",
    ),
    "weights that are none": (
        lambda x, r: (x, Routing(r.ids, r.weights.tolist())),
        "routing.weights must be a Tensor, got list",
    ),
    "no routing": (lambda x, r: (x, (r.ids, r.weights)), "routing must be a Routing of logical ids, got tuple"),
    "too many tokens": (lambda x, r: given(MOST + 1), "x has 4 tokens to dispatch, more than max_tokens=3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_as_ever(name, layer):
    change, sentence = WRONG[name]
    x, routing = change(*given(2))
    with torch.no_grad(), pytest.raises(InputError, match=re.escape(sentence)):
        layer.forward_routed(x, routing)


def test_calls_that_are_trained_are_not_recorded(driver, context):
    layer = built(context)
    x, routing = given(2)
    assert not repeats(layer, x, routing)
    trained = torch.zeros_like(x).requires_grad_()
    with torch.enable_grad(), mock.patch.object(MoELayer, "run", return_value=trained):
        layer.forward_routed(x, routing)
        assert layer.forward_routed(x, routing).requires_grad
    assert len(layer._graphs) == 0
    assert [repeats(layer, *given(2, seed)) for seed in range(2)] == [False, True]


@pytest.mark.parametrize("name", ["x", "ids"])
def test_the_meta_device_is_refused_as_ever(name, layer):
    """Tensors on the meta device raise the same error as without graphs.

    Each case makes one error, because a layer that refused a call raises the first error again.
    """
    x, routing = given(2)
    wrong = (x.to("meta"), routing) if name == "x" else (x, Routing(routing.ids.to("meta"), routing.weights))
    with torch.no_grad(), pytest.raises(InputError, match=f"{name} must be on cpu as .* is, got meta"):
        layer.forward_routed(*wrong)


def with_gradients(layer):
    return torch.enable_grad()


def profiled(layer):
    return torch.autograd.profiler.profile()


def timed(layer):
    return mock.patch.object(layer.context, "_stage_times", StageTimes(CPU))


def with_shared_experts(layer):
    return mock.patch.object(layer, "shared_experts", torch.nn.Identity())


def on_another_stream(layer):
    return mock.patch.object(graphs, "current_stream", return_value=5)


def after_another_stream(layer):
    return mock.patch.object(layer._dispatcher().buffer_pool.buffer_slots[0], "stream", SimpleNamespace(cuda_stream=5))


def captured(layer):
    return mock.patch.object(graphs, "capturing", return_value=True)


def compiled(layer):
    return mock.patch.object(torch.compiler, "_is_compiling_flag", True)


@pytest.mark.parametrize(
    "state",
    [with_gradients, profiled, timed, with_shared_experts, on_another_stream, after_another_stream, captured, compiled],
)
def test_states_in_which_the_layer_runs(state, layer):
    x, routing = given(1)
    with (
        mock.patch.object(layer._dispatcher().buffer_pool.buffer_slots[0], "wait_for_last_call"),
        mock.patch.object(MoELayer, "run", autospec=True, return_value=x) as run,
        mock.patch.object(Placement, "forward", side_effect=AssertionError("it was placed for nothing")),
        torch.no_grad(),
        state(layer),
    ):
        layer.forward_routed(x, routing)
    assert run.called
    assert repeats(layer, x, routing)


def test_while_a_call_is_under_way_another_takes_its_own_memory(layer):
    x, routing = given(1)
    buffer_slot = layer._dispatcher().buffer_pool.buffer_slots[0]
    buffer_slot.busy = True
    assert not repeats(layer, x, routing)
    buffer_slot.busy = False
    assert repeats(layer, x, routing)


def test_inside_another_forward_it_is_refused_as_ever(layer):
    with layer.context._begin_call("other"), pytest.raises(RuntimeError, match="not re-entrant"):
        forward(layer, *given(1))


def test_what_the_watch_found_is_raised(layer):
    layer.context.flight_recorder.refuse("lost")
    with pytest.raises(InputError, match="lost"):
        forward(layer, *given(1))


def test_with_inference_mode(layer):
    x, routing = given(1)
    with torch.inference_mode():
        assert layer.forward_routed(x, routing).is_inference()
    assert not forward(layer, x, routing).is_inference()


# --- what ends it ---------------------------------------------------------------------------------------------------


def test_other_weights_are_noted_anew(layer, driver):
    x, routing = given(1)
    layer.expert_weights.w13.data.fill_(1)
    assert repeats(layer, x, routing), "written in place"
    layer.expert_weights.w13.data = torch.ones_like(layer.expert_weights.w13)
    assert [repeats(layer, x, routing) for _ in range(3)] == [False, False, True]
    assert layer.expert_weights.w13.data_ptr() in driver.found[-4]


def test_each_mode_ends_by_itself(layer):
    """Captured calls and automatic graphs end independently.

    A replaced router ends only the captured calls. A captured call has precedence where both serve a call.
    """
    x, routing = given(1)
    ((key, automatic),) = layer._graphs._calls.items()
    copied, keeps = (CopiedInputs, key[1], True), [True]
    call = SimpleNamespace(
        signature=automatic.calls[0].signature, least=0, stream=0, buffer_slots=(), steps=2,
last_step=automatic.calls[0].last_step,
        addresses=SimpleNamespace(unchanged=lambda layer: keeps[0]),
        launch=lambda *_: x, result=lambda layer, x, tokens, out: out,
    )  # fmt: skip
    layer._graphs._calls[copied] = graphs.Sizes([MOST], [call])
    assert forward(layer, x, routing) is x
    keeps[0] = False
    assert repeats(layer, x, routing)
    assert list(layer._graphs._calls) == [key]
    layer._graphs._calls[copied] = graphs.Sizes([MOST], [call])
    keeps[0] = True
    layer.expert_weights.w13.data = torch.ones_like(layer.expert_weights.w13)
    call.launch = lambda *_: None
    assert not repeats(layer, x, routing)
    assert layer._graphs.count(CallerInputs) == 0
    assert copied in layer._graphs._calls


def test_what_is_tuned_is_noted_anew(layer):
    layer._use(layer.experts, [])
    assert len(layer._graphs) == 0
    assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]


def test_nothing_is_kept_of_a_context_that_ended(driver):
    layout, flight_recorder = RankLayout(world=1, rank=0), FlightRecorder()
    rank_groups = RankGroups(layout, flight_recorder, CPU)
    with EPContext(layout, CPU, None, rank_groups, flight_recorder, max_tokens=MOST) as context:
        layer = built(context)
        for _ in range(3):
            forward(layer, *given(1))
    assert len(layer._graphs) == 0
    with pytest.raises(RuntimeError, match="destroyed"):
        forward(layer, *given(1))


@pytest.mark.parametrize(
    "why",
    ["parts", "ranks agree", "weight on input", "another transport", "another kernel", "rounded before", "widened"],
)
def test_layers_whose_calls_are_more_than_launches(why, driver, context, monkeypatch):
    config, asked = CONFIG, {}
    if why == "parts":
        asked["pipeline"] = 2
    elif why == "weight on input":
        config = dataclasses.replace(CONFIG, top_k=1, routing=RoutingConfig(weight_on_input=True))
    elif why == "another kernel":
        able = dataclasses.replace(Bf16TritonExperts.capabilities, cuda_graph=False)
        monkeypatch.setattr(Bf16TritonExperts, "capabilities", able)
    elif why == "rounded before":
        asked["wire"] = Wire(dispatch="mxfp8")
    elif why == "ranks agree":
        monkeypatch.setattr(context._token_flow, "is_pass_through", False)
    elif why == "widened":
        asked["wire"] = Wire(dispatch="fp8_block")
    try:
        layer = built(context, config, **asked)
    except ConfigError as error:
        pytest.fail(str(error))
    if why == "another transport":
        monkeypatch.setattr(NVLinkP2PDispatcher, "recordable_call", lambda *given: None)
    x, routing = given(1)
    routing = Routing(routing.ids[:, : config.top_k].contiguous(), routing.weights[:, : config.top_k].clone())
    with pytest.warns(UserWarning, match="it allocates") if why == "widened" else nullcontext():
        for _ in range(6):
            assert not repeats(layer, x, routing)
    assert len(layer._graphs) == 0
    assert graphs.Recorder.recorded in (0, 3), "what cannot be recorded is asked no more"
