"""Gradients of a rank's experts in buffers, [L, ...] for each stored tensor, in which every parameter's is a view.

The backward of a call writes a stored tensor's gradient there, or adds to it. Autograd then has no node for each of
hundreds of parameters. A kernel writes by itself (`Experts.writes_gradients`) where its gradient is what the parameters
get: elsewhere, where ranks sum theirs, it is added when it is summed.

A parameter whose gradient is None begins anew, as in torch. Where all of a buffer's begin, it is written; else those
that begin are zeroed, and all are added to.
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
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ep_moe.errors import ConfigError
from ep_moe.types import dtype_name
from ep_moe.weights.callers import Callers, frames_of, training_schedules
from ep_moe.weights.parts import local, parts_of, split_parts

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots

_HOOKS, _LATER_HOOKS = (operator.attrgetter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
_GRAD, _LEARNS = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_NONES = itertools.repeat(None)
_SCALERS: Callers = {"torch.amp.grad_scaler": ("step",)}


class GradientOut(NamedTuple):
    """Where a kernel writes the gradient of a stored tensor.

    Args:
        out: [L, ...], as the tensor.
        accumulate: Add to what `out` holds. Default: overwrite it.
        factor: Multiply the gradient by it.
    """

    out: Tensor
    accumulate: bool = False
    factor: float = 1.0


class _Part(NamedTuple):
    """Of a buffer. shown: `view` as the parameter has it, a DTensor where experts are cut over etp"""

    parameter: nn.Parameter
    shown: Tensor
    view: Tensor


class MainGrads:
    """Buffers that backward writes one layer's expert gradients to, on this rank.

    Args:
        weights: Of the layer.
        dtype: Of buffers whose views are `main_grad` of the parameters. With None they have the parameters' dtype, and
            views are `grad`.

    Raises:
        ConfigError: the layer's experts cannot have any.
    """

    def __init__(self, weights: ExpertSlots, dtype: torch.dtype | None) -> None:
        self._weights, self.dtype = weights, dtype
        self.attribute = "grad" if dtype is None else "main_grad"
        self.buffers: dict[str, Tensor] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._of: list[nn.Parameter] | None = None  # the parameters of `_parts`
        self._held: Any = None  # by which places the buffers were made
        why = self._refusal()
        if why is not None:
            raise ConfigError(f"use_main_grads: {why}")
        self.lay_out()

    def _refusal(self) -> str | None:
        """None, or why these experts cannot have buffers."""
        weights = self._weights
        if not weights.named:
            return (
                "expert_weights are quantized, lent, or of a kernel without a backward, and have no parameters to "
                "train; build the layer with experts='reference' or 'bf16_triton' and no quantization"
            )
        if weights.sharded or not weights._slots:
            return "FSDP2 has cut the experts, and holds their gradients; call fully_shard with shard_experts=False"
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
        """None, or why a call would leave out gradients, or what hangs on them."""
        if not torch.is_grad_enabled():
            return None
        if self._weights.lora is not None:
            return "expert_weights has LoRA factors and use_main_grads; call merge_lora, or build a model without it"
        return self._hooked() or self._scaled_later()

    def _scaled_later(self) -> str | None:
        """None, or that the pipeline schedule that calls will divide what is in `grad` by its micro-batches."""
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
        if not any(map(_HOOKS, views)) and not any(map(_LATER_HOOKS, views)):  # each call asks this of hundreds
            return None
        for parameter in views:
            later = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if parameter._backward_hooks or (later and (len(later) > 1 or next(iter(later.values())) is not _fold)):
                return (
                    "an expert parameter has a hook (register_hook, register_post_accumulate_grad_hook), which "
                    "use_main_grads would not call; remove it, and do its work after backward, or register it on a "
                    "module"
                )
        return None

    # --- buffers ------------------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Make the buffers of what learns, and say which part is whose. Parameters may have been assigned since, or
        made anew in other slots, of which no earlier number is kept."""
        weights = self._weights
        if self._held is not weights.held:
            self._held, self._of, self.buffers = weights.held, None, {}
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
            self.take_ordinary()

    def _owners(self) -> dict[str, list[tuple[nn.Parameter, int, str]]]:
        """By stored name: the parameters, their slots, and which part of it each is."""
        weights, parameters = self._weights, iter(self._weights._on_views)
        found: dict[str, list[tuple[nn.Parameter, int, str]]] = {name: [] for name in weights._slots}
        for slot, *_ in weights.held.values():
            for name in weights._slots:
                for part in parts_of(name, weights.config.activation.gated):
                    found[name].append((next(parameters), slot, part))
        return found

    def begin(self) -> dict[str, bool]:
        """Let each parameter's gradient be its view, as backward adds to it.

        Returns:
            By name of the buffers that are to be written, whether there is something to add to.
        """
        views = self._weights._on_views
        if self.dtype is None and all(map(_LEARNS, views)) and not any(map(operator.is_not, map(_GRAD, views), _NONES)):
            for parts in self._parts.values():
                for parameter, shown, _ in parts:
                    parameter.grad = shown
            return dict.fromkeys(self._parts, False)
        found = {}
        for name, parts in self._parts.items():
            begins, goes_on = [], False
            for parameter, shown, view in parts:
                given = getattr(parameter, self.attribute, None)
                if not parameter.requires_grad:
                    if given is shown:  # frozen since, it keeps what it has
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
                    _adopt(parameter)  # it may have been frozen before
            if begins and goes_on:
                torch._foreach_zero_(begins)
            if begins or goes_on:
                found[name] = goes_on
        return found

    def restart(self) -> None:
        """Let all gradients begin anew."""
        for parameter in self._weights._on_views:
            setattr(parameter, self.attribute, None)

    def warn_of_move(self) -> None:
        """Where experts move while parameters have gradients, which are lost with these."""
        if self.begun:
            warnings.warn(
                "experts moved (load_state_dict of another expert map, EPLB) while their parameters had gradients of "
                "use_main_grads, which are dropped; let them move behind an optimizer's step and zero_grad()",
                UserWarning,
                stacklevel=3,
            )

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.numel() * buffer.itemsize for buffer in self.buffers.values())

    @property
    def begun(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(getattr(parameter, self.attribute, None) is not None for parameter in self._weights._on_views)

    def take_ordinary(self) -> None:
        """Have what autograd brings to `grad` by another way, as of a loss of the parameter itself, added to
        `main_grad`."""
        if self.attribute == "grad":
            return
        look_before_steps()
        for parameter in self._weights._on_views:
            parameter.main_grad = getattr(parameter, "main_grad", None)  # type: ignore[attr-defined]
            _adopt(parameter)

    # --- a call -------------------------------------------------------------------------------------------------------

    def of_slots(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all slots [L, ...], by stored name, for a call whose backward writes their gradients. As
        `GradientSum.of_parameters`."""
        self._weights.gradient_sum.check()
        self.lay_out()
        first = next(parameter for parameter in self._weights._on_views if parameter.requires_grad)
        call = CallGradients(self, tuple(slots), first)
        return Stored(zip(slots, _Collected.apply(tuple(slots.values()), call, first), strict=True), call)


class Stored(dict[str, Tensor]):
    """Stored tensors as one call reads them. call: what becomes of their gradients"""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], call: CallGradients) -> None:
        super().__init__(tensors)
        self.call = call


class CallGradients:
    """Gradients of the stored tensors of one call. first: a parameter that is in the graph, and stands for all"""

    def __init__(self, main: MainGrads, names: tuple[str, ...], first: nn.Parameter) -> None:
        self._main, self._names, self._parameters = main, names, main._of
        self._node = get_gradient_edge(first).node
        self._unwritten = main._weights.gradient_sum.pieces_unwritten()
        self._written = False  # by a kernel

    def wanted(self) -> bool:
        """Whether the backward that runs brings gradients to the parameters: not where torch.autograd.grad, or
        `backward(inputs=...)`, asks for others alone."""
        try:
            return torch._C._will_engine_execute_node(self._node)
        except RuntimeError as error:
            raise ConfigError(
                "torch.autograd.grad of expert parameters after use_main_grads: their gradients are in buffers, and "
                "not in the graph; call loss.backward(), and read the parameters' gradients"
            ) from error

    def into(self) -> dict[str, GradientOut] | None:
        """Where a kernel writes all gradients that are wanted, by name, in the backward that runs; None where something
        is to be done to them before, and they are returned."""
        gradients_of = self._main._weights.gradient_sum
        self._written = gradients_of.is_local
        if not self._written:
            return None
        factor = 1.0 / gradients_of.divisor
        return {
            name: GradientOut(self._main.buffers[name], accumulate, factor)
            for name, accumulate in self._begun().items()
        }

    def _begun(self) -> dict[str, bool]:
        self._unwritten()
        weights = self._main._weights
        before, now = self._parameters or [], weights._on_views
        if before is not now and (len(before) != len(now) or any(map(operator.is_not, before, now))):
            raise ConfigError(
                "expert parameters were moved, converted or replaced between forward and backward, and their main "
                "gradients are others now; run backward before"
            )
        return self._main.begin()

    def back(self, gradients: list[Tensor | None]) -> None:
        """gradients: by name, None where nothing came, or a kernel has written it"""
        if self._written:
            return
        weights = self._main._weights
        self.wanted()
        whole = {
            name: torch.zeros_like(weights._slots[name]) if gradient is None else gradient
            for name, gradient in zip(self._names, gradients, strict=True)
        }
        summed = weights.gradient_sum(whole)
        for name, accumulate in self._begun().items():
            buffer = self._main.buffers[name]
            buffer.add_(summed[name]) if accumulate else buffer.copy_(summed[name])


class _Collected(Function):
    """As `Joined`, whose gradients go to buffers."""

    @staticmethod
    def forward(ctx: Any, stored: tuple[Tensor, ...], call: CallGradients, first: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in stored)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.call.back(list(gradients))
        return None, None, None


def _as_shown(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of a buffer as the parameter is one of the stored tensor."""
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
    """Add `grad` to `main_grad`, and drop it."""
    given, parameter.grad = parameter.grad, None
    if given is None:
        return
    before = parameter.main_grad  # type: ignore[attr-defined]
    parameter.main_grad = given.float() if before is None else before.add_(given)  # type: ignore[attr-defined]


@cache
def look_before_steps() -> None:
    """From now on refuse an optimizer's step that would skip a parameter, since its gradient is elsewhere."""
    register_optimizer_step_pre_hook(_before_step)


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
    """Raise ConfigError where a scaler calls the step: whether `grad` was copied from `main_grad` before `unscale_` or
    after it, which leaves the scale in, nothing tells."""
    if getattr(optimizer, "reads_main_grad", False) and getattr(optimizer, "_step_supports_amp_scaling", False):
        return  # it unscales by itself
    for scaler in (frame.f_locals.get("self") for frame in frames_of(_SCALERS)):
        if scaler is not None and scaler.is_enabled():
            raise ConfigError(
                f"{type(scaler).__name__} unscales .grad and not .main_grad, which use_main_grads(dtype=...) fills: "
                f"experts would take steps too large by the scale; call use_main_grads(model) without dtype"
            )
