"""Automatic CUDA graphs: eager calls that are recorded, and replayed for later calls like them. To the host a replay is
a look at its arguments and one launch: nothing is made, chosen or placed anew.

A layer's call can be replayed where it is no more than the launches of a transport (`Dispatcher.again`) and of experts,
which are then one graph (`CallGraph`): rows in one part over fixed buffers, each rank's tokens its own, no gradients.
Shared experts are called behind it where few rows travel; where many do, they are computed beside them, which is the
layer's own. Of every other call `MoELayer.run` is the whole story, and so of the first ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.buffer_slots import BufferSlot, RecordableCall
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import BackendUnavailable
from ep_moe.execution.cuda_graph import CallGraph
from ep_moe.execution.graph_inputs import CallSignature
from ep_moe.execution.recorder import Recorder
from ep_moe.experts.base import Experts
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.parallel.flight_recorder import Step
from ep_moe.placement.deferred import DeferredRouting, Placing, to_place
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.devices import current_stream
from ep_moe.types import PhysicalRouting, Routing, TokenMask, capturing
from ep_moe.weights.expert_weights import ExpertWeights

_STEPS = 2  # of the ledger: dispatch and combine
_CALLS = 64  # that are kept at once
_TRIES = 3  # to record one: another thread may have been given memory meanwhile


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    placement: Placement
    expert_weights: ExpertWeights
    router: Any
    shared_experts: Any

    @property
    def _kernel(self) -> Any: ...
    def _dispatcher(self) -> Dispatcher: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, eq=False)
class _Call:
    """form: of its arguments; few: as `RecordableCall` has it; placing: what `to_place` says of its ids; weights: where
    they are
    left: of the ledger, what its last step leaves"""

    form: CallSignature
    graph: CallGraph
    buffer_slot: BufferSlot
    few: bool
    placing: Placing
    weights: tuple[int, ...]
    left: tuple[str, str, str, bool]


class AutomaticGraphs:
    """One layer's, by the bound in force, the dtype of ids, and the stream."""

    def __init__(self, context: EPContext, config: MoEConfig, kernels: Sequence[Any]) -> None:
        self._context, self._config = context, config
        recordable = all(isinstance(kernel, Experts) and kernel.capabilities.cuda_graph for kernel in kernels)
        self._able = recordable and context._tokens.whole and not config.routing.weight_on_input
        self._calls: dict[Any, _Call | None] = {}  # None: of what was seen, and is not recorded
        self._tries = _TRIES

    def __len__(self) -> int:
        return sum(call is not None for call in self._calls.values())

    def drop(self) -> None:
        """From now on calls run the layer, until they are noted again."""
        self._calls.clear()

    def run(self, layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor | None:
        """The result of a call like one that was noted; None for any other, wrong ones too.

        Each line of it is host time of an eager call."""
        if torch.compiler.is_compiling() or not self._calls or torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        context, device = self._context, x.device
        bound, stream = context._current_limit, current_stream(device)
        call = self._calls.get((bound, _ids_dtype(routing), stream))
        if call is None or bound is None:
            return None
        form, buffer_slot, shared = call.form, call.buffer_slot, layer.shared_experts
        tokens = x.numel() // form.hidden
        if tokens > bound or not form.fits(x, routing, tokens) or not x.is_contiguous():
            return None
        layer.expert_weights.settle()
        if layer.expert_weights.place != call.weights:
            self.drop()
            return None
        if (
            buffer_slot.busy
            or not buffer_slot.on(stream)
            or not context._idle
            or context._stage_times is not None
            or not (shared is None or _behind(shared, call.few))
            or torch.autograd._profiler_enabled()
            or capturing(device)
        ):
            return None
        if routing is None:
            if type(layer.router) is not Router:
                return None
            routing = layer.router(x.view(tokens, form.hidden))
        first = _first(x, layer.placement(routing, mask), tokens, call.placing)
        if first is None:
            return None
        flight_recorder = context.flight_recorder
        flight_recorder.check()
        number, out = flight_recorder.number, torch.empty_like(x)
        call.graph(first, (out.data_ptr(), tokens), stream)
        # as `MoELayer.run` leaves it, which peers may be in
        flight_recorder.leave_at(Step(number + _STEPS, *call.left))
        flight_recorder.mark(device)
        return out if shared is None else out + shared(x.view(tokens, form.hidden)).view(x.shape)

    def note(self, layer: Layer, routing: Routing | None) -> None:
        """After a call of `MoELayer.run`: the second one like it is recorded, and later ones are replayed."""
        bound, device = self._context._current_limit, self._context.device
        if torch.compiler.is_compiling() or not self._able or bound is None:
            return
        if routing is None and type(layer.router) is not Router:
            return
        if Recorder.unsupported_reason(device) is not None or capturing(device):
            return
        if not layer.expert_weights.place:  # sharded parameters are gathered anew for each call
            return
        key = (bound, _ids_dtype(routing), current_stream(device))
        call, placing = self._calls.get(key), layer.placement.tables.placing
        if call is not None and call.placing == placing:
            return  # this one alone was not like it
        if key in self._calls:
            self._calls[key] = self._recorded(layer, key[1], bound, placing)
            return
        if len(self._calls) == _CALLS:  # bounds that come once are to leave what was recorded alone
            for once in [key for key, call in self._calls.items() if call is None]:
                del self._calls[once]
            if len(self._calls) == _CALLS:
                self._calls.clear()
        self._calls[key] = None

    def _recorded(self, layer: Layer, ids: torch.dtype, bound: int, placing: Placing) -> _Call | None:
        context, c = self._context, self._config
        again, shared = layer._dispatcher().again(bound), layer.shared_experts
        if again is None or not (shared is None or _behind(shared, again.few)):
            return None
        form = CallSignature(c.hidden_size, c.top_k, layer.dtype, layer.device)
        recorder = Recorder.among(context._recorders, form.device, context._workspaces)
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph = _graph(layer, again, form, ids, recorder)
        except (BackendUnavailable, RuntimeError, ImportError) as error:
            self._tries -= 1
            if self._tries == 0:
                self._able = False
                text = f"calls of {layer.name} take the host longer than they could, they cannot be recorded: {error}"
                warnings.warn(text, stacklevel=2)
            return None
        left = (layer.name, "combine", layer._dispatcher().name, True)
        return _Call(form, graph, again.buffer_slot, again.few, placing, layer.expert_weights.place, left)


def _behind(shared: Any, few: bool) -> bool:
    """Whether shared experts may be called behind a call. Others than ours may talk to other ranks, in their order."""
    return few and type(shared) is SharedExperts


def _graph(layer: Layer, again: RecordableCall, form: CallSignature, ids: torch.dtype, recorder: Recorder) -> CallGraph:
    """Of a call's launches. Nothing is computed, whatever the rows."""
    x = torch.empty(1, form.hidden, dtype=form.dtype, device=form.device)
    chosen = torch.empty(1, form.top_k, dtype=ids, device=form.device)
    routing = DeferredRouting(chosen, torch.empty(chosen.shape, device=form.device), layer.placement.tables)
    out, kernel, received = torch.empty_like(x), layer._kernel, again.received
    to_peers = kernel.capabilities.peer_out and received.peer_out is not None

    def launch() -> None:
        again.send(x, routing)
        again.receive(kernel(received, received.peer_out if to_peers else received.out), out)

    first = _first(x, routing, 1, routing.tables.placing)
    assert first is not None, "what is made begins at multiples of 16 bytes"
    return recorder.graph_of(launch, first, (out.data_ptr(), 1))


def _ids_dtype(routing: Routing | None) -> Any:
    """A router of ours chooses in int64."""
    return torch.int64 if routing is None else getattr(getattr(routing, "ids", None), "dtype", None)


def _first(x: Tensor, routing: PhysicalRouting, tokens: int, placing: Placing) -> list[int] | None:
    """What a call's first kernel begins with; None where it was compiled for another kind."""
    ids, tables, found = to_place(routing)
    weights = routing.weights
    if found != placing or not (ids.is_contiguous() and weights.is_contiguous()):
        return None
    given, bits = [tensor.data_ptr() for tensor in (x, ids, weights, *tables)], 0  # type: ignore[union-attr]
    for address in given:
        bits |= address
    return None if bits % 16 else [*given, tokens]
