"""Test a snapshot of layers in one process: what it counts, and what it costs a call."""

# ruff: noqa: F811

import contextlib
import dataclasses
import gc
import threading
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from ep_moe import (
    BackendUnavailable,
    ConfigError,
    ContextClosed,
    EPContext,
    ExpertBalancer,
    InputError,
    MoEConfig,
    MoELayer,
    Routing,
    Wire,
    metrics,
)
from ep_moe.metrics import source as module
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.heartbeats import Step
from ep_moe.runtime import profiling
from ep_moe.runtime.profiling import StageTimes
from tests.emulations.captured import layer, rows  # noqa: F401 (a fixture)
from tests.fixtures.eplb_cases import make_layers

CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
IDS = torch.tensor([[0, 1], [0, 2], [0, -1]])


@pytest.fixture
def context():
    with EPContext.local() as context:
        yield context


def routing(ids=IDS):
    return Routing(ids, torch.full(ids.shape, 0.5))


def test_a_layer_is_counted(context):
    layer, idle = MoELayer(CONFIG, context, name="one"), MoELayer(CONFIG, context)
    for _ in range(2):
        layer.forward_routed(torch.randn(3, 16), routing())
    found = metrics.snapshot(context)
    assert (found.rank, found.etp_rank, found.whole, found.deadline_s, found.balancers) == (0, 0, False, None, ())
    one, other = found.layers
    assert (one.name, one.all2all, one.experts, one.calls, one.replayed) == ("one", "local", "reference", 2, 0)
    assert one.expert_load == (6, 2, 2, 0)
    assert one.tokens == 5, "10 routes, 2 a token"
    assert one.rank_load == (10,)
    assert (one.sent_bytes, one.stage_ms, one.deadline_margin_s, one.balancedness) == (0, {}, None, 1.0)
    assert (other.name, other.calls, other.tokens, other.expert_load) == ("moe1", 0, 0, (0, 0, 0, 0))
    del idle


def test_a_call_that_failed_is_no_replay(context):
    layer = MoELayer(CONFIG, context)
    layer(torch.randn(3, 16))
    with pytest.raises(InputError, match=r"got \[3, 17\]"):
        layer(torch.randn(3, 17))
    failing = mock.patch.object(MoELayer, "_call", side_effect=RuntimeError("early"))
    with failing, pytest.raises(RuntimeError, match="early"):
        layer(torch.randn(3, 16))
    (found,) = metrics.snapshot(context).layers
    assert (found.calls, found.replayed) == (3, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")
def test_replays_are_those_of_graphs(layer):
    layer.capture([4])
    before = metrics.snapshot(layer.context).layers[0]
    with torch.no_grad():
        for _ in range(3):
            layer(rows(4))
        layer(rows(7))  # no graph has room for 7 rows
    after = metrics.snapshot(layer.context).layers[0]
    assert (after.calls - before.calls, after.replayed - before.replayed) == (4, 3)
    with torch.no_grad(), metrics.stages(layer.context):
        layer(rows(4))
    timed = metrics.snapshot(layer.context).layers[0]
    assert (timed.calls - after.calls, timed.replayed - after.replayed) == (1, 0), "it runs eagerly to be timed"


def test_tokens_whose_routes_were_dropped_are_rounded_up(context):
    layer = MoELayer(CONFIG, context)
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    layer.forward_routed(torch.randn(3, 16), routing(ids))
    assert metrics.snapshot(context).layers[0].tokens == 2, "3 routes, 2 a token"


def test_layers_of_one_name_are_told_apart(context, monkeypatch):
    layers = [MoELayer(CONFIG, context, name="same") for _ in range(3)]
    layers[1](torch.randn(3, 16))
    # the recorder knows a layer by its own name
    monkeypatch.setattr(module, "_margin", lambda name, _: {"same": 9.0}[name])
    for found in (metrics.snapshot(context).layers, metrics.Source(context).newest().layers):
        assert [(layer.name, layer.calls) for layer in found] == [("same", 0), ("same (2)", 1), ("same (3)", 0)]
        assert [layer.deadline_margin_s for layer in found] == [9.0] * 3


def test_stage_times_are_of_their_layer(context):
    layers = [MoELayer(CONFIG, context), MoELayer(CONFIG, context)]
    with metrics.stages(context) as watched:
        layers[0](torch.randn(3, 16))
        first, second = metrics.snapshot(context).layers
        assert {"route", "dispatch", "experts", "combine"} <= set(first.stage_ms)
        assert all(spent > 0 for spent in first.stage_ms.values())
        assert second.stage_ms == {}
        layers[1](torch.randn(3, 16))
    assert metrics.snapshot(context).layers[0].stage_ms == {}
    times = watched.by_layer()
    assert set(times) == {"moe0", "moe1"}
    total = sum(times[name]["experts"] for name in times)
    assert watched.milliseconds()["experts"] == pytest.approx(total)


def test_stage_times_of_one_name_are_given_once(context):
    layers = [MoELayer(CONFIG, context, name="same") for _ in range(2)]
    with metrics.stages(context):
        for layer in layers:
            layer(torch.randn(3, 16))
        first, second = metrics.snapshot(context).layers
    assert first.stage_ms["experts"] > 0
    assert second.stage_ms == {}


@contextmanager
def nvtx_into(said):
    """Replace the NVTX functions. `said` gets what is pushed and popped, in order."""
    with (
        mock.patch.object(module, "_check_nvtx"),
        mock.patch.object(torch.cuda.nvtx, "range_push", said.append),
        mock.patch.object(torch.cuda.nvtx, "range_pop", partial(said.append, "pop")),
    ):
        yield


def test_nvtx_ranges(context):
    said = []
    layer = MoELayer(CONFIG, context, name="one")
    with pytest.raises(ConfigError, match=r"nvtx=True marks the work of a GPU, and this context is on cpu"):
        metrics.stages(context, nvtx=True).__enter__()
    with nvtx_into(said):
        with metrics.stages(context, times=False, nvtx=True) as watched:
            layer(torch.randn(3, 16))
        broken = mock.patch.object(layer.router, "forward", side_effect=RuntimeError("mine"))
        with metrics.stages(context, nvtx=True), broken, pytest.raises(RuntimeError, match="mine"):
            layer(torch.randn(3, 16))
    assert watched.by_layer() == {}
    assert said[:4] == ["ep_moe::route one", "pop", "ep_moe::place one", "pop"]
    assert said.count("pop") == len(said) / 2, "an exception pops its range too"


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")
def test_nvtx_leaves_replays_and_marks_them(layer):
    layer.capture([4])
    said = []
    before = metrics.snapshot(layer.context).layers[0].replayed
    with (
        nvtx_into(said),
        metrics.stages(layer.context, times=False, nvtx=True),
        torch.no_grad(),
    ):
        layer(rows(4))
    assert metrics.snapshot(layer.context).layers[0].replayed == before + 1
    assert (said[0], said[-1]) == (f"ep_moe::replay {layer.name}", "pop")  # the graph's stand-in runs the stages inside


def test_a_torch_without_nvtx_is_said():
    with (
        mock.patch.object(torch.cuda.nvtx, "mark", side_effect=RuntimeError("NVTX functions not installed")),
        pytest.raises(BackendUnavailable, match="needs a torch with NVTX: NVTX functions not installed"),
    ):
        module._check_nvtx(torch.device("cuda"))


def test_scales_are_sent_beside_their_rows(context, monkeypatch):
    config = dataclasses.replace(CONFIG, hidden_size=256)
    wires = [Wire(dispatch=name) for name in ("plain", "fp8_block", "fp8_row", "mxfp8")]
    wires.append(Wire(dispatch="nvfp4", input_scale=1.0))
    layers = [MoELayer(config, context, wire=wire) for wire in wires]
    counts = module._counts
    # rows sent to other ranks
    monkeypatch.setattr(module, "_counts", lambda layer: [*counts(layer)[:2], torch.tensor([3])])
    of_a_row = [256 * 4, 256 + 2 * 4, 256 + 4, 256 + 8, 128 + 16]  # mxfp8 and nvfp4 scales have one byte
    assert [one.sent_bytes for one in metrics.snapshot(context).layers] == [3 * size for size in of_a_row]
    del layers


def test_times_of_a_stage_add_up(monkeypatch):
    times, clock = StageTimes(torch.device("cpu"), lambda: "one"), iter([1.0, 2.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    for where in (None, None, "other"):
        with times.span("route", where):
            pass
    assert times.by_layer() == {"one": {"route": 3000.0}, "other": {"route": 4000.0}}
    assert times.milliseconds() == {"route": 7000.0}


def test_refusals(context):
    with pytest.raises(ConfigError, match="snapshot: context must be"):
        metrics.snapshot(None)
    with pytest.raises(ConfigError, match="snapshot: balancer must be"):
        metrics.snapshot(context, None)
    with pytest.raises(ConfigError, match="snapshot: whole must be True or False, got 1"):
        metrics.snapshot(context, whole=1)
    for _ in range(2):  # a block that an exception left has ended too
        with contextlib.suppress(KeyError), metrics.stages(context):
            with pytest.raises(ConfigError, match="are watched already"):
                metrics.stages(context).__enter__()
            raise KeyError
    with (
        mock.patch.object(module, "capturing", return_value=True),
        pytest.raises(InputError, match="outside the capture"),
    ):
        metrics.snapshot(context)
    source = metrics.Source(context)
    context.destroy()
    with pytest.raises(ContextClosed):
        source.update()
    assert source.newest().layers == ()


def test_a_source_keeps_nothing_alive():
    context = EPContext.local()
    layer = MoELayer(CONFIG, context)
    source = metrics.Source(context)
    context.destroy()
    del context, layer
    gc.collect()
    assert source._context() is None
    assert [one.name for one in source.newest().layers] == ["moe0"]
    with pytest.raises(ConfigError, match="its EPContext is gone"):
        source.update()


def test_an_update_reads_the_balancers_that_live(context):
    balancer = ExpertBalancer(make_layers(context, redundant=0), context)
    source = metrics.Source(context, balancer)
    balancer.step()
    assert [one.steps for one in source.update().balancers] == [1]
    balancer.close()
    del balancer
    gc.collect()
    assert source.update().balancers == ()


def test_a_meta_layer_has_no_load(context):
    with torch.device("meta"):
        layer = MoELayer(CONFIG, context)
    (found,) = metrics.snapshot(context).layers
    assert (found.tokens, found.expert_load, found.balancedness) == (None, None, None)
    del layer


def test_the_margin_is_that_of_the_longest_wait():
    recorder = FlightRecorder(deadline_s=100.0)
    for where, late in (("a", 3.0), ("a", 9.0), ("a", 4.0), ("b", -1.0), ("b", 2.0)):
        recorder._step = Step(1, where, "dispatch", "torch_a2a", False)
        recorder._note_wait(late)
    assert recorder.longest_wait == {"a": 9.0, "b": 2.0}
    recorder._store, recorder._ranks = object(), [0, 1]  # as with a peer
    assert [module._margin(name, recorder) for name in "abc"] == [91.0, 98.0, 100.0]


def test_newest_reads_no_device_and_no_tensor(context):
    """`newest` reads no tensor, so an endpoint's thread never waits for a device that waits for a hanging peer."""
    layer = MoELayer(CONFIG, context)
    layer(torch.randn(3, 16))
    source, found = metrics.Source(context), []
    refuse = mock.Mock(side_effect=AssertionError("a tensor was read"))
    with mock.patch.multiple(torch.Tensor, tolist=refuse, cpu=refuse, item=refuse, to=refuse):
        thread = threading.Thread(target=lambda: found.append(source.newest()))
        thread.start()
        thread.join()
    assert found[0].layers[0].tokens == 3
