"""The table of metrics, which all exporters read: name, description, labels, and the samples of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ep_moe._version import __version__
from ep_moe.eplb.migration.consensus import State
from ep_moe.metrics.source import LayerMetrics, Snapshot

Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class MetricFamily:
    """A metric and its samples.

    name: without `_total`, which text formats add to counters
    counter: it only grows, and restarts when the counter that it reads is reset
    about: the description
    samples: returns pairs (values of `labels`, number) for a snapshot
    """

    name: str
    counter: bool
    about: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Samples]


def families(*, experts: bool = False) -> tuple[MetricFamily, ...]:
    """Return all metrics. experts: include the load of each expert; a model can have tens of thousands of experts"""
    return (*_FAMILIES, _EXPERTS) if experts else _FAMILIES


def _of_layers(value: Callable[[LayerMetrics], float | None], *, once: bool = False) -> Callable[[Snapshot], Samples]:
    """Return samples per layer. once: only the first rank of an etp group reports, so that a sum over ranks is right"""

    def samples(found: Snapshot) -> Samples:
        layers = () if once and found.etp_rank else found.layers
        return [((layer.name,), number) for layer in layers if (number := value(layer)) is not None]

    return samples


def _by_rank(found: Snapshot) -> Samples:
    for layer in () if found.etp_rank else found.layers:
        for rank, routes in enumerate(layer.rank_load or ()):
            yield (layer.name, str(rank)), routes


def _by_expert(found: Snapshot) -> Samples:
    for layer in () if found.etp_rank else found.layers:
        for expert, routes in enumerate(layer.expert_load or ()):
            yield (layer.name, str(expert)), routes


def _by_stage(found: Snapshot) -> Samples:
    for layer in found.layers:
        for stage, spent in layer.stage_ms.items():
            yield (layer.name, stage), spent / 1e3


def _info(found: Snapshot) -> Samples:
    for layer in found.layers:
        yield (layer.name, layer.all2all, layer.experts, __version__), 1


def _of_balancers(value: Callable[[Any], float | None]) -> Callable[[Snapshot], Samples]:
    def samples(found: Snapshot) -> Iterator[tuple[tuple[str, ...], float]]:
        for index, balancer in enumerate(found.balancers):
            number = value(balancer)
            if number is not None:
                yield (str(index),), number

    return samples


def _states(found: Snapshot) -> Samples:
    for index, balancer in enumerate(found.balancers):
        for state in State:
            yield (str(index), state.name.lower()), float(balancer.state is state)


def _windows(found: Snapshot) -> Samples:
    for index, balancer in enumerate(found.balancers):
        for layer in balancer.layers:
            yield (str(index), layer.name), layer.balancedness


def _balancer_counter(name: str, about: str, field: str) -> MetricFamily:
    return MetricFamily(
        f"ep_moe_eplb_{name}", True, about, ("balancer",), _of_balancers(lambda stats: getattr(stats, field))
    )


def _price(name: str, about: str, field: str) -> MetricFamily:
    def value(stats: Any) -> float | None:
        return None if stats.predicted is None else float(getattr(stats.predicted, field)) / 1e3

    return MetricFamily(f"ep_moe_eplb_price_{name}_seconds", False, about, ("balancer",), _of_balancers(value))


_LAYER = ("layer",)
_FAMILIES = (
    MetricFamily(
        "ep_moe_layer_info", False, "1, with a layer's transport, kernel and the version of ep_moe.",
        ("layer", "all2all", "experts", "version"), _info,
    ),
    MetricFamily(
        "ep_moe_layer_calls", True, "Calls of a layer, without those inside the caller's own CUDA graphs.",
        _LAYER, _of_layers(lambda layer: layer.calls),
    ),
    MetricFamily(
        "ep_moe_layer_graph_replays", True, "Calls of a layer that its own CUDA graphs served.",
        _LAYER, _of_layers(lambda layer: layer.replayed),
    ),
    MetricFamily(
        "ep_moe_layer_tokens", True, "Tokens of this rank that a layer routed: routes / top_k. Padding is not counted.",
        _LAYER, _of_layers(lambda layer: layer.tokens, once=True),
    ),
    MetricFamily(
        "ep_moe_layer_rank_routes", True, "Routes of this rank's tokens to experts of each EP rank.",
        ("layer", "ep_rank"), _by_rank,
    ),
    MetricFamily(
        "ep_moe_layer_balancedness", False,
        "Mean over EP ranks / maximum of routes: 1 is even. Of this rank's tokens since the last reset.",
        _LAYER, _of_layers(lambda layer: layer.balancedness, once=True),
    ),
    MetricFamily(
        "ep_moe_layer_sent_bytes_estimate", True,
        "Bytes of dispatched rows to other ranks, estimated by routes: transports that send a token once to a rank "
        "send less.",
        _LAYER, _of_layers(lambda layer: layer.sent_bytes),
    ),
    MetricFamily(
        "ep_moe_layer_stage_seconds", True, "Time in each stage, of calls within metrics.stages.",
        ("layer", "stage"), _by_stage,
    ),
    MetricFamily(
        "ep_moe_layer_deadline_margin_seconds", False,
        "Deadline minus the longest wait in a step of this layer that the watch thread saw.",
        _LAYER, _of_layers(lambda layer: layer.deadline_margin_s),
    ),
    MetricFamily(
        "ep_moe_deadline_seconds", False, "How long a step may last before a peer counts as lost.",
        (), lambda found: [] if found.deadline_s is None else [((), found.deadline_s)],
    ),
    MetricFamily(
        "ep_moe_eplb_state", False, "1 for the balancer's state, 0 for the others.", ("balancer", "state"), _states
    ),
    _balancer_counter("steps", "Calls of ExpertBalancer.step.", "steps"),
    _balancer_counter("rebalances", "Plans whose moves were started.", "rebalances"),
    _balancer_counter("commits", "Moves applied, of layers or parts of layers.", "commits"),
    _balancer_counter("rollbacks", "Rebalances that were rolled back.", "rollbacks"),
    _balancer_counter("skipped", "Windows that ended while a rebalance was under way.", "skipped"),
    _balancer_counter("restarts", "Layers restarted because their weights were updated while they moved.", "restarts"),
    _balancer_counter("received_bytes", "Bytes of experts that this rank received and now uses.", "received_bytes"),
    MetricFamily(
        "ep_moe_eplb_staging_bytes", False, "Device memory held for experts that are moving.",
        ("balancer",), _of_balancers(lambda stats: stats.staging_bytes),
    ),
    MetricFamily(
        "ep_moe_eplb_balancedness", False, "Mean rank's load / fullest rank's, summed over the last window's layers.",
        ("balancer",), _of_balancers(lambda stats: stats.balancedness if stats.layers else None),
    ),
    MetricFamily(
        "ep_moe_eplb_layer_balancedness", False, "Mean rank / fullest rank of a layer in the last window.",
        ("balancer", "layer"), _windows,
    ),
    _price("before", "Predicted time of one step under the maps before the last plan.", "before_ms"),
    _price("after", "Predicted time of one step under the maps of the last plan.", "after_ms"),
    _price("cost", "Predicted time to move the experts of the last plan.", "cost_ms"),
)  # fmt: skip
_EXPERTS = MetricFamily(
    "ep_moe_layer_expert_routes", True, "Routes of this rank's tokens to each logical expert.",
    ("layer", "expert"), _by_expert,
)  # fmt: skip
