"""A kernel's step as a node of the autograd graph: what forward saves, and how backward begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.errors import InputError
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.runtime.batched_gradients import refuse_batch
from ep_moe.runtime.first_order import first_order_only
from ep_moe.types import LocalIds, PeerRows, Received
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.main_grads import CallGradients, GradientOut, Stored

if TYPE_CHECKING:
    from ep_moe.experts.base import Experts

# Allocates a tensor that outlives the call, by name, shape and dtype
Allocator = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
WeightProduct = Callable[[GradientOut], None]  # writes the gradient of a stored tensor


def new_tensors(device: torch.device) -> Allocator:
    """Return an allocator that makes a new tensor for each name."""
    return lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def graph_is_kept() -> bool:
    """Return whether another backward may read the saved tensors of the running one (`retain_graph`).

    torch's compiler asks the same before it reuses saved memory.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class Attached(Function):
    """Return y unchanged, as a node that also has tensors as inputs that no row used (`Experts._attached`)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: ExpertWeights, learns: bool, *others: Tensor) -> Tensor:
        ctx.weights, ctx.learns, ctx.others, ctx.version = weights, learns, len(others), begin_forward(weights)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if begin_backward(ctx.weights, ctx.version, learns=ctx.learns):
            ctx.weights.gradient_sum.contribute_zeros()
        return (grad, None, None, *[None] * ctx.others)


class Version(NamedTuple):
    """The state of the weights at the start of a call.

    expert_map: which experts the slots hold
    updates: how often this package has written the weights
    steps: how many optimizer steps have updated the layer
    call: the number of this call, counting calls with gradients enabled
    """

    expert_map: ExpertMap
    updates: int
    steps: int
    call: int


def begin_forward(weights: ExpertWeights) -> Version:
    """Begin the forward of a call: count it, and return the version of the weights. Call this once per call."""
    weights.calls += 1
    return Version(weights.expert_map, weights.updates, weights.steps, weights.calls)


def begin_backward(weights: ExpertWeights, version: Version, *, learns: bool) -> bool:
    """Begin the backward of a call: refuse weights that changed since forward. Each node for experts calls this first.

    version: the version of the weights in forward. Autograd does not notice kernels and optimizers that write in place
    learns: whether one of the experts' tensors needs a gradient

    Returns whether to call `gradient_sum.contribute_zeros()` after all exchanges of the node. Peers sum the gradients
    of replicas in the node after this one.
    """
    moved = version.expert_map != weights.expert_map
    if moved or version.updates != weights.updates:
        what = (
            "experts moved (ExpertBalancer.step, load_state_dict of another expert map)"
            if moved
            else ("expert weights were written (update_expert, load_state_dict, load_weights)")
        )
        raise InputError(
            f"{what} between the forward and the backward of a call, so gradients would belong to other weights; do "
            "this after backward, and run the step again"
        )
    if version.steps != weights.steps:
        raise InputError(
            "an optimizer has updated the layer's parameters between the forward and the backward of a call, so "
            "gradients would belong to other weights; call optimizer.step() after the backward of all calls"
        )
    if weights.each_backward is not None:
        weights.each_backward(version.call)
    return weights.gradient_sum.agree_on_sums(sums=learns)


class StepGradients(NamedTuple):
    """The gradients that a kernel's backward returns.

    x: [N, H], or `PeerRows` if they were written to the peers
    weights: float32 [N, K], None without routing weights
    stored: by name as in `ExpertWeights.stored_tensors`, None for tensors that were not wanted
    """

    x: Tensor | PeerRows
    weights: Tensor | None
    stored: Mapping[str, Tensor | None]


class RowGradients(NamedTuple):
    """The gradients that a kernel's backward returns before it computes those of its stored tensors.

    x, weights: as of `StepGradients`
    products: by name, a function that writes the gradient of a stored tensor. Tensors without a gradient on this rank
        have none
    """

    x: Tensor | PeerRows
    weights: Tensor | None
    products: Mapping[str, WeightProduct]


def wants_gradients(experts: Experts, received: Received) -> bool:
    """Return whether autograd records a call."""
    if not torch.is_grad_enabled():
        return False
    held = experts.weights
    anchors = [] if held.slots_of_expert else [held.anchor]  # a rank without experts must run its peers' collectives
    given = (received.x, received.weights, *anchors, *held.stored_tensors().values())
    return any(tensor is not None and tensor.requires_grad for tensor in given)


def differentiable_step(experts: Experts, received: Received) -> Tensor:
    """Run `Experts.compute_saving` on RANK_MAJOR rows with local ids, with the kernel's own backward."""
    stored = experts.weights.stored_tensors()
    out: Tensor = _DifferentiableStep.apply(
        experts, received, tuple(stored), experts.weights.anchor, received.x, received.weights, *stored.values()
    )
    return out


class SavedForBackward:
    """What a forward saves for its backward: tensors, which autograd keeps, and other state.

    stored: as `ExpertWeights.stored_tensors`; these are the last inputs of the autograd node
    """

    def __init__(
        self, experts: Experts, received: Received, saved: tuple[Tensor, ...], stored: Mapping[str, Tensor]
    ) -> None:
        assert received.local_ids is not None
        self.experts, self._version, self._call = experts, begin_forward(experts.weights), _call_gradients(experts)
        self._tensors = (received.x, received.weights, received.local_ids, *stored.values(), *saved)
        self._names = tuple(stored)
        nothing = received.x.new_empty(0)  # a view would keep the memory of all rows
        self._received = Received(nothing, received.layout, received.weighting, handle=None, format=received.format)

    def give_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors for `save_for_backward`, and forget them: autograd keeps and checks them."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def begin_backward(self, needs_input_grad: Sequence[bool], grad: Tensor) -> tuple[dict[str, bool], bool]:
        """Do what `begin_backward` does.

        Call it before reading the saved tensors: for weights that were written since forward, its error says more than
        autograd's.

        grad: the gradient of the node's result. A batch of gradients (`is_grads_batched`) is refused, because kernels
            would use its address as that of rows

        Returns whether the gradient of each of `stored` is wanted, and whether to call
        `gradient_sum.contribute_zeros()`.
        """
        refuse_batch(grad)
        of_stored = needs_input_grad[len(needs_input_grad) - len(self._names) :]
        wanted = dict(zip(self._names, of_stored, strict=True))
        return wanted, begin_backward(self.experts.weights, self._version, learns=any(wanted.values()))

    def gradients(
        self, tensors: tuple[Tensor, ...], grad: Tensor, wanted: Mapping[str, bool], peer_out: PeerRows | None = None
    ) -> StepGradients:
        """Run the kernel's backward. tensors: those of `give_tensors`; peer_out: as of `Experts.gradients`"""
        (received, kept, stored), (returned, into) = self.split(tensors), self._targets(wanted)
        options: dict[str, Any] = {}
        if into:
            returned = {name: wanted or name in into for name, wanted in returned.items()}
            options["into"] = into
        if peer_out is not None:
            options["peer_out"] = peer_out
        return self.experts.gradients(received, kept, stored, grad, returned, **options)

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[Received, tuple[Tensor, ...], dict[str, Tensor]]:
        """Split `tensors` (as of `gradients`) into received rows, the kernel's saved tensors and stored tensors."""
        x, weights, ids, *others = tensors
        stored = dict(zip(self._names, others, strict=False))
        received = dataclasses.replace(self._received, x=x, weights=weights, local_ids=LocalIds(ids))
        return received, tuple(others[len(stored) :]), stored

    def written(
        self, products: Mapping[str, WeightProduct], stored: Mapping[str, Tensor], wanted: Mapping[str, bool]
    ) -> dict[str, Tensor | None]:
        """Compute the gradients of stored tensors by the products of `RowGradients`, and return or write them."""
        returned, into = self._targets(wanted)
        found: dict[str, Tensor | None] = {}
        for name, tensor in stored.items():
            if name not in products:
                found[name] = torch.zeros_like(tensor) if returned[name] else None
            elif returned[name]:
                found[name] = made = torch.empty_like(tensor)
                products[name](GradientOut(made))
            elif name in into:
                products[name](into[name])
        return found

    def _targets(self, wanted: Mapping[str, bool]) -> tuple[dict[str, bool], Mapping[str, GradientOut]]:
        """Return whether each stored tensor's gradient is returned, and the targets of those that are written."""
        nothing = dict.fromkeys(wanted, False)
        if self._call is None:
            return dict(wanted), {}
        if not self._call.wanted():
            return nothing, {}
        into = self._call.kernel_destinations() if self.experts.writes_gradients else None
        return (dict(wanted), {}) if into is None else (nothing, into)

    def of_stored(self, gradients: Mapping[str, Tensor | None]) -> Iterator[Tensor | None]:
        """Yield gradients by name in the order of the node's inputs."""
        return (gradients.get(name) for name in self._names)


def _call_gradients(experts: Experts) -> CallGradients | None:
    """Return the call's main gradients (`use_main_grads`), or None if autograd passes gradients to the parameters."""
    stored = experts.weights.stored_tensors()
    return stored.call if isinstance(stored, Stored) else None


class _DifferentiableStep(Function):
    @staticmethod
    def forward(
        ctx: Any, experts: Experts, received: Received, names: tuple[str, ...], anchor: Tensor | None, x: Tensor,
        weights: Tensor | None, *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        y, saved = experts.compute_saving(received)
        assert isinstance(y, Tensor)
        ctx.saved = SavedForBackward(experts, received, saved, dict(zip(names, stored, strict=True)))
        ctx.save_for_backward(*ctx.saved.give_tensors())
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved: SavedForBackward = ctx.saved
        wanted, absent = saved.begin_backward(ctx.needs_input_grad, grad)
        if absent:
            saved.experts.weights.gradient_sum.contribute_zeros()
        found = saved.gradients(ctx.saved_tensors, grad.contiguous(), wanted)
        return (None, None, None, None, found.x, found.weights, *saved.of_stored(found.stored))
