"""What is checked of routes: those that a user passes, and those that a router of the user's own chooses.

What is wrong is returned, not raised: all ranks must raise together.
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

NO_ROUTING: Any = object()  # what `forward_routed` makes of None, which stands for the layer's own router further on


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


def routed_problem(layer: Layer, routing: Routing, rows: Tensor) -> str | None:
    """None, or what is wrong with what the layer's own router chose for rows [T, H]."""
    problem = chosen_problem(layer, routing, rows)
    if problem is None and layer.context.layout.split > 1 and not torch.compiler.is_compiling():
        problem = _unsummed_problem(layer.router, routing.weights, rows)
    return problem


def _unsummed_problem(router: Any, weights: Tensor, rows: Tensor) -> str | None:
    """None, or that a router trains tensors that are not its own: each tp rank routes its share of the tokens, and the
    layer sums the gradients of what it is given as a module. What lies before the rows is not the router's."""
    own = {id(p) for p in router.parameters()} if isinstance(router, nn.Module) else set()
    seen, left = {None, rows.grad_fn}, [weights.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        assert node is not None  # one of those seen from the start
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not rows and id(leaf) not in own:
            return (
                f"router= trains a tensor of shape {list(leaf.shape)} that is no parameter of it, and under tensor "
                f"parallelism each rank would have the gradient of its own tokens alone; give a torch.nn.Module that "
                f"has its parameters, or pass the routes of all tokens to forward_routed"
            )
        left += [following for following, _ in node.next_functions]
    return None


def choice_problem(routing: Any, rows: Tensor, top_k: int) -> str | None:
    """None, or what is wrong with a routing for rows [T, H]."""
    if routing is NO_ROUTING:
        return "routing must be a Routing of logical ids, got None; call the layer itself for its own router"
    if not isinstance(routing, Routing):
        return f"routing must be a Routing of logical ids, got {type(routing).__name__}"
    return routing_problem(routing.ids, routing.weights, rows, top_k)


def logits_problem(routing: Routing, tokens: int, experts: int) -> str | None:
    """None, or what is wrong with a routing whose logits are recorded."""
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
