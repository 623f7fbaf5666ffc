"""Gradient buffers of a rank's experts: one [L, ...] for each stored tensor. Each parameter's gradient is a view.

The backward of a call overwrites a buffer or adds to it, so that autograd needs no node for each of hundreds of
parameters. If gradients need no sum over ranks or slots, a kernel with `Experts.writes_gradients` writes the buffers
directly. Otherwise the summed gradient is written or added afterwards.

A parameter whose gradient is None starts from zero, as in torch. If this holds for all parameters of a buffer, backward
overwrites the buffer. Otherwise the views of those parameters are zeroed, and backward adds to the whole buffer.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ep_moe.errors import ConfigError
from ep_moe.runtime.first_order import first_order_only
from ep_moe.types import dtype_name
from ep_moe.weights.callers import Callers, frames_of, training_schedules
from ep_moe.weights.kept_gradients import KeptGradients
from ep_moe.weights.parts import local, parts_of, split_parts

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots

_HOOKS, _LATER_HOOKS = (operator.attrgetter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
_GRAD, _LEARNS = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_SHOWN = operator.attrgetter("shown")
_NONES = itertools.repeat(None)
_SCALERS: Callers = {"torch.amp.grad_scaler": ("step",)}


class GradientOut(NamedTuple):
    """The destination of the gradient of a stored tensor.

    Args:
        out: [L, ...], the shape of the stored tensor.
        accumulate: Add to `out`. Default: overwrite it.
        factor: The gradient is multiplied by this.
    """

    out: Tensor
    accumulate: bool = False
    factor: float = 1.0


class _Part(NamedTuple):
    """The part of a buffer that belongs to one parameter.

    view: the part itself; shown: what the parameter's gradient is set to, `view` or a DTensor of it if etp > 1
    """

    parameter: nn.Parameter
    shown: Tensor
    view: Tensor


class MainGrads:
    """The gradient buffers of one layer's experts on this rank.

    Args:
        weights: The layer's expert weights.
        dtype: The dtype of the buffers, whose views are `main_grad` of the parameters. With None, buffers have the
            parameters' dtype and their views are `grad`.

    Raises:
        ConfigError: The layer's experts do not support gradient buffers.
    """

    def __init__(self, weights: ExpertSlots, dtype: torch.dtype | None) -> None:
        self._weights, self.dtype = weights, dtype
        self.attribute = "grad" if dtype is None else "main_grad"
        self.buffers: dict[str, Tensor] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._of: list[nn.Parameter] | None = None  # the parameters of `_parts`
        self._kept = KeptGradients()
        self._slots_of_expert: Any = None  # `ExpertSlots.slots_of_expert` when the buffers were made
        why = self._refusal()
        if why is not None:
            raise ConfigError(f"use_main_grads: {why}")
        self.lay_out()

    def _refusal(self) -> str | None:
        """Return why these experts do not support gradient buffers, or None if they do."""
        weights = self._weights
        if not weights.has_expert_parameters:
            return (
                "expert_weights are quantized, belong to a transformers model, or have a kernel without a backward, "
                "so they have no parameters to train; build the layer with experts='reference' or 'bf16_triton' and "
                "no quantization"
            )
        if weights.sharded or not weights._slots:
            return "FSDP2 has sharded the experts, and holds their gradients; call fully_shard with shard_experts=False"
        if weights.lora is not None:
            return "experts have LoRA factors, which are trained without the matrices; call merge_lora before"
        if self.dtype not in (None, weights.dtype, torch.float32):
            return (
                f"dtype must be torch.float32 or the parameters' {dtype_name(weights.dtype)}, got "
                f"{dtype_name(self.dtype)}"
            )
        other = "main_grad" if self.attribute == "grad" else "grad"
        if any(getattr(parameter, other, None) is not None for parameter in weights._on_views):
            return f"expert parameters have a .{other} already; set it to None on all (zero_grad, zero_main_grads)"
        return self._hooked()

    def problem(self) -> str | None:
        """Return why a call would lose gradients or skip their hooks, or None."""
        if not torch.is_grad_enabled():
            return None
        if self._weights.lora is not None:
            return "expert_weights has LoRA factors and use_main_grads; call merge_lora, or build a model without it"
        return self._hooked() or self._scaled_later()

    def _scaled_later(self) -> str | None:
        """Return an error if a pipeline schedule on the call stack will divide `grad`, but not `main_grad`."""
        for schedule in training_schedules() if self.dtype is not None else ():
            parts = getattr(schedule, "_n_microbatches", 1)
            if getattr(schedule, "scale_grads", False) and parts > 1:
                return (
                    f"{type(schedule).__name__} has scale_grads=True and divides .grad by its {parts} micro-batches, "
                    f"and not .main_grad, which use_main_grads(dtype=...) fills; call use_main_grads(model) without "
                    f"dtype, or set scale_grads=False and divide the loss by {parts}"
                )
        return None

    def _hooked(self) -> str | None:
        views = self._weights._on_views
        # fast path: each call checks hundreds of parameters
        if not any(map(_HOOKS, views)) and not any(map(_LATER_HOOKS, views)):
            return None
        for parameter in views:
            later = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if parameter._backward_hooks or (later and (len(later) > 1 or next(iter(later.values())) is not _fold)):
                return (
                    "an expert parameter has a hook (register_hook, register_post_accumulate_grad_hook), which "
                    "use_main_grads would not call; remove it and do its work after backward, or register it on a "
                    "module"
                )
        return None

    # --- buffers ------------------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Allocate buffers for stored tensors with trainable parameters, and assign their parts to parameters.

        Does nothing if parameters and slots are unchanged. If experts have moved to other slots, all buffers are made
        anew and earlier gradients are dropped.
        """
        weights = self._weights
        if self._slots_of_expert is not weights.slots_of_expert:
            self._slots_of_expert, self._of, self.buffers = weights.slots_of_expert, None, {}
        if self._of is weights._on_views and len(self.buffers) == len(weights._slots):
            return
        owners = self._owners()
        for name, stored in weights._slots.items():
            if name not in self.buffers and any(parameter.requires_grad for parameter, _, _ in owners[name]):
                self.buffers[name] = torch.zeros_like(stored, dtype=self.dtype or stored.dtype)
        before = {id(part.parameter): part for parts in self._parts.values() for part in parts}
        self._of, self._parts = weights._on_views, {}
        for name, buffer in self.buffers.items():
            self._parts[name] = []
            for parameter, slot, part in owners[name]:
                view = split_parts(name, buffer[slot], weights.config.activation.gated)[part]
                known = before.get(id(parameter))
                if known is None or known.view.data_ptr() != view.data_ptr():
                    known = _Part(parameter, _as_shown(view, parameter), view)
                self._parts[name].append(known)
        if weights.main_grads is self:
            self.install_grad_hooks()

    def _owners(self) -> dict[str, list[tuple[nn.Parameter, int, str]]]:
        """Return by stored name a list of (parameter, slot, part name)."""
        weights, parameters = self._weights, iter(self._weights._on_views)
        found: dict[str, list[tuple[nn.Parameter, int, str]]] = {name: [] for name in weights._slots}
        for slot, *_ in weights.slots_of_expert.values():
            for name in weights._slots:
                for part in parts_of(name, weights.config.activation.gated):
                    found[name].append((next(parameters), slot, part))
        return found

    def attach_gradients(self) -> dict[str, bool]:
        """Set each trainable parameter's gradient to its view of a buffer, before backward writes the buffers.

        Returns:
            A dict from the names of the buffers that backward must write to `accumulate`: True to add to the buffer,
            False to overwrite it.
        """
        views = self._weights._on_views
        if self.dtype is None and all(map(_LEARNS, views)) and not any(map(operator.is_not, map(_GRAD, views), _NONES)):
            self._warn_of_kept(all_begin=True)
            for parts in self._parts.values():
                for parameter, shown, _ in parts:
                    parameter.grad = shown
            return dict.fromkeys(self._parts, False)
        self._warn_of_kept(all_begin=False)
        found = {}
        for name, parts in self._parts.items():
            begins, goes_on = [], False
            for parameter, shown, view in parts:
                given = getattr(parameter, self.attribute, None)
                if not parameter.requires_grad:
                    if given is shown:  # frozen after an earlier backward: it keeps a copy of its gradient
                        setattr(parameter, self.attribute, shown.clone())
                    continue
                if given is shown:
                    goes_on = True
                    continue
                if given is None:
                    begins.append(view)
                else:
                    view.copy_(local(given))
                    goes_on = True
                setattr(parameter, self.attribute, shown)
                if self.dtype is not None:
                    _adopt(parameter)  # a parameter that was frozen until now has no hook yet
            if begins and goes_on:
                torch._foreach_zero_(begins)
            if begins or goes_on:
                found[name] = goes_on
        return found

    def _warn_of_kept(self, *, all_begin: bool) -> None:
        """Warn once if a gradient that begins anew is still referenced.

        all_begin: whether no parameter has a gradient, and all are trained
        """
        if not self._kept.checks_next():
            return
        parts = list(itertools.chain.from_iterable(self._parts.values()))
        if not all_begin:
            parts = [
                part
                for part in parts
                if part.parameter.requires_grad and getattr(part.parameter, self.attribute, None) is not part.shown
            ]
        uses = 2 if any(part.shown is part.view for part in parts) else 1  # the fields of a part
        self._kept.check(list(map(_SHOWN, parts)), uses, self.attribute)

    def restart(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self._weights._on_views:
            setattr(parameter, self.attribute, None)

    def warn_of_move(self) -> None:
        """Warn that moving experts drops the gradients of their parameters, if there are any."""
        if self.has_gradients:
            warnings.warn(
                "experts moved (load_state_dict of another expert map, EPLB) while their parameters had gradients of "
                "use_main_grads, which are dropped; move experts after an optimizer step and zero_grad()",
                UserWarning,
                stacklevel=3,
            )

    @property
    def bytes(self) -> int:
        """The size of all buffers in bytes."""
        return sum(buffer.numel() * buffer.itemsize for buffer in self.buffers.values())

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(getattr(parameter, self.attribute, None) is not None for parameter in self._weights._on_views)

    def install_grad_hooks(self) -> None:
        """Add gradients that autograd accumulates in `grad` to `main_grad`.

        They come from other uses of a parameter, such as a penalty in the loss. Does nothing if buffers are `grad`.
        """
        if self.attribute == "grad":
            return
        look_before_steps()
        for parameter in self._weights._on_views:
            parameter.main_grad = getattr(parameter, "main_grad", None)  # type: ignore[attr-defined]
            _adopt(parameter)

    # --- a call -------------------------------------------------------------------------------------------------------

    def connect_slots(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all slots [L, ...] for one call, whose backward writes the buffers.

        The counterpart of `GradientSum.connect_parameters`.
        """
        self._weights.gradient_sum.check()
        self.lay_out()
        first = next(parameter for parameter in self._weights._on_views if parameter.requires_grad)
        call = CallGradients(self, tuple(slots), first)
        return Stored(zip(slots, _Collected.apply(tuple(slots.values()), call, first), strict=True), call)


class Stored(dict[str, Tensor]):
    """The stored tensors of one call, by name. call: the destination of their gradients"""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], call: CallGradients) -> None:
        super().__init__(tensors)
        self.call = call


class CallGradients:
    """The gradients of the stored tensors in one call.

    first: the only parameter that is an input of the autograd node; it represents all parameters of the layer
    """

    def __init__(self, main: MainGrads, names: tuple[str, ...], first: nn.Parameter) -> None:
        self._main, self._names, self._parameters = main, names, main._of
        self._node = get_gradient_edge(first).node
        self._check_versions = main._weights.gradient_sum.make_version_check()
        self._written = False  # whether a kernel has written the gradients

    def wanted(self) -> bool:
        """Whether the running backward computes gradients of the parameters.

        It does not in `backward(inputs=...)` or torch.autograd.grad of other tensors.
        """
        try:
            return torch._C._will_engine_execute_node(self._node)
        except RuntimeError as error:
            raise ConfigError(
                "torch.autograd.grad of expert parameters after use_main_grads: their gradients are in buffers, "
                "outside of the autograd graph; call loss.backward(), and read the parameters' gradients"
            ) from error

    def kernel_destinations(self) -> dict[str, GradientOut] | None:
        """Return the destinations of all gradients by name, for a kernel that writes them in the running backward.

        Return None if gradients must be summed over ranks or slots first. The kernel then returns them to autograd.
        """
        gradients_of = self._main._weights.gradient_sum
        self._written = gradients_of.is_local
        if not self._written:
            return None
        factor = 1.0 / gradients_of.divisor
        return {
            name: GradientOut(self._main.buffers[name], accumulate, factor)
            for name, accumulate in self._attach_gradients().items()
        }

    def _attach_gradients(self) -> dict[str, bool]:
        self._check_versions()
        weights = self._main._weights
        before, now = self._parameters or [], weights._on_views
        if before is not now and (len(before) != len(now) or any(map(operator.is_not, before, now))):
            raise ConfigError(
                "expert parameters were moved, converted or replaced between forward and backward, and now have "
                "other gradient buffers; run backward before"
            )
        return self._main.attach_gradients()

    def sum_into_buffers(self, gradients: list[Tensor | None]) -> None:
        """Sum the gradients over ranks and write them to the buffers, unless a kernel has written them.

        gradients: [L, ...] in the order of the names, None for a tensor without a gradient
        """
        if self._written:
            return
        weights = self._main._weights
        self.wanted()
        whole = {
            name: torch.zeros_like(weights._slots[name]) if gradient is None else gradient
            for name, gradient in zip(self._names, gradients, strict=True)
        }
        summed = weights.gradient_sum(whole)
        for name, accumulate in self._attach_gradients().items():
            buffer = self._main.buffers[name]
            buffer.add_(summed[name]) if accumulate else buffer.copy_(summed[name])


class _Collected(Function):
    """Like `Joined`, but backward passes the gradients to `CallGradients.sum_into_buffers`."""

    @staticmethod
    def forward(ctx: Any, stored: tuple[Tensor, ...], call: CallGradients, first: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in stored)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.call.sum_into_buffers(list(gradients))
        return None, None, None


def _as_shown(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return `view` of a buffer, as a DTensor if the parameter is one."""
    if not hasattr(parameter, "placements"):
        return view
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(view, mesh, placements, run_check=False)


def _adopt(parameter: nn.Parameter) -> None:
    if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_fold)


@torch.no_grad()
def _fold(parameter: nn.Parameter) -> None:
    """Add a parameter's `grad` to its `main_grad`, and set `grad` to None."""
    given, parameter.grad = parameter.grad, None
    if given is None:
        return
    before = parameter.main_grad  # type: ignore[attr-defined]
    parameter.main_grad = given.float() if before is None else before.add_(given)  # type: ignore[attr-defined]


@cache
def look_before_steps() -> None:
    """Install a hook that refuses steps of optimizers that would skip a parameter because its `grad` is None."""
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo  # a compiled step runs it between its graphs
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [
        (parameter.grad, parameter.main_grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _fold in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    ]
    if any(grad is not None or main_grad is not None for grad, main_grad in held):
        _refuse_scaler(optimizer)
    skipped = next((main_grad for grad, main_grad in held if grad is None and main_grad is not None), None)
    if skipped is not None and not getattr(optimizer, "reads_main_grad", False):
        raise ConfigError(
            f"the optimizer ({type(optimizer).__name__}) would skip expert parameters: their gradients are in "
            f".main_grad ({dtype_name(skipped.dtype)}), and .grad is None; set p.grad = p.main_grad.to(p.dtype) "
            f"before the step, call use_main_grads(model) without dtype, or set optimizer.reads_main_grad = True where "
            f"it reads .main_grad"
        )


def _refuse_scaler(optimizer: Optimizer) -> None:
    """Raise ConfigError if an enabled GradScaler calls the step.

    `unscale_` scales `grad` only. If `grad` was copied from `main_grad` after `unscale_`, it still contains the scale,
    and the order of the two cannot be detected.
    """
    if getattr(optimizer, "reads_main_grad", False) and getattr(optimizer, "_step_supports_amp_scaling", False):
        return  # the optimizer unscales gradients itself
    for scaler in (frame.f_locals.get("self") for frame in frames_of(_SCALERS)):
        if scaler is not None and scaler.is_enabled():
            raise ConfigError(
                f"{type(scaler).__name__} unscales .grad and not .main_grad, which use_main_grads(dtype=...) fills: "
                "steps of experts would be too large by the scale; call use_main_grads(model) without dtype"
            )
