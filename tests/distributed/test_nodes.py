"""Contexts find nodes by the hosts that ranks report, or by `ranks_per_node`."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPContext, MoEConfig, MoELayer, ParallelConfig, PeerTimeout
from ep_moe.placement.placement import Replicas
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error


@distributed(4)
def test_hosts_are_found_from_the_ranks(world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(device=rank_device()) as context:
        assert len(context.layout.nodes.hosts) == 1
        assert context.rank_groups["ep"].levels is None
    os.environ["NCCL_HOSTID"] = "left" if rank < 2 else "right"
    with EPContext.from_groups(device=rank_device()) as context:
        os.environ["NCCL_HOSTID"] = "elsewhere"  # the variable is read once
        nodes = context.layout.nodes
        assert (nodes.nodes, nodes.hosts) == ((0, 0, 1, 1), ("left", "right"))
        levels = context.rank_groups["ep"].levels
        assert levels.node.ranks == ((0, 1), (2, 3))[rank // 2]
        assert levels.rail.ranks == ((0, 2), (1, 3))[rank % 2]
        assert levels.node_major_ranks == (0, 1, 2, 3)
        for group in (levels.node, levels.rail):
            found = torch.tensor([rank], device=context.device)
            dist.all_reduce(found, group=group.group)
            assert int(found) == sum(group.ranks)
            assert dist.get_process_group_ranks(group.group) == list(group.ranks)


@distributed(4)
def test_ranks_per_node(world_size):
    rank = dist.get_rank()
    cyclic = ParallelConfig(dp=4, ep=2, etp=2)
    with EPContext.from_groups(cyclic, device=rank_device(), ranks_per_node=2) as context:
        levels = context.rank_groups["ep"].levels
        assert (levels.node.ranks, levels.rail.ranks) == ((rank,), (rank % 2, rank % 2 + 2))
    with EPContext.from_groups(device=rank_device(), ranks_per_node=2) as context:
        layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=1), context)
        for given, per_node in ((None, 2), (4, 4)):  # the context's ranks per node, unless an argument says otherwise
            layer.placement.choose(Replicas.NEAREST, ranks_per_node=given)
            assert layer.placement._ranks_per_node == per_node
    with EPContext.from_groups(device=rank_device(), ranks_per_node=3) as context:  # without hierarchical transports
        assert "different numbers of ranks" in context.layout.without_rails
        assert context.rank_groups["ep"].levels is None
    with pytest.raises(ConfigError, match="ranks_per_node must be an integer in"):
        EPContext.from_groups(device=rank_device(), ranks_per_node=0)
    sentence = same_error(
        ConfigError, lambda: EPContext.from_groups(device=rank_device(), ranks_per_node=1 + (rank == 3))
    )
    assert "ranks_per_node: 1 on ranks 0, 1, 2, 2 on rank 3" in sentence


@distributed(4, deadline_s=40, expect_dead=[2, 3])
@pytest.mark.parametrize("stage", ["dispatch", "experts"])
def test_a_host_that_is_lost_within_a_call_is_named(stage, world_size):
    """A lost host is named in one PeerTimeout on each remaining rank, whichever level waits."""
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=3)
    context = EPContext.from_groups(device=rank_device(), deadline_s=2.0, ranks_per_node=2)
    layer = MoELayer(config, context, name="block")
    assert layer._dispatcher().name == "hierarchical"
    x = torch.ones(4, 16, device=context.device)
    with torch.no_grad():
        layer(x)
        if dist.get_rank() > 1 and stage == "dispatch":
            os._exit(7)
        if dist.get_rank() > 1:
            layer.experts.compute = lambda *_: os._exit(7)
        start = time.monotonic()
        with pytest.raises(
            PeerTimeout,
            match=r"of block \(step \d+\).*Host node 1, or the network to it, is lost.*silent \(ranks 2, 3\)\.",
        ):
            layer(x)
        assert time.monotonic() - start < 6
        with pytest.raises(PeerTimeout, match="Host node 1, or the network to it, is lost"):
            layer(x)


@distributed(4, deadline_s=30, expect_dead=[2, 3])
def test_a_lost_host_is_named(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=2.0, ranks_per_node=2)
    if dist.get_rank() > 1:
        os._exit(7)
    with (
        pytest.raises(PeerTimeout, match=r"Host node 1, or the network to it, is lost: .*silent \(ranks 2, 3\)\."),
        context.flight_recorder.step("test"),
    ):
        context.rank_groups["ep"].exchange(torch.zeros(1, dtype=torch.int64, device=context.device))
