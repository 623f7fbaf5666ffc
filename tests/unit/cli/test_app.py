"""The options of `ep-moe`'s commands, and the classes that hold them."""

import inspect
from dataclasses import MISSING, fields

import pytest
from typer.testing import CliRunner

from ep_moe import ParallelConfig, Wire
from ep_moe.cli import app as app_module
from ep_moe.cli.check_exact import CheckOptions
from ep_moe.cli.fit import FitOptions
from ep_moe.cli.run import RunOptions
from ep_moe.cli.tune import TuneOptions
from ep_moe.eplb import report
from ep_moe.eplb.report import Question
from ep_moe.selection.explain import explain_model

pytest.importorskip("transformers")
COMMANDS = [
    (RunOptions, app_module, ["run"]),
    (FitOptions, app_module, ["fit", "a-model", "--gpus", "8"]),
    (CheckOptions, app_module, ["check-exact"]),
    (TuneOptions, app_module, ["tune"]),
    (Question, report, ["plan", "trace.npz"]),
]
CALLED = {"deadline_s": "--deadline", "within_steps": "--steps-to-pay"}
NOT_THE_SAME = {"model", "log_level"}  # the command line has a model and a level where the classes have none


class Asked(Exception):
    """With the fields that a command fills."""


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
        if name in NOT_THE_SAME or name in ("gpus", "machine"):  # given above; without an option
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
