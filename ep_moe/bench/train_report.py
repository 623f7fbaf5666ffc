"""Shows lines of `bench.train` as tables and plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ep_moe.bench import harness
from ep_moe.bench.harness import Where, benchmark_main, parse

# largest difference of a result or gradient relative to its largest magnitude; a line with more counts as a different
# computation. It is sixteen roundings to bf16 (2**-9 each). dx has most: five of ours, in h, da, dh, its pairs and the
# sum; six more by hand, in the operations of the activation and the weighted results, in forward and backward
ERROR = 2**-5
# with products in E4M3: each operand is rounded by 2**-4, a sum of random numbers keeps this relative error, and there
# are two products
FLOAT8_ERROR = 2**-3


@dataclass
class TrainLine:
    """A line of `bench.train`. None: not measured or not available.

    part: "layer", or "experts" of one rank
    rows: pairs of row and expert on the busiest rank
    floor_ms: floor of forward and backward
    x_hand: time of the fastest correct layer by hand / time of this line
    peak_mib: peak memory of a step without parameters and inputs
    buffers_mib: memory of the transport and scratch memory, allocated once
    allowed: error beyond which a line counts as a different computation
    """

    model: str
    ranks: int
    part: str
    tokens: int
    rows: int
    owner: str
    name: str
    forward_ms: float | None
    step_ms: float
    floor_ms: float | None
    tflops: float
    error: float
    x_hand: float | None = None
    peak_mib: float | None = None
    buffers_mib: float | None = None
    allowed: float = ERROR

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed

    @property
    def x_floor(self) -> float | None:
        return None if self.floor_ms is None else self.step_ms / self.floor_ms

    @property
    def point(self) -> tuple[str, int, str, int]:
        """The key of the table that the line belongs to."""
        return self.model, self.ranks, self.part, self.tokens


def compared(lines: list[TrainLine]) -> list[TrainLine]:
    """Set `x_hand` of all lines, from the lines of the same point. Return the lines."""
    for line in lines:
        peers = [p.step_ms for p in lines if (p.point, p.owner, p.wrong) == (line.point, "by hand", False)]
        line.x_hand = min(peers) / line.step_ms if peers else None
    return lines


def tables(lines: Sequence[TrainLine]) -> list[Table]:
    """Return a table for each point."""
    points = list(dict.fromkeys(line.point for line in lines))
    return [table([line for line in lines if line.point == point]) for point in points]


def table(lines: Sequence[TrainLine]) -> Table:
    first = lines[0]
    where = f"EP{first.ranks}" if first.part == "layer" else "local experts alone"
    floor = "" if first.floor_ms is None else f"; floor {first.floor_ms:.3f} ms"
    title = f"{first.model}, {where}, {first.tokens} tokens per rank, {first.rows} rows of experts{floor}"
    shown = Table(title=title)
    numbers = ("forward ms", "fwd + bwd ms", "x by hand", "x floor", "TFLOP/s", "error", "peak MiB", "buffers MiB")
    for name in ("", "what", *numbers):
        shown.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    for line in lines:
        shown.add_row(
            line.owner, line.name, _number(line.forward_ms, 3), _number(line.step_ms, 3), _number(line.x_hand),
            _number(line.x_floor), f"{line.tflops:.3g}", f"{line.error:.4f}" + (" WRONG" if line.wrong else ""),
            _number(line.peak_mib, 0), _number(line.buffers_mib, 0),
        )  # fmt: skip
    return shown


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(lines: Sequence[TrainLine], file: Path) -> None:
    """Plot milliseconds with the floor, and peak memory, over tokens: a column of panels for each model and part."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((line.model, line.part) for line in lines))
    figure = Figure(figsize=(5 * len(columns) + 4, 8), layout="constrained")
    above, below = figure.subplots(2, len(columns), squeeze=False)
    for column, (model, part) in enumerate(columns):
        here = sorted((x for x in lines if (x.model, x.part) == (model, part)), key=lambda line: line.tokens)
        title = model if part == "layer" else f"{model}, local experts"
        _panel(above[column], here, lambda line: line.step_ms, title, "forward + backward, ms")
        floor = {line.tokens: line.floor_ms for line in here if line.floor_ms is not None}
        above[column].plot(list(floor), list(floor.values()), "k:", label="floor")
        above[column].set_yscale("log")
        _panel(below[column], here, lambda line: line.peak_mib, title, "peak memory, MiB")
        above[column].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def _panel(
    axes: Any, lines: Sequence[TrainLine], value: Callable[[TrainLine], float | None], title: str, label: str
) -> None:
    """Draw a curve for each name, of lines that are correct and were measured."""
    for number, name in enumerate(dict.fromkeys((line.owner, line.name) for line in lines)):
        own = [x for x in lines if (x.owner, x.name) == name and not x.wrong and value(x) is not None]
        style = "o-" if name[0] == "ours" else "x--"
        axes.plot([x.tokens for x in own], [value(x) for x in own], style, color=f"C{number}", label=", ".join(name))
    axes.set(xscale="log", xlabel="tokens per rank", ylabel=label, title=title)


def read(file: Path) -> list[TrainLine]:
    """Read a file that `harness.write` wrote. Raise ConfigError for any other file."""
    return harness.read(file, TrainLine, "bench.train")


@benchmark_main
def main() -> list[TrainLine]:
    """Tables and picture of a file that bench.train wrote: python -m ep_moe.bench.train_report FILE [--plot F]"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.ANYWHERE)
    lines = read(asked.file)
    Console(width=150).print(*tables(lines))
    if asked.plot is not None:
        plot(lines, asked.plot)
    return lines


if __name__ == "__main__":
    main()
