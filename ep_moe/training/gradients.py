"""Average gradients over data-parallel ranks, and clip them by their norm.

After backward, every copy of an expert has the sum of the gradients of all ranks' tokens. The gradient of any other
parameter is that of this rank's tokens only. These functions convert both to the mean over ranks, which is the gradient
of one process with the whole batch.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ep_moe.checks import check_not_negative, check_positive
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.parallel.call_facts import MODEL_FACTS_PREFIX
from ep_moe.training.dtensors import is_dtensor, within_tp
from ep_moe.training.parameters import (
    check_context,
    compare_ranks,
    dense_parameters,
    expert_parameters,
    expert_weights_of,
    first_text,
    sparse_problem,
)
from ep_moe.types import capturing
from ep_moe.weights.parts import local

_BUCKET = 1 << 24  # elements of one all-reduce


@torch.no_grad()
def sync_gradients(model: nn.Module, context: EPContext) -> None:
    """Average gradients over the ranks with different tokens, after backward and before the optimizer's step.

    Dense gradients are averaged by all-reduce over the stage. Weights that torch's tensor parallelism shards over a tp
    group (DTensors) are averaged over dp. `DistributedDataParallel` and `fully_shard` average dense gradients
    themselves, and this function leaves those unchanged. A dense parameter without a gradient on some ranks gets one
    there, and these ranks synchronize their device. One without a gradient on all ranks keeps None (zeros in a CUDA
    graph).

    Expert gradients are already sums over ranks. The first call divides them, and later backwards divide them
    themselves. If anything other than the layer's backward writes or reads them, also call this once before the first
    backward. A second call, or one for each micro-batch, changes nothing but rounding. If an expert's gradient is not
    finite on one rank, one element of it becomes infinite on all ranks, so that `torch.amp.GradScaler` skips the step
    on all of them. Collective over the stage: all ranks must call it.

    Args:
        model: The model, wrapped or not, after `loss.backward()`. The loss must be a mean over this rank's tokens.
        context: The context of its layers.

    Raises:
        ConfigError: The model's layers have a context of another layout. On all ranks: a gradient is sparse on one of
            them. At the first call with these parameters, on all ranks: a dense parameter is a DTensor over some dp
            ranks, or over tp ranks with different tokens whose gradients it sums.
        RankFailed: On GPUs, after the first call: another rank has a sparse gradient.
        InputError: Ranks hold different values of a parameter that must be equal (checked at the first call with these
            parameters). On CPUs: a rank is still in a layer's call or its backward, or passes another model. All ranks
            raise, and no gradient is changed.
    """
    check_context("sync_gradients", model, context)
    _check_same_call("sync_gradients", model, context)
    layout = context.layout
    wrapped = isinstance(model, DistributedDataParallel) or layout.stage == 1
    if not wrapped:
        compare_ranks(model, context, "sync_gradients")
        _refuse_sparse("sync_gradients", model, context, ["stage"])
    for weights in expert_weights_of(model):
        weights.gradient_sum.divide(layout.token_ranks)
    if not wrapped:
        _average(model, context)
    if layout.stage > 1:
        _share_overflow(model, context)


def _check_same_call(what: str, model: nn.Module, context: EPContext, **numbers: float) -> None:
    """Raise InputError on all ranks if they do not make the same call, so that different gradients would be summed.

    A rank may still be in a layer's call, for example after another number of micro-batches, or pass another model or
    other trainable parameters. Checked on CPUs only, where gloo would abort the process if sizes differ. On GPUs the
    check would synchronize the device.

    numbers: other arguments by name. The caller checks their values afterwards, on the ranks that pass wrong ones
    """
    if context.device.type == "cpu":
        experts = {id(parameter) for parameter in expert_parameters(model)}
        dense = [p for p in model.named_parameters() if id(p[1]) not in experts and p[1].requires_grad]
        digest = zlib.crc32(repr([(name, p.shape, p.dtype) for name, p in dense]).encode())
        layers = " ".join(module.name for module in model.modules() if isinstance(module, MoELayer))
        facts = f"{MODEL_FACTS_PREFIX}{layers}, dense parameters that learn={len(dense)} (digest {digest:08x})"
        for name, number in numbers.items():
            facts += f", {name}={float(number) if isinstance(number, int | float) else number!r}"
        with context._begin_call(what, facts), context.flight_recorder.step(what, counted=False):
            context.rank_groups["lockstep"].agree([], None, context.device)


def _refuse_sparse(what: str, model: nn.Module, context: EPContext, kinds: Sequence[str]) -> None:
    """Raise ConfigError if a rank has a sparse gradient.

    On CPUs the ranks exchange this, and all raise. On GPUs an exchange would synchronize the device. The rank publishes
    its error instead, and its peers raise RankFailed with the same text.

    kinds: names of the groups that call this; together they connect all ranks
    """
    problem, device = sparse_problem(model), context.device
    if device.type == "cpu":
        with context.flight_recorder.step(what, counted=False):
            for kind in kinds:
                problem = first_text(context.rank_groups[kind], problem, device)
    if problem is None:
        return
    error = ConfigError(f"{what}: {problem}")
    if device.type != "cpu":
        context._report_exception(error, what, users=True)
    raise error


def _average(model: nn.Module, context: EPContext) -> None:
    """Average the dense gradients that no wrapper averages.

    Those of plain tensors are averaged over the stage, and those of shards of tensor parallelism over the dp ranks with
    the same shard.
    """
    learning = [parameter for parameter in dense_parameters(model) if parameter.requires_grad]
    pieces = [parameter for parameter in learning if within_tp(parameter, context.layout)]
    _redistribute_gradients(pieces, context)
    _make_means([parameter for parameter in learning if not is_dtensor(parameter)], context, "stage")
    if context.layout.dp > 1:
        _make_means(pieces, context, "dp")


def _make_means(parameters: list[nn.Parameter], context: EPContext, kind: str) -> None:
    """Average gradients over a group of ranks.

    If no rank has a gradient of a parameter, it stays None: with zeros, an optimizer would apply momentum and decay.

    kind: the name of the group, whose ranks hold equal parameters
    """
    gradients, rank_group = list[Tensor](), context.rank_groups[kind]
    lacking: dict[int, nn.Parameter] = {}  # id of the zero gradient -> parameter
    for parameter in parameters:
        found = parameter.grad
        if found is None:  # contribute zeros: another rank may have a gradient
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))  # type: ignore[arg-type]
        if found is None:
            lacking[id(gradients[-1])] = parameter
    counted: list[tuple[list[nn.Parameter | None], Tensor]] = []
    for bucket in _buckets(gradients):
        unused = [lacking.get(id(gradient)) for gradient in bucket]
        counts = bucket[0].new_ones(len(bucket))  # number of ranks with each gradient, reduced in the same all-reduce
        for at in (at for at, lacked in enumerate(unused) if lacked is not None):
            counts[at] = 0
        flat = torch.cat([*(gradient.flatten() for gradient in bucket), counts])
        with context.flight_recorder.step("sync gradients", counted=False):
            rank_group.all_reduce(flat)
        flat /= rank_group.size
        *parts, counts = flat.split([*(gradient.numel() for gradient in bucket), len(bucket)])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        if any(lacked is not None for lacked in unused):
            counted.append((unused, counts.clone()))
    if not capturing(context.device):  # a graph's replay cannot set a gradient to None
        for unused, counts in counted:
            for lacked, ranks in zip(unused, counts.tolist(), strict=True):  # synchronizes the device
                if lacked is not None and ranks == 0:
                    lacked.grad = None


def _redistribute_gradients(parameters: Iterable[nn.Parameter], context: EPContext) -> None:
    """Redistribute gradients of DTensors to the placements of their parameters.

    Sequence parallelism leaves partial sums. Collective over each DTensor's mesh: either all of its ranks have the
    gradient, or none.
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None or not is_dtensor(parameter):
            continue
        placements = parameter.placements  # type: ignore[attr-defined]
        if gradient.placements != placements:
            with context.flight_recorder.step("sum gradients of DTensors", counted=False):
                parameter.grad = gradient.redistribute(placements=placements)


def _share_overflow(model: nn.Module, context: EPContext) -> None:
    """Write an infinity into the experts' gradients of all ranks if those of one rank are not finite.

    `torch.amp.GradScaler` checks a rank's own gradients. Without this, only that rank would skip the step and lower its
    scale. Each kind of parameter of a layer (w1, w2) is treated separately, since it may have an optimizer of its own.
    If a rank has no gradient of a kind, a dense gradient becomes infinite on all ranks. Does not synchronize the
    device.
    """
    kinds: list[dict[str, list[Tensor]]] = []
    for weights in expert_weights_of(model):
        found: dict[str, list[Tensor]] = {name: [] for name in weights.parameter_kinds}
        for name, parameter in weights.named_parameters():
            given = weights.gradient(parameter)
            if given is not None and (gradient := local(given)).numel():
                found[name.rpartition(".")[2]].append(gradient)
        kinds.append(found)
    groups = [gradients for found in kinds for gradients in found.values()]
    if not groups:
        return
    device = context.device
    zero = torch.zeros((), dtype=torch.float32, device=device)
    overflows = [~get_total_norm(group, math.inf).isfinite().to(device) if group else zero for group in groups]
    flags = torch.stack(
        [torch.stack(overflows).float(), torch.stack([zero if group else zero + 1 for group in groups])]
    )
    with context.flight_recorder.step("share overflows", counted=False):
        context.rank_groups["stage"].all_reduce(flags, dist.ReduceOp.MAX)
    for group, flag in zip(groups, flags[0], strict=True):
        if group:
            _make_infinite(group[0], flag)
    dense = (local(p.grad) for p in dense_parameters(model) if p.grad is not None and not p.grad.is_sparse)
    first = next((gradient for gradient in dense if gradient.numel()), None)
    if first is not None:
        _make_infinite(first, (flags[0] * flags[1]).max())


def _make_infinite(gradient: Tensor, flag: Tensor) -> None:
    """Set the first element of a gradient to infinity if the flag is not 0."""
    first = gradient[(0,) * gradient.dim()]
    first.copy_(first.masked_fill(flag.to(first.device) > 0, math.inf))


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, context: EPContext, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients by the norm of the whole model, as `torch.nn.utils.clip_grad_norm_` does in one process.

    The norm is the same on all ranks. It includes each expert once, independent of its replicas and shards, and all
    pipeline stages. Collective over the context's ranks.

    Args:
        model: The model, wrapped or not, with averaged gradients (`sync_gradients`).
        context: The context of its layers.
        max_norm: The maximum norm of the gradients after clipping.
        norm_type: p of the p-norm; may be `inf`.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite.

    Returns:
        The norm before clipping, float32 [] on the context's device.

    Raises:
        ConfigError: norm_type is not a positive number, max_norm is not a number of at least 0, the model's layers have
            a context of another layout, or a gradient is sparse on a rank. All ranks raise.
        RankFailed: On GPUs: another rank has a sparse gradient.
        InputError: On CPUs: ranks pass different models, `max_norm` or `norm_type`, or a rank is still in a layer's
            call or its backward. All ranks raise.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set. All ranks raise.
    """
    check_context("clip_grad_norm_", model, context)
    _check_same_call("clip_grad_norm_", model, context, max_norm=max_norm, norm_type=norm_type)
    _refuse_sparse("clip_grad_norm_", model, context, ["stage", "pp"])
    if not _is_infinity(max_norm):
        max_norm = float(check_not_negative("clip_grad_norm_: max_norm", max_norm))  # an int may not fit into int64
    if not _is_infinity(norm_type):
        norm_type = check_positive("clip_grad_norm_: norm_type", norm_type)
    _redistribute_gradients(dense_parameters(model), context)
    rank_group, p = context.rank_groups["stage"], norm_type
    experts, dense = _power(_experts_once(model), p, context.device), _power(_dense(model), p, context.device)
    sharded = _power(_pieces(model, context.layout.stage), p, context.device)
    how = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    if rank_group.size > 1:
        with context.flight_recorder.step("clip gradients", counted=False):
            both = torch.stack([experts, sharded])
            rank_group.all_reduce(both, how)
        experts, sharded = both.unbind()
        if not math.isinf(p):
            experts = experts / context.layout.replicas  # this number of EP groups holds each expert
    total = torch.stack([experts, dense, sharded]).max() if math.isinf(p) else experts + dense + sharded
    if (stages := context.rank_groups["pp"]).size > 1:
        with context.flight_recorder.step("clip gradients over stages", counted=False):
            stages.all_reduce(total, how)
    norm = total if math.isinf(p) else total.pow(1 / p)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradients' norm is {float(norm)}; pass error_if_nonfinite=False to clip all the same")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for given in _gradients(model):
        gradient = local(given)
        gradient.mul_(scale.to(gradient.device))
    return norm


def _is_infinity(value: object) -> bool:
    return isinstance(value, numbers.Real) and value == math.inf


def _gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    dense = [parameter.grad for parameter in dense_parameters(model) if parameter.grad is not None]
    return [gradient for weights in expert_weights_of(model) for gradient in weights.gradients()] + dense


def _power(gradients: Iterable[tuple[Tensor, float]], p: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p, weighted by each gradient's share, or the largest |g| if p is infinite."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for gradient, share in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, p, dtype=torch.float32).to(device)
            total = torch.maximum(total, norm) if math.isinf(p) else total + norm.pow(p) * share
    return total


def _experts_once(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Yield (gradient, share) of this rank's experts. Over an EP group and its etp groups, each element occurs once."""
    for weights in expert_weights_of(model):
        for name, parameter in weights.named_parameters():
            given = weights.gradient(parameter)
            if given is None:
                continue
            expert, _, part = name.partition(".")
            if part == "w2_bias" and weights.etp.rank:
                continue  # all etp ranks hold the whole tensor: count that of etp rank 0
            gradient, share = local(given), 1.0
            if expert.isdigit():
                owners = {
                    slot // weights.expert_map.slots_per_rank
                    for slot in weights.expert_map.logical_to_physical[int(expert)]
                }
                if min(owners) != weights.ep_rank:
                    continue  # a replica that another rank counts
            if weights.gradient_sum.sharded:
                share = float(weights.gradient_sum.replicas.size)  # a shard: undo the later division by `replicas`
            yield gradient, share


def _dense(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    for parameter in dense_parameters(model):
        if parameter.grad is not None and not is_dtensor(parameter):
            yield parameter.grad, 1.0


def _pieces(model: nn.Module, ranks: int) -> Iterator[tuple[Tensor, float]]:
    """Yield (gradient, share) of this rank's shards of dense DTensors. share: 1 / (ranks of the stage that hold it)"""
    for parameter in dense_parameters(model):
        if parameter.grad is not None and is_dtensor(parameter):
            gradient = parameter.grad
            copies = ranks
            for dim, placement in enumerate(gradient.placements):  # type: ignore[attr-defined]
                if not placement.is_replicate():  # not `is_shard`: False for the strided shards of FSDP2 with TP
                    copies //= gradient.device_mesh.size(dim)  # type: ignore[attr-defined]
            yield local(gradient), 1.0 / copies


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients into buckets of at most `_BUCKET` elements, each of one dtype and device, in order."""
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
