"""The layouts of a model on GPUs that are not here, the best first. For `ep-moe fit`."""

from __future__ import annotations

from collections.abc import Iterator

from ep_moe.bench.fit import Found, LayerTime, Question, layer_time, memory
from ep_moe.config import ParallelConfig
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.parallel.layout import RankLayout
from ep_moe.selection import explain


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
            if asked.scheme.problem(asked.config, layout.etp) is not None:
                continue
            key = (layout.ep, layout.etp)
            if key not in chosen:
                chosen[key] = _choice(asked, layout)
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


def _choice(asked: Question, layout: RankLayout) -> explain.BackendChoice | None:
    try:
        return asked.choose(layout)
    except BackendUnavailable:
        return None
