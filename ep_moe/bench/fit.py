"""What a rank of GPUs that are not here would hold, how long one MoE layer would take there, and the layouts that come
out best. For `ep-moe fit`.

Bytes of memory are counted on layers without memory (the meta device), by the classes that a real layer is made of.
Bytes on links are those of `bench.wire_rows`. Times are the floors of `bench.floors` with the rates of `runtime.gpus`,
and what `bench.expected_time` predicts from measured layers.

Left out of times: router, shared experts (they run while rows travel), launches, skew of a real router.
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
from ep_moe.bench.floors import WEIGHTS, Crossover, Floor, Kind, busiest_floor, kind_of, two_levels_beside_flat
from ep_moe.bench.measured_lines import rows_text
from ep_moe.bench.wire_rows import WAYS, row_bytes
from ep_moe.checks import check_count, check_positive
from ep_moe.config import MoEConfig, ParallelConfig, Wire
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.execution.memory_plan import held_bytes
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.quant.schemes import Scheme
from ep_moe.router import Router
from ep_moe.runtime.gpus import GPU
from ep_moe.runtime.workspace import Workspaces
from ep_moe.selection import explain
from ep_moe.weights.expert_weights import ExpertWeights

MOST_GPUS = 4096  # of which all layouts are tried


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model and a cluster on paper.

    Args:
        config: Of the MoE layers, which are alike.
        layers: How many of them.
        gpu: Of which kind.
        gpus: All of the job.
        per_host: GPUs that NVLink joins.
        tokens: Of each GPU in one call; a dp rank of tp GPUs passes tp times as many.
        scheme: How experts are quantized.
        dtype: Of the layer.
        wire: How rows travel.
        redundant: Slots beyond one per expert.
        nic: Bytes per second of a GPU to other hosts, one direction.
        all2all: A transport's name, or "auto".
        experts: A kernel's name, or "auto".
        rest_bytes: Of all that is not in MoE layers, whole on each rank; None where the model does not say.

    Raises:
        ConfigError: a number is out of range, or hosts would be filled unevenly.
    """

    config: MoEConfig
    layers: int
    gpu: GPU
    gpus: int
    per_host: int
    tokens: int
    scheme: Scheme
    dtype: torch.dtype = torch.bfloat16
    wire: Wire = dataclasses.field(default_factory=Wire)
    redundant: int = 0
    nic: float = 50e9
    all2all: str = explain.AUTO
    experts: str = explain.AUTO
    rest_bytes: int | None = None

    def __post_init__(self) -> None:
        check_count("--gpus", self.gpus, at_least=1, at_most=MOST_GPUS)
        check_count("--per-host", self.per_host, at_least=1)
        check_count("--tokens", self.tokens, at_least=1, at_most=1 << 22)
        check_count("--redundant", self.redundant, at_least=0)
        check_positive("--nic-gb-s", self.nic)
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise ConfigError(
                f"--per-host must divide --gpus, got gpus={self.gpus}, per_host={self.per_host}; give whole hosts"
            )

    def layout(self, parallel: ParallelConfig) -> RankLayout:
        """Of rank 0, which no rank has more experts than.

        Args:
            parallel: Its dp * tp must be all GPUs.

        Returns:
            The layout, on nodes that are not here.

        Raises:
            ConfigError: sizes do not fit, or groups would lie unevenly on hosts.
        """
        gpus = min(self.per_host, self.gpus)
        nodes = NodeLayout.counted(range(self.gpus), self.per_host, gpus=gpus)
        found = RankLayout.from_config(parallel, world=self.gpus, rank=0, nodes=nodes)
        most = self.config.num_experts * (found.ep - 1)
        if self.redundant > most:
            raise ConfigError(
                f"--redundant must be at most {most} for {self.config.num_experts} experts on ep={found.ep} ranks, got "
                f"{self.redundant}; a rank would hold an expert twice"
            )
        for name, size in (("tp", found.tp), ("etp", found.etp), ("ep * etp", found.ep * found.etp)):
            larger = name == "ep * etp" and size % gpus == 0
            if gpus % size and not larger:
                raise ConfigError(f"{name} must divide the {gpus} GPUs of a host, got {size}; NVLink joins these alone")
        return found

    def expert_map(self, layout: RankLayout) -> ExpertMap:
        """Experts in order over the EP group, then redundant ones."""
        return ExpertMap.redundant(self.config.num_experts, layout.ep, self.redundant)

    def idle_ranks(self, layout: RankLayout) -> int:
        """Ranks of an EP group that hold no expert. As many redundant slots give each of them one."""
        return max(0, layout.ep - self.config.num_experts - self.redundant)

    def dispatched(self, layout: RankLayout) -> int:
        """Tokens that a rank sends in one call."""
        return layout.max_dispatch_tokens(self.tokens * layout.split)

    def choose(self, layout: RankLayout) -> explain.BackendChoice:
        """Transport and kernel, as a layer with `max_tokens` on such GPUs takes them.

        Args:
            layout: Of the ranks.

        Returns:
            The pair, with the reason.

        Raises:
            BackendUnavailable: no pair can run.
        """
        return explain.choose(
            self.config, layout, self.gpu, self.dtype, all2all=self.all2all, experts=self.experts, scheme=self.scheme,
            max_tokens=self.dispatched(layout), wire=self.wire, expert_map=self.expert_map(layout),
        )  # fmt: skip


# --- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Args:
        layer: Of one MoE layer, by the kinds of `MoELayer.plan`; None for what a library alone knows.
        total: Of all MoE layers, workspace and transport once, as `EPContext.plan` counts, and the rest of the model.
    """

    layer: dict[str, int | None]
    total: int


def memory(asked: Question, layout: RankLayout, choice: explain.BackendChoice) -> Memory:
    """Count what a rank holds, from the shapes of the modules that a layer makes.

    Args:
        asked: The question.
        layout: Of the ranks.
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
    """None where a library says it, which is not here, or asks a GPU."""
    try:
        made = kernel(config, weights, Workspaces(torch.device("meta")), ExpertsOptions())
        return int(made.workspace_bytes())
    except (ImportError, RuntimeError, AssertionError, TypeError):  # TypeError: of a fused kernel, which has buffers
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
    """Microseconds of one routed MoE layer.

    Args:
        floor: Of weights, products and the wire, with an expert's share of its etp group.
        groups: Of gathers and sums within tp and etp groups, over NVLink.
        expected: What such a layer takes, None where none like it was measured.
        nvlink_bytes: That a rank receives over NVLink for each token of every GPU, out and back, and in these groups.
        nic_bytes: The same over its network card.
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
    """Model one MoE layer.

    Args:
        asked: The question.
        layout: Of the ranks.
        choice: Transport and kernel.

    Returns:
        Its time, None for a scheme or transport that the model does not know.
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
    """None for layouts of which none was measured."""
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
        layout: Of the ranks.

    Returns:
        Both, None where the EP group is on one host.
    """
    if layout.ep_node_count == 1:
        return None
    return two_levels_beside_flat(asked.config, _kind(asked), layout.ep, layout.ep_ranks_per_node, asked.redundant)


# --- one layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One layout with what it comes to."""

    layout: RankLayout
    choice: explain.BackendChoice
    memory: Memory
    time: LayerTime | None

    def fits(self, asked: Question) -> bool:
        return self.memory.total <= asked.gpu.memory_bytes


def answer(asked: Question, parallel: ParallelConfig) -> Found:
    """Count and model one layout.

    Args:
        asked: The question.
        parallel: The layout.

    Returns:
        What it comes to.

    Raises:
        ConfigError: the layout cannot be.
        BackendUnavailable: no pair of transport and kernel can run.
    """
    layout = asked.layout(parallel)
    problem = asked.scheme.unsupported_reason(asked.config, layout.etp)
    if problem is not None:
        raise ConfigError(problem)
    choice = asked.choose(layout)
    return Found(layout, choice, memory(asked, layout, choice), layer_time(asked, layout, choice))


# --- all layouts ---------------------------------------------------------------------------------------------------


def layouts(asked: Question) -> Iterator[ParallelConfig]:
    """All sizes that divide: tp and etp within a host, EP groups that fill hosts or divide them."""
    sizes = [size for size in range(1, asked.gpus + 1) if asked.gpus % size == 0]
    for tp in sizes:
        for etp in sizes:
            for ep in sizes:
                if asked.gpus % (ep * etp) == 0:
                    yield ParallelConfig(dp=asked.gpus // tp, tp=tp, ep=ep, etp=etp)


def best(asked: Question, most: int = 3) -> list[Found]:
    """The fastest layouts that fit, by the floor in turn, then by bytes of a rank, then by the smallest tp.

    The floor counts and not the expected time: measured and unmeasured layouts could not be compared else.

    Args:
        asked: The question.
        most: So many are listed.

    Returns:
        The layouts, the best first; empty where none fits or none has a time.
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
    found: list[Found] = []
    for us, layout, choice, time in timed:
        if len(found) >= most and us > found[-1].time.floor_us:  # type: ignore[union-attr]
            break
        one = Found(layout, choice, memory(asked, layout, choice), time)
        if one.fits(asked):
            found.append(one)
    found.sort(key=lambda one: (one.time.floor_us, one.memory.total, one.layout.tp))  # type: ignore[union-attr]
    return found[:most]
