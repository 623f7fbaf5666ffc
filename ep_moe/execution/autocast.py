"""A layer's call under `torch.autocast`.

The dtypes of inputs and results are those of `nn.Linear` under autocast. Inside, the layer computes in its own dtype:
its kernels, transports and router have one dtype each, so autocast is disabled there. x is cast to the layer's dtype,
and the result to autocast's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.types import Routing, TokenMask

CAST = frozenset({torch.float32, torch.bfloat16, torch.float16})  # the dtypes that autocast casts; it skips float64


def call_cast(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """Call a layer under autocast. Gradients have the dtypes of the arguments."""
    kind = layer.context.device.type
    with torch.autocast(kind, enabled=False):
        if isinstance(x, Tensor) and x.dtype in CAST:
            x = x.to(layer.dtype)
        if isinstance(routing, Routing) and isinstance(routing.weights, Tensor) and routing.weights.dtype in CAST:
            routing = Routing(routing.ids, routing.weights.float(), routing.logits)
        out: Tensor = layer._call(x, routing, mask)
    return out.to(torch.get_autocast_dtype(kind))
