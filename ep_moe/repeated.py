"""Eager calls that launch again what one like them launched before. To the host such a call is a look at its arguments
and those launches: nothing is made, chosen or placed anew.

A layer's call can be repeated where it is no more than the launches of a transport and of experts (`Dispatcher.again`,
`Experts.again`): rows in one part over fixed buffers, each rank's tokens its own, no shared experts, no gradients. Of
every other call `MoELayer.run` is the whole story, and so of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.lanes import Again
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.devices import current_stream
from ep_moe.experts.base import Experts
from ep_moe.graph_inputs import Form
from ep_moe.parallel.ledger import Step
from ep_moe.placement.late import to_place
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.types import PhysicalRouting, Routing
from ep_moe.weights.expert_weights import ExpertWeights

_STEPS = 2  # of the ledger: dispatch and combine
_CALLS = 32  # that are kept at once


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    placement: Placement
    expert_weights: ExpertWeights
    router: Any
    shared_experts: Any

    @property
    def kernel(self) -> Any: ...
    @property
    def dispatcher(self) -> Dispatcher: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, eq=False)
class _Call:
    """form: of its arguments; weights: where they are; left: of the ledger, what its last step leaves"""

    form: Form
    again: Again
    experts: Callable[[], None]
    weights: tuple[int, ...]
    left: tuple[str, str, str, bool]


class RepeatedCalls:
    """One layer's, by the bound in force, the dtype of ids, and the stream."""

    def __init__(self, context: EPContext, config: MoEConfig, kernels: Sequence[Any]) -> None:
        self._context, self._config = context, config
        to_peers = any(isinstance(kernel, Experts) and kernel.capabilities.peer_out for kernel in kernels)
        self._able = to_peers and context.tokens.whole and not config.routing.weight_on_input
        self._calls: dict[Any, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def drop(self) -> None:
        """From now on calls run the layer, until they are noted again."""
        self._calls.clear()

    def run(self, layer: Layer, x: Tensor, routing: Routing | None) -> Tensor | None:
        """The result of a call like one that was noted; None for any other, wrong ones too.

        Each line of it is host time of an eager call."""
        if torch.compiler.is_compiling() or not self._calls or torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        context, device = self._context, x.device
        bound, stream = context.step_tokens, current_stream(device)
        call = self._calls.get((bound, _ids_dtype(routing), stream))
        if call is None or bound is None:
            return None
        form, again, lane = call.form, call.again, call.again.lane
        tokens = x.numel() // form.hidden
        if tokens > bound or not form.fits(x, routing, tokens) or not x.is_contiguous():
            return None
        if layer.expert_weights.place != call.weights:
            self.drop()
            return None
        if (
            lane.busy
            or not lane.on(stream)
            or not context.idle
            or context.stage_times is not None
            or layer.shared_experts is not None
            or torch.autograd._profiler_enabled()
        ):
            return None
        if routing is None:
            if type(layer.router) is not Router:
                return None
            routing = layer.router(x if x.dim() == 2 else x.view(tokens, form.hidden))
        given = _addresses(x, layer.placement(routing), again)
        if given is None:
            return None
        ledger = context.ledger
        ledger.check()
        number = ledger.number
        again.send(*given, tokens)
        call.experts()
        out = torch.empty_like(x)
        again.receive(out.data_ptr(), tokens)
        # as `MoELayer.run` leaves it, which peers may be in
        ledger.leave_at(Step(number + _STEPS, *call.left))
        ledger.mark(device)
        return out

    def note(self, layer: Layer, routing: Routing | None) -> None:
        """After a call of `MoELayer.run`: whether one like it can be repeated from now on."""
        bound = self._context.step_tokens
        if torch.compiler.is_compiling() or not self._able or bound is None:
            return
        dispatcher, dtype, device, ids = layer.dispatcher, layer.dtype, layer.device, _ids_dtype(routing)
        again = dispatcher.again(dtype, ids, layer.placement.tables.placing, bound)
        if again is None:
            return
        experts = layer.kernel.again(again.received, again.peer_out)
        if experts is None:
            return
        if len(self._calls) == _CALLS:
            self._calls.clear()
        form = Form(self._config.hidden_size, self._config.top_k, dtype, device)
        left = (layer.name, "combine", dispatcher.name, True)
        key = (bound, ids, current_stream(device))
        self._calls[key] = _Call(form, again, experts, layer.expert_weights.place, left)


def _ids_dtype(routing: Routing | None) -> Any:
    """A router of ours chooses in int64."""
    return torch.int64 if routing is None else getattr(getattr(routing, "ids", None), "dtype", None)


def _addresses(x: Tensor, routing: PhysicalRouting, again: Again) -> list[int | None] | None:
    """What `Again.send` takes but the number of tokens; None where its kernel was compiled for another kind."""
    ids, tables, placing = to_place(routing)
    weights = routing.weights
    if placing != again.placing or not (ids.is_contiguous() and weights.is_contiguous()):
        return None
    given, bits = [tensor.data_ptr() for tensor in (x, ids, weights, *tables)], 0  # type: ignore[union-attr]
    for address in given:
        bits |= address
    return None if bits % 16 else [given[0], None, *given[1:]]
