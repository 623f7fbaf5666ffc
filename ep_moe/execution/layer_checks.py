"""What is wrong with the arguments of a layer's call. Nothing raises here: all ranks must raise together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.all2all.checks import routing_problem
from ep_moe.types import Routing, TokenMask, dtype_name

CAST = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what autocast casts; it leaves float64 alone
NO_ROUTING: Any = object()  # what `forward_routed` makes of None, which stands for the layer's own router further on


def rows_problem(x: Any, hidden: int, dtype: torch.dtype, device: torch.device, home: torch.device) -> str | None:
    """hidden, dtype, device: the layer's; home: its context's device."""
    if not isinstance(x, Tensor):
        return f"x must be a Tensor, got {type(x).__name__}"
    if device.type == "meta":
        return "the layer is on the meta device; call to_empty(device=...) and load weights first"
    if device != home:
        return f"the layer is on {device} and its EPContext on {home}; move it there with layer.to({str(home)!r})"
    if x.layout is not torch.strided:
        return f"x must be dense, got {x.layout}; pass x.to_dense()"
    if x.dim() < 1 or x.shape[-1] != hidden:
        return f"x must be [..., {hidden}] (hidden_size), got {list(x.shape)}"
    if x.dtype != dtype:
        remedy = "; convert it, or call the layer under torch.autocast, which does" if {x.dtype, dtype} <= CAST else ""
        return f"x must be {dtype_name(dtype)} as the layer is, got {dtype_name(x.dtype)}{remedy}"
    if x.device != device:
        return f"x must be on {device} as the layer is, got {x.device}"
    return None


def mask_problem(mask: TokenMask, x: Tensor) -> str | None:
    tokens, sizes = mask.tokens, list(x.shape[:-1])
    if not isinstance(tokens, Tensor):
        return f"mask must be a Tensor, got {type(tokens).__name__}"
    if tokens.dtype != torch.bool:
        return f"mask must be bool, True for a token, got {dtype_name(tokens.dtype)}; pass mask != 0"
    if list(tokens.shape) != sizes:
        return f"mask must be {sizes}, as x without its last size, got {list(tokens.shape)}"
    if tokens.device != x.device:
        return f"mask must be on {x.device} as x is, got {tokens.device}"
    return None


def choice_problem(routing: Any, rows: Tensor, top_k: int) -> str | None:
    """Of a routing for rows [T, H]."""
    if routing is NO_ROUTING:
        return "routing must be a Routing of logical ids, got None; call the layer itself for its own router"
    if not isinstance(routing, Routing):
        return f"routing must be a Routing of logical ids, got {type(routing).__name__}"
    return routing_problem(routing.ids, routing.weights, rows, top_k)


def logits_problem(routing: Routing, tokens: int, experts: int) -> str | None:
    """Of a routing whose logits are recorded."""
    if routing.logits is None:
        return (
            "ep_moe.training.router_logits records Routing.logits, which is None; let the router return "
            "Routing(ids, weights, logits=...) with logits [T, E]"
        )
    if list(routing.logits.shape) != [tokens, experts]:
        return f"routing.logits must be [T, E] = {[tokens, experts]}, got {list(routing.logits.shape)}"
    return None


def id_problem(ids: Tensor, experts: int) -> str | None:
    """Waits for the device."""
    bad = ids[(ids < -1) | (ids >= experts)]
    if not len(bad):
        return None
    return f"routing.ids must be -1 or in [0, {experts}), got {int(bad[0])} ({len(bad)} ids out of range)"
