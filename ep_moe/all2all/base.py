"""The contract of a transport: dispatch rows to the ranks that own their experts, combine the results.

True for every transport, and tested by one suite: T may differ per rank and be 0; id -1 is dropped; a token whose
experts share a rank travels there once (where `dedup`); results are valid until combine; identity experts give
`x * sum(weights)`; what is given is left as it was; all ranks raise together on a bad call; per-call state lives in the
handle.
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
from ep_moe.checks import INT32, check_returned, check_returned_rows
from ep_moe.config import PLAIN_WIRE
from ep_moe.errors import InputError
from ep_moe.parallel.rank_group import NO_GRADIENTS, Gradients, RankGroup
from ep_moe.placement.deferred import given_ids
from ep_moe.renamed import PLUGIN_HOOKS, renamed, renamed_in, take_old_names
from ep_moe.runtime.devices import SideStream
from ep_moe.types import PeerRows, Pending, PhysicalRouting, Received, capturing, dtype_name

Result = TypeVar("Result")


class Dispatcher(DeclaredTransport, ABC):
    """One transport for one dispatch shape on one EP group. `EPContext` makes it, and equal layers share it.

    A subclass defines `name`, `capabilities`, `_dispatch` and `_combine`. `tested_machines` names the machines that it
    was run on.

    Args:
        dispatch_shape: The shape of what travels.
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
        rounds = dispatch_shape.wire.dispatch in self.capabilities.rounds  # `dispatch` takes plain rows too
        self._plain = dataclasses.replace(dispatch_shape, wire=PLAIN_WIRE) if rounds else dispatch_shape
        self.newest_bound: int | None = None  # `max_tokens` of the newest call
        self._side: SideStream | None = None

    @property
    def grows(self) -> bool:
        """Whether its buffers grow with the calls, whose ranks agree on how many tokens they have at most."""
        return self.capabilities.grows and self.dispatch_shape.max_tokens is None

    def held_bytes(self) -> int:
        """Count the buffers of a transport that grows, as they are now.

        Returns:
            Bytes, counted as `buffer_bytes` does.
        """
        return 0

    def call_bound(
        self, tokens: int, device: torch.device, problem: str | None = None, *, gradients: Gradients = NO_GRADIENTS
    ) -> int:
        """Agree on `max_tokens` for a call of a transport that grows. Collective.

        Args:
            tokens: Of this rank.
            device: Of the rows.
            problem: A fault found on this rank, or None.
            gradients: Tensors by name, for which all ranks must want gradients alike.

        Returns:
            A power of two that holds the most tokens of any rank, so that kernels meet few sizes.

        Raises:
            InputError: On all ranks, where one has a problem; or the call is being captured in a CUDA graph.
        """
        if capturing(device):
            raise InputError(
                f"{self.name} has buffers that grow with the calls, and a captured call has one size; say the most "
                f"tokens of a call by EPContext.from_torchrun(max_tokens=...)"
            )
        most = self.rank_group.most_tokens(tokens, problem, device, self.name, gradients=gradients)
        return whole_bound(most)

    def dispatch(
        self, x: Tensor, routing: PhysicalRouting, x_scale: Tensor | None = None, *, max_tokens: int | None = None
    ) -> Received:
        """Send rows to the ranks of their experts, and receive this rank's rows. Collective.

        Args:
            x: [T, columns] as `quant.row_format.round_to_travel` writes rows for the shape's wire; or [T, H] of the
                layer's dtype where the format is one of `capabilities.rounds`. The same numbers arrive.
            routing: ids and weights [T, K].
            x_scale: [T, scales], scales of `x`; None for formats without scales and for plain rows.
            max_tokens: The most tokens that any rank has in this call, the same on all. Default: the shape's.

        Returns:
            The received rows, valid until `combine`.

        Raises:
            InputError: on all ranks, where one passes a wrong argument or an id out of range. Transports that exchange
                no counts raise it at once on that rank, and on its peers at a later step (`refuse`). They drop an id
                out of range. Within a CUDA graph capture, also where the transport cannot be captured.
            BackendUnavailable: by the first call, where the transport cannot make its buffers.
            PeerTimeout: a peer died, hung or went another way.
            RankFailed: an exception of another kind left a call on a peer.
            OutOfMemory: a rank ran out of device memory.
        """
        return self._begin_dispatch(x, routing, None, x_scale, max_tokens).wait()

    def combine(self, y: Tensor | PeerRows, handle: Any, out: Tensor | None = None) -> Tensor:
        """Return the experts' rows to their senders, and sum them over ranks. Collective.

        Args:
            y: [N, H], the experts' rows in the order received; or `Received.peer_out` if they were written there, by
                all ranks alike.
            handle: `Received.handle` of the same call.
            out: [T, H] of the layer's dtype, where to write the sum. Default: a new tensor.

        Returns:
            [T, H], `out` if it was given.

        Raises:
            InputError: a peer refused this call or an earlier one (`refuse`).
            PeerTimeout: a peer died, hung or went another way.
            RankFailed: an exception of another kind left a call on a peer.
            OutOfMemory: a rank ran out of device memory.
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
        """`combine`, which also brings back a number for each route, such as the gradient of its weight. Collective.

        Args:
            y: As `combine` takes it.
            by_route: float32 [N, K], for each received row and route; those of experts on other ranks do not count.
            handle: As `combine` takes it.
            out: As `combine` takes it.
            weights_out: float32 [T, K], contiguous, where to write the numbers. Default: a new tensor.

        Returns:
            What `combine` returns; and float32 [T, K], the number of each route, 0 where it went nowhere.

        Raises:
            EPMoEError: as `combine` raises them.
            AssertionError: The transport states `returns_weights` and does not define this.
        """
        raise AssertionError(f"{self.name} brings back no numbers of routes")

    def recordable_call(self, bound: int) -> RecordableCall | None:
        """Give what a call launches, for automatic CUDA graphs.

        Args:
            bound: As `max_tokens`.

        Returns:
            The launches, once there was a call; None where launches are not all of a call.
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
        """Start `dispatch`. What the caller does before `wait()` runs beside it, where the transport can.

        Args:
            x: As `dispatch` takes it.
            routing: ids and weights [T, K].
            problem: A fault that the caller found on this rank, raised on all of them.
            x_scale: As `dispatch` takes it.
            max_tokens: The most tokens that any rank has in this call, the same on all. Default: the shape's, and for
                transports that grow what `call_bound` finds. A smaller number spares a static transport's receiver
                empty rows.

        Returns:
            The received rows, pending.

        Raises:
            EPMoEError: as `dispatch` raises them, here or in `wait()`. InputError also for a `problem`.
        """
        return self._beside(x.device, lambda: self._begin_dispatch(x, routing, problem, x_scale, max_tokens))

    def combine_start(self, y: Tensor | PeerRows, handle: Any, out: Tensor | None = None) -> Pending[Tensor]:
        """Start `combine`. Do not write `y`, nor read `out`, before `wait()`.

        Args:
            y: As `combine` takes it.
            handle: `Received.handle` of the same call.
            out: As `combine` takes it.

        Returns:
            [T, H], pending.

        Raises:
            EPMoEError: as `combine` raises them, here or in `wait()`.
        """
        return self._beside(y.device, lambda: self._begin_combine(y, handle, out))

    def _beside(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        """For transports whose `_dispatch` and `_combine` run on the current stream: a stream beside it."""
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
        most = INT32 if self.grows else self.dispatch_shape.max_tokens
        if problem is not None and most is not None and not (bound is not None and 1 <= bound <= most):
            bound = 1 if self.grows else most  # this one is what is wrong; that of the peers is not known here
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
        """out: None, or a contiguous tensor where the sum is wanted; a transport that writes it elsewhere need not
        care"""

    def _combine_written(self, handle: Any, out: Tensor | None) -> Pending[Tensor]:
        """The experts' rows are in `Received.peer_out`."""
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
        """With how its rows are written, which transports need not know."""
        check_returned(f"all2all={self.name}: what _dispatch returns", "check_dispatcher", received, Received)
        wire = self.dispatch_shape.wire
        if wire.dispatch == received.format:
            return received
        return dataclasses.replace(received, format=wire.dispatch, input_scale=wire.input_scale)

    def _problem(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, max_tokens: int | None
    ) -> str | None:
        """What is wrong with a call, without waiting for the device."""
        g = self.dispatch_shape
        if not isinstance(routing, PhysicalRouting):
            return f"routing must be a PhysicalRouting (pass it through Placement), got {type(routing).__name__}"
        if (problem := self._rows_problem(x, x_scale)) is not None:
            return problem
        if self.capabilities.static and not (self.grows and max_tokens is None):
            most = g.max_tokens or INT32
            if max_tokens is None or not 1 <= max_tokens <= most:
                return f"max_tokens must be in [1, {most}], as EPContext has it, got {max_tokens}"
            if (problem := too_many_tokens(x, max_tokens)) is not None:
                return problem
        return routing_problem(given_ids(routing), routing.weights, x, g.top_k)

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
        """Raise this rank's problem, for transports without an exchange that could carry it. The peers raise it at
        their next step.

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
        """How many ids are neither -1 nor a physical expert: int64 scalar on the device."""
        ids = routing.ids
        return ((ids < -1) | (ids >= self.dispatch_shape.num_physical)).sum()

    def _check_ids(self, bad: list[int], experts: str = "an expert id") -> None:
        """Raise on all ranks alike, for the counts of bad ids that all ranks exchanged."""
        if any(bad):
            found = ", ".join(
                f"{count} on rank {rank}" for rank, count in zip(self.rank_group.ranks, bad, strict=True) if count
            )
            raise InputError(f"routing.ids must be -1 or {experts} in range, got ids out of range: {found}")


def kind_problem(name: str, tensor: Tensor) -> str | None:
    """None, or that a tensor is of a kind whose memory holds other things than its rows."""
    if tensor.is_nested:
        return f"{name} must be dense, got a nested tensor; pass torch.cat({name}.unbind()), the rows of all sequences"
    if tensor.layout is not torch.strided:
        return f"{name} must be dense, got {tensor.layout}; pass {name}.to_dense()"
    if type(tensor) is not Tensor and not torch.compiler.is_compiling() and hasattr(tensor, "placements"):
        return f"{name} must be this rank's own rows, got a DTensor; pass {name}.to_local()"
    return None


def routing_problem(ids: Tensor, weights: Tensor, x: Tensor, top_k: int) -> str | None:
    """What is wrong with the shapes, dtypes or devices of a routing for x [T, H]."""
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
    return f"x has {len(x)} tokens on their way, more than max_tokens={max_tokens}; raise that of EPContext"


if not TYPE_CHECKING:  # checkers know the new names alone
    __getattr__ = renamed_in(__name__, {"Geometry": ("DispatchShape", DispatchShape)})
