"""Kinds of GPUs for which a command can plan without a GPU: their capabilities and rates.

Datasheet rates are without sparsity, and NVLink's in one direction (datasheets add both directions). Bytes of memory
are the datasheet's decimal numbers; drivers report a little more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ep_moe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GPURates:
    """Measured rates of one kind of GPU.

    Args:
        copy: Bytes per second of its memory, read and written.
        bf16: Operations per second of matrix products in bf16; multiply and add count as two.
        fp8: Operations per second of matrix products in fp8.
        link: Bytes per second over NVLink in one direction.
        source: The source of the numbers.
    """

    copy: float
    bf16: float
    fp8: float
    link: float
    source: str


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One kind of GPU. Backends accept it instead of a `torch.device` when they are asked whether they run on it.

    Args:
        name: The value of `--gpu`.
        capability: Compute capability, such as (9, 0).
        memory_bytes: Bytes of memory by the datasheet.
        datasheet: Rates by the datasheet.
        measured: Rates measured by this project's benchmarks, None if they were not run on this GPU.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    datasheet: GPURates
    measured: GPURates | None = None
    type: ClassVar[str] = "cuda"  # as `torch.device.type`

    @property
    def rates(self) -> GPURates:
        """The measured rates, or those of the datasheet if there are none."""
        return self.measured or self.datasheet


_LAYERS = "docs/reference/benchmarks/layers.md"
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="h100",
            capability=(9, 0),
            memory_bytes=80 * 10**9,
            datasheet=GPURates(copy=3.35e12, bf16=989e12, fp8=1979e12, link=450e9, source="NVIDIA H100 SXM datasheet"),
            measured=GPURates(
                copy=3.01e12, bf16=721e12, fp8=1397e12, link=382e9, source=f"{_LAYERS}, 2 H100, middle of three hosts"
            ),
        ),
        GPU(
            name="h200",
            capability=(9, 0),
            memory_bytes=141 * 10**9,
            datasheet=GPURates(copy=4.8e12, bf16=989e12, fp8=1979e12, link=450e9, source="NVIDIA H200 SXM datasheet"),
            measured=GPURates(
                copy=4.23e12, bf16=680e12, fp8=1347e12, link=381e9, source=f"{_LAYERS}, 2 and 4 H200, middle of runs"
            ),
        ),
        GPU(
            name="b200",
            capability=(10, 0),
            memory_bytes=180 * 10**9,
            datasheet=GPURates(copy=8e12, bf16=2250e12, fp8=4500e12, link=900e9, source="NVIDIA HGX B200 datasheet"),
        ),
    )
}


def gpu_named(name: str) -> GPU:
    """Look up a kind of GPU.

    Args:
        name: A key of `GPUS`.

    Returns:
        The GPU.

    Raises:
        ConfigError: `GPUS` has no such key.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu (--gpu) must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]


def compute_capability(device: torch.device | GPU) -> tuple[int, int]:
    """Return the compute capability of a GPU.

    Args:
        device: A device of type "cuda", or an entry of `GPUS`.

    Returns:
        The compute capability, such as (9, 0).
    """
    return device.capability if isinstance(device, GPU) else torch.cuda.get_device_capability(device)
