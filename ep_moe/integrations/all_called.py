"""Blocks with several modules of experts, of which a rank may call some alone, such as those of text and of images.

Each module's call is one of all ranks. What a rank does not call by itself is called behind its block without rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from ep_moe.integrations.generic import ExpertParallelExperts


class AllCalled:
    """Of one block: calls what the block left out, in the modules' order.

    Args:
        experts: the block's, in the order in which it calls them.
    """

    def __init__(self, experts: Sequence[ExpertParallelExperts]) -> None:
        self._experts = experts
        self._before: list[int] = []

    def attach(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._begin)
        block.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._before = [one.calls for one in self._experts]

    def _end(self, block: nn.Module, args: Any, out: Any) -> Any:
        left = [one.calls == before for one, before in zip(self._experts, self._before, strict=True)]
        if not any(left):
            return None
        if left != sorted(left):
            name = self._experts[left.index(True)].moe.name
            self._experts[0].moe._refuse(f"{name} was not called, and what its block calls after it was; ranks differ")
        first, *rest = out if isinstance(out, tuple) else (out,)
        gradients = first.requires_grad and torch.is_grad_enabled()  # whose backward is of all ranks too
        missing = [one for one, is_left in zip(self._experts, left, strict=True) if is_left]
        results = [one.without_rows(gradients=gradients) for one in missing]
        if not gradients:
            return None
        first = first + sum(result.sum() for result in results)
        return (first, *rest) if isinstance(out, tuple) else first


def attach_all_called(model: nn.Module, replaced: Mapping[str, ExpertParallelExperts]) -> None:
    """Keep ranks in step in each block that has several of a model's modules of experts."""
    groups: dict[str, dict[str, None]] = {}
    for one, other in pairwise(replaced):
        block = _common(one, other)
        if not isinstance(model.get_submodule(block), nn.ModuleList | nn.ModuleDict | PreTrainedModel):
            groups.setdefault(block, {}).update({one: None, other: None})
    for block, members in groups.items():
        AllCalled([replaced[name] for name in members]).attach(model.get_submodule(block))


def _common(one: str, other: str) -> str:
    """The innermost module that holds both."""
    parts = []
    for pair in zip(one.split("."), other.split("."), strict=False):
        if pair[0] != pair[1]:
            break
        parts.append(pair[0])
    return ".".join(parts)
