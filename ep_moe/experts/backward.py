"""The backward of an expert kernel that has its own (`Experts.own_backward`), as one node of autograd's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ep_moe.types import LocalIds, Received

if TYPE_CHECKING:
    from ep_moe.experts.base import Experts


class StepGradients(NamedTuple):
    """What a kernel's backward gives.

    x: [N, H]; weights: float32 [N, K], None without weights; stored: as `ExpertWeights.stored_tensors`, None for what
    was not wanted
    """

    x: Tensor
    weights: Tensor | None
    stored: Mapping[str, Tensor | None]


def wants_gradients(experts: Experts, received: Received) -> bool:
    """Whether a call is part of a graph of autograd's."""
    if not torch.is_grad_enabled():
        return False
    held = experts.weights
    anchors = [] if held.held else [held.anchor]  # a rank without experts enters what its peers do
    given = (received.x, received.weights, *anchors, *held.stored_tensors().values())
    return any(tensor is not None and tensor.requires_grad for tensor in given)


def step(experts: Experts, received: Received) -> Tensor:
    """`Experts.compute` of rows of RANK_MAJOR with local ids, with the kernel's own backward."""
    stored = experts.weights.stored_tensors()
    out: Tensor = _Step.apply(
        experts, received, tuple(stored), experts.weights.anchor, received.x, received.weights, *stored.values()
    )
    return out


class Kept:
    """What a forward leaves for its backward: tensors, which autograd keeps, and the rest."""

    def __init__(self, received: Received, saved: tuple[Tensor, ...], stored: Mapping[str, Tensor]) -> None:
        assert received.local_ids is not None
        self.tensors = (received.x, received.weights, received.local_ids, *stored.values(), *saved)
        self._names = tuple(stored)
        nothing = received.x.new_empty(0)  # a view would keep all of it
        self._received = Received(nothing, received.layout, received.weighting, handle=None, format=received.format)

    def gradients(
        self, experts: Experts, tensors: tuple[Tensor, ...], grad: Tensor, wanted: Mapping[str, bool]
    ) -> StepGradients:
        """tensors: `self.tensors`, as autograd gives them back"""
        x, weights, ids, *others = tensors
        stored = dict(zip(self._names, others, strict=False))
        received = dataclasses.replace(self._received, x=x, weights=weights, local_ids=LocalIds(ids))
        return experts.gradients(received, tuple(others[len(stored) :]), stored, grad, wanted)


class _Step(Function):
    @staticmethod
    def forward(
        ctx: Any, experts: Experts, received: Received, names: tuple[str, ...], anchor: Tensor | None, x: Tensor,
        weights: Tensor | None, *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        y, saved = experts.compute_saving(received)
        ctx.experts, ctx.names = experts, names
        ctx.kept = Kept(received, saved, dict(zip(names, stored, strict=True)))
        ctx.save_for_backward(*ctx.kept.tensors)
        del ctx.kept.tensors
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[6:], strict=True))
        found = ctx.kept.gradients(ctx.experts, ctx.saved_tensors, grad.contiguous(), wanted)
        return (None, None, None, None, found.x, found.weights, *(found.stored[name] for name in ctx.names))
