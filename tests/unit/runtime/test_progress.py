"""Test the progress of a long task: a bar on a terminal, lines elsewhere, nothing if it is turned off."""

import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from ep_moe.runtime.progress import Progress, hide_progress_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


def counted(file, parts=3, **options):
    with Progress(parts, "loading", "expert", file=file, **options) as bar:
        for _ in range(parts):
            bar.update()


def test_a_bar_on_a_terminal_begins_at_once():
    file = Terminal()
    with Progress(3, "loading", "expert", file=file) as bar:
        assert "loading:   0%" in file.getvalue(), "before the first part is done"
        bar.update(3)
    assert "3/3" in file.getvalue()


def test_lines_elsewhere(monkeypatch):
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(5, "loading", "expert", file=file) as bar:
        for seconds in (6.0, 7.0, 12.0, 13.0, 18.0):
            now[0] = seconds
            bar.update()
    assert file.getvalue().splitlines() == [
        "loading: 1 of 5 experts, 6.0 s", "loading: 3 of 5 experts, 12.0 s", "loading: 5 of 5 experts, 18.0 s",
    ]  # fmt: skip
    one = io.StringIO()
    counted(one, 1)
    assert "1 of 1 expert," in one.getvalue()


@pytest.mark.parametrize("file", [Terminal(), io.StringIO()])
def test_nothing_where_it_is_not_shown(file):
    counted(file, shown=False)
    assert file.getvalue() == ""


def test_an_exception_leaves_no_line_that_says_it_is_done():
    file = io.StringIO()
    with pytest.raises(ValueError, match="mine"), Progress(3, "loading", "expert", file=file):
        raise ValueError("mine")
    assert file.getvalue() == ""


def test_what_is_printed_beside_a_bar_has_lines_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(3, "loading", "expert"):
        with hide_progress_bars():
            sys.stdout.write("a result\n")
        said = capsys.readouterr()
    assert said.out == "a result\n"
    assert said.err.count("loading") >= 2, "drawn again behind it"


def on_terminal(*words, seconds=60.0):
    """Return what a command writes to a terminal until it ends."""
    main, side = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "ep_moe", *words], stdout=side, stderr=side, stdin=side)
    os.close(side)
    said, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([main], [], [], 0.1)[0]:
            try:
                found = os.read(main, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not found:
                break
            said += found
        elif process.poll() is not None:
            break
    os.close(main)
    assert process.wait(30) == 0, said.decode()
    return said.decode()


def test_a_benchmark_on_a_terminal():
    said = on_terminal("bench", "planner", "--repeat", "1", seconds=250.0)
    assert "measuring: " in said
    assert "numpy" in said
