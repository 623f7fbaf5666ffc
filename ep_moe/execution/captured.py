"""Calls of a layer as CUDA graphs: to the host an eager call is then one launch and two copies, instead of a
thousand calls of Python and half a dozen launches. A call with fewer tokens than were recorded is one too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.execution.graph_inputs import InputMemory, Inputs
from ep_moe.execution.recorder import Recorder
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.parallel.flight_recorder import Step
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.devices import on_device_of
from ep_moe.types import Routing, TokenMask, capturing, dtype_name
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import Expert


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    config: MoEConfig
    context: EPContext
    placement: Placement
    router: Any
    shared_experts: nn.Module | None
    _modules: dict[str, nn.Module | None]

    @property
    def _kernel(self) -> Experts | FusedExperts: ...
    def _dispatcher(self) -> Dispatcher: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def run(self, x: Tensor, routing: Routing | None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class _Call:
    """inputs: what a replay reads; out [N, H]: what it writes
    lanes: the transport's workspaces, where it has some; a call in parts takes several
    steps, left: of the ledger, how many such a call makes, and what the last leaves: where, phase, detail, done
    """

    inputs: Inputs
    recorder: Recorder
    replay: Callable[[], object]
    out: Tensor
    buffer_pool: tuple[BufferSlot, ...]
    steps: int
    left: tuple[str, str, str, bool]


@dataclass
class _Calls:
    """Those of one bound, by the number of tokens they were recorded with, ascending."""

    sizes: list[int] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def serving(self, tokens: int) -> _Call | None:
        """The smallest that has room."""
        place = bisect_left(self.sizes, tokens)
        if place == len(self.sizes) or tokens < self.calls[place].inputs.least:
            return None
        return self.calls[place]

    def add(self, call: _Call) -> None:
        """In the place of one of as many tokens."""
        size = call.inputs.most
        place = bisect_left(self.sizes, size)
        same = self.sizes[place : place + 1] == [size]
        self.sizes[place : place + same], self.calls[place : place + same] = [size], [call]


class _Places:
    """Where a layer's parts and their tensors are: graphs read there, whatever takes their place."""

    def __init__(self, layer: Layer) -> None:
        # an expert's parameters lie in its layer's tensors, and their names move with the map
        modules = [module for module in layer.modules() if not isinstance(module, Expert)]
        weights = [module for module in modules if isinstance(module, ExpertWeights)]
        others = [module for module in modules if not isinstance(module, ExpertWeights)]
        self._children = [(module._modules, list(module._modules.values())) for module in others]
        self._owners: list[Any] = [tensors for module in others for tensors in (module._parameters, module._buffers)]
        self._owners += [module.stored_tensors() for module in weights]
        self._weights = [module for module in weights if module.named]
        self._sizes = list(map(len, self._owners))
        self._tensors = [(owner, name) for owner in self._owners for name, found in owner.items() if found is not None]
        self._places = self._now()

    def kept(self) -> bool:
        for children, parts in self._children:
            if list(children.values()) != parts:
                return False
        for weights in self._weights:
            weights.settle()
        return self._now() == self._places and list(map(len, self._owners)) == self._sizes

    def _now(self) -> list[int]:
        return [owner[name].data_ptr() for owner, name in self._tensors]


class CapturedCalls:
    """One layer's calls that were captured, by the bound in force and whether they bring a routing."""

    def __init__(self, context: EPContext, config: MoEConfig) -> None:
        self._context = context
        self._hidden = config.hidden_size
        self._calls: dict[tuple[int | None, bool], _Calls] = {}
        self._places: _Places | None = None

    def __len__(self) -> int:
        return sum(len(calls.sizes) for calls in self._calls.values())

    def drop(self) -> None:
        """From now on every call runs the layer."""
        self._calls.clear()

    def replay(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor | None:
        """The result of a call that a captured one serves, shaped as x; None for any other, wrong ones too.

        Each line of it is host time of an eager call."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        context = self._context
        calls = self._calls.get((context._current_limit, routing is not None))
        if calls is None:
            return None
        tokens = x.numel() // self._hidden
        call = calls.serving(tokens)
        if call is None or not call.inputs.form.fits(x, routing, tokens) or not self._may_replay(call, x):
            return None
        if mask is not None and not call.inputs.takes(mask):
            return None
        flight_recorder, stream = context.flight_recorder, call.recorder.stream
        flight_recorder.check()
        for buffer_slot in call.buffer_pool:
            if buffer_slot.stream is not stream:
                buffer_slot.follow(x.device)
                buffer_slot.stream = stream
        call.inputs.bring(x, routing, tokens, mask)
        number = flight_recorder.number
        call.replay()
        # as the call itself leaves it: peers that run theirs must find this rank neither behind nor elsewhere
        flight_recorder.leave_at(Step(number + call.steps, *call.left))
        flight_recorder.mark(x.device)
        out = call.out if tokens == call.inputs.most else call.out[:tokens]
        return (out if x.dim() == 2 else out.view(x.shape)).clone()

    def _may_replay(self, call: _Call, x: Tensor) -> bool:
        if self._places is None or not self._places.kept():
            self.drop()
            return False
        for buffer_slot in call.buffer_pool:
            if buffer_slot.busy:
                return False
        return self._context._idle and self._context._stage_times is None and call.recorder.here

    @on_device_of(lambda self, *_, **__: self._context.device)
    def capture(self, layer: Layer, tokens: Sequence[int], *, routed: bool) -> None:
        """As `MoELayer.capture`."""
        context, what = self._context, f"{layer.name}.{'capture_routed' if routed else 'capture'}"
        bound = context._current_limit
        problem = _problem(layer, tokens)
        facts = {"tokens": tokens, "max_tokens": bound, "dtype": dtype_name(layer.dtype)}
        context.consensus.same(what, facts, None if problem is None else ConfigError(f"{what}: {problem}"))
        recorder = Recorder.among(context._recorders, layer.device, context._workspaces)
        # tensors of inference mode could not be written outside of it
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(layer.device.type, enabled=False):
            inputs = _inputs(layer, sorted(set(tokens)), routed, recorder.memory)
            made = self._record_all(layer, inputs, recorder, what)
        if self._places is not None and not self._places.kept():
            self.drop()
        self._places = _Places(layer)
        calls = self._calls.setdefault((bound, routed), _Calls())
        for call in made:
            calls.add(call)

    def _record_all(self, layer: Layer, inputs: Sequence[Inputs], recorder: Recorder, what: str) -> list[_Call]:
        """The largest first, whose memory the others then find."""
        made, problem, flight_recorder = [], None, self._context.flight_recorder
        with layer.placement.no_stats():
            for given in inputs:  # together with the peers; recording is each rank's own
                given.clear()
                recorder.warm(partial(_run, layer, given))
            before = flight_recorder.newest
            try:
                made = [_record(layer, given, recorder) for given in inputs]
            except Exception as error:  # whatever a router or shared experts of the user's raise
                problem = ConfigError(
                    f"the call could not be captured, {type(error).__name__}: {error}; a router or shared experts that "
                    f"wait for the device cannot be"
                )
                self._context._recorders.remove(recorder)  # its memory may still belong to the capture that failed
                for buffer_slot in _buffer_pool(
                    layer
                ):  # one that failed may have left its own taken, where the peers' are free
                    buffer_slot.release(layer.device)
            flight_recorder.leave_at(before)  # no step that peers make too
        self._context.consensus.healthy(what, problem)
        return made


def _inputs(layer: Layer, sizes: Sequence[int], routed: bool, memory: InputMemory) -> list[Inputs]:
    """The largest first. Each serves the numbers down to the next smaller one, unless modules of the user's would see
    rows that are no tokens."""
    c, shared, found = layer.config, layer.shared_experts, []
    ours = (routed or isinstance(layer.router, Router)) and (shared is None or isinstance(shared, SharedExperts))
    for smaller, size in zip([-1, *sizes], sizes, strict=False):
        least = smaller + 1 if ours else size
        form = c.hidden_size, c.top_k, layer.dtype, layer.device
        found.append(memory.inputs(*form, least=least, most=size, routed=routed))
    return found[::-1]


def _run(layer: Layer, inputs: Inputs) -> Tensor:
    if inputs.tokens is None:
        return layer.run(inputs.x, inputs.routing)
    return layer.run(inputs.x, inputs.masked(layer.router(inputs.x)))


def _record(layer: Layer, inputs: Inputs, recorder: Recorder) -> _Call:
    flight_recorder, before = layer.context.flight_recorder, layer.context.flight_recorder.number
    replay, out = recorder.record(partial(_run, layer, inputs))
    last = flight_recorder.newest
    return _Call(inputs, recorder, replay, out, tuple(_buffer_pool(layer)), last.number - before, last[1:])


def _buffer_pool(layer: Layer) -> list[BufferSlot]:
    buffer_pool = getattr(layer._dispatcher(), "buffer_pool", None)
    return buffer_pool.made if isinstance(buffer_pool, BufferPool) else []


def _problem(layer: Layer, tokens: Sequence[int]) -> str | None:
    """Why these calls cannot be captured, as far as this rank sees."""
    context, bound, kernel = layer.context, layer.context._current_limit, layer._kernel
    most = "" if bound is None else f" and at most {bound} (the bound in force)"
    if not (isinstance(tokens, Sequence) and tokens and all(_fits(count, bound) for count in tokens)):
        return f"tokens must be a list of integers of at least 0{most}, got {tokens!r}"
    if (why := Recorder.unsupported_reason(layer.device)) is not None:
        return why
    if capturing(layer.device):
        return "a capture is under way on this stream, which records the layer's kernels as they are; call it before"
    if isinstance(kernel, FusedExperts):
        return f"experts={kernel.name} puts its rounds in order on the host, which a replay passes by; {_INSTEAD}"
    transport = layer._dispatcher()
    for asked, part in (("all2all", transport), ("experts", kernel)):
        if not part.capabilities.cuda_graph:
            return (
                f"{asked}={part.name} cannot be captured in a CUDA graph; choose another (docs/reference/backends.md)"
            )
    if transport.rank_group.size > 1 and not isinstance(getattr(transport, "buffer_pool", None), BufferPool):
        return f"all2all={transport.name} puts its calls in order on a stream that a replay passes by; {_INSTEAD}"
    if context._tokens.checks_input:
        return (
            f"in this layout ({context.layout}) all ranks exchange their numbers of tokens before each call, which a "
            f"replay passes by; use ParallelConfig(tokens=Tokens.SHARDED, etp=1), or {_INSTEAD}"
        )
    if context._stage_times is not None:
        return "stage_times must be None: events of a graph have no times"
    if any(buffer_slot.busy for buffer_slot in _buffer_pool(layer)):
        return f"a call of all2all={transport.name} is under way; finish it first"
    return None


def _fits(count: object, bound: int | None) -> bool:
    return type(count) is int and 0 <= count <= (count if bound is None else bound)


_INSTEAD = "choose another, or capture the model around the layer with torch.cuda.graph"
