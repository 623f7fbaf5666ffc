"""Routers: routing methods, the `Router` module, and its Triton kernels."""

from ep_moe.router.module import (
    CHOOSE_BY_ROUTER,
    Router,
    route,
    routing_weights,
    sigmoid_topk,
    softmax_topk,
    topk_sigmoid,
    topk_softmax,
)

__all__ = [
    "CHOOSE_BY_ROUTER", "Router", "route", "routing_weights", "sigmoid_topk", "softmax_topk", "topk_sigmoid",
    "topk_softmax",
]  # fmt: skip
