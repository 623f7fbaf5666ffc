"""Registers ep_moe as an expert-parallel implementation of transformers, which loads, shards and saves the model.

    register_ep_implementation()
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_moe")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

transformers holds the expert parameters, and a layer holds none. Each call borrows the tensors that transformers has
on this rank. Their gradients flow back to transformers' parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_moe import registry
from ep_moe.config import MoEConfig, ParallelConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations.find_experts import TOP_K, config_of, numbers_of
from ep_moe.integrations.generic import routed_by_model, routing_of
from ep_moe.layer import MoELayer
from ep_moe.parallel.groups import DEADLINE_S, local_device
from ep_moe.runtime.devices import aligned
from ep_moe.selection import explain
from ep_moe.selection.tuned import Kernel
from ep_moe.weights.borrowed import BorrowedWeights
from ep_moe.weights.layouts.base import WeightLayout

SINCE = "5.23"  # first version of transformers with `EPImplementationInterface`


class BorrowingLayer(MoELayer):
    """A layer without weights of its own: each call borrows its experts."""

    _weights_class = BorrowedWeights
    expert_weights: BorrowedWeights

    def capture(self, tokens: Sequence[int]) -> NoReturn:
        self._refuse_alone("capture")

    def capture_routed(self, tokens: Sequence[int]) -> NoReturn:
        self._refuse_alone("capture_routed")

    def _tune_kernel(self, kernel: Kernel, rows: Sequence[int], cache: str | Path | None = None) -> NoReturn:
        self._refuse_alone("tune")

    def _refuse_alone(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what} needs the weights of {self.name}, which belong to a transformers model; load the model with "
            f"ep_moe.integrations.transformers.load_pretrained to {what} it"
        )


@dataclass(frozen=True)
class EPOptions:
    """The arguments of `register_ep_implementation`."""

    all2all: str
    experts: str
    options: ExpertsOptions
    max_tokens: int | None
    top_k: int | None
    deadline_s: float


def register_ep_implementation(
    name: str = "ep_moe",
    *,
    all2all: str = explain.AUTO,
    experts: str = explain.AUTO,
    options: ExpertsOptions | None = None,
    max_tokens: int | None = None,
    top_k: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Register ep_moe under `DistributedConfig(ep_implementation=...)` of transformers, for models loaded afterwards.

    Call it on all ranks with the same arguments. transformers loads, shards and saves the model, and holds its
    parameters. ep_moe moves the tokens and computes the experts. A second call replaces the first.

    Args:
        name: The value of `ep_implementation` that selects ep_moe.
        all2all: A transport's name, or "auto".
        experts: The name of a kernel that reads weights as transformers holds them, or "auto". Calls with gradients
            need a transport and a kernel with a backward; "auto" selects such a pair.
        options: How the expert kernel runs.
        max_tokens: The most tokens of a rank in one call. Transports allocate buffers of this size once. Default: no
            limit.
        top_k: The most experts that a token takes. Default: the value in the model's configuration.
        deadline_s: Seconds after which a collective step examines its peers.

    Raises:
        ConfigError: The installed transformers has no `EPImplementationInterface`, or has an implementation of its own
            under this name.
    """
    try:
        from transformers.distributed import expert_parallel
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError as error:
        raise ConfigError(
            f"transformers {transformers.__version__} has no EPImplementationInterface; install transformers {SINCE} "
            f"or newer, or use ep_moe.integrations.transformers.load_pretrained"
        ) from error
    if not issubclass(EPImplementationInterface().get(name, _Ours), _Ours):
        raise ConfigError(f"name={name!r} is an implementation of transformers; leave the default name 'ep_moe'")
    asked = EPOptions(all2all, experts, options or ExpertsOptions(), max_tokens, top_k, deadline_s)
    contexts = _Contexts()

    class Implementation(_Ours, expert_parallel.EPImplementation):  # type: ignore[misc]
        """One experts module of a model."""

        def __init__(self, module: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(module, ep_mesh, tp_mesh)
            self.borrower = Borrower(module, contexts.of(ep_mesh, tp_mesh, asked), asked)
            module.__dict__["ep_moe_borrower"] = (
                self.borrower
            )  # for `borrowing_layers`; in `__dict__` and not a Module, so it is in no state_dict

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.borrower(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(name, Implementation)


class _Ours:
    """Marks the classes that `register_ep_implementation` registers."""


class Borrower:
    """Lends the parameters of one module of experts to the layer that computes a call.

    Args:
        experts: A module on transformers' experts interface, whose parameters are sharded over the EP group.
        context: The ranks.
        asked: The user's options.

    Raises:
        ConfigError: On all ranks, if no layer computes what the module does.
    """

    def __init__(self, experts: Any, context: EPContext, asked: EPOptions) -> None:
        self._experts, self._asked = experts, asked
        self.context = context
        kind = type(experts).__name__
        found = [asked.top_k] if asked.top_k is not None else numbers_of([experts.config])
        if not found:
            raise ConfigError(
                f"the configuration of {kind} does not say how many experts a token takes (none of "
                f"{', '.join(TOP_K)}); call register_ep_implementation(top_k=...)"
            )
        config = config_of(experts, kind, max(found))
        matrices = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        names = ("w13", "w2")
        self._names = dict(zip(names, matrices, strict=True))
        if experts.has_bias:
            self._names |= {f"{ours}_bias": f"{theirs}_bias" for ours, theirs in self._names.items()}
        dtype = getattr(experts, matrices[0]).dtype
        self.layer = self._make(config, dtype, trains=False)
        self.trained: BorrowingLayer | None = None  # for calls with gradients, if `layer` has no backward
        self.no_backward: str | None = None
        if not _trains(self.layer):
            try:
                self.trained = self._make(config, dtype, trains=True)
            except ConfigError as error:
                self.no_backward = str(error)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of this rank's tokens. The module's parameters must be local tensors, not DTensors.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, k], logical ids.
            top_k_weights: [T, k].

        Returns:
            [T, H].

        Raises:
            InputError: On all ranks, if an argument of any rank is invalid.
        """
        tensors = self._canonical()
        differentiated = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (hidden_states, top_k_weights, *tensors.values())
        )
        layer = self.layer
        if differentiated and not _trains(layer):
            if self.trained is None:
                self.layer._refuse(f"{self.layer.name}: a call with gradients: {self.no_backward}")
            layer = self.trained
        chosen, most = top_k_index.shape[-1], layer.config.top_k
        if chosen > most:
            layer._refuse(
                f"{layer.name}: the model chooses {chosen} experts a token, and its configuration says {most}; call "
                f"register_ep_implementation(top_k={chosen}) before from_pretrained"
            )
        routing = routing_of(top_k_index, top_k_weights, layer.config.num_experts, layer.config.top_k, distinct=False)
        with layer.expert_weights.borrow(tensors):
            out: Tensor = layer.forward_routed(hidden_states, routing)
        # without the clone, FSDP2's hook on a view would be lost when a model adds to the result in place
        return out.clone() if differentiated else out

    def _canonical(self) -> dict[str, Tensor]:
        """Return the module's parameters in our layout, by our names.

        They are not copied, unless they are transposed, or gate and up are interleaved.
        """
        experts = self._experts
        found = {ours: getattr(experts, theirs) for ours, theirs in self._names.items()}
        if experts.is_transposed:
            found |= {name: found[name].mT for name in ("w13", "w2")}
        if experts.has_gate and not experts.is_concatenated:
            for name in ("w13", "w13_bias"):
                if name in found:
                    found[name] = torch.cat([found[name][:, ::2], found[name][:, 1::2]], 1)
        return {name: aligned(tensor.contiguous()) for name, tensor in found.items()}

    def _make(self, config: MoEConfig, dtype: torch.dtype, *, trains: bool) -> BorrowingLayer:
        asked, context = self._asked, self.context
        chosen = _choose(config, context, dtype, asked, trains=trains)
        return BorrowingLayer(
            config,
            context,
            router=routed_by_model,
            all2all=chosen.all2all,
            experts=chosen.experts,
            options=asked.options,
            dtype=dtype,
            device=context.device,
        )


def borrowing_layers(model: nn.Module) -> list[MoELayer]:
    """List the layers of a model that was loaded with `ep_implementation="ep_moe"`.

    Args:
        model: The model that `from_pretrained` returned.

    Returns:
        Its layers in order, with the separate layers for calls with gradients.
    """
    found = [one for module in model.modules() if isinstance(one := getattr(module, "ep_moe_borrower", None), Borrower)]
    return [layer for one in found for layer in (one.layer, one.trained) if layer is not None]


def _trains(layer: MoELayer) -> bool:
    return _without_backward(layer.choice) is None


def _without_backward(choice: explain.BackendChoice) -> str | None:
    """Return the name of the kernel or transport that has no backward; None if both have one."""
    kernel, transport = registry.load("experts", choice.experts), registry.load("dispatchers", choice.all2all)
    can = transport.capabilities
    if not kernel.capabilities.differentiable:
        return str(kernel.name)
    return None if can.differentiable or can.adjoint else str(transport.name)


def _choose(
    config: MoEConfig, context: EPContext, dtype: torch.dtype, asked: EPOptions, *, trains: bool
) -> explain.BackendChoice:
    """Return the first pair whose kernel reads canonical weights, and that has a backward if `trains`."""
    table = explain.explain(
        config,
        context.layout,
        context.device,
        dtype,
        all2all=asked.all2all,
        experts=asked.experts,
        options=asked.options,
        max_tokens=context._max_dispatch_tokens,
    )
    reasons: dict[str, None] = {}
    for row in table:
        reason = row.reason if row.status == "refused" else _unfit(row, trains)
        if reason is None:
            return row
        if asked.all2all in (explain.AUTO, row.all2all) and asked.experts in (explain.AUTO, row.experts):
            reasons[reason] = None
    what = "a backward, and reads" if trains else "room for"
    raise ConfigError(
        f"no pair of all2all={asked.all2all!r} and experts={asked.experts!r} has {what} weights as transformers holds "
        f"them: {'; '.join(reasons)}; leave all2all and experts of register_ep_implementation at 'auto'"
    )


def _unfit(row: explain.BackendChoice, trains: bool) -> str | None:
    if row.experts not in registry.targets("experts"):
        return f"{row.experts} is a fused kernel with a weight layout of its own"
    if registry.load("experts", row.experts).weight_layout is not WeightLayout:
        return f"{row.experts} has a weight layout of its own, and would hold the experts a second time"
    if trains and (name := _without_backward(row)) is not None:
        return f"{name} has no backward"
    return None


class _Contexts:
    """Holds the context of the model that is being loaded: one for all its experts modules, another for each model."""

    def __init__(self) -> None:
        self._mesh: weakref.ref[DeviceMesh] | None = None
        self._context: weakref.ref[EPContext] | None = None

    def of(self, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, asked: EPOptions) -> EPContext:
        """Return the context of a mesh. The first call with a mesh creates it, which is collective."""
        known = None if self._context is None else self._context()
        if known is not None and self._mesh is not None and self._mesh() is ep_mesh:
            return known
        world, tp, ep = dist.get_world_size(), tp_mesh.size(), ep_mesh.size()
        made = EPContext.from_groups(
            ParallelConfig(dp=world // tp, tp=tp, ep=ep),
            {kind: mesh.get_group() for kind, mesh in (("ep", ep_mesh), ("tp", tp_mesh)) if mesh.size() > 1},
            device=local_device() if ep_mesh.device_type == "cuda" else ep_mesh.device_type,
            deadline_s=asked.deadline_s,
            max_tokens=asked.max_tokens,
        )
        self._mesh, self._context = weakref.ref(ep_mesh), weakref.ref(made)
        return made
