"""Memory that CPU ranks really share, in place of NVLink peer memory.

A rank that writes too early or reads too late is found.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ep_moe.parallel.rank_group import RankGroup

FLAGS = 256  # bytes at the end, initially zero


class SharedMemory:
    def __init__(self, rank_group: RankGroup, size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files: list[str] = [""] * rank_group.size
            file = Path(folder) / "memory"
            file.write_bytes(bytes(size))
            dist.all_gather_object(files, str(file), group=rank_group.group)
            self.peers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in files]
            self.local = self.peers[rank_group.rank]
            self.addresses = torch.tensor([peer.data_ptr() for peer in self.peers])
            self.local[:-FLAGS] = 255  # NaN in every float dtype
            dist.barrier(rank_group.group)


def make_memory(rank_group: RankGroup, device: torch.device, size: int) -> SharedMemory:
    return SharedMemory(rank_group, size)
