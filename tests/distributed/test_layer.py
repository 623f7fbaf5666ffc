"""The layer on ranks equals the layer in one process exactly, because all numbers are small integers."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Tokens
from ep_moe.testing import distributed, rank_device
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, oracle

CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=10, top_k=3, activation=Activation.RELU2, expert_bias=True
)


def maps(ranks: int) -> dict[str, ExpertMap]:
    arbitrary = [[] for _ in range(ranks)]
    for expert in range(10):
        arbitrary[(expert * 7 + 3) % ranks].append(expert)
    arbitrary[0].append(next(e for e in range(10) if e not in arbitrary[0]))
    return {
        "linear": ExpertMap.linear(10, ranks),
        "round_robin": ExpertMap.round_robin(10, ranks),
        "uneven": ExpertMap.uneven([10 - sum(range(ranks)), *range(1, ranks)]),
        "one rank empty": ExpertMap.uneven([0, 10, *[0] * (ranks - 2)]),
        "redundant": ExpertMap.redundant(10, ranks, 6),
        "user": ExpertMap.from_ranks(arbitrary, 10),
    }


@distributed(2, 4)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a"])
def test_every_map_equals_one_process(all2all, world_size):
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(device=device) as context:
        for name, expert_map in maps(world_size).items():
            layer = fill(MoELayer(CONFIG, context, expert_map=expert_map, all2all=all2all))
            for counts in ((7, 5, 1, 3), (0, 4, 0, 0), (0, 0, 0, 0), (9, 0, 2, 8)):
                x = integer_rows(counts[rank], 16, rank)
                routing = integer_routing(counts[rank], CONFIG, rank)
                with torch.no_grad():
                    y = layer.forward_routed(x.to(device), moved(routing, device))
                assert_same(y, oracle(CONFIG, x, routing), f"{name}, T={counts}")


LAYOUTS = {
    2: [
        {"dp": 1, "tp": 2},
        {"dp": 1, "tp": 2, "ep": 1, "etp": 2},
        {"dp": 2, "ep": 1, "etp": 2},
        {"dp": 1, "tp": 2, "ep": 1},
        {"dp": 2, "ep": 1},
    ],
    4: [
        {"dp": 2, "tp": 2},
        {"dp": 1, "tp": 4},
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
        {"dp": 1, "tp": 4, "ep": 2, "etp": 2},
        {"dp": 4, "tp": 1, "ep": 2, "etp": 2},
        {"dp": 2, "tp": 2, "ep": 1, "etp": 4},
        {"dp": 4, "tp": 1, "ep": 2},
        {"dp": 1, "tp": 4, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 2},
        {"dp": 1, "tp": 4, "ep": 1, "etp": 2},
        {"pp": 2, "dp": 2, "tp": 1},
        {"pp": 2, "dp": 1, "tp": 2, "ep": 1, "etp": 2},
    ],
}


@distributed(2, 4)
@pytest.mark.parametrize("all2all", ["auto", "torch_a2a"])
@pytest.mark.parametrize("tokens", list(Tokens), ids=lambda t: t.value)
def test_every_layout_equals_one_process(all2all, tokens, world_size):
    rank, device = dist.get_rank(), rank_device()
    for index, sizes in enumerate(LAYOUTS[world_size]):
        parallel = ParallelConfig(**sizes, tokens=tokens)
        with EPContext.from_groups(parallel, device=device) as context:
            layout = context.layout
            layer = fill(MoELayer(CONFIG, context, all2all=all2all))
            for total in (7, 1, 0):
                seed = 10 * index + (layout.pp_rank * 100 + layout.dp_rank if tokens is Tokens.REPLICATED else rank)
                total_here = max(0, total - seed % 3)
                x = integer_rows(total_here, 16, seed)
                routing = integer_routing(total_here, CONFIG, seed)
                with torch.no_grad():
                    y = layer.forward_routed(x.to(device), moved(routing, device))
                assert_same(y, oracle(CONFIG, x, routing), f"{layout} T={total}")


@distributed(2, 4)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a"])
def test_dispatched_rows_are_not_computed_twice(all2all, world_size):
    """With tp-replicated tokens, each (token, expert) pair is computed once in the whole group."""
    with EPContext.from_groups(ParallelConfig(tp=world_size), device=rank_device()) as context:
        layer = fill(MoELayer(CONFIG, context, all2all=all2all))
        x, routing = integer_rows(11, 16, 0).to(context.device), integer_routing(11, CONFIG, 0)
        layer.forward_routed(x, moved(routing, context.device))
        load = layer.placement.expert_load.clone()
        dist.all_reduce(load)
        expected = torch.bincount(routing.ids[routing.ids >= 0], minlength=10)
        torch.testing.assert_close(load.cpu(), expected)


@distributed(2)
def test_with_one_seed_all_ranks_begin_with_the_same_router_and_shared_experts(world_size):
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=10, top_k=3, shared_intermediate_size=16)
    with EPContext.from_groups(ParallelConfig(tp=2), device=rank_device()) as context:
        torch.manual_seed(3)
        layer = MoELayer(config, context, expert_map=ExpertMap.uneven([9, 1]))
        for module in (layer.router, layer.shared_experts):
            mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
            highest, lowest = mine.clone(), mine.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            assert_same(highest, lowest)
            assert mine.std() > 0
