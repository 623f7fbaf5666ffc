"""Checks of optimizers that hold expert parameters.

A layer does not know its optimizer. The checks are global hooks on the steps of all optimizers, which are installed
with the first expert parameters.

- An optimizer's own `state_dict()` is refused in a distributed checkpoint. It identifies parameters by index, and one
  index belongs to different experts on different ranks. The checkpoint would silently keep one rank's state and load it
  on all ranks. `get_optimizer_state_dict` identifies parameters by name, which is correct on any number of ranks and
  under any map. torch has no hook for an optimizer before its first step, so the check starts with that step. A state
  that `load_state_dict` restored is unchecked until then.
- Steps that would make ranks diverge are refused, and steps of parameters that no longer belong to their layer.
- Each layer counts the steps that update its parameters. A backward refuses weights that were updated since forward.
  Autograd does not see all such writes: fused optimizers, DTensors, and checkpoints that compute a forward again.
- A checksum of the gradients is taken before some steps, and one of the optimizer's state before its first step and the
  first one after `load_state_dict`. A later backward compares them over ranks, to detect that the gradients of
  different experts were averaged, or that several ranks loaded the file of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ep_moe.errors import ConfigError
from ep_moe.parallel.checksum import is_compared
from ep_moe.types import capturing
from ep_moe.weights.dense_checksum import DenseChecksum
from ep_moe.weights.full_state import refuse_full_state
from ep_moe.weights.parts import local

if TYPE_CHECKING:
    from ep_moe.placement.expert_map import ExpertMap
    from ep_moe.weights.slots import ExpertSlots

KEY = "parameters differ between ranks"
_REFUSAL = (
    "optimizer.state_dict() numbers parameters, and ranks hold different experts under one number: a checkpoint would "
    "keep {fqn} of one rank alone; save get_optimizer_state_dict(model, optimizer) of "
    "torch.distributed.checkpoint.state_dict, and load with set_optimizer_state_dict"
)


FSDP1_REFUSAL = (
    "FullyShardedDataParallel averages gradients of all parameters that it flattens, also of experts, whose "
    "gradients are sums over ranks; shard with ep_moe.training.fully_shard(model, context)"
)


def flattened(parameter: Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` (FSDP1) has flattened a parameter."""
    return getattr(parameter, "_fsdp_flattened", False)


class _Refused:
    """A value in a state dict that raises ConfigError when torch.distributed.checkpoint writes or reads it.

    torch.save, with one file for each rank, is allowed: it pickles this value as an empty set.
    """

    def __create_write_items__(self, fqn: str, value: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn=fqn.rpartition(".")[0] or fqn))

    def __create_chunk_list__(self) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __get_tensor_shard__(self, index: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __reduce__(self) -> Any:
        return set, ()


class _Owner:
    """A weak reference to the expert weights of a parameter. torch.save pickles it as an empty set."""

    def __init__(self, weights: ExpertSlots) -> None:
        self._weights = weakref.ref(weights)

    def __call__(self) -> ExpertSlots | None:
        return self._weights()

    def __reduce__(self) -> Any:
        return set, ()


def _owners(optimizer: Optimizer, attribute: str) -> list[ExpertSlots]:
    """Return the expert weights that an attribute of an optimizer's parameters refers to, in the parameters' order."""
    named = (getattr(p, attribute, None) for group in optimizer.param_groups for p in group["params"])
    found = (owner() for owner in named if isinstance(owner, _Owner))
    return list(dict.fromkeys(weights for weights in found if weights is not None))


def guard_optimizers(parameter: Parameter, weights: ExpertSlots) -> None:
    """Mark an expert parameter for the checks of optimizers, and install their hooks.

    `of_layer` marks a parameter of a layer. `summed_over_ranks` marks a gradient that is a sum over ranks.
    `differs_between_ranks` marks a parameter of an EP group of several ranks, which hold different experts.
    """
    parameter.of_layer = owner = _Owner(weights)  # type: ignore[attr-defined]
    if not weights.gradient_sum.of_one_rank:
        parameter.summed_over_ranks = owner  # type: ignore[attr-defined]
    if weights.gradient_sum.ep.size > 1:
        parameter.differs_between_ranks = owner  # type: ignore[attr-defined]
    _install()


def guard_router_optimizers(router: Module, weights: ExpertSlots) -> None:
    """Mark the parameters of a layer's router, and install the hooks of optimizers.

    By `beside_experts`, a rank without experts finds the layers whose experts its peers' optimizers may hold.
    """
    for parameter in router.parameters():
        parameter.of_layer = owner = _Owner(weights)  # type: ignore[attr-defined]
        if weights.gradient_sum.ep.size > 1:
            parameter.beside_experts = owner  # type: ignore[attr-defined]
    _install()


def mark_replaced_parameters(parameters: Iterable[Parameter], weights: ExpertSlots) -> None:
    """Mark parameters that a layer has replaced by new ones, because experts moved or the layer was converted.

    An optimizer that holds the old ones would not train the layer. Its steps are refused, unless the layer's experts
    are frozen.
    """
    owner = _Owner(weights)
    for parameter in parameters:
        parameter.replaced_in_layer = owner  # type: ignore[attr-defined]
    _look_before_steps()


def mark_parameters_of_replaced_modules(parameters: Iterable[Parameter]) -> None:
    """Mark parameters of a model's modules that `expert_parallel` has replaced.

    An optimizer that holds one that learns would not train what replaces it. Its steps are refused.
    """
    for parameter in parameters:
        parameter.in_replaced_module = True  # type: ignore[attr-defined]
    _look_before_steps()


@cache
def _look_before_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo  # a compiled step runs it between its graphs
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    learning = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(hasattr(p, "in_replaced_module") for p in learning):
        raise ConfigError(
            "the optimizer holds parameters of modules that expert_parallel has replaced, and would not train what "
            "replaces them; make the optimizer after expert_parallel"
        )
    for weights in _owners(optimizer, "replaced_in_layer"):
        # a rank without experts goes by the replaced parameters, so that it raises where its peers do
        learned = not weights.slots_of_expert and any(hasattr(p, "replaced_in_layer") for p in learning)
        if weights.any_requires_grad or learned:
            raise ConfigError(
                "the optimizer holds expert parameters that their layer has replaced, and would train no expert: "
                "experts moved (load_state_dict of another expert map, EPLB), the layer was converted with etp > 1 "
                "(.to, .half), or fully_shard has sharded the model; make the optimizer after that, and load its "
                "state then"
            )


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_refuse_whole_steps)
    register_optimizer_step_pre_hook(_note_gradients)
    register_optimizer_step_post_hook(_after_step)


@torch._disable_dynamo  # a compiled step runs it between its graphs
def _refuse_whole_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ConfigError for LBFGS: it computes one step for all its parameters from inner products.

    On one rank, these products would lack the experts of other ranks. Collective if a map leaves a rank without
    experts: that rank's optimizer does not show whether those of its peers hold experts.
    """
    if not isinstance(optimizer, LBFGS):
        return
    held = bool(_owners(optimizer, "differs_between_ranks"))
    uneven = next((found for found in _owners(optimizer, "beside_experts") if _leaves_a_rank(found.expert_map)), None)
    if uneven is not None:
        group = uneven.gradient_sum.ep  # that of all layers in the optimizer
        own = torch.tensor([held], dtype=torch.int64, device=uneven.device)
        with group.flight_recorder.step("step of LBFGS", counted=False):
            held = any(row[0] for row in group.exchange(own))
    if held:
        raise ConfigError(
            "LBFGS computes each step from inner products over all its parameters, and each rank's optimizer has "
            "only its own experts, so ranks would train different models; use an optimizer that updates each "
            "parameter independently, such as AdamW, or give LBFGS ep_moe.training.dense_parameters(model)"
        )


def _leaves_a_rank(expert_map: ExpertMap) -> bool:
    """Return whether a rank of the EP group has no expert."""
    return not all(map(expert_map.num_slots, range(expert_map.num_ranks)))


@torch._disable_dynamo  # a compiled step runs it between its graphs
def _note_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """In some of an optimizer's steps, run the checks and take the checksums that a later backward compares."""
    steps = optimizer.__dict__.get("_steps_noted_by_ep_moe", 0) + 1
    optimizer._steps_noted_by_ep_moe = steps  # type: ignore[attr-defined]
    if is_compared(steps):
        found = _owners(optimizer, "summed_over_ranks")
        if found:
            _refuse_mixed_groups(optimizer)
            _record_dense_checksum(optimizer, found)
        for weights in found:
            _refuse_sums_beside_means(optimizer, weights)
            _note_router(optimizer, weights)
        for weights in _owners(optimizer, "differs_between_ranks"):
            weights.gradient_sum.note_step()
            if steps == 1:
                held = (parameter for parameter in weights.parameters() if parameter in optimizer.state)
                weights.gradient_sum.note_restored(optimizer.state[parameter] for parameter in held)


def _refuse_mixed_groups(optimizer: Optimizer) -> None:
    """Raise ConfigError if a parameter group mixes DTensors and plain tensors, which foreach and fused steps cannot."""
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None]
        if "foreach" not in group or len({hasattr(p, "placements") for p in stepped}) < 2:
            continue
        by_default = group["foreach"] is None and not group.get("differentiable") and any(p.is_cuda for p in stepped)
        if group["foreach"] or group.get("fused") or by_default:
            raise ConfigError(
                f"a group of {type(optimizer).__name__} has DTensors (from FSDP2, tensor parallelism or etp > 1) and "
                "plain tensors, and torch updates a group in one call; give the optimizer "
                "ep_moe.training.parameter_groups(model), or foreach=False, which is slower"
            )


def _record_dense_checksum(optimizer: Optimizer, found: Collection[ExpertSlots]) -> None:
    """Let layers compare, in later backwards, the dense parameters that this optimizer updates with their experts."""
    sums = [weights.gradient_sum for weights in found if weights.gradient_sum.dense_checksum is None]
    if sums and not any(capturing(weights.device) for weights in found):
        dense_checksum = DenseChecksum(optimizer)
        for gradient_sum in sums:
            gradient_sum.dense_checksum = dense_checksum


def _note_router(optimizer: Optimizer, weights: ExpertSlots) -> None:
    """Set `router_steps` if this step changes the router. Synchronizes the device until it is set."""
    found, router = weights.gradient_sum, weights.gradient_sum.router()
    if found.router_steps or router is None or capturing(weights.device):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gradients = [p.grad for p in router.parameters() if id(p) in stepped and p.grad is not None]
    found.router_steps = any(bool(local(gradient).any()) for gradient in gradients)


def _refuse_sums_beside_means(optimizer: Optimizer, weights: ExpertSlots) -> None:
    """Raise ConfigError if dense gradients are means over ranks while those of experts are still sums.

    torch's FSDP1 and FSDP2 average the gradients of the parameters that they shard.
    """
    found, router = weights.gradient_sum, weights.gradient_sum.router()
    if found.layout is None or found.layout.token_ranks == 1 or found.divisor != 1 or found.wrapper_divisor is not None:
        return
    own = {id(parameter) for parameter in weights.parameters()}
    dense = [p for group in optimizer.param_groups for p in group["params"]]
    dense += [] if router is None else router.parameters()
    tp = set(found.layout.group("tp"))
    for parameter in dense:
        if flattened(parameter):
            raise ConfigError(FSDP1_REFUSAL)
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or id(parameter) in own or hasattr(parameter, "summed_over_ranks"):
            continue
        # a mesh within the tp group is tensor parallelism, whose ranks have the same tokens
        if not set(mesh.mesh.flatten().tolist()) <= tp:
            ranks = found.layout.token_ranks
            raise ConfigError(
                "torch's fully_shard averages dense gradients over ranks, and gradients of experts are sums over "
                f"{ranks} ranks, {ranks} times too large; use ep_moe.training.fully_shard(model, context), or call "
                "sync_gradients(model, context) of ep_moe.training after each backward"
            )


@torch._disable_dynamo  # a compiled step runs it between its graphs
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step in the layers that it has updated, and guard the optimizer's `state_dict()`.

    Every optimizer is guarded, because `add_param_group` may add experts to any of them later.
    """
    updated = {
        owner for group in optimizer.param_groups for p in group["params"]
        if isinstance(owner := getattr(p, "of_layer", None), _Owner) and p.grad is not None
    }  # fmt: skip
    for weights in {owner() for owner in updated} - {None}:
        weights.steps += 1  # type: ignore[union-attr]
    if not optimizer.__dict__.get("_guarded_by_ep_moe"):
        optimizer._guarded_by_ep_moe = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_guard)
        optimizer.register_load_state_dict_post_hook(_count_anew)


def _count_anew(optimizer: Optimizer) -> None:
    """Run the checks of an optimizer's first step again after its state was loaded."""
    optimizer._steps_noted_by_ep_moe = 0  # type: ignore[attr-defined]


def _guard(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if not any(hasattr(p, "differs_between_ranks") for group in optimizer.param_groups for p in group["params"]):
        return
    for weights in _owners(optimizer, "differs_between_ranks"):
        refuse_full_state(weights.expert_map)
    state_dict[KEY] = _Refused()
