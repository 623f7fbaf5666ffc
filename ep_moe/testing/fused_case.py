"""Test cases of a fused kernel: its weights, which every rank computes for all ranks, calls and expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.fused.base import FusedDispatchShape, FusedExperts, Routed, RouterLogits
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.quant.schemes import SCHEMES, Scheme
from ep_moe.router import route
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert

EXPERTS = 10


@dataclass(frozen=True)
class Call:
    """One rank's call, the expected output `value`, and the limit of its error, float64 [T, H] each."""

    x: Tensor
    routed: Routed
    value: Tensor
    limit: Tensor


class Shared:
    """The buffers that a context shares between its layers, by dispatch shape."""

    def __init__(self) -> None:
        self.kept: dict[FusedDispatchShape, Any] = {}

    def pool(self, dispatch_shape: FusedDispatchShape, make: Callable[[], Any]) -> Any:
        if dispatch_shape not in self.kept:
            self.kept[dispatch_shape] = make()
        return self.kept[dispatch_shape]

    def destroy(self) -> None:
        for kept in self.kept.values():
            kept.destroy()
            kept.destroy()  # must be idempotent
        self.kept.clear()


class Case:
    """One fused kernel with its weights. Faults are collected, not raised, because peers wait for a rank that stops.

    seed: seed of the weights
    """

    def __init__(
        self,
        kind: type[FusedExperts],
        config: MoEConfig,
        scheme: str,
        rank_group: RankGroup,
        expert_map: ExpertMap,
        max_tokens: int,
        device: torch.device,
        shared: Shared,
        seed: int = 0,
    ) -> None:
        self.config, self.scheme, self.rank_group, self.device = config, SCHEMES[scheme], rank_group, device
        self.dtype = sorted(kind.capabilities.dtypes, key=str)[0]
        self.faults: list[str] = []
        self.placement = Placement(expert_map, ep_rank=rank_group.rank).to(device)
        self.weights = ExpertWeights(
            config,
            expert_map,
            ep_rank=rank_group.rank,
            device=device,
            dtype=self.dtype,
            scheme=self.scheme,
            weight_layout=kind.weight_layout,
            trainable=False,
        )
        self.tensors: list[dict[str, Tensor]] = []
        self.load(seed)
        dispatch_shape = FusedDispatchShape(
            hidden_size=config.hidden_size,
            top_k=config.top_k,
            slots_per_rank=expert_map.slots_per_rank,
            num_ranks=rank_group.size,
            dtype=self.dtype,
            max_tokens=max_tokens,
            kernel=kind.name,
            intermediate_size=config.intermediate_size,
        )
        self.max_tokens = max_tokens
        self.kernel = kind(
            config, self.weights, rank_group, dispatch_shape, pool=lambda make: shared.pool(dispatch_shape, make)
        )

    def load(self, seed: int) -> None:
        """Write the weights of a seed, in place."""
        self.tensors = weights_of(self.config, self.scheme, self.dtype, self.device, seed)
        for expert, tensors in enumerate(self.tensors):
            self.weights.update_expert(expert, tensors)

    def call(self, tokens: int, seed: int = 0, *, drop: float = 0.2) -> Call:
        """Make random rows and routes of this rank. drop: the share of absent routes, if the kernel does not route"""
        generator = torch.Generator().manual_seed(100 * seed + self.rank_group.rank)
        x = torch.randn(tokens, self.config.hidden_size, generator=generator).to(self.dtype).to(self.device)
        if self.kernel.capabilities.routes:
            logits = torch.randn(tokens, self.config.num_experts, generator=generator).to(self.dtype).to(self.device)
            chosen = route(logits, self.config.top_k, self.config.routing)
            return self.expect(x, RouterLogits(logits), chosen)
        ids = torch.rand(tokens, self.config.num_experts, generator=generator).topk(self.config.top_k).indices
        ids = torch.where(torch.rand(ids.shape, generator=generator) < drop, EMPTY, ids)
        return self.routed(x, ids.to(self.device), torch.rand(ids.shape, generator=generator).to(self.device) + 0.1)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        """Make a call of given routes. ids: logical"""
        routing = Routing(ids, weights)
        return self.expect(x, self.placement(routing).materialize(), routing)

    def expect(self, x: Tensor, routed: Routed, routing: Routing) -> Call:
        value, limit = expected_and_limit(
            self.config, self.scheme, self.tensors, x, routing.ids, routing.weights.float(), self.dtype
        )
        return Call(x, routed, value, limit)

    def check(self, call: Call, what: str, y: Tensor | None = None) -> None:
        """Compare an output with the expected one. y: the output; by default the kernel is called"""
        y = self.kernel(call.x, call.routed) if y is None else y
        self.add_fault_unless(
            y.shape == call.x.shape and y.dtype == self.dtype, f"{what}: got {list(y.shape)}, {y.dtype}"
        )
        found = max_error_ratio(y, call.value, call.limit)
        self.add_fault_unless(found <= 1, f"{what}: off by {found:.3g} times what rounding may cause")

    def add_fault_unless(self, condition: object, fault: str) -> None:
        if not condition:
            self.faults.append(fault)


def weights_of(
    config: MoEConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device, seed: int
) -> list[dict[str, Tensor]]:
    count = config.num_experts
    return [random_expert(config, scheme, count * seed + expert, dtype, device) for expert in range(count)]


def maps(ranks: int) -> dict[str, ExpertMap]:
    """Return test maps: experts in order with replicas, reversed, and with EMPTY slots in the middle of each rank.

    All have the same number of slots per rank, except that a single rank has no replicas.
    """
    slots_per_rank = -(-EXPERTS // ranks) + 1
    redundant = ExpertMap.redundant(EXPERTS, ranks, ranks * slots_per_rank - EXPERTS if ranks > 1 else 0)
    flat = [list(reversed(redundant.local(rank))) for rank in range(ranks)]
    own = [list(range(rank, EXPERTS, ranks)) for rank in range(ranks)]
    holes = [[row[0], *[EMPTY] * (slots_per_rank - len(row)), *row[1:]] for row in own]
    return {
        "replicas": redundant,
        "mixed": ExpertMap.from_ranks(flat[::-1], EXPERTS),
        "holes": ExpertMap.from_ranks(holes, EXPERTS),
    }


def out_of_range(routing: PhysicalRouting, last: int) -> PhysicalRouting:
    """Return the routes with various ids out of range in place of -1."""
    odd = torch.tensor([-1, last, -7, 2**31 - 1, last + 5], device=routing.ids.device)
    at = torch.arange(routing.ids.numel(), device=routing.ids.device).view(routing.ids.shape)
    return PhysicalRouting(PhysicalIds(torch.where(routing.ids < 0, odd[at % len(odd)], routing.ids)), routing.weights)


def raise_faults_on_all_ranks(name: str, case: Case) -> None:
    """Raise AssertionError on all ranks if any rank found a fault."""
    reports: list[list[str]] = [case.faults]
    if dist.is_initialized():
        reports = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(reports, case.faults)
    wrong = [rank for rank, faults in enumerate(reports) if faults]
    if wrong:
        raise AssertionError(
            f"{case.kernel.name}: {name} (top_k {case.config.top_k}, {case.scheme.name}, at most {case.max_tokens} "
            f"tokens) on ranks {wrong}; rank {wrong[0]}: {reports[wrong[0]][0]}"
        )
