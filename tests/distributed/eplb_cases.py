"""What the tests of the balancer share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, EPLBConfig, ExpertBalancer, ExpertMap, MoEConfig, MoELayer, ParallelConfig
from ep_moe.eplb.migration import transfer
from ep_moe.eplb.migration.consensus import State
from ep_moe.testing import rank_device
from ep_moe.weights.expert_weights import ExpertWeights
from tests.distributed.cases import check_call, everywhere
from tests.helpers import fill, integer_expert

CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=10, top_k=3, activation=Activation.RELU2, expert_bias=True
)
ROW = 4 * (16 * 16 * 2 + 16 * 2) + 8  # bytes of one expert's row


def random_map(ranks: int, slots_per_rank: int, seed: int, experts: int = 10) -> ExpertMap:
    """Experts once, then replicas in the slots that are left, none twice on a rank."""
    draw = random.Random(seed)
    slots = [rank for rank in range(ranks) for _ in range(slots_per_rank)]
    while True:
        draw.shuffle(slots)
        held: list[list[int]] = [[] for _ in range(ranks)]
        for number, rank in enumerate(slots):
            free = [e for e in range(experts) if e not in held[rank]]
            if number >= experts and not free:
                break
            held[rank].append(number if number < experts else draw.choice(free))
        else:
            for mine in held:
                draw.shuffle(mine)
            return ExpertMap.from_ranks(held, experts)


def make_layers(
    context: EPContext, count: int = 1, *, redundant: int = 6, make: Callable[..., Any] = integer_expert, **options: Any
) -> list[MoELayer]:
    """Filled, not to be trained."""
    placed = ExpertMap.redundant(10, context.layout.ep, redundant)
    layers = [
        fill(MoELayer(options.pop("config", CONFIG), context, expert_map=placed, **options), make) for _ in range(count)
    ]
    for layer in layers:
        layer.requires_grad_(False)
    return layers


def assert_slots(layer: MoELayer, make: Callable[..., Any] = integer_expert, seed: int = 0) -> None:
    """Every byte of every slot is the checkpoint's, as a layer that was made with this map would hold them."""
    held = layer.expert_weights
    placed = layer.placement.expert_map
    assert held.expert_map == placed
    fresh = ExpertWeights(
        layer.config,
        placed,
        ep_rank=held.ep_rank,
        etp=held.etp,
        dtype=held.dtype,
        scheme=held.scheme,
        weight_layout=type(held.weight_layout),
    ).to(held.device)
    for expert in set(held.local_experts) - {-1}:
        fresh.update_expert(expert, make(layer.config, expert, seed))
    slots = [slot for slot, expert in enumerate(held.local_experts) if expert != -1]
    expected = dict(fresh.tensors)
    assert set(expected) == set(held.tensors)
    for name, tensor in held.tensors.items():
        mine, theirs = (t.detach()[slots].view(len(slots), -1).view(torch.uint8) for t in (tensor, expected[name]))
        same = mine == theirs
        wrong = [slot for slot, row in zip(slots, same, strict=True) if not row.all()]
        assert not wrong, f"{name} differs in slots {wrong}"


def drive(
    balancer: ExpertBalancer, layers: Sequence[MoELayer], context: EPContext, *, seed: int = 0, most: int = 300
) -> int:
    """Forwards and steps until nothing is under way; every forward must be right. Returns the steps."""
    for number in range(most):
        if balancer.state is State.IDLE:
            return number
        for layer in layers:
            check_call(layer, context, tokens=3, what=f"step {number} in {balancer.state.name}", seed=seed)
        balancer.step()
    raise AssertionError(f"still in {balancer.state.name} after {most} steps")


def all_alike(value: Any) -> Any:
    """The value, which must be the same on all ranks."""
    found = everywhere(value)
    assert found == [found[0]] * len(found), found
    return found[0]


@contextmanager
def swapped(make: Callable[[Callable[..., Any]], Callable[..., Any]]):
    """Within, `Mover.swap` is what `make` makes of it: where messages get lost or late."""
    before = transfer.Mover.swap
    with mock.patch.object(transfer.Mover, "swap", make(before)):
        yield


def context_of(deadline_s: float = 20.0, **sizes: Any) -> EPContext:
    parallel = ParallelConfig(**(sizes or {"dp": dist.get_world_size()}))
    return EPContext.from_groups(parallel, device=rank_device(), deadline_s=deadline_s)


def on_request(**options: Any) -> EPLBConfig:
    """Nothing moves but by `move_to`."""
    return EPLBConfig(**{"interval": 0, "sync_every": 1, **options})
