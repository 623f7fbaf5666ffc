"""The router logits of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ep_moe.checks import check_kind
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.router import Router


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the router logits of every `MoELayer` that is called inside.

        with router_logits(model) as recorded:
            loss = model(x)
        loss = loss + 0.01 * load_balancing_loss(recorded, top_k, context=context)
        loss.backward()

    A router of ours needs nothing. A router of the user's, or a caller of `forward_routed`, returns its logits in
    `Routing.logits`; a call without them raises InputError on all ranks.

    Where tp ranks hold the same tokens, each of them records the logits of all of them: the routers' shares are
    gathered over tp. Every tp rank must then compute the same loss from them. The gradients of router and x are those
    of that loss, and not tp times as large.

    Calls inside are not replayed from CUDA graphs. A call that activation checkpointing repeats in backward is
    recorded once, also where backward runs after the context was left. Checkpointing with `use_reentrant=True` runs the
    forward without gradients, and is refused.

    Args:
        model: holds the layers. All ranks of a tp group enter and leave alike.

    Yields:
        A list that fills up in call order, one tensor [T, E] a call, T the rows of x. Of the dtype in which the
        router computes them, with their gradient.

    Raises:
        ConfigError: the model holds no `MoELayer`; or a layer in train mode is called without gradients inside a
            context that was entered with gradients.
    """
    check_kind("router_logits: model", model, nn.Module)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise ConfigError(f"router_logits needs a model with MoELayers, got {type(model).__name__} without any")
    recorded: list[Tensor] = []
    wanted = torch.is_grad_enabled()
    with ExitStack() as undo:
        for layer in layers:
            undo.enter_context(_tapped(layer, recorded, wanted))
        yield recorded


@contextmanager
def _tapped(layer: MoELayer, recorded: list[Tensor], gradients: bool) -> Iterator[None]:
    def tap(logits: Tensor) -> None:
        if gradients and layer.training and not torch.is_grad_enabled():
            raise ConfigError(
                f"{layer.name} was called without gradients inside router_logits, as torch.utils.checkpoint does with "
                f"use_reentrant=True; set use_reentrant=False, or enter router_logits under torch.no_grad() too"
            )
        recorded.append(logits)

    router = layer.router if isinstance(layer.router, Router) else None
    before = router is not None and router.keeps_logits
    layer._logit_taps.append(tap)
    if router is not None:
        router.keeps_logits = True
    try:
        yield
    finally:
        layer._logit_taps.remove(tap)
        if router is not None:
            router.keeps_logits = before
