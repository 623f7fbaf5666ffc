"""Progress of a long task: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import AbstractContextManager
from typing import Any, TextIO

from tqdm import tqdm

_WIDTH, _ROWS = 100, 20
_EVERY_S = 5.0  # seconds between two lines, if the file is not a terminal


class Progress:
    """A context manager that shows on stderr how many parts of a task are done.

    On a terminal it draws a bar. Elsewhere it prints a line every few seconds, and one at the end.

    Args:
        total: Number of parts of the task.
        what: Name of the task.
        unit: Name of a part, in the singular.
        shown: Print anything. Pass False on ranks other than the first, and if the user wants no progress.
        file: The file to print to. Default: stderr.
    """

    def __init__(self, total: int, what: str, unit: str, *, shown: bool = True, file: TextIO | None = None) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._file = sys.stderr if file is None else file
        self._shown, self._done = shown, 0
        self._start = self._newest = time.monotonic()
        self._bar: Any = None
        if shown and self._file.isatty():
            columns = min(shutil.get_terminal_size().columns, _WIDTH)  # some terminals report 0
            self._bar = tqdm(total=total, desc=what, unit=unit, file=self._file, ncols=columns, nrows=_ROWS)

    def update(self, parts: int = 1) -> None:
        """Count parts that are done.

        Args:
            parts: Their number.
        """
        self._done += parts
        if self._bar is not None:
            self._bar.update(parts)
        elif self._shown and time.monotonic() - self._newest >= _EVERY_S and self._done < self._total:
            self._newest = time.monotonic()
            self._line()

    def _line(self) -> None:
        plural = self._unit if self._total == 1 else f"{self._unit}s"
        seconds = time.monotonic() - self._start
        self._file.write(f"{self._what}: {self._done} of {self._total} {plural}, {seconds:.1f} s\n")
        self._file.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown and kind is None:
            self._line()


def hide_progress_bars() -> AbstractContextManager[Any]:
    """Hide progress bars while something else is printed.

    Returns:
        A context manager.
    """
    hidden: AbstractContextManager[Any] = tqdm.external_write_mode(file=sys.stdout)
    return hidden
