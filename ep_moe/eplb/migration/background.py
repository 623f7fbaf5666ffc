"""From a window's load to the maps that are to be put in force: plan, price, digest. Off the critical path."""

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
from ep_moe.eplb.migration.transfer import Room
from ep_moe.eplb.planner.packing import Ints
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import loads_by_rank, traffic
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import LayerStats, Placement

_YIELD_S = 1e-3
_STRETCH_S = 2e-4  # of Python without a pause: it runs one thread at a time, and the other one has forwards to launch

Planner: TypeAlias = Callable[[Ints, Sequence[ExpertMap]], Sequence[ExpertMap]]


@dataclass(frozen=True)
class Decision:
    """What a planning thread has found.

    maps: one per layer, the one in force where nothing moves
    price: None where none was asked for
    schedules: this rank's transfers per layer, for each sub-plan in turn; none where nothing moves
    """

    maps: tuple[ExpertMap, ...]
    price: Price | None = None
    schedules: tuple[tuple[TransferSchedule, ...], ...] = ()

    @cached_property
    def digest(self) -> int:
        """64 bits of a hash of the maps, as a signed integer."""
        text = hashlib.sha256()
        for placed in self.maps:
            slots = placed.physical_to_logical
            text.update(array("q", (placed.num_experts, placed.num_ranks, placed.allow_duplicates, len(slots), *slots)))
        return int.from_bytes(text.digest()[:8], "big", signed=True)

    @cached_property
    def room(self) -> Room:
        """That this rank needs."""
        return Room.of_plan(part for parts in self.schedules for part in parts)


def default_planner(config: EPLBConfig, slots: Sequence[Sequence[int]]) -> Planner:
    """slots: [layers, R], that there is memory for: a map in force that leaves some empty is not for ever"""

    def by_load(load: Ints, current: Sequence[ExpertMap]) -> Sequence[ExpertMap]:
        c = config
        return plan(
            load, current, groups=c.groups or 1, nodes=c.nodes or 1, slots=slots, tolerance=c.tolerance, enough=c.enough
        )

    return by_load


def decide(
    load: Ints, current: Sequence[ExpertMap], planner: Planner, config: EPLBConfig, moe: MoEConfig, expert_bytes: int
) -> Decision:
    """load: int64 [layers, E], a window's routes of all ranks. expert_bytes: of one expert on all its etp ranks."""
    if not load.any():
        return Decision(tuple(current))
    found = planner(load.copy(), current)  # who writes into it does not change what the plan is priced by
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


def given(maps: Sequence[ExpertMap], layers: int) -> Decision:
    """A user's own maps, checked where all ranks hear of what is wrong."""
    found = tuple(maps) if isinstance(maps, Iterable) else ()
    if len(found) != layers or not all(isinstance(placed, ExpertMap) for placed in found):
        got = f"{len(found)}: {shown(list(found))}" if found else shown(maps)
        raise ConfigError(f"move_to needs an ExpertMap per layer, {layers}, got {got}")
    return Decision(found)


def laid_out(
    call: Callable[[], Decision],
    layers: Sequence[tuple[Placement, ExpertMap, int]],
    *,
    rank: int,
    budget: int,
    commit: int,
    ranks_per_node: int,
) -> Decision:
    """What `call` decides, checked, with all that a step would take long for.

    layers: placement, the map that was in force at the same step on all ranks, a slot's bytes
    budget, commit: bytes of a step, and of what is put in force at once
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
    _ = decision.digest, decision.room  # computed here and kept
    return decision


def loads(names: Sequence[str], load: Ints, maps: Sequence[ExpertMap]) -> tuple[LayerStats, ...]:
    """A window's load per layer, each replica of an expert carrying an equal share."""
    rows = zip(names, load.tolist(), loads_by_rank(load, maps).tolist(), strict=True)
    return tuple(LayerStats(name, tuple(experts), tuple(held)) for name, experts, held in rows)


class _GilThrottle:
    """Called often, it lets other threads run where this one has long enough, and at first."""

    def __init__(self) -> None:
        self._since = -math.inf

    def __call__(self) -> None:
        if time.perf_counter() - self._since > _STRETCH_S:
            time.sleep(_YIELD_S)
            self._since = time.perf_counter()


class Background:
    """A call in a thread of its own, which must not touch a device. Its error is raised by `result`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="ep_moe eplb plan")
        self._thread.start()

    def _run(self) -> None:
        time.sleep(_YIELD_S)  # or who starts the thread would wait for it
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
