"""Checks of a layer's call: its arguments in each call, and the state that ranks must share, once (`RankChecks`).

Checks of arguments return the message of a problem instead of raising it, so that all ranks can raise together.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, kind_problem
from ep_moe.checks import shown
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.errors import InputError
from ep_moe.execution.autocast import CAST
from ep_moe.execution.data_parallel import join_problem, wrapper_problem
from ep_moe.execution.rank_comparison import BackwardComparison, ComparedLayer, compare_ranks
from ep_moe.execution.routing_checks import full_routing_problem
from ep_moe.execution.routing_replay import RoutingTap
from ep_moe.router import Router
from ep_moe.runtime.devices import unseen_by_modes, without_class
from ep_moe.types import Routing, TokenMask, capturing, dtype_name
from ep_moe.weights.callers import training_schedules
from ep_moe.weights.optimizers import FSDP1_REFUSAL


class RankChecks:
    """Compares the state of one layer that must be equal on its ranks.

    `first_call` compares once, and backward compares repeatedly (`backward_comparison`).

    due: whether the next call must compare ranks
    loaded: whether a state dict was loaded since the last call. The next call then exchanges a checksum
    unread: this rank's experts that the state dicts since the last call left out; None if they held no experts
    """

    def __init__(self, layer: ComparedLayer) -> None:
        self.due = layer.context.layout.lockstep > 1  # a single rank has nothing to compare
        self.loaded = self._adopted = False
        self.unread: set[int] | None = None
        self.saw_ids = False  # whether the values of some call's ids were checked and valid
        self.forwards = 0  # forwards that began, including those that raised
        self.eager = 0  # of these, forwards that were not replayed, including those that raised before a replay
        self._newest_eager = 0  # the value of `forwards` in the newest eager forward
        self.dtype: torch.dtype | None = None  # the dtype of fixed buffers, once all ranks have compared it
        self._wrapper: weakref.ref[Any] | None = None
        self.backward_comparison = BackwardComparison(layer)

    def note_eager(self) -> None:
        """Count the newest of `forwards` as eager, once. Replays do not count themselves."""
        if self._newest_eager != self.forwards:
            self._newest_eager = self.forwards
            self.eager += 1

    def wrapper_problem(self, layer: ComparedLayer) -> str | None:
        """Return None, or what is wrong with the DDP or FSDP1 wrapper that calls this layer."""
        if layer.context.layout.world == 1:
            return None
        # with use_orig_params=True the check runs in the optimizer's step instead
        if torch.is_grad_enabled() and not vars(layer).get("_fsdp_use_orig_params", True):
            return FSDP1_REFUSAL
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None:
            return None
        if (problem := join_problem(wrapper)) is not None:
            return problem
        if self._wrapper is not None and self._wrapper() is wrapper:
            return None
        problem = wrapper_problem(wrapper, layer)
        if problem is None:
            layer.expert_weights.gradient_sum.divide(layer.context.layout.token_ranks)  # as DDP divides dense gradients
            self._wrapper = weakref.ref(wrapper)
        return problem

    def compare_again(self, layer: ComparedLayer) -> None:
        """Compare ranks as `first_call` does, after the weights of a layer that was called before were replaced."""
        self.due, self.unread = layer.context.layout.lockstep > 1, None
        self.first_call(layer)

    def difference(self, layer: ComparedLayer) -> str | None:
        """Return None, or the difference between ranks as text, for a caller that saves the layer.

        Collective over the ranks of a call. Waits for the device.
        """
        if layer.context.layout.lockstep == 1:
            return None
        step = "comparison of ranks"
        with layer.context._begin_call(layer.name), torch.no_grad(), unseen_by_modes():
            try:
                compare_ranks(layer, None, step)
            except InputError as error:
                return str(error)
            return self.backward_comparison.similarity.problem(layer, layer.context.rank_groups["ep"], step)

    def state_loaded(self, layer: ComparedLayer) -> None:
        """Note that a state dict was loaded, so that the next call finds out if only some ranks loaded it.

        Calls over fixed buffers exchange no facts with their peers. So the next such call compares ranks like the first
        one.
        """
        if self.due or layer.context.layout.lockstep == 1:
            return  # `first_call` compares
        self.loaded = True
        self.due = self._adopted = layer._fixed

    def experts_loaded(self, layer: ComparedLayer, given: Collection[int]) -> None:
        """Note the experts of a state dict. A checkpoint may consist of several, one for each file.

        In an EP group of one rank, `load_state_dict` returns all missing keys to the caller.
        """
        if given and layer.context.layout.ep > 1:
            held = layer.expert_weights.slots_of_expert if self.unread is None else self.unread
            self.unread = set(held).difference(given)

    def warn_of_unread(self, layer: ComparedLayer) -> None:
        """Warn if `load_state_dict(strict=False)` left experts of this rank as they were.

        Programs often save the state dict of one rank, or print the missing keys of one rank.
        """
        unread, self.unread = sorted(self.unread or ()), None
        if unread:
            warnings.warn(
                f"{layer.name}: load_state_dict left experts {unread} of rank {layer.context.layout.rank} as they "
                "were: the state dict has other experts of this layer and not these, as the state_dict() of one rank "
                "has only its own. Save one file per rank, or a distributed checkpoint of get_model_state_dict; write "
                "single experts by update_expert",
                stacklevel=2,
            )

    def first_call(self, layer: ComparedLayer) -> None:
        """Raise InputError on all ranks if the layer's ranks differ in state that must be equal.

        Runs in the layer's first call. Waits for the device, so it is skipped in a graph capture.
        """
        if not self.due:
            return
        if torch.compiler.is_compiling() or capturing(layer.context.device):
            return
        if self._adopted:  # a peer that loaded nothing would enter a dispatch instead of this comparison
            found, ranks = layer.placement.expert_map.digest, layer.context.rank_groups["lockstep"].ranks
            what = f"{layer.name}: a call after load_state_dict, under its expert map,"
            layer.context.flight_recorder.monitored_barrier(f"{layer.name}/map/{found}", ranks, what)
            self._adopted = False
        trains = torch.is_grad_enabled()
        with layer.context._begin_call(layer.name, layer._call_facts()), torch.no_grad(), unseen_by_modes():
            problem = self.wrapper_problem(layer) or layer.expert_weights.replaced_problem()
            compare_ranks(layer, problem, trains=trains)
            self.backward_comparison.similarity.begin(layer, layer.context.rank_groups["ep"], "first call")
        self.due = False
        self.dtype = layer.expert_weights.dtype if layer._fixed else None


class Layer(ComparedLayer, Protocol):
    """The part of a MoELayer that the checks read."""

    choice: Any
    wire: Wire
    experts: Any
    _asked: dict[str, Any]
    _checks: RankChecks
    _dtype_problems: dict[torch.dtype, str | None]
    _logit_taps: list[Callable[[Tensor], None]]
    _made_dtype: torch.dtype
    _routes: RoutingTap | None
    _routes_inside: bool
    _table: Any

    @property
    def _call_dtype(self) -> torch.dtype: ...
    @property
    def _entry(self) -> Any: ...
    @property
    def _kernels(self) -> tuple[Any, ...]: ...
    def _dispatcher(self) -> Dispatcher: ...


def call_problem(layer: Layer, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> str | None:
    """Return None, or what is wrong with a call's arguments on this rank."""
    problem = layer._checks.wrapper_problem(layer) or _mixed_problem(layer) or dtype_problem(layer)
    held = layer.expert_weights
    problem = problem or rows_problem(x, layer.config.hidden_size, held.dtype, held.device, layer.context.device)
    if problem is None and not torch.compiler.is_compiling():  # operators of a compiled graph check this at run time
        problem = _transform_problem(layer) or held.replaced_problem() or held.lora_problem()
        problem = problem or _split_backward_problem(layer)
        if problem is None and held.main_grads is not None:
            problem = held.main_grads.problem()
    if problem is None and not torch.compiler.is_compiling():
        problem = layer.placement.invalid_ids.problem(layer.name, layer.config.num_experts)
        problem = problem or _inference_problem(layer, x)
    if problem is not None:
        return problem
    weights = getattr(routing, "weights", None)
    wanting = "x" if x.requires_grad else "routing.weights" if getattr(weights, "requires_grad", False) else None
    if wanting and torch.is_grad_enabled() and (stuck := _not_differentiable(layer)):
        return (
            f"{wanting} requires a gradient, and {stuck} has no backward; call it under torch.no_grad(), or build a "
            f"layer that trains: without Wire, experts= one of {_with_backward('experts')}, all2all= one of "
            f"{_with_backward('dispatchers')}; layer.explain() says which pairs train here"
        )
    inside = f"experts={layer.choice.experts} has a built-in router"
    if layer._routes_inside and (routing is not None or layer.placement.expert_map != layer._asked["expert_map"]):
        return f"{inside}: call forward, with the expert map of construction"
    if layer.placement.expert_map is not held.expert_map and not torch.compiler.is_compiling():
        problem = _map_problem(layer)
        if problem is not None:
            return problem
    if layer._routes is not None and not torch.compiler.is_compiling():  # calls that record routes are not traced
        problem = layer._routes.problem(layer, x.numel() // layer.config.hidden_size, routed=routing is not None)
        if problem is not None:
            return problem
    if mask is not None and (problem := mask_problem(mask, x)) is not None:
        return problem
    if mask is not None and layer._routes_inside:
        return f"{inside} and takes no mask; choose other experts"
    if routing is None:
        return _router_problem(layer.router, x)
    return full_routing_problem(layer, routing, x if x.dim() == 2 else x.reshape(-1, layer.config.hidden_size))


def _router_problem(router: Any, x: Tensor) -> str | None:
    """Return a problem if the `Router` was converted to another dtype without its layer, or the layer without it."""
    if type(router) is not Router or router.config.float32_logits or router.held_weight.dtype == x.dtype:
        return None
    wanted, found = dtype_name(x.dtype), dtype_name(router.held_weight.dtype)
    return (
        f"router.weight must be {wanted} as the layer is, got {found}; convert the layer as a whole, or set "
        f"RoutingConfig.float32_logits=True, which computes logits in float32"
    )


def refuse_tracing(layer: Layer) -> None:
    """Raise InputError if operations are traced instead of run, as by torch.export: peers would receive nothing.

    Does not communicate.
    """
    modes = torch._C._TorchDispatchModeKey
    if layer.context.layout.lockstep == 1 or not (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY))
    ):
        return
    raise InputError(
        f"{layer.name}: torch.export, torch.jit.trace and fake tensors cannot record an expert-parallel layer, whose "
        "sizes depend on what its peers send; export the model on EPContext.local(), where one process holds all "
        "experts"
    )


def _transform_problem(layer: Layer) -> str | None:
    """Return a problem if the call is within a transform of torch.func, whose tensors have no memory to send, or uses
    forward-mode AD."""
    forward_mode = forward_ad._current_level >= 0 and layer.context.layout.lockstep > 1
    if torch._C._functorch.peek_interpreter_stack() is None and not forward_mode:
        return None
    return (
        "MoELayer does not support transforms of torch.func (grad, vjp, jvp, vmap) and forward-mode AD; use "
        "torch.autograd.grad, and a batch for vmap"
    )


def _map_problem(layer: Layer) -> str | None:
    """Return a problem if the placement has another expert map than the weights."""
    if layer.placement.expert_map == layer.expert_weights.expert_map:
        return None
    return (
        "Placement.update changed the expert map, and does not move the expert weights; let ep_moe.ExpertBalancer "
        "move experts, or build the layer with expert_map="
    )


def _inference_problem(layer: Layer, x: Tensor) -> str | None:
    """Return a problem if x is an inference tensor, which backward cannot save, and the call has a backward."""
    if not x.is_inference() or not torch.is_grad_enabled():
        return None
    own = [module for module in (layer.router, layer.shared_experts) if isinstance(module, nn.Module)]
    if not layer.expert_weights.any_requires_grad and not any(
        p.requires_grad for module in own for p in module.parameters()
    ):
        return None
    return (
        "x was made in torch.inference_mode(), and autograd cannot save it for backward; pass x.clone(), or call the "
        "layer under torch.no_grad()"
    )


def _split_backward_problem(layer: Layer) -> str | None:
    """Return a problem if a pipeline schedule splits backward and FSDP2 shards the experts.

    Such a schedule runs the backward of inputs before that of weights. torch then reduces the gradients of a submodule
    that FSDP2 shards separately wrongly, or drops them.
    """
    if not layer.expert_weights.sharded or not torch.is_grad_enabled():
        return None
    for schedule in training_schedules():
        order = getattr(schedule, "pipeline_order", None) or {}
        kinds = (getattr(action, "computation_type", None) for actions in order.values() for action in actions)
        if any(getattr(kind, "name", "") == "BACKWARD_INPUT" for kind in kinds):
            return (
                f"{type(schedule).__name__} splits backward, and FSDP2 then computes wrong gradients, or none, for "
                "sharded experts; pass shard_experts=False to fully_shard, or use a schedule that does not split it, "
                "such as Schedule1F1B or ScheduleInterleaved1F1B"
            )
    return None


def _mixed_problem(layer: Layer) -> str | None:
    """Return the problem that `BackwardComparison` found: something mixed the experts of different ranks.

    It no longer counts once the weights were loaded again.
    """
    found = layer._checks.backward_comparison.mixed
    return None if found is None or found[1] != layer.expert_weights.updates else found[0]


def dtype_problem(layer: Layer) -> str | None:
    """Return None, or why the layer cannot run in the dtype to which it was converted."""
    dtype, agreed = layer.expert_weights.dtype, layer._call_dtype
    if dtype != agreed:
        return (
            f"the layer was converted to {dtype_name(dtype)} after its first call in {dtype_name(agreed)}, and "
            f"all2all={layer._entry.choice.all2all} has buffers of {dtype_name(agreed)}; convert it on all ranks "
            f"before the first call, or build another with dtype={dtype}"
        )
    if dtype == layer._made_dtype:
        return None
    if dtype not in layer._dtype_problems:
        scheme, options = layer.expert_weights.scheme, layer.experts.options
        why = layer._table.dtype_problem(dtype, layer.config, layer.context.layout, scheme, options, layer.wire)
        layer._dtype_problems[dtype] = why and (
            f"the layer was converted to {dtype_name(dtype)}, and {why}; convert it back to "
            f"{dtype_name(layer._made_dtype)}, or build another for {dtype_name(dtype)}"
        )
    return layer._dtype_problems[dtype]


def _not_differentiable(layer: Layer) -> str:
    """Return the part of a layer that has no backward, "" if all parts have one."""
    for kernel in layer._kernels:
        if not kernel.capabilities.differentiable:
            return f"experts={kernel.name}"
    if layer.wire != PLAIN_WIRE:
        return f"{layer.wire}"
    can = layer._dispatcher().capabilities
    return "" if can.differentiable or can.adjoint else f"all2all={layer._entry.choice.all2all}"


def _with_backward(kind: registry.Kind) -> str:
    """Return the names of this package's backends that have a backward, as text."""
    kinds = {name: registry.load(kind, name).capabilities for name in registry.built_in(kind)}
    return ", ".join(name for name, can in kinds.items() if can.differentiable or getattr(can, "adjoint", False))


def rows_problem(
    x: Any, hidden: int, dtype: torch.dtype, device: torch.device, context_device: torch.device
) -> str | None:
    """Return None, or what is wrong with x.

    hidden, dtype, device: the layer's; context_device: the device of its context
    """
    if not isinstance(x, Tensor):
        return f"x must be a Tensor, got {type(x).__name__}"
    if device.type == "meta":
        return "the layer is on the meta device; call to_empty(device=...) and load weights first"
    if device != context_device:
        move = f"move it there with layer.to({str(context_device)!r})"
        return f"the layer is on {device} and its EPContext on {context_device}; {move}"
    if (problem := kind_problem("x", x)) is not None:
        return problem
    if x.dim() < 1 or x.shape[-1] != hidden:
        return f"x must be [..., {hidden}] (hidden_size), got {list(x.shape)}"
    if x.dtype != dtype:
        remedy = "; convert it, or call the layer under torch.autocast, which does" if {x.dtype, dtype} <= CAST else ""
        return f"x must be {dtype_name(dtype)} as the layer is, got {dtype_name(x.dtype)}{remedy}"
    if x.device != device:
        return f"x must be on {device} as the layer is, got {x.device}"
    return None


def mask_problem(mask: TokenMask, x: Tensor) -> str | None:
    tokens, sizes = mask.tokens, list(x.shape[:-1])
    if not isinstance(tokens, Tensor):
        return f"mask must be a Tensor, got {type(tokens).__name__}"
    if not isinstance(mask.sent, bool | Tensor):
        return f"send_masked must be True or False, got {shown(mask.sent)}"
    if (problem := kind_problem("mask", tokens)) is not None:
        return problem
    if tokens.dtype != torch.bool:
        return f"mask must be bool, True for a token, got {dtype_name(tokens.dtype)}; pass mask != 0"
    if list(tokens.shape) != sizes:
        return f"mask must be {sizes}, as x without its last size, got {list(tokens.shape)}"
    if tokens.device != x.device:
        return f"mask must be on {x.device} as x is, got {tokens.device}"
    return None


def routing_without_class(routing: Any) -> Any:
    if not isinstance(routing, Routing):
        return routing
    return Routing(without_class(routing.ids), without_class(routing.weights), without_class(routing.logits))


def shared_problem(out: Any, rows: Tensor) -> str | None:
    """Return None, or what is wrong with the result of shared experts.

    Without this check, a wrong shape that broadcasts would be added without an error.
    """
    if not isinstance(out, Tensor):
        return f"shared_experts must return a Tensor [T, H] for x [T, H], got {type(out).__name__}"
    if out.shape != rows.shape:
        return f"shared_experts must return [T, H] = {list(rows.shape)} for x of that shape, got {list(out.shape)}"
    return None
