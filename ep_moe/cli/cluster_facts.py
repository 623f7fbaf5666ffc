"""What one rank says of itself for `ep-moe doctor --cluster`: versions, host, GPU, clocks, ECC, peer access."""

from __future__ import annotations

import platform
import subprocess

import torch

from ep_moe._version import __version__
from ep_moe.cli.cluster_verdict import RankFacts
from ep_moe.parallel.groups import host_identity
from ep_moe.runtime.devices import memory_left
from ep_moe.runtime.versions import installed

_ASKED = {  # of nvidia-smi, by our names
    "driver": "driver_version",
    "highest SM clock": "clocks.max.sm",
    "highest memory clock": "clocks.max.memory",
    "ECC": "ecc.mode.current",
    "SM clock": "clocks.current.sm",
    "uncorrected": "ecc.errors.uncorrected.volatile.total",
}
_OF_THE_MOMENT = ("SM clock", "uncorrected")
_SMI_S = 20.0


def rank_facts(rank: int, local_rank: int, gpu: int | None) -> RankFacts:
    """Collect the facts of this rank.

    Args:
        rank: In the job.
        local_rank: On its host.
        gpu: Index of its GPU among those that are visible; None where no GPU is visible.

    Returns:
        Facts. What cannot be found out is "unknown"; a GPU that fails is a fault of the facts.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    compared = {
        "ep_moe": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if count else "none",
        "Triton": installed("triton") or "none",
        "FlashInfer": installed("flashinfer-python") or "none",
        "GPUs visible": str(count),
        "device": "cpu" if gpu is None else "cuda",
    }
    if gpu is None:
        return RankFacts(rank, local_rank, host_identity(), compared)
    if gpu >= count:
        fault = f"no GPU: it needs the one with index {gpu}, and {count} are visible"
        return RankFacts(rank, local_rank, host_identity(), compared | {"device": "none"}, faults=(fault,))
    device = torch.device("cuda", gpu)
    broken = _does_not_compute(device)
    faults = [] if broken is None else [broken]
    found = torch.cuda.get_device_properties(device)
    smi = _smi(str(found.uuid))
    peers = sum(torch.cuda.can_device_access_peer(device, other) for other in range(count) if other != gpu)
    if (errors := smi.get("uncorrected", "")).isdigit() and int(errors):
        faults.append(f"its GPU had {errors} uncorrected ECC errors since the driver was loaded")
    compared |= {
        "GPU": f"{found.name}, compute capability {found.major}.{found.minor}",
        "GPU memory": f"{found.total_memory / 2**30:.1f} GiB",
        "peer access": f"to {peers} of {count - 1} other visible GPUs",
    }
    compared |= {name: smi.get(name, "unknown") for name in _ASKED if name not in _OF_THE_MOMENT}
    shown = {"SM clock": smi.get("SM clock", "unknown"), "free": f"{memory_left(device)[0] / 2**30:.1f} GiB"}
    return RankFacts(rank, local_rank, host_identity(), compared, str(found.uuid), shown, faults)


def _does_not_compute(device: torch.device) -> str | None:
    try:
        total = torch.ones(1024, device=device).sum().item()
    except RuntimeError as error:
        return f"its GPU fails: {str(error).splitlines()[0]}"
    return None if total == 1024 else f"its GPU adds 1024 ones to {total}"


def _smi(uuid: str) -> dict[str, str]:
    """What the driver says of a GPU; nothing where nvidia-smi is missing or silent."""
    try:
        printed = subprocess.run(
            ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", "--format=csv,noheader,nounits",
             f"--query-gpu={','.join(_ASKED.values())}"],
            capture_output=True, text=True, timeout=_SMI_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in printed.strip().split(",")]
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {}
