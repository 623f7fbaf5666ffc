"""Gradients over data-parallel ranks: who averages what, and their norm.

After backward an expert's gradient is the sum over all ranks' tokens, and every copy of the expert has it. That of any
other parameter is of this rank's tokens alone. The functions here make both the mean over ranks, as the gradient of one
process on the whole batch is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ep_moe.context import EPContext
from ep_moe.errors import InputError
from ep_moe.field_checks import check_kind, check_not_negative, check_positive
from ep_moe.weights.checksum import checksum
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import local

_BUCKET = 1 << 24  # numbers of one all-reduce


def expert_weights_of(model: nn.Module) -> list[ExpertWeights]:
    """The `ExpertWeights` of a model, in order."""
    check_kind("model", model, nn.Module)
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that belong to experts, which differ from rank to rank.

    Args:
        model: any module with `MoELayer`s in it.

    Returns:
        The parameters, in the order of `model.parameters()`. All others are the same on every rank.
    """
    return [parameter for weights in expert_weights_of(model) for parameter in weights.parameters()]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that are the same on every rank: all but `expert_parameters`.

    Args:
        model: any module with `MoELayer`s in it.

    Returns:
        The parameters, in the order of `model.parameters()`.
    """
    experts = {id(parameter) for parameter in expert_parameters(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Give dense and expert parameters a group each, for an optimizer.

    DTensors, which parameters are under FSDP2 and of experts with etp > 1, and plain tensors cannot be in one group on
    GPUs: torch's optimizers update a group in one call.

    Args:
        model: any module with `MoELayer`s in it, wrapped or not.

    Returns:
        What `torch.optim.AdamW(...)` takes; options of a group can be added to each. No group is empty.
    """
    groups = [dense_parameters(model), expert_parameters(model)]
    return [{"params": group} for group in groups if group]


@torch.no_grad()
def sync_gradients(model: nn.Module, context: EPContext) -> None:
    """Average gradients over the ranks that have tokens of their own, after backward and before the optimizer's step.

    Dense gradients are averaged by all-reduce. Under `DistributedDataParallel` or `fully_shard` the wrapper has done
    so, and they are left alone. Expert gradients are sums over ranks already and are divided. Collective over the
    stage: all ranks call it, once for each optimizer step, after the last backward.

    Args:
        model: the model, wrapped or not, after `loss.backward()` of a loss that is a mean over this rank's tokens.
        context: of its layers.

    Raises:
        InputError: at the first call, where ranks hold different numbers in a parameter that they should hold alike; on
            all ranks.
    """
    check_kind("sync_gradients: context", context, EPContext)
    layout = context.layout
    for weights in expert_weights_of(model):
        if (divisor := weights.gradient_sum.divisor) != layout.token_ranks:
            for parameter in weights.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(divisor / layout.token_ranks)
    if isinstance(model, DistributedDataParallel) or layout.stage == 1:
        return
    compare_ranks(model, context, "sync_gradients")
    gradients = []
    for parameter in dense_parameters(model):
        if parameter.requires_grad and not _is_cut(parameter):
            if parameter.grad is None:  # a rank without use for it takes part all the same
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        with context.ledger.step("sync gradients", counted=False):
            dist.all_reduce(flat, group=context.links["stage"].group)
        flat /= layout.stage
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, context: EPContext, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients by the norm of the whole model's, the same on all ranks: as `torch.nn.utils.clip_grad_norm_` does
    in one process. Each expert counts once, wherever its copies and pieces are. Collective over the stage.

    Args:
        model: the model, wrapped or not, with gradients that are averaged (`sync_gradients`).
        context: of its layers.
        max_norm: the norm that the gradients have at most afterwards.
        norm_type: p of the p-norm; may be `inf`.
        error_if_nonfinite: raise where the norm is NaN or infinite.

    Returns:
        The norm before clipping, float32 [] on the context's device.

    Raises:
        ConfigError: norm_type is not a positive number, or max_norm not one of at least 0.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; on all ranks alike.
    """
    check_kind("clip_grad_norm_: context", context, EPContext)
    if max_norm != math.inf:
        max_norm = check_not_negative("clip_grad_norm_: max_norm", max_norm)
    if norm_type != math.inf:
        norm_type = check_positive("clip_grad_norm_: norm_type", norm_type)
    link, p = context.links["stage"], norm_type
    experts, dense = _power(_experts_once(model), p, context.device), _power(_dense(model), p, context.device)
    cut = _power(_cut(model), p, context.device)
    if link.size > 1:
        layout = context.layout
        with context.ledger.step("clip gradients", counted=False):
            how = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
            both = torch.stack([experts, cut])
            dist.all_reduce(both, op=how, group=link.group)
        experts, cut = both.unbind()
        if not math.isinf(p):
            experts = experts / layout.replicas  # as many EP groups hold each
    norm = torch.stack([experts, dense, cut]).max() if math.isinf(p) else (experts + dense + cut).pow(1 / p)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradients' norm is {float(norm)}; pass error_if_nonfinite=False to clip all the same")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(scale.to(gradient.device))
    return norm


def compare_ranks(model: nn.Module, context: EPContext, what: str) -> None:
    """Compare dense parameters over the stage, and experts' with those of other EP groups, once for a model: gradients
    keep alike what was alike. Raises InputError on all ranks."""
    held = expert_weights_of(model)
    if not held or held[0].gradient_sum.compared:
        return
    experts = {id(parameter) for parameter in expert_parameters(model)}
    named = {name: p for name, p in model.named_parameters() if not _is_cut(p) and not p.is_meta}
    for kind, own in (("stage", False), ("expert_data", True)):
        link = context.links[kind]
        names = [name for name, parameter in named.items() if (id(parameter) in experts) is own]
        if link.size == 1 or not names:
            continue
        sums = torch.stack([checksum(named[name], context.device) for name in names])
        with link.ledger.step("compare parameters", counted=False):
            rows = link.exchange(sums)
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            odd = [rank for rank, found in zip(link.ranks, column, strict=True) if found != column[0]]
            if odd:
                raise InputError(
                    f"{what}: {name} differs between rank {link.ranks[0]} and {', '.join(map(str, odd))}, and "
                    f"all ranks must begin alike; call torch.manual_seed with one seed on all ranks before the model "
                    f"is made, or load a checkpoint on all"
                )
    for weights in held:
        weights.gradient_sum.compared = True


def _power(gradients: Iterable[tuple[Tensor, float]], p: float, device: torch.device) -> Tensor:
    """Sum of |g|^p, each times a share; the largest |g| where p is infinite."""
    total = torch.zeros((), device=device)
    for gradient, share in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, p, dtype=torch.float32).to(device)
            total = torch.maximum(total, norm) if math.isinf(p) else total + norm.pow(p) * share
    return total


def _experts_once(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """This rank's part of the experts' gradients: over an EP group and its etp groups each number comes once."""
    for weights in expert_weights_of(model):
        for name, parameter in weights.named_parameters():
            if parameter.grad is None:
                continue
            expert, _, part = name.partition(".")
            if part == "w2_bias" and weights.etp.rank:
                continue  # all etp ranks hold the whole of it
            gradient, share = local(parameter.grad), 1.0
            if expert.isdigit():
                owners = {
                    slot // weights.expert_map.cap for slot in weights.expert_map.logical_to_physical[int(expert)]
                }
                if min(owners) != weights.ep_rank:
                    continue  # a copy
            if weights.gradient_sum.shared_out:
                share = float(weights.gradient_sum.replicas.size)  # of which this rank has its own piece
            yield gradient, share


def _dense(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    for parameter in dense_parameters(model):
        if parameter.grad is not None and not _is_cut(parameter):
            yield parameter.grad, 1.0


def _cut(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Dense parameters that a wrapper shares out over ranks: this rank's pieces, each divided by how many hold it."""
    for parameter in dense_parameters(model):
        if parameter.grad is not None and _is_cut(parameter):
            gradient = parameter.grad
            copies = dist.get_world_size()
            for dim, placement in enumerate(gradient.placements):  # type: ignore[attr-defined]
                if placement.is_shard():
                    copies //= gradient.device_mesh.size(dim)  # type: ignore[attr-defined]
            yield local(gradient), 1.0 / copies


def _is_cut(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype and device each, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for group in kinds.values():
        bucket: list[Tensor] = []
        for gradient in group:
            if bucket and sum(g.numel() for g in bucket) + gradient.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
