"""Detect, in the first backward, expert gradients that something other than the layer wrote.

Without a wrapper such as DDP, the first `sync_gradients` divides the gradients that the parameters hold. From then on
the layer's backward divides them. Contributions from elsewhere, such as a weight penalty in the loss, are therefore
divided in the first step only. `sync_gradients` warns about them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from ep_moe.types import capturing
from ep_moe.weights.parts import local

_LOOKED_AT = 1 << 12  # leading elements of each gradient that are compared


class FirstBackward:
    """Compare one layer's expert gradients after the first backward with those that its own autograd nodes gave."""

    def __init__(self) -> None:
        self._due = True
        self._parameters: list[Tensor] = []
        self._wanted: Tensor | None = None  # float32, the expected gradients
        self._differs: Tensor | None = None  # bool []

    @torch.no_grad()
    def note(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Record, in backward, the gradients that a call returns to `parameters`. Does not synchronize the device."""
        if not self._due or capturing(parameters[0].device):
            return
        given = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p.requires_grad and _accumulates(p)]
        if not given:
            return
        own = _numbers(gradient for _, gradient in given)
        if self._wanted is None:
            self._parameters = [parameter for parameter, _ in given]
            self._wanted = _numbers(map(_gradient, self._parameters))
            Variable._execution_engine.queue_callback(self._look)  # type: ignore[attr-defined]
        self._wanted += own

    @torch.no_grad()
    def _look(self) -> None:
        assert self._wanted is not None
        found, wanted = _numbers(map(_gradient, self._parameters)), self._wanted
        bound = max(1e-5, 2 * torch.finfo(self._parameters[0].dtype).eps)
        self._differs = (found - wanted).abs().max() > bound * torch.maximum(found.abs().max(), wanted.abs().max())
        self._due, self._parameters, self._wanted = False, [], None

    def warn(self, ranks: float) -> None:
        """Warn if the gradients that are divided for the first time have other contributions. Synchronizes the device.

        Args:
            ranks: The divisor of the gradients.
        """
        differs, self._differs, self._due = self._differs, None, False
        if differs is not None and bool(differs):
            warnings.warn(
                f"gradients of experts are divided by {ranks} ranks from now on, and in the first backward other "
                "code wrote or read them (a weight penalty in the loss, a hook, an optimizer step in backward): in "
                f"that step its part is {ranks} times too small, or it read gradients {ranks} times too large; call "
                "ep_moe.training.sync_gradients(model, context) once before the first backward",
                UserWarning,
                stacklevel=6,  # the caller of sync_gradients
            )


def _accumulates(parameter: Tensor) -> bool:
    """Whether the running backward adds to `parameter.grad`.

    `torch.autograd.grad` does not, nor does `backward(inputs=...)` without this parameter.
    """
    if not parameter.is_leaf:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _numbers(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the first `_LOOKED_AT` local elements of each tensor, float32."""
    return torch.cat([local(tensor).flatten()[:_LOOKED_AT].float() for tensor in tensors])
