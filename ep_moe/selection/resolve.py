"""Resolve a layer's backends and expert map, and warn if it trains slowly.

All ranks of a context make the same choice, or raise the same error.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe import registry
from ep_moe.checks import check_kind, flat_facts, shown, with_article
from ep_moe.config import MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.execution.exchange import check_pipeline
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE, FusedExperts
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import scheme_of
from ep_moe.router import Router
from ep_moe.runtime.devices import as_device
from ep_moe.selection import explain
from ep_moe.selection.backend_table import BackendTable, TableEntry, tuned_table
from ep_moe.selection.refusals import BackendCache
from ep_moe.selection.tuned import Tuned, layer_facts, machine_facts, versions
from ep_moe.types import dtype_name

_log = logging.getLogger("ep_moe.selection")


@dataclass(frozen=True)
class LayerRequest:
    """The arguments of `MoELayer` that determine its backends.

    Args:
        all2all: A transport's name, or "auto".
        experts: A kernel's name, or "auto".
        quantization: The name of a scheme.
        wire: The format of rows during transport.
        pipeline: The number of tokens of a part, or None.
        options: The kernel's options.
        dtype: The layer's dtype.
        router: A module, or None for the layer's own.
        tuned: The contents of a file of `ep-moe tune`, or None.
        shared: A module of shared experts, or None for the layer's own.
        device: The device, which must be the context's, or None.
    """

    all2all: str
    experts: str
    quantization: str
    wire: Wire
    pipeline: int | None
    options: ExpertsOptions
    dtype: torch.dtype
    router: Any
    tuned: Tuned | None = None
    shared: Any = None
    device: Any = None


def device_of(context: EPContext) -> torch.device:
    """Return a context's device.

    Args:
        context: The context that `MoELayer` was given.

    Returns:
        The device.

    Raises:
        ConfigError: The argument is not an `EPContext`.
    """
    check_kind("MoELayer: context", context, EPContext)
    return context.device


def resolve_backends(
    context: EPContext, name: str, config: MoEConfig, asked: LayerRequest, expert_map: ExpertMap | None
) -> tuple[BackendTable, ExpertMap, dict[str, Any]]:
    """Choose backends, and check that all ranks were given the same layer. Collective.

    Args:
        context: The context of the layer.
        name: The name of the layer.
        config: The layer's configuration.
        asked: The user's request.
        expert_map: The placement of experts. Default: `ExpertMap.linear`, experts in order over the ranks.

    Returns:
        The table of backends, the map, and the keyword arguments of `explain` that led to the choice.

    Raises:
        EPMoEError: No backend can serve the layer, or ranks were given different layers. All ranks raise.
    """
    nothing = explain.BackendChoice("", "", "refused", "")
    table, problem, keywords = BackendTable([TableEntry(None, nothing, None, None)]), None, dict[str, Any]()
    if (wrong := _wrong_kind(config, asked, expert_map, name)) is not None:
        # compare only the name: arguments of a wrong type have no fields to compare
        context.consensus.require_equal(f"MoELayer {name}", {"layer": str(name)}, wrong)
        raise AssertionError("a problem is raised")
    try:
        if expert_map is None:
            expert_map = ExpertMap.linear(config.num_experts, context.layout.ep)
        _check_map(expert_map, config, context.layout.ep)
        keywords = {
            "all2all": asked.all2all,
            "experts": asked.experts,
            "scheme": scheme_of(asked.quantization),
            "options": asked.options,
            "wire": asked.wire,
            "expert_map": expert_map,
            "max_tokens": context._max_dispatch_tokens,
        }
        if asked.tuned is not None:
            _check_tuned(asked.tuned, context, config, asked)
            table = tuned_table(asked.tuned, config, context.layout, context.device, asked.dtype, keywords)
        else:
            if context._backends is None:
                context._backends = BackendCache(context.device)
            backends = context._backends
            choice = explain.choose(config, context.layout, context.device, asked.dtype, backends=backends, **keywords)
            if choice.all2all == INSIDE:
                _check_fused(choice.experts, asked)
            else:
                check_pipeline(asked.pipeline, context._max_dispatch_tokens, choice.all2all)
            most = context._max_dispatch_tokens
            table = BackendTable([TableEntry(most, choice, asked.pipeline, asked.pipeline or most)])
    except EPMoEError as error:
        problem = error
    context.consensus.require_equal(f"MoELayer {name}", _facts(name, config, asked, expert_map, table), problem)
    assert expert_map is not None
    _warn(context, asked, table.last.choice.experts)
    if context.layout.rank == 0:
        choice = table.last.choice
        _log.info("%s: all2all %s, experts %s: %s", name, choice.all2all, choice.experts, choice.reason)
    return table, expert_map, keywords


def _facts(
    name: str, config: MoEConfig, asked: LayerRequest, expert_map: ExpertMap | None, table: BackendTable
) -> dict[str, Any]:
    """Return the properties of a layer that ranks compare."""
    return {
        "layer": name,
        **flat_facts(config, "MoEConfig"),
        "expert_map": "" if expert_map is None else expert_map.to_json(),
        "dtype": dtype_name(asked.dtype),
        "quantization": asked.quantization,
        "router": "the layer's own" if asked.router is None else "given",
        "shared_experts": "the layer's own" if asked.shared is None else "given",
        **flat_facts(asked.options, "ExpertsOptions"),
        **flat_facts(asked.wire, "Wire"),
        "pipeline": asked.pipeline,
        "all2all": table.last.choice.all2all,
        "experts": table.last.choice.experts,
        "tuned": None if asked.tuned is None else str(table),
    }


def _wrong_kind(config: MoEConfig, asked: LayerRequest, expert_map: ExpertMap | None, name: str) -> ConfigError | None:
    for field, value, kinds, remedy in (
        ("config", config, (MoEConfig,), "MoEConfig(hidden_size=..., ...)"),
        ("wire", asked.wire, (Wire,), "Wire(dispatch=...)"),
        ("options", asked.options, (ExpertsOptions,), "ExpertsOptions(...)"),
        ("dtype", asked.dtype, (torch.dtype,), "torch.bfloat16 or its like"),
        ("tuned", asked.tuned, (Tuned, type(None)), "Tuned.load(path)"),
        ("expert_map", expert_map, (ExpertMap, type(None)), "ExpertMap.load(path) or another of its constructors"),
        ("all2all", asked.all2all, (str,), "the name of a transport, or 'auto'"),
        ("experts", asked.experts, (str,), "the name of a kernel, or 'auto'"),
        ("quantization", asked.quantization, (str,), "the name of a scheme, such as 'none' or 'fp8_block'"),
        ("name", name, (str,), "a name for errors, or None"),
    ):
        if not isinstance(value, kinds):
            return ConfigError(f"{field} must be {with_article(kinds[0].__name__)}, got {shown(value)}; give {remedy}")
    if not asked.dtype.is_floating_point or asked.dtype.itemsize == 1:
        return ConfigError(f"dtype must be that of activations, got {dtype_name(asked.dtype)}; give torch.bfloat16")
    if asked.device is not None:
        try:
            as_device(asked.device)
        except ConfigError as error:
            return error
    for field, given in (("router", asked.router), ("shared_experts", asked.shared)):
        if given is not None and not callable(given):
            return ConfigError(f"{field} must be a module, or None for the layer's own, got {shown(given)}")
        if given is not None and asked.options.exact and not getattr(given, "exact", False):
            return ConfigError(
                f"{field}={type(given).__name__} does not declare that a row's result is bitwise equal in every "
                f"batch, which ExpertsOptions.exact promises; leave {field}=None, or set exact=True on a module that "
                "ensures this (ep_moe.runtime.batch_invariant has the operations)"
            )
    return None


def _check_tuned(tuned: Tuned, context: EPContext, config: MoEConfig, asked: LayerRequest) -> None:
    for name, value, free in (
        ("all2all", asked.all2all, explain.AUTO),
        ("experts", asked.experts, explain.AUTO),
        ("pipeline", asked.pipeline, None),
    ):
        if value != free:
            raise ConfigError(
                f"{name}={value!r} and tuned are both given, and tuned sets {name} per number of tokens; leave out "
                "one of them"
            )
    if context._max_dispatch_tokens is None:
        raise ConfigError(
            "tuned chooses backends by the token limit; set it with EPContext.from_torchrun(max_tokens=...)"
        )
    layout = context.layout
    here = machine_facts(context.device, layout.ep, layout.etp, layout.ep_node_count)
    wrong = tuned.mismatch(here, layer_facts(config, asked.quantization, asked.wire, asked.dtype))
    if wrong is not None:
        raise ConfigError(f"tuned is for another machine or layer: {wrong}; run ep-moe tune for this one")


def _warn(context: EPContext, asked: LayerRequest, experts: str) -> None:
    if asked.tuned is not None:
        if (changed := asked.tuned.other_versions(versions())) is not None:
            warnings.warn(f"tuned was measured with other software ({changed}); consider tuning again", stacklevel=6)
    elif asked.experts == explain.AUTO and (doubt := explain.untested_warning(experts, context.device)) is not None:
        warnings.warn(
            f"{doubt}; see whether tests/gpu of ep_moe's repository passes on this GPU, then name experts={experts!r}",
            stacklevel=6,
        )


def _check_map(expert_map: ExpertMap, config: MoEConfig, ranks: int) -> None:
    for name, value in (("num_experts", config.num_experts), ("num_ranks", ranks)):
        if getattr(expert_map, name) != value:
            raise ConfigError(
                f"expert_map.{name} must be {value} for this layer and context, got {getattr(expert_map, name)}"
            )


def _check_fused(name: str, asked: LayerRequest) -> None:
    """Raise ConfigError for arguments that a fused kernel does not support and `explain.choose` does not check."""
    if asked.pipeline is not None:
        raise ConfigError(f"pipeline={asked.pipeline!r} is not supported by experts={name}; leave pipeline out")
    kind: type[FusedExperts] = registry.load("fused", name)
    if kind.capabilities.routes and not (asked.router is None or isinstance(asked.router, Router)):
        raise ConfigError(
            f"experts={name} has a built-in router, which computes as ep_moe.router.Router; leave router=None, or "
            f"choose other experts, got {type(asked.router).__name__}"
        )


class SlowTraining:
    """Warns once if a layer trains slowly. All ranks have the same backends, so all of them warn."""

    def __init__(self) -> None:
        self._checked = False

    def warn_once(self, layer: Any) -> None:
        """Warn at the first call with gradients, if "auto" chose `reference` on a GPU.

        Args:
            layer: A MoELayer.
        """
        if self._checked or torch.compiler.is_compiling():
            return
        self._checked = True
        if layer.context.device.type != "cuda" or layer.choice.experts != "reference":
            return
        if layer._asked["experts"] != explain.AUTO:
            return
        kernels = {name for name in registry.targets("experts") if registry.load("experts", name).own_backward}
        rows = [r for r in layer.explain() if r.experts in kernels and r.all2all == layer.choice.all2all]
        if not rows:
            return
        dtype = dtype_name(layer.dtype)
        built = f"the layer was built in another dtype, and converted to {dtype}; pass dtype=torch.{dtype} to MoELayer"
        text = "; ".join(f"{row.experts}: {row.reason if row.status == 'refused' else built}" for row in rows)
        warnings.warn(
            f"{layer.name} is trained with experts=reference, in plain torch, several times slower than a kernel "
            f"with its own backward ({text}); pass experts='reference' to silence this warning",
            stacklevel=2,
        )
