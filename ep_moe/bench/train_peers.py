"""A routed layer and its backward in plain torch, as a trainer without this package writes it.

Each row travels once for each of its K experts (`all_to_all_single`). Rows are sorted by expert, multiplied by
`grouped_mm`, and summed by `index_add`. Compiled, the stages between two collectives are one `torch.compile` each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm, silu

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.types import Activation


class ByHand:
    """The layer of one rank; a group of one rank exchanges nothing.

    w13: [L, 2 * I, H], gate first; w2: [L, H, I]; both are leaves on the memory that is given. Experts lie in order
    over the ranks, L on each.
    """

    def __init__(self, config: MoEConfig, w13: Tensor, w2: Tensor, rank_group: RankGroup, *, compiled: bool) -> None:
        if config.activation is not Activation.SWIGLU or config.expert_bias:
            raise ConfigError("the layer by hand has SwiGLU and no biases; name another model")
        self.w13, self.w2 = w13.detach().requires_grad_(), w2.detach().requires_grad_()
        self.rank_group, self.experts = rank_group, len(w2) * rank_group.size
        stage: Callable[[Any], Any] = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.spread, self.compute, self.merge = stage(spread), stage(by_rank), stage(merge)
        self.alone = stage(alone)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [T, H]; ids: int64 [T, K]; weights: float32 [T, K]. Returns [T, H]."""
        group = self.rank_group
        if group.size == 1:
            out: Tensor = self.alone(x, ids, weights, self.w13, self.w2)
            return out
        rows, order, sent = self.spread(x, ids, self.experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group.group)
        send, receive = (counts.view(group.size, -1).sum(1).tolist() for counts in (sent, received))
        arrived = Exchange.apply(rows, send, receive, group.group)
        y = self.compute(arrived, received.view(group.size, -1), self.w13, self.w2)
        merged: Tensor = self.merge(Exchange.apply(y, receive, send, group.group), order, weights)
        return merged

    def gradients(self, slot: int) -> tuple[Tensor, Tensor]:
        """Of w13 and w2 of one expert."""
        assert self.w13.grad is not None
        assert self.w2.grad is not None
        return self.w13.grad[slot], self.w2.grad[slot]


class Exchange(Function):
    """Rows grouped by destination, to rows grouped by source; backward sends them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.back = receive, send, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return Exchange.apply(grad, *ctx.back), None, None, None


def spread(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """K copies of each row [T * K, H], sorted by expert; which route each is, and how many each expert has."""
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(num_experts, device=x.device), right=True)
    return x.index_select(0, order // ids.shape[1]), order, ends.diff(prepend=ends.new_zeros(1))


def by_rank(rows: Tensor, counts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The experts' rows, in the order of rows: by source rank, and by expert within. counts: int64 [R, L]"""
    ranks, held = counts.shape
    slots = torch.arange(held, device=rows.device).repeat(ranks)
    order = slots.repeat_interleave(counts.flatten(), output_size=len(rows)).argsort(stable=True)
    y = multiplied(rows.index_select(0, order), counts.sum(0), w13, w2)
    return torch.empty_like(y).index_copy(0, order, y)


def multiplied(rows: Tensor, counts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Of rows that are sorted by expert. counts: int64 [L]"""
    ends = counts.cumsum(0).int()
    gate, up = grouped_mm(rows, w13.mT, offs=ends).chunk(2, 1)
    return grouped_mm(silu(gate) * up, w2.mT, offs=ends)


def merge(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows, in float32."""
    tokens, top_k = weights.shape
    scaled = rows * weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    return out.index_add(0, order // top_k, scaled).to(rows.dtype)


def alone(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Everything, where all experts are here."""
    rows, order, counts = spread(x, ids, len(w2))
    return merge(multiplied(rows, counts, w13, w2), order, weights)
