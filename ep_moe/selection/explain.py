"""Which transport and which expert kernel serve a layer, and why. The layer runs what this module prints.

A fused kernel stands under `experts`, its all2all is "inside". It runs where it is named, never by "auto".
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
from ep_moe.selection.refusals import Backends, Refusals
from ep_moe.types import dtype_name

AUTO = "auto"
_MOST_RANKS = 1_000_000  # of a layout on paper: all of them are listed


@dataclass(frozen=True)
class BackendChoice:
    """One pair of transport and kernel.

    Args:
        all2all: The transport's name.
        experts: The kernel's name.
        status: "chosen", "possible" or "refused".
        reason: Why.
        trains: Whether both have a backward, over this wire.
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
    backends: Backends | None = None,
) -> list[BackendChoice]:
    """List every pair of transport and kernel with its status.

    Args:
        config: The layer.
        layout: Of the ranks.
        device: Of the layer; a torch.device of a kind that is not here, or a `GPU`, is explained too.
        dtype: Of the layer.
        all2all: A transport's name, which admits only that one, or "auto".
        experts: A kernel's name, which admits only that one, or "auto".
        scheme: How the experts are quantized.
        options: How the kernel shall run.
        max_tokens: The most tokens that a rank sends in one call, None for any number.
        wire: How rows are written while they travel.
        expert_map: Where experts are. Any fused kernel serves some maps only; the nodes of a token depend on it, which
            `hierarchical` states. Default: not considered, the linear map for the nodes.
        backends: The registry as another table has read it, for the same device. Default: read anew.

    Returns:
        A row per pair, the best first.

    Raises:
        ConfigError: a name is unknown.
    """
    options, wire = options or ExpertsOptions(), wire or PLAIN_WIRE
    if not isinstance(device, torch.device | GPU):  # one of a kind that is not here is explained too
        device = as_device(device)
    _check_names(all2all, experts)
    backends = backends or Backends(device)
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
        if reason is None and (doubt := untried(kernel, device)) is not None:
            why = f"{why}; {doubt}"
        status = "refused" if reason else "possible" if taken else "chosen"
        table.append(BackendChoice(transport, kernel, status, reason or why, asked.trains(transport, kernel)))
    return table


def _pairs(asked: Refusals, transports: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, str | None]]:
    """Of these transports with each kernel: names, what speaks for the pair, and why it is refused, or None."""
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
    backends: Backends | None = None,
) -> BackendChoice:
    """Choose the best pair of transport and kernel.

    Args:
        config: The layer.
        layout: Of the ranks.
        device: Of the layer; a torch.device of a kind that is not here, or a `GPU`, is explained too.
        dtype: Of the layer.
        all2all: A transport's name, which admits only that one, or "auto".
        experts: A kernel's name, which admits only that one, or "auto".
        scheme: How the experts are quantized.
        options: How the kernel shall run.
        max_tokens: The most tokens that a rank sends in one call, None for any number.
        wire: How rows are written while they travel.
        expert_map: Where experts are; any fused kernel serves some maps only. Default: not considered.
        backends: As for `explain`.

    Returns:
        The row whose status is "chosen".

    Raises:
        ConfigError: a name is unknown.
        BackendUnavailable: what was named cannot run; with the reasons, and the pairs that can.
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
    reasons = _reasons(named) if named else f"{experts} has its all2all inside; leave all2all={AUTO!r}"
    free = explain(config, layout, device, dtype, **rest)
    able = ", ".join(f"{row.all2all} with {row.experts}" for row in free if row.status != "refused") or "none"
    raise BackendUnavailable(
        f"all2all={all2all!r} with experts={experts!r} cannot run here ({reasons}). Pairs that can: {able}"
    )


def _reasons(rows: list[BackendChoice]) -> str:
    """Of what is installed, and the names of what is not; of that, where nothing is."""
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
    """Its backends that cannot run in this installation."""
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
    """Run `explain` for a model config on this machine, from names as a command line has them.

    Args:
        config: The name of a bundled config, a TOML file, or a layer's own.
        parallel: Sizes of the groups of ranks.
        all2all: As for `explain`.
        experts: As for `explain`.
        quantization: A scheme's name.
        dtype: "bfloat16", "float16" or "float32".
        max_tokens: The most tokens of a rank, None for any number.
        wire: As for `explain`.
        ranks_per_node: So many consecutive ranks share a node. Default: all.
        gpu: A kind of GPU that need not be here, of `ep_moe.runtime.gpus.GPUS`. Default: what is here.

    Returns:
        A row per pair, the best first.

    Raises:
        ConfigError: a name or a number is wrong.
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
    nodes = None if ranks_per_node is None else NodeLayout.counted(range(world), ranks_per_node)
    if gpu is not None:
        per_node = ranks_per_node or world
        device, nodes = gpu_named(gpu), NodeLayout.counted(range(world), per_node, gpus=per_node)
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
    backends: Backends, config: MoEConfig, layout: RankLayout
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Transports, best first, each with the reason for its place: ours, with those of other packages that state a
    place among them, and the rest of these."""
    kinds = {name: backends.load("dispatchers", name) for name in registry.built_in("dispatchers")}
    places = {name: kind.preference(config.top_k, layout) for name, kind in kinds.items()}
    order = {name: places[name][1] for name in sorted(places, key=lambda name: places[name][0])}
    order = _ahead("dispatchers", order)
    others = {name: "registered by another package" for name in registry.targets("dispatchers") if name not in order}
    return list(order.items()), list(others.items())


def _ahead(kind: registry.Kind, order: dict[str, str]) -> dict[str, str]:
    """The same order, with plug-ins ahead of the backends that their `capabilities.ahead_of` names."""
    names = list(order)
    reasons = dict(order)
    stated = {
        name: registry.load(kind, name).capabilities.ahead_of
        for name in registry.targets(kind)
        if registry.is_plugin(kind, name) and registry.unsupported_reason(kind, name) is None
    }
    for name, named in [*stated.items()] * len(stated):  # again, for those that name each other
        places = [names.index(other) for other in named if other in names and other != name]
        if places and not (name in names and names.index(name) < min(places)):
            first = names[min(places)]
            if name in names:
                names.remove(name)
            names.insert(names.index(first), name)
            reasons[name] = f"of another package, by its own word ahead of {', '.join(sorted(named))}"
    return {name: reasons[name] for name in names}


def untried(kernel: str, device: torch.device | GPU) -> str | None:
    """Say whether a kernel was run on a kind of GPU by those who wrote it.

    Args:
        kernel: A name.
        device: Where it would run.

    Returns:
        None, or a sentence that it was not.
    """
    if device.type != "cuda":
        return None
    kind: registry.Kind = "experts" if kernel in registry.targets("experts") else "fused"
    tested, found = registry.load(kind, kernel).capabilities.tested_capabilities, compute_capability(device)
    if tested is None or found in tested:
        return None
    return f"{kernel} was NOT RUN on compute capability {found[0]}.{found[1]} yet"
