"""Plans in a background thread: from a window's load to new maps, their price, digest and transfer schedules."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from ep_moe.checks import shown
from ep_moe.config import MoEConfig
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.cost import LayerTime, Price, verdict
from ep_moe.eplb.migration.schedule import TransferSchedule, sub_plans, transfer_schedule
from ep_moe.eplb.migration.transfer import StagingSize
from ep_moe.eplb.planner.packing import Ints
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import loads_by_rank, traffic
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import LayerStats, Placement

_YIELD_S = 1e-3
_STRETCH_S = 2e-4  # longest time without a pause: the GIL lets one thread run, and the main thread launches forwards

Planner: TypeAlias = Callable[[Ints, Sequence[ExpertMap]], Sequence[ExpertMap]]


@dataclass(frozen=True)
class Decision:
    """The result of a planning thread.

    maps: one per layer; the one in force if nothing moves
    price: None without `EPLBConfig.machine`, without load, and for a user's own maps
    schedules: this rank's transfers for each layer, one schedule for each sub-plan; () for a layer that does not change
    """

    maps: tuple[ExpertMap, ...]
    price: Price | None = None
    schedules: tuple[tuple[TransferSchedule, ...], ...] = ()

    @cached_property
    def digest(self) -> int:
        """64 bits of a hash of the maps, of those that they replace, and of the bytes of experts that move. Signed."""
        text = hashlib.sha256()
        for placed in (*self.maps, *(parts[0].old for parts in self.schedules if parts)):
            slots = placed.physical_to_logical
            text.update(array("q", (placed.num_experts, placed.num_ranks, placed.allow_duplicates, len(slots), *slots)))
        text.update(array("q", [part.row_bytes for parts in self.schedules for part in parts]))
        return int.from_bytes(text.digest()[:8], "big", signed=True)

    @cached_property
    def staging_size(self) -> StagingSize:
        """The staging memory that this rank needs."""
        return StagingSize.of_plan(part for parts in self.schedules for part in parts)


def default_planner(config: EPLBConfig, slots: Sequence[Sequence[int]]) -> Planner:
    """Return a planner that calls `plan` with the options of a configuration.

    slots: [layers, R], the slots that there is memory for. The map in force may leave some of them empty.
    """

    def by_load(load: Ints, current: Sequence[ExpertMap]) -> Sequence[ExpertMap]:
        c = config
        return plan(
            load, current, groups=c.groups or 1, nodes=c.nodes or 1, slots=slots, tolerance=c.tolerance, enough=c.enough
        )

    return by_load


def decide(
    load: Ints, current: Sequence[ExpertMap], planner: Planner, config: EPLBConfig, moe: MoEConfig, expert_bytes: int
) -> Decision:
    """Plan maps for a window's load, and price them. Return the current maps if the price is too high.

    load: int64 [layers, E], the window's routes of all ranks
    expert_bytes: bytes of one expert on all its etp ranks
    """
    if not load.any():
        return Decision(tuple(current))
    found = planner(load.copy(), current)  # a copy, because a planner may write into it and the price needs the load
    if not isinstance(found, Iterable):
        raise ConfigError(f"the planner must return an ExpertMap per layer, got {shown(found)}")
    planned = tuple(found)
    if len(planned) != len(current):
        raise ConfigError(f"the planner must return a map per layer, {len(current)}, got {len(planned)}")
    if odd := [one for one in planned if not isinstance(one, ExpertMap)]:
        raise ConfigError(f"the planner must return an ExpertMap per layer, got {shown(odd[0])} among them")
    if config.machine is None:
        return Decision(planned)
    ranks = current[0].num_ranks
    per_node = ranks // (config.nodes or 1)
    time.sleep(_YIELD_S)
    moved = traffic(current, planned, expert_bytes=expert_bytes, ranks_per_node=per_node)
    time.sleep(_YIELD_S)
    price = verdict(
        load / config.window,
        current,
        planned,
        moved=moved,
        time=replace(LayerTime.of(moe, config.machine), expert_bytes=expert_bytes),
        within_steps=config.interval,
        ranks_per_node=per_node,
    )
    return Decision(planned if price.accepted else tuple(current), price)


def decision_for_user_maps(maps: Sequence[ExpertMap], layers: int) -> Decision:
    """Return a decision for a user's own maps. It runs as a plan does, so that all ranks learn of an error."""
    found = tuple(maps) if isinstance(maps, Iterable) else ()
    if len(found) != layers or not all(isinstance(placed, ExpertMap) for placed in found):
        got = f"{len(found)}: {shown(list(found))}" if found else shown(maps)
        raise ConfigError(f"move_to needs an ExpertMap per layer, {layers}, got {got}")
    return Decision(found)


def add_transfer_schedules(
    call: Callable[[], Decision],
    layers: Sequence[tuple[Placement, ExpertMap, int]],
    *,
    rank: int,
    budget: int,
    commit: int,
    ranks_per_node: int,
) -> Decision:
    """Check the decision of `call`, and add its transfer schedules.

    It also computes the digest and the staging size. All of this would take too long within a step.

    layers: of each layer the placement, the map that was in force at the same step on all ranks, and a slot's bytes
    budget: bytes of a step
    commit: bytes of a commit
    """
    decision, parts, pause = call(), list[tuple[TransferSchedule, ...]](), _GilThrottle()
    rest: dict[str, Any] = {"budget": budget, "ranks_per_node": ranks_per_node, "pause": pause}
    for (placement, old, size), new in zip(layers, decision.maps, strict=True):
        pause()
        placement.check(new)
        pause()
        way, found = [old, *sub_plans(old, new, max(1, commit // size), pause=pause)], list[TransferSchedule]()
        for one, next_one in pairwise(way):
            pause()
            found.append(transfer_schedule(one, next_one, rank, row_bytes=size, **rest))
        parts.append(tuple(found))
    decision = replace(decision, schedules=tuple(parts))
    pause()
    _ = decision.digest, decision.staging_size  # computes these cached properties in this thread
    return decision


def layer_load_stats(names: Sequence[str], load: Ints, maps: Sequence[ExpertMap]) -> tuple[LayerStats, ...]:
    """Return a window's load for each layer, by expert and by rank. Replicas of an expert share its load equally."""
    rows = zip(names, load.tolist(), loads_by_rank(load, maps).tolist(), strict=True)
    return tuple(LayerStats(name, tuple(experts), tuple(held)) for name, experts, held in rows)


class _GilThrottle:
    """Yields the GIL: sleeps 1 ms at the first call, and at any call more than 0.2 ms after the last sleep."""

    def __init__(self) -> None:
        self._since = -math.inf

    def __call__(self) -> None:
        if time.perf_counter() - self._since > _STRETCH_S:
            time.sleep(_YIELD_S)
            self._since = time.perf_counter()


class Background:
    """Runs a call in a thread of its own. The call must not use a device. `result` raises its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="ep_moe eplb plan")
        self._thread.start()

    def _run(self) -> None:
        time.sleep(_YIELD_S)  # otherwise the thread that starts this one would wait for it
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.done, "wait until it is done"
        if self._error is not None:
            raise self._error
        return self._value
