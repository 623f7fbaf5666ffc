"""Workspaces of transports whose library has one call in flight in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.runtime.devices import current_stream, unseen_by_modes
from ep_moe.types import PeerRows, PhysicalRouting, Received, capturing


@dataclass(eq=False)
class BufferSlot:
    """One workspace of the library, whether a call is under way in it, and the stream that the last one ended on.

    given_back: a larger one has taken its place, and what was recorded on it cannot run any more"""

    library: Any
    busy: bool = False
    given_back: bool = False
    stream: torch.cuda.Stream | None = None

    def release(self, device: torch.device) -> None:
        self.busy = False
        if device.type != "cuda":
            return
        if self.stream is None or self.stream.cuda_stream != current_stream(device):
            self.stream = torch.cuda.current_stream(device)

    def give_back(self, device: torch.device) -> None:
        """Its memory, once the last call in it has ended on this rank: no peer writes there any more then."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.given_back = True
        self.library.destroy()

    def on(self, stream: int) -> bool:
        """Whether no call ended on another stream than the one with this handle."""
        return self.stream is None or self.stream.cuda_stream == stream

    def follow(self, device: torch.device) -> None:
        """Wait on the current stream for a call that ended on another. A capture begins with a synchronized device, and
        inside one, the wait for its results covers this too."""
        if self.stream is not None and not self.on(current_stream(device)) and not capturing(device):
            torch.cuda.current_stream(device).wait_stream(self.stream)


@dataclass(frozen=True, eq=False)
class RecordableCall:
    """What a transport launches for any call in a buffer slot, to be recorded.

    received: what arrives, always there
    send: of x [T, H] and its routing. What is launched first begins with the addresses of x, ids, weights and of
        what `to_place` gives, multiples of 16, and T; nothing else depends on them
    receive: of what experts return, in `received.out` or `received.peer_out`, and the sum [T, H]. What is launched last
        begins with the sum's address and T
    latency_bound: the transfer is too short to overlap with the shared experts
    """

    buffer_slot: BufferSlot
    received: Received
    send: Callable[[Tensor, PhysicalRouting], None]
    receive: Callable[[Tensor | PeerRows, Tensor], None]
    latency_bound: bool


class BufferPool:
    """As many workspaces as calls were ever in flight at once, made when they are needed. All ranks make the same
    calls. All of them run out of buffer slots in the same call, and make another together."""

    def __init__(self, name: str, make: Callable[[torch.device], Any]) -> None:
        self._name, self._make = name, make
        self.made: list[BufferSlot] = []

    def take(self, device: torch.device, fits: Callable[[Any], bool] = lambda library: True) -> BufferSlot:
        """A buffer slot for one call, from dispatch to combine. Collective where one is made: `fits` says alike on all
        ranks whether a free one serves the call, or a new one takes its place."""
        place = next((at for at, buffer_slot in enumerate(self.made) if not buffer_slot.busy), len(self.made))
        before = self.made[place] if place < len(self.made) else None
        if before is not None and fits(before.library):
            before.follow(device)
            return before
        if capturing(device):
            raise InputError(f"{self._name} makes its buffers in the first call: run the layer once before a capture")
        # what is made in inference mode could not be written outside
        with torch.inference_mode(False), unseen_by_modes():
            buffer_slot = BufferSlot(self._make(device))
        if before is not None:
            before.give_back(device)
        self.made[place : place + 1] = [buffer_slot]
        return buffer_slot

    def destroy(self) -> None:
        for buffer_slot in self.made:
            buffer_slot.library.destroy()
        self.made.clear()
