"""Routes recorded under one layout are replayed under another."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, ExpertsOptions, InputError, MoEConfig, MoELayer, ParallelConfig, RoutingBuffer
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.helpers import same_bits

CONFIG = MoEConfig(hidden_size=32, intermediate_size=24, num_experts=6, top_k=2, shared_intermediate_size=8)
P = ParallelConfig


def build(context, **options):
    torch.manual_seed(0)
    return MoELayer(CONFIG, context, options=ExpertsOptions(exact=True), **options).to(context.device)


def rows(batch=0):
    return torch.randn(9, CONFIG.hidden_size, generator=torch.Generator().manual_seed(batch)).to(rank_device())


@pytest.mark.parametrize(
    "parallel", [P(dp=2), P(tp=2), P(dp=2, tp=2), P(tp=4)], ids=lambda parallel: f"dp{parallel.dp} tp{parallel.tp}"
)
@distributed(2, 4)
def test_a_record_is_of_all_rows_and_is_replayed_on_another_layout(parallel, world_size):
    if parallel.dp * parallel.tp != world_size:
        return
    x = rows(dist.get_rank() // parallel.tp)
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=60) as context:
        layer = build(context, expert_map=ExpertMap.redundant(6, world_size, world_size))
        buffer = RoutingBuffer(len(x), 2, weights=True, device=context.device)
        with layer.record_routing(buffer), torch.no_grad():
            wanted = layer(x)
        ids, weights = (found.clone() for found in buffer.read())
        with torch.no_grad():
            layer.router.weight.mul_(-1)
            assert not same_bits(layer(x), wanted)
            layer.router.weight.mul_(-1)
        leaf = x.clone().requires_grad_()
        with layer.replay_routing(ids):
            out = layer(leaf)
            out.square().sum().backward()
        assert same_bits(out, wanted)
    with EPContext.local(rank_device()) as context:
        alone = build(context)
        routing = alone.router(x)
        assert routing.ids.tolist() == ids.tolist()
        assert same_bits(routing.weights, weights)
        one = x.clone().requires_grad_()
        with alone.replay_routing(ids):
            again = alone(one)
            again.square().sum().backward()
        assert same_bits(again, wanted)
        assert same_bits(one.grad, leaf.grad)


@distributed(2)
def test_a_wrong_replay_on_one_rank_is_refused_on_all(world_size):
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=60) as context:
        layer, x = build(context), rows()
        ids = torch.tensor([[0, 1]] * 9, device=context.device)
        if dist.get_rank() == 1:
            ids[3, 1] = 6
        with layer.replay_routing(ids):
            assert "rank 1: replay_routing: ids must be -1 or in [0, 6), got 6" in same_error(
                InputError, lambda: layer(x)
            )
        buffer = RoutingBuffer(4, 2 + dist.get_rank(), device=context.device)
        with layer.record_routing(buffer):
            assert "rank 1: record_routing: buffer must have top_k=2" in same_error(InputError, lambda: layer(x))
        assert gather_from_all_ranks(layer(x).shape) == [x.shape] * 2


@distributed(2)
def test_tp_ranks_that_replay_different_ids_are_refused(world_size):
    with EPContext.from_groups(P(tp=2), device=rank_device(), deadline_s=60) as context:
        layer = build(context)
        ids = torch.tensor([[0, 1 + dist.get_rank()]] * 9, device=context.device)
        with layer.replay_routing(ids):
            assert "routing.ids on rank 0 differs from rank 1" in same_error(InputError, lambda: layer(rows()))
