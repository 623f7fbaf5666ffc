"""Memory of equal layout on all ranks of one host, each of which reads and writes its peers' over NVLink."""

from __future__ import annotations

import torch

from ep_moe.parallel.rank_group import RankGroup, barrier


class PeerMemory:
    """local: uint8 [size], zero; peers: those of all ranks. addresses: int64 [R] on the device, where each begins in
    this rank's view.

    Torch's symmetric memory in its own form (`CUDA`), without NVSHMEM and without multicast. Collective; raises
    InputError on all ranks where one gets none.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        if rank_group.group is None:  # one rank, its own peer
            self.local = torch.zeros(size, dtype=torch.uint8, device=device)
            self.peers = [self.local]
            self.addresses = torch.tensor([self.local.data_ptr()], dtype=torch.int64, device=device)
            return
        problem = None
        try:
            self.local = symm_mem.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # no memory, as a rule
            problem = f"{size / 2**20:.0f} MiB on {device}: {error}"
        # the others would wait for this rank in what follows
        rank_group.agree([], problem, device)
        handle = symm_mem.rendezvous(self.local, rank_group.group.group_name)
        self.peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(rank_group.size)]
        self.addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        self._handle = handle  # it holds the mapping
        self.local.zero_()
        barrier(device, rank_group.group)  # no peer writes here before it is zero
