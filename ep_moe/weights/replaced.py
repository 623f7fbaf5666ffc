"""Parameters and stored tensors that were replaced. Numbers of parameters that were assigned, or whose `data` was
swapped, go to where kernels read them, and memory that somebody keeps is left as it is. Of stored tensors that are
others now, parameters become views again (`follow`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch

from ep_moe.types import dtype_name
from ep_moe.weights.optimizers import guard_optimizers, leave_behind
from ep_moe.weights.parts import local, split_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ep_moe.weights.parts import Expert
    from ep_moe.weights.slots import ExpertSlots


@torch.no_grad()
def take_over(weights: ExpertSlots, *, moved: bool) -> None:
    """Write what parameters have elsewhere to where kernels read it. moved: some have other memory"""
    if weights._mesh is None and (moved or any(m.replaced for m in _replaceable(weights))) and _kept_elsewhere(weights):
        _renew(weights)
    if weights._changes.count != weights._seen:
        take_replaced(weights)
    for parameter, view in weights._views if moved else ():
        own = local(parameter)
        if own.data_ptr() != view.data_ptr():
            view.copy_(own)
            parameter.data = view


@torch.no_grad()
def take_replaced(weights: ExpertSlots) -> None:
    """Lay parameters that were assigned where the former ones lie. What `functional_call` and others have put in a
    parameter's place is there for a call: while it is, `_changes` and `_seen` differ."""
    views, own = [], True
    modules = [cast("Expert", weights._modules[str(expert)]) for expert in weights.held]
    holders = [(module, part) for module in modules for part in module._parameters]
    for (module, part), (parameter, view) in zip(holders, weights._views, strict=True):
        kept, found = parameter, cast("nn.Parameter", module._parameters[part])
        if found is not parameter and part in module.replaced:
            if weights._mesh is None and parameter.data_ptr() == view.data_ptr():
                parameter.data = parameter.data.clone()  # who holds it may put it back
            view.copy_(local(found))
            found.data, kept = view if weights._mesh is None else parameter.data, found
            if weights.gradient_sum.ep.size > 1:
                guard_optimizers(kept, weights)
        module.replaced.discard(part)
        own = own and found is kept
        views.append((kept, view))
    weights._set_views(views)
    if not own:
        weights._seen -= 1


def follow(weights: ExpertSlots, fn: Callable[[Tensor], Tensor]) -> None:
    """Lay the parameters into the stored tensors, which are others now. fn: made these of the old ones"""
    before = dict(weights._of_experts())
    weights._name_experts(requires_grad=True)
    for (name, made), (_, view) in zip(list(weights._of_experts()), list(weights._views), strict=True):
        old, kept = before[name], made
        if weights._mesh is None and torch._has_compatible_shallow_copy_type(old, view):
            old.data, kept = view, old  # optimizers hold the parameter itself
        else:
            leave_behind([old], weights)
        kept.requires_grad_(old.requires_grad)
        if old.grad is not None:
            kept.grad = fn(old.grad)
        if hasattr(old, "main_grad"):
            kept.main_grad = old.main_grad  # type: ignore[attr-defined]
        expert, _, part = name.partition(".")
        cast("Expert", weights._modules[expert])._parameters[part] = kept
    weights._set_views([(p, view) for (_, p), (_, view) in zip(weights._of_experts(), weights._views, strict=True)])


def _replaceable(weights: ExpertSlots) -> list[Expert]:
    """The modules of the experts, where some parameter may have been assigned."""
    changed = weights._changes.count != weights._seen
    return [cast("Expert", weights._modules[str(expert)]) for expert in weights.held] if changed else []


def _kept_elsewhere(weights: ExpertSlots) -> bool:
    """Whether others than parameters hold the memory of the slots, such as `parameter.data` that was kept to be put
    back, tensors of a state_dict(), or what a call saved for backward."""
    uses = getattr(torch._C, "_storage_Use_Count", None)
    held = Counter(view.untyped_storage().data_ptr() for _, view in weights._views)
    held.update(parameter.untyped_storage().data_ptr() for parameter in weights._on_views)
    for tensor in weights._slots.values():
        storage = tensor.untyped_storage()  # counts itself, as does the slots' tensor
        if uses is None or uses(storage._cdata) > held[storage.data_ptr()] + 2:
            return True
    return False


def _renew(weights: ExpertSlots) -> None:
    """Lay the slots into new memory, before numbers are written that parameters have elsewhere: the former memory
    keeps its numbers for those who hold it."""
    weights._slots = {name: tensor.clone() for name, tensor in weights._slots.items()}
    gated = weights.config.activation.gated
    parts = (
        view
        for first, *_ in weights.held.values()
        for name, tensor in weights._slots.items()
        for view in split_parts(name, tensor[first], gated).values()
    )
    views = []
    for (parameter, before), view in zip(weights._views, parts, strict=True):
        if parameter.data_ptr() == before.data_ptr():
            parameter.data = view
        views.append((parameter, view))
    seen = weights._seen
    weights._set_views(views)
    weights._seen, weights._place = seen, weights.place


def offloaded_problem(weights: ExpertSlots) -> str | None:
    """None, or that a parameter was replaced by one that kernels cannot read, as by hooks that offload it and bring
    it back for a call of its own module."""
    for name, parameter in weights._of_experts():
        if parameter.device != weights.device:
            return (
                f"expert_weights.{name} is on {parameter.device} and its layer on {weights.device}; leave expert "
                f"parameters out of offloading (accelerate's cpu_offload, disk_offload, device_map), or move the "
                f"layer as a whole"
            )
    return None


def stored_problem(weights: ExpertSlots) -> str | None:
    """None, or what a loop over parameters made of the tensors of experts that do not train: kernels would read codes
    of another dtype as other numbers, and no gradient comes back."""
    scheme, learn = weights.scheme, torch.is_grad_enabled() and not weights.trainable
    for name, tensor in weights._parameters.items():
        if tensor is None:
            return f"expert_weights.{name} was taken away; build the layer anew, and load its weights"
        spec = weights._specs[name]
        if tensor.shape != (weights.num_slots, *spec.shape) or (not scheme.plain and tensor.dtype != spec.dtype):
            wanted = f"{dtype_name(spec.dtype)} {[weights.num_slots, *spec.shape]}"
            return (
                f"expert_weights.{name} must be {wanted} as it was made, got {dtype_name(tensor.dtype)} "
                f"{list(tensor.shape)}; leave expert_weights out of what converts parameters, and load the weights anew"
            )
        if learn and tensor.requires_grad:
            return (
                f"expert_weights.{name} requires a gradient, and experts with quantization={scheme.name} in the layout "
                f"of this kernel do not train; call requires_grad_(False) on expert_weights, or build the layer with "
                f"quantization='none' and experts='reference'"
            )
    return None
