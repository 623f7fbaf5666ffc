"""Test the text of reports, and the heat maps of a run's report."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from ep_moe.cli import reports
from ep_moe.cli.check_exact import LOGITS, RunDigests
from ep_moe.cli.perplexity import Rebalanced
from ep_moe.cli.reports import plot_load
from ep_moe.cli.run import RunOptions, RunReport
from ep_moe.selection.tuned import Measured, Tuned


class Heard:
    """An output that records what is printed for a reader and for a program."""

    def __init__(self):
        self.lines, self.tables, self.results = [], [], []

    def result(self, found):
        self.results.append(found)

    def line(self, text=""):
        self.lines.append(text)

    def table(self, title, columns, rows):
        self.tables.append((title, columns, rows))


def test_a_heat_map_has_loads_over_their_layers_mean(tmp_path):
    """A heat map shows loads divided by their layer's mean.

    A mock stands in for matplotlib, which need not be installed.
    """
    figure = mock.MagicMock()
    maps = figure.subplots.return_value = mock.MagicMock(), mock.MagicMock()
    report = SimpleNamespace(title="a run", expert_load=[[1, 3, 0, 0], [0, 0, 0, 0]], rank_load=[[4, 0], [0, 0]])
    modules = {"matplotlib": mock.MagicMock(), "matplotlib.figure": SimpleNamespace(Figure=lambda **_: figure)}
    with mock.patch.dict(sys.modules, modules):
        plot_load(report, str(tmp_path / "load.png"))
    drawn = [axes.imshow.call_args.args[0] for axes in maps]
    assert drawn == [[[1.0, 3.0, 0.0, 0.0], [0.0] * 4], [[2.0, 0.0], [0.0] * 2]]
    titles = [axes.set.call_args.kwargs["title"] for axes in maps]
    assert titles == ["load / mean by expert: fullest 3.00", "load / mean by EP rank: fullest 2.00"]
    figure.savefig.assert_called_once_with(str(tmp_path / "load.png"), dpi=120)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"reference": 10.0}, "  transformers  10.000  (one process; equal to 5 digits)"),
        (
            {"reference": 12.5, "exact": True},
            "  transformers  12.500  (one process; DIFFERENT, relative difference 2.0e-01: in float32 this is a bug)",
        ),
        (
            {"reference": 8.0, "exact": False},
            "  transformers  8.0000  (one process; relative difference 2.5e-01; not float32, or quantized, so digits "
            "may differ)",
        ),
        ({"left_out": "it is large"}, "  transformers  not run: it is large"),
        ({}, None),
    ],
)
def test_a_perplexity_stands_beside_the_references(changed, line):
    report = RunReport(
        **{"title": "a run", "tokens": 64, "perplexity": 10.0, "reference": None, "exact": True} | changed,
        expert_load=[[1, 3]],
        rank_load=[[1, 3]],
        stages={"experts": 1.0},
        forwards=2,
    )
    out = Heard()
    reports.print_report(out, report)
    assert out.lines == ["a run", "\nperplexity over 64 tokens", "  ep_moe        10.000", *[line] * (line is not None)]


def run_digests(ranks, batching, *, logits=None, **digests):
    more = {} if logits is None else {LOGITS: logits}
    return RunDigests(
        ranks=ranks, expert_map="linear", all2all="allgather", experts="reference", batching=batching,
        digests=digests | more,
    )  # fmt: skip


def test_what_differs_from_the_first_way_is_told_with_its_layer():
    """A difference from the first run is printed with its layer.

    Runs of the layers alone have no logits. Missing logits do not count as a difference.
    """
    ways = [run_digests(1, "prompts", a="1", b="2", logits="3"), run_digests(2, "tokens of 3", a="1", b="2")]
    ways.append(run_digests(2, "prompts", a="1", b="x", logits="3"))
    out = Heard()
    assert reports.print_checked(ways, out) is False
    assert out.lines == ["2 MoE layers, experts reference", "", "1 of 3 differ from the first"]
    sums = [one.checksum for one in ways]
    ((_, columns, rows),) = out.tables
    assert columns == ["ranks", "map", "transport", "batches", "layers", "logits", "differs"]
    assert rows == [
        ["1", "linear", "allgather", "prompts", sums[0], "3", ""],
        ["2", "linear", "allgather", "tokens of 3", sums[1], "", ""],
        ["2", "linear", "allgather", "prompts", sums[2], "3", "first at b"],
    ]
    (result,) = out.results
    assert result["equal"] is False
    assert [(run["ranks"], run["logits"], run["first_difference"]) for run in result["runs"]] == [
        (1, "3", None), (2, None, None), (2, "3", "b"),
    ]  # fmt: skip


def test_ways_that_are_equal_are_said_to_be():
    out = Heard()
    assert reports.print_checked([run_digests(ranks, "prompts", a="1", logits="3") for ranks in (1, 2)], out) is True
    assert out.lines[-1] == "all equal, bit for bit"
    assert out.results[0]["equal"] is True


def test_a_report_has_the_loads_of_ranks_and_experts():
    report = RunReport(
        title="a run", tokens=4, perplexity=1.5, reference=None, exact=True, expert_load=[[5, 3], [4, 4]],
        rank_load=[[6, 2], [4, 4]], stages={"experts": 3.0, "combine": 1.0}, forwards=2,
    )  # fmt: skip
    out = Heard()
    reports.print_report(out, report)
    ranks, experts, stages = out.tables
    assert ranks[1:] == (
        ["", "rank 0", "rank 1", "balancedness"], [["layer 0", "6", "2", "0.667"], ["layer 1", "4", "4", "1.000"]]
    )  # fmt: skip
    assert experts[1:] == (["", "layer 0", "layer 1"], [["expert 0", "5", "4"], ["expert 1", "3", "4"]])
    assert [row[-1] for row in stages[2]] == ["75%", "25%"]


@pytest.mark.parametrize("recorded", [None, "a trace"])
def test_each_file_that_a_run_wrote_is_told(recorded, monkeypatch, tmp_path):
    """Each file that a run wrote is named.

    For a load trace, the command that reads it follows, and the name ends as numpy writes it.
    """
    written = []
    monkeypatch.setattr(reports, "plot_load", lambda report, file: written.append(file))
    trace = SimpleNamespace(save=written.append)
    report = SimpleNamespace(recorded=trace if recorded else None)
    load, plot = tmp_path / "load", str(tmp_path / "load.png")
    options = RunOptions(trace="t.json", record_load=str(load), plot=plot)
    npz = load.with_suffix(".npz")
    of_load = [f"\nwritten to {npz}: ep-moe plan {npz} says what other numbers of ranks would do"] * bool(recorded)
    assert reports.write_files(options, report) == [
        "\nwritten to t.json: open it in ui.perfetto.dev", *of_load, f"\nwritten to {plot}"
    ]  # fmt: skip
    assert written == [*[npz] * bool(recorded), plot]


def test_what_rebalancing_did_is_said_in_numbers():
    out = Heard()
    found = Rebalanced(
        perplexity=10.0, before=0.25, after=0.75, sent_bytes=3 << 19, forwards=7, usual_ms=2.5, longest_ms=4.0
    )
    reports._print_rebalanced(out, found)
    assert out.lines[1:] == [
        "  balancedness  0.250 before, 0.750 after (mean rank / fullest, over all layers)",
        "  perplexity    10.000",
        "  moved         1.5 MiB between ranks, within 7 forwards",
        "  forward       2.5 ms usually, 4.0 ms the longest while moving",
    ]


def test_each_bucket_that_was_tuned_is_a_table_of_all_pairs():
    alone = Measured(tokens=8, experts="reference", all2all="local", us=12.34)
    parts = Measured(tokens=8, experts="reference", all2all="torch_a2a", us=20.0, pipeline=2)
    large = Measured(tokens=64, experts="hopper", all2all="local", us=30.0)
    out = Heard()
    tuned = Tuned(
        machine={"gpu": "H200", "nodes": None},
        layer={"top_k": 2},
        versions={},
        buckets=(alone, large),
        measured=(alone, parts, large),
    )
    reports.print_tuned(out, tuned)
    assert out.lines == ["\ngpu H200, top_k 2"]
    columns = ["all2all", "experts", "in parts of", "us", ""]
    assert out.tables == [
        (
            "up to 8 tokens per rank",
            columns,
            [["local", "reference", "", "12.3", "chosen"], ["torch_a2a", "reference", "2", "20.0", ""]],
        ),
        ("up to 64 tokens per rank", columns, [["local", "hopper", "", "30.0", "chosen"]]),
    ]
