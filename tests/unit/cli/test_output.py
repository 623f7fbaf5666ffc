"""Test what commands print: verbatim, complete, and on one rank only; and where log records go."""

import logging

import pytest

from ep_moe import ConfigError, PeerTimeout
from ep_moe.cli import output
from ep_moe.cli.output import Output, log_records
from ep_moe.parallel.local_launch import RanksFailed

MARKED = "[rank 0] [bold]loses[/bold] no :smile: here"  # rich would turn these into styles and emoji
LONG = "a sentence that says which option is wrong, and what to write in its place, " * 3
SAY = {
    "line": lambda text: Output(False, False).line(text),
    "progress": lambda text: Output(False, False).progress(text),
    "progress beside json": lambda text: Output(True, False).progress(text),
    "note": output.note,
}


@pytest.fixture(autouse=True)
def _a_narrow_terminal_of_rank_0(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("text", [MARKED, LONG.strip()], ids=["brackets", "a long line"])
@pytest.mark.parametrize("how", SAY)
def test_a_text_is_printed_as_it_is(how, text, capsys):
    """Text is printed verbatim.

    Names may contain brackets and colons, and a line break would split a command that users copy.
    """
    SAY[how](text)
    out, err = capsys.readouterr()
    on_stderr = how in ("progress beside json", "note")
    assert (err if on_stderr else out) == f"{text}\n"
    assert (out if on_stderr else err) == ""


def test_a_cell_is_printed_as_it_is(capsys):
    Output(False, False).table("", ["what", "version"], [[MARKED, "2.11"]])
    assert MARKED in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_row_of_numbers_is_one_line_with_all_digits(columns, capsys, monkeypatch):
    """A row of numbers is one line with all digits, on a terminal of any width.

    A wide terminal has room for more than 120 characters.
    """
    monkeypatch.setenv("COLUMNS", columns)
    count = 10 if columns == "40" else 18
    row = ["layer 0", *(f"{10**6 + rank}" for rank in range(count))]
    Output(False, False).table("tokens", ["", *(f"rank {rank}" for rank in range(count))], [row])
    out = capsys.readouterr().out
    assert out.startswith("\n"), "under an empty line"
    assert row in [line.split("  ") for line in map(str.strip, out.splitlines())]


@pytest.mark.parametrize(("first_alone", "heard"), [(True, False), (False, True)])
@pytest.mark.parametrize("as_json", [True, False])
def test_other_ranks_print_where_they_are_asked_to(as_json, first_alone, heard, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = Output(as_json, False, first_alone=first_alone)
    for say in (
        lambda: out.line("line"), lambda: out.table("", ["a"], [["cell"]]),
        lambda: out.progress("progress"), lambda: out.result({"found": 1}),
    ):  # fmt: skip
        say()
    written = "".join(capsys.readouterr())
    words = ("progress", '"found"') if as_json else ("line", "cell", "progress")
    assert [word in written for word in words] == [heard] * len(words)
    assert heard or not written


def test_log_records_leave_the_level_that_was_set(caplog):
    logger = logging.getLogger("ep_moe")
    caplog.set_level(logging.ERROR, "ep_moe")
    before = list(logger.handlers)
    with log_records("debug"):
        assert logger.level == logging.DEBUG
    assert (logger.level, logger.handlers) == (logging.ERROR, before)


def test_log_records_have_the_rank_of_the_process_group(monkeypatch, capsys):
    """Log records carry the rank of the process group. Forked ranks have no launcher's variable of their own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(output.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(output.dist, "get_rank", lambda: 3)
    with log_records("info"):
        logging.getLogger("ep_moe.room").info("heard")
    assert capsys.readouterr().err == "INFO ep_moe.room [rank 3]: heard\n"


def test_of_ranks_that_failed_the_first_is_heard(capsys):
    lost = RanksFailed("2 of 4 ranks failed", {2: ConfigError("its own"), 3: PeerTimeout("rank 2 is gone")})
    with pytest.raises(output.typer.Exit) as ended, output.command():
        raise lost
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error: its own\n"
