"""A peer that hangs, on NCCL under torchrun: the flight recorder's thread frees ranks that wait on the device."""

import time

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, MoEConfig, MoELayer, PeerTimeout
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2)
DEADLINE_S = 4.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@distributed(2, 4)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a"])
def test_a_hanging_peer_is_named(all2all, world_size):
    rank, last = dist.get_rank(), world_size - 1
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = MoELayer(CONFIG, context, all2all=all2all)
    x = torch.randn(8, 16, device=context.device)
    layer(x)
    torch.cuda.synchronize(context.device)
    start = time.monotonic()
    if rank == last:
        time.sleep(3 * DEADLINE_S)
    else:
        with pytest.raises(PeerTimeout, match=rf"(?s)dispatch of moe0.*Rank {last} is alive but behind"):
            layer(x)
        assert time.monotonic() - start < 2.5 * DEADLINE_S
    context.flight_recorder.close()
