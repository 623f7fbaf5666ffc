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
    """Run the command line."""
    first = os.environ.get("RANK", "0") == "0"
    shown = first and sys.stderr.isatty() and "--quiet" not in sys.argv

    def interrupted(*_: object) -> NoReturn:
        if first:
            os.write(2, b"\ninterrupted\n" if shown else b"interrupted\n")
        os._exit(_INTERRUPTED)  # nothing has begun that would have to end

    before = signal.signal(signal.SIGINT, interrupted)
    if shown:
        sys.stderr.write(_STARTING)
        sys.stderr.flush()
    from ep_moe.cli.app import app

    if shown:
        sys.stderr.write(f"\r{' ' * len(_STARTING)}\r")
        sys.stderr.flush()
    signal.signal(signal.SIGINT, before)
    app()
