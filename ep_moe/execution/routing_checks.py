"""Checks of routes: those that a caller passes, and those that a user's router chooses.

A check returns the message of a problem instead of raising it, so that all ranks can raise together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ep_moe.all2all.base import Dispatcher, routing_problem
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.types import Routing, capturing

if TYPE_CHECKING:
    from ep_moe.execution.layer_checks import Layer

NO_ROUTING: Any = object()  # replaces a None passed to `forward_routed`: further on, None means the layer's own router


def full_routing_problem(layer: Layer, routing: Routing, rows: Tensor) -> str | None:
    """Return None, or what is wrong with a routing of rows [T, H].

    The values of ids are checked in these calls:

    - on a CPU;
    - if dispatch waits for the device anyway;
    - over buffers that grow, until the layer's first valid call. The check then waits for the device.

    In other calls `Placement.invalid_ids` reports an invalid id, in a later call.
    """
    problem = routing_form_problem(routing, rows, layer.config.top_k)
    if problem is None and not torch.compiler.is_compiling():
        transport = layer.experts if isinstance(layer.experts, FusedExperts) else layer._dispatcher()
        first = isinstance(transport, Dispatcher) and transport.grows and not layer._checks.saw_ids
        if transport.capabilities.host_sync or not routing.ids.is_cuda or (first and not capturing(rows.device)):
            problem = id_problem(routing.ids, layer.config.num_experts)
            layer._checks.saw_ids = problem is None
    if problem is None and layer._logit_taps:
        problem = logits_problem(routing, len(rows), layer.config.num_experts)
    return problem


def router_output_problem(layer: Layer, routing: Routing, rows: Tensor) -> str | None:
    """Return None, or what is wrong with the routing that the layer's router chose for rows [T, H]."""
    problem = full_routing_problem(layer, routing, rows)
    if problem is None and layer.context.layout.split > 1 and not torch.compiler.is_compiling():
        problem = _unsummed_problem(layer.router, routing.weights, rows)
    return problem


def _unsummed_problem(router: Any, weights: Tensor, rows: Tensor) -> str | None:
    """Return a problem if the weights depend on a trained tensor that is no parameter of the router.

    Each tp rank routes its share of the tokens, and the layer sums over tp only the gradients of the router's
    parameters. The search follows autograd's graph from the weights, and stops at the rows.
    """
    own = {id(p) for p in router.parameters()} if isinstance(router, nn.Module) else set()
    seen, left = {None, rows.grad_fn}, [weights.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        assert node is not None  # None is in `seen` from the start
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not rows and id(leaf) not in own:
            return (
                f"router= trains a tensor of shape {list(leaf.shape)} that is not one of its parameters, and under "
                "tensor parallelism each rank would get the gradient of its own tokens only; pass a torch.nn.Module "
                "that owns its parameters, or pass the routes of all tokens to forward_routed"
            )
        left += [following for following, _ in node.next_functions]
    return None


def routing_form_problem(routing: Any, rows: Tensor, top_k: int) -> str | None:
    """Return None, or what is wrong with the class, shapes, dtypes or device of a routing for rows [T, H]."""
    if routing is NO_ROUTING:
        return "routing must be a Routing of logical ids, got None; call the layer itself for its own router"
    if not isinstance(routing, Routing):
        return f"routing must be a Routing of logical ids, got {type(routing).__name__}"
    return routing_problem(routing.ids, routing.weights, rows, top_k)


def logits_problem(routing: Routing, tokens: int, experts: int) -> str | None:
    """Return None, or what is wrong with the logits of a routing, when they are recorded."""
    if routing.logits is None:
        return (
            "ep_moe.training.router_logits records Routing.logits, which is None; let the router return "
            "Routing(ids, weights, logits=...) with logits [T, E]"
        )
    if list(routing.logits.shape) != [tokens, experts]:
        return f"routing.logits must be [T, E] = {[tokens, experts]}, got {list(routing.logits.shape)}"
    return None


def id_problem(ids: Tensor, experts: int) -> str | None:
    """Return None, or the first id that is out of range. Waits for the device."""
    bad = ids[(ids < -1) | (ids >= experts)]
    if not len(bad):
        return None
    return f"routing.ids must be -1 or in [0, {experts}), got {int(bad[0])} ({len(bad)} ids out of range)"
