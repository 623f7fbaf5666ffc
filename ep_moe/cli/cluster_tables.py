"""The report of `ep-moe doctor --cluster` as tables and lines."""

from __future__ import annotations

from statistics import median

from ep_moe.cli.cluster import ClusterReport
from ep_moe.cli.cluster_verdict import Rates, by_kind, node_rates, values_of
from ep_moe.parallel.nodes import named

_WIDE = 16  # ranks or nodes whose matrix fits a line

Table = tuple[str, list[str], list[list[str]]]


def tables(report: ClusterReport) -> list[Table]:
    """Title, columns and rows of each table: facts by value, ranks, and rates between ranks and between hosts.

    Args:
        report: Of `ep_moe.cli.cluster.run`.

    Returns:
        Tables. Matrices of more than 16 ranks or hosts are left out; the medians of each rank stay.
    """
    nodes = report.nodes
    if nodes is None:
        return []
    kinds = by_kind(report.rates, nodes)
    moment = list(dict.fromkeys(name for entry in report.facts for name in entry.shown))
    by_fact: list[list[str]] = []
    for name, by_value in values_of(report.facts).items():
        for at, (value, ranks) in enumerate(by_value.items()):
            whose = f"all {len(ranks)} ranks" if len(by_value) == 1 else named(ranks)
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
    """What is odd, or that nothing is."""
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
