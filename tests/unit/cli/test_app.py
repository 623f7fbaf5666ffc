"""The options of `ep-moe`'s commands, and the classes that hold them."""

from dataclasses import MISSING, fields

import pytest
from typer.testing import CliRunner

from ep_moe.cli import app as app_module
from ep_moe.cli.check_exact import CheckOptions
from ep_moe.cli.fit import FitOptions
from ep_moe.cli.run import RunOptions
from ep_moe.cli.tune import TuneOptions
from ep_moe.eplb import report
from ep_moe.eplb.report import Question

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
