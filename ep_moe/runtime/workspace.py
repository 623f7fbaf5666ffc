"""Scratch memory that the layers of a context share."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.runtime.devices import current_stream, unseen_by_modes

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNMENT = 256  # of CUDA's own allocations; FlashInfer wants 128


class Workspaces:
    """One buffer of bytes per stream, as large as the largest layer needs.

    Kernels on one stream run one after the other, so that equal and unequal layers may share it. Layers reserve at
    construction and take at each call; nothing is allocated before the first take, and afterwards only for a stream
    not seen yet, or for a layer made later that needs more. A captured graph keeps using the buffer of the stream it
    was captured on; buffers are kept as long as the context.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reserved = 0
        self._buffers: dict[int, list[Tensor]] = {}

    @property
    def reserved(self) -> int:
        """Bytes that the largest layer needs."""
        return self._reserved

    @property
    def allocated(self) -> int:
        """Bytes held now, over all streams."""
        held = {buffer.data_ptr(): buffer.numel() for buffers in self._buffers.values() for buffer in buffers}
        return sum(held.values())

    def reserve(self, size: int) -> None:
        self._reserved = max(self._reserved, size)

    def take(self, size: int) -> Tensor:
        """uint8 [at least size] for work on the current stream, its content undefined."""
        assert size <= self._reserved, "take what was reserved"
        stream = current_stream(self.device)
        buffers = self._buffers.setdefault(stream, [])
        if not buffers or buffers[-1].numel() < size:
            with torch.inference_mode(False), unseen_by_modes():  # what is made within it could not be written outside
                # a smaller one stays: a captured graph may hold its address
                buffers.append(torch.empty(self._reserved, dtype=torch.uint8, device=self.device))
        return buffers[-1]

    def lend(self, stream: torch.cuda.Stream) -> None:
        """Work on `stream` uses the buffers of the one that is current now: it never runs beside that one's."""
        here = torch.cuda.current_stream(self.device).cuda_stream
        self._buffers[stream.cuda_stream] = self._buffers.setdefault(here, [])

    def clear(self) -> None:
        self._buffers.clear()


def carve(buffer: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Cut tensors out of the front of a buffer, each aligned to `ALIGNMENT` bytes; what is left is `"rest"`."""
    views, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        views[name] = buffer[start : start + size].view(dtype).view(shape)
        start += round_up(size)
    return views | {"rest": buffer[start:]}


def carved_bytes(shapes: Shapes) -> int:
    """What `carve` takes from the front."""
    return sum(round_up(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in shapes.values())


def round_up(size: int) -> int:
    """Round bytes up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
