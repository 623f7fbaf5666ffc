"""What `torch.compile` makes of a layer.

A layer on one process is traced: its expert kernels, its placement and its grouped products are operators of the graph.
An expert-parallel layer is not: the host waits there for numbers of rows, replays recorded calls and takes addresses,
of which a graph knows nothing. Its call is one step between two graphs, run as it is without `torch.compile`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ep_moe.execution.layer_checks import dtype_problem, refuse_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_moe.types import Routing, TokenMask

UNTRACED = (
    "an ep_moe.MoELayer that is expert-parallel, or is trained with a kernel that has a backward of its own, waits for "
    "numbers of rows, which no graph can hold; "
    "compile the model with torch.compile(model), without fullgraph=True: the layer then runs between two graphs"
)


def call(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """A layer's call within a graph that is compiled: part of it, or a step between two graphs."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        refuse_tracing(layer)
    hidden = layer.exact or (layer._routes is not None and layer._routes.active)  # from a graph
    if not hidden and traced(layer, x) and connected(layer.context._layers_named, layer.name):
        out: Tensor = layer._call(x, routing, mask)
    else:
        out = between_graphs(layer, x, routing, mask)
    return out


def traced(layer: Any, x: Tensor) -> bool:
    """Whether a compiled graph holds the layer's call itself: one process, rows as they are, and no gradients by a
    kernel's own backward, which waits for the number of rows."""
    own = torch.is_grad_enabled() and getattr(layer._kernel, "own_backward", False)
    if own and (x.requires_grad or any(parameter.requires_grad for parameter in layer.expert_weights.parameters())):
        return False
    plain = layer.wire.dispatch == "plain"  # `local` combines no others
    return bool(plain and layer.choice.all2all == "local" and layer.context._tokens.whole)


@torch.compiler.disable(recursive=True, reason=UNTRACED)  # type: ignore[untyped-decorator]
def between_graphs(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """The layer's own call."""
    out: Tensor = layer._guarded(x, routing, mask)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def connected(find: Callable[[str], list[Any]], name: str) -> bool:
    """Have a layer's dispatcher made, and its dtype looked at, if they are not. Run while a graph is traced, and not a
    part of it: torch before 2.13 takes functions and names there, no modules."""
    for layer in find(name):
        layer._dispatcher()
        dtype_problem(layer)  # which remembers what it finds in the registry
    return True
