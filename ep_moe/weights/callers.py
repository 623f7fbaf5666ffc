"""Which functions of other libraries call: where nothing else tells what a call is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType

Callers = Mapping[str, tuple[str, ...]]  # names of functions, by module


def frames_of(callers: Callers) -> Iterator[FrameType]:
    """List the frames of some functions among the callers.

    Args:
        callers: The functions.

    Yields:
        Their frames, innermost first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in callers.get(frame.f_globals.get("__name__", ""), ()):
            yield frame
        frame = frame.f_back
