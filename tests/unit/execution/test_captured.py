"""Test captured calls without a GPU (`captured_emulation`): which are replayed, what they read and leave behind."""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ep_moe import ExpertMap, InputError, MoELayer
from ep_moe.all2all.buffer_slots import BufferSlot
from ep_moe.execution import graphs
from ep_moe.runtime.profiling import StageTimes
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import Routing, TokenMask
from tests.emulations.captured import CONFIG, COUNTED, CPU, layer, replayed, rows, served  # noqa: F401 (a fixture)
from tests.emulations.graph import GRAPHS, EmulatedRecorder
from tests.fixtures.helpers import assert_same, integer_routing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")


def test_calls_are_replayed_whatever_their_shape(layer):
    layer.capture([4, 0, 6])
    layer.capture_routed([4])
    for seed, shape in enumerate([(4,), (2, 2), (1, 4, 1), (0,), (3, 0), (6,)]):
        assert replayed(layer, rows(*shape, seed=seed)), shape
    wide = torch.randn(4, 32)
    assert replayed(layer, wide[:, ::2]), "columns apart"
    assert replayed(layer, rows(3, 2).transpose(0, 1)), "rows in another order"
    for seed in range(3):
        assert replayed(layer, rows(4, seed=seed), integer_routing(4, CONFIG, seed))
    narrow = integer_routing(4, CONFIG, 9)
    assert replayed(layer, rows(4), Routing(narrow.ids.int(), narrow.weights))
    assert not replayed(layer, rows(7)), "one token more"
    assert not replayed(layer, rows(6), integer_routing(6, CONFIG, 0)), "captured without a routing"
    assert not replayed(layer, nn.Parameter(rows(4), requires_grad=False))


@pytest.mark.parametrize("routed", [True, False])
def test_fewer_tokens_than_were_captured(routed, layer):
    """A replay with fewer tokens than captured ignores the rows after them.

    These rows of an earlier call are not counted as load.
    """
    (layer.capture_routed if routed else layer.capture)([6, 2])
    for seed, tokens in enumerate([6, 3, 5, 0, 2, 1, 4, 6]):
        x, routing = rows(tokens, seed=seed), integer_routing(tokens, CONFIG, seed) if routed else None
        layer.placement.reset_load()
        with torch.no_grad():
            chosen = layer.router(x) if routing is None else routing
            layer(x) if routing is None else layer.forward_routed(x, routing)
        counted = torch.bincount(chosen.ids[chosen.ids >= 0], minlength=CONFIG.num_experts)
        assert layer.placement.expert_load.tolist() == counted.tolist(), (tokens, "rows that are no tokens")
        assert replayed(layer, x, routing), tokens
        assert replayed(layer, x.unsqueeze(0), routing)


def test_padding_in_a_replay(layer):
    """A replay with a mask ignores the masked rows in this call only.

    Calls that no graph can serve run eagerly.
    """
    layer.capture([6])
    x, masks = rows(5), (torch.tensor([True, False, True, True, False]), torch.zeros(5, dtype=torch.bool), None)
    with torch.no_grad():
        chosen = layer.router(x).ids
        for mask in (*masks, masks[0], None):
            layer.placement.reset_load()
            before, y = EmulatedRecorder.replays, layer(x, mask)
            assert EmulatedRecorder.replays == before + 1
            tokens = torch.ones(5, dtype=torch.bool) if mask is None else mask
            counted = torch.bincount(chosen[tokens].flatten(), minlength=CONFIG.num_experts)
            assert layer.placement.expert_load.tolist() == counted.tolist()
            torch.testing.assert_close(y, layer.run(x, None, None if mask is None else TokenMask(mask)))
        assert replayed(layer, rows(6)), "all rows are tokens again"
        before = EmulatedRecorder.replays
        layer(x, masks[0], send_masked=True)
        with pytest.raises(InputError, match="mask must be"):
            layer(x, masks[0][:4])
        assert EmulatedRecorder.replays == before


def test_a_later_capture_serves_what_lies_below_it(layer):
    layer.capture([6])
    assert replayed(layer, rows(3))
    sizes = lambda: [(call.least, call.most) for call in served(layer)]  # noqa: E731
    assert sizes() == [(0, 6)]
    layer.capture([3, 2])
    assert sizes() == [(0, 2), (3, 3), (0, 6)]
    kept = served(layer)[0]
    layer.capture([3])
    assert sizes() == [(0, 2), (0, 3), (0, 6)]
    assert served(layer)[0] is kept
    for tokens in (0, 1, 2, 3, 4, 5, 6):
        assert replayed(layer, rows(tokens, seed=tokens)), tokens


class Ranked(nn.Module):
    """A router that mixes rows: the routes of a row depend on the number of rows."""

    def forward(self, x: Tensor) -> Routing:
        ids = (torch.arange(3).expand(len(x), 3) + len(x)) % CONFIG.num_experts
        return Routing(ids, torch.full(ids.shape, 1.0 / 3))


def test_modules_of_the_users_see_tokens_alone(layer):
    plain = dataclasses.replace(CONFIG, shared_intermediate_size=0)
    layer = MoELayer(plain, layer.context, router=Ranked())
    layer.capture([4])
    layer.capture_routed([4])
    assert replayed(layer, rows(4))
    assert not replayed(layer, rows(3))
    assert replayed(layer, rows(3), integer_routing(3, CONFIG, 0)), "its router has no part in this"
    layer = MoELayer(plain, layer.context, shared_experts=nn.Softmax(dim=0))
    layer.capture([4])
    layer.capture_routed([4])
    for given in (None, integer_routing(4, CONFIG, 0)):
        assert replayed(layer, rows(4), given)
    for given in (None, integer_routing(3, CONFIG, 0)):
        assert not replayed(layer, rows(3), given)


def test_layers_share_what_is_read(layer):
    """Layers share the input tensors of their captured calls, because a rank's calls run one after the other."""
    layer.capture([4])
    second = MoELayer(CONFIG, layer.context)
    second.capture([4])
    second.capture_routed([6])
    (own,), ((_, other), (_, larger)) = (served(layer), second._graphs._calls.items())
    assert own.inputs is other.calls[0].inputs
    assert larger.calls[0].inputs.x.data_ptr() != own.inputs.x.data_ptr(), "no room for 6 rows in 4"
    for seed in range(3):
        assert replayed(layer, rows(4, seed=seed))
        assert replayed(second, rows(2, seed=seed))
        assert replayed(second, rows(5, seed=seed), integer_routing(5, CONFIG, seed))


def test_copies_of_few_numbers_of_tokens_are_kept_ready(layer):
    layer.capture_routed([100])
    ((_, calls),) = layer._graphs._calls.items()
    for tokens in range(100):
        assert replayed(layer, rows(tokens), integer_routing(tokens, CONFIG, tokens))
    assert len(calls.calls[0].inputs._copies) <= 64


def test_what_is_given_is_copied_in_one_launch_where_it_can_be(layer, monkeypatch):
    """Inputs are copied in one launch where possible, and the results are the same otherwise.

    Other copies are needed for rows that are not aligned to words, and for routes that are strided or int32.
    """
    layer = MoELayer(CONFIG, layer.context, dtype=torch.bfloat16)
    layer.capture_routed([4])
    layer.capture([4])
    launches, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, given: (launches.append(len(to)), copy(to, given)))
    x, given = rows(4).bfloat16(), integer_routing(4, CONFIG, 0)
    assert replayed(layer, x, given)
    assert replayed(layer, x.view(2, 2, -1))
    assert replayed(layer, x[:3], Routing(given.ids[:3], given.weights[:3]))
    assert replayed(layer, x[:2])
    assert launches == [3, 1 + COUNTED, 4, 1 + COUNTED]
    between = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert replayed(layer, between, given)
    apart = given.weights.repeat_interleave(2, 1)[:, ::2]
    assert replayed(layer, x, Routing(given.ids, apart))
    assert replayed(layer, x, Routing(given.ids.t().contiguous().t(), given.weights))
    assert replayed(layer, x, Routing(given.ids.int(), given.weights))
    assert len(launches) == 4


def test_a_result_is_the_callers_own(layer):
    layer.capture([4])
    with torch.no_grad():
        first = layer(rows(4, seed=1))
        kept = first.clone()
        layer(rows(4, seed=2))
        assert_same(first, kept)
        x = rows(4, seed=1)
        assert_same(layer(x.clone()), layer(x))
        assert_same(x, rows(4, seed=1), "x is not written")


def test_what_a_graph_cannot_give_runs_as_before(layer):
    layer.capture([4])
    y = layer(rows(4))
    y.sum().backward()
    assert layer.router.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lower = layer(rows(4))
        assert_same(lower, y.bfloat16(), "autocast is off inside, and its dtype is that of the result")
        before = EmulatedRecorder.replays
        layer.context._stage_times = times = StageTimes(CPU)
        layer(rows(4))
        assert "experts" in times.milliseconds()
        layer.context._stage_times = None
        replay = lambda x: (layer._graphs.replay(layer, x, None), x + 1)  # noqa: E731
        compiled = torch.compile(replay, backend="eager", fullgraph=True)
        assert compiled(rows(4))[0] is None
        sentence = "not re-entrant: moe0 was called inside other"
        with pytest.raises(RuntimeError, match=sentence), layer.context._begin_call("other"):
            layer(rows(4))
    assert EmulatedRecorder.replays == before
    with torch.inference_mode():
        inferred = layer(rows(4))
        assert inferred.is_inference()
    assert_same(inferred, y)
    assert EmulatedRecorder.replays == before + 1


@pytest.mark.parametrize("tokens", [4, 3])
@pytest.mark.parametrize("routed", [True, False])
def test_first_replayed_in_inference_mode(routed, tokens, layer):
    """A first replay in inference mode leaves no inference tensors that later replays could not write."""
    (layer.capture_routed if routed else layer.capture)([4])
    x, routing = rows(tokens), integer_routing(tokens, CONFIG, 0) if routed else None
    with torch.inference_mode():
        assert replayed(layer, x, routing)
    assert replayed(layer, x, routing)
    if routing is not None:
        assert replayed(layer, x, Routing(routing.ids.int(), routing.weights))


def test_captured_in_inference_mode_under_autocast(layer):
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer.capture([4])
    assert replayed(layer, rows(4)), "its inputs may be written outside of inference mode"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x[:, :8].reshape(-1, 8), r"x must be \[..., 16\] \(hidden_size\), got \[4, 8\]"),
        (lambda x: x.reshape(-1)[:1].reshape(()), r"x must be \[..., 16\]"),
        (lambda x: x.double(), "x must be float32 as the layer is, got float64"),
        (lambda x: x.tolist(), "x must be a Tensor, got list"),
        (lambda x: x.to("meta"), "x must be on cpu as the layer is, got meta"),
    ],
)
def test_bad_rows_raise_as_before(change, sentence, layer):
    layer.capture([4, 2, 0])
    with torch.no_grad(), pytest.raises(InputError, match=sentence):
        layer(change(rows(4)))
    assert not EmulatedRecorder.replays


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: Routing(r.ids[:3], r.weights[:3]), r"routing.ids must be \[T, K\] = \[4, 3\], got \[3, 3\]"),
        (lambda r: Routing(r.ids[:1], r.weights), r"routing.ids must be \[T, K\] = \[4, 3\], got \[1, 3\]"),
        (lambda r: Routing(r.ids, r.weights[:, :2]), r"routing.weights must be \[T, K\] = \[4, 3\], got \[4, 2\]"),
        (lambda r: Routing(r.ids.float(), r.weights), "routing.ids must be int32 or int64, got float32"),
        (lambda r: Routing(r.ids, r.weights.double()), "routing.weights must be float32, got float64"),
        (lambda r: Routing(r.ids.to("meta"), r.weights), "routing.ids must be on cpu as x is, got meta"),
        (lambda r: (r.ids, r.weights), "routing must be a Routing of logical ids, got tuple"),
        (lambda r: Routing(r.ids.tolist(), r.weights), "routing.ids must be a Tensor, got list"),
    ],
)
def test_bad_routings_raise_as_before(change, sentence, layer):
    layer.capture_routed([4])
    with torch.no_grad(), pytest.raises(InputError, match=sentence):
        layer.forward_routed(rows(4), change(integer_routing(4, CONFIG, 0)))
    assert not EmulatedRecorder.replays


def test_a_map_that_is_not_the_weights_is_refused_as_before(layer):
    """A replay refuses an expert map that does not match the weights, as an eager call does.

    Otherwise the replay would place rows by one map and compute with the experts of another.
    """
    layer.capture([4])
    own = layer.placement.expert_map
    layer.placement.update(ExpertMap.from_ranks([[1, 0, 2, 3, 4, 5]], 6))
    with torch.no_grad(), pytest.raises(InputError, match=r"Placement\.update changed the expert map"):
        layer(rows(4))
    assert not EmulatedRecorder.replays
    layer.placement.update(ExpertMap.linear(6, 1))
    assert layer.placement.expert_map == own
    assert replayed(layer, rows(4))


def test_streams_and_workspaces(layer, monkeypatch):
    """A replay waits for a call on another stream that used its workspace, and the next call waits for the replay."""
    layer.capture([4])
    ((_, calls),) = layer._graphs._calls.items()
    waited, buffer_slot = [], BufferSlot(None, stream="elsewhere")
    monkeypatch.setattr(BufferSlot, "wait_for_last_call", lambda self, device: waited.append((self.stream, device)))
    recorder = SimpleNamespace(stream="its own")
    calls.calls[0] = dataclasses.replace(calls.calls[0], buffer_slots=(buffer_slot,), recorder=recorder)
    assert replayed(layer, rows(4))
    assert waited == [("elsewhere", CPU)]
    assert buffer_slot.stream == "its own"
    assert replayed(layer, rows(4, seed=1))
    assert len(waited) == 1, "nothing to wait for"
    for name in ("current_stream", "capturing"):
        with monkeypatch.context() as other:
            other.setattr(graphs, name, lambda device: 5)
            assert not replayed(layer, rows(4)), "another stream is current, or being captured"
    assert replayed(layer, rows(4))
    buffer_slot.busy = True
    assert not replayed(layer, rows(4)), "the workspace has a call under way"


class Cuda:
    """A stand-in for torch.cuda in `Recorder`. It records the calls in order."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.current, self.capturing = "home", False
        streams = iter(["capture"])
        signature = inspect.signature(torch.cuda.graph.__init__)

        @contextmanager
        def stream(given):
            before, self.current = self.current, given.name
            yield
            self.current = before

        @contextmanager
        def graph(*given):
            asked = signature.bind(None, *given).arguments
            self.seen.append(("begin", asked["cuda_graph"].name, asked["pool"], asked["stream"].name))
            yield
            self.seen.append(("end", self.current))

        def named(name: str) -> SimpleNamespace:
            wait = lambda other: self.seen.append((name, "waits for", other.name))  # noqa: E731
            return SimpleNamespace(name=name, cuda_stream=name, wait_stream=wait)

        for name, given in {
            "current_stream": lambda device: named("home"),
            "Stream": lambda device: named(next(streams)),
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: SimpleNamespace(name="graph", replay="replay"),
            "stream": stream,
            "graph": graph,
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, given)
        raw = lambda device: self.current if device == 3 else None  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)


def test_what_cuda_is_asked(monkeypatch):
    cuda = Cuda(monkeypatch)
    spaces = Workspaces(torch.device("cuda", 3))
    recorder = GRAPHS(torch.device("cuda", 3), spaces)
    assert spaces._buffers["capture"] is spaces._buffers["home"], "one workspace for both"
    recorder.warm(lambda: cuda.seen.append(("warm", cuda.current)))
    assert cuda.seen == [("capture", "waits for", "home"), ("warm", "capture"), ("home", "waits for", "capture")]
    cuda.seen.clear()
    assert recorder.record(lambda: cuda.current) == ("replay", "capture")
    assert cuda.seen == [("begin", "graph", "pool", "capture"), ("end", "capture")]
    assert recorder.can_replay
    cuda.capturing = True
    assert not recorder.can_replay, "the stream is being captured"
    cuda.current, cuda.capturing = "other", False
    assert not recorder.can_replay
    assert GRAPHS.unsupported_reason(torch.device("cuda", 3)) is None
