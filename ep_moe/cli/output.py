"""Shared by all commands: the model argument, output as text or JSON, log records, exit codes and error messages."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from ep_moe.bench.harness import json_text
from ep_moe.checks import did_you_mean
from ep_moe.config import model_configs
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.integrations.model_name import FORMS
from ep_moe.parallel.local_launch import RanksFailed
from ep_moe.runtime.progress import hide_progress_bars

EXIT_CODES = {
    0: "success",
    1: "the answer is no: a check failed, or nothing can run; also a crash, which shows a traceback",
    2: "an option, name, file or backend is wrong, or a rank was lost; one line says why",
    130: "ended by Ctrl-C (143: by SIGTERM)",
}
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LINE = 120  # least width of a table, in characters

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object on stdout, and nothing else there.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, and no log records below error.")]
LogLevel = Annotated[
    str, typer.Option("--log-level", help=f"Least level of log records on stderr: {', '.join(LEVELS)}.")
]
DEFAULT_LEVEL = "warning"
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{FORMS[0].upper()}{FORMS[1:]}.")]


class Output:
    """Prints the output of a command.

    Args:
        as_json: Print only the result, as JSON.
        quiet: Print no progress.
        first_alone: Print on rank 0 only.
    """

    def __init__(self, as_json: bool, quiet: bool, *, first_alone: bool = True) -> None:
        self.as_json, self._quiet = as_json, quiet
        self._silent = first_alone and not is_first_rank()
        self._stdout = sys.stdout

    def line(self, text: str = "") -> None:
        """Print a line of text, unless the output is JSON.

        Args:
            text: The line, which is printed without interpretation of markup.
        """
        if not self._silent and not self.as_json:
            _console().print(text)

    def progress(self, text: str) -> None:
        """Print a line of progress: to stderr if the output is JSON, and not at all with `quiet`.

        Args:
            text: The line, which is printed without interpretation of markup.
        """
        if not self._silent and not self._quiet:
            with hide_progress_bars():
                _console(stderr=self.as_json).print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print an empty line and a table, unless the output is JSON.

        Args:
            title: The line above it. In a table with a title, all columns but the first are numbers.
            columns: Names of the columns.
            rows: Rows of cells.
        """
        if self._silent or self.as_json:
            return
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            justify: Any = "left" if index == 0 else "right" if title else "left"
            table.add_column(column, justify=justify, no_wrap=bool(title))
        for row in rows:
            table.add_row(*row)
        console = _console()
        console.print()
        # a line that is too long for the terminal is better than truncated numbers
        _console(width=max(console.width, _LINE)).print(table)

    def result(self, found: Mapping[str, Any]) -> None:
        """Print the result as a JSON object, if the output is JSON.

        Args:
            found: The fields of the object. Values may be dataclasses, arrays and paths too.
        """
        if not self._silent and self.as_json:
            self._stdout.write(json_text(found) + "\n")
            self._stdout.flush()


@contextmanager
def command(
    as_json: bool = False, quiet: bool = False, log_level: str = DEFAULT_LEVEL, *, first_alone: bool = True
) -> Iterator[Output]:
    """Run the body of a command. Log records go to stderr, and a user's error is printed as one line.

    Args:
        as_json: The option `--json`.
        quiet: The option `--quiet`.
        log_level: The option `--log-level`.
        first_alone: Print the result on rank 0 only.

    Yields:
        The output to print to.

    Raises:
        typer.Exit: With code 2, for an error of `ep_moe.errors`.
    """
    out = Output(as_json, quiet, first_alone=first_alone)
    try:
        level = least_level(quiet, log_level)
        with log_records(level), redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield out
    except EPMoEError as error:
        fail(error)
    except RanksFailed as failure:
        if not failure.errors:
            raise
        fail(next(iter(failure.errors.values())))


def least_level(quiet: bool, log_level: str) -> str:
    """Return the level of log records that `--quiet` and `--log-level` select together.

    Args:
        quiet: Whether records below ERROR are omitted.
        log_level: A name in `LEVELS`.

    Returns:
        A name in `LEVELS`.

    Raises:
        ConfigError: The level is unknown.
    """
    if log_level not in LEVELS:
        hint = did_you_mean(log_level, LEVELS)
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {log_level!r}{hint}")
    return "error" if quiet else log_level


@contextmanager
def log_records(level: str) -> Iterator[None]:
    """Write the package's log records to stderr within this context manager, with the rank's number.

    Args:
        level: The least level, a name in `LEVELS`.

    Yields:
        Nothing.
    """
    rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(name)s{rank and f' [rank {rank}]'}: %(message)s"))
    logger = logging.getLogger("ep_moe")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(LEVELS[level])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def fail(error: EPMoEError) -> NoReturn:
    """End the command for a user's error. Its message is printed on rank 0 only, because all ranks have the same one.

    Args:
        error: The error.

    Raises:
        typer.Exit: With code 2.
    """
    note(f"error: {error}")
    raise typer.Exit(2)


def note(text: str) -> None:
    """Print a line on stderr, on rank 0 only.

    Args:
        text: The line, which is printed without interpretation of markup.
    """
    if is_first_rank():
        _console(stderr=True).print(text)


def _console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text unchanged: no markup, no line breaks, and no emoji for words between colons."""
    return Console(stderr=stderr, width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


def is_first_rank() -> bool:
    """Return whether this process prints.

    Returns:
        True on rank 0 of a launcher, and without a launcher.
    """
    return os.environ.get("RANK", "0") == "0"


def model_named(command: str, model: str | None, default: str | None = None, /, **old: str | None) -> str:
    """Return the model of a command, from its first argument or from a deprecated option.

    Args:
        command: The command's name, for errors.
        model: The argument.
        default: The model if none is given. None: raise an error.
        **old: Values of deprecated options, by name.

    Returns:
        The model's name.

    Raises:
        ConfigError: No model, or more than one, is given.
    """
    found = [] if model is None else [model]
    for option, value in old.items():
        if value is not None:
            found.append(value)
            note(f"note: --{option} is deprecated, the next release has none; write ep-moe {command} {value}")
    if len(found) > 1:
        raise ConfigError(f"{command} takes one model, got {' and '.join(found)}; leave out one of them")
    if not found and default is None:
        known = ", ".join(model_configs())
        raise ConfigError(f"{command} needs a model as its first argument: {FORMS}; bundled are {known}")
    return found[0] if found else str(default)


def check_revision(model: str | None, revision: str | None) -> None:
    """Raise ConfigError for a revision of a model that is not on the Hub, where it would be ignored.

    Args:
        model: A folder, a bundled configuration, a .toml file or a name on the Hub; None for the demo.
        revision: The requested revision; None for the default.
    """
    if revision is None:
        return
    of_hub = model is not None and "/" in model and not model.endswith(".toml") and not Path(model).is_dir()
    if not of_hub:
        given = "no model" if model is None else repr(model)
        raise ConfigError(f"--revision is for models of the Hub, got {revision!r} with {given}; leave it out")
