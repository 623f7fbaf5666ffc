"""The comparison with the oracle, on which all other tests rely, finds each planted error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.testing import distributed, rank_device
from ep_moe.types import LocalIds, PhysicalIds, PhysicalRouting, Received
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks
from tests.fixtures.helpers import fill

EXACT = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
GATED = dataclasses.replace(EXACT, activation=Activation.GEGLU)
MAP = ExpertMap.from_ranks([[7, 1, 2, 3, 0, 4], [6, 5, 0, 2, 3, 1]], 8)  # with replicas
Experts = Callable[[Received], torch.Tensor]


def differs(plant: Callable[[MoELayer], None], config: MoEConfig, all2all: str) -> None:
    """Check that the comparison passes before the error is planted, and fails on some rank after it."""
    with EPContext.from_groups(device=rank_device(), deadline_s=20) as context:
        layer = fill(MoELayer(config, context, all2all=all2all, expert_map=MAP))
        bounds = {} if config == EXACT else {"rtol": 1e-5, "atol": 1e-2}
        check_call(layer, context, tokens=8, what="before", **bounds)
        plant(layer)
        try:
            check_call(layer, context, tokens=8, **bounds)
            found = ""
        except AssertionError as error:
            found = str(error)
        assert any("Mismatched elements" in text for text in gather_from_all_ranks(found)), (
            f"{plant.__name__} went unseen"
        )


def wrapped(layer: MoELayer, around: Callable[[Experts, Received], torch.Tensor]) -> None:
    experts = layer.experts
    layer.experts = lambda received, out: around(experts, received)
    layer.experts.capabilities = experts.capabilities


def swapped_gate_and_up(layer: MoELayer) -> None:
    with torch.no_grad():
        layer.expert_weights.w13.copy_(layer.expert_weights.w13.roll(16, dims=1))


def swapped_gate_and_up_in_one_expert(layer: MoELayer) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            layer.expert_weights.w13[1] = layer.expert_weights.w13[1].roll(16, dims=0)


def local_ids_off_by_one(layer: MoELayer) -> None:
    def shifted(experts: Experts, received: Received) -> torch.Tensor:
        ids, slots = received.local_ids, layer.expert_weights.num_slots
        moved = torch.where(ids >= 0, (ids + 1) % slots, ids)
        return experts(dataclasses.replace(received, local_ids=LocalIds(moved)))

    wrapped(layer, shifted)


def one_row_lost(layer: MoELayer) -> None:
    def dropped(experts: Experts, received: Received) -> torch.Tensor:
        y = experts(received)
        if dist.get_rank() == 1:
            y[(received.local_ids >= 0).any(1).nonzero()[0]] = 0
        return y

    wrapped(layer, dropped)


def rows_in_another_order(layer: MoELayer) -> None:
    wrapped(layer, lambda experts, received: experts(received).roll(1, dims=0))


def a_weight_applied_twice(layer: MoELayer) -> None:
    wrapped(layer, lambda experts, received: experts(dataclasses.replace(received, weights=received.weights.square())))


def unwritten_memory(layer: MoELayer) -> None:
    def poisoned(experts: Experts, received: Received) -> torch.Tensor:
        y = experts(received)
        y[:1] = float("nan")
        return y

    wrapped(layer, poisoned)


def a_stale_replica(layer: MoELayer) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            layer.expert_weights.w2[MAP.local(1).index(0)] += 1


def logical_ids_taken_for_physical(layer: MoELayer) -> None:
    layer.placement.forward = lambda routing, *_: PhysicalRouting(PhysicalIds(routing.ids), routing.weights)


@distributed(2)
@pytest.mark.parametrize(
    "planted",
    [
        local_ids_off_by_one,
        one_row_lost,
        rows_in_another_order,
        a_weight_applied_twice,
        unwritten_memory,
        a_stale_replica,
        logical_ids_taken_for_physical,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted(planted, world_size):
    for all2all in ("allgather", "torch_a2a"):
        differs(planted, EXACT, all2all)


@distributed(2)
@pytest.mark.parametrize(
    "planted", [swapped_gate_and_up, swapped_gate_and_up_in_one_expert], ids=lambda plant: plant.__name__
)
def test_planted_in_a_gated_layer(planted, world_size):
    differs(planted, GATED, "torch_a2a")
