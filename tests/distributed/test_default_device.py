"""Layers work under another default device, such as `torch.set_default_device("cuda")` or `torch.device("cuda")`.

Tensors that must stay on the host name their device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertBalancer, ExpertMap, MoELayer, ParallelConfig
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.eplb.load import LoadRecorder
from ep_moe.testing import check_dispatcher, distributed, rank_device
from tests.fixtures.eplb_cases import CONFIG, on_request, random_map
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, oracle
from tests.fixtures.layer_static import emulate_on_cpu


@distributed(2)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a", "nvlink_p2p"])
@torch.no_grad()
def test_calls_and_moves(all2all, world_size):
    device, rank = rank_device(), dist.get_rank()
    elsewhere = torch.device("meta") if device.type == "cpu" else device  # memory that the host cannot read
    if device.type == "cpu":
        emulate_on_cpu(NVLinkP2PDispatcher)
    elif all2all == "nvlink_p2p" and (why := NVLinkP2PDispatcher.available()):
        pytest.skip(why)
    x, routing = integer_rows(5 - rank, CONFIG.hidden_size, rank), integer_routing(5 - rank, CONFIG, rank)
    expected, x, routing = oracle(CONFIG, x, routing), x.to(device), moved(routing, device)
    with elsewhere, EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=8) as context:
        placed = ExpertMap.redundant(CONFIG.num_experts, 2, 2)
        layer = MoELayer(CONFIG, context, expert_map=placed, all2all=all2all, device=device).requires_grad_(False)
        with torch.device("cpu"):
            fill(layer)
        assert_same(layer.forward_routed(x, routing), expected, "made there")
        with ExpertBalancer([layer], context, on_request()) as balancer:
            balancer.move_to([random_map(2, placed.slots_per_rank, 3)])
            while balancer.stats().rebalances == 0:
                assert_same(layer.forward_routed(x, routing), expected, "while experts move")
                balancer.step()
        assert layer.placement.expert_map != placed
        recorder = LoadRecorder([layer], context.rank_groups["lockstep"], steps=1)
        assert_same(layer.forward_routed(x, routing), expected, "after they moved")
        recorder.step()
        assert recorder.finish().counts.sum() == sum(layer.stats().rank_load) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU")
@distributed(2)
def test_the_contract_of_transports(world_size):
    with torch.device("meta"):
        check_dispatcher(TorchAll2AllDispatcher, top_ks=(2,), dtypes=(torch.bfloat16,))
