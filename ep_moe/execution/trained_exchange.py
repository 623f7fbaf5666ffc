"""A call with gradients as one node of autograd's graph, for transports that autograd does not differentiate
(`DispatcherCapabilities.adjoint`).

The adjoint of combine is dispatch, and the adjoint of dispatch is combine, with the same routes. Backward therefore:

1. dispatches the gradients of the combined rows to the ranks that computed them;
2. runs the kernel's backward there;
3. combines the gradients of the rows. The gradients of the routing weights are returned with them, or through a second,
   narrow dispatcher.

The call is one node, so that backward makes all of the transport's calls even if only some gradients are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.all2all.base import Dispatcher
from ep_moe.experts.base import Experts
from ep_moe.experts.differentiable import Allocator, SavedForBackward
from ep_moe.experts.layouts import as_rank_major, with_local_ids
from ep_moe.runtime.first_order import first_order_only
from ep_moe.types import LocalIds, PeerRows, PhysicalIds, PhysicalRouting, Received

if TYPE_CHECKING:
    from ep_moe.execution.trained_graphs import TrainedCall, TrainedGraphs

_TINY = torch.finfo(torch.float32).tiny  # replaces a weight of zero in dispatch, because transports drop such routes


@dataclass(frozen=True)
class Transports:
    """The dispatchers of a call with gradients.

    rows: the layer's dispatcher; weights: one of `DispatchShape.of_weights`, if `rows` does not return gradients of
    weights, else None; bound: `max_tokens` of the call
    """

    rows: Dispatcher
    weights: Dispatcher | None
    bound: int | None

    @property
    def all(self) -> tuple[Dispatcher, ...]:
        return (self.rows,) if self.weights is None else (self.rows, self.weights)


class Computed(NamedTuple):
    """The results of a call's forward.

    out: [T, H]; received: the received rows, copied out of the transport's memory; saved: the kernel's saved tensors
    """

    out: Tensor
    received: Received
    saved: tuple[Tensor, ...]


class InputGradients(NamedTuple):
    """The gradients of a call's inputs on this rank.

    x: [T, H]; weights: of the routing weights, float32 [T, K] or wider, of which K columns count
    """

    x: Tensor
    weights: Tensor


def wants_gradients(experts: Experts, x: Tensor, weights: Tensor) -> bool:
    """Return whether a call has a backward.

    A rank without experts counts as training, so that it takes part in the peers' backward.
    """
    if not torch.is_grad_enabled() or not experts.capabilities.differentiable:
        return False
    held = experts.weights
    return x.requires_grad or weights.requires_grad or not held.slots_of_expert or held.any_requires_grad


def run_trained(
    transports: Transports, experts: Experts, x: Tensor, routing: PhysicalRouting, graphs: TrainedGraphs | None
) -> Tensor:
    """Run a call with gradients; return rows [T, H], summed over ranks. x: [T, H], plain rows; graphs: of the layer"""

    def call() -> Tensor:
        stored = experts.weights.stored_tensors()
        recorded = None if graphs is None else graphs.call(transports, experts, x)
        out: Tensor = _TrainedExchange.apply(
            transports, experts, tuple(stored), recorded, routing.ids, experts.weights.anchor, x, routing.weights,
            *stored.values(),
        )  # fmt: skip
        return out

    out: Tensor = experts.weights(call)
    return out


def run_forward(
    transports: Transports, experts: Experts, x: Tensor, routing: PhysicalRouting, allocate: Allocator | None = None,
    out: Tensor | None = None,
) -> Computed:  # fmt: skip
    """Dispatch, compute and combine, and save the tensors that backward needs.

    allocate: allocates these tensors, for kernels with `records_training`; out: where to write the result
    """
    received = transports.rows.dispatch(x, routing, max_tokens=transports.bound)
    own = _private_copy(received, experts.weights.num_slots, allocate)
    options: dict[str, Any] = {} if allocate is None else {"allocate": allocate}
    y, saved = experts.compute_saving(own, **options, **to_peers(experts, received))
    return Computed(transports.rows.combine(y, received.handle, out), own, saved)


def to_peers(experts: Experts, received: Received) -> dict[str, Any]:
    """Return the keyword argument `peer_out` of a kernel's forward or backward, if it can write rows to the peers."""
    return {"peer_out": received.peer_out} if experts.trains_to_peers and received.peer_out is not None else {}


def exchange_gradients(
    transports: Transports, routing: PhysicalRouting, grad: Tensor,
    gradients: Callable[[Received], tuple[Tensor | PeerRows, Tensor | None]], to: InputGradients | None = None,
) -> InputGradients:  # fmt: skip
    """Dispatch the gradients of a call's results, and return the gradients of its rows and routing weights.

    gradients: computes, from the received gradients of the experts' results, the gradients of the rows that forward
        received, [N, H] or written to the peers, and of their weights [N, K]
    to: where to write the results
    """
    rows, narrow_rows, bound = transports.rows, transports.weights, transports.bound
    received = rows.dispatch(grad, routing, max_tokens=bound)
    by_row, by_weight = gradients(received)
    assert by_weight is not None
    outs = (None, None) if to is None else to
    if narrow_rows is None:
        return InputGradients(*rows.combine_with_weights(by_row, by_weight, received.handle, *outs))
    dx = rows.combine(by_row, received.handle, outs[0])
    shape = narrow_rows.dispatch_shape
    sent = grad.new_empty(len(grad), shape.hidden_size, dtype=shape.dtype)  # only the routes matter, not the numbers
    there = narrow_rows.dispatch(sent, routing, max_tokens=bound)
    more = shape.hidden_size - by_weight.shape[1]
    by_weight = torch.nn.functional.pad(by_weight, (0, more)) if more else by_weight
    return InputGradients(dx, narrow_rows.combine(by_weight, there.handle, outs[1]))


class _TrainedExchange(Function):
    @staticmethod
    def forward(
        ctx: Any, transports: Transports, experts: Experts, names: tuple[str, ...], recorded: TrainedCall | None,
        ids: Tensor, anchor: Tensor | None, x: Tensor, weights: Tensor, *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        # transports drop a route of weight zero, but its weight has a gradient
        weights = torch.add(weights, weights == 0, alpha=_TINY)
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        by_name = dict(zip(names, stored, strict=True))
        if recorded is None:
            out, own, saved = run_forward(transports, experts, x, routing)
        else:
            out, own, saved = recorded.forward(x, routing, by_name)
        ctx.transports, ctx.recorded = transports, recorded
        ctx.saved = SavedForBackward(experts, own, saved, by_name)
        ctx.save_for_backward(ids, weights, *ctx.saved.give_tensors())
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved: SavedForBackward = ctx.saved
        wanted, absent = saved.begin_backward(ctx.needs_input_grad, grad)
        ids, weights, *tensors = ctx.saved_tensors
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        found = None if ctx.recorded is None else ctx.recorded.backward(saved, tuple(tensors), wanted, grad, routing)
        if found is None:
            found = backward(ctx.transports, saved, tuple(tensors), wanted, grad, routing)
        of_inputs, stored = found
        if absent:
            saved.experts.weights.gradient_sum.contribute_zeros()
        dweights = of_inputs.weights[:, : ids.shape[1]]
        return (None, None, None, None, None, None, of_inputs.x, dweights, *saved.of_stored(stored))


Gradients = tuple[InputGradients, dict[str, Tensor | None]]  # the second: of stored tensors, by name


def backward(
    transports: Transports, saved: SavedForBackward, tensors: tuple[Tensor, ...], wanted: dict[str, bool],
    grad: Tensor, routing: PhysicalRouting,
) -> Gradients:  # fmt: skip
    """Run the backward of a call eagerly, with the least memory: operands of a product are freed after it.

    tensors: the result of `SavedForBackward.give_tensors`
    """
    stored: dict[str, Tensor | None] = {}

    def gradients(sent: Received) -> tuple[Tensor | PeerRows, Tensor | None]:
        found = saved.gradients(tensors, sent.x, wanted, **to_peers(saved.experts, sent))
        stored.update(found.stored)
        return found.x, found.weights

    return exchange_gradients(transports, routing, grad.contiguous(), gradients), stored


def _private_copy(received: Received, num_slots: int, allocate: Allocator | None) -> Received:
    """Return received rows in memory of their own, with local ids. The next call overwrites the transport's memory."""
    found = as_rank_major(with_local_ids(received, num_slots), num_slots)
    assert found.local_ids is not None
    assert found.weights is not None
    x, weights, ids = found.x, found.weights, found.local_ids
    given = torch.add(weights, weights == _TINY, alpha=-_TINY)
    if allocate is not None:
        x, given = _copied(allocate, "rows", x), _copied(allocate, "weights", given)
        ids = LocalIds(_copied(allocate, "ids", ids))
    else:
        x, ids = x.clone(), LocalIds(ids.clone()) if received.wire_ids is None else ids
    return Received(x=x, weights=given, local_ids=ids, layout=found.layout, weighting=found.weighting, handle=None)


def _copied(allocate: Allocator, name: str, tensor: Tensor) -> Tensor:
    return allocate(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)
