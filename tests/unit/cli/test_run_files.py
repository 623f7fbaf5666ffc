"""Test the files of `ep-moe run`: a profiler trace, a plot, and a load trace that `ep-moe plan` reads."""

import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from ep_moe.cli import reports
from ep_moe.cli.app import app
from ep_moe.cli.reports import _print_loads, write_files
from ep_moe.cli.run import RunOptions, RunReport
from ep_moe.eplb import LoadTrace
from ep_moe.errors import ConfigError
from ep_moe.parallel.groups import TorchrunEnv

REPORT = RunReport(
    title="demo", tokens=8, perplexity=2.0, reference=2.0, exact=True, expert_load=[[3, 1, 0, 0], [1, 1, 1, 1]],
    rank_load=[[4, 0], [2, 2]], stages={"experts": 1.0}, forwards=2,
)  # fmt: skip


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")
def test_a_run_writes_its_files_and_plan_follows_on(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    trace, plot, load = tmp_path / "out.json", tmp_path / "load.png", tmp_path / "trace.npz"
    files = ("--trace", trace, "--plot", plot, "--record-load", load)
    words = ("run", "--text-tokens", "1024", "--window", "128", "--batch", "2", "--dp", "2", "--tp", "1")
    found = json.loads(invoke(*words, "--no-reference", "--json", *files).stdout)
    assert "recorded" not in found
    recorded = LoadTrace.load(load)
    assert (recorded.steps, recorded.model) == (2, "demo")  # 8 windows, 2 per rank and forward
    assert recorded.counts.sum(0).tolist() == found["expert_load"], "the profiled forward is counted nowhere"
    assert recorded.tokens.tolist() == [512, 512]
    events = json.loads(trace.read_text())["traceEvents"]
    stages = [event["name"] for event in events if event.get("name", "").startswith("ep_moe::")]
    layers = len(found["expert_load"])
    assert {stage: stages.count(stage) for stage in ("ep_moe::dispatch", "ep_moe::experts")} == {
        "ep_moe::dispatch": layers, "ep_moe::experts": layers
    }  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")
    planned = invoke("plan", load).stdout
    assert [line.split()[0] for line in planned.splitlines() if line[:1].isdigit()] == ["2", "4", "8", "16"]


def test_plan_takes_the_model_that_the_trace_names(tmp_path):
    """`plan` takes the model that the trace names, in all forms that commands accept.

    It asks for a model if the trace names none.
    """
    file = tmp_path / "trace.npz"
    LoadTrace(np.ones((4, 2, 8), dtype=np.int64), np.full(4, 8), "mixtral-8x7b").save(file)
    assert "ranks 8" in invoke("plan", file).stdout
    LoadTrace(np.ones((4, 2, 8), dtype=np.int64), np.full(4, 8), "mixtral").save(file)
    assert "no bundled config is named 'mixtral'" in invoke("plan", file, code=2).stderr
    LoadTrace(np.ones((4, 2, 8), dtype=np.int64), np.full(4, 8)).save(file)
    assert "the trace names no model; give one with --model" in invoke("plan", file, code=2).stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--trace", "/no/where.json"), "--trace /no/where.json is in a folder that does not exist; make it first"),
        (("--record-load", "."), "--record-load . is a folder; name a file in it"),
        (("--plot", "load.gifx"), "--plot load.gifx must end in one of .png, .svg, .pdf"),
    ],
)
def test_files_are_checked_before_ranks_start(words, sentence):
    assert sentence in invoke("run", *words, code=2).stderr


def test_files_of_a_report(tmp_path):
    assert write_files(RunOptions(), REPORT) == []
    pytest.importorskip("matplotlib")
    plot = str(tmp_path / "load.png")
    assert write_files(RunOptions(plot=plot), REPORT) == [f"\nwritten to {plot}"]
    with pytest.raises(ConfigError, match="a file cannot be written"):
        write_files(RunOptions(plot=str(tmp_path / "no" / "load.png")), REPORT)


@pytest.mark.parametrize(("layers", "columns"), [(8, [f"layer {n}" for n in range(8)]), (9, ["all layers"])])
def test_eight_layers_stand_side_by_side(layers, columns):
    """Up to eight layers are shown in columns. More are summed."""
    load = [[index, 1] for index in range(layers)]
    tables = []
    out = SimpleNamespace(table=lambda title, names, rows: tables.append((title, names, rows)))
    _print_loads(out, dataclasses.replace(REPORT, expert_load=load, rank_load=[[1, 1]] * layers))
    (_, names, rows) = tables[-1]
    assert names == ["", *columns]
    wanted = [sum(range(layers)), layers]
    assert [sum(map(int, row[1:])) for row in rows] == wanted


def test_times_of_stages_are_milliseconds_in_all_and_microseconds_a_call():
    tables = []
    out = SimpleNamespace(line=lambda *_: None, table=lambda title, names, rows: tables.append((names, rows)))
    with mock.patch.object(reports, "_print_loads"):
        reports.print_report(out, REPORT)
    assert tables == [(["stage", "ms", "us per call", "share"], [["experts", "1.0", "500", "100%"]])]
