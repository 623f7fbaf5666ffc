"""`bench/rebalance` measures what it claims, on small layers on a CPU."""

import dataclasses

import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.bench import rebalance
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.helpers import fill

CONFIG = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=8, top_k=2)


@distributed(2)
def test_every_expert_moves(world_size):
    rebalance.WARM = rebalance.USUAL = 3
    with EPContext.from_groups(device=rank_device(), deadline_s=20, max_tokens=8) as context:
        layers = [fill(MoELayer(CONFIG, context, dtype=torch.bfloat16)) for _ in range(2)]
        before = [layer.placement.expert_map for layer in layers]
        slots = [tensor.clone() for tensor in layers[0].expert_weights.slot_tensors().values()]
        found = rebalance.measure(context, layers, 8, 4096)
        assert [layer.placement.expert_map for layer in layers] == [rebalance.rotated(one) for one in before]
        assert before[0].local(0) == layers[0].placement.expert_map.local(1)
        row = sum(tensor[0].numel() * tensor.itemsize for tensor in slots)
        assert found.commits == 2
        assert found.sent_bytes >= 2 * 8 * row, "8 experts of 2 layers, and their checksums"
        assert found.sent_bytes < 2 * 8 * (row + 64)
        assert found.forwards >= 8
        assert 0 < found.usual <= found.usual_slowest
        assert found.ratio == found.moving_slowest / found.usual
        on_all_ranks = gather_from_all_ranks(dataclasses.replace(found, seconds=0.0))
        assert len(set(on_all_ranks)) == 1, "the slowest rank's, on all"
