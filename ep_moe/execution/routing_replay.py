"""Routes of one layer's calls, recorded and given again.

A recording is made of copies of fixed shapes and a counter on the device: it neither waits for the device nor allocates
by what it finds, and CUDA graphs hold it.
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
from ep_moe.router import LIVE, Router
from ep_moe.runtime.devices import as_device
from ep_moe.types import Routing, capturing, dtype_name, recomputing


class RoutingBuffer:
    """Memory for the routes of a layer's rows, in the order of its calls.

    Args:
        rows: Rows that it has room for. Rows beyond them are dropped, and `read` says so.
        top_k: K.
        weights: Keep weights beside ids.
        device: The layer's.

    Attributes:
        ids: int32 [rows, K], logical ids, -1 for no expert.
        weights: float32 [rows, K], or None.

    Raises:
        ConfigError: a size that is no integer of at least 1.
    """

    @torch.inference_mode(False)  # or what is made within one could not be written outside
    def __init__(
        self, rows: int, top_k: int, *, weights: bool = False, device: torch.device | str | int = "cpu"
    ) -> None:
        self.rows, self.top_k = check_count("rows", rows, at_least=1), check_count("top_k", top_k, at_least=1)
        check_flag("weights", weights)
        device = as_device(device)
        # rows that find no room are written to one row more
        self._ids = torch.full((self.rows + 1, self.top_k), -1, dtype=torch.int32, device=device)
        self._weights = torch.zeros(self.rows + 1, self.top_k, device=device) if weights else None
        self._written = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def ids(self) -> Tensor:
        """The rows' ids, those of rows that are not written yet too."""
        return self._ids[:-1]

    @property
    def weights(self) -> Tensor | None:
        """The rows' weights."""
        return None if self._weights is None else self._weights[:-1]

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._ids.device

    def reset(self) -> None:
        """Begin at the first row again. Does not wait for the device."""
        self._written.zero_()

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Read what was written since `reset`. Waits for the device.

        Returns:
            Ids, int32 [N, K], and weights, float32 [N, K] or None: views, which later calls write.

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
    """What one layer records and is given. Its layer asks in each call.

    Attributes:
        buffer: What is recorded into, or None.
        replayed: What routes are taken from, or None.
    """

    def __init__(self) -> None:
        self.buffer: RoutingBuffer | None = None
        self.replayed: Replay | None = None
        self._graphs: weakref.WeakSet[_Alive] = weakref.WeakSet()  # of autograd's, of replayed calls
        self._newest = False  # whether the newest call was replayed

    @property
    def active(self) -> bool:
        """Whether a call must come by here."""
        return self.buffer is not None or self.replayed is not None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within, the rows of calls are no tokens: they are not recorded, and take no ids."""
        before = self.buffer, self.replayed
        self.buffer = self.replayed = None
        try:
            yield
        finally:
            self.buffer, self.replayed = before

    def problem(self, layer: Any, rows: int, *, routed: bool) -> str | None:
        """None, or what is wrong with this call of a layer.

        Args:
            layer: A MoELayer.
            rows: T.
            routed: Whether the caller gives routes.

        Returns:
            A sentence for an InputError.
        """
        again = recomputing()
        if self.replayed is None and again and (self._newest or len(self._graphs)):
            return (
                f"{layer.name}: backward computes a call again whose routes were replayed; call backward within "
                f"replay_routing, so that it gets the same ones"
            )
        if not again:
            self._newest = self.replayed is not None
        if self.active and layer._routes_inside:
            return f"experts={layer.choice.experts} routes inside, and shows no routes; choose other experts"
        if self.buffer is not None and (wrong := _buffer_problem(self.buffer, layer)) is not None:
            return wrong
        if self.replayed is None:
            return None
        if routed or type(layer.router) is not Router:
            what = "forward_routed was given routes" if routed else "the layer's router is the user's"
            return (
                f"replay_routing: {what}, and weights are computed again by ep_moe.Router alone; leave router to the "
                f"layer, or pass the recorded ids to forward_routed with weights of your own"
            )
        return self.replayed.problem(rows, layer.config, layer.device)

    def record(self, ids: Tensor, weights: Tensor) -> None:
        """Append a call's routes, once however often backward computes it again."""
        if self.buffer is not None and not recomputing():
            self.buffer.write(ids, weights)

    def record_whole(self, chosen: Routing, whole: Callable[[Tensor], Tensor]) -> None:
        """Append the routes of all rows of x. chosen: of this rank's; whole: brings together those of tp ranks"""
        if self.buffer is not None and not recomputing():
            with torch.no_grad():  # float32 holds ids exactly
                both = whole(torch.cat([chosen.ids.float(), chosen.weights], 1))
            self.buffer.write(*both.chunk(2, dim=1))

    def seen(self, weights: Tensor) -> Tensor:
        """The same weights of a replayed call, whose graph is known from then on."""
        if not weights.requires_grad or not torch.is_grad_enabled():
            return weights
        alive = _Alive()
        self._graphs.add(alive)
        out: Tensor = _Seen.apply(weights, alive)
        return out


class Replay:
    """Routes for each call of a block.

    Args:
        ids: Integer [..., K] of T rows.
        mask: bool [...] of T elements, True for rows that take these ids; other rows are routed. None for all.

    Attributes:
        ids: int64 [T, K] of the present call, LIVE in rows that are routed.
        partial: Whether rows may be routed.
    """

    def __init__(self, ids: Tensor | None, mask: Tensor | None) -> None:
        self._given, self._mask = ids, mask
        self._checked = False
        self.ids, self.partial = torch.empty(0, device="cpu"), mask is not None

    def problem(self, rows: int, config: Any, device: torch.device) -> str | None:
        """None, or what is wrong for a call of so many rows. Waits for a GPU once, but for a graph's capture: kernels
        drop an id that is written later and names no expert, and tell of it as of all ids (`InvalidIds`)."""
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
        # read in each call, also in a CUDA graph: rewritten ids need no new capture
        given = ids.reshape(-1, config.top_k).long()
        kept = None if mask is None else mask.reshape(-1)
        self.ids = given if kept is None else given.masked_fill(~kept.unsqueeze(1), LIVE)
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
    """Lives as long as the graph of one call."""


class _Seen(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, alive: _Alive) -> Tensor:
        ctx.alive = alive
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
