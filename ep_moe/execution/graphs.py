"""The cache of a layer's CUDA graphs. A replay costs the host a check of the arguments and one launch, instead of a
thousand Python calls and half a dozen launches.

- `MoELayer.capture` records calls for numbers of tokens that the user lists. Their inputs are copied (`CopiedInputs`).
- Over a transport with recordable launches, an eager call is recorded automatically on the second identical call. The
  graph reads the caller's tensors (`CallerInputs`).
- All other calls run `MoELayer.run`, which has its own graphs for calls with gradients (`trained_graphs`).
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.dispatch_shape import whole_bound
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.execution.cuda_graph import Recorder
from ep_moe.execution.graph_inputs import Inputs
from ep_moe.execution.recorded_calls import (
    CallerInputs,
    CopiedInputs,
    Layer,
    LayerAddresses,
    RecordedCall,
    capture_problem,
    inputs_of,
    record_caller,
    record_copied,
    run_copied,
    runs_behind,
    slots_of,
)
from ep_moe.execution.trained_graphs import TrainedGraphs
from ep_moe.experts.base import Experts
from ep_moe.parallel.heartbeats import Step
from ep_moe.placement.deferred import NO_ID, Placing
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.router import Router
from ep_moe.runtime.devices import current_stream, on_device_of
from ep_moe.types import Routing, TokenMask, capturing, dtype_name

_log = logging.getLogger("ep_moe.execution")

_AUTOMATIC = 64  # the most keys of automatic graphs that are kept
_TRIES = 3  # attempts to record an automatic graph: an allocation by another thread makes one fail


@dataclass
class Sizes:
    """Graphs that differ only in the number of tokens with which they were recorded. sizes: these numbers, ascending"""

    sizes: list[int] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)

    def serving(self, tokens: int) -> RecordedCall | None:
        """Return the smallest graph that has room for the tokens, None if no graph serves them."""
        place = bisect_left(self.sizes, tokens)
        if place == len(self.sizes) or tokens < self.calls[place].least:
            return None
        return self.calls[place]

    def add(self, call: RecordedCall) -> None:
        """Add a graph. It replaces one with the same number of tokens."""
        place = bisect_left(self.sizes, call.most)
        same = self.sizes[place : place + 1] == [call.most]
        self.sizes[place : place + same], self.calls[place : place + same] = [call.most], [call]


class BoundAgreement(NamedTuple):
    """The agreement of ranks on the bound of a call before its replay, over buffers that grow.

    The bound selects the graph. Without `max_tokens` the ranks agree on it in each call.

    reference_call: a graph that was recorded under any bound. A call whose arguments it fits may have a graph
    call_facts: the result of `MoELayer._call_facts` under `expert_map`
    """

    reference_call: RecordedCall
    dispatcher: Dispatcher
    expert_map: ExpertMap
    call_facts: str

    def bound(self, layer: Layer, x: Tensor, tokens: int) -> tuple[int, bool]:
        """Return the bound of this call, and whether the addresses of `reference_call` are unchanged.

        Ranks that do not replay find the bound by the same exchange in `MoELayer.run`. The addresses are checked while
        this rank waits for the peers' numbers.
        """
        rank_group = self.dispatcher.rank_group
        rank_group.flight_recorder.begin_call(layer.name, self.call_facts)
        try:
            gradients = {"x": x, "routing.weights": x}
            most = rank_group.begin_most_tokens(tokens, None, x.device, self.dispatcher.name, gradients=gradients)
            unchanged = self.reference_call.addresses.unchanged(layer)
            return whole_bound(most()), unchanged
        finally:
            rank_group.flight_recorder.call_name = ""


class CallGraphs:
    """The CUDA graphs of one layer's calls, by key.

    Keys are (`CopiedInputs`, token limit, whether a routing is passed) and (`CallerInputs`, bound of the call, result
    of `_ids`, stream).
    """

    def __init__(self, context: EPContext, config: MoEConfig, kernels: Sequence[Any]) -> None:
        self._context, self._hidden = context, config.hidden_size
        recordable = all(isinstance(kernel, Experts) and kernel.capabilities.cuda_graph for kernel in kernels)
        self._automatic = recordable and context._token_flow.is_pass_through and not config.routing.weight_on_input
        self._calls: dict[Any, Sizes | None] = {}  # None: one call had this key, and no graph is recorded for it yet
        # for buffers that grow, by the key without mode and bound
        self._bound_agreements: dict[Any, BoundAgreement] = {}
        self._tries = _TRIES
        self.trained = TrainedGraphs(context)

    def __len__(self) -> int:
        return self.count(RecordedCall)

    def count(self, mode: type[RecordedCall]) -> int:
        """Return the number of graphs of one mode."""
        return sum(isinstance(call, mode) for calls in self._calls.values() if calls for call in calls.calls)

    def drop(self, mode: type[RecordedCall] = RecordedCall) -> None:
        """Drop the graphs of one mode, by default all. Calls then run eagerly until graphs are recorded again."""
        if mode is not CopiedInputs:
            self._bound_agreements.clear()
        if mode is RecordedCall:
            self._calls.clear()
            self.trained.drop()
        for key in [key for key in self._calls if key[0] is mode]:
            del self._calls[key]

    def replay(self, layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor | None:
        """Replay a call and return its result, shaped as x. Return None if no graph serves it, or if it is invalid.

        Every call without gradients runs this code, so each line costs host time.
        """
        if torch.compiler.is_compiling() or not self._calls or torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        modules: Any = layer._modules  # faster than attributes of a Module
        placement = modules["placement"]
        placed, held = placement.expert_map, modules["expert_weights"].expert_map
        if layer._checks.due or (placed is not held and placed != held):  # an eager call raises the error
            return None
        context, device, routed = self._context, x.device, routing is not None
        bound, stream, tokens = context._current_limit, current_stream(device), x.numel() // self._hidden
        stages = context._stage_times
        for mode in (CopiedInputs, CallerInputs):
            copied = mode is CopiedInputs
            key = (mode, bound, routed) if copied else (mode, bound, _ids(layer, routing, mask), stream)
            found, agreement = self._calls.get(key), None
            call = None if found is None else found.serving(tokens)
            if bound is None and not copied and (agreement := self._bound_agreements.get(key[2:])) is not None:
                call = agreement.reference_call
            if call is None or not call.signature.fits(x, routing, tokens):
                continue
            busy = call.stream != stream or not context._idle or capturing(device)
            busy = busy or (stages is not None and stages.timed)
            gone = False
            for buffer_slot in call.buffer_slots:
                busy, gone = busy or buffer_slot.busy, gone or buffer_slot.is_freed
            if busy or placement.invalid_ids.word.value != NO_ID:
                continue
            if agreement is None or gone:
                unchanged = not gone and call.addresses.unchanged(layer)
            else:
                if agreement.expert_map is not placed:
                    agreement = agreement._replace(expert_map=placed, call_facts=layer._call_facts())
                    self._bound_agreements[key[2:]] = agreement
                bound, unchanged = agreement.bound(layer, x, tokens)
            if not unchanged:
                self.drop(mode)
                continue
            if agreement is not None:
                found = self._calls.get((mode, bound, *key[2:]))
                if found is None:
                    continue
                call = found.calls[0]
                if call is not agreement.reference_call:  # its addresses were not checked yet
                    if any(slot.is_freed for slot in call.buffer_slots) or not call.addresses.unchanged(layer):
                        self.drop(mode)
                        continue
                    # the next call usually has the same bound
                    self._bound_agreements[key[2:]] = agreement._replace(reference_call=call)
            flight_recorder = context.flight_recorder
            flight_recorder.check()
            number = flight_recorder.number
            if stages is None:
                out = call.launch(layer, x, routing, mask, tokens)
            else:
                with stages.span("replay", layer.name):
                    out = call.launch(layer, x, routing, mask, tokens)
            if out is None:
                continue
            # record the same last step as `MoELayer.run` does: peers that run eagerly compare steps with this rank
            flight_recorder.set_newest_step(Step(number + call.steps, *call.last_step))
            flight_recorder.device_watch.mark(device)
            return call.result(layer, x, tokens, out)
        if context._current_limit is None:
            context._agreed_limit = bound  # saves the eager call, which follows, another exchange
        return None

    # --- graphs that the user asks for --------------------------------------------------------------------------------

    @on_device_of(lambda self, *_, **__: self._context.device)
    def capture(self, layer: Layer, tokens: Sequence[int], *, routed: bool) -> None:
        """Record the calls of `MoELayer.capture` or `capture_routed`."""
        context, what = self._context, f"{layer.name}.{'capture_routed' if routed else 'capture'}"
        bound = context._current_limit
        problem = capture_problem(layer, tokens, Recorder.unsupported_reason(layer.device))
        facts = {"tokens": tokens, "max_tokens": bound, "dtype": dtype_name(layer.dtype)}
        context.consensus.require_equal(what, facts, None if problem is None else ConfigError(f"{what}: {problem}"))
        recorder = Recorder.for_current_stream(context._recorders, layer.device, context._workspaces)
        # tensors made in inference mode could not be written outside of it
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(layer.device.type, enabled=False):
            inputs = inputs_of(layer, sorted(set(tokens)), routed, recorder.memory)
            made = self._record_all(layer, inputs, recorder, what)
        earlier = [calls.calls[0] for key, calls in self._calls.items() if key[0] is CopiedInputs and calls is not None]
        if not all(call.addresses.unchanged(layer) for call in earlier):
            self.drop(CopiedInputs)
        key = (CopiedInputs, bound, routed)
        calls = self._calls[key] = self._calls.get(key) or Sizes()
        for call in made:
            calls.add(call)
        if context.layout.rank == 0:
            _log.info("%s: recorded CUDA graphs for %s tokens", what, ", ".join(map(str, sorted(set(tokens)))))

    def _record_all(self, layer: Layer, inputs: Sequence[Inputs], recorder: Recorder, what: str) -> list[CopiedInputs]:
        """Record one graph per inputs. The largest comes first, so that the others reuse its memory."""
        made, problem, flight_recorder = [], None, self._context.flight_recorder
        with layer.placement.no_stats():
            for given in inputs:  # these warm-up calls exchange with the peers; recording does not
                given.clear()
                recorder.warm(partial(run_copied, layer, given))
            before, addresses = flight_recorder.newest, LayerAddresses(layer)
            try:
                made = [record_copied(layer, given, recorder, addresses) for given in inputs]
            except Exception as error:  # a user's router or shared experts may raise anything
                problem = ConfigError(
                    f"the call could not be captured, {type(error).__name__}: {error}; a router or shared experts that "
                    f"wait for the device cannot be"
                )
                self._context._recorders.remove(recorder)  # its memory may still belong to the capture that failed
                for buffer_slot in slots_of(layer):  # a failed capture may have left a slot busy that is free on peers
                    buffer_slot.release(layer.device)
            flight_recorder.set_newest_step(before)  # recording is no step that the peers make too
        self._context.consensus.raise_on_all_ranks(what, problem)
        return made

    # --- automatic ----------------------------------------------------------------------------------------------------

    def record_if_repeated(self, layer: Layer, routing: Routing | None, mask: TokenMask | None) -> None:
        """Record an eager call, after `MoELayer.run`, if an earlier call had the same key. Later calls replay it.

        The first call with a key only notes the key.
        """
        bound, device = self._context._current_limit, self._context.device
        if torch.compiler.is_compiling() or not self._automatic:
            return
        if layer.exact and not layer._dispatcher().dispatch_shape.per_route:  # `ExactExchange` has further launches
            return
        if bound is None and (bound := layer._dispatcher().newest_bound) is None:
            return
        if routing is None and type(layer.router) is not Router:
            return
        if Recorder.unsupported_reason(device) is not None or capturing(device):
            return
        if not layer.expert_weights.addresses:  # sharded parameters are gathered in each call, at changing addresses
            return
        key = (CallerInputs, bound, _ids(layer, routing, mask), current_stream(device))
        calls, placing = self._calls.get(key), layer.placement.tables.placing
        if calls is not None and calls.calls[0].placing == placing:  # type: ignore[attr-defined]  # by its key
            return  # the key has a graph; only this call could not be replayed
        if key in self._calls:
            call = self._recorded(layer, key[2], bound, placing)
            self._calls[key] = None if call is None else Sizes([call.most], [call])
            if call is not None and self._context.layout.rank == 0:
                _log.info("%s: calls of at most %d tokens are replayed as a CUDA graph from now on", layer.name, bound)
            if call is not None and self._context._current_limit is None:
                expert_map, facts = layer.placement.expert_map, layer._call_facts()
                self._bound_agreements[key[2:]] = BoundAgreement(call, layer._dispatcher(), expert_map, facts)
            return
        self._make_room()
        self._calls[key] = None

    def _make_room(self) -> None:
        """Delete keys if there are too many: those without a graph, so that bounds that occur once do not evict graphs.
        If all have graphs, delete all."""
        noted = {key: calls for key, calls in self._calls.items() if key[0] is CallerInputs}
        if len(noted) >= _AUTOMATIC:
            for key in [key for key, calls in noted.items() if calls is None] or noted:
                del self._calls[key]

    def _recorded(self, layer: Layer, ids: torch.dtype | None, bound: int, placing: Placing) -> CallerInputs | None:
        call, shared = layer._dispatcher().recordable_call(bound), layer.shared_experts
        if call is None or not (shared is None or runs_behind(shared, call.latency_bound)):
            return None
        recorder = Recorder.for_current_stream(self._context._recorders, layer.device, self._context._workspaces)
        try:
            with torch.inference_mode(False), torch.no_grad():
                return record_caller(layer, call, bound, ids, placing, recorder)
        except (BackendUnavailable, RuntimeError, ImportError) as error:
            self._tries -= 1
            if self._tries == 0:
                self._automatic = False
                text = f"calls of {layer.name} cannot be recorded as CUDA graphs, and take more host time: {error}"
                warnings.warn(text, stacklevel=2)
            return None


def _ids(layer: Layer, routing: Routing | None, mask: TokenMask | None) -> Any:
    """Return the dtype of the ids that a call passes to the graph; None if the graph contains the layer's router.

    With a mask, or with hooks on the router, the router runs before the graph and passes int64 ids.
    """
    if routing is None:
        router = layer.router
        return None if mask is None and type(router) is Router and not router.hooked else torch.int64
    return getattr(getattr(routing, "ids", None), "dtype", None)
