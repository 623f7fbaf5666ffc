"""Estimates the memory of a rank, the time of a MoE layer and the best layouts on GPUs that are not here.

`ep-moe fit` prints the results. Bytes of memory are counted on layers on the meta device, made of the classes of a real
layer. Bytes on links are those of `bench.wire_rows`. Times are the floors of `bench.floors` with the rates of
`runtime.gpus`, and predictions of `bench.expected_time` from measured layers.

Times omit the router, shared experts (which run while rows travel), launches, and the skew of a real router.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe import registry
from ep_moe.all2all.base import DispatchShape
from ep_moe.bench.expected_time import Expected, Layer, expected_time
from ep_moe.bench.fit_question import Question
from ep_moe.bench.floors import WEIGHTS, Crossover, Floor, Kind, busiest_floor, kind_of, two_levels_beside_flat
from ep_moe.bench.measured_lines import rows_text
from ep_moe.bench.wire_rows import WAYS, row_bytes
from ep_moe.config import MoEConfig, ParallelConfig
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.execution.memory_plan import held_bytes
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.workspace import Workspaces
from ep_moe.selection import explain
from ep_moe.weights.expert_weights import ExpertWeights

# --- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of one rank.

    Args:
        layer: Bytes of one MoE layer, by the kinds of `MoELayer.plan`. None for bytes that only a library knows.
        total: Bytes of all MoE layers and of the rest of the model. As in `EPContext.plan`, workspace and transport
            count once.
    """

    layer: dict[str, int | None]
    total: int


def memory(asked: Question, layout: RankLayout, choice: explain.BackendChoice) -> Memory:
    """Count the memory of a rank, from the shapes of a layer's modules.

    Args:
        asked: The question.
        layout: The layout of the ranks.
        choice: Transport and kernel.

    Returns:
        The bytes.
    """
    config, expert_map, dtype = asked.config, asked.expert_map(layout), asked.dtype
    kernel: Any = registry.load("fused" if choice.all2all == INSIDE else "experts", choice.experts)
    etp = RankGroup(None, tuple(range(layout.etp)), layout.etp_rank, FlightRecorder())
    with torch.device("meta"):
        weights = ExpertWeights(
            config, expert_map, ep_rank=layout.ep_rank, etp=etp, dtype=dtype, scheme=asked.scheme,
            weight_layout=kernel.weight_layout, trainable=kernel.capabilities.differentiable,
        )  # fmt: skip
        held: dict[str, int | None] = {
            **held_bytes(
                experts=weights,
                router=Router(config, dtype=dtype),
                placement=Placement(expert_map, ep_rank=layout.ep_rank, ranks_per_node=layout.ep_ranks_per_node),
                shared_experts=SharedExperts(config, dtype=dtype) if config.shared_intermediate_size else None,
            )
        }
    own = sum(size or 0 for size in held.values())
    held["workspace"] = _workspace_bytes(kernel, config, weights)
    held["transport"] = _transport_bytes(asked, layout, choice, expert_map)
    total = asked.layers * own + (held["workspace"] or 0) + (held["transport"] or 0) + (asked.rest_bytes or 0)
    return Memory(held, total)


def _workspace_bytes(kernel: Any, config: MoEConfig, weights: ExpertWeights) -> int | None:
    """Return the bytes of the kernel's workspace; None if only a library that is missing, or a GPU, can tell."""
    try:
        made = kernel(config, weights, Workspaces(torch.device("meta")), ExpertsOptions())
        return int(made.workspace_bytes())
    # TypeError: the constructor of a fused kernel takes other arguments; it has buffers instead of a workspace
    except (ImportError, RuntimeError, AssertionError, TypeError):
        return None


def _transport_bytes(
    asked: Question, layout: RankLayout, choice: explain.BackendChoice, expert_map: ExpertMap
) -> int | None:
    if choice.all2all == INSIDE:
        return None
    config = asked.config
    shape = DispatchShape(
        hidden_size=config.hidden_size, top_k=config.top_k, slots_per_rank=expert_map.slots_per_rank,
        num_ranks=expert_map.num_ranks, dtype=asked.dtype, max_tokens=asked.dispatched(layout), wire=asked.wire,
    )  # fmt: skip
    return int(registry.load("dispatchers", choice.all2all).buffer_bytes(shape))


# --- bytes and time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTime:
    """Times of one routed MoE layer, in microseconds.

    Args:
        floor: The floor of weights, products and the wire. Weights and products are an etp rank's share.
        groups: The time of gathers and sums within tp and etp groups, over NVLink.
        expected: The predicted time. None if no similar layer was measured.
        nvlink_bytes: Bytes that a rank receives over NVLink for each token of every GPU: dispatch, combine, and within
            tp and etp groups.
        nic_bytes: Bytes that a rank receives over its network card for each token of every GPU: dispatch and combine.
    """

    floor: Floor
    groups: float
    expected: Expected | None
    nvlink_bytes: float
    nic_bytes: float

    @property
    def floor_us(self) -> float:
        return self.floor.in_turn + self.groups


def layer_time(asked: Question, layout: RankLayout, choice: explain.BackendChoice) -> LayerTime | None:
    """Estimate the time of one MoE layer.

    Args:
        asked: The question.
        layout: The layout of the ranks.
        choice: Transport and kernel.

    Returns:
        The time. None for a scheme or transport without a model.
    """
    way = WAYS.get(choice.all2all)
    if way is None or asked.scheme.name not in WEIGHTS:
        return None
    config, tokens, etp = asked.config, asked.dispatched(layout), layout.etp
    per_host = min(layout.ep_ranks_per_node, layout.ep)
    whole = busiest_floor(
        config, _kind(asked), layout.ep, tokens, per_host=per_host, way=way, redundant=asked.redundant
    )
    least = dataclasses.replace(whole, weights=whole.weights / etp, products=whole.products / etp)
    rows = way(config, layout.ep, per_host, asked.redundant)
    out_back = etp * sum(row_bytes(config, asked.wire, rows.routes))
    gathers = config.hidden_size * asked.dtype.itemsize * ((layout.split - 1) + 2 * (etp - 1))
    return LayerTime(
        floor=least,
        groups=1e6 * asked.tokens * gathers / asked.gpu.rates.link,
        expected=_expected(asked, layout, choice, least),
        nvlink_bytes=rows.near * out_back + gathers,
        nic_bytes=rows.far * out_back,
    )


def _expected(asked: Question, layout: RankLayout, choice: explain.BackendChoice, least: Floor) -> Expected | None:
    """Return the predicted time; None for a layout of a kind that was never measured."""
    on_one_host = layout.ep > 1 and layout.ep_node_count == 1
    if not on_one_host or layout.tp > 1 or layout.etp > 1 or asked.redundant:
        return None
    pair, tokens = f"{choice.experts} + {choice.all2all}", asked.dispatched(layout)
    return expected_time(
        Layer(asked.gpu.name, pair, asked.scheme.name, rows_text(asked.wire), asked.config, layout.ep, tokens, least)
    )


def _kind(asked: Question) -> Kind:
    return kind_of(asked.gpu, asked.scheme.name, asked.wire, asked.nic)


def crossover(asked: Question, layout: RankLayout) -> Crossover | None:
    """Compare the flat and the hierarchical transport.

    Args:
        asked: The question.
        layout: The layout of the ranks.

    Returns:
        The comparison. None if the EP group is on one host.
    """
    if layout.ep_node_count == 1:
        return None
    return two_levels_beside_flat(asked.config, _kind(asked), layout.ep, layout.ep_ranks_per_node, asked.redundant)


# --- one layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutEstimate:
    """One layout with its backends, memory and time."""

    layout: RankLayout
    choice: explain.BackendChoice
    memory: Memory
    time: LayerTime | None

    def fits(self, asked: Question) -> bool:
        return self.memory.total <= asked.gpu.memory_bytes


def answer(asked: Question, parallel: ParallelConfig) -> LayoutEstimate:
    """Estimate memory and time of one layout.

    Args:
        asked: The question.
        parallel: The layout.

    Returns:
        The layout with its backends, memory and time.

    Raises:
        ConfigError: The layout is not possible.
        BackendUnavailable: No pair of transport and kernel can run.
    """
    layout = asked.layout(parallel)
    problem = asked.scheme.unsupported_reason(asked.config, layout.etp)
    if problem is not None:
        raise ConfigError(problem)
    choice = asked.choose(layout)
    return LayoutEstimate(layout, choice, memory(asked, layout, choice), layer_time(asked, layout, choice))


# --- all layouts ---------------------------------------------------------------------------------------------------


def layouts(asked: Question) -> Iterator[ParallelConfig]:
    """Yield all layouts whose sizes divide the number of GPUs. `Question.layout` refuses those that do not fit."""
    sizes = [size for size in range(1, asked.gpus + 1) if asked.gpus % size == 0]
    for tp in sizes:
        for etp in sizes:
            for ep in sizes:
                if asked.gpus % (ep * etp) == 0:
                    yield ParallelConfig(dp=asked.gpus // tp, tp=tp, ep=ep, etp=etp)


def best(asked: Question, most: int = 3) -> list[LayoutEstimate]:
    """Find the fastest layouts that fit: by the floor in turn, then by bytes of a rank, then by the smallest tp.

    Layouts are ranked by the floor, not by the expected time, because unmeasured layouts have no expected time.

    Args:
        asked: The question.
        most: The number of layouts to return.

    Returns:
        The layouts, the best first. Empty if none fits, or none has a time.
    """
    timed: list[tuple[float, RankLayout, explain.BackendChoice, LayerTime]] = []
    chosen: dict[tuple[int, int], explain.BackendChoice | None] = {}
    for parallel in layouts(asked):
        try:
            layout = asked.layout(parallel)
            if asked.scheme.unsupported_reason(asked.config, layout.etp) is not None:
                continue
            key = (layout.ep, layout.etp)
            if key not in chosen:
                chosen[key] = None
                with suppress(BackendUnavailable):
                    chosen[key] = asked.choose(layout)
            choice = chosen[key]
            time = None if choice is None else layer_time(asked, layout, choice)
        except ConfigError:
            continue
        if choice is not None and time is not None:
            timed.append((time.floor_us, layout, choice, time))
    timed.sort(key=lambda one: (one[0], one[1].tp))
    found: list[LayoutEstimate] = []
    for us, layout, choice, time in timed:
        if len(found) >= most and us > found[-1].time.floor_us:  # type: ignore[union-attr]
            break
        one = LayoutEstimate(layout, choice, memory(asked, layout, choice), time)
        if one.fits(asked):
            found.append(one)
    found.sort(key=lambda one: (one.time.floor_us, one.memory.total, one.layout.tp))  # type: ignore[union-attr]
    return found[:most]
