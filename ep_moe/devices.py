"""What a device can do, asked once."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def current_stream(device: torch.device) -> int:
    """The handle of the stream that is current on a GPU, without an object for it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


@cache
def starts_early(device: torch.device) -> bool:
    """Kernels can start before those ahead of them have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
