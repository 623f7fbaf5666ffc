"""Test `ep-moe plan`: one row for each combination, computed by the planner that runs online."""

import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from ep_moe import ConfigError, ExpertMap
from ep_moe.cli.app import app
from ep_moe.eplb import LoadTrace, balancedness, loads_by_rank, plan
from ep_moe.eplb import report as plan_report

RANDOM = np.random.default_rng(0)
SHARE = RANDOM.random((3, 8)) ** 4
TRACE = LoadTrace(RANDOM.poisson(SHARE * 4000, (6, 3, 8)), np.full(6, 4000), "mixtral-8x7b")


def ask(*args: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "80"})
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture
def file(tmp_path):
    TRACE.save(tmp_path / "trace.npz")
    return str(tmp_path / "trace.npz")


def test_a_row_for_each_combination(file):
    output = ask(file, "--ranks", "2", "4", "--redundant", "0", "4", "8", "--steps-to-pay", "500")
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[1]) for row in rows] == [(r, n) for r in ("2", "4") for n in ("0", "4", "8")]
    assert output.count("limit 500") + output.count("no gain") == 6


def test_the_numbers_are_those_of_the_planner(file):
    row = next(line.split() for line in ask("--ranks", "4", "--redundant", "4", file).splitlines() if line[:1] == "4")
    old = [ExpertMap.redundant(8, 4, 4)] * 3
    load = TRACE.window() / 6
    assert row[2] == f"{balancedness(loads_by_rank(load, old)).mean():.3f}"
    assert row[3] == f"{balancedness(loads_by_rank(load, plan(load, old))).mean():.3f}"
    later = plan(TRACE.counts[:3].sum(0), old)
    assert row[5] == f"{balancedness(loads_by_rank(TRACE.counts[3:].sum(0), later)).mean():.3f}"


def test_impossible_combinations_are_refused_in_their_row(file):
    output = ask(file, "--ranks", "2", "16", "--redundant", "0", "4", "8", "100", "--nodes", "2")
    assert "ranks 16, redundant 0: impossible: 16 ranks for 8 + 0 slots; at least 8 redundant" in output
    assert "ranks 16, redundant 4: impossible" in output
    assert "ranks 16, redundant 8: impossible" not in output
    assert "ranks 2, redundant 100: impossible: num_redundant=100 gives a rank 54 slots" in output
    assert "ranks 2, redundant 8: " in output


def test_a_plan_that_does_not_pay_is_refused(file):
    assert "redundant 0: refused: " in ask(file, "--ranks", "4", "--steps-to-pay", "1")
    assert "redundant 0: accepted: " in ask(file, "--ranks", "4", "--steps-to-pay", "100000")


def test_nodes_that_do_not_divide_the_ranks_are_named(file):
    # no combination is valid
    assert "nodes must divide the 2 ranks, got 4" in ask(file, "--ranks", "2", "--nodes", "4", code=1)


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        *[("--ranks", wrong, "ranks must be an integer of at least 1") for wrong in ("0", "-1")],
        ("--redundant", "-1", "redundant must be an integer of at least 0"),
        *[(f"--{name}", "0", f"{name} must be an integer of at least 1") for name in ("groups", "nodes")],
        ("--steps-to-pay", "-1", "within_steps must be an integer of at least 1"),
        *[("--tolerance", wrong, "tolerance must be a number of at least 0") for wrong in ("-1", "nan", "inf")],
        *[("--enough", wrong, "enough must be a number above 0 and at most 1") for wrong in ("0", "nan", "inf")],
        *[("--bytes-per-weight", wrong, "bytes_per_weight must be a positive") for wrong in ("0", "nan", "-inf")],
    ],
)
def test_numbers_that_no_row_could_have_are_one_sentence(file, flag, value, sentence):
    output = ask(file, "--ranks", "4", flag, value, code=2)
    assert len(output.splitlines()) == 1
    assert output.startswith(f"error: {sentence}")


def test_bad_files_and_models_are_one_sentence(file, tmp_path):
    assert "nowhere.npz does not exist" in ask("nowhere.npz", "--ranks", "2", code=2)
    assert "deepseek-v3 has 256 experts, the trace 8" in ask(file, "--ranks", "2", "--model", "deepseek-v3", code=2)
    LoadTrace(TRACE.counts, TRACE.tokens).save(tmp_path / "nameless.npz")
    assert "names no model" in ask(str(tmp_path / "nameless.npz"), "--ranks", "2", code=2)


def test_the_result_names_the_model_whose_sizes_were_used(file, tmp_path):
    LoadTrace(TRACE.counts, TRACE.tokens).save(tmp_path / "nameless.npz")
    given = ask(str(tmp_path / "nameless.npz"), "--ranks", "2", "--model", "mixtral-8x7b", "--json")
    recorded = ask(file, "--ranks", "2", "--json")
    assert json.loads(given)["model"] == json.loads(recorded)["model"] == "mixtral-8x7b"
    assert json.loads(given)["rows"] == json.loads(recorded)["rows"]


def test_a_trace_of_one_step_has_nothing_to_hold_out():
    one = LoadTrace(TRACE.counts[:1], TRACE.tokens[:1], TRACE.model)
    (row,) = plan_report.what_if(one, [4], [0], plan_report.Question())
    assert row.held_out is None


def test_what_cannot_be_is_said_before_anything_is_planned(file, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_report, "what_if", None)
    for words, sentence in (
        (("--plot", str(tmp_path / "a.nope")), "must end in one of .png, .svg, .pdf"),
        (("--plot", str(tmp_path / "none" / "a.png")), "in a folder that does not exist; make it first"),
        (("--plot", str(tmp_path)), "is a folder; name a file in it"),
        (("--bytes-per-weight", "0"), "bytes_per_weight must be a positive number, got 0.0"),
        (("--bytes-per-weight", "nan"), "bytes_per_weight must be a positive number, got nan"),
    ):
        assert sentence in ask(file, "--ranks", "2", *words, code=2).replace("\n", " ")


def test_reasons_are_shown_where_there_is_nothing_to_plot(file, tmp_path):
    output = ask(file, "--ranks", "16", "--plot", str(tmp_path / "a.png"), code=1)
    assert "ranks 16, redundant 0: impossible" in output


def test_plot_needs_something_to_show(tmp_path):
    rows = plan_report.what_if(TRACE, [4, 16], [0, 4], plan_report.Question())
    plan_report.plot(rows, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError) as error:
        plan_report.plot(rows[2:3], tmp_path / "none.png")
    assert "nothing to plot" in str(error.value)


def test_plot_without_matplotlib_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        plan_report.plot(plan_report.what_if(TRACE, [4], [0], plan_report.Question()), tmp_path / "plan.png")
    assert "pip install ep-moe[plot]" in str(error.value)
