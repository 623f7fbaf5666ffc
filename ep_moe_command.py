"""The `ep-moe` command until its own modules are there: importing torch takes seconds, on a cold disk many.

It is a module of its own, since Python imports all of `ep_moe` before any module in it. On a terminal it
prints at once that the command starts. Ctrl-C ends the command with one line.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130
_STARTING = "ep-moe: starting"


def main() -> None:
    """Take Ctrl-C, print that the command starts, import the command line, and run it."""
    _begin()
    from ep_moe.cli.app import app

    if _shown():
        sys.stderr.write(f"\r{' ' * len(_STARTING)}\r")
        sys.stderr.flush()
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which the commands count on
    app()


def begin_module_form() -> None:
    """Take Ctrl-C and print that the command starts, if Python imports `ep_moe` for `python -m ep_moe`.

    `main` follows that import.
    """
    words = sys.orig_argv
    if "-m" in words[:-1] and words[words.index("-m") + 1] == "ep_moe":
        _begin()


def _begin() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # done, or a shell has it ignored
        return
    signal.signal(signal.SIGINT, _interrupted)
    if _shown():
        sys.stderr.write(_STARTING)
        sys.stderr.flush()


def _interrupted(*_: object) -> NoReturn:
    if _first():
        os.write(2, b"\ninterrupted\n" if _shown() else b"interrupted\n")
    os._exit(_INTERRUPTED)  # nothing has begun that would have to end


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _shown() -> bool:
    return _first() and sys.stderr.isatty() and "--quiet" not in sys.argv and "--quiet" not in sys.orig_argv
