"""What is wrong with the arguments of a layer's call. Nothing raises here: all ranks must raise together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.checks import routing_problem
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.execution import rank_checks
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.types import Routing, TokenMask, capturing, dtype_name

CAST = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what autocast casts; it leaves float64 alone
NO_ROUTING: Any = object()  # what `forward_routed` makes of None, which stands for the layer's own router further on


class Layer(rank_checks.Layer, Protocol):
    """What is asked of a MoELayer."""

    choice: Any
    wire: Wire
    experts: Any
    _asked: dict[str, Any]
    _checks: rank_checks.RankChecks
    _dtype_problems: dict[torch.dtype, str | None]
    _logit_taps: list[Callable[[Tensor], None]]
    _made_dtype: torch.dtype
    _routes_inside: bool
    _table: Any

    @property
    def _call_dtype(self) -> torch.dtype: ...
    @property
    def _entry(self) -> Any: ...
    @property
    def _kernels(self) -> tuple[Any, ...]: ...
    def _dispatcher(self) -> Dispatcher: ...


def call_problem(layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> str | None:
    """None, or what is wrong with the arguments of this rank."""
    problem = layer._checks.wrapper_problem(layer) or _dtype_problem(layer)
    held = layer.expert_weights
    problem = problem or rows_problem(x, layer.config.hidden_size, held.dtype, held.device, layer.context.device)
    if problem is None and not torch.compiler.is_compiling():  # its operator looks, when it runs
        problem = layer.placement.invalid_ids.problem(layer.name, layer.config.num_experts)
    if problem is not None:
        return problem
    weights = getattr(routing, "weights", None)
    wanting = "x" if x.requires_grad else "routing.weights" if getattr(weights, "requires_grad", False) else None
    if wanting and torch.is_grad_enabled() and (stuck := _not_differentiable(layer)):
        return (
            f"{wanting} requires a gradient, and {stuck} has no backward; call it under torch.no_grad(), or build the "
            f"layer with experts='reference' (or 'bf16_triton' on Hopper, in bfloat16) and all2all='allgather', "
            f"'torch_a2a' or 'nvlink_p2p' to train"
        )
    inside = f"experts={layer.choice.experts} routes inside"
    if layer._routes_inside and (routing is not None or layer.placement.expert_map != layer._asked["expert_map"]):
        return f"{inside}: call forward, under the map of construction"
    if mask is not None and (problem := mask_problem(mask, x)) is not None:
        return problem
    if mask is not None and layer._routes_inside:
        return f"{inside} and takes no mask; choose other experts"
    if routing is None:
        return None
    return chosen_problem(layer, routing, x if x.dim() == 2 else x.reshape(-1, layer.config.hidden_size))


def chosen_problem(layer: Layer, routing: Routing, rows: Tensor) -> str | None:
    """None, or what is wrong with a routing of rows [T, H]. Waits for the device where dispatch does too, and in a
    layer's first call over buffers that grow; elsewhere `Placement.invalid_ids` tells of ids in a later call."""
    problem = choice_problem(routing, rows, layer.config.top_k)
    if problem is None and not torch.compiler.is_compiling():
        transport = layer.experts if isinstance(layer.experts, FusedExperts) else layer._dispatcher()
        first = isinstance(transport, Dispatcher) and transport.grows and not layer._checks.saw_ids
        if transport.capabilities.host_sync or not routing.ids.is_cuda or (first and not capturing(rows.device)):
            problem = id_problem(routing.ids, layer.config.num_experts)
            layer._checks.saw_ids = problem is None
    if problem is None and layer._logit_taps:
        problem = logits_problem(routing, len(rows), layer.config.num_experts)
    return problem


def _dtype_problem(layer: Layer) -> str | None:
    """What `layer.to(dtype)` has made impossible."""
    dtype, agreed = layer.expert_weights.dtype, layer._call_dtype
    if dtype != agreed:
        return (
            f"the layer became {dtype_name(dtype)} after its first call in {dtype_name(agreed)}, and all2all="
            f"{layer._entry.choice.all2all} has buffers of {dtype_name(agreed)}; convert it on all ranks before the "
            f"first call, or build another with dtype={dtype}"
        )
    if dtype == layer._made_dtype:
        return None
    if dtype not in layer._dtype_problems:
        scheme, options = layer.expert_weights.scheme, layer.experts.options
        why = layer._table.dtype_problem(dtype, layer.config, layer.context.layout, scheme, options, layer.wire)
        layer._dtype_problems[dtype] = why and (
            f"the layer became {dtype_name(dtype)}, and {why}; convert it back to "
            f"{dtype_name(layer._made_dtype)}, or build another for {dtype_name(dtype)}"
        )
    return layer._dtype_problems[dtype]


def _not_differentiable(layer: Layer) -> str:
    """What of a layer has no backward; "" where all has one."""
    for kernel in layer._kernels:
        if not kernel.capabilities.differentiable:
            return f"experts={kernel.name}"
    if layer.wire != PLAIN_WIRE:
        return f"{layer.wire}"
    can = layer._dispatcher().capabilities
    return "" if can.differentiable or can.adjoint else f"all2all={layer._entry.choice.all2all}"


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


# --- under autocast ---------------------------------------------------------------------------------------------------
# A layer under `torch.autocast`: what a user sees is what `nn.Linear` shows, and the layer computes in its own dtype.
#
# Autocast chooses dtypes operation by operation. Kernels, transports and the router of a layer have one dtype each,
# so it is switched off inside: x is cast to the layer's dtype, and the result to autocast's.


def call_cast(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """The layer's call where autocast is on. Gradients arrive in the dtypes that were given."""
    kind = layer.context.device.type
    with torch.autocast(kind, enabled=False):
        if isinstance(x, Tensor) and x.dtype in CAST:
            x = x.to(layer.dtype)
        if isinstance(routing, Routing) and isinstance(routing.weights, Tensor) and routing.weights.dtype in CAST:
            routing = Routing(routing.ids, routing.weights.float())
        out: Tensor = layer._call(x, routing, mask)
    return out.to(torch.get_autocast_dtype(kind))
