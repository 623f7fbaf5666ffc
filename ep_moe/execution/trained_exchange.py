"""Dispatch, experts and combine as one node of autograd's graph, for transports whose backward is a call of their own
(`DispatcherCapabilities.adjoint`).

The adjoint of combine is dispatch, and that of dispatch is combine, with the same routes. So backward sends the
gradients of the combined rows to the ranks that computed them, runs the kernel's backward there, and combines what it
gives; the gradients of the routing weights come back through a second, narrow dispatcher. One node, so that a
transport's calls are whole even where only some gradients are asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.experts.backward import Kept
from ep_moe.experts.base import Experts
from ep_moe.experts.layouts import as_rank_major, localized
from ep_moe.types import LocalIds, PhysicalIds, PhysicalRouting, Received

_TINY = torch.finfo(torch.float32).tiny  # stands for a weight of zero while it travels
LANES = 4  # float32 numbers of 16 bytes, to a multiple of which transports want their rows


def narrow(shape: DispatchShape) -> DispatchShape:
    """Of the dispatcher that brings the routing weights' gradients back: rows of top_k numbers."""
    columns = -(-shape.top_k // LANES) * LANES
    return dataclasses.replace(shape, hidden_size=columns, dtype=torch.float32)


@dataclass(frozen=True)
class Transports:
    """rows: of the layer; weights: of `narrow`; bound: `max_tokens` of the call"""

    rows: Dispatcher
    weights: Dispatcher
    bound: int | None


def wants_gradients(experts: Experts, x: Tensor, weights: Tensor) -> bool:
    """Whether a call is part of a graph of autograd's, on all ranks that train alike."""
    if not torch.is_grad_enabled() or not experts.capabilities.differentiable:
        return False
    held = experts.weights
    return x.requires_grad or weights.requires_grad or not held.held or held.trained


def run(transports: Transports, experts: Experts, x: Tensor, routing: PhysicalRouting) -> Tensor:
    """x: [T, H], plain rows. Returns the sum over ranks, [T, H]."""

    def call() -> Tensor:
        stored = experts.weights.stored_tensors()
        out: Tensor = _Exchange.apply(
            transports, experts, tuple(stored), routing.ids, experts.weights.anchor, x, routing.weights,
            *stored.values(),
        )  # fmt: skip
        return out

    out: Tensor = experts.weights(call)
    return out


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, transports: Transports, experts: Experts, names: tuple[str, ...], ids: Tensor, anchor: Tensor | None,
        x: Tensor, weights: Tensor, *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        # a route of weight zero is none to a transport, and has a gradient all the same. Filled: `torch.where` of a
        # number brings it to the device, for which the host waits
        weights = weights.masked_fill(weights == 0, _TINY)
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        received = transports.rows.dispatch(x, routing, max_tokens=transports.bound)
        own = _own(received, experts.weights.num_slots)
        y, saved = experts.compute_saving(own)
        out = transports.rows.combine(y, received.handle)
        ctx.transports, ctx.experts, ctx.names = transports, experts, names
        ctx.kept = Kept(own, saved, dict(zip(names, stored, strict=True)))
        ctx.save_for_backward(ids, weights, *ctx.kept.tensors)
        del ctx.kept.tensors
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids, weights, *kept = ctx.saved_tensors
        rows, narrow_rows, bound = ctx.transports.rows, ctx.transports.weights, ctx.transports.bound
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[7:], strict=True))
        received = rows.dispatch(grad.contiguous(), routing, max_tokens=bound)
        found = ctx.kept.gradients(ctx.experts, tuple(kept), received.x, wanted)
        dx = rows.combine(found.x, received.handle)
        assert found.weights is not None
        shape = narrow_rows.dispatch_shape
        sent = grad.new_zeros(len(ids), shape.hidden_size, dtype=shape.dtype)
        there = narrow_rows.dispatch(sent, routing, max_tokens=bound)
        more = shape.hidden_size - found.weights.shape[1]
        rows_back = torch.nn.functional.pad(found.weights, (0, more)) if more else found.weights
        dweights = narrow_rows.combine(rows_back, there.handle)[:, : ids.shape[1]]
        return (None, None, None, None, None, dx, dweights, *(found.stored[name] for name in ctx.names))


def _own(received: Received, num_slots: int) -> Received:
    """Rows in memory of their own, with local ids: the transport's is written again by the next call."""
    found = as_rank_major(localized(received, num_slots), num_slots)
    assert found.local_ids is not None
    assert found.weights is not None
    return Received(
        x=found.x.clone(),
        weights=found.weights.masked_fill(found.weights == _TINY, 0.0),
        local_ids=LocalIds(found.local_ids.clone() if received.wire_ids is None else found.local_ids),
        layout=found.layout,
        weighting=found.weighting,
        handle=None,
    )
