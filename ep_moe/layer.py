"""MoELayer: route, place, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.config import PLAIN_WIRE, MoEConfig, Wire
from ep_moe.context import TUNED_ROWS, EPContext
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.execution.autocast import call_cast
from ep_moe.execution.captured import CapturedCalls
from ep_moe.execution.exchange import Exchange
from ep_moe.execution.initial_seed import fresh_numbers
from ep_moe.execution.layer_checks import (
    NO_ROUTING,
    choice_problem,
    id_problem,
    logits_problem,
    mask_problem,
    rows_problem,
)
from ep_moe.execution.rank_checks import RankChecks
from ep_moe.execution.repeated import AutomaticGraphs
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.fused.base import (
    INSIDE,
    FusedCall,
    FusedExperts,
    Routed,
    RouterLogits,
    fused_dispatch_shape,
    router_logits,
)
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.parallel.rank_group import NO_GRADIENTS
from ep_moe.parallel.token_flow import Share
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.placement.stats import LayerStats, layer_stats
from ep_moe.quant.schemes import PLAIN, scheme_of
from ep_moe.router import Router
from ep_moe.runtime.devices import as_device, elsewhere, on_device, on_device_of
from ep_moe.runtime.launch_cache import aligned
from ep_moe.runtime.profiling import stage
from ep_moe.selection import explain as select
from ep_moe.selection.kernel_tuning import Kernel, tuned_on_one_rank
from ep_moe.selection.picks import TableEntry
from ep_moe.selection.resolve import LayerRequest, agree, device_of
from ep_moe.selection.tuned import Tuned
from ep_moe.types import LogicalIds, PhysicalIds, PhysicalRouting, Routing, TokenMask, dtype_name, recomputing
from ep_moe.weights.expert_weights import ExpertWeights


class MoELayer(nn.Module):
    """An expert-parallel Mixture-of-Experts block: [..., H] in, [..., H] out.

    Made by all ranks of the context in the same order, also under `torch.device("meta")`. Makes no process group.

    Gradients: expert parameters get the whole EP group's gradient, summed. Router and shared experts get that of this
    dp rank's tokens, as any replicated module does (average or sum them over dp as usual).

    Args:
        config: The layer's shape and routing.
        context: The ranks and what their layers share.
        expert_map: Where experts are. Default: linear over the EP group.
        router: Any callable x [T, H] -> Routing. Default: a `Router` of the configuration.
        shared_experts: Any module [T, H] -> [T, H]. Default: by `config.shared_intermediate_size`.
        all2all: A transport's name, or "auto".
        experts: A kernel's name, or "auto". Fused kernels are named here too.
        quantization: A name in `ep_moe.quant.schemes.SCHEMES`: how the experts are stored and computed.
        wire: How rows are written while they travel. Default: plain, in the layer's dtype.
        pipeline: Tokens of a part. A call of more tokens per rank travels in parts, of which one is computed while the
            next one travels and the last one returns. Needs a transport with fixed buffers, which may then be as small
            as a part. Default: one part.
        options: How the expert kernel runs.
        tuned: What `ep-moe tune` measured for this layer here. Transport, kernel and pipeline are then the fastest for
            the bound on tokens (`EPContext(max_tokens=)`, `EPContext.token_limit`), and are not named.
        name: What errors call this layer.
        device: Of the parameters. Default: the context's device, or meta.
        dtype: Of parameters and activations. Default: torch's default dtype.

    Raises:
        ConfigError: on all ranks, where the layer cannot be served or ranks ask for different layers.
        BackendUnavailable: on all ranks, where a named backend cannot run here; it says why.
    """

    @on_device_of(lambda self, config, context, **_: device_of(context))
    def __init__(
        self,
        config: MoEConfig,
        context: EPContext,
        *,
        expert_map: ExpertMap | None = None,
        router: Callable[[Tensor], Routing] | None = None,
        shared_experts: nn.Module | None = None,
        all2all: str = select.AUTO,
        experts: str = select.AUTO,
        quantization: str = PLAIN.name,
        wire: Wire | None = None,
        pipeline: int | None = None,
        options: ExpertsOptions | None = None,
        tuned: Tuned | None = None,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layout = context.layout
        self.config, self.context = config, context
        self.wire, self.tuned = PLAIN_WIRE if wire is None else wire, tuned
        self.name = context._name_layer(name)
        dtype = dtype or torch.get_default_dtype()
        options = ExpertsOptions() if options is None else options
        asked = LayerRequest(
            all2all, experts, quantization, self.wire, pipeline, options, dtype, router, tuned, shared_experts, device
        )
        self._picks, expert_map, self._asked = agree(context, self.name, config, asked, expert_map)
        self.choice = self._picks.last.choice  # of a tuned layer that for the most tokens
        self._fixed = self._picks.fixed
        self._made_dtype, self._dtype_problems = dtype, dict[torch.dtype, str | None]()
        self._shapes: dict[Any, DispatchShape] = {}
        self._dispatchers: dict[Any, Dispatcher] = {}  # of the context's pool
        fused = self.choice.all2all == INSIDE
        kernel: Any = registry.load("fused" if fused else "experts", self.choice.experts)
        if device is None:
            device = torch.device("meta") if torch.get_default_device().type == "meta" else context.device
        device = as_device(device)
        with torch.device(device), fresh_numbers(context, device):
            self.router = Router(config, dtype=dtype) if router is None else router
            self.shared_experts = shared_experts
            if shared_experts is None and config.shared_intermediate_size:
                self.shared_experts = SharedExperts(config, dtype=dtype)
            self.placement = Placement(expert_map, ep_rank=layout.ep_rank)
            self.expert_weights: ExpertWeights = ExpertWeights(
                config,
                expert_map,
                ep_rank=layout.ep_rank,
                ep=context.rank_groups["ep"],
                etp=context.rank_groups["etp"],
                replicas=context.rank_groups["expert_data"],
                dtype=dtype,
                scheme=scheme_of(quantization),
                weight_layout=kernel.weight_layout,
                trainable=kernel.capabilities.differentiable,
            )
        self.experts: Kernel
        if fused:
            dispatch_shape = fused_dispatch_shape(
                kernel.name, config, layout, expert_map.slots_per_rank, dtype, context._max_dispatch_tokens
            )
            shared = partial(context._pooled, dispatch_shape.kernel, dispatch_shape)
            self.experts = kernel(
                config, self.expert_weights, context.rank_groups["ep"], dispatch_shape, options, shared
            )
        else:
            self.experts = kernel(config, self.expert_weights, context._workspaces, options)
        self._others: dict[str, Experts] = {  # for fewer tokens, on the same weights
            name: registry.load("experts", name)(config, self.expert_weights, context._workspaces, options)
            for name in self._picks.kernels[1:]
        }
        self._checks = RankChecks(self)
        self._logit_taps: list[Callable[[Tensor], None]] = []  # given each call's router logits [T, E] (`training`)
        self._captured = CapturedCalls(context, config)
        self._repeated = AutomaticGraphs(context, config, self._kernels)
        context._register(self)

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"{self.name} is neither copied nor pickled: its context's groups and buffers are not; build another "
            f"MoELayer on the context and give it this one's state_dict(), or copy named_parameters() for an average"
        )

    # --- the story ---------------------------------------------------------------------------------------------

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
        """
        call = self._traced if torch.compiler.is_compiling() else self._guarded
        return call(x, None, None if mask is None else TokenMask(mask, send_masked))

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
        """
        call = self._traced if torch.compiler.is_compiling() else self._guarded
        token_mask = None if mask is None else TokenMask(mask, send_masked)
        return call(x, NO_ROUTING if routing is None else routing, token_mask)

    def _traced(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """A call within a graph that is compiled: part of it, or a step between two graphs."""
        if _compiled().traced(self) and _compiled().connected(self):
            return self._call(x, routing, mask)
        out: Tensor = _compiled().between_graphs(self, x, routing, mask)
        return out

    def _guarded(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """A call whose exceptions are raised on all ranks, those too that leave it before `entered`."""
        self._checks.forwards += 1  # an attribute of a Module takes the host three calls of Python
        try:
            return self._call(x, routing, mask)
        except BaseException as error:
            self._left_alone(error)
            raise

    def _left_alone(self, error: BaseException, *, users: bool = False) -> None:
        context = self.context
        if (
            context._idle and not context.flight_recorder.failed
        ):  # else told already, or another thread's call is under way
            context._broken_by(error, self.name, users=users)

    def _call(self, x: Tensor, routing: Routing | None, mask: TokenMask | None) -> Tensor:
        """A call on the layer's device and in its dtype, replayed where one like it was recorded."""
        if elsewhere(self.context._gpu):
            with on_device(self.context.device):
                return self._call(x, routing, mask)
        if torch.is_autocast_enabled(self.context.device.type):
            return call_cast(self, x, routing, mask)
        # a replay gives no router logits, and does not check a mask
        if not self._logit_taps and (mask is None or (isinstance(x, Tensor) and mask_problem(mask, x) is None)):
            if (replayed := self._captured.replay(x, routing, mask)) is not None:
                return replayed
            if (repeated := self._repeated.run(self, x, routing, mask)) is not None:
                return repeated
        self._checks.first_call(self)
        problem = self._problem(x, routing, mask)
        if problem is not None:
            self._refuse(problem)
        out = self.run(x, routing, mask)
        self._repeated.note(self, routing)
        return out

    def run(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor:
        """A call with arguments that were checked."""
        flow, shape = self.context._tokens, x.shape
        with self.context._entered(self.name, self._carried):
            rows = x.reshape(-1, self.config.hidden_size)
            rows = flow.shared_gradients(rows if torch.compiler.is_compiling() else aligned(rows))
            gradients = self._gradients(rows, routing) if flow.checks_input else NO_GRADIENTS
            call = flow.enter(len(rows), None, rows.device, _passed(rows, routing, mask), gradients=gradients)
            mine, own = flow.union(rows, call), flow.own(rows, call)
            with self._stage("route"):
                routed = self._route(mine, own, call, routing)
                mine, routed = self._weigh_input(mine, routed)
            with self._stage("place"):
                placed = self.placement(routed, flow.mask(mask, rows, call)) if isinstance(routed, Routing) else routed
            work = None if self.shared_experts is None else partial(self._replicated, self.shared_experts, own)
            out, shared = self._travel(mine, placed).run(work)
            with self._stage("leave"):
                out = flow.reduce(out, call)
                out = flow.leave(out if shared is None else (out + shared).to(out.dtype), call)
        return out.view(shape)

    @property
    def _carried(self) -> str:
        """What decides the sizes of all that a call exchanges; the ranks compare it."""
        alone = torch.compiler.is_compiling() or self.context.flight_recorder.alone
        return "" if alone else self._dispatch_shape.described

    def _gradients(self, rows: Tensor, routing: Routing | None) -> dict[str, Tensor]:
        """What a call is differentiated by, where more ranks than the EP group must go backward together."""
        if routing is not None:
            return {"x": rows, "routing.weights": routing.weights}
        return {"x": rows, "router.weight": self.router.weight} if isinstance(self.router, Router) else {"x": rows}

    def _route(self, rows: Tensor, own: Tensor, call: Share, routing: Routing | None) -> Routing | RouterLogits:
        """Of the union's `rows`. Where these come from other ranks, each rank routes its `own` ones."""
        flow = self.context._tokens
        tapped = self._logit_taps and not recomputing()
        if self._routes_inside:
            found = router_logits(self.router, rows)
            if tapped:
                self._tap(flow.whole_input(found.logits, call))
            return found
        if routing is not None:
            if tapped:
                self._tap(routing.logits)
            ids, weights = routing.ids, flow.shared_gradients(routing.weights)
            if flow.etp_rows_are_local:
                return Routing(cast("LogicalIds", flow.union(ids, call)), flow.union(weights, call))
            return Routing(*flow.etp_gather_routing(flow.own(ids, call), flow.own(weights, call), call))
        rows = rows if flow.etp_rows_are_local else own
        chosen: Routing = self._replicated(self.router, rows)
        if not isinstance(self.router, Router) or (tapped and chosen.logits is None):
            problem = choice_problem(chosen, rows, self.config.top_k) or self._id_problem(chosen)
            problem = problem or self._logits_problem(chosen, rows)
            flow.agree(problem, rows.device)
            if problem is not None:
                self._refuse_dispatch(problem)
        if tapped:
            assert chosen.logits is not None
            self._tap(flow.whole_input(chosen.logits, call))
        if not flow.etp_rows_are_local:
            return Routing(*flow.etp_gather_routing(chosen.ids, chosen.weights, call))
        return Routing(chosen.ids, chosen.weights) if tapped else chosen

    def _tap(self, logits: Tensor | None) -> None:
        for tap in self._logit_taps:
            tap(cast("Tensor", logits))

    def _weigh_input(self, rows: Tensor, routing: Routing | RouterLogits) -> tuple[Tensor, Routing | RouterLogits]:
        """Llama-4 multiplies the expert's input by the weight: with K = 1 that can be done before the row travels."""
        if not self.config.routing.weight_on_input or not isinstance(routing, Routing):
            return rows, routing
        return rows * routing.weights.to(rows.dtype), Routing(routing.ids, torch.ones_like(routing.weights))

    def _replicated(self, module: Any, x: Tensor) -> Any:
        """Call a module that all tp ranks hold alike on this rank's rows; its gradients are summed over tp."""
        flow = self.context._tokens
        if torch.compiler.is_compiling():  # one process
            return module(x)
        try:
            if flow.whole or not isinstance(module, nn.Module) or not torch.is_grad_enabled():
                return module(x)
            parameters = {name: flow.shared_gradients(p) for name, p in module.named_parameters() if p.requires_grad}
            return functional_call(module, parameters, (x,))
        except EPMoEError as error:
            self.context._broken_by(error, users=True)
            raise

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(name, self.context._stage_times)

    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> list[int]:
        """Let the expert kernel find its fastest variant for each number of received rows.

        Collective. Call it once weights are loaded and before any CUDA graph is captured. The rank with the most
        experts measures, and all ranks use what it found.

        Args:
            rows: Numbers of received rows to measure.
            cache: A folder that keeps findings by GPU, versions and shape. The measuring rank reads and writes it.
                Default: nothing is kept.

        Returns:
            What was found for `experts`, in the kernel's own terms.
        """
        found = [self._tune_kernel(kernel, rows, cache) for kernel in self._kernels]
        return found[0]

    @on_device_of(lambda self, *_, **__: self.context.device)
    def _tune_kernel(self, kernel: Kernel, rows: Sequence[int], cache: str | Path | None = None) -> list[int]:
        """`tune` for one of `kernels`."""
        found = tuned_on_one_rank(kernel, self.context, self.placement.expert_map, rows, cache, self.name)
        self._use(kernel, found)
        return found

    def _use(self, kernel: Kernel, tuned: list[int]) -> None:
        """Run one of `kernels` with what `tune` found; what was captured is captured no more."""
        kernel.use(tuned)
        self._captured.drop()
        self._repeated.drop()

    def _release_buffers(self) -> None:
        """Of what the context gives back."""
        self._captured.drop()  # graphs hold addresses of it
        self._repeated.drop()
        self._dispatchers.clear()

    def capture(self, tokens: Sequence[int]) -> None:
        """Record `forward` for some numbers of tokens as CUDA graphs.

        A call without gradients then replays the smallest graph that has room for its tokens. A replay costs the host
        one launch and two copies. Results are bitwise equal to an eager call. Exception: with `local`, and in the
        router and shared experts, GEMMs run at the recorded size and equal an eager call of that size.

        Collective, after `tune`, on the current stream, for calls under the bound in force (`EPContext.token_limit`).
        Maps may change and weights may be rewritten in place. After `tune`, or with other tensors or modules in their
        place, calls run eagerly. A user's router or shared experts are recorded as they run once: nothing random, no
        wait for the device. `plan` does not count the rows between kernels, in memory that all graphs of the context
        share.

        Args:
            tokens: Numbers of tokens, the same list on all ranks. Larger calls run eagerly.

        Raises:
            ConfigError: on all ranks, where the layer cannot be captured.
        """
        self._checks.first_call(self)  # what is replayed looks at nothing
        self._captured.capture(self, tokens, routed=False)

    def capture_routed(self, tokens: Sequence[int]) -> None:
        """As `capture`, for `forward_routed`.

        Args:
            tokens: Numbers of tokens, the same list on all ranks.

        Raises:
            ConfigError: on all ranks, where the layer cannot be captured.
        """
        self._checks.first_call(self)
        self._captured.capture(self, tokens, routed=True)

    @property
    def _kernel(self) -> Kernel:
        """That of `kernels` which serves calls under the bound in force."""
        return self._others.get(self._pick.choice.experts, self.experts)

    @property
    def _kernels(self) -> tuple[Kernel, ...]:
        """`experts`, and those that a tuned layer has for other numbers of tokens."""
        return (self.experts, *self._others.values())

    @property
    def shape(self) -> tuple[Any, ...]:
        """What its kernels' speed depends on; equal on all ranks."""
        slots_per_rank, scheme = self.placement.expert_map.slots_per_rank, self.expert_weights.scheme.name
        return self.config, scheme, self.dtype, self.experts.options, slots_per_rank

    # --- weights -----------------------------------------------------------------------------------------------

    @on_device_of(lambda self, *_, **__: self.context.device)
    def update_expert(self, logical_id: int, **tensors: Tensor) -> int:
        """Write an expert's whole tensors into all its replicas.

        Local: call it on every rank with the same tensors.

        Args:
            logical_id: The expert, in [0, E).
            **tensors: w13 [2I, H] (gate above up; [I, H] without a gate), w2 [H, I], and w13_bias and w2_bias where the
                layer has biases.

        Returns:
            The number of slots written here.
        """
        return self.expert_weights.update_expert(logical_id, tensors)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The map goes with the experts that it chose, beside the tensors: in a file that torch.save wrote a rank finds
        its own experts again, wherever they were moved before; what is put together of several ranks has none."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]]["expert_map"] = self.placement.expert_map.to_json()
            metadata[prefix[:-1]]["ep_rank"] = self.context.layout.ep_rank

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        saved = local_metadata.get("expert_map")
        if saved is not None and saved != self.placement.expert_map.to_json():
            self._adopt(ExpertMap.from_json(saved), local_metadata["ep_rank"], state_dict, f"{prefix}expert_weights.")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _adopt(self, saved: ExpertMap, ep_rank: int, state_dict: Any, prefix: str) -> None:
        """Put the map of a rank's own state in force where some rank would miss experts otherwise, and the layer has
        room for it. A state with experts of other ranks too serves any map. All ranks decide alike."""
        held = {int(key[len(prefix) :].split(".")[0]) for key in state_dict if key.startswith(prefix)}
        if held != set(saved.local(ep_rank)) - {EMPTY} or self._routes_inside:
            return
        now, ranks = self.placement.expert_map, range(saved.num_ranks)
        if saved.num_ranks == now.num_ranks and all({*now.local(r)} - {EMPTY} <= {*saved.local(r)} for r in ranks):
            return
        try:
            self.placement.update(saved)
        except ConfigError:
            return  # keys that are missing are reported
        self.expert_weights.expert_map = saved

    @property
    def dtype(self) -> torch.dtype:
        return self.expert_weights.dtype

    @property
    def device(self) -> torch.device:
        return self.expert_weights.device

    @property
    def _pick(self) -> TableEntry:
        """Transport and kernel under the bound in force."""
        return self._picks.at(self.context._current_limit)

    @property
    def _dispatcher(self) -> Dispatcher:
        """The context's dispatcher for this layer's present dtype and the bound in force; a fused kernel has none."""
        if isinstance(self.experts, FusedExperts):
            raise ConfigError(f"experts={self.choice.experts} has its all2all inside, and so the layer no dispatcher")
        pick = self._pick
        key = (pick.choice.all2all, pick.room, self._call_dtype)
        found = self._dispatchers.get(key)
        if found is None:
            found = self._dispatchers[key] = self.context._dispatcher(key[0], self._shape_of(pick))
        return found

    @property
    def _dispatch_shape(self) -> DispatchShape:
        """Under the bound in force."""
        return self._shape_of(self._pick)

    def _shape_of(self, pick: TableEntry) -> DispatchShape:
        if isinstance(self.experts, FusedExperts):
            return self.experts.dispatch_shape
        key = (pick.room, self._call_dtype)
        if key not in self._shapes:
            expert_map = self.placement.expert_map  # its cap and num_ranks stay, whatever map is in force
            self._shapes[key] = DispatchShape(
                hidden_size=self.config.hidden_size, top_k=self.config.top_k, slots_per_rank=expert_map.slots_per_rank,
                num_ranks=expert_map.num_ranks, dtype=key[1], max_tokens=pick.room, wire=self.wire,
            )  # fmt: skip
        return self._shapes[key]

    # --- what a user asks --------------------------------------------------------------------------------------

    def plan(self) -> dict[str, int]:
        """Count this rank's bytes by kind, from shapes alone.

        The result is the same before and after anything is allocated.

        Returns:
            Bytes of "experts", "router", "placement", "shared_experts", "workspace" and "transport". The workspace and
            the transport's buffers are shared with the context's other layers; `EPContext.plan` counts them once."""
        held = {
            kind: sum(t.numel() * t.itemsize for t in [*module.parameters(), *module.buffers()])
            for kind in ("experts", "router", "placement", "shared_experts")
            if isinstance(module := self.expert_weights if kind == "experts" else getattr(self, kind), nn.Module)
        }
        workspace = max(kernel.workspace_bytes() for kernel in self._kernels)
        return held | {"workspace": workspace, "transport": sum(self._transport_bytes().values())}

    def _transport_bytes(self) -> dict[tuple[str, DispatchShape], int]:
        """Buffers by transport and geometry."""
        if isinstance(self.experts, FusedExperts):
            return {(INSIDE, self.experts.dispatch_shape): self.experts.buffer_bytes(self.experts.dispatch_shape)}
        return self._picks.transport_bytes(self._shape_of)

    @on_device_of(lambda self: self.context.device)
    def stats(self) -> LayerStats:
        """Read the load per expert and rank.

        Collective over the EP group. Waits for the device.

        Returns:
            Routes per logical expert [E] and per EP rank [R], of the whole EP group.

        Raises:
            ConfigError: where a fused kernel routes inside and counts nothing.
        """
        if self._routes_inside:
            raise ConfigError(f"experts={self.choice.experts} routes inside and counts no load; choose other experts")
        return layer_stats(self.name, self.placement, self.context.rank_groups["ep"])

    def no_stats(self) -> AbstractContextManager[None]:
        """Within, forwards are not counted as load: for warm-up and idle steps."""
        return self.placement.no_stats()

    def explain(self) -> list[select.BackendChoice]:
        """List every pair of transport and kernel.

        Returns:
            One row a pair, whose status is "chosen", "possible", or the reason why it cannot run here.
        """
        table = select.explain(self.config, self.context.layout, self.context.device, self.dtype, **self._asked)
        return table if self.tuned is None else self._picks.explained(table)

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"{self.name}: H={c.hidden_size}, I={c.intermediate_size}, E={c.num_experts}, K={c.top_k}, "
            f"{c.activation.value}, ep={self.context.layout.ep}, etp={self.context.layout.etp}, "
            f"all2all={self.choice.all2all}, experts={self.choice.experts}, "
            f"quantization={self.expert_weights.scheme.name}"
            + ("" if self.tuned is None else f", tuned: {self._picks}")
        )

    # --- checks ------------------------------------------------------------------------------------------------

    def _problem(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> str | None:
        """What is wrong with the arguments of this rank, without raising: all ranks must raise together."""
        problem = self._checks.wrapper_problem(self) or self._dtype_problem()
        problem = problem or rows_problem(x, self.config.hidden_size, self.dtype, self.device, self.context.device)
        if problem is not None:
            return problem
        if x.requires_grad and torch.is_grad_enabled() and (stuck := self._not_differentiable()):
            return (
                f"x requires a gradient, and {stuck} has no backward; call it under torch.no_grad(), or build the "
                f"layer with experts='reference' and all2all='allgather' or 'torch_a2a' to train"
            )
        if self._routes_inside and (routing is not None or self.placement.expert_map != self._asked["expert_map"]):
            return f"experts={self.choice.experts} routes inside: call forward, under the map of construction"
        if mask is not None and (problem := mask_problem(mask, x)) is not None:
            return problem
        if mask is not None and self._routes_inside:
            return f"experts={self.choice.experts} routes inside and takes no mask; choose other experts"
        if routing is None:
            return None
        rows = x if x.dim() == 2 else x.reshape(-1, self.config.hidden_size)
        problem = choice_problem(routing, rows, self.config.top_k) or self._id_problem(routing)
        return problem or self._logits_problem(routing, rows)

    @property
    def _call_dtype(self) -> torch.dtype:
        """Of the rows that the peers expect. Fixed buffers keep that of the first call: no exchange says another."""
        return self._checks.dtype or self.dtype

    def _dtype_problem(self) -> str | None:
        """What `layer.to(dtype)` has made impossible."""
        dtype, agreed = self.dtype, self._call_dtype
        if dtype != agreed:
            return (
                f"the layer became {dtype_name(dtype)} after its first call in {dtype_name(agreed)}, and all2all="
                f"{self._pick.choice.all2all} has buffers of {dtype_name(agreed)}; convert it on all ranks before the "
                f"first call, or build another with dtype={dtype}"
            )
        if dtype == self._made_dtype:
            return None
        if dtype not in self._dtype_problems:
            why = self._picks.dtype_problem(
                dtype, self.config, self.context.layout, self.expert_weights.scheme, self.experts.options, self.wire
            )
            self._dtype_problems[dtype] = why and (
                f"the layer became {dtype_name(dtype)}, and {why}; convert it back to "
                f"{dtype_name(self._made_dtype)}, or build another for {dtype_name(dtype)}"
            )
        return self._dtype_problems[dtype]

    def _logits_problem(self, routing: Routing, rows: Tensor) -> str | None:
        return logits_problem(routing, len(rows), self.config.num_experts) if self._logit_taps else None

    @property
    def _routes_inside(self) -> bool:
        return isinstance(self.experts, FusedExperts) and self.experts.capabilities.routes

    @property
    def _takes_mask(self) -> bool:
        """Whether `forward` takes a mask; a kernel that routes inside takes none."""
        return not self._routes_inside

    def _not_differentiable(self) -> str:
        for kernel in self._kernels:
            if not kernel.capabilities.differentiable:
                return f"experts={kernel.name}"
        if self.wire != PLAIN_WIRE:
            return f"{self.wire}"
        return "" if self._dispatcher.capabilities.differentiable else f"all2all={self._pick.choice.all2all}"

    def _id_problem(self, routing: Routing) -> str | None:
        """Waits for the device, and so only where dispatch does too; elsewhere valid ids are the caller's duty."""
        transport = self.experts if isinstance(self.experts, FusedExperts) else self._dispatcher
        if torch.compiler.is_compiling() or (not transport.capabilities.host_sync and routing.ids.is_cuda):
            return None
        return id_problem(routing.ids, self.config.num_experts)

    def _refuse(self, problem: str) -> NoReturn:
        """Take part in the exchanges that a call begins with, so that all ranks raise this rank's problem."""
        with self.context._entered(self.name, self._carried):
            self.context._tokens.enter(0, problem, self.context.device)
            self._refuse_dispatch(problem)

    def _refuse_dispatch(self, problem: str) -> NoReturn:
        x = self._nothing()
        ids = torch.empty(0, self.config.top_k, dtype=torch.int64, device=x.device)
        self._travel(x, PhysicalRouting(PhysicalIds(ids), ids.float())).refuse(problem)

    def _travel(self, x: Tensor, routed: Routed) -> Exchange | FusedCall:
        if isinstance(self.experts, FusedExperts):
            return FusedCall(self.experts, x, routed, self.context._current_limit, self._stage)
        assert isinstance(routed, PhysicalRouting)
        return Exchange(self.context, self._dispatcher, cast("Experts", self._kernel), x, routed)

    def _nothing(self) -> Tensor:
        return torch.empty(0, self.config.hidden_size, dtype=self._call_dtype, device=self.context.device)


def _passed(rows: Tensor, routing: Routing | None, mask: TokenMask | None) -> dict[str, Tensor]:
    """What tp ranks must pass alike."""
    passed = {"x": rows}
    if routing is not None:
        passed |= {"routing.ids": routing.ids, "routing.weights": routing.weights}
    if mask is not None:
        passed["mask with send_masked" if mask.sent else "mask"] = mask.tokens.reshape(-1)
    return passed


def _compiled() -> Any:
    """Imported for compiled graphs alone: it brings all of torch's compiler."""
    from ep_moe.execution import compiled

    return compiled
