"""A layer's call under `torch.compile`.

A layer on one process is traced: its expert kernels, placement and grouped GEMMs become operators of the graph. An
expert-parallel layer is not traced, because its host code waits for numbers of rows, replays CUDA graphs and reads
addresses. Its call is a graph break: it runs eagerly between two compiled graphs.
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
    "an ep_moe.MoELayer that is expert-parallel, or is trained with a kernel that has its own backward, reads row "
    "counts on the host, which fullgraph=True cannot compile; call torch.compile(model) without fullgraph=True: the "
    "layer then runs between two graphs"
)


def call(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """Call a layer in a compiled model, as a part of the graph or in a graph break."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        refuse_tracing(layer)
    hidden = layer.exact or (layer._routes is not None and layer._routes.active)  # cannot be traced
    if not hidden and traced(layer, x) and ensure_dispatcher(layer.context._layers_named, layer.name):
        out: Tensor = layer._call(x, routing, mask)
    else:
        out = call_in_graph_break(layer, x, routing, mask)
    return out


def traced(layer: Any, x: Tensor) -> bool:
    """Return whether the layer's call is traced into the compiled graph.

    It is if the layer is on one process, has plain rows, and needs no gradients by a kernel's own backward. Such a
    backward would wait for the number of rows.
    """
    own = torch.is_grad_enabled() and getattr(layer._kernel, "own_backward", False)
    if own and (x.requires_grad or any(parameter.requires_grad for parameter in layer.expert_weights.parameters())):
        return False
    plain = layer.wire.dispatch == "plain"  # `wire.combine` is plain too: `local` supports no other format
    return bool(plain and layer.choice.all2all == "local" and layer.context._token_flow.is_pass_through)


@torch.compiler.disable(recursive=True, reason=UNTRACED)  # type: ignore[untyped-decorator]
def call_in_graph_break(layer: Any, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
    """Call a layer eagerly, in a graph break."""
    out: Tensor = layer._guarded(x, routing, mask)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ensure_dispatcher(find: Callable[[str], list[Any]], name: str) -> bool:
    """Create a layer's dispatcher and check its dtype, if that was not done before.

    This runs while a graph is traced, and is not part of the graph. The arguments are a function and a name, because
    torch before 2.13 accepts no modules there.
    """
    for layer in find(name):
        layer._dispatcher()
        dtype_problem(layer)  # caches its result, which needs the registry
    return True
