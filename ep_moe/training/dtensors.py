"""Dense parameters that are DTensors. FSDP2 averages the gradients of those it shards, tensor parallelism none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ep_moe.parallel.layout import RankLayout


def is_dtensor(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor: each rank holds a shard or a copy of it."""
    return hasattr(parameter, "placements")


def within_tp(parameter: Tensor, layout: RankLayout) -> bool:
    """Return whether a parameter is a DTensor over ranks of one tp group only. No wrapper averages it over dp."""
    return is_dtensor(parameter) and set(_ranks(parameter)) <= set(layout.group("tp"))


def shard_key(parameter: Tensor) -> tuple[Any, ...] | None:
    """Return a key of this rank's shard of a DTensor (placements, mesh shape, coordinate); None for a plain tensor."""
    if not is_dtensor(parameter):
        return None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return parameter.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())  # type: ignore[attr-defined]


def mesh_problem(model: nn.Module, dense: Collection[str], layout: RankLayout) -> str | None:
    """Return an error if the gradient of a dense DTensor cannot be averaged over ranks.

    Args:
        model: Any module.
        dense: The names of its dense parameters.
        layout: The layout of its layers.

    Returns:
        The first such parameter and the remedy, or None.
    """
    found = {n: p for n, p in model.named_parameters() if n in dense and p.requires_grad and is_dtensor(p)}
    if not found:
        return None
    from torch.distributed.fsdp import FSDPModule

    by_fsdp = {id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    problems = (_problem(name, p, layout, by_fsdp=id(p) in by_fsdp) for name, p in found.items())
    return next(filter(None, problems), None)


def _problem(name: str, parameter: nn.Parameter, layout: RankLayout, *, by_fsdp: bool) -> str | None:
    ranks, stage, tp = _ranks(parameter), layout.group("stage"), layout.group("tp")
    among, inside = f"{name} is a DTensor over ranks {', '.join(map(str, ranks))}", set(ranks) <= set(tp)
    batches = len({stage.index(rank) // layout.split for rank in ranks if rank in stage})
    placements = parameter.placements  # type: ignore[attr-defined]
    # FSDP2's mesh dimensions come before that of tensor parallelism, and it shards over the last of its own
    summed = not by_fsdp or (len(placements) > 1 and not placements[-2].is_replicate())
    if not by_fsdp and not inside:
        return (
            f"{among}, which are not in one tp group, so it is unknown if its gradient is a sum or a mean over them; "
            f"shard weights over {', '.join(map(str, tp))}, this rank's tp group, or make the context with a larger "
            "ParallelConfig.tp"
        )
    if summed and batches > 1 and layout.split < layout.tp:
        return (
            f"{among}, and its gradient is a sum over tp ranks with different tokens, while all others are means; "
            "set ParallelConfig.tokens to Tokens.REPLICATED, and pass layers all tokens of the dp rank"
        )
    if by_fsdp and not inside and batches != layout.token_ranks:
        return (
            f"{among}, over which FSDP averages its gradient, and {layout.token_ranks} ranks have different tokens; "
            "call ep_moe.training.fully_shard(model, context) instead"
        )
    return None


def _ranks(parameter: Tensor) -> list[int]:
    ranks: list[int] = parameter.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
    return ranks
