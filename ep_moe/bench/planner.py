"""Time and quality of the EPLB planner, compared with a copy of DeepSeek's own `eplb.py` if there is one.

    python -m ep_moe.bench.planner [--deepseek eplb.py] [--large] [--repeat N]

Load is rand**4 * 1000. The current map is the linear one with its copies last. In lines marked drift, the current map
is the planner's own for an earlier load, after which the load of each expert changed by up to a quarter, up or down.
DeepSeek's planner does not take a current map, so it does not match its ranks to it.

ms          median of calls in turns. Ours: `plan` with checks, arrays and ExpertMaps, and with the comparison with the
            current map; theirs: `rebalance_experts`, which returns three tensors
balance     mean over layers of mean rank load / largest rank load; start: of the current map
worse       number of layers whose largest rank load is higher than under DeepSeek's plan
moved       number of experts that ranks have to fetch, over all ranks
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ep_moe.bench.harness import Where, benchmark_main, parse, positive, tracked
from ep_moe.eplb import balancedness, loads_by_rank, plan, traffic
from ep_moe.eplb.planner.packing import Floats
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import ExpertMap


@dataclass(frozen=True)
class Case:
    layers: int
    experts: int
    slots: int
    ranks: int
    groups: int = 1
    nodes: int = 1

    def __str__(self) -> str:
        where = f", {self.groups} groups, {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.layers} x {self.experts} -> {self.slots} on {self.ranks}{where}"


CASES = (
    Case(58, 256, 288, 32, 8, 4),
    Case(58, 256, 288, 32),
    Case(94, 128, 160, 32),
    Case(48, 128, 128, 4),
    Case(58, 256, 320, 64, 8, 8),
)
ENOUGH = 0.95
COLUMNS = ("case", "ms", "DS ms", "ratio", "start", "balance", "DS", "worse", "moved", "DS moved")
LARGE = (Case(58, 256, 1024, 512), Case(58, 256, 1024, 512, 8, 8))

Planner = Callable[[Floats, Case], list[ExpertMap]]


def deepseek(path: Path) -> Callable[[Floats, Case], Any]:
    """Return the call of `rebalance_experts` of the user's own copy."""
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"--deepseek {path} is no .py file; give the path of a copy of its eplb.py")
    spec = importlib.util.spec_from_file_location("deepseek_eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "rebalance_experts"):
        raise ConfigError(f"--deepseek {path} has no rebalance_experts; give the path of a copy of its eplb.py")
    return lambda load, case: module.rebalance_experts(
        torch.from_numpy(load), case.slots, case.groups, case.nodes, case.ranks
    )


def as_maps(found: Any, case: Case) -> list[ExpertMap]:
    physical = found[0].reshape(len(found[0]), case.ranks, -1).tolist()
    return [ExpertMap.from_ranks(ranks, case.experts, allow_duplicates=True) for ranks in physical]


def compare(case: Case, theirs: Callable[[Floats, Case], Any] | None, repeat: int) -> list[list[str]]:
    """Return a line from the linear map, one after drift, and one after drift with a lower `enough`."""
    rng = np.random.default_rng(0)
    load = rng.random((case.layers, case.experts)) ** 4 * 1000
    current = [ExpertMap.redundant(case.experts, case.ranks, case.slots - case.experts)] * case.layers
    first, planned = measure(case, load, current, theirs, repeat)
    drifted = load * rng.uniform(0.75, 1.25, load.shape)
    second, _ = measure(case, drifted, planned, theirs, repeat)
    third, _ = measure(case, drifted, planned, None, repeat, ENOUGH)
    return [[str(case), *first], ["    drift", *second], [f"    drift, {ENOUGH} is enough", *third]]


def measure(
    case: Case,
    load: Floats,
    current: Sequence[ExpertMap],
    theirs: Callable[[Floats, Case], Any] | None,
    repeat: int,
    enough: float = 1.0,
) -> tuple[list[str], list[ExpertMap]]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat + 1):
        start = time.perf_counter()
        planned = plan(load, current, groups=case.groups, nodes=case.nodes, enough=enough)
        middle = time.perf_counter()
        found = None if theirs is None else theirs(load, case)
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
    ms, other_ms = (statistics.median(own[1:]) * 1e3 for own in times)
    before, after = loads_by_rank(load, current), loads_by_rank(load, planned)
    cells = [f"{ms:.1f}", "", "", f"{balancedness(before).mean():.4f}", f"{balancedness(after).mean():.4f}", "", ""]
    cells += [str(traffic(current, planned, expert_bytes=1).moved), ""]
    if found is not None:
        maps = as_maps(found, case)
        ranks = loads_by_rank(load, maps)
        cells[1], cells[2] = f"{other_ms:.0f}", f"{other_ms / ms:.1f}"
        cells[5] = f"{balancedness(ranks).mean():.4f}"
        cells[6] = str(int((after.max(1) > ranks.max(1) * (1 + 1e-6)).sum()))  # theirs computes in float32
        cells[8] = str(traffic(current, maps, expert_bytes=1).moved)
    return cells, planned


@benchmark_main
def main() -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepseek", type=Path, help="DeepSeek's eplb.py")
    parser.add_argument("--large", action="store_true", help="512 ranks too: minutes with --deepseek")
    parser.add_argument("--repeat", type=positive, default=9)
    asked = parse(parser, Where.ANYWHERE)
    theirs = None if asked.deepseek is None else deepseek(asked.deepseek)
    found = Table(title=f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}")
    lines: list[dict[str, Any]] = []
    for name in COLUMNS:
        found.add_column(name, no_wrap=True, justify="left" if name == "case" else "right")
    for case in tracked(CASES + (LARGE if asked.large else ()), "case", asked):
        for row in compare(case, theirs, asked.repeat if case in CASES else 1):
            found.add_row(*row)
            numbers = {name: float(cell) if cell else None for name, cell in zip(COLUMNS[1:], row[1:], strict=True)}
            lines.append({"case": row[0].strip(), "of": str(case), **numbers})
    Console(width=130).print(found)
    return lines


if __name__ == "__main__":
    main()
