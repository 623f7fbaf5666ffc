"""The contract of a transport: dispatch rows to the ranks that own their experts, combine the results.

True for every transport, and tested by one suite: T may differ per rank and be 0; id -1 is dropped; a token whose
experts share a rank travels there once (where `dedup`); results are valid until combine; identity experts give
`x * sum(weights)`; all ranks raise together on a bad call; per-call state lives in the handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.parallel.link import Link
from ep_moe.types import Pending, PhysicalRouting, Received, RowLayout, Weighting, dtype_name


@dataclass(frozen=True, kw_only=True)
class DispatcherCapabilities:
    """What a transport can do; one constant per class.

    layout, weighting: what it delivers, and who multiplies by the routing weights
    dedup: a token travels once to a rank, however many of its experts are there
    cuda_graph: dispatch and combine can be captured; host_sync: they wait for the device
    deterministic: equal inputs give equal bits; differentiable: backward works
    max_ranks: of the EP group, None for no limit
    devices: device types
    """

    layout: RowLayout
    weighting: Weighting
    dedup: bool
    cuda_graph: bool
    host_sync: bool
    deterministic: bool
    differentiable: bool
    max_ranks: int | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of what travels; equal layers of a context share the dispatcher of their geometry.

    hidden_size H, top_k K, cap: slots per rank on the wire, num_ranks R, dtype: of the rows
    """

    hidden_size: int
    top_k: int
    cap: int
    num_ranks: int
    dtype: torch.dtype

    @property
    def num_physical(self) -> int:
        return self.num_ranks * self.cap


class Dispatcher(ABC):
    """One transport for one geometry on one EP group. Made by `EPContext`, shared by equal layers."""

    name: ClassVar[str]
    capabilities: ClassVar[DispatcherCapabilities]

    def __init__(self, geometry: Geometry, link: Link) -> None:
        self.geometry = geometry
        self.link = link

    @classmethod
    def available(cls) -> str | None:
        """None, or why it cannot run in this installation. Touches no device and no group."""
        return None

    def dispatch(self, x: Tensor, routing: PhysicalRouting) -> Received:
        """x [T, H], ids and weights [T, K] to this rank's received rows."""
        return self.dispatch_start(x, routing).wait()

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """The experts' rows, in the order received, to [T, H]: the sum over ranks."""
        return self.combine_start(y, handle).wait()

    def dispatch_start(self, x: Tensor, routing: PhysicalRouting, problem: str | None = None) -> Pending[Received]:
        """Send; `wait()` receives. problem: a fault the caller found on this rank, raised on all of them."""
        problem = problem or self._problem(x, routing)
        with self.link.ledger.step("dispatch", self.name):
            pending = self._dispatch(x, routing, problem)
        return self._guarded("dispatch", pending)

    def combine_start(self, y: Tensor, handle: Any) -> Pending[Tensor]:
        with self.link.ledger.step("combine", self.name):
            pending = self._combine(y, handle)
        return self._guarded("combine", pending)

    def destroy(self) -> None:
        """Give back what was allocated. Collective, idempotent."""
        return

    @abstractmethod
    def _dispatch(self, x: Tensor, routing: PhysicalRouting, problem: str | None) -> Pending[Received]: ...

    @abstractmethod
    def _combine(self, y: Tensor, handle: Any) -> Pending[Tensor]: ...

    def _guarded(self, phase: str, pending: Pending[Any]) -> Pending[Any]:
        def finish() -> Any:
            with self.link.ledger.step(f"{phase} wait", self.name):
                return pending.wait()

        return Pending(finish)

    def _problem(self, x: Tensor, routing: PhysicalRouting) -> str | None:
        """What is wrong with a call, without waiting for the device."""
        g = self.geometry
        if not isinstance(routing, PhysicalRouting):
            return f"routing must be a PhysicalRouting (pass it through Placement), got {type(routing).__name__}"
        if x.dim() != 2 or x.shape[1] != g.hidden_size:
            return f"x must be [T, {g.hidden_size}], got {list(x.shape)}"
        if x.dtype != g.dtype:
            found, wanted = dtype_name(x.dtype), dtype_name(g.dtype)
            return f"x must be {wanted}, got {found}; convert it or build the layer in {found}"
        return routing_problem(routing.ids, routing.weights, x, g.top_k)

    def _out_of_range(self, routing: PhysicalRouting) -> Tensor:
        """How many ids are neither -1 nor a physical expert: int64 scalar on the device."""
        ids = routing.ids
        return ((ids < -1) | (ids >= self.geometry.num_physical)).sum()

    def _check_ids(self, bad: list[int], experts: str = "an expert id") -> None:
        """Raise on all ranks alike, for the counts of bad ids that all ranks exchanged."""
        if any(bad):
            found = ", ".join(
                f"{count} on rank {rank}" for rank, count in zip(self.link.ranks, bad, strict=True) if count
            )
            raise InputError(f"routing.ids must be -1 or {experts} in range, got ids out of range: {found}")


def routing_problem(ids: Tensor, weights: Tensor, x: Tensor, top_k: int) -> str | None:
    """What is wrong with the shapes, dtypes or devices of a routing for x [T, H]."""
    expected = [x.shape[0], top_k]
    for name, tensor in (("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            return f"routing.{name} must be a Tensor, got {type(tensor).__name__}"
        if list(tensor.shape) != expected:
            return f"routing.{name} must be [T, K] = {expected}, got {list(tensor.shape)}"
        if tensor.device != x.device:
            return f"routing.{name} must be on {x.device} as x is, got {tensor.device}"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"routing.ids must be int32 or int64, got {dtype_name(ids.dtype)}"
    if weights.dtype != torch.float32:
        return f"routing.weights must be float32, got {dtype_name(weights.dtype)}; call .float()"
    return None
