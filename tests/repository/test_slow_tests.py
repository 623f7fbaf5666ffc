"""The list of tests that a plain run leaves out, and how it is chosen."""

import re
import sys
from functools import cache
from types import ModuleType
from unittest import mock

from tools import slow_tests


@cache
def functions(file):
    return set(re.findall(r"^def (test_\w+)", (slow_tests.ROOT / file).read_text(), re.MULTILINE))


def test_each_is_there():
    """Each listed test function exists. Its cases may depend on what is installed."""
    names = [test.partition("[")[0].split("::") for test in slow_tests.LIST.read_text().splitlines()]
    assert names
    assert [name for name in names if name[1] not in functions(name[0])] == []


def test_long_tests_stay_where_they_alone_reach_something(monkeypatch):
    for name, seconds in (("ALWAYS", 0.2), ("FUNCTION", 2.5), ("BLOCK", 3.0)):
        monkeypatch.setattr(slow_tests, name, seconds)
    seconds = {"a[1]": 1.0, "a[2]": 0.9, "b": 4.0, "c": 7.0, "d": 9.0, "e": 30.0, "f[1]": 0.1, "f[2]": 0.1}
    reached = {test: {1} for test in seconds} | {"b": {1, 2}, "c": {2, 3}, "d": {2, 3, 4, 5}, "e": {6}}
    slow = slow_tests.choose(seconds, reached)
    assert "a[2]" not in slow, "the shorter case"
    assert "d" not in slow, "it reaches most a second"
    assert slow == {"a[1]", "b", "c", "e"}, "d reaches what b and c do, and one block is not worth 30 s"


def test_every_block_is_marked(tmp_path):
    source = '''"""Module."""

from __future__ import annotations


def f(x):
    """Function."""
    for _ in range(x):
        if x > 1:
            x -= 1
        else:
            x += 1
    try:
        return 1 // x
    except ZeroDivisionError:
        return f.__doc__


@jit
def kernel():
    return 0
'''
    (tmp_path / "module.py").write_text(source)
    assert slow_tests.mark(tmp_path) == 5
    hit: list[int] = []
    reached = ModuleType("tools.reached")
    reached.reach = hit.append
    found = {"jit": lambda function: function}
    with mock.patch.dict(sys.modules, {"tools.reached": reached}):
        exec((tmp_path / "module.py").read_text(), found)
    assert found["kernel"]() == 0
    assert found["__doc__"] == "Module."
    assert hit == []
    assert found["f"](3) == 0
    assert len(set(hit)) == 4, "all but what handles an error"
    assert found["f"](0) == "Function."
    assert len(set(hit)) == 5
