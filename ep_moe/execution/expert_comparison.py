"""Comparisons of the experts of different ranks: replicas must be equal, and other experts must not.

A data-parallel wrapper or loop takes a rank's experts for copies of the other ranks'. It broadcasts one rank's numbers
to all, or sums gradients of different experts. All comparisons are collective and wait for the device.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import InputError
from ep_moe.parallel.checksum import checksum, row_checksums
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY
from ep_moe.placement.placement import Placement
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import part_names, split_parts

_SAMPLE = 1 << 14  # numbers of a slot's tensor whose checksum identifies an expert


class ComparedExperts(Protocol):
    """The part of a MoELayer that a comparison of experts reads."""

    name: str
    config: MoEConfig
    context: EPContext
    placement: Placement
    expert_weights: ExpertWeights


def compare_experts(
    layer: ComparedExperts, rank_group: RankGroup, device: torch.device, step: str, *, trains: bool = False
) -> None:
    """Raise InputError, on all ranks, if replicas of an expert differ, or if a rank has the numbers of the first rank's
    experts for its own.

    trains: this rank trains, so replicas must also require gradients for the same parameters. A replica that does not
        is not updated in a step, and may leave out its rows' part of the others' gradients
    """
    weights, expert_map = layer.expert_weights, layer.placement.expert_map
    if rank_group.size == 1 or weights.sharded or not weights.stored_tensors():
        return
    slots_per_rank = expert_map.slots_per_rank
    facts = torch.zeros(slots_per_rank, 3, dtype=torch.int64, device=device)
    many = set(expert_map.replicated)
    held = _filled_slots(weights)
    copies = [slot for slot in held if weights.local_experts[slot] in many]
    tensors = list(weights.stored_tensors().values())
    if held:
        samples = [tensor.unsqueeze(-1).flatten(1)[:, :_SAMPLE] for tensor in tensors]
        facts[held, 0] = _of_slots(samples)[held].to(device)
    if copies:
        # whole tensors, so slot by slot: all at once would copy the weights of every replica
        facts[copies, 1] = torch.stack(
            [_of_all([tensor[slot].detach() for tensor in tensors], device) for slot in copies]
        )
        if trains and weights.has_expert_parameters:
            learns = [_learning(weights, weights.local_experts[slot]) for slot in copies]
            facts[copies, 2] = torch.tensor(learns, dtype=torch.int64, device=device)
    with rank_group.flight_recorder.step(step, counted=not step.startswith("backward")):
        rows = [
            list(zip(*(row[at::3] for at in range(3)), strict=True)) for row in rank_group.exchange(facts.flatten())
        ]
    for expert in many:
        slots = expert_map.logical_to_physical[expert]
        found = [rows[slot // slots_per_rank][slot % slots_per_rank] for slot in slots]
        ranks = sorted({rank_group.ranks[slot // slots_per_rank] for slot in slots})
        if len({learning for *_, learning in found} - {0}) > 1:
            raise InputError(
                f"{layer.name}: some parameters of expert {expert} have requires_grad=True on one of the ranks "
                f"{', '.join(map(str, ranks))}, which hold copies of it, and False on another; set requires_grad by "
                f"the parameters' names, alike on all ranks"
            )
        if len({numbers for _, numbers, _ in found}) > 1:
            raise InputError(
                f"{layer.name}: copies of expert {expert} on ranks {', '.join(map(str, ranks))} differ; write "
                f"experts with update_expert on all ranks, or load a checkpoint on all"
            )
    for rank in range(1, rank_group.size):
        first, own = [row[0] for row in rows[0]], [row[0] for row in rows[rank]]
        other = expert_map.local(0) != expert_map.local(rank)
        if other and first == own and len(set(own)) == slots_per_rank > 1:
            raise InputError(
                f"{layer.name}: the experts of rank {rank_group.ranks[rank]} have the values of rank "
                f"{rank_group.ranks[0]}'s experts: something has broadcast one rank's parameters to all ranks (a "
                "data-parallel wrapper, ZeroRedundancyOptimizer, a loop), or initialized them from one seed on all "
                "ranks (torch.nn.init). Leave ep_moe.training.expert_parameters(model) out of it, and load the "
                "weights anew, or write each expert with update_expert on all ranks"
            )


def warn_of_twins(layer: ComparedExperts, rank_group: RankGroup, device: torch.device, step: str) -> None:
    """Warn, on all ranks, if different experts have equal matrices in cases that `compare_experts` does not refuse.

    These are: only one kind of matrix is equal, as after a loop over parameters that initializes w2 again; and ranks
    hold one expert each, which may be equal on purpose.
    """
    weights, expert_map, gated = layer.expert_weights, layer.placement.expert_map, layer.config.activation.gated
    if rank_group.size == 1 or weights.sharded or not weights.has_expert_parameters:
        return
    parts = [part for part in part_names(weights.names, gated) if not part.endswith("_bias")]
    facts = torch.zeros(expert_map.slots_per_rank, len(parts), dtype=torch.int64, device=device)
    held = _filled_slots(weights)
    if held:
        views: dict[str, Tensor] = {}
        for name, tensor in weights.stored_tensors().items():
            views |= split_parts(name, tensor.transpose(0, 1), gated)
        samples = [views[part].transpose(0, 1).flatten(1)[:, :_SAMPLE] for part in parts]
        facts[held] = torch.stack([row_checksums(sample) for sample in samples], 1)[held].to(device)
    with rank_group.flight_recorder.step(step):
        rows = rank_group.exchange(facts.flatten())
    for rank in range(1, rank_group.size):
        pairs = zip(expert_map.local(0), expert_map.local(rank), strict=True)
        other = [slot for slot, (first, own) in enumerate(pairs) if min(first, own) >= 0 and first != own]
        equal = []
        for at, part in enumerate(parts):
            found = [(rows[0][slot * len(parts) + at], rows[rank][slot * len(parts) + at]) for slot in other]
            if all(first == own != 0 for first, own in found) and 0 < len(set(found)) == len(found):
                equal.append(part)
        if equal:
            warnings.warn(
                f"{layer.name}: {', '.join(equal)} of rank {rank_group.ranks[rank]}'s experts have the values of "
                f"rank {rank_group.ranks[0]}'s. Unless that is intended, something has initialized them from one "
                "seed on all ranks (torch.nn.init in a loop over parameters) or broadcast them; draw every expert's "
                "full tensors on all ranks, and write them with update_expert(expert, w13=..., w2=...)",
                UserWarning,
                stacklevel=2,
            )
            return


def mixing_problem(layer: ComparedExperts, rank_group: RankGroup, step: str) -> str | None:
    """Return, in a backward pass, what mixed the experts of different ranks or their gradients; None for nothing."""
    weights, device = layer.expert_weights, layer.context.device
    if rank_group.size == 1 or weights.sharded or not weights.has_expert_parameters:
        return None
    try:
        compare_experts(layer, rank_group, device, step, trains=True)
    except InputError as error:
        return str(error)
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    noted = [nothing if one is None else one for one in (weights.gradient_sum.stepped, weights.gradient_sum.restored)]
    firsts = [slots[0] for slots in weights.slots_of_expert.values()]  # in the order of gradients
    held = _of_all([tensor[firsts, :1].detach() for tensor in weights.stored_tensors().values()], device)
    facts = torch.stack([held, *(one.to(device) for one in noted)])
    with rank_group.flight_recorder.step(step, counted=False):
        rows = rank_group.exchange(facts)
    states: dict[int, tuple[int, int]] = {}  # by checksum, the first rank with it and the checksum of its experts
    for rank, (numbers, gradients, restored) in zip(rank_group.ranks, rows, strict=True):
        if gradients and gradients == rows[0][1] and numbers != rows[0][0]:
            return (
                f"{layer.name}: an optimizer step on rank {rank} used the gradients of rank {rank_group.ranks[0]}'s "
                "experts: something has averaged or summed gradients of different experts (all_reduce in a loop over "
                "model.parameters(), a wrapper). Leave ep_moe.training.expert_parameters(model) out of it, as "
                "sync_gradients of ep_moe.training does, and load the weights anew"
            )
        first, its_numbers = states.setdefault(restored, (rank, numbers))
        if restored and numbers != its_numbers:
            return (
                f"{layer.name}: ranks {first} and {rank} hold different experts, and their optimizers stepped with one "
                "state for them: optimizer.load_state_dict has read the file of one rank on both. Load each rank's own "
                "file, or set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, and load the weights "
                "anew"
            )
    return None


def _learning(weights: ExpertWeights, expert: int) -> int:
    """Return a number above 0 with one bit for each parameter of an expert that requires a gradient."""
    flags = [parameter.requires_grad for parameter in weights.get_submodule(str(expert)).parameters()]
    return sum(flag << at for at, flag in enumerate([True, *flags]))


def _filled_slots(weights: ExpertWeights) -> list[int]:
    """Those that have an expert, and numbers of it."""
    return [] if weights.is_meta else [slot for slot, expert in enumerate(weights.local_experts) if expert != EMPTY]


def _of_slots(tensors: list[Tensor]) -> Tensor:
    """int64 [L] of some tensors [L, ...]: of each slot, what `_of_all` is of its tensors."""
    return row_checksums(torch.stack([row_checksums(tensor) for tensor in tensors], 1))


def _of_all(tensors: list[Tensor], device: torch.device) -> Tensor:
    return checksum(torch.stack([checksum(tensor, device) for tensor in tensors]), device)
