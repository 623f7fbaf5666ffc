"""The memory plan of a layer: bytes by kind, computed from shapes alone, for inference and for a training step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.dispatch_shape import DispatchShape, whole_bound
from ep_moe.checks import check_count
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import INSIDE, FusedExperts
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import local

Buffers = dict[tuple[str, DispatchShape], int]  # bytes by transport and shape
_ID_BYTES, _WEIGHT_BYTES = 4, 4


class Layer(Protocol):
    """The part of a MoELayer that the plan reads."""

    config: MoEConfig
    context: EPContext
    experts: Any
    expert_weights: ExpertWeights
    _table: Any  # the pairs of transport and kernel, by token limit

    @property
    def _kernels(self) -> tuple[Experts | FusedExperts, ...]: ...
    @property
    def _kernel(self) -> Experts | FusedExperts: ...
    def _shape_of(self, entry: Any, *, repeats: bool = False) -> DispatchShape: ...
    def parameters(self) -> Any: ...


def layer_bytes(layer: Layer, train_tokens: int | None) -> dict[str, int]:
    """Return the result of `MoELayer.plan`."""
    held = held_bytes(
        experts=layer.expert_weights,
        **{kind: getattr(layer, kind) for kind in ("router", "placement", "shared_experts")},
    )
    held["workspace"] = max(kernel.workspace_bytes() for kernel in layer._kernels)
    held["transport"] = sum(transport_bytes(layer, train_tokens).values())
    if train_tokens is not None:
        held["gradients"] = _gradient_bytes(layer)
        held["saved"] = _saved_bytes(layer, train_tokens)
        temporary = _temporary_bytes(layer, train_tokens)
        if temporary is not None:
            held["temporary"] = temporary
    return held


def held_bytes(**parts: Any) -> dict[str, int]:
    """Return the bytes of a layer's parameters and buffers by kind.

    Args:
        **parts: Modules by kind. Values that are no modules are skipped.

    Returns:
        Bytes by kind, for the modules.
    """
    return {
        kind: sum(map(_local_bytes, _held_tensors(module)))
        for kind, module in parts.items()
        if isinstance(module, nn.Module)
    }


def _held_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module holds.

    Named parameters of experts are views of stored tensors, which also have slots without parameters: empty ones, and
    those of an expert that the rank holds twice.
    """
    if not isinstance(module, ExpertWeights) or not module.has_expert_parameters or module.sharded:
        return [*module.parameters(), *module.buffers()]
    factors = [] if module.lora is None else [*module.lora.parameters()]
    return [*module._raw_tensors.values(), *factors, *module.buffers()]


def _gradient_bytes(layer: Layer) -> int:
    experts = layer.expert_weights
    apart = [] if experts.main_grads is None else list(experts.parameters())
    buffered = {id(parameter) for parameter in apart}
    rest = sum(_local_bytes(p) for p in layer.parameters() if p.requires_grad and id(p) not in buffered)
    return rest + (0 if experts.main_grads is None else experts.main_grads.bytes)


def _local_bytes(tensor: Tensor) -> int:
    """Return the bytes of this rank's shard. `numel` of a DTensor, such as an etp-sharded expert, counts the whole."""
    own = local(tensor)
    return own.numel() * own.itemsize


def transport_bytes(layer: Layer, train_tokens: int | None) -> Buffers:
    """Return the bytes of the buffers of the layer's transports, by transport and dispatch shape."""
    if isinstance(layer.experts, FusedExperts):
        return {(INSIDE, layer.experts.dispatch_shape): layer.experts.buffer_bytes(layer.experts.dispatch_shape)}
    found: Buffers = layer._table.transport_bytes(layer._shape_of)
    made = layer.context._pool
    for key in found:
        if key in made and made[key].grows:
            found[key] = made[key].held_bytes()
    if train_tokens is not None:
        kind, shape, bound = _trained(layer, train_tokens)
        narrow = kind.capabilities.adjoint and not kind.capabilities.returns_weights
        for one in (shape, shape.of_weights) if narrow else (shape,):
            sized = one if one.max_tokens is not None else replace(one, max_tokens=kind.room_for(bound))
            found[kind.name, one] = max(found.get((kind.name, one), 0), kind.buffer_bytes(sized))
    return found


def _trained(layer: Layer, train_tokens: int) -> tuple[type[Dispatcher], DispatchShape, int]:
    """Return the transport of a training call, its dispatch shape, and the rows that its buffers hold per rank."""
    context = layer.context
    entry = layer._table.entry_for(context._current_limit)
    kind: type[Dispatcher] = registry.load("dispatchers", entry.choice.all2all)
    shape, tokens = layer._shape_of(entry, repeats=True), _dispatched(layer, train_tokens)
    rows = layer.config.top_k // shape.top_k  # rows per token
    if not kind.capabilities.static:
        return kind, shape, tokens * rows
    if context._current_limit is None:
        return kind, shape, whole_bound(tokens * rows)
    if tokens > context._current_limit:
        raise ConfigError(
            f"train_tokens={train_tokens} is more than the token limit, max_tokens={context.max_tokens}; make "
            "EPContext with a larger max_tokens"
        )
    return kind, shape, context._current_limit * rows


def _dispatched(layer: Layer, train_tokens: int) -> int:
    return layer.context.layout.max_dispatch_tokens(check_count("train_tokens", train_tokens, at_least=1))


def _saved_bytes(layer: Layer, train_tokens: int) -> int:
    """Return the bytes that forward saves for backward, for a router that chooses all experts equally often."""
    kernel = layer._kernel
    if isinstance(kernel, FusedExperts) or not kernel.capabilities.differentiable:
        raise ConfigError(
            f"train_tokens={train_tokens}: experts={kernel.name} has no backward; leave train_tokens out, or build a "
            f"layer that trains (layer.explain() says which pairs do)"
        )
    kind, shape, bound = _trained(layer, train_tokens)
    adjoint = kind.capabilities.adjoint
    if not (adjoint or kernel.own_backward or kernel.options.recompute):
        raise ConfigError(
            f"train_tokens={train_tokens}: the bytes that experts={kernel.name} over all2all={kind.name} saves for "
            "backward do not follow from shapes; with ExpertsOptions(recompute=True) they do"
        )
    rows = shape.num_ranks * bound
    routes = shape.top_k * (_ID_BYTES + _WEIGHT_BYTES)
    # int64 ids and float32 weights of this rank's tokens
    own = _dispatched(layer, train_tokens) * layer.config.top_k * (8 + _WEIGHT_BYTES) if adjoint else 0
    return rows * (shape.hidden_size * shape.dtype.itemsize + routes) + kernel.saved_bytes(rows) + own


def _temporary_bytes(layer: Layer, train_tokens: int) -> int | None:
    """Return the result of `Experts.temporary_bytes`. Refuses what `_saved_bytes` refuses, which is called before."""
    kernel = layer._kernel
    assert isinstance(kernel, Experts)
    kind, shape, bound = _trained(layer, train_tokens)
    rows = shape.num_ranks * bound
    graphs = kind.capabilities.cuda_graph and kernel.weights.lora is None
    return kernel.temporary_bytes(rows, recorded=graphs and kernel.records_training(rows))
