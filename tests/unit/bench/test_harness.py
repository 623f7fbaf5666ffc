"""Test the functions that all benchmarks use."""

import torch.distributed as dist

from ep_moe import EPContext
from ep_moe.bench import harness
from ep_moe.testing import distributed, rank_device


@distributed(2)
def test_an_entry_that_one_rank_cannot_make_is_left_out_on_all(world_size):
    def make(odd):
        if dist.get_rank() == odd:
            raise OSError("no such library")
        return dist.get_rank()

    with EPContext.from_groups(device=rank_device()) as context:
        for odd in range(world_size):
            assert harness.attempt(context, "a peer", lambda odd=odd: make(odd)) is None
        assert harness.attempt(context, "a peer", lambda: make(None)) == dist.get_rank()
