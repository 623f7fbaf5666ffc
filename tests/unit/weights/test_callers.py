"""Test how functions of other libraries among the callers are found, by their frames."""

import sys
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules  # noqa: F401 (a schedule that calls has been imported)

from ep_moe.weights.callers import frames_of, training_schedules


def called_by(module, function, call, **given):
    """Return the result of `call`, called by a function of this module name."""
    caller = {"__name__": module, "call": call}
    exec(f"def {function}(**given):\n    self = given.get('self')\n    return call()", caller)
    return caller[function](**given)


@pytest.mark.parametrize(
    ("schedule", "trains"),
    [(SimpleNamespace(_has_backward=True), True), (SimpleNamespace(_has_backward=False), False), (object(), True)],
)
def test_a_schedule_trains_unless_it_runs_no_backward(schedule, trains):
    """A pipeline schedule trains unless it runs no backward, as in its `eval`."""
    module = "torch.distributed.pipelining.schedules"
    found = called_by(module, "_step_microbatches", training_schedules, self=schedule)
    assert found == ([schedule] if trains else [])
    assert called_by(module, "step", training_schedules, self=schedule) == []
    assert training_schedules() == []


def test_frames_are_listed_from_the_innermost_by_module_and_name():
    callers = {"one": ("outer", "inner"), "two": ("inner",)}

    def look():
        return [(frame.f_globals["__name__"], frame.f_code.co_name) for frame in frames_of(callers)]

    def within():
        return called_by("two", "inner", lambda: called_by("two", "outer", look))

    assert called_by("one", "outer", within) == [("two", "inner"), ("one", "outer")]


def test_schedules_that_were_not_imported_are_not_looked_for(monkeypatch):
    module = "torch.distributed.pipelining.schedules"
    monkeypatch.delitem(sys.modules, module)
    assert called_by(module, "_step_microbatches", training_schedules, self=object()) == []
