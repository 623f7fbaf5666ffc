"""Connects the balancers of all ranks, and lets them decide together during a rebalance.

A balancer has process groups of its own, which are made once all ranks agree that it can be made. During a rebalance,
ranks exchange their status. The next action is a function of all statuses, so all ranks take the same one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup

from ep_moe.checks import flat_facts
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.migration.slots import Checksum, SlotStore
from ep_moe.eplb.migration.transfer import BalancedLayer, Mover, Staging, StagingSize
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.parallel.collectives import all_gather_single
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups, default_store, make_group, numbered
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup


class State(enum.IntEnum):
    """The stage of a rebalance, equal on all ranks, except OFF.

    IDLE       no rebalance: load is counted, nothing is exchanged
    GATHERING  load counts are being copied to the host
    SUMMING    load counts are being summed over the ranks
    PLANNING   every rank computes the plan in a thread
    MOVING     the experts of one layer are being transferred
    OFF        the balancer has ended, as after the loss of a peer; every further step raises
    """

    IDLE = 0
    GATHERING = 1
    SUMMING = 2
    PLANNING = 3
    MOVING = 4
    OFF = 5


class Trouble(enum.IntEnum):
    """A problem of one rank.

    NONE  no problem
    HERE  this rank cannot continue this rebalance
    LOST  bytes of a transfer are missing, so that the balancer cannot continue at all
    """

    NONE = 0
    HERE = 1
    LOST = 2


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank, exchanged as integers.

    step: number of advances of the balancer's loop
    forward: the flight recorder's running number, equal on ranks that are between the same forwards
    state: the stage of the rebalance
    epoch: number of migrations begun
    done: this rank has done its part of the state
    trouble: a problem of this rank
    digest: hash of the plan, in PLANNING
    written: in MOVING, whether this rank's weights of the layer were written through parameters since it began
    """

    step: int
    forward: int
    state: State
    epoch: int
    done: bool
    trouble: Trouble
    digest: int
    written: bool = False

    @classmethod
    def of(cls, row: Sequence[int]) -> RankStatus:
        step, forward, state, epoch, done, trouble, digest, written = row
        return cls(step, forward, State(state), epoch, bool(done), Trouble(trouble), digest, bool(written))


class Action(enum.Enum):
    """The next action of all ranks.

    WAIT       wait for ranks that are not done
    COMMIT     go to the next state together
    RESTART    send the current layer again
    ROLLBACK   return to the old maps; the balancer stays in use
    ABORT      roll back and disable the balancer
    """

    WAIT = "wait"
    COMMIT = "commit"
    RESTART = "restart"
    ROLLBACK = "rollback"
    ABORT = "abort"


@dataclass(frozen=True)
class Verdict:
    """The next action, and its reason.

    explained_by: index of the rank whose problem is the reason; None if `text` states it
    """

    action: Action
    explained_by: int | None = None
    text: str = ""


def reach_verdict(rows: Sequence[RankStatus], ranks: Sequence[int]) -> Verdict:
    """Decide the next action from the status of all ranks alone. ranks: their global ranks, in the order of rows"""
    for name in ("step", "forward", "state", "epoch"):
        found = [getattr(row, name) for row in rows]
        if len(set(found)) > 1:
            return Verdict(
                Action.ABORT,
                text=f"the ranks are not in step: {name} is {_listed(found, ranks)}; call ExpertBalancer.step() after "
                f"every forward, on all ranks alike",
            )
    troubles = [row.trouble for row in rows]
    if Trouble.LOST in troubles:
        return Verdict(Action.ABORT, explained_by=troubles.index(Trouble.LOST))
    # a rank in trouble waits too, until transfers between other ranks have ended
    if not all(row.done for row in rows):
        return Verdict(Action.WAIT)
    if any(row.written for row in rows):  # comes before troubles: a row that was written in transfer may look damaged
        return Verdict(Action.RESTART)
    if Trouble.HERE in troubles:
        return Verdict(Action.ROLLBACK, explained_by=troubles.index(Trouble.HERE))
    digests = [row.digest for row in rows]
    if len(set(digests)) > 1:
        return Verdict(
            Action.ROLLBACK,
            text=f"the ranks made different plans: their digest is {_listed(digests, ranks)}; a planner must depend on "
            "its arguments alone; maps must be changed and layers converted (.to, .half) on all ranks alike",
        )
    return Verdict(Action.COMMIT)


def _listed(values: Sequence[int], ranks: Sequence[int]) -> str:
    first = values[0]
    odd = next(index for index, value in enumerate(values) if value != first)
    return f"{int(first)} on rank {ranks[0]}, {int(values[odd])} on rank {ranks[odd]}"


class StatusExchange:
    """Exchanges statuses and load counts over a gloo group of its own.

    An exchange begins at one step and is read at a later one, so that steps need not wait. A lost peer raises
    PeerTimeout, in which the flight recorder names the peer.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self._sums: tuple[Tensor, dist.Work | None] | None = None
        self._posted: tuple[Tensor, dist.Work | None] | None = None

    def post_status(self, facts: RankStatus) -> None:
        own = torch.tensor(list(map(int, vars(facts).values())), dtype=torch.int64, device="cpu")
        every, work = own, None
        if self.rank_group.size > 1:
            every = own.new_empty(self.rank_group.size * len(own))
            work = all_gather_single(every, own, group=self.rank_group.group, async_op=True)
        self._posted = every, work

    def wait_for_statuses(self) -> list[RankStatus]:
        """Return the status of all ranks as of the last `post_status`."""
        assert self._posted is not None, "post_status first"
        (every, work), self._posted = self._posted, None
        self._await("eplb agree", work)
        return [RankStatus.of(row) for row in every.view(-1, len(fields(RankStatus))).tolist()]

    def post_load_counts(self, counts: Tensor) -> None:
        """Begin to sum host int64 `counts` over the ranks."""
        work = None
        if self.rank_group.size > 1:
            work = dist.all_reduce(counts, group=self.rank_group.group, async_op=True)
        self._sums = counts, work

    def wait_for_load_sums(self) -> Tensor:
        assert self._sums is not None, "post_load_counts first"
        (counts, work), self._sums = self._sums, None
        self._await("eplb sum", work)
        return counts

    def _await(self, phase: str, work: dist.Work | None) -> None:
        with self.rank_group.flight_recorder.step(phase, keep=False):  # layers continue if a rank was only late
            if work is not None:
                work.wait()


_BLOCKS = 4  # the most thread blocks of an NCCL kernel, which runs beside forwards


class Context(Protocol):
    """The attributes of an EPContext that the balancer uses."""

    layout: RankLayout
    device: torch.device
    flight_recorder: FlightRecorder
    rank_groups: RankGroups
    consensus: StoreConsensus


@dataclass
class Connections:
    """The connections of a balancer with those of the other ranks.

    name: the balancer's name, unique in this job
    deadline_s: seconds after which a rank that does not answer counts as lost
    """

    layers: list[BalancedLayer]
    mover: Mover
    status_exchange: StatusExchange
    name: str
    deadline_s: float
    consensus: StoreConsensus
    groups: list[ProcessGroup] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.consensus.raise_on_all_ranks(
            "ExpertBalancer.close", None
        )  # no rank closes connections that a peer still uses
        for group in self.groups:
            dist.destroy_process_group(group)


def on_found_nodes(config: EPLBConfig, context: Context) -> EPLBConfig:
    """Return the configuration with the context's number of nodes, unless it states one."""
    if not isinstance(config, EPLBConfig) or config.nodes is not None:
        return config
    return replace(config, nodes=context.layout.ep // context.layout.ep_ranks_per_node)


def with_routers_groups(config: EPLBConfig, layers: Sequence[BalancedLayer]) -> EPLBConfig:
    """Return the configuration with the number of the routers' expert groups, unless it states one.

    A router that selects fewer groups than there are nodes limits a token to few nodes if each group is on one node.
    """
    if not isinstance(config, EPLBConfig) or config.groups is not None:
        return config
    routers = [layer.config.routing for layer in layers if hasattr(layer, "config")]
    found = {(routing.num_groups, routing.top_groups) for routing in routers}
    groups, best = found.pop() if len(found) == 1 else (1, 1)
    limited = best < min(groups, config.nodes or 1)  # else a token may go to every node anyway
    return replace(config, groups=groups if limited else 1)


def connect(given: nn.Module | Sequence[BalancedLayer], context: Context, config: EPLBConfig) -> Connections:
    """Check the layers on all ranks, then make the process groups. Raise ConfigError on all ranks of the world."""
    layers = layers_of(given)
    checksum = Checksum(torch.device("cpu"))
    stores = [SlotStore(layer.expert_weights, checksum) for layer in layers]
    problem: EPMoEError | None = None
    staging: Staging | None = None
    try:
        # first among the ranks that run these layers; their problem reaches the rest of the world below
        facts = _facts(layers, stores, context.device)
        context.consensus.require_equal("ExpertBalancer", facts, _problem(layers, context, config))
        staging = _staging(stores, context.device, config)
    except EPMoEError as error:
        problem = error
    layout, name = context.layout, ""
    if layout.world > 1:
        name = numbered("balancer", layout.ranks)
        scope = PrefixStore(name, default_store())
        every = StoreConsensus(scope, layout.ranks, layout.rank, context.flight_recorder.deadline_s)
        every.require_equal("ExpertBalancer", {} if problem is not None else flat_facts(config, "EPLBConfig"), problem)
    elif problem is not None:
        raise problem
    assert staging is not None, "all ranks would have raised"
    groups: list[ProcessGroup] = []
    deadline = _deadline(config, context)
    status_exchange = StatusExchange(_dedicated_rank_group(context, "lockstep", name, "gloo", deadline, groups))
    # NCCL's own timeout would end the process, so it is longer than the balancer's
    kind, seconds = ("nccl", 2 * deadline + 60) if context.device.type == "cuda" else ("gloo", deadline / 2)
    mover = Mover(_dedicated_rank_group(context, "ep", name, kind, seconds, groups), staging, deadline / 2)
    for layer in layers:
        mover.warm_up(layer)
    context.consensus.raise_on_all_ranks("ExpertBalancer", None)  # wait until all ranks are connected
    return Connections(layers, mover, status_exchange, name, deadline, context.consensus, groups)


def _staging(stores: Sequence[SlotStore], device: torch.device, config: EPLBConfig) -> Staging:
    """Allocate the staging memory that all but rare maps need.

    It comes before any group is made, so that a rank without enough memory raises while no peer waits for it.
    """
    sizes = [(store.slots, store.row_bytes) for store in stores]
    size = StagingSize.usual(sizes, budget=config.bytes_per_step, commit=config.bytes_per_commit)
    try:
        return Staging(size, max(slots for slots, _ in sizes), device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"EPLBConfig.bytes_per_commit={config.bytes_per_commit} and bytes_per_step={config.bytes_per_step} need "
            f"{sum(size.rows) + size.outbox} bytes of memory on {device}, which has less free; lower them"
        ) from error


def _dedicated_rank_group(
    context: Context, kind: str, name: str, backend: str, timeout_s: float, made: list[ProcessGroup]
) -> RankGroup:
    """Return a rank group of the context over a new process group, which is added to `made`."""
    rank_group = context.rank_groups[kind]
    if rank_group.size == 1:
        return rank_group
    timeout = timedelta(seconds=timeout_s)
    options = _few_blocks(timeout) if backend == "nccl" else None
    own = make_group(context.layout, kind, name, timeout, backend, options)
    made.append(own)
    return RankGroup(own, rank_group.ranks, rank_group.rank, rank_group.flight_recorder)


def _few_blocks(timeout: timedelta) -> Any:
    """Return NCCL options with few thread blocks, which leave the multiprocessors to forwards."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = _BLOCKS
    return options


def _deadline(config: EPLBConfig, context: Context) -> float:
    return context.flight_recorder.deadline_s / 2 if config.deadline_s is None else config.deadline_s


def _facts(layers: Sequence[BalancedLayer], stores: Sequence[SlotStore], device: torch.device) -> dict[str, Any]:
    return {
        "layers": [layer.name for layer in layers],
        "bytes of a slot": [store.row_bytes for store in stores],
        "expert_map": [layer.placement.expert_map.to_json() for layer in layers],
        "device type": device.type,
    }


def _problem(layers: Sequence[BalancedLayer], context: Context, config: EPLBConfig) -> ConfigError | None:
    """Return this rank's problem instead of raising it, because all ranks must raise together."""
    if not isinstance(config, EPLBConfig):
        return ConfigError(f"ExpertBalancer.config must be an EPLBConfig, got {config!r}")
    if not layers:
        return ConfigError(
            "ExpertBalancer.layers must be a model with MoELayers in it, or a list of MoELayers: at least one on "
            "every pipeline stage"
        )
    if len({id(layer) for layer in layers}) < len(layers):
        return ConfigError(f"ExpertBalancer.layers must have each layer once, got {[layer.name for layer in layers]}")
    if _deadline(config, context) > context.flight_recorder.deadline_s:
        return ConfigError(
            f"EPLBConfig.deadline_s must be at most the context's, {context.flight_recorder.deadline_s:g}, got "
            f"{config.deadline_s:g}"
        )
    first = layers[0].placement.expert_map
    if first.num_ranks % (config.nodes or 1):
        return ConfigError(f"EPLBConfig.nodes must divide the {first.num_ranks} EP ranks, got {config.nodes}")
    if first.num_experts % (config.groups or 1):
        return ConfigError(f"EPLBConfig.groups must divide the {first.num_experts} experts, got {config.groups}")
    for layer in layers:
        placed, weights = layer.placement.expert_map, layer.expert_weights
        if getattr(layer, "context", context) is not context:
            return ConfigError(f"layer {layer.name} belongs to another EPContext; make a balancer per context")
        if placed.num_experts != first.num_experts:
            return ConfigError(
                f"layer {layer.name} has {placed.num_experts} experts and {layers[0].name} {first.num_experts}; make a "
                f"balancer for those that are alike"
            )
        if config.machine is not None and weights.config != layers[0].expert_weights.config:
            return ConfigError(
                f"layer {layer.name} differs from {layers[0].name}, and one price is for layers that are alike; make a "
                f"balancer for each kind, or leave EPLBConfig.machine None"
            )
        if any(parameter.requires_grad for parameter in weights.parameters()):
            return ConfigError(
                f"expert weights of layer {layer.name} require gradients, and an optimizer's state does not move with "
                f"them; call requires_grad_(False) of the model or of layer.expert_weights"
            )
        if weights.balancer() is not None:
            return ConfigError(
                f"layer {layer.name} has an ExpertBalancer already, and two would move the same experts; call close() "
                "of that one on all ranks first"
            )
        if weights.lora is not None:
            return ConfigError(
                f"expert weights of layer {layer.name} have LoRA factors, which do not move with them; call merge_lora "
                f"of ep_moe.integrations.lora first"
            )
        if weights.device.type == "meta":
            return ConfigError(f"layer {layer.name} is on the meta device; call to_empty(device=...) and load weights")
    return None


def layers_of(layers: object) -> list[BalancedLayer]:
    """Return a model's MoE layers in the order of its modules, or the given layers; [] for anything else."""
    if isinstance(layers, nn.Module):
        return [layer for layer in layers.modules() if _balanced(layer)]
    found = list(layers) if isinstance(layers, Iterable) else []
    return found if all(map(_balanced, found)) else []


def _balanced(layer: object) -> TypeGuard[BalancedLayer]:
    # from Python 3.12 on, isinstance of a Protocol sees static attributes only, and submodules are not static
    return all(hasattr(layer, name) for name in BalancedLayer.__annotations__)
