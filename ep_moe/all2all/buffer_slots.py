"""A pool of workspaces, for transports that can have only one call in flight per workspace."""

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
    """One workspace of a transport.

    workspace: an object of the transport
    busy: a call is between dispatch and combine here
    is_freed: a larger workspace replaced this one. CUDA graphs recorded on it must not be replayed
    stream: the stream on which the last call ended
    """

    workspace: Any
    busy: bool = False
    is_freed: bool = False
    stream: torch.cuda.Stream | None = None

    def release(self, device: torch.device) -> None:
        self.busy = False
        if device.type != "cuda":
            return
        if self.stream is None or self.stream.cuda_stream != current_stream(device):
            self.stream = torch.cuda.current_stream(device)

    def free(self, device: torch.device) -> None:
        """Free the workspace after its last call has ended on this rank. No peer writes there any more by then."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.is_freed = True
        self.workspace.destroy()

    def on(self, stream: int) -> bool:
        """Whether the last call ended on the stream with this handle, or there was no call yet."""
        return self.stream is None or self.stream.cuda_stream == stream

    def wait_for_last_call(self, device: torch.device) -> None:
        """Make the current stream wait for a last call that ended on another stream.

        Not needed in a CUDA graph capture: it begins with a synchronized device, and within it the wait for a call's
        results covers this.
        """
        if self.stream is not None and not self.on(current_stream(device)) and not capturing(device):
            torch.cuda.current_stream(device).wait_stream(self.stream)


@dataclass(frozen=True, eq=False)
class RecordableCall:
    """The launches of a call in one buffer slot, which a CUDA graph can record.

    received: the received rows, at the same addresses in every call
    send: launches the dispatch of x [T, H] with its routing. The leading arguments of its first kernel are the
        addresses of x, ids, weights and the tables of `placement_arguments` (all multiples of 16), then T. No other
        argument depends on these tensors
    receive: launches the combine of the experts' rows (`received.out` or `received.peer_out`) into a sum [T, H]. The
        leading arguments of its last kernel are the address of the sum and T
    latency_bound: the transfer is too short to overlap with the shared experts
    """

    buffer_slot: BufferSlot
    received: Received
    send: Callable[[Tensor, PhysicalRouting], None]
    receive: Callable[[Tensor | PeerRows, Tensor], None]
    latency_bound: bool


class BufferPool:
    """Workspaces, created when a call finds none free: as many as calls were ever in flight at once.

    All ranks make the same calls, so all need a new workspace in the same call, and create it together.
    """

    def __init__(self, name: str, make: Callable[[torch.device], Any]) -> None:
        self._name, self._make = name, make
        self.buffer_slots: list[BufferSlot] = []

    def take(self, device: torch.device, fits: Callable[[Any], bool] = lambda workspace: True) -> BufferSlot:
        """Return a buffer slot for one call, from dispatch to combine. Collective if a workspace is created.

        fits: whether a free workspace is large enough, with the same answer on all ranks. If not, a new workspace
            replaces it
        """
        place = next(
            (at for at, buffer_slot in enumerate(self.buffer_slots) if not buffer_slot.busy), len(self.buffer_slots)
        )
        before = self.buffer_slots[place] if place < len(self.buffer_slots) else None
        if before is not None and fits(before.workspace):
            before.wait_for_last_call(device)
            return before
        if capturing(device):
            raise InputError(f"{self._name} makes its buffers in the first call: run the layer once before a capture")
        # tensors created in inference mode cannot be written outside it
        with torch.inference_mode(False), unseen_by_modes():
            buffer_slot = BufferSlot(self._make(device))
        if before is not None:
            before.free(device)
        self.buffer_slots[place : place + 1] = [buffer_slot]
        return buffer_slot

    def destroy(self) -> None:
        for buffer_slot in self.buffer_slots:
            buffer_slot.workspace.destroy()
        self.buffer_slots.clear()
