"""Gradients of expert parameters in buffers, which backward writes without a node of autograd's for each parameter."""

from __future__ import annotations

import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.training.parameters import expert_weights_of
from ep_moe.types import dtype_name
from ep_moe.weights.main_grads import MainGrads


@torch.inference_mode(False)  # backward could not write what is made within one
def use_main_grads(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Have backward write the experts' gradients into buffers of which each parameter's gradient is a view.

    An eager backward then takes less host time: expert parameters are not part of autograd's graph, whose nodes would
    handle each of hundreds. Over expert-parallel ranks `bf16_triton` accumulates within its last products. Buffers are
    made here, one [L, ...] for each stored tensor of a layer. Local: call it on all ranks alike, before the first
    forward of a step.

    Without `dtype`, `parameter.grad` is the view, and optimizers, `sync_gradients`, `clip_grad_norm_` and
    `torch.amp.GradScaler` work as ever. A gradient that is None begins anew: the buffer is overwritten.

    With `dtype`, `parameter.main_grad` is the view, or None until a backward, and `parameter.grad` stays None.
    `zero_main_grads` begins anew; `zero_grad` does not. Read `main_grad` in the optimizer, which says so by an
    attribute `reads_main_grad = True`: a step of another that would skip such parameters is refused. Gradients that
    ranks sum (ep < dp, redundant experts), and those of `reference`, are rounded to the parameters' dtype before they
    are added.

    What scales `grad` does not scale `main_grad`. A `GradScaler`'s step of an optimizer with such parameters is
    refused, and a call in a schedule of `torch.distributed.pipelining` with `scale_grads=True` and several
    micro-batches.

    Hooks of expert parameters, LoRA factors and FSDP2 over experts are refused. Where a graph of `torch.compile` holds
    the layer, on one process, autograd brings its gradients, which are taken over. `torch.autograd.grad` of expert
    parameters raises an error, or gives None with `allow_unused=True`. `backward(inputs=...)` takes all expert
    parameters of a layer, or none. Each replay of a CUDA graph overwrites or adds, as its capture did.

    Args:
        model: Any module with `MoELayer`s in it.
        dtype: Of the buffers: torch.float32 or the parameters' dtype. None for the parameters', with views in `grad`.

    Raises:
        ConfigError: A layer cannot have buffers, or has others already. No layer is changed then.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"use_main_grads: dtype must be a torch.dtype or None, got {dtype!r}")
    made = []
    for weights in expert_weights_of(model):
        if weights.main_grads is None:
            made.append((weights, MainGrads(weights, dtype)))
        elif weights.main_grads.dtype != dtype:
            now = weights.main_grads.dtype
            raise ConfigError(
                f"use_main_grads: dtype must stay {'None' if now is None else dtype_name(now)}, as an earlier call "
                f"set it, got {'None' if dtype is None else dtype_name(dtype)}; build the model again for another"
            )
    for weights, buffers in made:
        weights.main_grads = buffers
        buffers.take_ordinary()


def zero_main_grads(model: nn.Module) -> None:
    """Begin all gradients of `use_main_grads` anew: they are None until the next backward, which writes them.

    Args:
        model: Any module with `MoELayer`s in it.
    """
    for weights in expert_weights_of(model):
        if weights.main_grads is not None:
            weights.main_grads.restart()
