"""Recording and replay of the routes of one layer's calls.

Recording copies tensors of fixed shapes to a place that a counter on the device gives. It does not wait for the device,
its allocations do not depend on data, and CUDA graphs can capture it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.checks import check_count, check_flag
from ep_moe.errors import InputError
from ep_moe.router import CHOOSE_BY_ROUTER, Router
from ep_moe.runtime.devices import as_device
from ep_moe.types import Routing, capturing, dtype_name, recomputing


class RoutingBuffer:
    """Device memory for the routes of a layer's rows, in the order of its calls.

    Args:
        rows: The number of rows that it has room for. Further rows are dropped, and `read` raises an error.
        top_k: K.
        weights: Whether to record weights beside ids.
        device: The layer's device.

    Attributes:
        ids: int32 [rows, K], logical ids, -1 for no expert.
        weights: float32 [rows, K], or None.

    Raises:
        ConfigError: a size is no integer of at least 1.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def __init__(
        self, rows: int, top_k: int, *, weights: bool = False, device: torch.device | str | int = "cpu"
    ) -> None:
        self.rows, self.top_k = check_count("rows", rows, at_least=1), check_count("top_k", top_k, at_least=1)
        check_flag("weights", weights)
        device = as_device(device)
        # one more row, which takes the rows that have no room
        self._ids = torch.full((self.rows + 1, self.top_k), -1, dtype=torch.int32, device=device)
        self._weights = torch.zeros(self.rows + 1, self.top_k, dtype=torch.float32, device=device) if weights else None
        self._written = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def ids(self) -> Tensor:
        """The ids of all rows, including rows that are not written yet."""
        return self._ids[:-1]

    @property
    def weights(self) -> Tensor | None:
        """The weights of all rows, or None."""
        return None if self._weights is None else self._weights[:-1]

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._ids.device

    def reset(self) -> None:
        """Start again at the first row. Does not wait for the device."""
        self._written.zero_()

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows that were written since `reset`. Waits for the device.

        Returns:
            Ids, int32 [N, K], and weights, float32 [N, K] or None. Both are views, which later calls overwrite.

        Raises:
            InputError: more rows were recorded than there is room for.
        """
        written = int(self._written)
        if written > self.rows:
            raise InputError(
                f"RoutingBuffer has room for {self.rows} rows, and {written} were recorded; make it with rows={written}"
            )
        return self._ids[:written], None if self._weights is None else self._weights[:written]

    @torch.no_grad()
    def write(self, ids: Tensor, weights: Tensor) -> None:
        """Append rows.

        Args:
            ids: Integer [T, K].
            weights: [T, K].
        """
        place = torch.arange(len(ids), device=ids.device).add_(self._written).clamp_(max=self.rows)
        self._ids.index_copy_(0, place, ids.int())
        if self._weights is not None:
            self._weights.index_copy_(0, place, weights.float())
        self._written += len(ids)


class RoutingTap:
    """The recording and replay of one layer's routes. The layer uses it in each call.

    Attributes:
        buffer: The buffer to record into, or None.
        replayed: The replayed routes, or None.
    """

    def __init__(self) -> None:
        self.buffer: RoutingBuffer | None = None
        self.replayed: Replay | None = None
        self._graphs: weakref.WeakSet[_Alive] = weakref.WeakSet()  # autograd graphs of calls with replayed routes
        self._newest = False  # whether the newest call had replayed routes

    @property
    def active(self) -> bool:
        """Whether routes are recorded or replayed."""
        return self.buffer is not None or self.replayed is not None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Record and replay no routes in the block: the rows of its calls are no tokens."""
        before = self.buffer, self.replayed
        self.buffer = self.replayed = None
        try:
            yield
        finally:
            self.buffer, self.replayed = before

    def problem(self, layer: Any, rows: int, *, routed: bool) -> str | None:
        """Return None, or why routes cannot be recorded or replayed in this call.

        Args:
            layer: A MoELayer.
            rows: T.
            routed: Whether the caller passes routes.

        Returns:
            None, or the message of an InputError.
        """
        again = recomputing()
        if self.replayed is None and again and (self._newest or len(self._graphs)):
            return (
                f"{layer.name}: backward recomputes a call whose routes were replayed; call backward inside "
                "replay_routing, so that it gets the same routes"
            )
        if not again:
            self._newest = self.replayed is not None
        if self.active and layer._routes_inside:
            return f"experts={layer.choice.experts} has a built-in router and returns no routes; choose other experts"
        if self.buffer is not None and (wrong := _buffer_problem(self.buffer, layer)) is not None:
            return wrong
        if self.replayed is None:
            return None
        if routed or type(layer.router) is not Router:
            what = "forward_routed was given routes" if routed else "the layer has a custom router"
            return (
                f"replay_routing: {what}, and only ep_moe.Router recomputes weights; leave router=None, or pass the "
                "recorded ids to forward_routed with your own weights"
            )
        return self.replayed.problem(rows, layer.config, layer.device)

    def record(self, ids: Tensor, weights: Tensor) -> None:
        """Append a call's routes to the buffer. A call that activation checkpointing repeats is not recorded again."""
        if self.buffer is not None and not recomputing():
            self.buffer.write(ids, weights)

    def record_whole(self, chosen: Routing, whole: Callable[[Tensor], Tensor]) -> None:
        """Append the routes of all rows of x. chosen: those of this rank's rows; whole: gathers rows over tp ranks"""
        if self.buffer is not None and not recomputing():
            with torch.no_grad():  # float32 holds ids exactly
                both = whole(torch.cat([chosen.ids.float(), chosen.weights], 1))
            self.buffer.write(*both.chunk(2, dim=1))

    def seen(self, weights: Tensor) -> Tensor:
        """Return the weights of a call with replayed routes unchanged, and track its autograd graph."""
        if not weights.requires_grad or not torch.is_grad_enabled():
            return weights
        alive = _Alive()
        self._graphs.add(alive)
        out: Tensor = _Seen.apply(weights, alive)
        return out


class Replay:
    """The replayed routes of each call in a block.

    Args:
        ids: Integer [..., K] of T rows.
        mask: bool [...] of T elements, True for rows that take these ids. The router chooses for other rows. None if
            all rows take them.

    Attributes:
        ids: int64 [T, K] of the current call, `CHOOSE_BY_ROUTER` in rows for which the router chooses.
        partial: Whether there may be such rows.
    """

    def __init__(self, ids: Tensor | None, mask: Tensor | None) -> None:
        self._given, self._mask = ids, mask
        self._checked = False
        self.ids, self.partial = torch.empty(0, dtype=torch.int64, device="cpu"), mask is not None

    def problem(self, rows: int, config: Any, device: torch.device) -> str | None:
        """Return None, or what is wrong with the ids or the mask for a call of this many rows.

        On a GPU the values of ids are checked once, which waits for the device, and not in a graph capture. An invalid
        id that is written later is dropped by the kernels, which report it (`InvalidIds`).
        """
        ids, mask = self._given, self._mask
        if ids is None:
            return "replay_routing: no ids were given for this layer; record the same layers that are replayed"
        if not isinstance(ids, Tensor):
            return f"replay_routing: ids must be a Tensor, got {type(ids).__name__}"
        if ids.dtype not in (torch.int16, torch.int32, torch.int64):
            return f"replay_routing: ids must be int16, int32 or int64, got {dtype_name(ids.dtype)}"
        if ids.dim() < 2 or ids.shape[-1] != config.top_k or ids.numel() != rows * config.top_k:
            return (
                f"replay_routing: ids must be [{rows}, {config.top_k}] for a call of {rows} rows, got {list(ids.shape)}"
            )
        if ids.device != device:
            return f"replay_routing: ids must be on {device} as the layer is, got {ids.device}"
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                found = dtype_name(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
                return f"replay_routing: mask must be a bool Tensor, True for rows that take the ids, got {found}"
            if mask.numel() != rows or mask.device != device:
                return (
                    f"replay_routing: mask must be [{rows}] on {device}, as the ids without their last size, got "
                    f"{list(mask.shape)} on {mask.device}"
                )
        # converted in each call: a captured CUDA graph then reads ids that are rewritten before a replay
        given = ids.reshape(-1, config.top_k).long()
        kept = None if mask is None else mask.reshape(-1)
        self.ids = given if kept is None else given.masked_fill(~kept.unsqueeze(1), CHOOSE_BY_ROUTER)
        if device.type != "cpu" and (self._checked or capturing(device)):
            return None
        self._checked = True
        return _ids_problem(given if kept is None else given[kept], config.num_experts)


def _ids_problem(ids: Tensor, experts: int) -> str | None:
    bad = ids[(ids < -1) | (ids >= experts)]
    if len(bad):
        return f"replay_routing: ids must be -1 or in [0, {experts}), got {int(bad[0])} ({len(bad)} ids out of range)"
    ordered = ids.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        return "replay_routing: the ids of a row must be distinct, got one twice"
    return None


def _buffer_problem(buffer: Any, layer: Any) -> str | None:
    if not isinstance(buffer, RoutingBuffer):
        return f"record_routing: buffer must be a RoutingBuffer, got {type(buffer).__name__}"
    if buffer.top_k != layer.config.top_k:
        return f"record_routing: buffer must have top_k={layer.config.top_k} as {layer.name} has, got {buffer.top_k}"
    if buffer.device != layer.device:
        return f"record_routing: buffer must be on {layer.device} as {layer.name} is, got {buffer.device}"
    return None


class _Alive:
    """An object that lives as long as the autograd graph of one call, because the graph's node holds it."""


class _Seen(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, alive: _Alive) -> Tensor:
        ctx.alive = alive
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
