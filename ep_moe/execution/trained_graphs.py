"""A layer's calls with gradients as CUDA graphs, one of forward and one of backward.

They serve calls of few tokens, in which the host takes longer than the device, and the kernel need not wait for the
number of routes.

A graph holds dispatch, experts and combine: from a rank's rows to its results, or from the gradients of the results to
those of the rows. The gradients of the stored tensors are computed after the graph, into the tensors of the call. The
rest of a training step is unchanged, and a rank may replay while its peers run eagerly.

The tensors that forward saves for backward are in the graph's memory. Autograd holds them like any saved tensors. While
anything holds them, such as the autograd graph of a second micro-batch, the next call runs eagerly.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.all2all.buffer_slots import BufferPool, BufferSlot
from ep_moe.context import EPContext
from ep_moe.errors import EPMoEError
from ep_moe.execution.cuda_graph import Recorder
from ep_moe.execution.graph_inputs import Inputs
from ep_moe.execution.trained_exchange import (
    Computed,
    Gradients,
    InputGradients,
    Transports,
    backward,
    exchange_gradients,
    run_forward,
    to_peers,
)
from ep_moe.experts.base import Experts
from ep_moe.experts.differentiable import Allocator, SavedForBackward, WeightProduct
from ep_moe.parallel.heartbeats import Step
from ep_moe.runtime.devices import current_stream
from ep_moe.types import LocalIds, PeerRows, PhysicalIds, PhysicalRouting, Received, Routing, capturing

_log = logging.getLogger("ep_moe.execution")

_KEPT = 4  # the most `TrainedCall`s of a layer, one per bound and stream
_TRIES = 3  # failed recordings of a layer, after which its calls run eagerly
_MOVES = 8  # a new address of weights or buffers drops a call's graphs; after more than this many it runs eagerly


class TrainedGraphs:
    """The graphs of one layer. tries: how many recordings may still fail; replays: how many calls were replayed"""

    def __init__(self, context: EPContext) -> None:
        self._context = context
        self._calls: dict[Any, TrainedCall] = {}
        self.tries, self.replays = _TRIES, 0

    def __len__(self) -> int:
        return sum(call.recorded for call in self._calls.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that the graphs hold between calls, without scratch memory of the stream's pool."""
        tensors = [tensor for call in self._calls.values() for tensor in call.held]
        return sum({tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in tensors}.values())

    def drop(self) -> None:
        """Drop all graphs. Calls run eagerly until graphs are recorded again."""
        self._calls.clear()

    def call(self, transports: Transports, experts: Experts, x: Tensor) -> TrainedCall | None:
        """Return the `TrainedCall` of calls like this one; None if such calls are not recorded."""
        context, bound, device = self._context, transports.bound, x.device
        if not self.tries or bound is None or torch.compiler.is_compiling() or capturing(device):
            return None
        if torch._C._len_torch_dispatch_stack():  # selective checkpointing expects the same operations in each call
            return None
        if not _autograd_saves():
            return None
        if context._stage_times is not None and context._stage_times.timed:
            return None
        key = (transports, experts, current_stream(device))
        found = self._calls.get(key)
        if found is None and self._can(transports, experts, device):
            if len(self._calls) == _KEPT:
                del self._calls[next(iter(self._calls))]
            found = self._calls[key] = TrainedCall(self, context, transports, experts)
        return found

    def _can(self, transports: Transports, experts: Experts, device: torch.device) -> bool:
        """Return whether such calls can be recorded.

        Weights whose addresses change in each call are not detected here: `_MOVES` ends the attempts.
        """
        assert transports.bound is not None
        return (
            Recorder.unsupported_reason(device) is None
            and experts.weights.lora is None
            and bool(experts.weights.addresses)
            and all(one.capabilities.cuda_graph for one in transports.all)
            and all(isinstance(getattr(one, "buffer_pool", None), BufferPool) for one in transports.all)
            and experts.records_training(transports.rows.rank_group.size * transports.bound)
        )

    def failed(self, call: TrainedCall, error: Exception) -> None:
        """Handle a failed recording: drop all graphs. After the last try, calls run eagerly from then on."""
        self.tries -= 1
        self.drop()
        if not self.tries:
            text = (
                f"calls of {call.call_name} with gradients cannot be recorded as CUDA graphs, and take more host time: "
                f"{error}"
            )
            warnings.warn(text, stacklevel=2)


class _Graph(NamedTuple):
    """A graph. replay: launches it; steps, last_step: as in `RecordedCall`"""

    replay: Callable[[], object]
    steps: int
    last_step: tuple[str, str, str, bool]


class _AllocationLog:
    """An `Allocator` that allocates new tensors, and logs the requests: shape and dtype by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asked: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.asked[name] = shape, dtype
        return torch.empty(shape, dtype=dtype, device=self._device)


def _allocator_of(held: Mapping[str, Tensor]) -> Allocator:
    """Return an `Allocator` that returns existing tensors, for a call with the logged requests."""

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = held[name]
        if (tuple(found.shape), found.dtype) != (shape, dtype):
            raise RuntimeError(f"{name} was {list(found.shape)} of {found.dtype}, and is now {list(shape)} of {dtype}")
        return found

    return take


class TrainedCall:
    """The calls with one bound on one stream.

    The first call runs eagerly and logs its allocations. The next one is recorded, and later ones are replayed.

    call_name: the layer, for messages
    """

    def __init__(self, graphs: TrainedGraphs, context: EPContext, transports: Transports, experts: Experts) -> None:
        self._graphs, self._context = graphs, context
        self._transports, self._experts = transports, experts
        self.call_name = context.flight_recorder.call_name
        self._recorder: Any = None
        self._inputs: Inputs
        self._outputs: InputGradients  # what graphs write: results, or gradients of rows and weights
        self._forward_log: _AllocationLog | None = None
        self._backward_log: _AllocationLog | None = None
        self._forward: _Graph | None = None
        self._backward: _Graph | None = None
        self._saved_memory: dict[str, Tensor] = {}  # memory that only this call's forward graph uses
        self._forward_result: Computed  # the results of the forward graph, in that memory
        self._held: list[tuple[Any, int]] = []  # its storages, each with its use count while no call holds it
        self._shared_memory: dict[str, Tensor] = {}  # memory of the backward graph, shared by all layers
        self._moved = 0  # how often tensors that graphs read had changed addresses
        self._products: Mapping[str, WeightProduct] = {}
        self._weight_addresses: dict[str, int] = {}  # addresses of the stored tensors
        self._buffer_slots: list[BufferSlot] = []

    @property
    def recorded(self) -> bool:
        """Whether a forward graph is recorded."""
        return self._forward is not None

    @property
    def held(self) -> list[Tensor]:
        """The tensors that the graphs hold, including those that they share with other layers."""
        return [*self._saved_memory.values(), *self._shared_memory.values()]

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, routing: PhysicalRouting, stored: Mapping[str, Tensor]) -> Computed:
        """Run or replay the forward. Arguments and result are those of `trained_exchange.run_forward`."""
        tokens = len(x)
        if not self._serves(x, routing, tokens):
            return run_forward(self._transports, self._experts, x, routing)
        if self._forward is not None and (
            not self._buffers_unchanged() or self._weight_addresses != _addresses(stored)
        ):
            self._reset()
        if self._forward_log is None:
            log = _AllocationLog(x.device)
            found = run_forward(self._transports, self._experts, x, routing, log)
            self._forward_log = log
            return found
        if self._forward is None and not self._record(lambda: self._record_forward(x, stored)):
            return run_forward(self._transports, self._experts, x, routing)
        if not self._free():
            return run_forward(self._transports, self._experts, x, routing)
        assert self._forward is not None
        self._launch(self._forward, x, routing)
        self._graphs.replays += 1
        out, received, saved = self._forward_result
        assert received.weights is not None
        assert received.local_ids is not None
        own = replace(
            received, x=received.x.detach(), weights=received.weights.detach(),
            local_ids=LocalIds(received.local_ids.detach()),
        )  # fmt: skip
        return Computed(out[:tokens].clone(), own, tuple(tensor.detach() for tensor in saved))

    def _record_forward(self, x: Tensor, stored: Mapping[str, Tensor]) -> None:
        transports, device = self._transports, x.device
        shape, bound = transports.rows.dispatch_shape, transports.bound
        assert bound is not None
        self._recorder = Recorder.for_current_stream(self._context._recorders, device, self._context._workspaces)
        signature = shape.hidden_size, shape.top_k, x.dtype, device
        self._inputs = self._recorder.memory.inputs(*signature, least=0, most=bound, routed=True)
        columns = shape.top_k if transports.weights is None else transports.weights.dispatch_shape.hidden_size
        self._outputs = InputGradients(
            self._taken("out", (bound, shape.hidden_size), x.dtype, device),
            self._taken("out of weights", (bound, columns), torch.float32, device),
        )
        log = self._forward_log
        assert log is not None
        self._saved_memory = {
            name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in log.asked.items()
        }

        def call() -> None:
            allocate = _allocator_of(self._saved_memory)
            self._forward_result = run_forward(
                transports, self._experts, self._inputs.x, self._routing, allocate, self._outputs.x
            )

        self._forward = self._graph_of(call)
        self._weight_addresses = _addresses(stored)
        self._buffer_slots = [slot for pool in self._pools() for slot in pool.buffer_slots]
        storages = [tensor.untyped_storage() for tensor in self._saved_memory.values()]
        self._held = [(storage, _holders(storage)) for storage in storages]
        if self._context.layout.rank == 0:
            _log.info(
                "%s: calls with gradients of at most %d tokens are CUDA graphs from now on", self.call_name, bound
            )

    def _free(self) -> bool:
        """Return whether no autograd graph holds the saved tensors of the last replay."""
        return all(_holders(storage) <= count for storage, count in self._held)

    # --- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, saved: SavedForBackward, tensors: tuple[Tensor, ...], wanted: dict[str, bool], grad: Tensor,
        routing: PhysicalRouting,
    ) -> Gradients:  # fmt: skip
        """Run or replay the backward. Arguments and result are those of `trained_exchange.backward`."""
        transports, tokens = self._transports, len(grad)
        received, kept, stored = saved.split(tensors)
        if capturing(grad.device) or not self._serves(grad, routing, tokens):
            return backward(transports, saved, tensors, wanted, grad, routing)
        if self._backward_log is None:
            log = _AllocationLog(grad.device)
            products: dict[str, WeightProduct] = {}
            gradients = self._gradients(received, kept, stored, log, products)
            found = exchange_gradients(transports, routing, grad.contiguous(), gradients)
            self._backward_log = log
            return found, saved.written(products, stored, wanted)
        if self._forward is None or not self._buffers_unchanged() or not self._are_graph_tensors(received, kept):
            return backward(transports, saved, tensors, wanted, grad, routing)
        if self._backward is None and not self._record(lambda: self._record_backward(stored, grad.device)):
            return backward(transports, saved, tensors, wanted, grad, routing)
        assert self._backward is not None
        self._launch(self._backward, grad, routing)
        found = InputGradients(self._outputs.x[:tokens].clone(), self._outputs.weights[:tokens].clone())
        return found, saved.written(self._products, stored, wanted)

    def _gradients(
        self, received: Received, kept: tuple[Tensor, ...], stored: Mapping[str, Tensor], allocate: Allocator,
        products: dict[str, WeightProduct],
    ) -> Callable[[Received], tuple[Tensor | PeerRows, Tensor | None]]:  # fmt: skip
        """Return the argument `gradients` of `exchange_gradients`.

        products: receives the products that later write the gradients of the stored tensors
        """

        def gradients(sent: Received) -> tuple[Tensor | PeerRows, Tensor | None]:
            options = to_peers(self._experts, sent)
            found = self._experts.row_gradients(received, kept, stored, sent.x, allocate, **options)
            products.update(found.products)
            return found.x, found.weights

        return gradients

    def _record_backward(self, stored: Mapping[str, Tensor], device: torch.device) -> None:
        log = self._backward_log
        assert log is not None
        # all layers share it: the products read it before another layer's backward runs
        self._shared_memory = {name: self._taken(name, *how, device) for name, how in log.asked.items()}
        _, received, kept = self._forward_result
        own = {name: tensor.detach() for name, tensor in stored.items()}
        products: dict[str, WeightProduct] = {}

        def call() -> None:
            gradients = self._gradients(received, kept, own, _allocator_of(self._shared_memory), products)
            exchange_gradients(self._transports, self._routing, self._inputs.x, gradients, self._outputs)

        self._backward, self._products = self._graph_of(call), products

    def _taken(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of the stream's memory, which all its graphs share."""
        rows, *rest = shape
        key = ("trained", name, *rest, dtype)
        tensor: Tensor = self._recorder.memory.get_tensor(
            key, rows, lambda most: torch.empty(most, *rest, dtype=dtype, device=device)
        )
        return tensor

    def _are_graph_tensors(self, received: Received, kept: tuple[Tensor, ...]) -> bool:
        """Return whether the saved tensors are those of the forward graph, and not copies that a hook made."""
        _, recorded, saved = self._forward_result
        given = (received.x, received.weights, received.local_ids, *kept)
        own = (recorded.x, recorded.weights, recorded.local_ids, *saved)
        return all(
            a is not None and b is not None and a.data_ptr() == b.data_ptr() for a, b in zip(given, own, strict=True)
        )

    # --- both ---------------------------------------------------------------------------------------------------------

    @property
    def _routing(self) -> PhysicalRouting:
        routing = self._inputs.routing
        assert routing is not None
        return PhysicalRouting(PhysicalIds(routing.ids), routing.weights)

    def _pools(self) -> list[BufferPool]:
        return [one.buffer_pool for one in self._transports.all]  # type: ignore[attr-defined]

    def _inputs_fit(self, x: Tensor, routing: PhysicalRouting, tokens: int) -> bool:
        shape, bound = self._transports.rows.dispatch_shape, self._transports.bound
        assert bound is not None
        ids, weights = routing.ids, routing.weights
        return (
            x.dim() == 2
            and x.shape[1] == shape.hidden_size
            and x.dtype == shape.dtype
            and tokens <= bound
            and ids.shape == weights.shape == (tokens, shape.top_k)
            and weights.dtype == torch.float32
        )

    def _serves(self, x: Tensor, routing: PhysicalRouting, tokens: int) -> bool:
        """Return whether a call may be recorded or replayed now. x: its rows, or the gradients of its results"""
        can_replay = self._moved <= _MOVES and (self._recorder is None or self._recorder.can_replay)
        return can_replay and self._inputs_fit(x, routing, tokens)

    def _buffers_unchanged(self) -> bool:
        """Return whether the transports still have the buffers that the graphs use."""
        return not any(slot.is_freed for slot in self._buffer_slots)

    def _reset(self) -> None:
        self._forward = self._backward = None
        self._forward_log = self._backward_log = None  # a new map may have another number of slots
        self._products, self._held, self._saved_memory, self._shared_memory = {}, [], {}, {}
        self._moved += 1

    def _record(self, record: Callable[[], None]) -> bool:
        """Call `record`, and return whether it succeeded. Each rank records by itself, without its peers."""
        flight_recorder = self._context.flight_recorder
        before = flight_recorder.newest
        try:
            with torch.inference_mode(False), torch.no_grad():
                record()
        except EPMoEError:
            raise
        except Exception as error:  # the driver may raise anything
            self._reset()
            for pool in self._pools():
                for slot in pool.buffer_slots:
                    slot.busy = False
            self._graphs.failed(self, error)
            return False
        finally:
            flight_recorder.set_newest_step(before)  # recording is no step that the peers make too
        return True

    def _graph_of(self, call: Callable[[], None]) -> _Graph:
        flight_recorder = self._context.flight_recorder
        before = flight_recorder.number
        replay = self._recorder.record_within_step(call)
        last = flight_recorder.newest
        return _Graph(replay, last.number - before, last[1:])

    def _launch(self, graph: _Graph, x: Tensor, routing: PhysicalRouting) -> None:
        flight_recorder, stream = self._context.flight_recorder, self._recorder.stream
        flight_recorder.check()
        for slot in self._buffer_slots:
            if slot.stream is not stream:
                slot.wait_for_last_call(x.device)
                slot.stream = stream
        self._inputs.copy_arguments(x, Routing(routing.ids, routing.weights), len(x))
        number = flight_recorder.number
        graph.replay()
        # record the same last step as an eager call: peers that run eagerly compare steps with this rank
        flight_recorder.set_newest_step(Step(number + graph.steps, *graph.last_step))
        flight_recorder.device_watch.mark(x.device)


def _autograd_saves() -> bool:
    """Return whether autograd or activation checkpointing holds the tensors that forward saves.

    Other hooks for saved tensors may read a tensor on another stream without holding it, while the next replay writes
    its memory.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    if top is None:
        return False
    hooks = top(True)
    return hooks is None or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _addresses(stored: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in stored.items()}


def _holders(storage: Any) -> int:
    """Return the use count of a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]
