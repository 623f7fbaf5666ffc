"""Predicts the time of a layer that was not measured from layers that were, and the errors of such predictions.

    expected = launches + multiple * work

launches    of a kernel over a transport: the median of time minus floor of its layers of one token
work        the floor, with reads and products partly overlapped (`measured_lines.work_us`)
multiple    measured in the nearest run; between its lines interpolated by the logarithm of the rows per expert
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import NamedTuple

from ep_moe.bench.floors import Floor
from ep_moe.bench.measured_lines import (
    FOLDER,
    MeasuredLine,
    dispatch_format,
    expert_numbers,
    layer_sizes,
    log_rows,
    measured,
    work_us,
)
from ep_moe.config import MoEConfig

ITSELF, RANKS, TOKENS, MODEL = "itself", "another number of ranks", "another number of tokens", "another model"
ROWS_OUT, ROWS_BACK = "another row format of dispatch", "another row format of combine"
FEW_TOKENS = 16  # tokens per rank up to which errors are listed separately


class Layer(NamedTuple):
    """The layer to predict.

    gpu: name of the GPU
    pair: kernel and transport, as in `MeasuredLine`
    scheme: of the experts
    rows: as `rows_text` returns it
    tokens: of each rank
    floor: of the busiest rank
    """

    gpu: str
    pair: str
    scheme: str
    rows: str
    config: MoEConfig
    ranks: int
    tokens: int
    floor: Floor


@dataclass(frozen=True)
class Expected:
    """Time of one routed layer.

    Args:
        us: Microseconds.
        launches_us: The part of `us` that does not depend on the layer's size.
        source: The file and lines of the measurement, and how they differ from the layer.
        basis: The most important difference: MODEL, ROWS_OUT, ROWS_BACK, RANKS, TOKENS, in this order. ITSELF if the
            layer was measured.
    """

    us: float
    launches_us: float
    source: str
    basis: str


def expected_time(layer: Layer) -> Expected | None:
    """Predict the time of a layer, or look it up if it was measured.

    Args:
        layer: The layer.

    Returns:
        The time. None if no layer of this GPU, kernel, transport and scheme was measured.
    """
    lines = measured()
    alike = [one for one in lines if (one.gpu, one.pair, one.scheme) == (layer.gpu, layer.pair, layer.scheme)]
    if not alike:
        return None
    found = _prediction(layer, alike, lines)
    basis = _basis(layer, found.used)
    us = found.used[0].us if basis == ITSELF else found.us(work_us(layer.floor))
    return Expected(us, found.launches_us, _source(layer, found), basis)


class _Prediction(NamedTuple):
    """A prediction from measured lines.

    used: one line, or two to interpolate between
    multiples: of each line, (time - launches) / work
    weight: weight of the last line in the interpolation
    """

    launches_us: float
    used: list[MeasuredLine]
    multiples: list[float]
    weight: float

    def us(self, work: float) -> float:
        first, last = self.multiples[0], self.multiples[-1]
        return self.launches_us + (first + (last - first) * self.weight) * work


def _prediction(layer: Layer, alike: Iterable[MeasuredLine], lines: Iterable[MeasuredLine]) -> _Prediction:
    """Predict a layer. alike: lines of the same GPU, kernel, transport and scheme; lines: those for the launches"""
    x = log_rows(layer.config, layer.ranks, layer.tokens)
    used, launches = _neighbours(_nearest_run(layer, alike), x), _launches_us(layer, lines)
    multiples = [max(0.0, line.us - launches) / line.work_us for line in used]
    low, high = used[0].log_rows, used[-1].log_rows
    return _Prediction(launches, used, multiples, (x - low) / (high - low) if len(used) == 2 else 0.0)


def _nearest_run(layer: Layer, lines: Iterable[MeasuredLine]) -> list[MeasuredLine]:
    """Return the lines of the nearest run, sorted by rows per expert.

    Distance compares, in this order: rows on the wire, expert size, other sizes, ranks, rows per expert.
    """
    runs: dict[tuple[str, str, int, str], list[MeasuredLine]] = defaultdict(list)
    for line in lines:
        runs[line.file, line.model, line.ranks, line.rows].append(line)
    x = log_rows(layer.config, layer.ranks, layer.tokens)

    def distance(run: list[MeasuredLine]) -> tuple[bool, float, bool, float, float]:
        first = run[0]
        size = abs(log2(expert_numbers(first.config) / expert_numbers(layer.config)))
        other = first.layer != layer_sizes(layer.config)
        return (
            first.rows != layer.rows,
            size,
            other,
            abs(log2(first.ranks / layer.ranks)),
            min(abs(line.log_rows - x) for line in run),
        )

    nearest: list[MeasuredLine] = min(list(runs.values()), key=distance)
    return sorted(nearest, key=lambda line: line.log_rows)


def _neighbours(run: list[MeasuredLine], x: float) -> list[MeasuredLine]:
    """Return the lines to interpolate between: the line at x if there is one, else the nearest below and above."""
    below = [line for line in run if line.log_rows <= x]
    above = [line for line in run if line.log_rows > x]
    return below[-1:] if below and below[-1].log_rows == x else [*below[-1:], *above[:1]]


def _launches_us(layer: Layer, lines: Iterable[MeasuredLine]) -> float:
    """Return the median time of launches.

    It is taken from lines of this GPU, kernel, transport and scheme, else of the kernel and transport, else of the
    transport; 0.0 if there are none.
    """
    small = [line for line in lines if line.tokens == 1]
    transport = layer.pair.partition(" + ")[2]
    wanted: tuple[Callable[[MeasuredLine], bool], ...] = (
        lambda line: (line.gpu, line.pair, line.scheme) == (layer.gpu, layer.pair, layer.scheme),
        lambda line: line.pair == layer.pair,
        lambda line: line.pair.endswith(f" + {transport}"),
    )
    for wants in wanted:
        found = [line.us - line.floor.in_turn * line.drawn for line in small if wants(line)]
        if found:
            return max(0.0, statistics.median(found))
    return 0.0


def _basis(layer: Layer, used: list[MeasuredLine]) -> str:
    first = used[0]
    if first.layer != layer_sizes(layer.config):
        return MODEL
    if first.rows != layer.rows:
        return ROWS_BACK if dispatch_format(first.rows) == dispatch_format(layer.rows) else ROWS_OUT
    if first.ranks != layer.ranks:
        return RANKS
    return ITSELF if len(used) == 1 and first.tokens == layer.tokens else TOKENS


def _source(layer: Layer, found: _Prediction) -> str:
    used, first = found.used, found.used[0]
    points = ", ".join(f"{line.us:.1f} us at {line.tokens} tokens" for line in used)
    text = f"{FOLDER}/{first.file}: {first.model}, {first.ranks} ranks, {first.pair}, rows {first.rows}: {points}"
    other = []
    size = expert_numbers(layer.config) / expert_numbers(first.config)
    if size != 1:
        other.append(f"for experts of {size:.2g} times the size")
    elif first.layer != layer_sizes(layer.config):
        other.append("for another number of experts or top-k, or other shapes")
    if first.ranks != layer.ranks:
        other.append(f"{first.ranks} ranks for {layer.ranks}")
    if first.rows != layer.rows:
        other.append(f"rows {first.rows} for {layer.rows}")
    if len(used) == 1 and first.log_rows != log_rows(layer.config, layer.ranks, layer.tokens):
        other.append(f"beyond the measured {2**first.log_rows:g} rows per expert")
    return text + (f" ({'; '.join(other)})" if other else "")


# --- how far off ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldBack:
    """Errors of predictions of measured lines from other lines.

    Args:
        errors: Predicted / measured - 1, of each line that other lines can predict.
        few: The errors of lines with at most FEW_TOKENS tokens per rank.
    """

    errors: tuple[float, ...]
    few: tuple[float, ...]

    @property
    def median(self) -> float | None:
        """The median of absolute errors; None without errors."""
        return statistics.median(map(abs, self.errors)) if self.errors else None

    def within(self, share: float) -> int:
        """Return the number of errors whose absolute value is smaller than `share`."""
        return sum(abs(error) < share for error in self.errors)

    @staticmethod
    def worst(errors: Iterable[float]) -> float | None:
        """Return the error with the largest absolute value; None without errors."""
        return max(errors, key=abs, default=None)


def _hidden(line: MeasuredLine, other: MeasuredLine, basis: str) -> bool:
    """Return whether `other` must be hidden when `line` is predicted."""
    if line.model != other.model or basis == MODEL:
        return line.model == other.model
    if basis == ROWS_OUT:
        return dispatch_format(line.rows) == dispatch_format(other.rows)
    if basis == ROWS_BACK:
        return line.rows == other.rows
    return line.ranks == other.ranks and (basis == RANKS or line.tokens == other.tokens)


def _serves(line: MeasuredLine, other: MeasuredLine, basis: str) -> bool:
    """Return whether a line that is not hidden differs from the other only in the basis."""
    if basis == MODEL:
        return line.rows == other.rows
    rows = {
        ROWS_OUT: dispatch_format(line.rows) != dispatch_format(other.rows),
        ROWS_BACK: dispatch_format(line.rows) == dispatch_format(other.rows),
    }
    ranks = line.ranks == other.ranks or basis == RANKS
    return line.model == other.model and ranks and rows.get(basis, line.rows == other.rows)


@cache
def held_back(basis: str) -> HeldBack:
    """Hide each measured line and similar ones, and predict it from the remaining lines.

    A prediction uses the floor of the routes that the line's run drew.

    Args:
        basis: What the lines used for a prediction differ in. RANKS: the same layer on other ranks. TOKENS: other
            numbers of tokens of the same layer and ranks. ROWS_OUT, ROWS_BACK: rows of another format. MODEL: another
            model.

    Returns:
        The errors; none if no lines differ only in the basis.
    """
    errors, few = [], []
    for line in measured():
        left = [other for other in measured() if not _hidden(line, other, basis)]
        alike = [
            other
            for other in left
            if (other.gpu, other.pair, other.scheme) == (line.gpu, line.pair, line.scheme)
            and _serves(line, other, basis)
        ]
        if alike:
            layer = Layer(line.gpu, line.pair, line.scheme, line.rows, line.config, line.ranks, line.tokens, line.floor)
            error = _prediction(layer, alike, left).us(line.work_us) / line.us - 1
            errors.append(error)
            few += [error] if line.tokens <= FEW_TOKENS else []
    return HeldBack(tuple(errors), tuple(few))
