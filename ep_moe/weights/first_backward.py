"""Whether anything beside a layer's backward writes its experts' gradients, seen in its first backward.

In a loop without a wrapper the first `sync_gradients` divides what lies in the parameters, and backward divides by
itself from then on. What something else put there before that is divided in this step alone.
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

_LOOKED_AT = 1 << 12  # numbers of each gradient


class FirstBackward:
    """Of one layer: a comparison, behind its first backward, of gradients with what the layer's own nodes gave."""

    def __init__(self) -> None:
        self._due = True
        self._parameters: list[Tensor] = []
        self._wanted: Tensor | None = None  # float32
        self._differs: Tensor | None = None  # bool []

    @torch.no_grad()
    def note(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Within a backward: the gradients that a call gives to parameters. Does not wait for the device."""
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
        """Say, where gradients are divided for the first time, what is divided with them. Waits for the device.

        Args:
            ranks: Gradients are divided by.
        """
        differs, self._differs, self._due = self._differs, None, False
        if differs is not None and bool(differs):
            warnings.warn(
                f"gradients of experts are divided by {ranks} ranks from here on, and in the first backward something "
                f"beside the layer wrote or took them (a penalty of the weights in the loss, a hook, an optimizer's "
                f"step in backward): in that step alone its part counts {ranks} times less, or took gradients {ranks} "
                f"times too large; call ep_moe.training.sync_gradients(model, context) once before the first backward",
                UserWarning,
                stacklevel=6,  # the caller of sync_gradients
            )


def _accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs adds to `grad`: `torch.autograd.grad` does not, nor `backward(inputs=...)`."""
    if not parameter.is_leaf:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _numbers(tensors: Iterable[Tensor]) -> Tensor:
    """float32: some of each."""
    return torch.cat([local(tensor).flatten()[:_LOOKED_AT].float() for tensor in tensors])
