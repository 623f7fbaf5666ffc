"""Separate expert parameters from dense ones, and check that parameters which must be equal on ranks are."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ep_moe.checks import check_kind
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, InputError
from ep_moe.layer import MoELayer
from ep_moe.parallel.checksum import checksum
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.training.dtensors import is_dtensor, mesh_problem, shard_key, within_tp
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.optimizers import FSDP1_REFUSAL, flattened
from ep_moe.weights.parts import local


def expert_weights_of(model: nn.Module) -> list[ExpertWeights]:
    """List the `ExpertWeights` of a model, in order.

    Args:
        model: Any module.

    Returns:
        Its expert weights.

    Raises:
        ConfigError: `model` is not a module.
    """
    check_kind("model", model, nn.Module)
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of experts, which differ between ranks.

    Args:
        model: Any module with `MoELayer`s in it.

    Returns:
        The parameters, in the order of `model.parameters()`. All others are the same on every rank.
    """
    return [parameter for weights in expert_weights_of(model) for parameter in weights.parameters()]


def check_context(what: str, model: nn.Module, context: EPContext) -> None:
    """Raise ConfigError if a context has another layout than a model's layers, or if FSDP1 wraps a part of the model.

    Args:
        what: The name of the calling function, for errors.
        model: Any module.
        context: The context that the caller was given.
    """
    check_kind(f"{what}: context", context, EPContext)
    check_kind(f"{what}: model", model, nn.Module)
    if any(map(flattened, model.parameters())):
        raise ConfigError(f"{what}: {FSDP1_REFUSAL}")
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.context.layout != context.layout:
            raise ConfigError(
                f"{what}: context must have the layout of {layer.name}'s, {layer.context.layout}, got "
                f"{context.layout}; pass the EPContext that the model's layers were made with"
            )


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that are the same on every rank: all except `expert_parameters`.

    Args:
        model: Any module with `MoELayer`s in it.

    Returns:
        The parameters, in the order of `model.parameters()`.
    """
    experts = {id(parameter) for parameter in expert_parameters(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, with dense and expert parameters in separate groups.

    Plain tensors and the DTensors of each mesh are in separate groups too. FSDP2, tensor parallelism and etp > 1 create
    DTensors. On GPUs, torch's optimizers update a group in one call, which does not support both.

    Args:
        model: Any module with `MoELayer`s in it, wrapped or not.

    Returns:
        Groups for `torch.optim.AdamW(...)`, to which options can be added. Dense parameters come first. No group is
        empty.
    """
    groups = []
    for parameters in (dense_parameters(model), expert_parameters(model)):
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        plain = by_mesh.pop(None, [])
        groups += [plain, *by_mesh.values()]
    return [{"params": group} for group in groups if group]


def sparse_problem(model: nn.Module) -> str | None:
    """Return an error if a parameter has a gradient that is not dense.

    Args:
        model: Any module.

    Returns:
        The first such parameter and the remedy, or None.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return (
                f"{name} must have a dense gradient, got {parameter.grad.layout}; make its nn.Embedding or "
                f"nn.EmbeddingBag with sparse=False"
            )
    return None


def compare_ranks(model: nn.Module, context: EPContext, what: str) -> None:
    """Compare parameters that must be equal over ranks. Collective over the stage.

    Dense parameters are compared over the stage, shards of tensor parallelism over dp, and experts over EP groups. This
    is done once for each set of dense parameters: equal parameters stay equal under averaged gradients.

    Args:
        model: The model.
        context: The context of its layers.
        what: The name of the calling function, for errors.

    Raises:
        ConfigError: A dense parameter's gradient cannot be averaged over ranks, or is sparse. All ranks raise.
        InputError: A parameter differs. All ranks raise.
    """
    held = expert_weights_of(model)
    experts = {id(parameter) for parameter in expert_parameters(model)}
    dense = tuple(name for name, parameter in model.named_parameters() if id(parameter) not in experts)
    if not held or dense in held[0].gradient_sum.compared:
        return
    sharded = {id(p) for weights in held if weights.gradient_sum.sharded for p in weights.parameters()}
    named: dict[str, dict[str, Tensor]] = {"stage": {}, "dp": {}, "expert_data": {}}
    for name, parameter in model.named_parameters():
        if id(parameter) in experts:
            kind = None if id(parameter) in sharded else "expert_data"
        elif is_dtensor(parameter):
            kind = "dp" if within_tp(parameter, context.layout) else None
        else:
            kind = "stage"
        if kind is not None and not parameter.is_meta:
            named[kind][name] = parameter
    stage, device = context.rank_groups["stage"], context.device
    with context.flight_recorder.step("compare parameters", counted=False):
        problem = mesh_problem(model, dense, context.layout) or sparse_problem(model)
        refused = first_text(stage, problem, device)
        if refused is None:
            problems = [_difference(context.rank_groups[kind], found, device) for kind, found in named.items()]
            different = next(filter(None, problems), None)
            different = first_text(stage, different, device)  # ranks of other groups may have found no difference
    if refused is not None:
        raise ConfigError(f"{what}: {refused}")
    if different is not None:
        raise InputError(f"{what}: {different}")
    for weights in held:
        weights.gradient_sum.compared.add(dense)


def first_text(rank_group: RankGroup, text: str | None, device: torch.device) -> str | None:
    """Return the text of the first rank of a group that has one, or None, on all ranks. Collective.

    The flight recorder exchanges texts only in lockstep groups, and a stage may have several of them.
    """
    own = (text or "").encode()
    sizes = [row[0] for row in rank_group.exchange(torch.tensor([len(own)], dtype=torch.int64, device=device))]
    if not any(sizes):
        return None
    padded = list(own) + [0] * (max(sizes) - len(own))
    rows = rank_group.exchange(torch.tensor(padded, dtype=torch.int64, device=device))
    first = next(at for at, size in enumerate(sizes) if size)
    return bytes(rows[first][: sizes[first]]).decode()


def _difference(rank_group: RankGroup, named: dict[str, Tensor], device: torch.device) -> str | None:
    """Return which parameters of a group's ranks differ from those of its first rank, or None. Collective."""
    if rank_group.size == 1:
        return None
    kinds = [(name, tuple(p.shape), str(p.dtype), p.requires_grad, shard_key(p)) for name, p in named.items()]
    facts = rank_group.exchange(
        torch.tensor([len(kinds), zlib.crc32(repr(kinds).encode())], dtype=torch.int64, device=device)
    )
    odd = [rank for rank, found in zip(rank_group.ranks, facts, strict=True) if found != facts[0]]
    if odd:
        return (
            f"rank {rank_group.ranks[0]} and {', '.join(map(str, odd))} have parameters of other placements, names, "
            f"shapes, dtypes or requires_grad; make the same model on all ranks"
        )
    if not named:
        return None
    rows = rank_group.exchange(torch.stack([checksum(local(parameter), device) for parameter in named.values()]))
    for name, column in zip(named, zip(*rows, strict=True), strict=True):
        odd = [rank for rank, found in zip(rank_group.ranks, column, strict=True) if found != column[0]]
        if odd:
            return (
                f"{name} differs between rank {rank_group.ranks[0]} and {', '.join(map(str, odd))}, and all ranks "
                f"must begin alike; call torch.manual_seed with one seed on all ranks before the model is made, or "
                f"load a checkpoint on all"
            )
    return None
