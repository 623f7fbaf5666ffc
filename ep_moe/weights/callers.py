"""Detect functions of other libraries on the call stack, where no argument tells what a call is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

Callers = Mapping[str, tuple[str, ...]]  # module name -> function names

_PIPELINE = "torch.distributed.pipelining.schedules"
_SCHEDULES: Callers = {_PIPELINE: ("_step_microbatches",)}


def frames_of(callers: Callers) -> Iterator[FrameType]:
    """Find the stack frames of given functions.

    Args:
        callers: The functions to look for.

    Yields:
        Their frames, innermost first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in callers.get(frame.f_globals.get("__name__", ""), ()):
            yield frame
        frame = frame.f_back


def training_schedules() -> list[Any]:
    """Return the torch.distributed.pipelining schedules on the call stack that also run backward."""
    if _PIPELINE not in sys.modules:
        return []
    found = [frame.f_locals.get("self") for frame in frames_of(_SCHEDULES)]
    return [schedule for schedule in found if getattr(schedule, "_has_backward", True)]
