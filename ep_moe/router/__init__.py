"""Routers: routing methods, the `Router` module, and its Triton kernels."""

from ep_moe.router.module import (
    LIVE,
    Router,
    route,
    sigmoid_topk,
    softmax_topk,
    topk_sigmoid,
    topk_softmax,
    weights_of,
)

__all__ = [
    "LIVE", "Router", "route", "sigmoid_topk", "softmax_topk", "topk_sigmoid", "topk_softmax", "weights_of",
]  # fmt: skip
