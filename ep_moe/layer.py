"""MoELayer: route, place, dispatch, experts, combine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.errors import CheckpointError, ConfigError, EPMoEError, InputError
from ep_moe.execution.autocast import call_cast
from ep_moe.execution.exact_exchange import ExactExchange, three_ways
from ep_moe.execution.exchange import Exchange
from ep_moe.execution.layer_checks import (
    call_problem,
    mask_problem,
    refuse_tracing,
    routing_without_class,
    shared_problem,
)
from ep_moe.execution.rank_comparison import dense_digest
from ep_moe.execution.routing_checks import NO_ROUTING, routed_problem
from ep_moe.execution.routing_replay import Replay
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import (
    FusedCall,
    FusedExperts,
    Routed,
    RouterLogits,
    logits_of,
)
from ep_moe.layer_tools import LayerTools
from ep_moe.parallel.rank_group import NO_GRADIENTS
from ep_moe.parallel.token_flow import Share, passed_alike
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.devices import aligned, elsewhere, on_device, without_class
from ep_moe.runtime.profiling import stage
from ep_moe.selection.backend_table import TableEntry
from ep_moe.selection.tuned import Kernel
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing, TokenMask, recomputing
from ep_moe.weights.expert_weights import ExpertWeights

_log = logging.getLogger("ep_moe.layer")


class MoELayer(LayerTools):
    """An expert-parallel Mixture-of-Experts block: [..., H] in, [..., H] out.

    Made by all ranks of the context in the same order, also under `torch.device("meta")`. Makes no process group.

    Gradients: expert parameters get the whole EP group's gradient, summed. Router and shared experts get that of this
    dp rank's tokens, as any replicated module does (average or sum them over dp as usual).

    Args:
        config: The layer's shape and routing.
        context: The ranks and what their layers share.
        expert_map: Where experts are. Default: linear over the EP group.
        router: Any callable x [T, H] -> Routing, row by row: under tensor parallelism each rank routes its share of the
            rows. Its parameters are those of a `torch.nn.Module`. Default: a `Router` of the configuration.
        shared_experts: Any module [T, H] -> [T, H]. Default: by `config.shared_intermediate_size`.
        all2all: A transport's name, or "auto".
        experts: A kernel's name, or "auto". Fused kernels are named here too.
        quantization: A name in `ep_moe.quant.schemes.SCHEMES`: how the experts are stored and computed. Default:
            "none".
        wire: How rows are written while they travel. Default: plain, in the layer's dtype.
        pipeline: Tokens of a part. A call of more tokens per rank travels in parts, of which one is computed while
            the next one travels and the last one returns. Needs a transport with fixed buffers, which may then be
            as small as a part. Default: one part.
        options: How the expert kernel runs.
        tuned: What `ep-moe tune` measured for this layer here. Transport, kernel and pipeline are then the fastest
            for the bound on tokens (`EPContext(max_tokens=)`, `EPContext.token_limit`), and are not named.
        name: What errors call this layer.
        device: Of the parameters. Default: the context's device, or meta.
        dtype: Of parameters and activations. Default: torch's default dtype.

    Raises:
        ConfigError: on all ranks, where the layer cannot be served or ranks ask for different layers.
        BackendUnavailable: on all ranks, where a named backend cannot run here; it says why.
    """

    # --- the call ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A module's call. Peers are in the same one: an exception that leaves it before `forward`, such as of a
        pre-hook, is raised on all ranks."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        before = self._checks.forwards
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            if self._checks.forwards == before:
                self._left_alone(error, users=True)
            raise

    def forward(self, x: Tensor, mask: Tensor | None = None, *, send_masked: bool = False) -> Tensor:
        """Compute the layer for the rows of x.

        Args:
            x: [..., H] of the layer's dtype; T = product of the leading sizes may differ per rank and be 0. Under
                `torch.autocast` x has any of its dtypes, and the result autocast's.
            mask: bool [...], x's leading sizes, True for a token and False for padding. A row of padding goes to no
                expert, is not counted as load, and gets what the shared experts give it, or 0. Ranks may differ in
                whether they pass a mask; tp ranks that pass the same tokens pass the same mask.
            send_masked: Compute padding as tokens are, and leave it out of the load alone.

        Returns:
            [..., H].

        Raises:
            InputError: on all ranks, where any of them passes a wrong x or mask.
            CheckpointError: on all ranks, where the layer's weights were loaded in part.
            PeerTimeout: a peer died, hung or went another way. It names the phase and the ranks.
            RankFailed: an exception of another kind left a call on a peer. That rank raises the exception itself.
            OutOfMemory: on all ranks, where one ran out of device memory.
            ContextClosed: the context was destroyed, or its process groups were.
            RuntimeError: the context is within another call, such as one of another thread.
        """
        token_mask = None if mask is None else TokenMask(mask, send_masked)
        if torch.compiler.is_compiling():
            return _compiled_call()(self, x, None, token_mask)
        return self._guarded(x, None, token_mask)

    def forward_routed(
        self, x: Tensor, routing: Routing, mask: Tensor | None = None, *, send_masked: bool = False
    ) -> Tensor:
        """As `forward`, for a model that routes itself.

        Args:
            x: [..., H] of the layer's dtype.
            routing: Logical ids, int32 or int64 [T, K], and weights, float [T, K], for x's T rows. An id of -1 is no
                expert.
            mask: As in `forward`.
            send_masked: As in `forward`.

        Returns:
            [..., H].

        Raises:
            InputError: on all ranks, where any of them passes a wrong x, routing or mask.
            CheckpointError: on all ranks, where the layer's weights were loaded in part.
            EPMoEError: as `forward`, for peers, memory and the context.
            RuntimeError: as `forward`.
        """
        token_mask = None if mask is None else TokenMask(mask, send_masked)
        routing = NO_ROUTING if routing is None else routing
        if torch.compiler.is_compiling():
            return _compiled_call()(self, x, routing, token_mask)
        return self._guarded(x, routing, token_mask)

    def _guarded(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """A call whose exceptions are raised on all ranks, those too that leave it before `_entered`."""
        self._checks.forwards += 1  # an attribute of a Module takes the host three calls of Python
        if type(x) is not Tensor:
            x = without_class(x)
        if routing is not None and type(getattr(routing, "weights", None)) is not Tensor:
            routing = routing_without_class(routing)
        if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
            refuse_tracing(self)
        try:
            return self._call(x, routing, mask)
        except BaseException as error:
            self._checks.note_eager()
            self._left_alone(error)
            raise

    def _left_alone(self, error: BaseException, *, users: bool = False) -> None:
        context = self.context
        # else all ranks know of it already, or another thread's call is under way
        if context._idle and not context.flight_recorder.failed:
            context._broken_by(error, self.name, users=users)

    def _call(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """A call on the layer's device and in its dtype, replayed where one like it was recorded."""
        if self._unfinished:  # on all ranks alike: nothing is exchanged
            raise CheckpointError(
                f"{self.name} holds a part of {self._unfinished}, whose loading did not end, and outputs would be "
                f"wrong; load weights again, whole"
            )
        if elsewhere(self.context._gpu):
            with on_device(self.context.device):
                return self._call(x, routing, mask)
        if torch.is_autocast_enabled(self.context.device.type):
            return call_cast(self, x, routing, mask)
        # a replay gives no router logits and no routes, and does not check a mask
        seen = self._logit_taps or (self._routes is not None and self._routes.active)
        if not seen and (mask is None or (isinstance(x, Tensor) and mask_problem(mask, x) is None)):
            replayed = self._graphs.replay(self, x, routing, mask)
            if replayed is not None:
                return replayed
        if not torch.compiler.is_compiling():  # a counter in a graph would be compiled anew at each count
            self._checks.note_eager()
        self._checks.first_call(self)
        problem = call_problem(self, x, routing, mask)
        if problem is not None:
            self._refuse(problem)
        if x.requires_grad and torch.is_grad_enabled():
            self._slow_training.look(self)
        out = self.run(x, routing, mask)
        self._checks.loaded = False
        if not out.requires_grad:  # a call that is trained is never a replay
            self._graphs.note(self, routing, mask)
        return out

    def run(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor:
        """Route, place, dispatch, compute and combine without a check of the arguments, which `forward` makes.

        Args:
            x: [..., H] of the layer's dtype.
            routing: As `forward_routed` takes it; None for the layer's own router.
            mask: Which rows are tokens; None where all are.

        Returns:
            [..., H].
        """
        flow, shape = self.context._tokens, x.shape
        with self.context._entered(self.name, self._carried()):
            rows = x.reshape(-1, self.config.hidden_size)
            rows = flow.shared_gradients(rows if torch.compiler.is_compiling() else aligned(rows))
            gradients = self._gradients(rows, routing) if flow.checks_input else NO_GRADIENTS
            replayed = self._replayed
            passed = passed_alike(rows, routing, mask, None if replayed is None else replayed.ids)
            call = flow.enter(len(rows), None, rows.device, passed, gradients=gradients)
            padding = self._hidden_padding(mask)
            tokens = rows if padding is None else rows.masked_fill(padding, 0)
            local, gathered = flow.local_tokens(rows, call), flow.etp_gather(tokens, call)
            to_router, own = gathered, local if padding is None else flow.local_tokens(tokens, call)
            if self.exact:  # with etp = 1 these are the same rows
                hidden = None if padding is None else flow.local_tokens(padding, call)
                to_router, gathered, local = three_ways(local, hidden)
            with self._stage("route"):
                routed = self._route(to_router, own, call, routing)
                gathered, routed = self._weigh_input(gathered, routed)
            with self._stage("place"):
                placed = self.placement(routed, flow.mask(mask, rows, call)) if isinstance(routed, Routing) else routed
            work = None if self.shared_experts is None else partial(self._shared, local)
            out, shared = self._travel(gathered, placed).run(work)
            with self._stage("gather"):
                out = flow.etp_reduce(out, call)
                out = flow.tp_gather(out if shared is None else (out + shared).to(out.dtype), call)
        if out.requires_grad:
            # no view to autograd: FSDP2's hook on a module's result is lost where a caller writes into a view in place
            return cast("Tensor", torch.ops.aten._unsafe_view.default(out, shape))
        return out.view(shape)

    def _carried(self) -> str:
        """What decides the sizes of all that a call exchanges, and where rows go; the ranks compare it."""
        if torch.compiler.is_compiling() or self.context.flight_recorder.alone:
            return ""
        shape = self._dispatch_shape()
        expert_map = cast("Placement", self._modules["placement"]).expert_map  # without a module's walk
        of_shape, of_map, text = self._carried_last
        if of_shape is not shape or of_map is not expert_map:
            text = f"{shape.described}, expert_map={expert_map.digest}"
            self._carried_last = shape, expert_map, text
        return f"{text}, loaded={dense_digest(self)}" if self._checks.loaded else text

    def _hidden_padding(self, mask: TokenMask | None) -> Tensor | None:
        """Rows that router and experts see as zeros, [T, 1]; None where there are none. What padding holds, perhaps
        NaN, is then in no gradient: autograd would multiply it with zeros."""
        if mask is None or mask.sent or self._logit_taps or not torch.is_grad_enabled():
            return None
        return ~mask.tokens.reshape(-1, 1)

    def _gradients(self, rows: Tensor, routing: Routing | None) -> dict[str, Tensor]:
        """What a call is differentiated by, where more ranks than the EP group must go backward together."""
        if routing is not None:
            return {"x": rows, "routing.weights": routing.weights}
        return {"x": rows, "router.weight": self.router.held_weight} if isinstance(self.router, Router) else {"x": rows}

    def _route(self, rows: Tensor, local: Tensor, call: Share, routing: Routing | None) -> Routing | RouterLogits:
        """Of the rows of `etp_gather`. Where these come from other ranks, each rank routes its `local` tokens."""
        flow = self.context._tokens
        tapped = self._logit_taps and not recomputing()
        if self._routes_inside:
            found = logits_of(self.router, rows)
            if tapped:
                self._tap(flow.whole_input(found.logits, call))
            return found
        if routing is not None:
            if tapped:
                self._tap(routing.logits)
            if self._routes is not None:
                self._routes.record(routing.ids, routing.weights)
            return flow.etp_gather_given(routing, call)
        rows = rows if flow.etp_rows_are_local else local
        chosen = self._chosen(rows, call)
        if not isinstance(self.router, Router) or (tapped and chosen.logits is None):
            problem = routed_problem(self, chosen, rows)
            flow.agree(problem, rows.device)
            if problem is not None:
                self._refuse_dispatch(problem)
        if tapped:
            assert chosen.logits is not None
            self._tap(flow.whole_input(chosen.logits, call))
        if self._routes is not None:
            self._routes.record_whole(chosen, partial(flow.whole_input, call=call))
        if not flow.etp_rows_are_local:
            return Routing(*flow.etp_gather_routing(chosen.ids, chosen.weights, call))
        return Routing(chosen.ids, chosen.weights) if tapped else chosen

    def _chosen(self, rows: Tensor, call: Share) -> Routing:
        """What the router chooses for rows as `_route` gives them to it, or what is replayed there."""
        flow, replayed = self.context._tokens, self._replayed
        if replayed is None:
            routing: Routing = self._replicated(self.router, rows)
            return routing
        cut = flow.etp_gather if flow.etp_rows_are_local else flow.local_tokens
        routing = self._replicated(self.router, rows, cut(replayed.ids, call), partial=replayed.partial)
        assert self._routes is not None
        return Routing(routing.ids, self._routes.seen(routing.weights), routing.logits)

    @property
    def _replayed(self) -> Replay | None:
        return None if self._routes is None else self._routes.replayed

    def _tap(self, logits: Tensor | None) -> None:
        for tap in self._logit_taps:
            tap(cast("Tensor", logits))

    def _weigh_input(self, rows: Tensor, routing: Routing | RouterLogits) -> tuple[Tensor, Routing | RouterLogits]:
        """Llama-4 multiplies the expert's input by the weight: with K = 1 that can be done before the row travels."""
        if not self.config.routing.weight_on_input or not isinstance(routing, Routing):
            return rows, routing
        return rows * routing.weights.to(rows.dtype), Routing(routing.ids, torch.ones_like(routing.weights))

    def _replicated(self, module: Any, x: Tensor, *more: Tensor, **options: bool) -> Any:
        """Call a module that all tp ranks hold alike on this rank's rows; its gradients are summed over tp."""
        flow = self.context._tokens
        if torch.compiler.is_compiling():  # one process
            return module(x, *more, **options)
        try:
            if flow.whole or not isinstance(module, nn.Module) or not torch.is_grad_enabled():
                return module(x, *more, **options)
            parameters = {name: flow.shared_gradients(p) for name, p in module.named_parameters() if p.requires_grad}
            return functional_call(module, parameters, (x, *more), options)
        except EPMoEError as error:
            self.context._broken_by(error, users=True)
            raise

    def _shared(self, rows: Tensor) -> Tensor:
        out: Tensor = self._replicated(self.shared_experts, rows)
        problem = shared_problem(out, rows)
        if problem is not None:
            error = InputError(f"{self.name}: {problem}")
            self.context._broken_by(error, self.name, users=True)
            raise error
        return out

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(name, self.context._stage_times)

    @property
    def _kernel(self) -> Kernel:
        """That of `kernels` which serves calls under the bound in force."""
        return self._others.get(self._entry.choice.experts, self.experts)

    # --- weights -----------------------------------------------------------------------------------------------

    @property
    def _entry(self) -> TableEntry:
        """Transport and kernel under the bound in force."""
        return self._table.at(self.context._current_limit)

    def _dispatcher(self) -> Dispatcher:
        """The context's dispatcher for this layer's present dtype and the bound in force, made with the peers on first
        use; a fused kernel has none."""
        if isinstance(self.experts, FusedExperts):
            raise ConfigError(
                f"experts={self.choice.experts} has its all2all inside, and the layer has no dispatcher; choose other "
                f"experts"
            )
        entry, repeats = self._entry, self._repeats
        key = (entry.choice.all2all, entry.room, self._call_dtype, repeats)
        found = self._dispatchers.get(key)
        if found is None:
            found = self._dispatchers[key] = self.context._dispatcher(key[0], self._shape_of(entry, repeats=repeats))
        return found

    def _dispatch_shape(self) -> DispatchShape:
        """Under the bound in force."""
        return self._shape_of(self._entry, repeats=self._repeats)

    @property
    def _repeats(self) -> bool:
        """Whether a call of an exact layer sends a row for each route, as backward takes them back."""
        return self.exact and torch.is_grad_enabled() and self._kernel.capabilities.differentiable

    def _shape_of(self, entry: TableEntry, *, repeats: bool = False) -> DispatchShape:
        if isinstance(self.experts, FusedExperts):
            return self.experts.dispatch_shape
        key = (entry.choice.all2all, entry.choice.experts, entry.room, self._call_dtype, repeats)
        if key not in self._shapes:
            self._shapes[key] = entry.dispatch_shape(
                self.config, self.placement.expert_map, self._call_dtype, self.wire, exact=self.exact, repeats=repeats
            )
        return self._shapes[key]

    # --- checks ------------------------------------------------------------------------------------------------

    @property
    def _call_dtype(self) -> torch.dtype:
        """Of the rows that the peers expect. Fixed buffers keep that of the first call: no exchange says another."""
        return self._checks.dtype or cast("ExpertWeights", self._modules["expert_weights"]).dtype  # without a walk

    def _refuse(self, problem: str) -> NoReturn:
        """Take part in the exchanges that a call begins with, so that all ranks raise this rank's problem."""
        _log.info("%s refuses a call on rank %d: %s", self.name, self.context.layout.rank, problem)
        with self.context._entered(self.name, self._carried()):
            self.context._tokens.enter(0, problem, self.context.device)
            self._refuse_dispatch(problem)

    def _refuse_dispatch(self, problem: str) -> NoReturn:
        x = torch.empty(0, self.config.hidden_size, dtype=self._call_dtype, device=self.context.device)
        ids = torch.empty(0, self.config.top_k, dtype=torch.int64, device=x.device)
        self._travel(x, PhysicalRouting(PhysicalIds(ids), ids.float())).refuse(problem)

    def _travel(self, x: Tensor, routed: Routed) -> Exchange | ExactExchange | FusedCall:
        if isinstance(self.experts, FusedExperts):
            return FusedCall(self.experts, x, routed, self.context._current_limit, self._stage)
        assert isinstance(routed, PhysicalRouting)
        context, dispatcher, kernel = self.context, self._dispatcher(), cast("Experts", self._kernel)
        if self.exact and not dispatcher.dispatch_shape.per_route:
            return ExactExchange(context, dispatcher, kernel, x, routed)
        return Exchange(context, dispatcher, kernel, x, routed, graphs=self._graphs.trained)


def _compiled_call() -> Callable[..., Tensor]:
    """Imported for compiled graphs alone: it brings all of torch's compiler."""
    from ep_moe.execution.compiled import call

    return call
