"""Gradient buffers of expert parameters, which backward writes without an autograd node for each parameter."""

from __future__ import annotations

import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.training.parameters import expert_weights_of
from ep_moe.types import dtype_name
from ep_moe.weights.main_grads import MainGrads


@torch.inference_mode(False)  # backward cannot write to inference tensors
def use_main_grads(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Let backward write the experts' gradients into buffers. Each parameter's gradient is a view of a buffer.

    This reduces the host time of an eager backward: autograd needs no nodes for the hundreds of expert parameters. With
    expert parallelism, `bf16_triton` accumulates gradients in its last GEMMs. This function allocates one buffer
    [L, ...] for each stored tensor of a layer. It is not collective. Call it on all ranks, before the first forward of
    a step.

    Without `dtype`, the view is `parameter.grad`. Optimizers, `sync_gradients`, `clip_grad_norm_` and
    `torch.amp.GradScaler` work as usual. If a gradient is None, backward overwrites the buffer, and with it a gradient
    that the caller kept without `clone()`. It warns once if it finds such a gradient.

    With `dtype`, the view is `parameter.main_grad`, which is None until a backward, and `parameter.grad` stays None.
    Call `zero_main_grads` to start new gradients; `zero_grad` has no effect on them. The optimizer must read
    `main_grad`, and declare so by an attribute `reads_main_grad = True`. A step of another optimizer, which would skip
    such parameters, is refused. Gradients that are summed over ranks (ep < dp, redundant experts), and those of
    `reference`, are rounded to the parameters' dtype before they are added.

    Code that scales `grad` does not scale `main_grad`. With `dtype`, two such cases are refused: a step of an optimizer
    by a `GradScaler`, and a call in a schedule of `torch.distributed.pipelining` with `scale_grads=True` and several
    micro-batches.

    Hooks of expert parameters, LoRA factors and FSDP2 over experts are refused. If a graph of `torch.compile` contains
    the layer, on one process, autograd computes the gradients as usual. With `dtype`, they are then added to
    `main_grad`. `torch.autograd.grad` of expert parameters raises an error, or returns None with `allow_unused=True`.
    `backward(inputs=...)` computes the gradients of all expert parameters of a layer, or of none. Each replay of a CUDA
    graph overwrites or adds, as its capture did.

    Args:
        model: Any module with `MoELayer`s in it.
        dtype: The dtype of the buffers: torch.float32 or the parameters' dtype, with views in `main_grad`. None for the
            parameters' dtype, with views in `grad`.

    Raises:
        ConfigError: A layer does not support buffers, or has buffers of another dtype. No layer is changed.
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
        buffers.install_grad_hooks()


def zero_main_grads(model: nn.Module) -> None:
    """Set all gradients of `use_main_grads` to None. The next backward overwrites the buffers.

    Args:
        model: Any module with `MoELayer`s in it.
    """
    for weights in expert_weights_of(model):
        if weights.main_grads is not None:
            weights.main_grads.restart()
