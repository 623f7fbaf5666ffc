"""Whether something averages the experts of different ranks, as loops over a model's parameters and torch's model
averagers do.

An average leaves the same numbers in the slots of all its ranks, from which each rank's further steps lead away slowly:
the cosine between two ranks' numbers, near 0 for experts that have nothing to do with each other, rises to nearly 1.
Experts that share a component, as those made of one dense layer, are alike in whatever slot. The cosine of other pairs
of slots is therefore taken off.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ep_moe.context import EPContext
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.weights.expert_weights import ExpertWeights

_NUMBERS = 1024  # of a rank's experts that are compared: a cosine of independent ones stays below 0.16 (5 sigma)
_FEWEST = 64
_RISE = 0.5


class _Compared(Protocol):
    name: str
    context: EPContext
    placement: Placement
    expert_weights: ExpertWeights


class Similarity:
    """Of one layer's experts on different ranks of its EP group: at first, and since. All methods are collective."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._of: tuple[int, str] | None = None  # the weights' `updates` and map of these

    def begin(self, layer: _Compared, rank_group: RankGroup, step: str) -> None:
        """Take the numbers that the ranks have for right."""
        weights = layer.expert_weights
        if rank_group.size > 1 and weights.named and not weights.sharded:
            self._before = _cosines(layer, rank_group, step)
            self._of = weights.updates, layer.placement.expert_map.digest

    def problem(self, layer: _Compared, rank_group: RankGroup, step: str) -> str | None:
        """None, or, on all ranks alike, which ranks' experts became alike since `begin`."""
        weights = layer.expert_weights
        if self._of != (weights.updates, layer.placement.expert_map.digest):
            self.begin(layer, rank_group, step)
            return None
        if weights.sharded:
            return None
        for pair, before, now in zip(_pairs(rank_group), self._before, _cosines(layer, rank_group, step), strict=True):
            if now - before > _RISE:
                first, other = (rank_group.ranks[at] for at in pair)
                return (
                    f"{layer.name}: the experts of rank {other} became alike to those of rank {first} (cosine "
                    f"{before:.2f}, now {now:.2f}): something averages weights over ranks (all_reduce in a loop over "
                    f"model.parameters(), a model averager of torch). Leave ep_moe.training.expert_parameters(model) "
                    f"out of it, and load the weights anew"
                )
        return None


def _pairs(rank_group: RankGroup) -> list[tuple[int, int]]:
    """Each rank with the first, and with the one before it, as an average may be of some ranks alone."""
    return [(first, at) for at in range(1, rank_group.size) for first in sorted({0, at - 1})]


def _cosines(layer: _Compared, rank_group: RankGroup, step: str) -> list[float]:
    """Of each of `_pairs`, the same on all ranks. Waits for the device."""
    expert_map = layer.placement.expert_map
    sample = _sample(layer.expert_weights, expert_map.slots_per_rank, layer.context.device)
    with rank_group.flight_recorder.step(step, counted=not step.startswith("backward")):
        rows = rank_group.exchange(sample.view(torch.int32).flatten().long())
    numbers = [torch.tensor(row, dtype=torch.int32, device="cpu").view(torch.float32) for row in rows]
    held = [found.double().view(sample.shape) for found in numbers]
    return [excess((held[first], held[at]), expert_map, (first, at)) for first, at in _pairs(rank_group)]


def _sample(weights: ExpertWeights, slots: int, device: torch.device) -> Tensor:
    """float32 [slots, n]: some numbers of each slot's matrices; 0 for an empty slot, and for weights that are not there
    yet."""
    matrices = [tensor.detach().flatten(1) for name, tensor in weights.stored_tensors().items() if "bias" not in name]
    each = max(8, _NUMBERS // (slots * len(matrices)))
    parts = [matrix[:, :: max(1, matrix.shape[1] // each)][:, :each].float() for matrix in matrices]
    found = torch.zeros(slots, sum(part.shape[1] for part in parts), device=device)
    if weights.is_meta:
        return found
    found[: weights.num_slots] = torch.cat(parts, 1)
    for slot, expert in enumerate(weights.local_experts):
        if expert == EMPTY:
            found[slot] = 0
    return found


def excess(held: tuple[Tensor, Tensor], expert_map: ExpertMap, ranks: tuple[int, int]) -> float:
    """The cosine of two ranks' numbers slot by slot, less that of each slot with the next one. Slots of one expert are
    left out.

    Args:
        held: Of each of the ranks, float64 [slots, n].
        expert_map: Of the layer.
        ranks: Of the EP group.
    """
    (first, other), experts = held, [list(expert_map.local(rank)) for rank in ranks]
    aligned = _cosine(first, other, experts[0], experts[1])
    turned = _cosine(first.roll(1, 0), other, experts[0][-1:] + experts[0][:-1], experts[1])
    return aligned - max(turned, 0.0) if len(first) > 1 else aligned


def _cosine(first: Tensor, other: Tensor, experts: list[int], others: list[int]) -> float:
    different = [EMPTY not in pair and pair[0] != pair[1] for pair in zip(experts, others, strict=True)]
    a, b = first[different].flatten(), other[different].flatten()
    return float(torch.cosine_similarity(a, b, 0)) if len(a) >= _FEWEST else 0.0
