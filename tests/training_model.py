"""A small model with two MoE blocks, its batches, and the losses of a run: in one process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer

WIDTH, VOCABULARY, EXPERTS = 16, 50, 8
CONFIG = MoEConfig(hidden_size=WIDTH, intermediate_size=32, num_experts=EXPERTS, top_k=2, shared_intermediate_size=16)
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, context: EPContext, expert_map: ExpertMap | None, config: MoEConfig = CONFIG) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(config, context, expert_map=expert_map)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self, context: EPContext, expert_map: ExpertMap | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(context, expert_map) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(context: EPContext, expert_map: ExpertMap | None = None, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(context, expert_map).to(context.device)


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),  # sees how large gradients are
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def run(
    model: Any, context: EPContext, optimizer: torch.optim.Optimizer, after: Callable[[], object], steps: range
) -> list[float]:
    """The loss of each step, over all ranks. after: what follows backward"""
    layout, losses = context.layout, []
    for step in steps:
        own = batch(step).chunk(layout.token_ranks)[layout.place // layout.split % layout.token_ranks]
        loss = loss_of(model, own.to(context.device))
        loss.backward()
        after()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if layout.world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / layout.world)
    return losses


def one_process(optimizer: str, steps: int, max_norm: float | None = None, device: torch.device = CPU) -> list[float]:
    """device: as the ranks', since generators of CPUs and GPUs give different numbers"""
    context = EPContext.local(device)
    model = made(context)

    def clip() -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    return run(model, context, OPTIMIZERS[optimizer](model.parameters()), clip, range(steps))


def furthest(found: list[float], wanted: list[float]) -> float:
    return max(abs(own - one) / one for own, one in zip(found, wanted, strict=True))
