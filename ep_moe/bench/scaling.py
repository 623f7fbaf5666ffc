"""A model of larger EP groups: bytes on each link, floors of a routed layer, and crossovers, for 1 to 320 ranks.

    python -m ep_moe.bench.scaling [MODEL ...] [--ranks R ...] [--ep R ...] [--tokens T ...] [--csv F] ...

It measures nothing and uses no device. `--measured` compares the model with files of bench.layer and bench.all2all.
docs/explanation/scaling.md explains the model and what it omits.

in turn      microseconds of dispatch, then experts, then combine
overlapped   the larger of experts and wire, as if one hid the other completely
w, p, n      what determines the overlapped floor: weights read, matrix products, or the links
+ N          N redundant experts, by default as many as give all ranks the same number of slots
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ep_moe.bench.all2all import EXPERTS, TOP_K
from ep_moe.bench.floors import (
    KINDS,
    PER_HOST,
    SECOND_LEVEL_US,
    Floor,
    Kind,
    faster_between,
    floor,
    saved_by_dedup,
    tokens_text,
    two_levels_beside_flat,
    wire_bound_from,
)
from ep_moe.bench.harness import Where, add_models, benchmark_main, natural, not_negative, parse, positive
from ep_moe.bench.wire_rows import Way, deduplicated, filling, gathered, per_route, remote_ranks, row_bytes, two_level
from ep_moe.config import MoEConfig, Wire
from ep_moe.eplb.cost import H200
from ep_moe.errors import ConfigError
from ep_moe.integrations.model_name import config_named

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
RANKS = (1, 2, 4, 8, 16, 32, 64)
EP = (16, 32, 64, 128, 144, 256, 320)  # EP groups of several hosts
TOKENS = (1, 16, 128, 1024, 8192)  # tokens of each rank
TOTALS = (64, 1024, 8192, 65536)  # tokens of the whole job
EXTRA_US = (-20.0, 10.0)  # additional time of deduplication over a gather, for any number of tokens


# --- what was measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A captured transport's time as fixed + tokens * slope, in microseconds.

    fixed: time at the fewest tokens
    slope: slope between the two largest numbers of tokens
    model: the model's slope at the peer-to-peer rate of that run
    """

    transport: str
    rows: str
    hidden: int
    fixed: float
    slope: float
    model: float


def read(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    if not file.is_file():
        raise ConfigError(f"--measured {file} does not exist; write it with bench.layer or bench.all2all and --csv")
    with file.open(newline="") as text:
        lines = list(csv.DictReader(text))
    missing = [name for name in columns if not lines or name not in lines[0]]
    if missing:
        raise ConfigError(f"{file} has no column {missing[0]}; write it with bench.layer or bench.all2all and --csv")
    return lines


def layer_lines(file: Path, ranks: int) -> list[list[str]]:
    """Return the cells of each line of `bench.layer` with bf16 or fp8 weights and the model's floors, sorted by tokens.

    ranks: the number of ranks if the file does not state it
    """
    found = []
    for line in sorted(read(file, ("model", "tokens", "us")), key=lambda line: (line["model"], int(line["tokens"]))):
        scheme = line.get("weights") or line.get("scheme") or "none"
        weights = "bf16" if scheme == "none" else scheme.split("_")[0]
        if not line["us"] or weights not in KINDS:
            continue
        rows = line.get("rows") or "plain"  # out, or out / back
        out, _, back = rows.partition("/")
        wire = Wire(dispatch="fp8_block" if "fp8" in out else "plain", combine="fp8" if "fp8" in back else "plain")
        kind = dataclasses.replace(KINDS[weights], wire=wire)
        own, us = int(line.get("ranks") or ranks), float(line["us"])
        least = floor(uniform(line["model"]), kind, own, int(line["tokens"]))
        what = line.get("name") or " ".join(line.get(name) or "" for name in ("experts", "all2all"))
        cells = [line["model"], str(own), line["tokens"], what, weights, rows, f"{us:.0f}", str(least)]
        found.append([*cells, f"{us / least.in_turn:.2f}", f"{us / least.overlapped:.2f}"])
    return found


def slopes(file: Path, ranks: int) -> list[Slope]:
    """Return a slope for each transport, row format and H of a file of `bench.all2all`, of one host.

    Eager lines show the time of the host, so they are left out.
    """
    series: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for line in read(file, ("transport", "rows", "hidden", "tokens", "us", "captured", "wire_bytes", "floor_us")):
        if line["captured"] != "True":
            continue
        series.setdefault((line["transport"], line["rows"], int(line["hidden"])), []).append(line)
    found = []
    for (transport, rows, hidden), lines in series.items():
        lines.sort(key=lambda line: int(line["tokens"]))
        if len(lines) < 3:
            continue
        first, (low, high) = lines[0], lines[-2:]
        slope = (float(high["us"]) - float(low["us"])) / (int(high["tokens"]) - int(low["tokens"]))
        rate = float(high["wire_bytes"]) / float(high["floor_us"]) * 1e6
        machine = dataclasses.replace(H200, link_bytes_per_s=rate)
        way = (per_route if transport == "pplx" else deduplicated)(benched(hidden), ranks, ranks)
        model = sum(way.us(benched(hidden), Wire(dispatch=rows), machine))
        found.append(Slope(transport, rows, hidden, float(first["us"]), slope, model))
    return found


def benched(hidden: int) -> MoEConfig:
    """Return the configuration that `bench.all2all` uses."""
    return MoEConfig(hidden_size=hidden, intermediate_size=1, num_experts=EXPERTS, top_k=TOP_K)


# --- tables --------------------------------------------------------------------------------------------------------


def redundant_of(config: MoEConfig, ranks: int, asked: argparse.Namespace) -> int:
    """Return the number of redundant slots for a number of ranks."""
    return filling(config.num_experts, ranks) if asked.redundant is None else int(asked.redundant)


def least(
    config: MoEConfig, kind: Kind, ranks: int, tokens: float, asked: argparse.Namespace, way: Way = deduplicated
) -> Floor:
    redundant = redundant_of(config, ranks, asked)
    return floor(config, kind, ranks, tokens, per_host=asked.per_host, way=way, redundant=redundant)


def floors_table(title: str, first: str, lines: Iterable[tuple[str, Sequence[object]]], ranks: Sequence[str]) -> Table:
    found = Table(title=title)
    for name in (first, *ranks):
        found.add_column(name, no_wrap=True, justify="right")
    for name, cells in lines:
        found.add_row(name, *map(str, cells))
    return found


def uniform(name: str) -> MoEConfig:
    """Return the configuration of a model's layer, with a router without expert groups."""
    config = config_named(name)
    return dataclasses.replace(config, routing=dataclasses.replace(config.routing, num_groups=1, top_groups=1))


def print_model(console: Console, name: str, asked: argparse.Namespace) -> None:
    config, ranks = uniform(name), asked.ranks
    extra = [redundant_of(config, count, asked) for count in ranks]
    heads = [f"R = {count}" + (f" + {more}" if more else "") for count, more in zip(ranks, extra, strict=True)]
    for kind in KINDS.values():
        weak = [(str(t), [least(config, kind, r, t, asked) for r in ranks]) for t in asked.tokens]
        strong = [(str(t), [least(config, kind, r, t / r, asked) for r in ranks]) for t in asked.totals]
        title = f"{name}, {kind.name}: floor in turn/overlapped, us"
        console.print(floors_table(f"{title}, tokens per rank fixed", "T per rank", weak, heads))
        console.print(floors_table(f"{title}, tokens of the job fixed", "T of all", strong, heads))


def print_hosts(console: Console, name: str, asked: argparse.Namespace) -> None:
    """Print a table of EP groups on several hosts, flat and in two levels."""
    config, per_host = uniform(name), asked.per_host
    groups = [count for count in asked.ep if count > per_host]
    for kind in KINDS.values() if groups else ():
        found = Table(
            title=f"{name}, {kind.name}, hosts of {per_host}: KiB per token that reach a rank, out + back, and "
            f"floor in turn, us; flat / two levels"
        )
        for column in ("EP", "hosts", "slots", "NVLink", "network", "faster", *(f"T = {t}" for t in asked.tokens)):
            found.add_column(column, no_wrap=True, justify="right")
        for count in groups:
            found.add_row(*host_cells(config, kind, count, asked))
        console.print(found)
    if groups:
        console.print(f"faster: tokens per rank at which two levels are, if they cost {SECOND_LEVEL_US:g} us more")


def host_cells(config: MoEConfig, kind: Kind, ranks: int, asked: argparse.Namespace) -> list[str]:
    """Return the cells of a line of `print_hosts`."""
    redundant, both = redundant_of(config, ranks, asked), (deduplicated, two_level)
    rows = [way(config, ranks, asked.per_host, redundant) for way in both]
    kib = sum(row_bytes(config, kind.wire, config.top_k)) / 1024
    return [
        f"{ranks} + {redundant}" if redundant else str(ranks),
        str(ranks // asked.per_host),
        str(-(-(config.num_experts + redundant) // ranks)),
        " / ".join(f"{one.near * kib:.1f}" for one in rows),
        " / ".join(f"{one.far * kib:.1f}" for one in rows),
        two_levels_beside_flat(config, kind, ranks, asked.per_host, redundant).two_level_pays,
        *(" / ".join(f"{least(config, kind, ranks, t, asked, way).in_turn:.0f}" for way in both) for t in asked.tokens),
    ]


def print_wire(console: Console, models: Sequence[str], asked: argparse.Namespace) -> None:
    ranks = [count for count in asked.ranks if count > 1]
    extra = [f"{us:+g} us" for us in asked.extra_us]
    found = Table(title="KiB out + back per token, and what deduplication saves over a gather")
    for column in ("model", "rows", "R", "d_r", "dedup KiB", "per route KiB", "AG + RS KiB", "saves ns", *extra):
        found.add_column(column, no_wrap=True, justify="left" if column in ("model", "rows") else "right")
    for name in models:
        config = uniform(name)
        for kind in KINDS.values():
            for count in ranks:
                redundant = redundant_of(config, count, asked)
                rows = [way(config, count, asked.per_host, redundant) for way in (deduplicated, per_route, gathered)]
                sizes = (f"{sum(one.bytes(config, kind.wire)) / 1024:.1f}" for one in rows)
                saved = saved_by_dedup(config, kind, count, asked.per_host, redundant)
                reached = f"{remote_ranks(config.num_experts, config.top_k, count, redundant):.3f}"
                pays = (tokens_text(faster_between(us, saved)) for us in asked.extra_us)
                found.add_row(name, kind.name, str(count), reached, *sizes, f"{saved * 1e3:.1f}", *pays)
    console.print(found)
    bound = Table(title="smallest R from which on the wire takes longer than the experts")
    for column in ("model", "weights, rows", *(f"T = {count}" for count in asked.tokens)):
        bound.add_column(column, no_wrap=True)
    for name in models:
        config = uniform(name)
        for kind in KINDS.values():
            cells = (wire_bound_from(config, kind, count, asked.per_host) or "never" for count in asked.tokens)
            bound.add_row(name, kind.name, *map(str, cells))
    console.print(bound)


def print_measured(console: Console, file: Path, asked: argparse.Namespace) -> None:
    if "transport" not in read(file, ("us",))[0]:
        found = Table(title=f"{file.name}: measured, and its multiple of the model's floors")
        for name in ("model", "R", "T", "what", "weights", "rows", "us", "floor", "/ turn", "/ over"):
            found.add_column(name, no_wrap=True, justify="left" if name in ("model", "what") else "right")
        for cells in layer_lines(file, asked.measured_ranks):
            found.add_row(*cells)
        console.print(found)
        return
    lines = slopes(file, asked.measured_ranks)
    found = Table(title=f"{file.name}: us at the fewest tokens, then ns per token, beside the model's")
    for name in ("transport", "rows", "H", "fixed", "ns", "model", "ratio"):
        found.add_column(name, no_wrap=True, justify="left" if name in ("transport", "rows") else "right")
    for line in sorted(lines, key=lambda line: (line.hidden, line.rows != "plain")):
        numbers = (f"{line.fixed:.0f}", f"{line.slope * 1e3:.1f}", f"{line.model * 1e3:.1f}")
        found.add_row(line.transport, line.rows, str(line.hidden), *numbers, f"{line.slope / line.model:.2f}")
    console.print(found)


def lines_of(models: Sequence[str], asked: argparse.Namespace) -> list[dict[str, object]]:
    """Return the lines of the CSV file: each model, kind, R and T of all tables.

    Two levels are included if R ranks are several hosts. Bytes are those that a rank receives in a call.
    """
    found: list[dict[str, object]] = []
    for name in models:
        config = uniform(name)
        for kind in KINDS.values():
            for ranks in sorted({*asked.ranks, *asked.ep}):
                tokens = sorted({*asked.tokens, *(total / ranks for total in asked.totals if ranks in asked.ranks)})
                ways = {"flat": deduplicated} | ({"two_level": two_level} if ranks > asked.per_host else {})
                found += [
                    {
                        "model": name,
                        "weights": kind.name,
                        **line_of(config, kind, ranks, count, asked, way),
                        "all2all": which,
                    }
                    for which, way in ways.items()
                    for count in tokens
                ]
    return found


def line_of(
    config: MoEConfig, kind: Kind, ranks: int, tokens: float, asked: argparse.Namespace, way: Way
) -> dict[str, object]:
    redundant = redundant_of(config, ranks, asked)
    rows, own = way(config, ranks, asked.per_host, redundant), least(config, kind, ranks, tokens, asked, way)
    out, back = row_bytes(config, kind.wire, rows.routes)
    return {
        "ranks": ranks, "redundant": redundant, "tokens": tokens,
        "nvlink_bytes": tokens * rows.near * (out + back), "nic_bytes": tokens * rows.far * (out + back),
        "weights_us": own.weights, "products_us": own.products, "out_us": own.out, "back_us": own.back,
        "in_turn_us": own.in_turn, "overlapped_us": own.overlapped, "bound": own.bound,
    }  # fmt: skip


def plot(models: Sequence[str], asked: argparse.Namespace, file: Path) -> None:
    from matplotlib.figure import Figure

    ranks, marks = asked.ranks, {"w": "s", "p": "^", "n": "o"}
    figure = Figure(figsize=(5 * len(models) + 2, 8), layout="constrained")
    grid = figure.subplots(len(KINDS), len(models), squeeze=False)
    for column, name in enumerate(models):
        config = uniform(name)
        for row, kind in enumerate(KINDS.values()):
            axes = grid[row][column]
            for index, tokens in enumerate(asked.tokens):
                found = [least(config, kind, r, tokens, asked) for r in ranks]
                axes.plot(ranks, [one.overlapped for one in found], f"C{index}-", label=f"T = {tokens}")
                axes.plot(ranks, [one.in_turn for one in found], f"C{index}:")
                for count, one in zip(ranks, found, strict=True):
                    axes.plot(count, one.overlapped, f"C{index}{marks[one.bound]}")
            axes.set_xscale("log", base=2)
            axes.set(yscale="log", xlabel="ranks", ylabel="us", title=f"{name}, {kind.name}", xticks=ranks)
            axes.set_xticklabels(ranks)
    for label, mark in zip(("weights read", "matrix products", "wire"), "s^o", strict=True):
        axes.plot([], [], f"k{mark}", label=label)
    axes.plot([], [], "k:", label="in turn")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=100)


@benchmark_main
def main() -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, MODELS)
    parser.add_argument("--ranks", nargs="+", type=positive, default=RANKS)
    parser.add_argument("--ep", nargs="*", type=positive, default=EP, help="EP groups of several hosts")
    parser.add_argument(
        "--redundant", type=natural, help="slots beyond one per expert; default: as many as fill all ranks"
    )
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS, help="of each rank")
    parser.add_argument("--totals", nargs="+", type=positive, default=TOTALS, help="tokens of the whole job")
    parser.add_argument("--per-host", type=positive, default=PER_HOST, help="ranks that NVLink joins")
    parser.add_argument("--extra-us", nargs="+", type=not_negative, default=EXTRA_US, help="of deduplication at any T")
    parser.add_argument("--measured", nargs="+", type=Path, default=(), help="files of bench.layer or bench.all2all")
    parser.add_argument("--measured-ranks", type=positive, default=4, help="where such a file does not say")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.ANYWHERE)
    for file in asked.measured:
        read(file, ("us",))
    console = Console(width=140)
    for name in asked.models:
        print_model(console, name, asked)
        print_hosts(console, name, asked)
    print_wire(console, asked.models, asked)
    for file in asked.measured:
        try:
            print_measured(console, file, asked)
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"--measured {file} holds no times of two ranks or more ({error}); write it with bench.layer or "
                f"bench.all2all and --csv"
            ) from error
    lines = lines_of(asked.models, asked)
    if asked.csv is not None:
        with asked.csv.open("w", newline="") as text:
            writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    if asked.plot is not None:
        plot(asked.models, asked, asked.plot)
    return lines


if __name__ == "__main__":
    main()
