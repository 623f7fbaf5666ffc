"""`ep-moe doctor`: reports what is installed, and which backends can run, with reasons for those that cannot.

With --cluster, it prints the report of all ranks as tables and lines.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from ep_moe import registry
from ep_moe._version import __version__
from ep_moe.cli.cluster import ClusterReport
from ep_moe.cli.cluster import run as run_cluster
from ep_moe.cli.cluster_facts import Rates, by_kind, node_rates, values_of
from ep_moe.cli.output import DEFAULT_LEVEL, AsJson, LogLevel, Output, Quiet, command
from ep_moe.errors import ConfigError
from ep_moe.parallel.nodes import format_ranks
from ep_moe.runtime.versions import how_run, installed, launcher_known

_PACKAGES = ("transformers", "safetensors", "flashinfer-python", "triton", "numpy")
_DEADLINE_S = 120.0  # default of --deadline with --cluster
_WIDE = 16  # most ranks or nodes whose matrix fits the width of a terminal

Table = tuple[str, list[str], list[list[str]]]


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Compare all ranks of torchrun or srun, and time their links.")
    ] = False,
    deadline: Annotated[
        float | None,
        typer.Option(help="With --cluster: seconds to wait for ranks, and transfers.", show_default=f"{_DEADLINE_S:g}"),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """Print versions and how they were run, the NCCL that is loaded, GPUs, and each backend as available or why not.

    With --cluster, all ranks run it. It exits with 0 if the cluster is sound, with 1 if it names something odd.
    """
    with command(as_json, quiet, log_level, first_alone=not cluster) as out:
        if cluster:
            _show_cluster(_DEADLINE_S if deadline is None else deadline, out)
            return
        if deadline is not None:
            raise ConfigError(f"--deadline is for doctor --cluster, got {deadline:g}; add --cluster, or leave it out")
        packages, run_on, cards = versions(), runs(), gpus()
        here = [dict(zip(("kind", "backend", "here"), row, strict=True)) for row in backends()]
        rows = [[name, version, run_on.get(name, "")] for name, version in packages.items()]
        out.table("", ["what", "version", "run by the tests"], rows)
        for line in [f"GPU {line}" for line in cards] or ["no GPU"]:
            out.line(line)
        out.table("", ["kind", "backend", "here"], [list(row.values()) for row in here])
        out.result({"versions": packages, "runs": run_on, "gpus": cards, "backends": here})


def _show_cluster(deadline_s: float, out: Output) -> None:
    def show(report: ClusterReport) -> None:
        for title, columns, rows in tables(report):
            out.table(title, columns, rows)
        out.line()
        for line in lines(report):
            out.line(line)
        rates = [{"ranks": list(pair), "gb_per_s": rate} for pair, rate in report.rates.items()]
        found = {"odd": report.odd, "facts": report.facts, "backend": report.backend, "rates": rates}
        out.result(found)

    if run_cluster(deadline_s, show).odd:
        raise typer.Exit(1)


def versions() -> dict[str, str]:
    """Return the versions that a bug report needs, by name."""
    found = {
        "ep_moe": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none: a CPU build of torch"),
        "NCCL": _nccl(),
    }
    return found | {package: installed(package) or "not installed" for package in _PACKAGES}


def runs() -> dict[str, str]:
    """Return how the tests ran with the installed versions, by the names of `versions`.

    A value says where they ran, or "not run" and which version was run.
    """
    found = {package: how_run(package, installed(package)) for package in ("torch", *_PACKAGES)}
    triton = installed("triton")
    if triton is not None and not launcher_known(triton):
        found["triton"] += "; its launcher is not known: each launch of an eager call takes the host longer"
    return found


def _nccl() -> str:
    """Return the version and the file of the NCCL that is loaded in this process."""
    if not torch.cuda.is_available():
        return "not loaded: no GPU"
    number = ".".join(map(str, torch.cuda.nccl.version()))
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    files = sorted({line.split()[-1] for line in lines if "libnccl.so" in line})
    return f"{number} ({', '.join(files) or 'linked into torch'})"


def gpus() -> list[str]:
    """Return a line for each visible GPU."""
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(f"{index}: {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    return lines


def backends() -> list[tuple[str, str, str]]:
    """Return (kind, name, "available" or the reason why not) of each backend."""
    kinds: tuple[registry.Kind, ...] = ("dispatchers", "experts", "fused")
    return [
        (kind, name, registry.unsupported_reason(kind, name) or "available")
        for kind in kinds
        for name in registry.targets(kind)
    ]


def tables(report: ClusterReport) -> list[Table]:
    """Return the title, columns and rows of each table: facts by value, ranks, rates between ranks and between hosts.

    Args:
        report: A report of `ep_moe.cli.cluster.run`.

    Returns:
        The tables. Matrices of more than 16 ranks or hosts are omitted. The medians of each rank are always shown.
    """
    nodes = report.nodes
    if nodes is None:
        return []
    kinds = by_kind(report.rates, nodes)
    moment = list(dict.fromkeys(name for entry in report.facts for name in entry.shown))
    by_fact: list[list[str]] = []
    for name, by_value in values_of(report.facts).items():
        for at, (value, ranks) in enumerate(by_value.items()):
            whose = f"all {len(ranks)} ranks" if len(by_value) == 1 else format_ranks(ranks)
            by_fact.append(["" if at else name, value, whose])
    by_rank = [
        [
            f"rank {entry.rank}", nodes.host(entry.rank), str(entry.local_rank),
            *(entry.shown.get(name, "") for name in moment),
            *(_median([rate for pair, rate in links.items() if entry.rank in pair]) for links in kinds.values()),
        ]
        for entry in report.facts
    ]  # fmt: skip
    found = [
        ("", ["fact", "value", "ranks"], by_fact),
        (
            "ranks, and the median rates of their links in GB/s each way",
            ["", "host", "local", *moment, *kinds],
            by_rank,
        ),
    ]
    if 1 < len(report.facts) <= _WIDE and report.rates:
        names = [f"rank {entry.rank}" for entry in report.facts]
        found.append(_matrix(f"GB/s each way over {report.backend}", names, report.rates))
    if 1 < len(nodes.hosts) <= _WIDE and report.rates:
        found.append(_matrix("GB/s each way between hosts, all ranks at once", list(nodes.hosts),
                             node_rates(report.rates, nodes)))  # fmt: skip
    return found


def lines(report: ClusterReport) -> list[str]:
    """Return a line for each oddity, or one line that the cluster is sound."""
    if report.odd:
        return [f"odd: {text}" for text in report.odd]
    ranks, hosts = len(report.facts), 0 if report.nodes is None else len(report.nodes.hosts)
    return [f"sound: {ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}"]


def _matrix(title: str, names: list[str], rates: Rates) -> Table:
    numbers = range(len(names))
    rows = [
        [name, *("" if one == other else _rate(rates.get((min(one, other), max(one, other)))) for other in numbers)]
        for one, name in enumerate(names)
    ]
    return title, ["", *names], rows


def _median(rates: list[float]) -> str:
    return _rate(median(rates) if rates else None)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"
