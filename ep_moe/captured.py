"""Calls of a layer as CUDA graphs: to the host an eager call is then one launch and two copies, in the place of some
hundred calls of Python and half a dozen launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.lanes import Lane, Lanes
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import Experts
from ep_moe.fused.base import FusedExperts
from ep_moe.parallel.ledger import Step
from ep_moe.placement.placement import Placement
from ep_moe.types import LogicalIds, Routing, capturing, dtype_name
from ep_moe.workspace import Workspaces


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    config: MoEConfig
    context: EPContext
    placement: Placement
    _modules: dict[str, nn.Module | None]

    @property
    def kernel(self) -> Experts | FusedExperts: ...
    @property
    def dispatcher(self) -> Dispatcher: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def run(self, x: Tensor, routing: Routing | None) -> Tensor: ...


class Recorder:
    """Records calls as CUDA graphs in one memory pool, and has them replayed on the stream that was current when it was
    made, and on no other: what graphs share is kept apart by that stream's order alone."""

    def __init__(self, device: torch.device, workspaces: Workspaces) -> None:
        self.stream: Any = torch.cuda.current_stream(device)
        self._device, self._current = device.index, self.stream.cuda_stream
        self._beside = torch.cuda.Stream(device)  # the default stream cannot be captured
        workspaces.lend(self._beside)  # what is recorded there runs here
        self._pool = torch.cuda.graph_pool_handle()

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """None, or why calls there cannot be recorded."""
        return None if device.type == "cuda" else f"the layer is on {device}, and CUDA graphs need a GPU"

    @property
    def here(self) -> bool:
        """Whether a replay may begin: the stream is current, and not being captured itself."""
        current = torch._C._cuda_getCurrentRawStream(self._device)
        return current == self._current and not torch.cuda.is_current_stream_capturing()

    def warm(self, call: Callable[[], Tensor]) -> None:
        """Run it where it will be recorded: what the first call on a stream makes is not to be made in a graph."""
        self._beside.wait_stream(self.stream)
        with torch.cuda.stream(self._beside):
            call()
        self.stream.wait_stream(self._beside)

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What replays it, and the tensor that each replay writes."""
        graph = torch.cuda.CUDAGraph()
        # the outer one leaves the stream again where a capture fails
        with torch.cuda.stream(self._beside), torch.cuda.graph(graph, self._pool, self._beside):
            out = call()
        return graph.replay, out


@dataclass(frozen=True, eq=False)
class _Call:
    """x [T, H], ids int64 [T, K], weights float32 [T, K]: what a replay reads; out [T, H]: what it writes
    words: x, ids and weights as int32, the same memory; empty where rows are no whole words
    lane: the transport's workspace, where it has one
    steps, left: of the ledger, how many such a call makes, and what the last leaves: where, phase, detail, done
    """

    x: Tensor
    routing: Routing | None
    words: list[Tensor]
    recorder: Recorder
    replay: Callable[[], object]
    out: Tensor
    lane: Lane | None
    steps: int
    left: tuple[str, str, str, bool]

    def takes(self, x: Tensor, routing: Routing | None) -> bool:
        """Whether a call with these arguments does the same; one with wrong arguments does not."""
        own = self.x
        if x.shape[-1:] != own.shape[1:] or x.dtype != own.dtype or x.device != own.device:
            return False
        if routing is None:
            return True
        if type(routing) is not Routing or self.routing is None:
            return False
        ids, weights, own = routing.ids, routing.weights, self.routing.weights
        return (
            type(ids) is Tensor
            and type(weights) is Tensor
            and ids.shape == weights.shape == own.shape
            and (ids.dtype == torch.int64 or ids.dtype == torch.int32)
            and weights.dtype == own.dtype
            and ids.device == weights.device == own.device
        )

    def bring(self, x: Tensor, routing: Routing | None) -> None:
        """What was given to where a replay reads it; one launch for all, if each is in one piece."""
        if x.dim() != 2:
            x = x.reshape(self.x.shape)
        # rows of 2-byte numbers may begin between two words, and are then none
        whole = bool(self.words) and x.is_contiguous() and x.storage_offset() % 2 == 0
        if routing is None or self.routing is None:
            given, own = [x], [self.x]
        else:
            own, given = [self.x, self.routing.ids, self.routing.weights], [x, routing.ids, routing.weights]
            whole = whole and given[1].dtype == torch.int64 and given[1].is_contiguous() and given[2].is_contiguous()
        if whole:
            torch._foreach_copy_(self.words, [tensor.view(torch.int32) for tensor in given])
        else:
            for to, tensor in zip(own, given, strict=True):
                to.copy_(tensor)


class _Places:
    """Where a layer's parts and their tensors are: graphs read there, whatever takes their place."""

    def __init__(self, layer: Layer) -> None:
        self._modules, self._parts = layer._modules, list(layer._modules.values())
        owners = [tensors for module in layer.modules() for tensors in (module._parameters, module._buffers)]
        self._tensors = [(owner, name) for owner in owners for name, found in owner.items() if found is not None]
        self._places = self._now()

    def kept(self) -> bool:
        return self._now() == self._places and list(self._modules.values()) == self._parts

    def _now(self) -> list[int]:
        return [owner[name].data_ptr() for owner, name in self._tensors]  # type: ignore[union-attr]


class CapturedCalls:
    """One layer's calls that were captured, by number of tokens, bound in force, and whether they bring a routing."""

    def __init__(self, context: EPContext, config: MoEConfig) -> None:
        self._context = context
        self._hidden = config.hidden_size
        self._calls: dict[tuple[int, int | None, bool], _Call] = {}
        self._places: _Places | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def drop(self) -> None:
        """From now on every call runs the layer."""
        self._calls.clear()

    def replay(self, x: Tensor, routing: Routing | None) -> Tensor | None:
        """The result of a call that was captured, shaped as x; None for any other, wrong ones too.

        Each line of it is host time of an eager call."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        context = self._context
        call = self._calls.get((x.numel() // self._hidden, context.step_tokens, routing is not None))
        if call is None or not call.takes(x, routing) or not self._may_replay(call, x):
            return None
        lane, ledger = call.lane, context.ledger
        ledger.check()
        if lane is not None and lane.stream is not call.recorder.stream:
            lane.follow(x.device)
        call.bring(x, routing)
        number = ledger.number
        call.replay()
        # as the call itself leaves it: peers that run theirs must find this rank neither behind nor elsewhere
        ledger.leave_at(Step(number + call.steps, *call.left))
        ledger.mark(x.device)
        if lane is not None:
            lane.stream = call.recorder.stream
        return (call.out if x.dim() == 2 else call.out.view(x.shape)).clone()

    def _may_replay(self, call: _Call, x: Tensor) -> bool:
        if self._places is None or not self._places.kept():
            self.drop()
            return False
        return (
            self._context.idle
            and self._context.stage_times is None
            and (call.lane is None or not call.lane.busy)
            and call.recorder.here
            and not torch.is_autocast_enabled(x.device.type)
        )

    def capture(self, layer: Layer, tokens: Sequence[int], *, routed: bool) -> None:
        """As `MoELayer.capture`."""
        context, what = self._context, f"{layer.name}.{'capture_routed' if routed else 'capture'}"
        bound = context.step_tokens
        problem = _problem(layer, tokens)
        facts = {"tokens": tokens, "max_tokens": bound, "dtype": dtype_name(layer.dtype)}
        context.agreement.same(what, facts, None if problem is None else ConfigError(f"{what}: {problem}"))
        recorder = next((made for made in context.recorders if made.here), None)
        if recorder is None:
            recorder = Recorder(layer.device, context.workspaces)
            context.recorders.append(recorder)
        # tensors of inference mode could not be written outside of it
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(layer.device.type, enabled=False):
            made = self._record_all(layer, sorted(set(tokens), reverse=True), routed, recorder, what)
        if self._places is not None and not self._places.kept():
            self.drop()
        self._places = _Places(layer)
        self._calls |= {(len(call.x), bound, routed): call for call in made}

    def _record_all(
        self, layer: Layer, counts: Sequence[int], routed: bool, recorder: Recorder, what: str
    ) -> list[_Call]:
        """The largest first, whose memory the others then find."""
        inputs = [_inputs(layer, count, routed) for count in counts]
        made, problem, ledger = [], None, self._context.ledger
        with layer.placement.no_stats():
            for given in inputs:  # together with the peers; recording is each rank's own
                recorder.warm(partial(layer.run, *given))
            before = ledger.newest
            try:
                made = [_record(layer, *given, recorder) for given in inputs]
            except Exception as error:  # whatever a router or shared experts of the user's raise
                problem = ConfigError(
                    f"the call could not be captured, {type(error).__name__}: {error}; a router or shared experts that "
                    f"wait for the device cannot be"
                )
                self._context.recorders.remove(recorder)  # its memory may still belong to the capture that failed
                for lane in _lanes(layer):  # one that failed may have left its own taken, where the peers' are free
                    lane.release(layer.device)
            ledger.leave_at(before)  # no step that peers make too
        self._context.agreement.healthy(what, problem)
        return made


def _inputs(layer: Layer, tokens: int, routed: bool) -> tuple[Tensor, Routing | None]:
    """What replays read: zeros, and picks of none."""
    device = layer.device
    x = torch.zeros(tokens, layer.config.hidden_size, dtype=layer.dtype, device=device)
    if not routed:
        return x, None
    ids = torch.full((tokens, layer.config.top_k), -1, dtype=torch.int64, device=device)
    return x, Routing(LogicalIds(ids), torch.zeros(ids.shape, dtype=torch.float32, device=device))


def _record(layer: Layer, x: Tensor, routing: Routing | None, recorder: Recorder) -> _Call:
    ledger, before = layer.context.ledger, layer.context.ledger.number
    replay, out = recorder.record(partial(layer.run, x, routing))
    lanes = _lanes(layer)
    last = ledger.newest
    words = _words([x] if routing is None else [x, routing.ids, routing.weights])
    return _Call(x, routing, words, recorder, replay, out, lanes[0] if lanes else None, last.number - before, last[1:])


def _words(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory in one dtype, so that one launch copies into all of it."""
    whole = all(tensor.shape[1] * tensor.itemsize % 4 == 0 for tensor in tensors)
    return [tensor.view(torch.int32) for tensor in tensors] if whole else []


def _lanes(layer: Layer) -> list[Lane]:
    lanes = getattr(layer.dispatcher, "lanes", None)
    return lanes.made if isinstance(lanes, Lanes) else []


def _problem(layer: Layer, tokens: Sequence[int]) -> str | None:
    """Why these calls cannot be captured, as far as this rank sees."""
    context, bound, kernel = layer.context, layer.context.step_tokens, layer.kernel
    most = "" if bound is None else f" and at most {bound} (the bound in force)"
    if not (isinstance(tokens, Sequence) and tokens and all(_fits(count, bound) for count in tokens)):
        return f"tokens must be a list of integers of at least 0{most}, got {tokens!r}"
    if (why := Recorder.why_not(layer.device)) is not None:
        return why
    if capturing(layer.device):
        return "a capture is under way on this stream, which records the layer's kernels as they are; call it before"
    if isinstance(kernel, FusedExperts):
        return f"experts={kernel.name} puts its rounds in order on the host, which a replay passes by; {_INSTEAD}"
    transport = layer.dispatcher
    for field, part in (("all2all", transport), ("experts", kernel)):
        if not part.capabilities.cuda_graph:
            return f"{field}={part.name} cannot be captured in a CUDA graph; choose another (docs/backends.md)"
    if transport.link.size > 1 and not isinstance(getattr(transport, "lanes", None), Lanes):
        return f"all2all={transport.name} puts its calls in order on a stream that a replay passes by; {_INSTEAD}"
    if context.tokens.checks_input:
        return (
            f"in this layout ({context.layout}) all ranks exchange their numbers of tokens before each call, which a "
            f"replay passes by; use ParallelConfig(tokens=Tokens.SHARDED, etp=1), or {_INSTEAD}"
        )
    parts = transport.geometry.max_tokens
    if bound is not None and parts is not None and bound > parts:
        return f"calls under the bound in force travel in parts (pipeline={parts}); call it within at_most({parts})"
    if context.stage_times is not None:
        return "stage_times must be None: events of a graph have no times"
    if any(lane.busy for lane in _lanes(layer)):
        return f"a call of all2all={transport.name} is under way; finish it first"
    return None


def _fits(count: object, bound: int | None) -> bool:
    return type(count) is int and 0 <= count <= (count if bound is None else bound)


_INSTEAD = "choose another, or capture the model around the layer with torch.cuda.graph"
