"""Work beside the caller's stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from ep_moe.types import Pending

Result = TypeVar("Result")


class SideStream:
    """Calls on a stream of their own, in the order they are made.

    Each begins when what the caller's stream has been given until then is done, so that memory which the caller freed
    before may be used again; `wait()` makes the caller's stream wait, and does there what the call left to it. Inside a
    graph capture both become branches.
    """

    def __init__(self, priority: int = 0) -> None:
        """priority: of a CUDA stream, lower goes first."""
        self._priority = priority
        self._stream: torch.cuda.Stream | None = None
        self.active = False  # whether a call is being given to it

    def start(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        """What `call` holds is kept until `wait()`: its memory may not be used again before."""
        self.active = True
        try:
            return call() if device.type != "cuda" else self._start(device, call)
        finally:
            self.active = False

    def _start(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, self._priority)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pending = call()
            done = torch.cuda.Event()
            done.record(self._stream)

        return Pending(partial(_join, device, done, pending, call))


def _join(device: torch.device, done: torch.cuda.Event, pending: Pending[Result], kept: object) -> Result:
    torch.cuda.current_stream(device).wait_event(done)
    return pending.wait()
