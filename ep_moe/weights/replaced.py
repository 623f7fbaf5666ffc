"""Handle parameters and stored tensors that users replaced.

If a parameter was assigned, or its `data` was, its values are copied to the slots that kernels read, and the parameter
becomes a view of them. Slots whose memory other tensors still reference are moved first, so that those tensors keep
their values. If the stored tensors themselves were replaced, parameters become views of the new ones
(`rebind_parameters`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, cast

import torch

from ep_moe.errors import InputError
from ep_moe.types import dtype_name
from ep_moe.weights.optimizers import guard_optimizers, mark_replaced_parameters
from ep_moe.weights.parts import local, split_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from ep_moe.weights.parts import Expert
    from ep_moe.weights.slots import ExpertSlots


@torch.no_grad()
def copy_parameters_to_slots(weights: ExpertSlots, *, moved: bool) -> None:
    """Copy the values of parameters that are not views of the slots into the slots.

    moved: some parameters have other memory than their views
    """
    if weights._mesh is None and (moved or any(m.replaced for m in _replaceable(weights))) and _kept_elsewhere(weights):
        _renew(weights)
    if weights._changes.count != weights._seen:
        attach_assigned_parameters(weights)
    elsewhere = [local(parameter).data_ptr() != view.data_ptr() for parameter, view in weights._views] if moved else []
    values = _values(weights, [p for (p, _), apart in zip(weights._views, elsewhere, strict=False) if apart])
    for at, apart in enumerate(elsewhere):
        if apart:
            (parameter, view), own = weights._views[at], next(values)
            if own.shape != view.shape:  # `copy_` would broadcast
                name = [name for name, _ in weights._of_experts()][at]
                raise InputError(
                    f"expert_weights.{name}.data must be {list(view.shape)}, got {list(own.shape)}; assign values of "
                    f"the parameter's own shape"
                )
            view.copy_(own)
            _make_view(parameter, view)


@torch.no_grad()
def attach_assigned_parameters(weights: ExpertSlots) -> None:
    """Copy assigned parameters to the memory of the former ones, and make them views of it.

    `torch.func.functional_call` writes tensors into `_parameters` for the time of one call. They are not assigned to
    the module, and are not copied. While they are in place, `_changes` and `_seen` differ.
    """
    views, own = [], True
    modules = [cast("Expert", weights._modules[str(expert)]) for expert in weights.slots_of_expert]
    holders = [(module, part) for module in modules for part in module._parameters]
    present = [cast("nn.Parameter", module._parameters[part]) for module, part in holders]
    assigned = [
        found is not parameter and module.replaced.get(part) is found
        for (module, part), found, (parameter, _) in zip(holders, present, weights._views, strict=True)
    ]
    values = _values(weights, [found for found, new in zip(present, assigned, strict=True) if new])
    for at, (parameter, view) in enumerate(weights._views):
        (module, part), kept, found = holders[at], parameter, present[at]
        if assigned[at]:
            if local(parameter).data_ptr() == view.data_ptr():  # the user may assign the former parameter again
                _make_view(parameter, local(parameter).detach().clone())
            view.copy_(next(values))
            _make_view(found, view)
            kept = found
            guard_optimizers(kept, weights)
        if found is kept:  # an assigned parameter under a substituted one is copied after the call
            module.replaced.pop(part, None)
        own = own and found is kept
        views.append((kept, view))
    weights._set_views(views)
    if not own:
        weights._seen -= 1


def _values(weights: ExpertSlots, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Iterate over the parameters' local values before any slot is written.

    A parameter in the memory of another slot is copied. Experts that swap their tensors would else read slots that were
    already overwritten.
    """
    slots = {tensor.untyped_storage().data_ptr() for tensor in weights._slots.values()}
    found = [local(parameter).detach() for parameter in parameters]
    return iter([own.clone() if own.untyped_storage().data_ptr() in slots else own for own in found])


def _make_view(parameter: nn.Parameter, view: Tensor) -> None:
    """Make a parameter a view of its slot. `data` of a DTensor cannot be assigned, so its local tensor is."""
    if hasattr(parameter, "_local_tensor"):
        parameter._local_tensor = view
    else:
        parameter.data = view


def rebind_parameters(weights: ExpertSlots, fn: Callable[[Tensor], Tensor]) -> None:
    """Make the parameters views of the stored tensors after these were replaced.

    fn: the function that converted the old stored tensors to the new ones. It also converts gradients.
    """
    before = dict(weights._of_experts())
    weights._name_experts(requires_grad=True)
    for (name, made), (_, view) in zip(list(weights._of_experts()), list(weights._views), strict=True):
        old, kept = before[name], made
        if weights._mesh is None and torch._has_compatible_shallow_copy_type(old, view):
            old.data, kept = view, old  # keep the Parameter object, which optimizers reference
        else:
            mark_replaced_parameters([old], weights)
        kept.requires_grad_(old.requires_grad)
        if old.grad is not None:
            kept.grad = fn(old.grad)
        if hasattr(old, "main_grad"):
            kept.main_grad = old.main_grad  # type: ignore[attr-defined]
        expert, _, part = name.partition(".")
        cast("Expert", weights._modules[expert])._parameters[part] = kept
    weights._set_views([(p, view) for (_, p), (_, view) in zip(weights._of_experts(), weights._views, strict=True)])


def _replaceable(weights: ExpertSlots) -> list[Expert]:
    """Return the modules of the experts if a parameter may have been assigned, else an empty list."""
    changed = weights._changes.count != weights._seen
    return [cast("Expert", weights._modules[str(expert)]) for expert in weights.slots_of_expert] if changed else []


def _kept_elsewhere(weights: ExpertSlots) -> bool:
    """Return whether tensors other than the parameters reference the memory of the slots.

    Examples are a `parameter.data` that a user kept, tensors of a state_dict(), and tensors saved for backward. Return
    True if torch cannot count references.
    """
    uses = getattr(torch._C, "_storage_Use_Count", None)
    held = Counter(view.untyped_storage().data_ptr() for _, view in weights._views)
    held.update(parameter.untyped_storage().data_ptr() for parameter in weights._on_views)
    for tensor in weights._slots.values():
        storage = tensor.untyped_storage()  # 2 expected references: this variable and the tensor of the slots
        if uses is None or uses(storage._cdata) > held[storage.data_ptr()] + 2:
            return True
    return False


def _renew(weights: ExpertSlots) -> None:
    """Move the slots to new memory before new values are written, so that tensors on the old memory keep theirs."""
    weights._slots = {name: tensor.clone() for name, tensor in weights._slots.items()}
    gated = weights.config.activation.gated
    parts = (
        view
        for first, *_ in weights.slots_of_expert.values()
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
    weights._seen, weights._last_addresses = seen, weights.addresses


def tied_problem(weights: ExpertSlots) -> str | None:
    """Return an error if a call with gradients has one parameter for two matrices, or None.

    A parameter is a view of one slot, and each use of the weights copies it to the other one. That would change tensors
    which autograd has saved.
    """
    if not torch.is_grad_enabled():
        return None
    places: dict[int, str] = {}
    modules = [(expert, cast("Expert", weights._modules[str(expert)])) for expert in weights.slots_of_expert]
    held = [(f"{expert}.{part}", module, part) for expert, module in modules for part in module._parameters]
    for (name, module, part), own in zip(held, weights._on_views, strict=True):
        found = module._parameters[part]
        kept = found is own or module.replaced.get(part, own) is found  # else substituted for one call
        if kept and (other := places.setdefault(id(found), name)) != name:
            return (
                f"expert_weights.{other} and expert_weights.{name} are one parameter, and calls with gradients need "
                "one for each; assign a parameter of its own and copy the values after each step, or call the layer "
                "under torch.no_grad()"
            )
    return None


def substituted_problem(weights: ExpertSlots) -> str | None:
    """Return an error if a tensor that was substituted for one call does not fit its parameter, or None.

    Kernels read gate and up matrices, and all experts, as one tensor. Tensors of other sizes would shift rows from one
    matrix to the next. A whole tensor instead of an etp rank's shard would be added once per etp rank. Assigned
    parameters are checked when they are assigned.
    """
    modules = {expert: cast("Expert", weights._modules[str(expert)]) for expert in weights.slots_of_expert}
    holders = [(expert, part) for expert, module in modules.items() for part in module._parameters]
    for (expert, part), (parameter, view) in zip(holders, weights._views, strict=True):
        found = cast("Tensor", modules[expert]._parameters[part])
        if found is parameter or modules[expert].replaced.get(part) is found:
            continue
        wanted, got = _described(parameter, view.dtype), _described(found, found.dtype)
        if wanted != got:
            return (
                f"expert_weights.{expert}.{part} must be {wanted} as the layer's parameter is, got {got}; pass tensors "
                f"of the parameters' shapes, dtypes and placements to torch.func.functional_call"
            )
    return None


def _described(tensor: Tensor, dtype: torch.dtype) -> str:
    placements = getattr(tensor, "placements", None)
    text = f"{dtype_name(dtype)} {list(tensor.shape)}"
    return text if placements is None else f"{text} (DTensor, {list(placements)})"


def offloaded_problem(weights: ExpertSlots) -> str | None:
    """Return an error if a parameter is on another device than the layer, or None.

    Offloading hooks cause this: they bring parameters back only for a call of the parameters' own module.
    """
    for name, parameter in weights._of_experts():
        if parameter.device != weights.device:
            return (
                f"expert_weights.{name} is on {parameter.device} and its layer on {weights.device}; leave expert "
                f"parameters out of offloading (accelerate's cpu_offload, disk_offload, device_map), or move the "
                f"layer as a whole"
            )
    return None


def stored_problem(weights: ExpertSlots) -> str | None:
    """Return an error if user code changed stored tensors of experts without named parameters, or None.

    It may have removed a tensor, changed the shape or the dtype of codes, which kernels would misread, or requested a
    gradient that no backward computes.
    """
    scheme, learn = weights.scheme, torch.is_grad_enabled() and not weights.trainable
    for name, tensor in weights._parameters.items():
        if tensor is None:
            return f"expert_weights.{name} was removed; build the layer again, and load its weights"
        spec = weights._specs[name]
        if tensor.shape != (weights.num_slots, *spec.shape) or (not scheme.plain and tensor.dtype != spec.dtype):
            wanted = f"{dtype_name(spec.dtype)} {[weights.num_slots, *spec.shape]}"
            return (
                f"expert_weights.{name} must be {wanted} as it was made, got {dtype_name(tensor.dtype)} "
                f"{list(tensor.shape)}; exclude expert_weights from code that converts parameters, and load the "
                "weights again"
            )
        if learn and tensor.requires_grad:
            return (
                f"expert_weights.{name} requires a gradient, and experts with quantization={scheme.name} in the layout "
                f"of this kernel do not train; call requires_grad_(False) on expert_weights, or build the layer with "
                f"quantization='none' and experts='reference'"
            )
    return None


class Balancer(Protocol):
    """The part of an ExpertBalancer that the weights read."""

    @property
    def moves_experts(self) -> bool: ...


def refuse_conversion(weights: ExpertSlots, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise InputError if `fn` changes dtype or device while an ExpertBalancer moves experts.

    The bytes of an expert on their way would no longer be those of the slots.
    """
    balancer = weights.balancer()
    if balancer is None or not balancer.moves_experts:
        return
    before = torch.empty(0, dtype=weights.dtype, device=weights.device)
    after = fn(before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise InputError(
            f"expert_weights cannot become {dtype_name(after.dtype)} on {after.device} (.to, .half, .bfloat16) while "
            "an ExpertBalancer moves experts; call settle() of the balancer on all ranks before"
        )
