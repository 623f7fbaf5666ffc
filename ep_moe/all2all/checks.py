"""What is wrong with a call's arguments, or with where it is to run. Nothing raises here."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.parallel.layout import RankLayout
from ep_moe.types import dtype_name


def too_many_tokens(x: Tensor, max_tokens: int | None) -> str | None:
    if max_tokens is None or len(x) <= max_tokens:
        return None
    return f"x has {len(x)} tokens on their way, more than max_tokens={max_tokens}; raise that of EPContext"


def one_host_problem(name: str, layout: RankLayout) -> str | None:
    """For transports that reach their peers' memory: None, or that the ranks do not fit on this host."""
    if layout.across_nodes is not None:
        return f"{name} is for one host, and the ranks of an EP group are on several: {layout.across_nodes}"
    ranks, here = layout.ep * layout.etp, layout.paper_gpus
    here = torch.cuda.device_count() if here is None else here
    if here >= ranks:
        return None
    return f"{name} is for one host here: ep * etp is {ranks}, and this host shows {here} GPUs"


def routing_problem(ids: Tensor, weights: Tensor, x: Tensor, top_k: int) -> str | None:
    """What is wrong with the shapes, dtypes or devices of a routing for x [T, H]."""
    expected = [x.shape[0], top_k]
    for name, tensor in (("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            return f"routing.{name} must be a Tensor, got {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return f"routing.{name} must be dense, got {tensor.layout}; pass .to_dense()"
        if list(tensor.shape) != expected:
            return f"routing.{name} must be [T, K] = {expected}, got {list(tensor.shape)}"
        if tensor.device != x.device:
            return f"routing.{name} must be on {x.device} as x is, got {tensor.device}"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"routing.ids must be int32 or int64, got {dtype_name(ids.dtype)}"
    if weights.dtype != torch.float32:
        return f"routing.weights must be float32, got {dtype_name(weights.dtype)}; call .float()"
    return None
