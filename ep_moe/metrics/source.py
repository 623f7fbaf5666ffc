"""Snapshots of a context's layers and of balancers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ep_moe import registry
from ep_moe.checks import check_flag, check_kind
from ep_moe.context import EPContext
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.stats import BalancerStats
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.experts.fused.base import INSIDE
from ep_moe.layer import MoELayer
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.placement.placement import balancedness
from ep_moe.runtime.devices import on_device_of
from ep_moe.runtime.profiling import StageTimes
from ep_moe.types import capturing


@dataclass(frozen=True, kw_only=True)
class LayerMetrics:
    """The counters of one layer, on one rank or with the load of the whole EP group.

    Args:
        name: The layer's name. Further layers of the same name get a number, as "name (2)".
        all2all: Its transport; if tuned, the one for the most tokens.
        experts: Its kernel.
        calls: Calls of `forward` and `forward_routed`, including failed ones. Calls within a graph recorded by
            `torch.cuda.graph` or `torch.compile` are not counted.
        replayed: Those of `calls` that replayed a CUDA graph of the layer.
        tokens: Counted routes / top_k, rounded up, without padding. None if the kernel counts no load.
        expert_load: [E], routes to each logical expert since `reset_load`. None if the kernel counts no load.
        rank_load: [R], routes to each EP rank since `reset_load`, or since the expert map last changed. None if the
            kernel counts no load.
        sent_bytes: An estimate of the bytes of rows dispatched to other ranks, over the same time as `rank_load`. It
            counts a row for each route to another rank. With a transport that sends every row to all ranks it counts
            R - 1 rows per token, or with `ExpertsOptions(exact=True)` per route. A transport that sends a token once
            to a rank sends less. Padding, ids, weights and combined rows are not counted. None if the kernel counts no
            load.
        stage_ms: Milliseconds by stage, for calls within `stages`; empty without.
        deadline_margin_s: The deadline less the longest wait within a step that this rank's watchdog saw. It looks
            every eighth of the deadline, and at least every 5 s. None without peers.
    """

    name: str
    all2all: str
    experts: str
    calls: int
    replayed: int
    tokens: int | None
    expert_load: tuple[int, ...] | None
    rank_load: tuple[int, ...] | None
    sent_bytes: int | None
    stage_ms: dict[str, float]
    deadline_margin_s: float | None

    @property
    def balancedness(self) -> float | None:
        """Mean of `rank_load` / its maximum; 1 is even. In a snapshot of one rank, of this rank's tokens."""
        return None if self.rank_load is None else balancedness(list(self.rank_load))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The counters of a context's layers and of balancers.

    Args:
        rank: The global rank.
        etp_rank: The rank within the etp group. Ranks of an etp group count the same routes.
        whole: Whether the load is that of the whole EP group; else that of this rank's tokens.
        deadline_s: The context's deadline. None without peers.
        layers: The layers, in order of construction.
        balancers: The results of `ExpertBalancer.stats`.
    """

    rank: int
    etp_rank: int
    whole: bool
    deadline_s: float | None
    layers: tuple[LayerMetrics, ...]
    balancers: tuple[BalancerStats, ...] = ()


def snapshot(context: EPContext, *balancers: ExpertBalancer, whole: bool = False) -> Snapshot:
    """Read the counters of a context's layers. Waits for the device once.

    Args:
        context: The context of the layers.
        *balancers: Balancers to include.
        whole: Sum the load over the EP group. The call is then collective over this group.

    Returns:
        The snapshot, in host memory.

    Raises:
        InputError: Called within a CUDA graph capture.
        ContextClosed: Called after `EPContext.destroy`.
        ConfigError: An argument has a wrong type.
    """
    check_kind("snapshot: context", context, EPContext)
    check_flag("snapshot: whole", whole)
    for balancer in balancers:
        check_kind("snapshot: balancer", balancer, ExpertBalancer)
    context._check_alive()
    if capturing(context.device):
        raise InputError("metrics.snapshot waits for the device; call it outside the capture of a CUDA graph")
    layers = _layers(context)
    return Snapshot(
        rank=context.layout.rank,
        etp_rank=context.layout.etp_rank,
        whole=whole,
        deadline_s=None if context.flight_recorder.has_no_peers else context.flight_recorder.deadline_s,
        layers=_layer_metrics(context, layers, whole),
        balancers=tuple(balancer.stats() for balancer in balancers),
    )


class Source:
    """Holds the newest snapshot for exporters, which read it in their own threads.

    `update` reads the device, in the model's thread between two calls. An exporter's thread must not read the device:
    it would hang with a hung peer, and break CUDA graph captures.

    Args:
        context: The context of the layers.
        *balancers: Balancers to include.

    Raises:
        ConfigError: An argument has a wrong type.
    """

    def __init__(self, context: EPContext, *balancers: ExpertBalancer) -> None:
        self._newest = snapshot(context, *balancers), [layer.name for layer in _layers(context)]
        self._context, self._balancers = weakref.ref(context), [weakref.ref(balancer) for balancer in balancers]

    def update(self) -> Snapshot:
        """Take a new snapshot with the load of this rank. Waits for the device once; not collective.

        Returns:
            The snapshot.

        Raises:
            InputError: Called within a CUDA graph capture.
            ContextClosed: Called after `EPContext.destroy`.
            ConfigError: The context was garbage collected.
        """
        context = self._context()
        if context is None:
            raise ConfigError("metrics.Source: its EPContext is gone; make another Source for another context")
        living = [balancer for one in self._balancers if (balancer := one()) is not None]
        self._newest = snapshot(context, *living), [layer.name for layer in _layers(context)]
        return self._newest[0]

    def newest(self) -> Snapshot:
        """Return the snapshot of the last `update`, with current deadline margins.

        Any thread may call it. It never waits.

        Returns:
            The snapshot.
        """
        (found, names), context = self._newest, self._context()
        if context is None:
            return found
        margins = [_margin(name, context.flight_recorder) for name in names]
        layers = [replace(one, deadline_margin_s=margin) for one, margin in zip(found.layers, margins, strict=True)]
        return replace(found, layers=tuple(layers))


@contextmanager
def stages(context: EPContext, *, times: bool = True, nvtx: bool = False) -> Iterator[StageTimes]:
    """Measure or mark the stages of calls within a `with` block.

    Args:
        context: The context of the layers.
        times: Measure the stages; `snapshot` reports them as `stage_ms`. Calls then run eagerly, not as CUDA graphs.
        nvtx: Mark stages, and replays of CUDA graphs, as NVTX ranges for Nsight Systems.

    Yields:
        The times, which can also be read after the block: `by_layer()` and `milliseconds()`.

    Raises:
        ConfigError: `nvtx` on a context without a GPU, or a block within another.
        BackendUnavailable: This build of torch has no NVTX.
    """
    check_kind("stages: context", context, EPContext)
    if context._stage_times is not None:
        raise ConfigError("metrics.stages: the stages of this context are watched already; leave that block first")
    if check_flag("stages: nvtx", nvtx):
        _check_nvtx(context.device)
    watched = StageTimes(
        context.device, lambda: context._running_call or "", timed=check_flag("times", times), nvtx=nvtx
    )
    context._stage_times = watched
    try:
        yield watched
    finally:
        context._stage_times = None


def _check_nvtx(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"metrics.stages: nvtx=True marks the work of a GPU, and this context is on {device}")
    try:
        torch.cuda.nvtx.mark("ep_moe::stages")
    except RuntimeError as error:
        raise BackendUnavailable(f"metrics.stages: nvtx=True needs a torch with NVTX: {error}") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def _layers(context: EPContext) -> list[MoELayer]:
    return [layer for _, layer in sorted(context._layers.items())]


@on_device_of(lambda context, *_: context.device)
def _layer_metrics(context: EPContext, layers: Sequence[MoELayer], whole: bool) -> tuple[LayerMetrics, ...]:
    times = {} if context._stage_times is None else context._stage_times.by_layer()
    return tuple(
        LayerMetrics(
            name=name,
            all2all=layer.choice.all2all,
            experts=layer.choice.experts,
            calls=layer._checks.forwards,
            # consistent, because no call is running: this is the model's thread
            replayed=layer._checks.forwards - layer._checks.eager + layer._graphs.trained.replays,
            stage_ms=times.get(name, {}),  # layers of one name are summed under the first
            deadline_margin_s=_margin(layer.name, context.flight_recorder),
            **facts,
        )
        for layer, name, facts in zip(layers, _names(layers), _load_facts(context, layers, whole), strict=True)
    )


def _names(layers: Sequence[MoELayer]) -> list[str]:
    """Return a unique name for each layer, because a Prometheus series has one value."""
    found, names = Counter[str](), []
    for layer in layers:
        found[layer.name] += 1
        names.append(layer.name if found[layer.name] == 1 else f"{layer.name} ({found[layer.name]})")
    return names


def _margin(layer: str, flight_recorder: FlightRecorder) -> float | None:
    if flight_recorder.has_no_peers:
        return None
    return flight_recorder.deadline_s - flight_recorder.longest_wait.get(layer, 0.0)


_UNKNOWN: dict[str, Any] = dict.fromkeys(("tokens", "expert_load", "rank_load", "sent_bytes"))


def _load_facts(context: EPContext, layers: Sequence[MoELayer], whole: bool) -> list[dict[str, Any]]:
    """Return the load fields of `LayerMetrics` for each layer, with one copy to the host."""
    counted = [layer for layer in layers if not layer._routes_inside and not layer.placement.counting.is_meta]
    if not counted:
        return [_UNKNOWN] * len(layers)
    counts = torch.cat([part for layer in counted for part in _counts(layer)])
    group = context.rank_groups["ep"]
    if whole and group.size > 1:
        with group.flight_recorder.step("metrics"):
            rows = group.exchange(counts)
        numbers = [sum(column) for column in zip(*rows, strict=True)]
    else:
        numbers = counts.tolist()
    found: dict[int, dict[str, Any]] = {}
    for layer in counted:
        experts, ranks = layer.config.num_experts, layer.placement.expert_map.num_ranks
        load, by_rank, rows_sent = numbers[:experts], numbers[experts : experts + ranks], numbers[experts + ranks]
        numbers = numbers[experts + ranks + 1 :]
        shape = layer._dispatch_shape()
        found[id(layer)] = {
            "tokens": -(-sum(load) // layer.config.top_k),
            "expert_load": tuple(load),
            "rank_load": tuple(by_rank),
            "sent_bytes": rows_sent * (shape.row_bytes + shape.scale_bytes),
        }
    return [found.get(id(layer), _UNKNOWN) for layer in layers]


def _counts(layer: MoELayer) -> list[Tensor]:
    """Return int64 [E], [R] and [1]: routes per expert, routes per EP rank, and rows sent to other ranks."""
    placement, ranks = layer.placement, layer.placement.expert_map.num_ranks
    by_rank, transport = placement.rank_load(), layer.choice.all2all
    if transport != INSIDE and registry.load("dispatchers", transport).capabilities.to_all:
        rows = layer.config.top_k if layer.exact else 1  # rows per token and rank
        sent = (by_rank.sum() + layer.config.top_k - 1) // layer.config.top_k * (rows * (ranks - 1))
    else:
        sent = by_rank.sum() - by_rank[layer.context.layout.ep_rank]
    return [placement.expert_load, by_rank, sent.reshape(1)]
