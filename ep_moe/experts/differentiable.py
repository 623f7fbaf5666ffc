"""A kernel's step as nodes of autograd's graph: what forward leaves for backward, and how backward begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ep_moe.errors import InputError
from ep_moe.parallel.collectives import batch_problem
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.types import LocalIds, PeerRows, Received
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.main_grads import CallGradients, GradientOut, Stored

if TYPE_CHECKING:
    from ep_moe.experts.base import Experts

# Gives memory for a tensor that is read after its call: by name, shape and dtype
Allocator = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
WeightProduct = Callable[[GradientOut], None]  # writes the gradient of a stored tensor


def new_tensors(device: torch.device) -> Allocator:
    """Give an allocator of a new tensor for each name."""
    return lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device)


class Attached(Function):
    """The identity on y, which keeps it in the graph of what no row used."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: ExpertWeights, learns: bool, *others: Tensor) -> Tensor:
        ctx.weights, ctx.learns, ctx.others, ctx.version = weights, learns, len(others), version_of(weights)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if begin_backward(ctx.weights, ctx.version, learns=ctx.learns):
            ctx.weights.gradient_sum.take_part()
        return (grad, None, None, *[None] * ctx.others)


class Version(NamedTuple):
    """What a call began with, alike on all ranks.

    expert_map: which experts the slots hold; updates: how often they were written by us; call: which one it is of
        those with gradients on
    """

    expert_map: ExpertMap
    updates: int
    call: int


def version_of(weights: ExpertWeights) -> Version:
    """Of the call under way, once."""
    weights.calls += 1
    return Version(weights.expert_map, weights.updates, weights.calls)


def begin_backward(weights: ExpertWeights, version: Version, *, learns: bool) -> bool:
    """First in the backward of a call, in each kind of node that stands for its experts.

    version: of the weights in forward. Kernels that write in place leave no trace that autograd looks for
    learns: one of the experts does
    Returns whether `gradient_sum.take_part()` is due behind all that the node exchanges: peers sum their gradients in
    the node after this one.
    """
    moved = version.expert_map != weights.expert_map
    if moved or version.updates != weights.updates:
        what = (
            "experts moved (ExpertBalancer.step, load_state_dict of another expert map)"
            if moved
            else ("expert weights were written (update_expert, load_state_dict, load_weights)")
        )
        raise InputError(
            f"{what} between the forward and the backward of a call, whose gradients would be of other experts' "
            f"numbers; do so after backward, and run the step again"
        )
    if weights.each_backward is not None:
        weights.each_backward(version.call)
    return weights.gradient_sum.meet(sums=learns)


class StepGradients(NamedTuple):
    """What a kernel's backward gives.

    x: [N, H], or where they were written at the peers; weights: float32 [N, K], None without weights; stored: as
    `ExpertWeights.stored_tensors`, None for what was not wanted
    """

    x: Tensor | PeerRows
    weights: Tensor | None
    stored: Mapping[str, Tensor | None]


class RowGradients(NamedTuple):
    """What a kernel's backward gives ahead of the gradients of its stored tensors.

    x, weights: as `StepGradients`; products: what writes the others, by name, none for a tensor without a gradient here
    """

    x: Tensor | PeerRows
    weights: Tensor | None
    products: Mapping[str, WeightProduct]


def wants_gradients(experts: Experts, received: Received) -> bool:
    """Whether a call is part of a graph of autograd's."""
    if not torch.is_grad_enabled():
        return False
    held = experts.weights
    anchors = [] if held.held else [held.anchor]  # a rank without experts enters what its peers do
    given = (received.x, received.weights, *anchors, *held.stored_tensors().values())
    return any(tensor is not None and tensor.requires_grad for tensor in given)


def differentiable_step(experts: Experts, received: Received) -> Tensor:
    """`Experts.compute` of rows of RANK_MAJOR with local ids, with the kernel's own backward."""
    stored = experts.weights.stored_tensors()
    out: Tensor = _DifferentiableStep.apply(
        experts, received, tuple(stored), experts.weights.anchor, received.x, received.weights, *stored.values()
    )
    return out


class SavedForBackward:
    """What a forward leaves for its backward: tensors, which autograd keeps, and the rest.

    stored: as `ExpertWeights.stored_tensors`, the last inputs of the node of autograd's graph
    """

    def __init__(
        self, experts: Experts, received: Received, saved: tuple[Tensor, ...], stored: Mapping[str, Tensor]
    ) -> None:
        assert received.local_ids is not None
        self.experts, self._version, self._call = experts, version_of(experts.weights), _call_gradients(experts)
        self._tensors = (received.x, received.weights, received.local_ids, *stored.values(), *saved)
        self._names = tuple(stored)
        nothing = received.x.new_empty(0)  # a view would keep all of it
        self._received = Received(nothing, received.layout, received.weighting, handle=None, format=received.format)

    def give_tensors(self) -> tuple[Tensor | None, ...]:
        """For `save_for_backward`, which checks them: they are not kept here."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def begin_backward(self, needs_input_grad: Sequence[bool], grad: Tensor) -> tuple[dict[str, bool], bool]:
        """As `begin_backward`. Call it ahead of the saved tensors, of which autograd says less where they were written.

        grad: of the node's result. A batch of several is refused: kernels would take its address for that of rows
        Returns whether each of `stored` is wanted, and whether `gradient_sum.take_part()` is due.
        """
        if (problem := batch_problem(grad)) is not None:
            raise InputError(problem)
        of_stored = needs_input_grad[len(needs_input_grad) - len(self._names) :]
        wanted = dict(zip(self._names, of_stored, strict=True))
        return wanted, begin_backward(self.experts.weights, self._version, learns=any(wanted.values()))

    def gradients(
        self, tensors: tuple[Tensor, ...], grad: Tensor, wanted: Mapping[str, bool], peer_out: PeerRows | None = None
    ) -> StepGradients:
        """tensors: those of `give_tensors`, as autograd gives them back; peer_out: as `Experts.gradients` takes it"""
        (received, kept, stored), (returned, into) = self.split(tensors), self._targets(wanted)
        options: dict[str, Any] = {}
        if into:
            returned = {name: wanted or name in into for name, wanted in returned.items()}
            options["into"] = into
        if peer_out is not None:
            options["peer_out"] = peer_out
        return self.experts.gradients(received, kept, stored, grad, returned, **options)

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[Received, tuple[Tensor, ...], dict[str, Tensor]]:
        """The received rows, what the kernel kept, and the stored tensors by name. tensors: as in `gradients`"""
        x, weights, ids, *others = tensors
        stored = dict(zip(self._names, others, strict=False))
        received = dataclasses.replace(self._received, x=x, weights=weights, local_ids=LocalIds(ids))
        return received, tuple(others[len(stored) :]), stored

    def written(
        self, products: Mapping[str, WeightProduct], stored: Mapping[str, Tensor], wanted: Mapping[str, bool]
    ) -> dict[str, Tensor | None]:
        """Have gradients of stored tensors written, as `gradients` does, by the products of `RowGradients`."""
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
        """Whether each stored tensor's gradient is returned, and where others are written."""
        nothing = dict.fromkeys(wanted, False)
        if self._call is None:
            return dict(wanted), {}
        if not self._call.wanted():
            return nothing, {}
        into = self._call.into() if self.experts.writes_gradients else None
        return (dict(wanted), {}) if into is None else (nothing, into)

    def of_stored(self, gradients: Mapping[str, Tensor | None]) -> Iterator[Tensor | None]:
        """Those of `stored`, by name, in the order of the node's inputs."""
        return (gradients.get(name) for name in self._names)


def _call_gradients(experts: Experts) -> CallGradients | None:
    """What becomes of the weights' gradients, within a call; None where autograd gives them to parameters."""
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved: SavedForBackward = ctx.saved
        wanted, absent = saved.begin_backward(ctx.needs_input_grad, grad)
        if absent:
            saved.experts.weights.gradient_sum.take_part()
        found = saved.gradients(ctx.saved_tensors, grad.contiguous(), wanted)
        return (None, None, None, None, found.x, found.weights, *saved.of_stored(found.stored))
