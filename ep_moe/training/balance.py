"""Balance the load of experts: auxiliary losses as functions of router logits, and loss-free correction biases."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ep_moe.checks import as_number, as_whole, check_kind, shown
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, InputError
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.layer import MoELayer
from ep_moe.router import Router


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor],
    top_k: int,
    *,
    context: EPContext | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Compute the batch-wise load-balancing loss of Switch Transformer (arXiv:2101.03961, eq. 4 to 6).

    The loss is E * sum over experts of f * p. f is the number of routes to an expert per token and p its mean softmax
    probability, both over all tokens of all layers. With uniform routes, the loss is top_k. It equals
    `load_balancing_loss_func` of transformers. Only p has a gradient.

    With `context`, f and the number of tokens are summed over all data-parallel ranks. The mean over ranks of the loss,
    and of its gradients, then equals that of one process with all ranks' tokens, even if the numbers of tokens differ.
    These ranks are the dp ranks of a pipeline stage. With `Tokens.SHARDED`, where tp ranks have different tokens, they
    are its dp * tp ranks.

    Args:
        logits: [T, E] or [B, S, E] of one layer, or a sequence of those of several layers, as `router_logits` records.
        top_k: The number of experts per token.
        context: Sum over the ranks of this context. Collective over the stage. Default: this rank's tokens only.
        attention_mask: [B, S] or [T], 0 for padding, which is ignored. The same for every layer.

    Returns:
        A scalar in float32, or float64 if the logits are. 0 if there are no tokens.

    Raises:
        InputError: There are no layers, shapes do not match, or top_k is not in [1, E].
    """
    if context is not None:
        check_kind("load_balancing_loss: context", context, EPContext)
    layers = _layers(logits)
    experts = _experts(layers, top_k)
    routes = torch.zeros(experts + 1, dtype=torch.int64, device=layers[0].device)  # the last element counts tokens
    total = None
    for layer in layers:
        kept = _kept(attention_mask, layer)
        probabilities = _wide(layer).softmax(-1)
        with torch.no_grad():
            routes[:-1] += (_chosen(probabilities, top_k) * kept).sum(0)
            routes[-1] += kept.sum()
        part = (probabilities * kept).sum(0)
        total = part if total is None else total + part
    assert total is not None
    ranks = 1
    if context is not None:
        routes, ranks = _over_data(routes, context)
    tokens = routes[-1].clamp(min=1)
    fraction = routes[:-1].to(total.dtype) / tokens
    # divide by the mean number of tokens per rank: the mean of this over ranks is then the mean over all tokens
    mean = total / (tokens.to(total.dtype) / ranks)
    return experts * (fraction * mean).sum()


def sequence_balancing_loss(
    logits: Tensor,
    top_k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Compute DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437, eq. 17 to 20) without its factor alpha.

    The loss of a sequence is the sum over experts of f * p. f is E / top_k times the fraction of tokens that have the
    expert among their top_k scores. p is the mean of the expert's scores, normalized over experts. With uniform routes,
    the sum is 1. The result is the mean over sequences. Experts are chosen by scores only, without correction bias and
    groups. Only p has a gradient.

    Args:
        logits: [B, S, E] of one layer. For logits of `router_logits`, pass `recorded[i].view(B, S, -1)`.
        top_k: The number of experts per token.
        scoring: The function from logits to scores: "sigmoid" for DeepSeek-V3, or "softmax".
        attention_mask: [B, S], 0 for padding, which is ignored. Sequences without other tokens are ignored too.

    Returns:
        A scalar in float32, or float64 if the logits are.

    Raises:
        InputError: The logits have another shape, the scoring is unknown, or top_k is not in [1, E].
    """
    _check_logits(logits)
    if logits.dim() != 3:
        raise InputError(f"logits must be [B, S, E], got {list(logits.shape)}; give them as logits.view(B, S, -1)")
    experts = _experts([logits.flatten(0, 1)], top_k)
    if scoring not in ("softmax", "sigmoid"):
        raise InputError(f"scoring must be 'softmax' or 'sigmoid', got {scoring!r}")
    kept = _kept(attention_mask, logits.flatten(0, 1)).view(*logits.shape[:2], 1)
    scores = _wide(logits).softmax(-1) if scoring == "softmax" else _wide(logits).sigmoid()
    tokens = kept.sum(1)  # [B, 1]
    with torch.no_grad():
        routes = (_chosen(scores, top_k) * kept).sum(1).to(scores.dtype)
        fraction = routes * experts / (top_k * tokens.clamp(min=1))
    normalised = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    mean = (normalised * kept).sum(1) / tokens.clamp(min=1)
    return (fraction * mean).sum() / (tokens > 0).sum().clamp(min=1)


def router_z_loss(logits: Tensor | Sequence[Tensor], *, attention_mask: Tensor | None = None) -> Tensor:
    """Compute the router z-loss of ST-MoE (arXiv:2202.08906, eq. 5): the mean over tokens of logsumexp squared.

    Args:
        logits: [T, E] or [B, S, E] of one layer, or a sequence of those of several layers. The mean is over all.
        attention_mask: [B, S] or [T], 0 for padding, which is ignored. The same for every layer.

    Returns:
        A scalar in float32, or float64 if the logits are. 0 if there are no tokens.

    Raises:
        InputError: There are no layers, or shapes do not match.
    """
    layers = _layers(logits)
    parts, tokens = [], []
    for layer in layers:
        kept = _kept(attention_mask, layer)
        parts.append((_wide(layer).logsumexp(-1, keepdim=True).square() * kept).sum())
        tokens.append(kept.sum())
    return torch.stack(parts).sum() / torch.stack(tokens).sum().clamp(min=1)


def _layers(logits: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the logits [T, E] of each layer, on the device of the first."""
    if not isinstance(logits, Tensor | Sequence) or isinstance(logits, str):
        raise InputError(f"logits must be a Tensor or a sequence of Tensors, got {type(logits).__name__}")
    given = [logits] if isinstance(logits, Tensor) else list(logits)
    if not given:
        raise InputError("logits must hold at least one layer's, got none; call the model inside router_logits first")
    for one in given:
        _check_logits(one)
        if one.dim() < 2 or one.shape[-1] != given[0].shape[-1]:
            raise InputError(f"logits must be [T, E] of the same E, got {[list(layer.shape) for layer in given]}")
    return [one.flatten(0, -2).to(given[0].device) for one in given]


def _check_logits(logits: object) -> None:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"logits must be Tensors of floating-point numbers, got {got}")


def _experts(layers: list[Tensor], top_k: int) -> int:
    experts = layers[0].shape[-1]
    if not 1 <= (as_whole(top_k) or 0) <= experts:
        raise InputError(f"top_k must be an integer in [1, {experts}], the number of experts, got {shown(top_k)}")
    return experts


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _kept(attention_mask: Tensor | None, layer: Tensor) -> Tensor:
    """Return which rows of logits are tokens and not padding, bool [T, 1]."""
    if attention_mask is None:
        return layer.new_ones(len(layer), 1, dtype=torch.bool)
    if not isinstance(attention_mask, Tensor):
        raise InputError(f"attention_mask must be a Tensor, got {type(attention_mask).__name__}")
    if attention_mask.numel() != len(layer):
        raise InputError(
            f"attention_mask must have one entry for each of the {len(layer)} rows of logits, got "
            f"{list(attention_mask.shape)}"
        )
    return (attention_mask.reshape(-1, 1) != 0).to(layer.device)


def _chosen(scores: Tensor, top_k: int) -> Tensor:
    """Return int64 [..., E], 1 for the top_k scores of each row and 0 for others."""
    return torch.zeros_like(scores, dtype=torch.int64).scatter_(-1, scores.topk(top_k).indices, 1)


def _over_data(counts: Tensor, context: EPContext) -> tuple[Tensor, int]:
    """Sum int64 counts over the ranks of a pipeline stage with different tokens. Return the sum and their number."""
    # etp, ep and expert_data are the axes of a stage: each of its ranks is summed once
    for kind in ("etp", "ep", "expert_data"):
        rank_group = context.rank_groups[kind]
        if rank_group.size > 1:
            with rank_group.flight_recorder.step("load-balancing loss", counted=False):
                rank_group.all_reduce(counts)
    layout = context.layout
    return counts // layout.split, layout.stage // layout.split  # `split` tp ranks counted the same tokens


# --- logits -----------------------------------------------------------------------------------------------------------


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the router logits of every `MoELayer` that is called inside the `with` block.

        with router_logits(model) as recorded:
            loss = model(x)
        loss = loss + 0.01 * load_balancing_loss(recorded, top_k, context=context)
        loss.backward()

    `ep_moe.router.Router` needs no preparation. A custom router, or a caller of `forward_routed`, must set
    `Routing.logits`. A call without them raises InputError on all ranks.

    If tp ranks hold the same tokens, each of them routes a share, and the logits are gathered over tp. Every tp rank
    must then compute the same loss from them. The gradients of router and x are those of this loss, not tp times as
    large.

    Calls inside are not replayed from CUDA graphs. A call that activation checkpointing repeats in backward is recorded
    once, even if backward runs after the `with` block. Checkpointing with `use_reentrant=True` runs the forward without
    gradients, and is refused.

    Args:
        model: The model with the layers. All ranks of a tp group must enter and leave the block together.

    Yields:
        A list to which each call appends one tensor [T, E], T the rows of x, in the order of calls. Tensors have the
        dtype in which the router computes them, and are part of the autograd graph.

    Raises:
        ConfigError: The model has no `MoELayer`, or a layer in train mode is called without gradients in a block that
            was entered with gradients.
    """
    check_kind("router_logits: model", model, nn.Module)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise ConfigError(f"router_logits needs a model with MoELayers, got {type(model).__name__} without any")
    recorded: list[Tensor] = []
    with recording(layers, recorded):
        yield recorded


@contextmanager
def recording(layers: Iterable[MoELayer], recorded: list[Tensor], thread: int | None = None) -> Iterator[None]:
    """Append the router logits of layers' calls inside the `with` block to a list.

    Args:
        layers: The layers.
        recorded: The list.
        thread: Record calls of this thread only. Default: of all threads.
    """
    wanted = torch.is_grad_enabled()
    with ExitStack() as undo:
        for layer in layers:
            undo.enter_context(_tapped(layer, recorded, wanted, thread))
        yield


@contextmanager
def _tapped(layer: MoELayer, recorded: list[Tensor], gradients: bool, thread: int | None) -> Iterator[None]:
    def tap(logits: Tensor) -> None:
        if thread is not None and threading.get_ident() != thread:
            return
        if gradients and layer.training and not torch.is_grad_enabled():
            raise ConfigError(
                f"{layer.name} was called without gradients inside router_logits, as torch.utils.checkpoint does with "
                f"use_reentrant=True; set use_reentrant=False, or enter router_logits under torch.no_grad() too"
            )
        recorded.append(logits)

    router = layer.router if isinstance(layer.router, Router) else None
    if router is not None:
        if not layer._logit_taps:  # the first recording saves the flag; those of other threads may end in any order
            layer._keeps_logits = router.keeps_logits
        router.keeps_logits = True
    layer._logit_taps.append(tap)
    try:
        yield
    finally:
        layer._logit_taps.remove(tap)
        if router is not None:
            router.keeps_logits = layer._keeps_logits or bool(layer._logit_taps)


class BiasUpdate:
    """Move the routers' correction biases against the load, once per optimizer step.

    This is auxiliary-loss-free load balancing (arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, 2.1.2).
    With c the routes per expert since the last step, e_score_correction_bias += speed * sign(mean(c) - c).

        update = BiasUpdate(model, context)
        optimizer.register_step_pre_hook(update)

    The load is `Placement.expert_load` of all forwards since the last step, including all micro-batches of gradient
    accumulation. -1 ids and forwards within `Placement.no_stats` do not count. The load is summed over all ranks that
    train the layer, in integers, so that the biases stay bitwise equal on all ranks. Counters are read, not reset. If
    other code calls `Placement.reset_load`, the load since that reset is used.

    Set `speed` to change the step of each bias, in units of the scores. 0 leaves the biases unchanged.

    Args:
        model: The model. All its `MoELayer`s must have a correction bias. Counting starts here.
        context: The context of the layers.
        speed: gamma of DeepSeek-V3, which uses 0.001.

    Raises:
        ConfigError: A layer has no correction bias, a bias that is not float32, another context, or a kernel that does
            not count load. The model has no layers and is not a pipeline stage. speed is not a number of at least 0.
    """

    def __init__(self, model: nn.Module, context: EPContext, speed: float = 1e-3) -> None:
        check_kind("BiasUpdate: model", model, nn.Module)
        check_kind("BiasUpdate: context", context, EPContext)
        found = as_number(speed)
        if found is None or found < 0:
            raise ConfigError(f"BiasUpdate: speed must be a finite number of at least 0, got {shown(speed)}")
        self.speed = found
        self._context = context
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        if not self._layers and context.layout.pp == 1:
            raise ConfigError(f"BiasUpdate needs a model with MoELayers, got {type(model).__name__} without any")
        for layer in self._layers:
            _check(layer, context)
        self._seen = [_Counted(layer) for layer in self._layers]

    @torch.no_grad()
    def __call__(self, optimizer: Any = None, args: Any = None, kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the biases by the load since the last call. Collective.

        Args:
            optimizer: The optimizer whose hook this is. None in a direct call.
            args: Arguments of the optimizer's step; not used.
            kwargs: Keyword arguments of the optimizer's step.
        """
        if not self._layers or _makes_state_alone(optimizer, kwargs or {}):
            return
        loads = [seen.since() for seen in self._seen]
        total = torch.cat(loads)
        # etp ranks count the same rows: the sum over the other two axes contains each row once
        for kind in ("ep", "expert_data"):
            rank_group = self._context.rank_groups[kind]
            if rank_group.size > 1:
                with rank_group.flight_recorder.step("bias update", counted=False):
                    rank_group.all_reduce(total)
        for layer, load in zip(self._layers, total.split([len(load) for load in loads]), strict=True):
            way = (load.sum() - load * len(load)).sign()  # sign(mean - load) in exact integer arithmetic
            _bias(layer).add_(way.float() * self.speed)


def _makes_state_alone(optimizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step only initializes the optimizer's state.

    `torch.distributed.checkpoint` makes such a step, with `closure=None` and a learning rate of 0, when it gets or sets
    a state. The result is the same on all ranks.
    """
    groups = getattr(optimizer, "param_groups", ())
    asked = "closure" in kwargs and kwargs["closure"] is None
    return asked and bool(groups) and all("lr" in group and float(group["lr"]) == 0 for group in groups)


class _Counted:
    """Reads the load of a layer since the previous reading."""

    def __init__(self, layer: MoELayer) -> None:
        self._placement = layer.placement
        self._resets, self._before = self._placement.resets, self._placement.expert_load.clone()

    def since(self) -> Tensor:
        """Return this rank's load since the previous reading, int64 [E]."""
        now = self._placement.expert_load.clone()
        since = now - self._before if self._placement.resets == self._resets else now
        self._resets, self._before = self._placement.resets, now
        return since


def _bias(layer: MoELayer) -> Any:
    return getattr(layer.router, "e_score_correction_bias", None)


def _check(layer: MoELayer, context: EPContext) -> None:
    bias = _bias(layer)
    if bias is None:
        raise ConfigError(
            f"BiasUpdate: RoutingConfig.correction_bias must be True, got {layer.name} without one; build it "
            f"with RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True), or use load_balancing_loss"
        )
    if bias.dtype != torch.float32 or bias.requires_grad:
        raise ConfigError(
            f"BiasUpdate: e_score_correction_bias of {layer.name} must be a float32 buffer without gradient, got "
            f"{bias.dtype}, requires_grad={bias.requires_grad}"
        )
    if layer.context is not context:
        raise ConfigError(f"BiasUpdate: {layer.name} belongs to another EPContext; give it the layers' own")
    if isinstance(layer.experts, FusedExperts) and layer.experts.capabilities.routes:
        raise ConfigError(f"BiasUpdate: experts={layer.experts.name} of {layer.name} counts no load; choose another")
