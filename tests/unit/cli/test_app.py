"""Test the options of `ep-moe`'s commands, and the classes that hold them."""

import inspect
import logging
import signal
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ep_moe import ParallelConfig, Wire
from ep_moe.bench import planner
from ep_moe.cli import app as app_module
from ep_moe.cli.check_exact import CheckOptions
from ep_moe.cli.fit import FitOptions
from ep_moe.cli.run import RunOptions
from ep_moe.cli.tune import TuneOptions
from ep_moe.eplb import report
from ep_moe.eplb.report import Question
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.selection.explain import explain_model
from ep_moe.selection.tuned import Measured, Tuned

pytest.importorskip("transformers")
COMMANDS = [
    (RunOptions, app_module, ["run"]),
    (FitOptions, app_module, ["fit", "a-model", "--gpus", "8"]),
    (CheckOptions, app_module, ["check-exact"]),
    (TuneOptions, app_module, ["tune"]),
    (Question, report, ["plan", "trace.npz"]),
]
CALLED = {"deadline_s": "--deadline", "within_steps": "--steps-to-pay"}
NOT_THE_SAME = {"model", "log_level"}  # these options have no field in the classes


class Asked(Exception):
    """Raised with the fields that a command fills."""


def filled(monkeypatch, kind, module, args) -> dict[str, object]:
    def ask(**given):
        raise Asked(given)

    monkeypatch.setattr(module, kind.__name__, ask)
    with pytest.raises(Asked) as raised:
        CliRunner().invoke(app_module.app, args, catch_exceptions=False)
    return raised.value.args[0]


@pytest.mark.parametrize(("kind", "module", "args"), COMMANDS, ids=lambda value: getattr(value, "__name__", ""))
def test_defaults_are_those_of_the_class(kind, module, args, monkeypatch):
    given = filled(monkeypatch, kind, module, args)
    default = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    both = (given.keys() & default.keys()) - NOT_THE_SAME
    assert len(both) >= 5
    assert {name: given[name] for name in both} == {name: default[name] for name in both}


@pytest.mark.parametrize(("kind", "module", "args"), COMMANDS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_option_fills_the_field_of_its_name(kind, module, args, monkeypatch):
    wanted, options = {}, []
    for number, field in enumerate(fields(kind), 2):
        name, option = field.name, CALLED.get(field.name, f"--{field.name.replace('_', '-')}")
        if name in NOT_THE_SAME or name in ("gpus", "machine"):  # given above, or without an option
            continue
        if "bool" in field.type:
            wanted[name] = not field.default
            options.append(option if wanted[name] else option.replace("--", "--no-"))
        else:
            numbers = "int" in field.type or "float" in field.type
            options += [option, str(number) if numbers else f"word{number}"]
            wanted[name] = (number,) if "tuple" in field.type else number if numbers else f"word{number}"
    given = filled(monkeypatch, kind, module, [*args, *options])
    assert {name: given[name] for name in wanted} == wanted


def explained(monkeypatch, *args) -> dict[str, object]:
    names = inspect.signature(explain_model)

    def ask(*positions, **given):
        raise Asked(names.bind(*positions, **given).arguments)

    monkeypatch.setattr("ep_moe.cli.explain.explain_model", ask)
    with pytest.raises(Asked) as raised:
        CliRunner().invoke(app_module.app, ["explain", "demo", *map(str, args)], catch_exceptions=False)
    return raised.value.args[0]


def test_explain_asks_as_the_function_does_by_default(monkeypatch):
    asked = explained(monkeypatch)
    assert (asked.pop("parallel"), asked.pop("wire")) == (ParallelConfig(dp=1), Wire())
    del asked["config"]
    assert asked == {name: inspect.signature(explain_model).parameters[name].default for name in asked}


def test_explain_asks_for_what_was_given(monkeypatch):
    sizes = {"dp": 8, "tp": 4, "ep": 16, "etp": 2}
    wanted = {name: f"a {name}" for name in ("all2all", "experts", "quantization", "dtype", "gpu")}
    wanted |= {"max_tokens": 7, "ranks_per_node": 2}
    options = [(f"--{name.replace('_', '-')}", value) for name, value in (sizes | wanted).items()]
    asked = explained(monkeypatch, *(word for option in options for word in option), "--wire", "fp8_row")
    assert {name: asked[name] for name in wanted} == wanted
    assert (asked["parallel"], asked["wire"]) == (ParallelConfig(**sizes), Wire(dispatch="fp8_row"))


@pytest.mark.parametrize(
    ("words", "level"), [((), "warning"), (("--log-level", "info"), "info"), (("--quiet",), "error")]
)
@pytest.mark.parametrize(
    ("kind", "module", "args"), [COMMANDS[0], COMMANDS[2], COMMANDS[3]], ids=["run", "check", "tune"]
)
def test_ranks_that_are_forked_log_as_the_command_does(kind, module, args, words, level, monkeypatch):
    assert filled(monkeypatch, kind, module, [*args, *words])["log_level"] == level


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launched", [False, True], ids=["alone", "under torchrun"])
def test_a_command_ends_by_one_line_where_it_began_the_ranks(launched, monkeypatch):
    """A command that starts ranks handles SIGTERM while it runs, and restores the handler afterwards.

    Under torchrun the command starts no ranks, and leaves the handler alone.
    """
    during = []
    monkeypatch.setattr(TorchrunEnv, "present", lambda: launched)
    monkeypatch.setattr(app_module, "run_model", lambda _: during.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    assert CliRunner().invoke(app_module.app, ["run"], catch_exceptions=False).exit_code == 0
    assert during == [before if launched else app_module._terminated]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_a_signal_ends_has_the_exit_code_of_shells():
    with pytest.raises(SystemExit) as ended:
        app_module._terminated(signal.SIGTERM, None)
    assert ended.value.code == 143


# --- numbers, files and what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "spread"),
    [
        ("--ranks 4 8 32", "--ranks 4 --ranks 8 --ranks 32"),
        ("--tokens 1 16 trace", "--tokens 1 --tokens 16 trace"),
        ("--redundant 0 8 --ranks 2 4", "--redundant 0 --redundant 8 --ranks 2 --ranks 4"),
        ("--nodes 2 4", "--nodes 2 4"),
        ("--ranks 4 --nodes 2 8", "--ranks 4 --nodes 2 8"),
        ("7 8 --ranks 4", "7 8 --ranks 4"),
    ],
)
def test_numbers_behind_a_number_belong_to_its_option(words, spread, monkeypatch):
    """Several numbers after an option belong to it, for options that take more than one."""
    monkeypatch.setattr(app_module.TyperCommand, "parse_args", lambda self, ctx, args: args)
    assert app_module._NumberLists("plan").parse_args(None, words.split()) == spread.split()


@pytest.mark.parametrize(("experts", "ranks"), [(6, [2, 4]), (64, [2, 4, 8, 16, 32, 64]), (256, [2, 4, 8, 16, 32, 64])])
def test_a_plan_is_for_all_powers_of_two_up_to_the_experts_and_64(experts, ranks, monkeypatch):
    asked, plotted = [], []
    row = SimpleNamespace(ranks=2, redundant=0, verdict="", cells=list, facts=dict)
    recorded = SimpleNamespace(num_experts=experts, model=None)
    monkeypatch.setattr(app_module.LoadTrace, "load", lambda file: recorded)
    monkeypatch.setattr(report, "what_if", lambda *given: asked.append(given[1:3]) or [row])
    monkeypatch.setattr(report, "plot", lambda *given: plotted.append(given))
    words = ["plan", "trace.npz", "--plot", "load.png"]
    assert CliRunner().invoke(app_module.app, words, catch_exceptions=False).exit_code == 0
    assert asked == [(ranks, [0])]
    assert plotted == [([row], Path("load.png"))]


def test_tokens_that_are_tuned_by_default(monkeypatch):
    assert filled(monkeypatch, TuneOptions, app_module, ["tune"])["tokens"] == (1, 16, 128, 1024, 8192)


def test_what_was_tuned_is_in_the_file(monkeypatch, tmp_path):
    """`tune` writes its result to the file. A missing folder is reported before anything is measured."""
    line = Measured(tokens=1, experts="reference", all2all="allgather", us=2.5)
    tuned = Tuned(machine={"device": "cpu"}, layer={"H": 8}, versions={}, buckets=(line,), measured=(line,))
    began = []
    monkeypatch.setattr(app_module, "run_tune", lambda options, say: began.append(options) or tuned)
    invoke = lambda file: CliRunner().invoke(app_module.app, ["tune", "--out", str(file)])  # noqa: E731
    assert invoke(tmp_path / "tuned.json").exit_code == 0
    assert Tuned.load(tmp_path / "tuned.json") == tuned
    assert invoke(tmp_path / "none" / "tuned.json").exit_code == 2
    assert len(began) == 1


@pytest.mark.parametrize(
    ("words", "given", "level"),
    [
        (("--repeat", "1"), ["--repeat", "1"], logging.WARNING),
        (("--quiet",), ["--quiet"], logging.ERROR),
        (("--log-level", "info"), [], logging.INFO),
    ],
)
def test_a_benchmark_has_the_words_behind_its_name(words, given, level, monkeypatch):
    """A benchmark gets the arguments after its name, and the log level that the command was given."""
    ran = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(planner, "main", lambda: ran.append((sys.argv, logging.getLogger("ep_moe").level)))
    assert CliRunner().invoke(app_module.app, ["bench", "planner", *words], catch_exceptions=False).exit_code == 0
    assert ran == [(["ep-moe bench planner", *given], level)]


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_bench_without_a_name_lists_them(word):
    assert "rebalance" in CliRunner().invoke(app_module.app, ["bench", word], catch_exceptions=False).stdout
