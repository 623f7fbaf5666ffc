"""Scratch memory that the layers of a context share, and tensors in it."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.runtime.devices import current_stream, unseen_by_modes

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNMENT = 256  # bytes, as of CUDA allocations; FlashInfer needs 128


class Workspaces:
    """One byte buffer per stream, of the size that the largest layer needs.

    Kernels on one stream run one after the other, so all layers can share its buffer. Layers reserve their size at
    construction, and take the buffer at each call. A take allocates only for a stream without a buffer, or if a layer
    created later needs more. A captured graph keeps using the buffer of the stream on which it was captured. Buffers
    live as long as the context.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reserved = 0
        self._buffers: dict[int, list[Tensor]] = {}

    @property
    def reserved(self) -> int:
        """The bytes that the largest layer needs."""
        return self._reserved

    @property
    def allocated(self) -> int:
        """The bytes held now, over all streams."""
        held = {buffer.data_ptr(): buffer.numel() for buffers in self._buffers.values() for buffer in buffers}
        return sum(held.values())

    def reserve(self, size: int) -> None:
        self._reserved = max(self._reserved, size)

    def take(self, size: int) -> Tensor:
        """Return an uninitialized uint8 buffer of at least `size` bytes, for work on the current stream."""
        assert size <= self._reserved, "take what was reserved"
        stream = current_stream(self.device)
        buffers = self._buffers.setdefault(stream, [])
        if not buffers or buffers[-1].numel() < size:
            # tensors created in inference mode cannot be written outside it
            with torch.inference_mode(False), unseen_by_modes():
                # keep a smaller buffer: a captured graph may use its address
                buffers.append(torch.empty(self._reserved, dtype=torch.uint8, device=self.device))
        return buffers[-1]

    def lend(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` use the buffers of the current stream. Work on the two streams must never overlap."""
        here = torch.cuda.current_stream(self.device).cuda_stream
        self._buffers[stream.cuda_stream] = self._buffers.setdefault(here, [])

    def clear(self) -> None:
        self._buffers.clear()


def carve(buffer: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return views of the front of a buffer as tensors, each aligned to `ALIGNMENT` bytes, and `"rest"`."""
    views, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        views[name] = buffer[start : start + size].view(dtype).view(shape)
        start += round_up(size)
    return views | {"rest": buffer[start:]}


def carved_bytes(shapes: Shapes) -> int:
    """Return the bytes that `carve` takes from the front of a buffer."""
    return sum(round_up(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in shapes.values())


def round_up(size: int) -> int:
    """Round bytes up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
