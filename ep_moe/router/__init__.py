"""Routers: methods of routing and the module that holds a linear map, and its kernels."""

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
