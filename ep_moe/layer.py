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
from ep_moe.execution.exact_exchange import ExactExchange, fan_out_in_order
from ep_moe.execution.exchange import Exchange
from ep_moe.execution.layer_checks import (
    call_problem,
    mask_problem,
    refuse_tracing,
    routing_without_class,
    shared_problem,
)
from ep_moe.execution.rank_comparison import dense_digest
from ep_moe.execution.routing_checks import NO_ROUTING, router_output_problem
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
from ep_moe.parallel.token_flow import TokenSplit, replicated_arguments
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.devices import aligned, is_other_gpu_current, on_device, without_class
from ep_moe.runtime.profiling import stage
from ep_moe.selection.backend_table import TableEntry
from ep_moe.selection.tuned import Kernel
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing, TokenMask, recomputing
from ep_moe.weights.expert_weights import ExpertWeights

_log = logging.getLogger("ep_moe.layer")


class MoELayer(LayerTools):
    """An expert-parallel Mixture-of-Experts block: [..., H] in, [..., H] out.

    All ranks of the context construct their layers in the same order, also under `torch.device("meta")`. A layer
    creates no process group.

    Gradients: expert parameters get the gradient of the whole EP group's tokens, summed. Router and shared experts get
    the gradient of this dp rank's tokens, like any replicated module. Average or sum it over dp as usual.

    Args:
        config: The layer's shape and routing.
        context: The ranks and the resources that their layers share.
        expert_map: The placement of experts on ranks. Default: linear over the EP group.
        router: Any callable x [T, H] -> Routing. It must route each row by itself, because under tensor parallelism
            each rank routes only its share of the rows. A router with parameters must be a `torch.nn.Module`. Default:
            a `Router` of the configuration.
        shared_experts: Any module [T, H] -> [T, H]. Default: by `config.shared_intermediate_size`.
        all2all: The name of a transport, or "auto".
        experts: The name of an expert kernel or of a fused kernel, or "auto".
        quantization: How the experts are stored and computed, a name in `ep_moe.quant.schemes.SCHEMES`. Default:
            "none".
        wire: The number format of rows in dispatch and combine. Default: plain, in the layer's dtype.
        pipeline: The number of tokens per part. A call with more tokens per rank is split into parts. While one part
            is computed, the next one is dispatched and the previous one is combined. Needs a transport with fixed
            buffers, which then need room for one part only. Default: one part.
        options: How the expert kernel runs.
        tuned: The results of `ep-moe tune` for this layer on this hardware. They choose transport, kernel and pipeline
            for the token limit (`EPContext(max_tokens=)`, `EPContext.token_limit`). Leave `all2all`, `experts` and
            `pipeline` at their defaults.
        name: The layer's name in errors.
        device: The device of the parameters. Default: the context's device, or meta.
        dtype: The dtype of parameters and activations. Default: torch's default dtype.

    Raises:
        ConfigError: on all ranks, if no backend can run the layer, or ranks ask for different layers.
        BackendUnavailable: on all ranks, if a named backend cannot run here. The message says why.
    """

    # --- the call ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        The peers are in the same call. So an exception that is raised before `forward`, such as in a forward pre-hook,
        is raised on all ranks.
        """
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        before = self._checks.forwards
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            if self._checks.forwards == before:
                self._report_early_exception(error, users=True)
            raise

    def forward(self, x: Tensor, mask: Tensor | None = None, *, send_masked: bool = False) -> Tensor:
        """Compute the layer for the rows of x.

        Args:
            x: [..., H] of the layer's dtype. T, the product of the leading sizes, may differ between ranks and be 0.
                Under `torch.autocast` x may be float32, bfloat16 or float16, and the result has autocast's dtype.
            mask: bool [...], the leading sizes of x, True for a token and False for padding. A padding row goes to no
                expert and is not counted as load. Its result is that of the shared experts, or 0. Some ranks may pass
                a mask and others none; tp ranks that pass the same tokens pass the same mask.
            send_masked: Send padding rows to experts like tokens, but do not count them as load.

        Returns:
            [..., H].

        Raises:
            InputError: on all ranks, if any rank passes a wrong x or mask.
            CheckpointError: on all ranks, if loading the layer's weights ended before it was complete.
            PeerTimeout: a peer died, hung, or runs another call. The message names the phase and the ranks.
            RankFailed: an exception of another kind left a call on a peer. That rank raises the exception itself.
            OutOfMemory: on all ranks, if one rank ran out of device memory.
            ContextClosed: the context or its process groups were destroyed.
            RuntimeError: the context is in another call, such as one of another thread.
        """
        token_mask = None if mask is None else TokenMask(mask, send_masked)
        if torch.compiler.is_compiling():
            return _compiled_call()(self, x, None, token_mask)
        return self._guarded(x, None, token_mask)

    def forward_routed(
        self, x: Tensor, routing: Routing, mask: Tensor | None = None, *, send_masked: bool = False
    ) -> Tensor:
        """Compute the layer with routes that the caller chose, instead of the layer's router.

        Args:
            x: [..., H] of the layer's dtype.
            routing: Logical ids, int32 or int64 [T, K], and weights, float32 [T, K], for the T rows of x. An id of -1
                is no expert. Under `torch.autocast` weights may also be bfloat16 or float16.
            mask: As in `forward`.
            send_masked: As in `forward`.

        Returns:
            [..., H].

        Raises:
            InputError: on all ranks, if any rank passes a wrong x, routing or mask.
            CheckpointError: on all ranks, if loading the layer's weights ended before it was complete.
            EPMoEError: as in `forward`, for peers, memory and the context.
            RuntimeError: as in `forward`.
        """
        token_mask = None if mask is None else TokenMask(mask, send_masked)
        routing = NO_ROUTING if routing is None else routing
        if torch.compiler.is_compiling():
            return _compiled_call()(self, x, routing, token_mask)
        return self._guarded(x, routing, token_mask)

    def _guarded(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """Run a call, and raise its exceptions on all ranks, including those from before `_begin_call`."""
        self._checks.forwards += 1  # kept there because setting an attribute of a Module takes three Python calls
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
            self._report_early_exception(error)
            raise

    def _report_early_exception(self, error: BaseException, *, users: bool = False) -> None:
        context = self.context
        # otherwise all ranks know of the error already, or the context is in a call of another thread
        if context._idle and not context.flight_recorder.failed:
            context._report_exception(error, self.name, users=users)

    def _call(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """Run a call on the layer's device and in its dtype. Replay a CUDA graph if one was recorded for such calls."""
        if self._unfinished:  # set on all ranks, so no exchange is needed to raise on all
            raise CheckpointError(
                f"{self.name} holds only a part of {self._unfinished}, whose loading did not finish, and outputs "
                "would be wrong; load all weights again"
            )
        if is_other_gpu_current(self.context._gpu):
            with on_device(self.context.device):
                return self._call(x, routing, mask)
        if torch.is_autocast_enabled(self.context.device.type):
            return call_cast(self, x, routing, mask)
        # a replay returns no router logits and no routes, and does not check a mask
        seen = self._logit_taps or (self._routes is not None and self._routes.active)
        if not seen and (mask is None or (isinstance(x, Tensor) and mask_problem(mask, x) is None)):
            replayed = self._graphs.replay(self, x, routing, mask)
            if replayed is not None:
                return replayed
        if not torch.compiler.is_compiling():  # a counter in a compiled graph would cause a recompilation per call
            self._checks.note_eager()
            if self._checks.unread is not None:
                self._checks.warn_of_unread(self)
        self._checks.first_call(self)
        problem = call_problem(self, x, routing, mask)
        if problem is not None:
            self._refuse(problem)
        if x.requires_grad and torch.is_grad_enabled():
            self._slow_training.warn_once(self)
        out = self.run(x, routing, mask)
        self._checks.loaded = False
        if not out.requires_grad:  # these graphs serve only calls without gradients
            self._graphs.record_if_repeated(self, routing, mask)
        return out

    def run(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor:
        """Route, place, dispatch, compute and combine. The arguments are not checked: `forward` does that.

        Args:
            x: [..., H] of the layer's dtype.
            routing: As in `forward_routed`; None for the layer's own router.
            mask: Which rows are tokens; None if all are.

        Returns:
            [..., H].
        """
        flow, shape = self.context._token_flow, x.shape
        with self.context._begin_call(self.name, self._call_facts()):
            rows = x.reshape(-1, self.config.hidden_size)
            rows = flow.shared_gradients(rows if torch.compiler.is_compiling() else aligned(rows))
            gradients = self._gradients(rows, routing) if flow.checks_input else NO_GRADIENTS
            replayed = self._replayed
            passed = replicated_arguments(rows, routing, mask, None if replayed is None else replayed.ids)
            call = flow.enter(len(rows), None, rows.device, passed, gradients=gradients)
            padding = self._hidden_padding(mask)
            tokens = rows if padding is None else rows.masked_fill(padding, 0)
            local, gathered = flow.local_tokens(rows, call), flow.etp_gather(tokens, call)
            to_router, own = gathered, local if padding is None else flow.local_tokens(tokens, call)
            if self.exact:  # exact layers have etp = 1, so `gathered` and `local` are the same rows
                hidden = None if padding is None else flow.local_tokens(padding, call)
                to_router, gathered, local = fan_out_in_order(local, hidden)
            with self._stage("route"):
                routed = self._route(to_router, own, call, routing)
                gathered, routed = self._weigh_input(gathered, routed)
            with self._stage("place"):
                placed = self.placement(routed, flow.mask(mask, rows, call)) if isinstance(routed, Routing) else routed
            work = None if self.shared_experts is None else partial(self._shared, local)
            out, shared = self._make_exchange(gathered, placed).run(work)
            with self._stage("gather"):
                out = flow.etp_reduce(out, call)
                out = flow.tp_gather(out if shared is None else (out + shared).to(out.dtype), call)
        if out.requires_grad:
            # not an autograd view: FSDP2's hook on the module's result would be lost if a caller wrote into it in place
            return cast("Tensor", torch.ops.aten._unsafe_view.default(out, shape))
        return out.view(shape)

    def _call_facts(self) -> str:
        """Return text that determines the sizes of a call's exchanges and the ranks that rows go to. Ranks compare
        it."""
        if torch.compiler.is_compiling() or self.context.flight_recorder.has_no_peers:
            return ""
        shape = self._dispatch_shape()
        expert_map = cast("Placement", self._modules["placement"]).expert_map  # faster than nn.Module.__getattr__
        of_shape, of_map, text = self._last_call_facts
        if of_shape is not shape or of_map is not expert_map:
            text = f"{shape.described}, expert_map={expert_map.digest}"
            self._last_call_facts = shape, expert_map, text
        return f"{text}, loaded={dense_digest(self)}" if self._checks.loaded else text

    def _hidden_padding(self, mask: TokenMask | None) -> Tensor | None:
        """Return bool [T, 1], the padding rows that router and experts see as zeros; None if there are none.

        Padding may hold NaN. Autograd multiplies it by zero gradients, which gives NaN, so zeros replace it first.
        """
        if mask is None or mask.sent or self._logit_taps or not torch.is_grad_enabled():
            return None
        return ~mask.tokens.reshape(-1, 1)

    def _gradients(self, rows: Tensor, routing: Routing | None) -> dict[str, Tensor]:
        """Return the tensors that may require gradients, by name.

        All ranks of a call must agree on whether it has a backward. Used if more ranks than the EP group take part.
        """
        if routing is not None:
            return {"x": rows, "routing.weights": routing.weights}
        return {"x": rows, "router.weight": self.router.held_weight} if isinstance(self.router, Router) else {"x": rows}

    def _route(self, rows: Tensor, local: Tensor, call: TokenSplit, routing: Routing | None) -> Routing | RouterLogits:
        """Return the routing of the rows of `etp_gather`.

        rows: the gathered rows; local: this rank's own. If gathered rows come from other ranks, each rank routes its
        `local` rows, and the routes are gathered.
        """
        flow = self.context._token_flow
        tapped = self._logit_taps and not recomputing()
        if self._routes_inside:
            found = logits_of(self.router, rows)
            if tapped:
                self._tap(flow.tp_gather_router_results(found.logits, call))
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
            problem = router_output_problem(self, chosen, rows)
            flow.agree(problem, rows.device)
            if problem is not None:
                self._refuse_dispatch(problem)
        if tapped:
            assert chosen.logits is not None
            self._tap(flow.tp_gather_router_results(chosen.logits, call))
        if self._routes is not None:
            self._routes.record_whole(chosen, partial(flow.tp_gather_router_results, call=call))
        if not flow.etp_rows_are_local:
            return Routing(*flow.etp_gather_routing(chosen.ids, chosen.weights, call))
        return Routing(chosen.ids, chosen.weights) if tapped else chosen

    def _chosen(self, rows: Tensor, call: TokenSplit) -> Routing:
        """Return the experts that the router chooses for `rows`, or the replayed ones with live weights."""
        flow, replayed = self.context._token_flow, self._replayed
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
        """Multiply rows by their routing weight before dispatch, if `weight_on_input` is set.

        Llama-4 multiplies the expert's input by the weight. With K = 1 this can be done before dispatch.
        """
        if not self.config.routing.weight_on_input or not isinstance(routing, Routing):
            return rows, routing
        return rows * routing.weights.to(rows.dtype), Routing(routing.ids, torch.ones_like(routing.weights))

    def _replicated(self, module: Any, x: Tensor, *more: Tensor, **options: bool) -> Any:
        """Call a module that is replicated over tp on this rank's rows. Its gradients are summed over tp."""
        flow = self.context._token_flow
        if torch.compiler.is_compiling():  # one process
            return module(x, *more, **options)
        try:
            if flow.is_pass_through or not isinstance(module, nn.Module) or not torch.is_grad_enabled():
                return module(x, *more, **options)
            parameters = {name: flow.shared_gradients(p) for name, p in module.named_parameters() if p.requires_grad}
            return functional_call(module, parameters, (x, *more), options)
        except EPMoEError as error:
            self.context._report_exception(error, users=True)
            raise

    def _shared(self, rows: Tensor) -> Tensor:
        out: Tensor = self._replicated(self.shared_experts, rows)
        problem = shared_problem(out, rows)
        if problem is not None:
            error = InputError(f"{self.name}: {problem}")
            self.context._report_exception(error, self.name, users=True)
            raise error
        return out

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(name, self.context._stage_times)

    @property
    def _kernel(self) -> Kernel:
        """The expert kernel for the current token limit."""
        return self._small_batch_kernels.get(self._entry.choice.experts, self.experts)

    # --- weights -----------------------------------------------------------------------------------------------

    @property
    def _entry(self) -> TableEntry:
        """The transport and kernel for the current token limit."""
        return self._table.entry_for(self.context._current_limit)

    def _dispatcher(self) -> Dispatcher:
        """Return the context's dispatcher for the layer's dtype and the current token limit.

        All ranks create it together on first use. A layer with a fused kernel has none.
        """
        if isinstance(self.experts, FusedExperts):
            raise ConfigError(
                f"experts={self.choice.experts} has a built-in all2all, and the layer has no dispatcher; choose "
                "other experts"
            )
        entry, repeats = self._entry, self._repeats
        key = (entry.choice.all2all, entry.buffer_tokens, self._call_dtype, repeats)
        found = self._dispatchers.get(key)
        if found is None:
            found = self._dispatchers[key] = self.context._dispatcher(key[0], self._shape_of(entry, repeats=repeats))
        return found

    def _dispatch_shape(self) -> DispatchShape:
        """Return the dispatch shape for the current token limit."""
        return self._shape_of(self._entry, repeats=self._repeats)

    @property
    def _repeats(self) -> bool:
        """Whether an exact layer sends one row per route, as calls with gradients need for their backward."""
        return self.exact and torch.is_grad_enabled() and self._kernel.capabilities.differentiable

    def _shape_of(self, entry: TableEntry, *, repeats: bool = False) -> DispatchShape:
        if isinstance(self.experts, FusedExperts):
            return self.experts.dispatch_shape
        key = (entry.choice.all2all, entry.choice.experts, entry.buffer_tokens, self._call_dtype, repeats)
        if key not in self._shapes:
            self._shapes[key] = entry.dispatch_shape(
                self.config, self.placement.expert_map, self._call_dtype, self.wire, exact=self.exact, repeats=repeats
            )
        return self._shapes[key]

    # --- checks ------------------------------------------------------------------------------------------------

    @property
    def _call_dtype(self) -> torch.dtype:
        """The dtype of the rows that the peers expect.

        Over fixed buffers it stays that of the first call, because later calls do not exchange their dtype.
        """
        return self._checks.dtype or cast("ExpertWeights", self._modules["expert_weights"]).dtype

    def _refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem on all ranks, by the exchanges with which every call begins."""
        _log.info("%s rejects a call on rank %d: %s", self.name, self.context.layout.rank, problem)
        with self.context._begin_call(self.name, self._call_facts()):
            self.context._token_flow.enter(0, problem, self.context.device)
            self._refuse_dispatch(problem)

    def _refuse_dispatch(self, problem: str) -> NoReturn:
        x = torch.empty(0, self.config.hidden_size, dtype=self._call_dtype, device=self.context.device)
        ids = torch.empty(0, self.config.top_k, dtype=torch.int64, device=x.device)
        self._make_exchange(x, PhysicalRouting(PhysicalIds(ids), ids.float())).refuse(problem)

    def _make_exchange(self, x: Tensor, routed: Routed) -> Exchange | ExactExchange | FusedCall:
        if isinstance(self.experts, FusedExperts):
            return FusedCall(self.experts, x, routed, self.context._current_limit, self._stage)
        assert isinstance(routed, PhysicalRouting)
        context, dispatcher, kernel = self.context, self._dispatcher(), cast("Experts", self._kernel)
        if self.exact and not dispatcher.dispatch_shape.per_route:
            return ExactExchange(context, dispatcher, kernel, x, routed)
        return Exchange(context, dispatcher, kernel, x, routed, graphs=self._graphs.trained)


def _compiled_call() -> Callable[..., Tensor]:
    """Return the call of compiled graphs. Imported on first use, because it imports all of torch's compiler."""
    from ep_moe.execution.compiled import call

    return call
