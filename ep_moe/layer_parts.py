"""LayerParts: the construction of a MoELayer, its backends, weights and state.

The call is in `layer.py`. Other methods for users, such as `tune` and `capture`, are in `layer_tools.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.config import PLAIN_WIRE, MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.execution.graphs import CallGraphs
from ep_moe.execution.layer_checks import RankChecks
from ep_moe.execution.routing_replay import RoutingTap
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.fused.base import INSIDE, fused_dispatch_shape
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.quant.schemes import PLAIN, scheme_of
from ep_moe.renamed import renamed
from ep_moe.router import Router
from ep_moe.runtime.devices import as_device, on_device_of
from ep_moe.selection import explain
from ep_moe.selection.resolve import LayerRequest, SlowTraining, device_of, resolve_backends
from ep_moe.selection.tuned import Kernel, Tuned
from ep_moe.types import Routing
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.full_state import refuse_adapter_state, refuse_full_state
from ep_moe.weights.initial import fork_rng_with_shared_seed
from ep_moe.weights.optimizers import guard_router_optimizers
from ep_moe.weights.replaced import refuse_conversion

_FIXED = frozenset({"config", "context", "wire", "tuned", "exact"})  # attributes that cannot be assigned again


class LayerParts(nn.Module):
    """The construction, weights and state of a MoELayer."""

    _weights_class: ClassVar[type[ExpertWeights]] = ExpertWeights

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    @on_device_of(lambda self, config, context, **_: device_of(context))
    def __init__(
        self,
        config: MoEConfig,
        context: EPContext,
        *,
        expert_map: ExpertMap | None = None,
        router: Callable[[Tensor], Routing] | None = None,
        shared_experts: nn.Module | None = None,
        all2all: str = explain.AUTO,
        experts: str = explain.AUTO,
        quantization: str = PLAIN.name,
        wire: Wire | None = None,
        pipeline: int | None = None,
        options: ExpertsOptions | None = None,
        tuned: Tuned | None = None,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Choose backends together with the other ranks, and create the parameters. Arguments: see `MoELayer`."""
        super().__init__()
        self.config, self.context = config, context
        self.wire, self.tuned = PLAIN_WIRE if wire is None else wire, tuned
        self.name = context._name_layer(name)
        dtype = dtype or torch.get_default_dtype()
        options = ExpertsOptions() if options is None else options
        self.exact = isinstance(options, ExpertsOptions) and options.exact
        asked = LayerRequest(
            all2all, experts, quantization, self.wire, pipeline, options, dtype, router, tuned, shared_experts, device
        )
        self._table, expert_map, self._asked = resolve_backends(context, self.name, config, asked, expert_map)
        self.choice = self._table.last.choice  # a tuned layer has several choices; this one is for the most tokens
        self._fixed = self._table.has_fixed_buffers
        self._made_dtype, self._dtype_problems = dtype, dict[torch.dtype, str | None]()
        self._shapes: dict[Any, DispatchShape] = {}
        self._last_call_facts: tuple[DispatchShape | None, ExpertMap | None, str] = None, None, ""
        self._dispatchers: dict[Any, Dispatcher] = {}  # of the context's pool
        kernel = registry.load("fused" if self.choice.all2all == INSIDE else "experts", self.choice.experts)
        self._make_modules(kernel, expert_map, asked)
        self._make_kernels(kernel, options)
        self._checks = RankChecks(self)
        self._slow_training = SlowTraining()
        self._logit_taps: list[Callable[[Tensor], None]] = []  # called with the router logits [T, E] (`training`)
        self._keeps_logits = False  # the router's `keeps_logits` without taps
        self._routes: RoutingTap | None = None  # set once routes are recorded or replayed
        self._unfinished = ""  # the source of weights that are loaded in part; calls are refused meanwhile
        self._graphs = CallGraphs(context, config, self._kernels)
        context._register(self)

    def _make_modules(self, kernel: Any, expert_map: ExpertMap, asked: LayerRequest) -> None:
        """Create the modules that have parameters or buffers. Initial values do not depend on the rank.

        kernel: the class of the expert kernel
        """
        config, context, dtype, device = self.config, self.context, asked.dtype, asked.device
        if device is None:
            device = torch.device("meta") if torch.get_default_device().type == "meta" else context.device
        device = as_device(device)
        with torch.device(device), fork_rng_with_shared_seed(context._shared_seed, device):
            self.router = Router(config, dtype=dtype, exact=self.exact) if asked.router is None else asked.router
            self.shared_experts: nn.Module | None = asked.shared
            if asked.shared is None and config.shared_intermediate_size:
                self.shared_experts = SharedExperts(config, dtype=dtype, exact=self.exact)
            self.placement = Placement(
                expert_map, ep_rank=context.layout.ep_rank, ranks_per_node=context.layout.ep_ranks_per_node
            )
            self.expert_weights: ExpertWeights = self._weights_class(
                config,
                expert_map,
                ep_rank=context.layout.ep_rank,
                ep=context.rank_groups["ep"],
                etp=context.rank_groups["etp"],
                replicas=context.rank_groups["expert_data"],
                dtype=dtype,
                scheme=scheme_of(asked.quantization),
                weight_layout=kernel.weight_layout,
                trainable=kernel.capabilities.differentiable,
            )
        self._block: Callable[[], nn.Module | None] = lambda: None  # the model's block around the layer and its router
        self.expert_weights.gradient_sum.layout = context.layout
        if isinstance(self.router, nn.Module):
            self.expert_weights.gradient_sum.router = weakref.ref(self.router)
            guard_router_optimizers(self.router, self.expert_weights)

    def _make_kernels(self, kernel: Any, options: ExpertsOptions) -> None:
        """Create the expert kernels. All of them share the layer's weights.

        kernel: the class of the kernel for the most tokens
        """
        config, context, weights = self.config, self.context, self.expert_weights
        fused = self.choice.all2all == INSIDE
        self._routes_inside: bool = fused and kernel.capabilities.routes
        self.experts: Kernel
        if fused:
            slots, most = self.placement.expert_map.slots_per_rank, context._max_dispatch_tokens
            shape = fused_dispatch_shape(kernel.name, config, context.layout, slots, self._made_dtype, most)
            shared = partial(context._pooled, shape.kernel, shape)
            self.experts = kernel(config, weights, context.rank_groups["ep"], shape, options, shared)
        else:
            self.experts = kernel(config, weights, context._workspaces, options)
        self._small_batch_kernels: dict[str, Experts] = {  # for fewer tokens
            name: registry.load("experts", name)(config, weights, context._workspaces, options)
            for name in self._table.kernels[1:]
        }

    def __setattr__(self, name: str, value: Any) -> None:
        # wrappers of submodules, such as apply_activation_checkpointing, also assign modules that they do not wrap
        if name in ("expert_weights", "placement") and self._modules.get(name, value) is not value:
            raise ConfigError(
                f"{self.name}: {name} cannot be replaced: its kernels keep the original; call one layer in both "
                "places, or assign single parameters"
            )
        if name in _FIXED and name in self.__dict__:
            raise ConfigError(
                f"{self.name}: {name} cannot be replaced: the layer's router, kernels and buffers keep the original; "
                "build another MoELayer, and load this one's state_dict() into it"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"{self.name} cannot be copied or pickled, nor can the groups and buffers of its context; build another "
            "MoELayer on the context and load this one's state_dict() into it, or copy named_parameters() for an "
            "average"
        )

    @torch.inference_mode(False)  # as at construction: kernels and counters write the tensors that this creates
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        refuse_conversion(self.expert_weights, fn)  # before the router is converted
        super()._apply(fn, recurse)
        return self

    def _call_facts(self) -> str:
        """Return text that determines the sizes of a call's exchanges and the ranks that rows go to. Ranks compare
        it."""
        raise NotImplementedError

    @property
    def _kernels(self) -> tuple[Kernel, ...]:
        """`experts`, and the kernels of a tuned layer for other numbers of tokens."""
        return (self.experts, *self._small_batch_kernels.values())

    @property
    def _takes_mask(self) -> bool:
        """Whether `forward` takes a mask; a kernel that routes inside takes none."""
        return not self._routes_inside

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self.expert_weights.dtype

    @property
    def device(self) -> torch.device:
        """The device of the expert weights."""
        return self.expert_weights.device

    @property
    def _tuning_key(self) -> tuple[Any, ...]:
        """The key under which tuning results are shared. It determines the speed of the kernels, and is equal on all
        ranks."""
        slots_per_rank, scheme = self.placement.expert_map.slots_per_rank, self.expert_weights.scheme.name
        return self.config, scheme, self.dtype, self.experts.options, slots_per_rank

    shape = renamed("shape", "_tuning_key")

    # --- weights -------------------------------------------------------------------------------------------------

    @on_device_of(lambda self, *_, **__: self.context.device)
    def update_expert(self, logical_id: int, **tensors: Tensor) -> int:
        """Write the whole (unsharded) tensors of an expert into all its replicas.

        Not collective: call it on every rank with the same tensors, between two calls of the layer.

        Args:
            logical_id: The expert, in [0, E).
            **tensors: w13 [2I, H] (the gate's rows, then the up projection's; [I, H] without a gate), w2 [H, I], and
                w13_bias and w2_bias if the layer has biases. A quantized layer quantizes w13 and w2. It also takes
                codes and scales by the names of its scheme (w13, w13_scale, ...). Calibrated input scales stay
                unchanged unless they are passed.

        Returns:
            The number of slots written on this rank.

        Raises:
            InputError: on this rank, before anything is written. `logical_id` is no expert, or a tensor has a name,
                shape, dtype or memory layout that the scheme does not take. Or a quantized matrix lacks scales, has
                scales beside unquantized numbers, or holds numbers that the scheme cannot store, such as NaN. Or the
                scales turn its codes into 0 or infinity. Or the layer is on the meta device, or `fully_shard` holds
                its experts.
        """
        written = self.expert_weights.update_expert(logical_id, tensors)
        if self._checks.unread:
            self._checks.unread.discard(logical_id)
        return written

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the expert map in the metadata of the state dict.

        A rank that loads its own file then finds its experts under the map that they were saved with. A state dict that
        was merged from several ranks has no such metadata.
        """
        refuse_full_state(self.placement.expert_map)
        if self.expert_weights.lora is not None:
            refuse_adapter_state()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]]["expert_map"] = self.placement.expert_map.to_json()
            metadata[prefix[:-1]]["ep_rank"] = self.context.layout.ep_rank

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        held = _experts_in(state_dict, f"{prefix}expert_weights.")
        saved = local_metadata.get("expert_map")
        if saved is not None and saved != self.placement.expert_map.to_json():
            problem = self._adopt(ExpertMap.from_json(saved), local_metadata["ep_rank"], held)
            rest[-1].extend([] if problem is None else [problem])  # load_state_dict raises these texts
        # only expert tensors count: a user may load a router on one rank and broadcast it. A rank without experts has
        # no expert tensors in its state, so there any key counts
        loaded = f"{prefix}expert_weights." if self.expert_weights.slots_of_expert else prefix
        if any(key.startswith(loaded) for key in state_dict):
            self._checks.state_loaded(self)
        self._checks.experts_loaded(self, held)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _adopt(self, saved: ExpertMap, ep_rank: int, held: set[int]) -> str | None:
        """Adopt the saved map if this is the rank's own state, and some rank would otherwise lack experts.

        A state that holds experts of other ranks too is loaded under the current map. A map for which the layer has no
        room is not adopted. All ranks decide in the same way.

        Args:
            saved: The map in the state's metadata.
            ep_rank: The rank that saved the state.
            held: The experts in the state.

        Returns:
            None, or why the map cannot be adopted.
        """
        if held != set(saved.local(ep_rank)) - {EMPTY} or self._routes_inside:
            return None
        now, ranks = self.placement.expert_map, range(saved.num_ranks)
        if saved.num_ranks == now.num_ranks and all({*now.local(r)} - {EMPTY} <= {*saved.local(r)} for r in ranks):
            return None
        if self.expert_weights.lora is not None:
            return (
                f"{self.name} has LoRA factors, which do not move between ranks, and the state dict was saved under "
                "another expert map; make the layer with that map (expert_map=), or load a distributed checkpoint of "
                "get_model_state_dict, which loads under any map"
            )
        try:
            self.placement.update(saved)
        except ConfigError:
            return None  # load_state_dict then reports the missing keys
        self.expert_weights.set_expert_map(saved)
        return None

    def _release_buffers(self) -> None:
        """Drop all references to buffers that the context is about to release."""
        self._graphs.drop()  # graphs hold addresses of these buffers
        self._dispatchers.clear()

    def extra_repr(self) -> str:
        """Describe the layer in one line, for `print`."""
        c = self.config
        return (
            f"{self.name}: H={c.hidden_size}, I={c.intermediate_size}, E={c.num_experts}, K={c.top_k}, "
            f"{c.activation.value}, ep={self.context.layout.ep}, etp={self.context.layout.etp}, "
            f"all2all={self.choice.all2all}, experts={self.choice.experts}, "
            f"quantization={self.expert_weights.scheme.name}"
            + ("" if self.tuned is None else f", tuned: {self._table}")
        )


def _experts_in(state_dict: Mapping[str, Any], prefix: str) -> set[int]:
    """Return the experts with a tensor in a state dict. LoRA factors do not count."""
    names = (key[len(prefix) :].partition(".")[0] for key in state_dict if key.startswith(prefix))
    return {int(name) for name in names if name.isdecimal()}
