"""The base class of transports: dispatch rows to the ranks that own their experts, combine the results.

One test suite (`ep_moe.testing.check_dispatcher`) checks these rules for every transport:

- T may differ per rank and may be 0.
- Id -1 means no expert, and sends nothing.
- With the capability `dedup`, a token travels once to a rank, even if several of its experts are there.
- Received rows are valid until `combine`.
- Identity experts give `x * sum(weights)`.
- Inputs are not modified.
- On a bad call all ranks raise together.
- The state of a call lives in its handle.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ep_moe.all2all.buffer_slots import RecordableCall
from ep_moe.all2all.capabilities import DeclaredTransport, capturable
from ep_moe.all2all.capabilities import DispatcherCapabilities as DispatcherCapabilities
from ep_moe.all2all.dispatch_shape import DispatchShape as DispatchShape
from ep_moe.all2all.dispatch_shape import whole_bound
from ep_moe.checks import INT32_MAX, check_returned, check_returned_rows
from ep_moe.config import PLAIN_WIRE
from ep_moe.errors import InputError
from ep_moe.parallel.rank_group import NO_GRADIENTS, Gradients, RankGroup
from ep_moe.placement.deferred import ids_for_checks
from ep_moe.renamed import PLUGIN_HOOKS, renamed, renamed_in, take_old_names
from ep_moe.runtime.devices import SideStream
from ep_moe.types import PeerRows, Pending, PhysicalRouting, Received, capturing, dtype_name

Result = TypeVar("Result")


class Dispatcher(DeclaredTransport, ABC):
    """One transport for one dispatch shape on one EP group. `EPContext` creates it. Layers of equal shape share it.

    A subclass defines `name`, `capabilities`, `_dispatch` and `_combine`. `tested_machines` names the machines that it
    was run on.

    Args:
        dispatch_shape: The shape of the rows that travel.
        rank_group: The EP group.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_old_names(cls, PLUGIN_HOOKS)

    geometry = renamed("geometry", "dispatch_shape")
    link = renamed("link", "rank_group")
    again = renamed("again", "recordable_call")

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        self.dispatch_shape = dispatch_shape
        self.rank_group = rank_group
        rounds = dispatch_shape.wire.dispatch in self.capabilities.rounds  # then `dispatch` also takes plain rows
        self._plain = dataclasses.replace(dispatch_shape, wire=PLAIN_WIRE) if rounds else dispatch_shape
        self.newest_bound: int | None = None  # `max_tokens` of the newest call
        self._side: SideStream | None = None

    @property
    def grows(self) -> bool:
        """Whether buffers grow with the calls. Ranks then agree on the token limit of each call (`call_bound`)."""
        return self.capabilities.grows and self.dispatch_shape.max_tokens is None

    def held_bytes(self) -> int:
        """Count the bytes that a transport with growing buffers holds now.

        Returns:
            Bytes, counted as `buffer_bytes` does.
        """
        return 0

    def call_bound(
        self, tokens: int, device: torch.device, problem: str | None = None, *, gradients: Gradients = NO_GRADIENTS
    ) -> int:
        """Agree on `max_tokens` for one call of a transport whose buffers grow. Collective.

        Args:
            tokens: T of this rank.
            device: The device of the rows.
            problem: A fault found on this rank, or None.
            gradients: Tensors by name. Each must require a gradient on all ranks or on none.

        Returns:
            The largest T of any rank, rounded up to a power of two. Kernels are then launched for few sizes.

        Raises:
            InputError: On all ranks if one has a problem, or if the call is being captured in a CUDA graph.
        """
        if capturing(device):
            raise InputError(
                f"{self.name} has buffers that grow with the calls, and a captured call has one size; set the token "
                "limit with EPContext.from_torchrun(max_tokens=...)"
            )
        most = self.rank_group.most_tokens(tokens, problem, device, self.name, gradients=gradients)
        return whole_bound(most)

    def dispatch(
        self, x: Tensor, routing: PhysicalRouting, x_scale: Tensor | None = None, *, max_tokens: int | None = None
    ) -> Received:
        """Send rows to the ranks of their experts, and receive this rank's rows. Collective.

        Args:
            x: [T, columns], rows in the shape's wire format, as `quant.row_format.quantize_for_wire` writes them. For a
                format in `capabilities.rounds` also plain rows: [T, H] of the layer's dtype, which the transport
                rounds. Both arrive as the same numbers.
            routing: Physical ids and weights, [T, K].
            x_scale: [T, scales], scales of `x`; None for formats without scales and for plain rows.
            max_tokens: The token limit of this call, the same on all ranks. Default: the shape's.

        Returns:
            The received rows, valid until `combine`.

        Raises:
            InputError: On all ranks if one passes a wrong argument or an id out of range. Transports that exchange
                no counts raise it at once on that rank, and on its peers at a later step (`refuse`). They drop an id
                out of range. Also raised within a CUDA graph capture if the transport cannot be captured.
            BackendUnavailable: In the first call, if the transport cannot allocate its buffers.
            PeerTimeout: A peer died, hung or issued another sequence of calls.
            RankFailed: An exception of another kind left a call on a peer.
            OutOfMemory: A rank ran out of device memory.
        """
        return self._begin_dispatch(x, routing, None, x_scale, max_tokens).wait()

    def combine(self, y: Tensor | PeerRows, handle: Any, out: Tensor | None = None) -> Tensor:
        """Return the experts' rows to their senders, and sum them over ranks. Collective.

        Args:
            y: [N, H], the experts' rows in the order received. Or `Received.peer_out`, if the expert kernels of all
                ranks wrote their rows there.
            handle: `Received.handle` of the same call.
            out: [T, H] of the layer's dtype, receives the sum. Default: a new tensor.

        Returns:
            [T, H]; `out` if it was given.

        Raises:
            InputError: A peer refused this call or an earlier one (`refuse`).
            PeerTimeout: A peer died, hung or issued another sequence of calls.
            RankFailed: An exception of another kind left a call on a peer.
            OutOfMemory: A rank ran out of device memory.
        """
        return self._begin_combine(y, handle, out).wait()

    def combine_with_weights(
        self,
        y: Tensor | PeerRows,
        by_route: Tensor,
        handle: Any,
        out: Tensor | None = None,
        weights_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Combine, and also return one number per route, such as the gradient of its routing weight. Collective.

        Args:
            y: As `combine` takes it.
            by_route: float32 [N, K], one number for each route of a received row. Routes to experts of other ranks are
                ignored.
            handle: As `combine` takes it.
            out: As `combine` takes it.
            weights_out: float32 [T, K], contiguous, receives the numbers. Default: a new tensor.

        Returns:
            The result of `combine`, and float32 [T, K]: the number of each route, 0 for a route without an expert.

        Raises:
            EPMoEError: As `combine` raises them.
            AssertionError: The transport does not define this method, although it may declare `returns_weights`.
        """
        raise AssertionError(f"{self.name} does not return per-route values")

    def recordable_call(self, bound: int) -> RecordableCall | None:
        """Return the launches of a call, for automatic CUDA graphs.

        Args:
            bound: The token limit of the call.

        Returns:
            The launches. None before the first call, and for transports whose calls do more than launch kernels.
        """
        return None

    def dispatch_start(
        self,
        x: Tensor,
        routing: PhysicalRouting,
        problem: str | None = None,
        *,
        x_scale: Tensor | None = None,
        max_tokens: int | None = None,
    ) -> Pending[Received]:
        """Start `dispatch`. Work that the caller launches before `wait()` overlaps it, if the transport supports that.

        Args:
            x: As `dispatch` takes it.
            routing: Physical ids and weights, [T, K].
            problem: A fault that the caller found on this rank. All ranks then raise.
            x_scale: As `dispatch` takes it.
            max_tokens: The token limit of this call, the same on all ranks. Default: the shape's; for growing buffers,
                the result of `call_bound`. With a smaller limit a static transport delivers fewer empty rows.

        Returns:
            The received rows, pending.

        Raises:
            EPMoEError: As `dispatch` raises them, here or in `wait()`. InputError also for a `problem`.
        """
        return self._on_side_stream(x.device, lambda: self._begin_dispatch(x, routing, problem, x_scale, max_tokens))

    def combine_start(self, y: Tensor | PeerRows, handle: Any, out: Tensor | None = None) -> Pending[Tensor]:
        """Start `combine`. Do not write `y`, nor read `out`, before `wait()`.

        Args:
            y: As `combine` takes it.
            handle: `Received.handle` of the same call.
            out: As `combine` takes it.

        Returns:
            [T, H], pending.

        Raises:
            EPMoEError: As `combine` raises them, here or in `wait()`.
        """
        return self._on_side_stream(y.device, lambda: self._begin_combine(y, handle, out))

    def _on_side_stream(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        """Run a call on the side stream of a transport that has one, else on the current stream."""
        return call() if self._side is None else self._side.start(device, call)

    def _begin_dispatch(
        self,
        x: Tensor,
        routing: PhysicalRouting,
        problem: str | None,
        x_scale: Tensor | None,
        max_tokens: int | None,
    ) -> Pending[Received]:
        bound = self.dispatch_shape.max_tokens if max_tokens is None else max_tokens
        if not self.capabilities.cuda_graph and capturing(x.device):
            raise InputError(f"{self.name} waits for the device and cannot be captured in a CUDA graph; {capturable()}")
        agrees = self.grows and bound is None
        problem = problem or self._problem(x, x_scale, routing, bound)
        if agrees:
            bound = self.call_bound(0 if problem else len(x), x.device, problem)
        most = INT32_MAX if self.grows else self.dispatch_shape.max_tokens
        if problem is not None and most is not None and not (bound is not None and 1 <= bound <= most):
            bound = 1 if self.grows else most  # the bound itself is invalid here, and the peers' is not known
        self.newest_bound = bound
        with self.rank_group.flight_recorder.step("dispatch", self.name):
            pending = self._dispatch(x, x_scale, routing, problem, bound)
        return self._guarded("dispatch", pending, self._with_format)

    def _begin_combine(self, y: Tensor | PeerRows, handle: Any, out: Tensor | None) -> Pending[Tensor]:
        to = out if out is not None and out.is_contiguous() else None
        with self.rank_group.flight_recorder.step("combine", self.name):
            pending = self._combine_written(handle, to) if isinstance(y, PeerRows) else self._combine(y, handle, to)
        if self.capabilities.static and y.device.type == "cuda":
            self.rank_group.flight_recorder.device_watch.mark(y.device)
        return self._guarded("combine", pending, partial(self._placed, out))

    def _placed(self, out: Tensor | None, found: Any) -> Tensor:
        shape = (None, self.dispatch_shape.hidden_size) if out is None else out.shape
        check_returned_rows(
            f"all2all={self.name}: _combine", "check_dispatcher", found, self.dispatch_shape.dtype, shape
        )
        return found if out is None or out is found else out.copy_(found)

    def destroy(self) -> None:
        """Free what was allocated. Collective, idempotent."""
        return

    @abstractmethod
    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]: ...

    @abstractmethod
    def _combine(self, y: Tensor, handle: Any, out: Tensor | None) -> Pending[Tensor]:
        """Start to return `y`. out: None, or a contiguous tensor for the sum. A transport may ignore `out`: `_placed`
        then copies the result there."""

    def _combine_written(self, handle: Any, out: Tensor | None) -> Pending[Tensor]:
        """Start to combine rows that the experts wrote to `Received.peer_out`."""
        raise AssertionError(f"{self.name} offers no peer_out")

    def _guarded(self, phase: str, pending: Any, then: Callable[[Any], Any] = lambda found: found) -> Pending[Any]:
        if not hasattr(pending, "wait"):
            check_returned(f"all2all={self.name}: what _{phase} returns", "check_dispatcher", pending, Pending)
        if pending.ready:
            return Pending.of(then(pending.wait()))

        def finish() -> Any:
            with self.rank_group.flight_recorder.step(f"{phase} wait", self.name):
                return then(pending.wait())

        return Pending(finish)

    def _with_format(self, received: Received) -> Received:
        """Fill in the row format from the wire, so that a transport need not set it."""
        check_returned(f"all2all={self.name}: what _dispatch returns", "check_dispatcher", received, Received)
        wire = self.dispatch_shape.wire
        if wire.dispatch == received.format:
            return received
        return dataclasses.replace(received, format=wire.dispatch, input_scale=wire.input_scale)

    def _problem(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, max_tokens: int | None
    ) -> str | None:
        """Return what is wrong with the arguments of a call, or None. Does not wait for the device."""
        g = self.dispatch_shape
        if not isinstance(routing, PhysicalRouting):
            return f"routing must be a PhysicalRouting (pass it through Placement), got {type(routing).__name__}"
        if (problem := self._rows_problem(x, x_scale)) is not None:
            return problem
        if self.capabilities.static and not (self.grows and max_tokens is None):
            most = g.max_tokens or INT32_MAX
            if max_tokens is None or not 1 <= max_tokens <= most:
                return f"max_tokens must be in [1, {most}], EPContext's token limit, got {max_tokens}"
            if (problem := too_many_tokens(x, max_tokens)) is not None:
                return problem
        return routing_problem(ids_for_checks(routing), routing.weights, x, g.top_k)

    def _rows_problem(self, x: Tensor, x_scale: Tensor | None) -> str | None:
        shape = self._plain if x.dtype == self._plain.row_dtype else self.dispatch_shape
        if x.dim() != 2 or x.shape[1] != shape.columns:
            return f"x must be [T, {shape.columns}], got {list(x.shape)}"
        if x.dtype != shape.row_dtype:
            found, wanted = dtype_name(x.dtype), dtype_name(shape.row_dtype)
            return f"x must be {wanted}, got {found}; convert it or build the layer in {found}"
        if x_scale is None and not shape.scales:
            return None
        scales = None if x_scale is None else (x_scale.dtype, list(x_scale.shape))
        if scales != ((shape.row_format.scale, [len(x), shape.scales]) if shape.scales else None):
            wanted = f"{dtype_name(shape.row_format.scale)} [{len(x)}, {shape.scales}]" if shape.scales else "None"
            return f"x_scale must be {wanted} with rows in {shape.wire.dispatch}, got {scales}"
        return None

    def refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem in a transport that exchanges no counts. The peers raise it at their next step.

        Args:
            problem: What is wrong with the call.

        Returns:
            Never.

        Raises:
            InputError: Always.
        """
        text = f"rank {self.rank_group.ranks[self.rank_group.rank]}: {problem}"
        self.rank_group.flight_recorder.refuse(text)
        raise InputError(text)

    def _out_of_range(self, routing: PhysicalRouting) -> Tensor:
        """Count the ids that are neither -1 nor a physical expert: int64 scalar on the device."""
        ids = routing.ids
        return ((ids < -1) | (ids >= self.dispatch_shape.num_physical)).sum()

    def _check_ids(self, bad: list[int], experts: str = "an expert id") -> None:
        """Raise on all ranks if any rank counted bad ids. bad: one count per rank, exchanged before."""
        if any(bad):
            found = ", ".join(
                f"{count} on rank {rank}" for rank, count in zip(self.rank_group.ranks, bad, strict=True) if count
            )
            raise InputError(f"routing.ids must be -1 or {experts} in range, got ids out of range: {found}")


def kind_problem(name: str, tensor: Tensor) -> str | None:
    """Return why a tensor's memory is not plain rows (nested, sparse or DTensor), or None."""
    if tensor.is_nested:
        return f"{name} must be dense, got a nested tensor; pass torch.cat({name}.unbind()), the rows of all sequences"
    if tensor.layout is not torch.strided:
        return f"{name} must be dense, got {tensor.layout}; pass {name}.to_dense()"
    if type(tensor) is not Tensor and not torch.compiler.is_compiling() and hasattr(tensor, "placements"):
        return f"{name} must be this rank's own rows, got a DTensor; pass {name}.to_local()"
    return None


def routing_problem(ids: Tensor, weights: Tensor, x: Tensor, top_k: int) -> str | None:
    """Return what is wrong with the shapes, dtypes or devices of a routing for x [T, H], or None."""
    expected = [x.shape[0], top_k]
    for name, tensor in (("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            return f"routing.{name} must be a Tensor, got {type(tensor).__name__}"
        if (problem := kind_problem(f"routing.{name}", tensor)) is not None:
            return problem
        if list(tensor.shape) != expected:
            return f"routing.{name} must be [T, K] = {expected}, got {list(tensor.shape)}"
        if tensor.device != x.device:
            return f"routing.{name} must be on {x.device} as x is, got {tensor.device}"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"routing.ids must be int32 or int64, got {dtype_name(ids.dtype)}"
    if weights.dtype != torch.float32:
        return f"routing.weights must be float32, got {dtype_name(weights.dtype)}; call .float()"
    return None


def too_many_tokens(x: Tensor, max_tokens: int | None) -> str | None:
    if max_tokens is None or len(x) <= max_tokens:
        return None
    return f"x has {len(x)} tokens to dispatch, more than max_tokens={max_tokens}; raise max_tokens of EPContext"


if not TYPE_CHECKING:  # type checkers see only the new names
    __getattr__ = renamed_in(__name__, {"Geometry": ("DispatchShape", DispatchShape)})
