"""Balance without a loss: the routers' correction biases follow the load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.checks import as_number, check_kind, shown
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.layer import MoELayer


class BiasUpdate:
    """Move the routers' correction biases against the load, once per optimizer step.

    Auxiliary-loss-free load balancing (arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, 2.1.2): with c the
    routes per expert since the last step, e_score_correction_bias += speed * sign(mean(c) - c).

        update = BiasUpdate(model, context)
        optimizer.register_step_pre_hook(update)

    The load is `Placement.expert_load`: all forwards since the last step. Micro-batches of gradient accumulation thus
    count together; -1 ids and forwards within `Placement.no_stats` do not count. The load is summed over all ranks that
    train the layer, in integers, so that the bias stays equal bit for bit on all ranks. Counters are read and not
    reset. After a `Placement.reset_load` by others, what is counted from there on is taken.

    speed: what each bias moves by, in units of the scores. It may be changed between steps; 0 moves nothing.

    Args:
        model: all its `MoELayer`s must have a correction bias. Counting begins here.
        context: the layers'.
        speed: gamma of DeepSeek-V3, 0.001 there.

    Raises:
        ConfigError: a layer without correction bias, of another context, or whose kernel counts no load; no layers at
            all in a model that is no pipeline stage; a bias that is not float32; speed not a number of at least 0.
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
    def __call__(self, *_: Any) -> None:
        """Update the biases by the load since the last call. Collective; takes what an optimizer's hook is given."""
        if not self._layers:
            return
        loads = [seen.since() for seen in self._seen]
        total = torch.cat(loads)
        # etp ranks see the same rows, and count them alike: the sum over the other two axes has each row once
        for kind in ("ep", "expert_data"):
            rank_group = self._context.rank_groups[kind]
            if rank_group.size > 1:
                with rank_group.flight_recorder.step("bias update", counted=False):
                    dist.all_reduce(total, group=rank_group.group)
        for layer, load in zip(self._layers, total.split([len(load) for load in loads]), strict=True):
            way = (load.sum() - load * len(load)).sign()  # of mean - load, in integers
            _bias(layer).add_(way.float() * self.speed)


class _Counted:
    """A layer's load counters, read since the last time."""

    def __init__(self, layer: MoELayer) -> None:
        self._placement = layer.placement
        self._resets, self._before = self._placement.resets, self._placement.expert_load.clone()

    def since(self) -> Tensor:
        """int64 [E] on this rank."""
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
