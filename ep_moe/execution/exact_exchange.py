"""An exchange whose sums do not depend on which ranks hold which experts (`ExpertsOptions.exact`).

Transports sum a token's results first on each rank and then over ranks, so the order of the sum depends on the expert
map. An exact call therefore sends each of a token's K routes as a separate row with one expert and a weight of 1. No
rank adds anything to such a row. The token's own rank multiplies the K returned rows by the weights and adds them in
the order of the routes, in float32. The gradients of a token's K rows are added in the same way.

Transports that return one row per route (`DispatchShape.per_route`) need this only for calls with gradients, whose
backward sends K rows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.all2all.base import Dispatcher, too_many_tokens
from ep_moe.context import EPContext
from ep_moe.execution.exchange import Exchange
from ep_moe.experts.base import Experts
from ep_moe.runtime.batch_invariant import repeat_rows, sum_columns, sum_routes
from ep_moe.runtime.batched_gradients import refuse_batch
from ep_moe.runtime.first_order import first_order_only
from ep_moe.runtime.triton_compat import Missing, triton
from ep_moe.types import PhysicalIds, PhysicalRouting


class ExactExchange:
    """An `Exchange` over a dispatcher for T * K rows with one route each.

    x: [T, H] of the layer's dtype
    """

    def __init__(
        self, context: EPContext, dispatcher: Dispatcher, experts: Experts, x: Tensor, routing: PhysicalRouting
    ) -> None:
        placed = routing.materialize()
        self._ids, self._weights, top_k = placed.ids, placed.weights, placed.ids.shape[1]
        ones = placed.weights.new_ones(self._ids.numel(), 1)
        routes = PhysicalRouting(PhysicalIds(self._ids.reshape(-1, 1)), ones)
        self._problem = too_many_tokens(x, context._call_limit)
        self._exchange = Exchange(context, dispatcher, experts, repeated(x, top_k), routes, rows_per_token=top_k)

    def run(self, work: Callable[[], Any] | None = None) -> tuple[Tensor, Any]:
        """Run the exchange. Arguments and result are those of `Exchange.run`."""
        if self._problem is not None:
            self.refuse(self._problem)
        rows, found = self._exchange.run(work)
        return combined(rows, self._ids, self._weights), found

    def refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem, as `Exchange.refuse` does."""
        self._exchange.refuse(problem)


def repeated(x: Tensor, top_k: int) -> Tensor:
    """Repeat each row K times, once per route.

    Args:
        x: [T, H].
        top_k: K.

    Returns:
        [T * K, H].
    """
    out: Tensor = _Repeated.apply(x, top_k)
    return out


def combined(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows by their weights, and add the K rows of each token in order, in float32.

    Args:
        rows: [T * K, H], the K rows of a token in consecutive places.
        ids: [T, K], below 0 for no expert. The weight of such a route is treated as 0.
        weights: float32 [T, K].

    Returns:
        [T, H] of the rows' dtype.
    """
    out: Tensor = _Combined.apply(rows, ids, weights)
    return out


def fan_out_in_order(x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x three times, for the router, the experts and the shared experts.

    Backward adds their gradients in this order. Autograd would add them in an order that depends on the layout.

    Args:
        x: [T, H].
        padding: bool [T, 1], the rows that the router and the experts see as zeros. None if there are none.

    Returns:
        Rows [T, H] for the router, the experts and the shared experts.
    """
    to_router, to_experts, to_shared = _FanOut.apply(x)
    if padding is not None:
        to_router, to_experts = to_router.masked_fill(padding, 0), to_experts.masked_fill(padding, 0)
    return to_router, to_experts, to_shared


class _FanOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view_as(x), x.view_as(x), x.view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        refuse_batch(*grads)
        total = torch.zeros_like(grads[0], dtype=torch.float32)
        for grad in grads:
            total += grad
        return total.to(grads[0].dtype)


class _Repeated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        return repeat_rows(x, top_k) if _by_kernels(x) else x.repeat_interleave(top_k, 0)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_batch(grad)
        return _in_order(grad, ctx.top_k), None


class _Combined(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ids, weights)
        return _in_order(rows, ids.shape[1], ids, weights)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, ids, weights = ctx.saved_tensors
        none, wide = ids < 0, grad.float().unsqueeze(1)
        to_rows = (wide * weights.masked_fill(none, 0.0).unsqueeze(2)).to(rows.dtype).view_as(rows)
        dots = sum_columns(wide * rows.view(*weights.shape, rows.shape[1]).float())
        return to_rows, None, dots.masked_fill(none, 0.0)


def _by_kernels(x: Tensor) -> bool:
    return x.is_cuda and not isinstance(triton, Missing)


def _in_order(rows: Tensor, top_k: int, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Sum the K rows of each token in order. The sum starts at 0.0, so that a result of zero is +0.0, never -0.0."""
    if _by_kernels(rows):
        return sum_routes(rows, top_k, ids, weights)
    by_route = rows.view(-1, top_k, rows.shape[1])
    total = rows.new_zeros(len(by_route), rows.shape[1], dtype=torch.float32)
    if ids is not None and weights is not None:
        weights = weights.masked_fill(ids < 0, 0.0)
    for route in range(top_k):
        one = by_route[:, route].float()
        total += one if weights is None else one * weights[:, route : route + 1]
    return total.to(rows.dtype)
