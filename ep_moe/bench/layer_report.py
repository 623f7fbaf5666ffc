"""Shows lines of `bench.layer` as tables and plots."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ep_moe.bench import harness
from ep_moe.bench.harness import Where, benchmark_main, parse

ERRORS = {"bf16": 2e-2, "fp8": 0.15}  # errors beyond which a line counts as a different computation, by weights


@dataclass
class LayerLine:
    """A line of `bench.layer`. Times in microseconds, memory in bytes; None: not measured or not available."""

    model: str
    ranks: int
    tokens: int
    owner: str
    name: str
    scheme: str
    weights: str
    rows: str
    us: float
    error: float
    floor_apart_us: float
    floor_overlap_us: float
    x_peer: float | None = None
    host_us: float | None = None
    captured_host_us: float | None = None
    dispatch_us: float | None = None
    experts_us: float | None = None
    combine_us: float | None = None
    rest_us: float | None = None
    plan_bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def wrong(self) -> bool:
        return not self.error <= ERRORS[self.weights]


def table(lines: Sequence[LayerLine]) -> Table:
    first = lines[0]
    floor = ", ".join(
        f"{kind} {found[0].floor_apart_us:.0f} / {found[0].floor_overlap_us:.0f}"
        for kind in ERRORS
        if (found := [line for line in lines if line.weights == kind])
    )
    title = f"{first.model}, EP{first.ranks}, {first.tokens} tokens per rank; floors apart / overlapped: {floor} us"
    shown = Table(title=title)
    numbers = ("us", "x peer", "x apart", "x overlap", "error", "host us", "captured")
    for name in ("", "what", "weights", "rows", *numbers):
        shown.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    for line in sorted(lines, key=lambda line: (line.weights, line.us)):
        shown.add_row(
            line.owner, line.name, line.scheme, line.rows, f"{line.us:.1f}", _number(line.x_peer),
            f"{line.us / line.floor_apart_us:.2f}", f"{line.us / line.floor_overlap_us:.2f}",
            f"{line.error:.3f}" + (" WRONG" if line.wrong else ""), _number(line.host_us, 0),
            _number(line.captured_host_us, 0),
        )  # fmt: skip
    return shown


def stage_table(lines: Sequence[LayerLine]) -> Table:
    """Return the table of stages and memory of our own lines."""
    shown = Table(title="stages of our lines, us; memory, MiB")
    numbers = ("us", "dispatch", "experts", "combine", "rest", "plan", "held", "peak", "plan / held", "plan / peak")
    for name in ("what", "weights", "rows", *numbers):
        shown.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    for line in lines:
        if line.owner != "ours":
            continue
        times = (line.us, line.dispatch_us, line.experts_us, line.combine_us, line.rest_us)
        sizes = (line.plan_bytes, line.held_bytes, line.peak_bytes)
        shares = (line.plan_bytes / size if size and line.plan_bytes else None for size in sizes[1:])
        shown.add_row(
            line.name,
            line.scheme,
            line.rows,
            *(_number(us, 1) for us in times),
            *(_number(None if size is None else size / 2**20, 0) for size in sizes),
            *(_number(share, 3) for share in shares),
        )
    return shown


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(lines: Sequence[LayerLine], file: Path) -> None:
    """Plot multiples of the overlapped floor over tokens: a row of panels per kind of weights, a column per model."""
    from matplotlib.figure import Figure

    models, kinds = list(dict.fromkeys(line.model for line in lines)), sorted({line.weights for line in lines})
    figure = Figure(figsize=(6 * len(models) + 4, 4 * len(kinds)), layout="constrained")
    for row, kind in zip(figure.subplots(len(kinds), len(models), squeeze=False), kinds, strict=True):
        names = list(dict.fromkeys(_key(line) for line in lines if line.weights == kind))
        for axes, model in zip(row, models, strict=True):
            here = [line for line in lines if (line.model, line.weights) == (model, kind)]
            here.sort(key=lambda line: line.tokens)
            for number, name in enumerate(names):
                own = [line for line in here if _key(line) == name and not line.wrong]
                style = "o-" if name[0] == "ours" else "x--"
                label = ", ".join(name) if kind == "fp8" else ", ".join(name[:2])
                times = [x.us / x.floor_overlap_us for x in own]
                axes.plot([x.tokens for x in own], times, style, color=f"C{number}", label=label)
            floor = {line.tokens: line.floor_apart_us / line.floor_overlap_us for line in here}
            axes.plot(list(floor), list(floor.values()), "k-.", label="floor, apart")
            axes.axhline(1, color="k", linestyle=":", label="floor, overlap")
            axes.set(
                xscale="log", xlabel="tokens per rank", ylabel="times the overlapped floor", title=f"{model}, {kind}"
            )
        row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(file, dpi=110)


def _key(line: LayerLine) -> tuple[str, str, str, str]:
    """Return the key of the curve that a line belongs to."""
    return line.owner, line.name, line.scheme, line.rows


def read(file: Path) -> list[LayerLine]:
    """Read a file that `harness.write` wrote. Raise ConfigError for any other file."""
    return harness.read(file, LayerLine, "bench.layer")


@benchmark_main
def main() -> list[LayerLine]:
    """Tables and picture of a file that bench.layer wrote: python -m ep_moe.bench.layer_report FILE [--plot F]"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.ANYWHERE)
    lines = read(asked.file)
    for key in dict.fromkeys((line.model, line.ranks, line.tokens) for line in lines):
        Console(width=150).print(table([line for line in lines if (line.model, line.ranks, line.tokens) == key]))
    if asked.plot is not None:
        plot(lines, asked.plot)
    return lines


if __name__ == "__main__":
    main()
