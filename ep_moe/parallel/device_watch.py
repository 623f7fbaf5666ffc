"""Host memory that a device and the flight recorder's watch thread share.

The device writes its progress, which the thread reads. The thread writes whether collectives were aborted, which the
device reads. The thread does not query the driver: that would break a CUDA graph capture in another thread.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ep_moe.runtime.devices import unseen_by_modes
from ep_moe.types import capturing


class DeviceMark:
    """A marker in a stream: the device writes a number to host memory when it reaches it. One is pending at a time."""

    def __init__(self, device: torch.device) -> None:
        self._asked = 0
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.set()  # loads the kernels that it uses now, while no kernel waits for a peer
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def set(self) -> None:
        """Enqueue the marker on the current stream."""
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
        """Enqueue a marker, so that the watch thread sees when a GPU reaches this point of the stream.

        The host may leave a step before the device does. At most one marker is set per `period`.
        """
        if not self.active or time.monotonic() - self._marked < self._period or capturing(device):
            return
        with unseen_by_modes():
            self.prepare(device)
            if self.newest is not None and self.newest.reached:
                self._marked = time.monotonic()
                self.newest.set()

    def prepare(self, device: torch.device) -> None:
        """Allocate the memory and load the kernels that `mark` needs. Call it while no kernel waits for a peer.

        Allocating pinned memory and loading a kernel wait for running kernels.
        """
        if self.active and self.newest is None:
            self.newest = DeviceMark(device)
            if self._abortable:
                self._aborted = torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")

    @property
    def late_s(self) -> float:
        """Seconds since the newest marker was enqueued, 0 once the device has reached it."""
        return 0.0 if self.newest is None or self.newest.reached else time.monotonic() - self._marked

    def aborted(self, device: torch.device) -> Tensor | None:
        """Return bool [1] on `device`: whether collectives were aborted by the time the current stream reaches this.

        None if collectives are never aborted.
        """
        return None if self._aborted is None else self._aborted.to(device, non_blocking=True)

    @property
    def reads_aborts(self) -> bool:
        """Whether kernels can read that collectives were aborted."""
        return self._aborted is not None

    def note_abort(self) -> None:
        """Let the device know that collectives were aborted."""
        if self._aborted is not None:
            self._aborted.fill_(True)
