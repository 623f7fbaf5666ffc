"""Detect whether something averages the experts of different ranks.

Loops over a model's parameters and torch's model averagers do that by mistake. An average leaves the same numbers in a
slot of all ranks, and each rank's further steps change them slowly. So the cosine between two ranks' numbers rises to
nearly 1; it is near 0 for independent experts.

Experts that share a component, such as those made from one dense layer, are similar in every pair of slots. The cosine
of different slots is therefore subtracted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.execution.expert_comparison import ComparedExperts
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.weights.expert_weights import ExpertWeights

_NUMBERS = 1024  # numbers per rank that are compared; the cosine of independent ones stays below 0.16 (5 sigma)
_FEWEST = 64  # with fewer numbers than this the cosine counts as 0
_RISE = 0.5  # a rise of the cosine that is reported


class Similarity:
    """The cosines between ranks of one layer's experts, at the beginning and later. All methods are collective."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._of: tuple[int, str] | None = None  # the weights' `updates` and the expert map when `_before` was taken

    def begin(self, layer: ComparedExperts, rank_group: RankGroup, step: str) -> None:
        """Take the cosines of the current weights as the reference."""
        weights = layer.expert_weights
        if rank_group.size > 1 and weights.has_expert_parameters and not weights.sharded:
            self._before = _cosines(layer, rank_group, step)
            self._of = weights.updates, layer.placement.expert_map.digest

    def problem(self, layer: ComparedExperts, rank_group: RankGroup, step: str) -> str | None:
        """Return None, or the ranks whose experts became similar since `begin`. All ranks return the same text.

        If weights were loaded or moved since, take a new reference instead.
        """
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
                    f"{layer.name}: the experts of rank {other} became similar to those of rank {first} (cosine "
                    f"{before:.2f}, now {now:.2f}): something averages weights over ranks (all_reduce in a loop over "
                    "model.parameters(), a model averager of torch). Leave ep_moe.training.expert_parameters(model) "
                    "out of it, and load the weights anew"
                )
        return None


def _pairs(rank_group: RankGroup) -> list[tuple[int, int]]:
    """Return the pairs of ranks to compare: each rank with the first, and with the one before it.

    Some ranks alone may have been averaged, so comparisons with the first rank would not suffice.
    """
    return [(first, at) for at in range(1, rank_group.size) for first in sorted({0, at - 1})]


def _cosines(layer: ComparedExperts, rank_group: RankGroup, step: str) -> list[float]:
    """Return the cosine (`excess`) of each of `_pairs`, the same on all ranks. Waits for the device."""
    expert_map = layer.placement.expert_map
    sample = _sample(layer.expert_weights, expert_map.slots_per_rank, layer.context.device)
    with rank_group.flight_recorder.step(step, counted=not step.startswith("backward")):
        rows = rank_group.exchange(sample.view(torch.int32).flatten().long())
    numbers = [torch.tensor(row, dtype=torch.int32, device="cpu").view(torch.float32) for row in rows]
    held = [found.double().view(sample.shape) for found in numbers]
    return [excess((held[first], held[at]), expert_map, (first, at)) for first, at in _pairs(rank_group)]


def _sample(weights: ExpertWeights, slots: int, device: torch.device) -> Tensor:
    """Return float32 [slots, n], a sample of each slot's matrices; zeros for an empty slot and for meta tensors."""
    matrices = [tensor.detach().flatten(1) for name, tensor in weights.stored_tensors().items() if "bias" not in name]
    each = max(8, _NUMBERS // (slots * len(matrices)))
    parts = [matrix[:, :: max(1, matrix.shape[1] // each)][:, :each].float() for matrix in matrices]
    found = torch.zeros(slots, sum(part.shape[1] for part in parts), dtype=torch.float32, device=device)
    if weights.is_meta:
        return found
    found[: weights.num_slots] = torch.cat(parts, 1)
    for slot, expert in enumerate(weights.local_experts):
        if expert == EMPTY:
            found[slot] = 0
    return found


def excess(held: tuple[Tensor, Tensor], expert_map: ExpertMap, ranks: tuple[int, int]) -> float:
    """Return the cosine between two ranks' numbers in equal slots, minus the cosine in shifted slots if it is positive.

    Shifted slots pair each slot of one rank with the next slot of the other. Pairs of slots that hold the same expert,
    or an empty slot, are left out.

    Args:
        held: float64 [slots, n] of each of the two ranks.
        expert_map: The layer's map.
        ranks: The two ranks, as places in the EP group.
    """
    (first, other), experts = held, [list(expert_map.local(rank)) for rank in ranks]
    aligned = _cosine(first, other, experts[0], experts[1])
    turned = _cosine(first.roll(1, 0), other, experts[0][-1:] + experts[0][:-1], experts[1])
    return aligned - max(turned, 0.0) if len(first) > 1 else aligned


def _cosine(first: Tensor, other: Tensor, experts: list[int], others: list[int]) -> float:
    different = [EMPTY not in pair and pair[0] != pair[1] for pair in zip(experts, others, strict=True)]
    a, b = first[different].flatten(), other[different].flatten()
    return float(torch.cosine_similarity(a, b, 0)) if len(a) >= _FEWEST else 0.0
