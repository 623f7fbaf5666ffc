"""A layer's call as a CUDA graph, in one of two modes.

- `CopiedInputs`: a replay copies the inputs into fixed buffers. It also serves calls with fewer tokens than were
  recorded.
- `CallerInputs`: the graph's kernels get the addresses of the caller's tensors. Nothing is copied.

`CallGraphs` (`ep_moe.execution.graphs`) keeps the graphs and chooses one for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot, RecordableCall
from ep_moe.checks import shown
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.execution.cuda_graph import CallGraph, Given, Recorder
from ep_moe.execution.graph_inputs import CallSignature, InputMemory, Inputs
from ep_moe.execution.layer_checks import RankChecks
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.placement.deferred import DeferredRouting, Placing, placement_arguments
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.router.kernels import most_rows
from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.types import PhysicalRouting, Routing, TokenMask, capturing
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import Expert

_STEPS = 2  # steps of the flight recorder in a call in one part: dispatch and combine
_INSTEAD = "choose another, or capture the model around the layer with torch.cuda.graph"


class Layer(Protocol):
    """The part of a MoELayer that graphs use."""

    name: str
    exact: bool
    config: MoEConfig
    context: EPContext
    placement: Placement
    expert_weights: ExpertWeights
    router: Any
    shared_experts: Any
    _checks: RankChecks
    _modules: dict[str, nn.Module | None]

    @property
    def _kernel(self) -> Experts | FusedExperts: ...
    def _dispatcher(self) -> Dispatcher: ...
    def _call_facts(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def run(self, x: Tensor, routing: Routing | None) -> Tensor: ...


class TensorAddresses(Protocol):
    """The addresses of the tensors, other than its inputs, that a graph reads."""

    def unchanged(self, layer: Layer) -> bool:
        """Return whether the layer's tensors are still at these addresses."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedCall:
    """A graph and the calls that it serves. One replay is `launch`, then `result`.

    signature: of the arguments; least, most: the range of tokens; stream: the handle of the stream that it replays on
    buffer_slots: the transport's buffer slots that the graph uses
    steps: how many steps a call adds to the flight recorder
    last_step: the last of them, as (where, phase, detail, done)
    """

    signature: CallSignature
    least: int
    most: int
    stream: int
    addresses: TensorAddresses
    buffer_slots: tuple[BufferSlot, ...]
    steps: int
    last_step: tuple[str, str, str, bool]

    def launch(
        self, layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None, tokens: int
    ) -> Tensor | None:
        """Launch a replay and return its output. Launch nothing and return None if the graph cannot serve the call."""
        raise NotImplementedError

    def result(self, layer: Layer, x: Tensor, tokens: int, out: Tensor) -> Tensor:
        """Return the call's result, shaped as x. out: the output of `launch`"""
        raise NotImplementedError


# --- copied into fixed buffers ----------------------------------------------------------------------------------------


class LayerAddresses:
    """The addresses of a layer's tensors, and the identity of its modules.

    A graph keeps reading these addresses after a tensor or module was replaced, so it is replayed only if all are
    unchanged.
    """

    def __init__(self, layer: Layer) -> None:
        # skips `Expert` modules: their parameters are views of the layer's tensors, and their names change with the map
        modules = [module for module in layer.modules() if not isinstance(module, Expert)]
        weights = [module for module in modules if isinstance(module, ExpertWeights)]
        others = [module for module in modules if not isinstance(module, ExpertWeights)]
        self._children = [(module._modules, list(module._modules.values())) for module in others]
        self._owners: list[Any] = [tensors for module in others for tensors in (module._parameters, module._buffers)]
        self._owners += [module.stored_tensors() for module in weights]
        self._weights = [module for module in weights if module.has_expert_parameters]
        self._sizes = list(map(len, self._owners))
        self._tensors = [(owner, name) for owner in self._owners for name, found in owner.items() if found is not None]
        self._addresses = self._now()

    def unchanged(self, layer: Layer) -> bool:
        for children, parts in self._children:
            if list(children.values()) != parts:
                return False
        for weights in self._weights:
            if weights.sharded:
                return False
            if not weights.slots_are_current:
                weights.refresh_slots()
        return self._now() == self._addresses and list(map(len, self._owners)) == self._sizes

    def _now(self) -> list[int]:
        return [owner[name].data_ptr() for owner, name in self._tensors]


@dataclass(frozen=True, eq=False, kw_only=True)
class CopiedInputs(RecordedCall):
    """A graph that reads `inputs` and writes `out` [most, H], which all replays share."""

    inputs: Inputs
    recorder: Recorder
    replay: Callable[[], object]
    out: Tensor

    def launch(
        self, layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None, tokens: int
    ) -> Tensor | None:
        if mask is not None and not self.inputs.takes(mask):
            return None
        for buffer_slot in self.buffer_slots:
            if buffer_slot.stream is not self.recorder.stream:
                buffer_slot.wait_for_last_call(x.device)
                buffer_slot.stream = self.recorder.stream
        self.inputs.copy_arguments(x, routing, tokens, mask)
        self.replay()
        return self.out

    def result(self, layer: Layer, x: Tensor, tokens: int, out: Tensor) -> Tensor:
        if tokens != self.most:
            out = out[:tokens]
        return (out if x.dim() == 2 else out.view(x.shape)).clone()


def inputs_of(layer: Layer, sizes: Sequence[int], routed: bool, memory: InputMemory) -> list[Inputs]:
    """Return the inputs of the graphs to record, the largest first.

    Each graph serves all numbers of tokens above the next smaller size. With a user's router or shared experts it
    serves only its own size: these modules must not see rows that are no tokens.
    """
    c, shared, found = layer.config, layer.shared_experts, []
    ours = (routed or isinstance(layer.router, Router)) and (shared is None or isinstance(shared, SharedExperts))
    for smaller, size in zip([-1, *sizes], sizes, strict=False):
        least = smaller + 1 if ours else size
        signature = c.hidden_size, c.top_k, layer.dtype, layer.device
        found.append(memory.inputs(*signature, least=least, most=size, routed=routed))
    return found[::-1]


def run_copied(layer: Layer, inputs: Inputs) -> Tensor:
    """Run the call that is recorded."""
    if inputs.tokens is None:
        return layer.run(inputs.x, inputs.routing)
    return layer.run(inputs.x, inputs.masked(layer.router(inputs.x)))


def record_copied(layer: Layer, inputs: Inputs, recorder: Recorder, addresses: LayerAddresses) -> CopiedInputs:
    flight_recorder, before = layer.context.flight_recorder, layer.context.flight_recorder.number
    replay, out = recorder.record(partial(run_copied, layer, inputs))
    last = flight_recorder.newest
    return CopiedInputs(
        signature=inputs.signature, least=inputs.least, most=inputs.most, stream=recorder.handle,
        buffer_slots=tuple(slots_of(layer)), steps=last.number - before, last_step=last[1:],
        inputs=inputs, recorder=recorder, replay=replay, out=out, addresses=addresses,
    )  # fmt: skip


def slots_of(layer: Layer) -> list[BufferSlot]:
    buffer_pool = getattr(layer._dispatcher(), "buffer_pool", None)
    return buffer_pool.buffer_slots if isinstance(buffer_pool, BufferPool) else []


def capture_problem(layer: Layer, tokens: Sequence[int], no_graphs: str | None) -> str | None:
    """Return None, or why this rank cannot capture these calls. no_graphs: from `Recorder.unsupported_reason`"""
    context, bound, kernel = layer.context, layer.context._current_limit, layer._kernel
    most = "" if bound is None else f" and at most {bound} (the token limit)"
    if not (isinstance(tokens, Sequence) and tokens and all(_fits(count, bound) for count in tokens)):
        return f"tokens must be a list of integers of at least 0{most}, got {shown(tokens)}"
    if no_graphs is not None:
        return no_graphs
    if capturing(layer.device):
        return (
            "this stream is being captured, and the capture records the layer's kernels already; call capture before it"
        )
    if isinstance(kernel, FusedExperts):
        return f"experts={kernel.name} orders its rounds on the host, which a replay skips; {_INSTEAD}"
    if layer.expert_weights.sharded:
        return (
            "fully_shard has sharded its expert parameters, which each call gathers; keep the experts whole with "
            "ep_moe.training.fully_shard(..., shard_experts=False)"
        )
    transport = layer._dispatcher()
    for asked, part in (("all2all", transport), ("experts", kernel)):
        if not part.capabilities.cuda_graph:
            return (
                f"{asked}={part.name} cannot be captured in a CUDA graph; choose another (docs/reference/backends.md)"
            )
    if transport.grows:
        return (
            f"all2all={transport.name} has buffers that grow with the calls, and a replay has one size; set the "
            "token limit with EPContext.from_torchrun(max_tokens=...)"
        )
    if transport.rank_group.size > 1 and not isinstance(getattr(transport, "buffer_pool", None), BufferPool):
        return f"all2all={transport.name} orders its calls on a stream that a replay does not use; {_INSTEAD}"
    if context._token_flow.checks_input:
        return (
            f"in this layout ({context.layout}) all ranks exchange their token counts before each call, which a "
            f"replay skips; use ParallelConfig(tokens=Tokens.SHARDED, etp=1), or {_INSTEAD}"
        )
    if context._stage_times is not None and context._stage_times.timed:
        return "metrics.stages is active, and events in a CUDA graph have no times; leave it first"
    if any(buffer_slot.busy for buffer_slot in slots_of(layer)):
        return f"a call of all2all={transport.name} is not finished; finish it first"
    return None


def _fits(count: object, bound: int | None) -> bool:
    return type(count) is int and 0 <= count <= (count if bound is None else bound)


# --- the caller's own tensors -----------------------------------------------------------------------------------------


class WeightAddresses:
    """The addresses of a layer's expert weights, and of its router's tensors if the graph contains the router.

    own: whether it does
    """

    def __init__(self, layer: Layer, own: bool) -> None:
        self._addresses, self._own = layer.expert_weights.addresses, own
        self._router = _addresses_of(layer.router) if own else []

    def unchanged(self, layer: Layer) -> bool:
        router = layer.router
        weights = cast("ExpertWeights", layer._modules["expert_weights"])  # faster than nn.Module.__getattr__
        if self._own and (type(router) is not Router or _addresses_of(router) != self._router):
            return False
        return (weights.addresses if weights.slots_are_current else weights.refresh_slots()) == self._addresses


def _addresses_of(router: Router) -> list[int]:
    found: list[Any] = [*router._parameters.values(), *router._buffers.values()]
    return [tensor.data_ptr() for tensor in found if tensor is not None]


class RouterInGraph:
    """The layer's router as the first two kernels of a graph of at most `bound` tokens. chosen: their output"""

    def __init__(self, router: Router, bound: int, device: torch.device) -> None:
        kernels, top_k = router.kernels, router.top_k
        assert kernels is not None
        self._parts = kernels.parts(bound, device)
        ids = torch.full((bound, top_k), -1, dtype=torch.int64, device=device)
        self.chosen = Routing(ids, torch.zeros(ids.shape, dtype=torch.float32, device=device))

    @staticmethod
    def can_record(router: Any, bound: int, x: Tensor) -> bool:
        """Return whether a graph can contain this router, for rows like x."""
        return type(router) is Router and router.fused(x) and bound <= most_rows(x, router.weight)

    def launch(self, router: Router, x: Tensor) -> None:
        kernels = router.kernels
        assert kernels is not None
        bias, correction = router.bias, router.e_score_correction_bias
        kernels.launch_fixed(x, router.weight, bias, correction, self._parts, self.chosen, launch_directly)


@dataclass(frozen=True, eq=False, kw_only=True)
class CallerInputs(RecordedCall):
    """A graph of the launches of a transport (`Dispatcher.recordable_call`) and of the experts, in one part.

    latency_bound: as in `RecordableCall`; placing: the `Placing` of the ids, as returned by `placement_arguments`
    own: the layer's router if the graph begins with it, else None
    """

    graph: CallGraph
    own: RouterInGraph | None
    latency_bound: bool
    placing: Placing

    def launch(
        self, layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None, tokens: int
    ) -> Tensor | None:
        shared, own = layer.shared_experts, self.own
        if (
            not x.is_contiguous()
            or not self.buffer_slots[0].on(self.stream)
            or not (shared is None or runs_behind(shared, self.latency_bound))
            or torch.autograd._profiler_enabled()
        ):
            return None
        if own is not None:
            routing = own.chosen
        elif routing is None:
            if type(layer.router) is not Router:
                return None
            routing = layer.router(x.view(tokens, self.signature.hidden))
        placement = cast("Placement", layer._modules["placement"])
        first = _launch_arguments(x, placement(routing, mask), tokens, self.placing)
        if first is None:
            return None
        out = torch.empty_like(x)
        last = out.data_ptr(), tokens
        self.graph((first, last) if own is None else ((x.data_ptr(), tokens), first, last), self.stream)
        return out

    def result(self, layer: Layer, x: Tensor, tokens: int, out: Tensor) -> Tensor:
        shared = layer.shared_experts
        return out if shared is None else out + shared(x.view(tokens, self.signature.hidden)).view(x.shape)


def runs_behind(shared: Any, latency_bound: bool) -> bool:
    """Return whether shared experts may run after a graph.

    Only `SharedExperts` may, and only in a latency-bound call. A user's module may communicate with other ranks, which
    run it in the order of an eager call.
    """
    return latency_bound and type(shared) is SharedExperts


def record_caller(
    layer: Layer, call: RecordableCall, bound: int, ids: torch.dtype | None, placing: Placing, recorder: Recorder,
) -> CallerInputs:  # fmt: skip
    """Record the launches of a call. Nothing is computed.

    ids: the dtype of the ids that calls pass; None for calls in which the layer's router chooses them
    """
    c = layer.config
    signature = CallSignature(c.hidden_size, c.top_k, layer.dtype, layer.device)
    x = torch.empty(1, signature.hidden, dtype=signature.dtype, device=signature.device)
    own = (
        RouterInGraph(layer.router, bound, signature.device)
        if ids is None and RouterInGraph.can_record(layer.router, bound, x)
        else None
    )
    if own is None:
        given = torch.empty(1, signature.top_k, dtype=ids or torch.int64, device=signature.device)
        chosen = Routing(given, torch.empty(given.shape, dtype=torch.float32, device=signature.device))
    else:
        chosen = own.chosen
    routing = DeferredRouting(chosen.ids, chosen.weights, layer.placement.tables)
    out, received = torch.empty_like(x), call.received
    kernel: Any = layer._kernel
    to_peers = kernel.capabilities.peer_out and received.peer_out is not None

    def launch() -> None:
        if own is not None:
            own.launch(layer.router, x)
        call.send(x, routing)
        call.receive(kernel(received, received.peer_out if to_peers else received.out), out)

    first = _launch_arguments(x, routing, 1, routing.tables.placing)
    assert first is not None, "a new tensor begins at a multiple of 16 bytes"
    arguments: dict[int, Given] = {-1: (out.data_ptr(), 1)}
    arguments = {0: first} | arguments if own is None else {0: (x.data_ptr(), 1), 2: first} | arguments
    return CallerInputs(
        signature=signature, least=0, most=bound, stream=recorder.handle, buffer_slots=(call.buffer_slot,),
        steps=_STEPS, last_step=(layer.name, "combine", layer._dispatcher().name, True),
        graph=recorder.graph_of(launch, arguments),
        latency_bound=call.latency_bound, placing=placing, addresses=WeightAddresses(layer, own is not None), own=own,
    )  # fmt: skip


def _launch_arguments(x: Tensor, routing: PhysicalRouting, tokens: int, placing: Placing) -> list[int] | None:
    """Return the first arguments of the dispatch kernel; None if it was compiled for another kind of arguments.

    It was compiled for contiguous tensors at multiples of 16 bytes, and for the same `Placing`.
    """
    ids, tables, found = placement_arguments(routing)
    weights = routing.weights
    if found != placing or not (ids.is_contiguous() and weights.is_contiguous()):
        return None
    *tensors, invalid = x, ids, weights, *tables
    given, bits = [tensor.data_ptr() for tensor in tensors], 0
    given.append(cast("int", invalid))
    for address in given:
        bits |= address
    return None if bits % 16 else [*given, tokens]
