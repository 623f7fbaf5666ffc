"""The exchange of a layer's call: dispatch, experts, combine.

A call runs at once or in parts. In parts, one part is computed while the next one is dispatched and the previous one is
combined. Calls with gradients are in `trained_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, too_many_tokens
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, InputError
from ep_moe.execution.trained_exchange import Transports, run_trained, wants_gradients
from ep_moe.execution.trained_graphs import TrainedGraphs
from ep_moe.experts.base import Experts
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.runtime.profiling import stage
from ep_moe.types import PeerRows, Pending, PhysicalIds, PhysicalRouting, Received, capturing

Result = TypeVar("Result")


class Exchange:
    """The exchange of one call of one layer.

    x: [T, H] of the layer's dtype. If the token limit exceeds the dispatcher's buffers, the call runs in parts
    rows_per_token: rows of x per token of the token limit; graphs: CUDA graphs of calls with gradients
    """

    def __init__(
        self,
        context: EPContext,
        dispatcher: Dispatcher,
        experts: Experts,
        x: Tensor,
        routing: PhysicalRouting,
        rows_per_token: int = 1,
        graphs: TrainedGraphs | None = None,
    ) -> None:
        self.context, self.dispatcher = context, dispatcher
        self.experts: Callable[[Received, Any], Tensor | PeerRows] = experts
        self.to_peers = experts.capabilities.peer_out
        limit = context._call_limit
        self.bound = None if limit is None else limit * rows_per_token
        most = dispatcher.dispatch_shape.max_tokens
        self.in_parts = most is not None and self.bound is not None and self.bound > most
        self.kernel, self.graphs = experts, graphs
        self.trained = dispatcher.capabilities.adjoint and wants_gradients(experts, x, routing.weights)
        on_the_way = dispatcher.capabilities.places and not self.in_parts and not self.trained
        self.routing = routing if on_the_way else routing.materialize()
        wire = dispatcher.dispatch_shape.wire
        as_it_is = wire.dispatch == "plain" or wire.dispatch in dispatcher.capabilities.rounds
        self.x, self.x_scale = (x, None) if as_it_is else quantize_for_wire(x, wire)

    def run(self, work: Callable[[], Any] | None = None) -> tuple[Tensor, Any]:
        """Dispatch, compute and combine. Return rows [T, H], summed over ranks, and the result of `work`.

        `work` runs while the first rows are dispatched. Without it, a call in one part stays on the current stream.
        """
        if not self.kernel.capabilities.cuda_graph and capturing(self.x.device):
            raise InputError(
                f"experts={self.kernel.name} cannot be captured in a CUDA graph; choose other experts "
                f"(docs/reference/backends.md), or call the layer outside of the capture"
            )
        if self.bound is None and self.dispatcher.grows:
            gradients = {"x": self.x, "routing.weights": self.routing.weights}
            self.bound = self.dispatcher.call_bound(len(self.x), self.x.device, gradients=gradients)
        if self.in_parts and (problem := too_many_tokens(self.x, self.bound)) is not None:
            self.refuse(problem)
        if self.trained:
            return self._trained(), None if work is None else work()
        if work is None and not self.in_parts:
            with self._stage("dispatch"):
                received = self.dispatcher.dispatch(self.x, self.routing, self.x_scale, max_tokens=self.bound)
            return self._compute_and_combine(received), None
        parts, found = self._parts(), None
        with self._stage("dispatch"):
            pending = self._dispatch_blocking(parts[0]) if work is None else self._start(parts[0])
        if work is not None:
            with self._stage("shared"):
                found = work()
        if self.in_parts:
            return self._pipeline(pending, parts), found
        return self._compute_and_combine(self._waited(pending)), found

    def _trained(self) -> Tensor:
        """Run a call with gradients. Its parts run one after the other."""
        weights = None
        if not self.dispatcher.capabilities.returns_weights:
            weights = self.context._dispatcher(self.dispatcher.name, self.dispatcher.dispatch_shape.of_weights)
        if not self.in_parts:
            transports = Transports(self.dispatcher, weights, self.bound)
            return run_trained(transports, self.kernel, self.x, self.routing, self.graphs)
        outs = []
        for part in self._parts():
            transports = Transports(self.dispatcher, weights, self._most(part))
            outs.append(run_trained(transports, self.kernel, self.x[part], self._routing(part), None))
        return torch.cat(outs)

    def refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem, on all ranks if the dispatcher exchanges it before rows are sent.

        Otherwise the peers are in the exchange already, and get NaN from this rank's experts.
        """
        self.experts = self._nan
        if not self.in_parts or capturing(self.x.device):
            self.dispatcher.dispatch_start(self.x[:0], self._routing(slice(0, 0)), problem, max_tokens=self.bound)
            raise AssertionError("a dispatcher raises the problem that it is given")
        self.x, self.routing = self.x[:0], self._routing(slice(0, 0))
        self.x_scale = None if self.x_scale is None else self.x_scale[:0]
        self.run()
        self.dispatcher.refuse(problem)

    def _nan(self, received: Received, out: Tensor | PeerRows | None) -> Tensor | PeerRows:
        """Return NaN instead of the experts' results, so that peers do not take old numbers for results."""
        if isinstance(out, PeerRows):
            out.write(out.blocks[0].new_full((len(out.blocks) * out.bound, out.blocks[0].shape[1]), torch.nan))
            return out
        if out is not None:
            return out.fill_(torch.nan)
        g = self.dispatcher.dispatch_shape
        shape = (*received.x.shape[:-1], g.hidden_size)
        if received.per_route:
            shape = (len(received.x) * g.returned, g.hidden_size)
        return torch.full(shape, torch.nan, dtype=g.dtype, device=received.x.device)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(name, self.context._stage_times)

    def _parts(self) -> list[slice]:
        """Return the rows of each part. All ranks have equally many parts; a rank with few tokens has empty ones."""
        if not self.in_parts:
            return [slice(0, len(self.x))]  # if these are too many, the dispatcher raises
        most = self.dispatcher.dispatch_shape.max_tokens
        assert most is not None
        assert self.bound is not None
        return [slice(start, min(start + most, self.bound)) for start in range(0, self.bound, most)]

    def _start(self, part: slice) -> Pending[Received]:
        return self.dispatcher.dispatch_start(
            self.x[part], self._routing(part), x_scale=self._scale(part), max_tokens=self._most(part)
        )

    def _dispatch_blocking(self, part: slice) -> Pending[Received]:
        """Dispatch a part that nothing overlaps with."""
        routing, scale = self._routing(part), self._scale(part)
        received = self.dispatcher.dispatch(self.x[part], routing, scale, max_tokens=self._most(part))
        return Pending.of(received)

    def _scale(self, part: slice) -> Tensor | None:
        return None if self.x_scale is None else self.x_scale[part]

    def _most(self, part: slice) -> int | None:
        return part.stop - part.start if self.in_parts else self.bound

    def _routing(self, part: slice) -> PhysicalRouting:
        if part.start == 0 and part.stop >= len(self.routing.weights):
            return self.routing  # may be deferred, for a dispatcher that places ids
        whole = self.routing.materialize()
        return PhysicalRouting(PhysicalIds(whole.ids[part]), whole.weights[part])

    def _compute_and_combine(self, received: Received) -> Tensor:
        with self._stage("experts"):
            y = self._run_experts(received)
        with self._stage("combine"):
            return self.dispatcher.combine(y, received.handle)

    def _run_experts(self, received: Received, *, last: bool = True) -> Tensor | PeerRows:
        """Compute the experts' rows, into the memory that the transport provides.

        If the transport and the kernel support it, the kernel writes them to the peers directly. Parts except the last
        one do not: combine sends them while the next part is computed.
        """
        to_peers = last and self.to_peers and received.peer_out is not None
        return self.experts(received, received.peer_out if to_peers else received.out)

    def _computed(self, received: Received, *, last: bool) -> Pending[Tensor | PeerRows]:
        y = self._run_experts(received, last=last)
        return Pending.of(y)

    def _pipeline(self, pending: Pending[Received], parts: list[slice]) -> Tensor:
        """Run the parts as a pipeline: while part i is computed, part i - 1 is combined and part i + 1 is dispatched.

        Nothing overlaps with the combine of the last part. Parts are computed on a stream of high priority. Otherwise
        the many blocks of the transport's kernels would occupy all multiprocessors first.
        """
        g = self.dispatcher.dispatch_shape
        out = torch.empty(len(self.x), g.hidden_size, dtype=g.dtype, device=self.x.device)
        back: Pending[Tensor] | None = None
        for part, following in pairwise(parts):
            received = self._waited(pending)
            with self._stage("dispatch"):
                pending = self._start(following)
            y = self._compute_on_side_stream(received, last=False)
            with self._stage("combine"):
                under_way = self.dispatcher.combine_start(y, received.handle, out[part])
            if back is not None:
                self._waited(back, "combine wait")
            back = under_way
        received = self._waited(pending)
        y = self._compute_on_side_stream(received, last=True)
        if back is not None:  # before the last combine: kernels that wait for peers must have one order on all ranks
            self._waited(back, "combine wait")
        with self._stage("combine"):
            self.dispatcher.combine(y, received.handle, out[parts[-1]])
        return out

    def _waited(self, pending: Pending[Result], name: str = "dispatch wait") -> Result:
        with self._stage(name):
            return pending.wait()

    def _compute_on_side_stream(self, received: Received, *, last: bool) -> Tensor | PeerRows:
        call = partial(self._computed, received, last=last)
        with self._stage("experts"):
            return self.context._compute.start(self.x.device, call).wait()


def check_pipeline(tokens: int | None, most: int | None, all2all: str) -> None:
    """Raise ConfigError unless `pipeline=tokens` works with a transport.

    most: the most tokens that a rank sends in one call, None for any number
    """
    if tokens is None:
        return
    if most is None or not registry.load("dispatchers", all2all).capabilities.static:
        raise ConfigError(
            f"pipeline={tokens!r} needs a transport with fixed buffers and EPContext.from_torchrun(max_tokens=...), "
            f"not all2all={all2all!r}"
        )
    if type(tokens) is not int or not 1 <= tokens <= most:
        raise ConfigError(f"pipeline must be an integer in [1, {most}] (tokens that a rank sends), got {tokens!r}")
