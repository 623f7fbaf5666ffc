"""What all commands share: the model, the result as text or JSON, log records, exit codes, how a user's error ends."""

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
from ep_moe.runtime.progress import beside_bars

EXIT_CODES = {
    0: "ok",
    1: "the answer is no: a check failed, or nothing can run; also a crash, which shows a traceback",
    2: "not done: an option, name, file or backend is wrong, or a rank was lost; one line says why",
    130: "ended by Ctrl-C (143: by SIGTERM)",
}
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LINE = 120  # characters of a table's line

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
    """Where a command prints.

    Args:
        as_json: Print the result alone, as JSON.
        quiet: Print no progress.
        first_alone: Ranks other than 0 print nothing.
    """

    def __init__(self, as_json: bool, quiet: bool, *, first_alone: bool = True) -> None:
        self.as_json, self._quiet = as_json, quiet
        self._silent = first_alone and not is_first_rank()
        self._stdout = sys.stdout

    def line(self, text: str = "") -> None:
        """Print a line for a reader.

        Args:
            text: As it is, whatever brackets it has.
        """
        if not self._silent and not self.as_json:
            _console().print(text)

    def progress(self, text: str) -> None:
        """Print a line before there is a result: to stderr beside JSON, nowhere when quiet.

        Args:
            text: As it is.
        """
        if not self._silent and not self._quiet:
            with beside_bars():
                _console(stderr=self.as_json).print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table for a reader, under an empty line.

        Args:
            title: Above it; columns of a table with a title are numbers, but for the first.
            columns: Their names.
            rows: Of cells.
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
        # a line that is too long for the terminal is better than numbers without their ends
        _console(width=max(console.width, _LINE)).print(table)

    def result(self, found: Mapping[str, Any]) -> None:
        """Print the JSON object, if that was asked for.

        Args:
            found: Its fields: dataclasses, arrays and paths too.
        """
        if not self._silent and self.as_json:
            self._stdout.write(json_text(found) + "\n")
            self._stdout.flush()


@contextmanager
def command(
    as_json: bool = False, quiet: bool = False, log_level: str = DEFAULT_LEVEL, *, first_alone: bool = True
) -> Iterator[Output]:
    """Run the body of a command: with its log records on stderr, and a user's error as one line.

    Args:
        as_json: The option `--json`.
        quiet: The option `--quiet`.
        log_level: The option `--log-level`.
        first_alone: Ranks other than 0 print no result.

    Yields:
        Where to print.

    Raises:
        typer.Exit: with code 2, for an error of `ep_moe.errors`.
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
    """Join `--quiet` and `--log-level`.

    Args:
        quiet: Whether records below ERROR are left out.
        log_level: A name in `LEVELS`.

    Returns:
        A name in `LEVELS`.

    Raises:
        ConfigError: the level is unknown.
    """
    if log_level not in LEVELS:
        hint = did_you_mean(log_level, LEVELS)
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {log_level!r}{hint}")
    return "error" if quiet else log_level


@contextmanager
def log_records(level: str) -> Iterator[None]:
    """Write the package's log records to stderr within the block, those of ranks with their number.

    Args:
        level: The least, a name in `LEVELS`.

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
    """End the command by a user's error: one sentence, printed once, since all ranks have the same one.

    Args:
        error: The error.

    Raises:
        typer.Exit: with code 2.
    """
    note(f"error: {error}")
    raise typer.Exit(2)


def note(text: str) -> None:
    """Print a line on stderr, on rank 0 alone.

    Args:
        text: As it is.
    """
    if is_first_rank():
        _console(stderr=True).print(text)


def _console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Prints text as it is: no style, no line break, and no picture for a word between colons."""
    return Console(stderr=stderr, width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


def is_first_rank() -> bool:
    """Say whether this process prints.

    Returns:
        True on rank 0 of a launcher, and without one.
    """
    return os.environ.get("RANK", "0") == "0"


def model_named(command: str, model: str | None, default: str | None = None, /, **old: str | None) -> str:
    """Take the model of a command from its first argument, or from an option of an earlier release.

    Args:
        command: Its name, for errors.
        model: The argument.
        default: Where nothing is given. None: an error.
        **old: Values of options that an earlier release had, by name.

    Returns:
        The name.

    Raises:
        ConfigError: no model, or more than one.
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
    """Raise ConfigError for a revision that would be ignored: of a model that is not looked up on the Hub.

    Args:
        model: A folder, a bundled configuration, a .toml file or a name on the Hub; None for the demo.
        revision: What was asked for; None for the default.
    """
    if revision is None:
        return
    of_hub = model is not None and "/" in model and not model.endswith(".toml") and not Path(model).is_dir()
    if not of_hub:
        given = "no model" if model is None else repr(model)
        raise ConfigError(f"--revision is for models of the Hub, got {revision!r} with {given}; leave it out")
