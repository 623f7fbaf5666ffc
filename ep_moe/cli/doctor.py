"""`ep-moe doctor`: what is installed here, and which backends can run, each with its reason."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from ep_moe import registry
from ep_moe._version import __version__
from ep_moe.runtime.versions import how_run, installed, launcher_known

_PACKAGES = ("transformers", "safetensors", "flashinfer-python", "triton", "numpy")


def versions() -> dict[str, str]:
    """What a bug report needs, by name."""
    found = {
        "ep_moe": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none: a CPU build of torch"),
        "NCCL": _nccl(),
    }
    return found | {package: installed(package) or "not installed" for package in _PACKAGES}


def runs() -> dict[str, str]:
    """How the tests ran with what is installed, by the names of `versions`: where, or "not run" and what was run."""
    found = {package: how_run(package, installed(package)) for package in ("torch", *_PACKAGES)}
    triton = installed("triton")
    if triton is not None and not launcher_known(triton):
        found["triton"] += "; its launcher is not known: each launch of an eager call takes the host longer"
    return found


def _nccl() -> str:
    """Version and file of the NCCL that is loaded in this process."""
    if not torch.cuda.is_available():
        return "not loaded: no GPU"
    number = ".".join(map(str, torch.cuda.nccl.version()))
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    files = sorted({line.split()[-1] for line in lines if "libnccl.so" in line})
    return f"{number} ({', '.join(files) or 'linked into torch'})"


def gpus() -> list[str]:
    """One line per visible GPU."""
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(f"{index}: {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    return lines


def backends() -> list[tuple[str, str, str]]:
    """(kind, name, "available" or the reason why not)."""
    kinds: tuple[registry.Kind, ...] = ("dispatchers", "experts", "fused")
    return [
        (kind, name, registry.unsupported_reason(kind, name) or "available")
        for kind in kinds
        for name in registry.targets(kind)
    ]
