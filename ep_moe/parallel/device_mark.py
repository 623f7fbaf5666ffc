"""How far a GPU has come, for a host thread that must not ask the driver: a query from beside breaks a CUDA graph
capture under way."""

from __future__ import annotations

import torch


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
