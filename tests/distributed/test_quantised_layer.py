"""Quantized layers on ranks, any placement, with and without etp, against float64 on the dequantized weights.

On the CPU through the reference kernel; on Hopper GPUs through the kernels that `select` chooses there."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.weights.initial import random_expert
from tests.fixtures.helpers import integer_routing, moved

EXPERTS = 10
CONFIG = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=EXPERTS, top_k=3)
MAPS = {
    "uneven": lambda ranks: ExpertMap.uneven([EXPERTS - sum(range(ranks)), *range(1, ranks)]),
    "redundant": lambda ranks: ExpertMap.redundant(EXPERTS, ranks, 2 * (ranks - 1)),
    "all on the last rank": lambda ranks: ExpertMap.uneven([*[0] * (ranks - 1), EXPERTS]),
}


@distributed(2, 4)
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize(
    "scheme",
    ["none", "fp8_dynamic", "fp8_channel", "fp8_block", "mxfp4", "mxfp4_fp8", "mxint4", "int4_fp8", "nvfp4a16"],
)
def test_within_the_bound_under_any_map(scheme, etp, world_size):
    rank, device = dist.get_rank(), rank_device()
    parallel = ParallelConfig(dp=world_size, ep=world_size // etp, etp=etp)
    tokens = (33, 0, 7, 256)[rank]
    tensors = [random_expert(CONFIG, SCHEMES[scheme], expert, torch.bfloat16, device) for expert in range(EXPERTS)]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=generator).bfloat16().to(device)
    routing = moved(integer_routing(tokens, CONFIG, rank), device)
    expected, limit = expected_and_limit(
        CONFIG, SCHEMES[scheme], tensors, x, routing.ids, routing.weights, torch.bfloat16
    )
    # up to 4 ranks' partial sums are added in bf16; each addition rounds by at most a rank's `limit`
    limit = (1 + world_size) * limit
    with EPContext.from_groups(parallel, device=device) as context:
        for name, make in MAPS.items():
            layer = MoELayer(
                CONFIG, context, expert_map=make(context.layout.ep), quantization=scheme, dtype=torch.bfloat16
            )
            for expert in range(EXPERTS):
                layer.update_expert(expert, **tensors[expert])
            with torch.no_grad():
                y = layer.forward_routed(x, routing)
            assert max_error_ratio(y, expected, limit) <= 1, (name, layer.choice)
