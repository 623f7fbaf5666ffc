"""Choose the transport and the expert kernel of a layer, and explain the choice. The layer runs the chosen pair.

A fused kernel is listed under `experts`, with the all2all "inside". It is chosen only by name, never by "auto".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe import registry
from ep_moe.checks import check_count, did_you_mean
from ep_moe.config import PLAIN_WIRE, MoEConfig, ParallelConfig, Wire, load_model_config
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import NodeLimit
from ep_moe.quant.schemes import PLAIN, Scheme, scheme_of
from ep_moe.runtime.devices import as_device
from ep_moe.runtime.gpus import GPU, compute_capability, gpu_named
from ep_moe.selection.refusals import BackendCache, Refusals
from ep_moe.types import dtype_name

AUTO = "auto"
_MOST_RANKS = 1_000_000  # of a hypothetical layout, whose ranks are all enumerated


@dataclass(frozen=True)
class BackendChoice:
    """A pair of transport and kernel with its status.

    Args:
        all2all: The transport's name.
        experts: The kernel's name.
        status: "chosen", "possible" or "refused".
        reason: The reason of the status.
        trains: Whether both have a backward with this wire.
    """

    all2all: str
    experts: str
    status: str
    reason: str
    trains: bool = False

    def __str__(self) -> str:
        trains = "trains" if self.trains else ""
        return f"{self.status:8}  {self.all2all:17}  {self.experts:20}  {trains:6}  {self.reason}"


def explain(
    config: MoEConfig,
    layout: RankLayout,
    device: torch.device | GPU | str | int,
    dtype: torch.dtype,
    *,
    all2all: str = AUTO,
    experts: str = AUTO,
    scheme: Scheme = PLAIN,
    options: ExpertsOptions | None = None,
    max_tokens: int | None = None,
    wire: Wire | None = None,
    expert_map: ExpertMap | None = None,
    backends: BackendCache | None = None,
) -> list[BackendChoice]:
    """List all pairs of transport and kernel with their status.

    Args:
        config: The layer's configuration.
        layout: The layout of the ranks.
        device: The layer's device. It need not exist here if it is a torch.device or a `GPU`.
        dtype: The layer's dtype.
        all2all: The name of the only transport to admit, or "auto".
        experts: The name of the only kernel to admit, or "auto".
        scheme: The quantization of the experts.
        options: The kernel's options.
        max_tokens: The most tokens that a rank sends in one call, None for any number.
        wire: The format of rows during transport.
        expert_map: The placement of experts. Fused kernels support only some maps. The number of nodes per token, which
            is in the reason of `hierarchical`, depends on it. Default: fused kernels are not checked against a map, and
            nodes are those of the linear map.
        backends: The registry as read for an earlier table of the same device. Default: read it again.

    Returns:
        One row per pair, the best first.

    Raises:
        ConfigError: A name is unknown.
    """
    options, wire = options or ExpertsOptions(), wire or PLAIN_WIRE
    if not isinstance(device, torch.device | GPU):  # these need not exist on this host, so they are not checked
        device = as_device(device)
    _check_names(all2all, experts)
    backends = backends or BackendCache(device)
    asked = Refusals(backends, config, layout, device, dtype, scheme, options, max_tokens, wire, expert_map)
    ours, others = _ranked(asked.backends, config, layout)
    fused = [
        (INSIDE, kernel, f"all in one, where experts={kernel!r} is asked for", asked.of_fused(kernel))
        for kernel in registry.targets("fused")
    ]
    table: list[BackendChoice] = []
    for transport, kernel, why, reason in [*_pairs(asked, ours), *fused, *_pairs(asked, others)]:
        if reason is None and all2all not in (AUTO, transport):
            reason = f"all2all={all2all!r} was asked for"
        if reason is None and experts not in (AUTO, kernel):
            reason = f"experts={experts!r} was asked for"
        taken = any(row.status == "chosen" for row in table) or (transport == INSIDE and experts == AUTO)
        if reason is None and (doubt := untested_warning(kernel, device)) is not None:
            why = f"{why}; {doubt}"
        status = "refused" if reason else "possible" if taken else "chosen"
        table.append(BackendChoice(transport, kernel, status, reason or why, asked.trains(transport, kernel)))
    return table


def _pairs(asked: Refusals, transports: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield for each transport and kernel: the names, the reason to prefer the pair, and why it is refused or None."""
    limit = NodeLimit.of(asked.config, asked.layout, asked.expert_map)
    kernels = _ahead("experts", dict.fromkeys(registry.targets("experts"), ""))
    for transport, why in transports:
        for kernel, stated in kernels.items():
            reason = asked.of_pair(transport, kernel)
            text = f"{why}; {kernel} is {stated}" if stated else why
            if reason is None:
                sender = asked.backends.load("dispatchers", transport)
                if limit is not None and sender.once_per_node:
                    text = f"{text}; {limit}"
                if asked.max_tokens is None and sender.capabilities.grows:
                    text = f"{text}; its buffers grow with the calls, and max_tokens makes them once, for CUDA graphs"
            yield transport, kernel, text, reason


def choose(
    config: MoEConfig,
    layout: RankLayout,
    device: torch.device | GPU | str | int,
    dtype: torch.dtype,
    *,
    all2all: str = AUTO,
    experts: str = AUTO,
    scheme: Scheme = PLAIN,
    options: ExpertsOptions | None = None,
    max_tokens: int | None = None,
    wire: Wire | None = None,
    expert_map: ExpertMap | None = None,
    backends: BackendCache | None = None,
) -> BackendChoice:
    """Choose the best pair of transport and kernel.

    Args:
        config: The layer's configuration.
        layout: The layout of the ranks.
        device: The layer's device. It need not exist here if it is a torch.device or a `GPU`.
        dtype: The layer's dtype.
        all2all: The name of the only transport to admit, or "auto".
        experts: The name of the only kernel to admit, or "auto".
        scheme: The quantization of the experts.
        options: The kernel's options.
        max_tokens: The most tokens that a rank sends in one call, None for any number.
        wire: The format of rows during transport.
        expert_map: The placement of experts; see `explain`.
        backends: See `explain`.

    Returns:
        The row with the status "chosen".

    Raises:
        ConfigError: A name is unknown.
        BackendUnavailable: No admitted pair can run. The message has the reasons, and the pairs that can run.
    """
    rest: dict[str, Any] = {
        "scheme": scheme,
        "options": options,
        "max_tokens": max_tokens,
        "wire": wire,
        "expert_map": expert_map,
        "backends": backends,
    }
    table = explain(config, layout, device, dtype, all2all=all2all, experts=experts, **rest)
    for row in table:
        if row.status == "chosen":
            return row
    named = [row for row in table if all2all in (AUTO, row.all2all) and experts in (AUTO, row.experts)]
    reasons = _reasons(named) if named else f"{experts} has a built-in all2all; leave all2all={AUTO!r}"
    free = explain(config, layout, device, dtype, **rest)
    able = ", ".join(f"{row.all2all} with {row.experts}" for row in free if row.status != "refused") or "none"
    raise BackendUnavailable(
        f"all2all={all2all!r} with experts={experts!r} cannot run here ({reasons}). Pairs that can: {able}"
    )


def _reasons(rows: list[BackendChoice]) -> str:
    """Join the reasons of pairs whose backends are installed, and the names of backends that are not.

    If no pair is installed, join the reasons of all.
    """
    here = [row for row in rows if not _missing(row)]
    pairs: dict[str, list[str]] = {}
    for row in here or rows:
        pairs.setdefault(row.reason, []).append(f"{row.all2all} with {row.experts}")
    if len(pairs) == 1:
        (found,) = pairs
    else:
        found = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in pairs.items())
    absent = sorted({name for row in rows for name in _missing(row)}) if here else []
    return f"{found}; not installed: {', '.join(absent)} (see ep-moe doctor)" if absent else found


def _missing(row: BackendChoice) -> list[str]:
    """Return the names of a pair's backends that cannot run in this installation."""
    both: list[tuple[registry.Kind, str]] = [("dispatchers", row.all2all), ("experts", row.experts)]
    named: list[tuple[registry.Kind, str]] = [("fused", row.experts)] if row.all2all == INSIDE else both
    return [name for kind, name in named if registry.unsupported_reason(kind, name) is not None]


def explain_model(
    config: str | MoEConfig,
    parallel: ParallelConfig,
    all2all: str = AUTO,
    experts: str = AUTO,
    quantization: str = PLAIN.name,
    dtype: str = "bfloat16",
    max_tokens: int | None = None,
    wire: Wire | None = None,
    ranks_per_node: int | None = None,
    gpu: str | None = None,
) -> list[BackendChoice]:
    """Run `explain` for a model configuration, with the arguments of a command line.

    Args:
        config: The name of a bundled configuration, a TOML file, or a layer's configuration.
        parallel: The sizes of the groups of ranks.
        all2all: See `explain`.
        experts: See `explain`.
        quantization: The name of a scheme.
        dtype: "bfloat16", "float16" or "float32".
        max_tokens: The most tokens of a rank, None for any number.
        wire: See `explain`.
        ranks_per_node: The number of consecutive ranks on each node. Default: all ranks.
        gpu: A GPU of `ep_moe.runtime.gpus.GPUS`, which need not exist here. Default: this host's device.

    Returns:
        One row per pair, the best first.

    Raises:
        ConfigError: A name or a number is wrong.
    """
    dtypes = {dtype_name(known): known for known in (torch.bfloat16, torch.float16, torch.float32)}
    if dtype not in dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(dtypes)}, got {dtype!r}")
    world = parallel.pp * parallel.dp * parallel.tp
    if world > _MOST_RANKS:
        raise ConfigError(f"dp * tp must be at most {_MOST_RANKS} ranks, got {world}")
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, at_least=1)
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node, at_least=1)
    device: torch.device | GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nodes = None if ranks_per_node is None else NodeLayout.from_ranks_per_node(range(world), ranks_per_node)
    if gpu is not None:
        per_node = ranks_per_node or world
        device, nodes = gpu_named(gpu), NodeLayout.from_ranks_per_node(range(world), per_node, gpus=per_node)
    layout = RankLayout.from_config(parallel, world=world, rank=0, nodes=nodes)
    most = None if max_tokens is None else layout.max_dispatch_tokens(max_tokens)
    return explain(
        config if isinstance(config, MoEConfig) else load_model_config(config).moe,
        layout,
        device,
        dtypes[dtype],
        all2all=all2all,
        experts=experts,
        scheme=scheme_of(quantization),
        max_tokens=most,
        wire=wire,
    )


def _check_names(all2all: str, experts: str) -> None:
    if all2all != AUTO:
        registry.check("dispatchers", all2all)
    kernels, fused = registry.targets("experts"), registry.targets("fused")
    if experts not in (AUTO, *kernels, *fused):
        hint = did_you_mean(experts, [*kernels, *fused])
        raise ConfigError(
            f"no backend among experts is named {experts!r}{hint}; there are {', '.join(kernels)}, and fused ones: "
            f"{', '.join(fused)}"
        )


def _ranked(
    backends: BackendCache, config: MoEConfig, layout: RankLayout
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return two lists of (transport, reason of its place in the order), best first.

    The first has the built-in transports, and those of other packages that state a place among them. The second has the
    remaining ones of other packages.
    """
    kinds = {name: backends.load("dispatchers", name) for name in registry.built_in("dispatchers")}
    places = {name: kind.preference(config.top_k, layout) for name, kind in kinds.items()}
    order = {name: places[name][1] for name in sorted(places, key=lambda name: places[name][0])}
    order = _ahead("dispatchers", order)
    others = {name: "registered by another package" for name in registry.targets("dispatchers") if name not in order}
    return list(order.items()), list(others.items())


def _ahead(kind: registry.Kind, order: dict[str, str]) -> dict[str, str]:
    """Move plug-ins ahead of the backends that their `capabilities.ahead_of` names. Return names with reasons."""
    names = list(order)
    reasons = dict(order)
    stated = {
        name: registry.load(kind, name).capabilities.ahead_of
        for name in registry.targets(kind)
        if registry.is_plugin(kind, name) and registry.unsupported_reason(kind, name) is None
    }
    for name, named in [*stated.items()] * len(stated):  # repeated, because plug-ins may name each other
        places = [names.index(other) for other in named if other in names and other != name]
        if places and not (name in names and names.index(name) < min(places)):
            first = names[min(places)]
            if name in names:
                names.remove(name)
            names.insert(names.index(first), name)
            reasons[name] = f"of another package, which ranks it ahead of {', '.join(sorted(named))}"
    return {name: reasons[name] for name in names}


def untested_warning(kernel: str, device: torch.device | GPU) -> str | None:
    """Return a warning if a kernel has not been tested on a GPU's compute capability.

    Args:
        kernel: The name of the kernel.
        device: The device to run it on.

    Returns:
        The warning, or None if the kernel was tested or does not run on a GPU.
    """
    if device.type != "cuda":
        return None
    kind: registry.Kind = "experts" if kernel in registry.targets("experts") else "fused"
    tested, found = registry.load(kind, kernel).capabilities.tested_capabilities, compute_capability(device)
    if tested is None or found in tested:
        return None
    return f"{kernel} was NOT RUN on compute capability {found[0]}.{found[1]} yet"
