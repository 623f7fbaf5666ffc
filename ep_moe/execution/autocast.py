"""A layer under `torch.autocast`: what a user sees is what `nn.Linear` shows, and the layer computes in its own dtype.

Autocast chooses dtypes operation by operation. Kernels, transports and the router of a layer have one dtype each,
so it is switched off inside: x is cast to the layer's dtype, and the result to autocast's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.types import Routing, TokenMask

CAST = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what autocast casts; it leaves float64 alone


def call_cast(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """The layer's call where autocast is on. Gradients arrive in the dtypes that were given."""
    kind = layer.context.device.type
    with torch.autocast(kind, enabled=False):
        if isinstance(x, Tensor) and x.dtype in CAST:
            x = x.to(layer.dtype)
        if isinstance(routing, Routing) and isinstance(routing.weights, Tensor) and routing.weights.dtype in CAST:
            routing = Routing(routing.ids, routing.weights.float(), routing.logits)
        out: Tensor = layer._call(x, routing, mask)
    return out.to(torch.get_autocast_dtype(kind))
