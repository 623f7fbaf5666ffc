"""Refuse batches of gradients, which neither collectives nor kernels support."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.errors import InputError


def batch_problem(*gradients: Tensor | None) -> str | None:
    """Return a problem if a gradient is a batch of several gradients, as `is_grads_batched=True` passes."""
    batched = torch._C._functorch
    for gradient in gradients:
        # torch.autograd and torch.vmap have different batched tensors
        if gradient is not None and (batched.is_legacy_batchedtensor(gradient) or batched.is_batchedtensor(gradient)):
            return (
                "MoELayer does not support batched gradients (is_grads_batched=True, jacobian(..., vectorize=True)); "
                "call torch.autograd.grad once for each output, or jacobian with vectorize=False"
            )
    return None


def refuse_batch(*gradients: Tensor | None) -> None:
    """Raise InputError if a gradient is a batch of several."""
    if (problem := batch_problem(*gradients)) is not None:
        raise InputError(problem)
