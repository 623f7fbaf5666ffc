"""How far a device has come, for the thread that watches a rank, and whether collectives were aborted, for the device.

The thread reads it from host memory: a query of the driver from beside breaks a CUDA graph capture under way.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ep_moe.runtime.devices import unseen_by_modes
from ep_moe.types import capturing


class DeviceMark:
    """A number that the device writes into host memory when it gets there; one is under way at a time."""

    def __init__(self, device: torch.device) -> None:
        self._asked = 0
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.set()  # what it runs for the first time is loaded now, while no kernel waits for a peer
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def set(self) -> None:
        """Behind everything that the current stream has been given."""
        self._asked += 1
        self._count.add_(1)
        self._seen.copy_(self._count, non_blocking=True)

    @property
    def reached(self) -> bool:
        return int(self._seen) >= self._asked


class DeviceWatch:
    """The part of a flight recorder that a device writes or reads.

    active: whether a thread watches
    period: seconds between two marks
    abortable: whether collectives are ever aborted
    """

    def __init__(self, period: float, *, abortable: bool) -> None:
        self.active = False
        self._period, self._abortable = period, abortable
        self.newest: DeviceMark | None = None
        self._marked = 0.0
        self._aborted: Tensor | None = None  # bool [1] that the device reads

    def mark(self, device: torch.device) -> None:
        """Let the watch see when a GPU has come this far: for steps that the host leaves before the device does. Now
        and then one is enough."""
        if not self.active or time.monotonic() - self._marked < self._period or capturing(device):
            return
        with unseen_by_modes():
            self.prepare(device)
            if self.newest is not None and self.newest.reached:
                self._marked = time.monotonic()
                self.newest.set()

    def prepare(self, device: torch.device) -> None:
        """Make what `mark` needs, while no kernel waits for a peer: pinned memory, and a kernel that is loaded, would
        wait for that one."""
        if self.active and self.newest is None:
            self.newest = DeviceMark(device)
            if self._abortable:
                self._aborted = torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")

    @property
    def late_s(self) -> float:
        """Seconds since the newest mark was set, 0 once the device has come there."""
        return 0.0 if self.newest is None or self.newest.reached else time.monotonic() - self._marked

    def aborted(self, device: torch.device) -> Tensor | None:
        """Whether collectives were aborted, when the current stream comes to it: bool [1] on `device`. None where
        nothing is ever aborted."""
        return None if self._aborted is None else self._aborted.to(device, non_blocking=True)

    @property
    def reads_aborts(self) -> bool:
        """Whether kernels can read that collectives were aborted."""
        return self._aborted is not None

    def note_abort(self) -> None:
        """Tell the device."""
        if self._aborted is not None:
            self._aborted.fill_(True)
