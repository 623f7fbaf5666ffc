"""Metrics snapshots on ranks: load of the rank and of the whole EP group, and the balancer's migrations."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import ExpertBalancer, ExpertMap, ExpertsOptions, MoELayer, Routing, metrics
from ep_moe.eplb.migration.consensus import State
from ep_moe.metrics.families import families
from ep_moe.testing import distributed
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.eplb_cases import CONFIG, context_of, make_layers, on_request, random_map

ROW = 16 * 4  # bytes of a row


def call(layer, ids):
    """Call the layer with these ids, one row of 3 experts (of 10) per token."""
    device = layer.context.device
    ids = torch.tensor(ids, device=device)
    weights = torch.ones(ids.shape, device=device)
    layer.forward_routed(torch.zeros(len(ids), 16, device=device), Routing(ids, weights))


@distributed(2)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("transport", ["torch_a2a", "allgather"])
def test_a_ranks_own_load_and_that_of_all(transport, exact, world_size):
    rank = dist.get_rank()
    with context_of() as context:
        options = ExpertsOptions(exact=exact)
        layer = MoELayer(CONFIG, context, expert_map=ExpertMap.linear(10, 2), all2all=transport, options=options)
        call(layer, [[0, 1, 9]] * (1 + rank))  # per token 2 routes to rank 0 and 1 to rank 1
        (own,) = metrics.snapshot(context).layers
        (whole,) = metrics.snapshot(context, whole=True).layers
        tokens = 1 + rank
        assert (own.tokens, whole.tokens) == (tokens, 3)
        assert own.expert_load == tuple(tokens * (expert in (0, 1, 9)) for expert in range(10))
        assert whole.expert_load == tuple(3 * (expert in (0, 1, 9)) for expert in range(10))
        assert (own.rank_load, whole.rank_load) == ((2 * tokens, tokens), (6, 3))
        away = {"torch_a2a": [1, 2 * 2], "allgather": [3, 2 * 3] if exact else [1, 2]}[transport]  # rows
        assert own.sent_bytes == away[rank] * ROW
        assert whole.sent_bytes == sum(away) * ROW
        assert own.balancedness == whole.balancedness == 0.75
        assert own.deadline_margin_s == pytest.approx(20.0, abs=10.0)
        assert metrics.snapshot(context).deadline_s == 20.0


@distributed(2)
def test_a_token_that_lacks_routes_is_a_whole_row_to_all(world_size):
    with context_of() as context:
        layer = MoELayer(CONFIG, context, expert_map=ExpertMap.linear(10, 2), all2all="allgather")
        call(layer, [[0, 1, -1]])
        assert metrics.snapshot(context).layers[0].sent_bytes == ROW


@distributed(4)
def test_rows_to_an_etp_peer_are_not_sent_to_another_ep_rank(world_size):
    with context_of(dp=4, ep=2, etp=2) as context:
        layer = MoELayer(CONFIG, context, expert_map=ExpertMap.linear(10, 2), all2all="torch_a2a")
        call(layer, [[0, 1, 2]] * 2)  # all routes go to EP rank 0, from 2 tokens of each etp peer
        sent = gather_from_all_ranks(metrics.snapshot(context).layers[0].sent_bytes)
    assert sent == [0, 0, 12 * ROW, 12 * ROW]


@distributed(2)
def test_members_of_an_etp_group_count_the_same(world_size):
    with context_of(dp=2, etp=2) as context:
        layer = MoELayer(CONFIG, context)
        call(layer, [[0, 1, 9]] * (1 + dist.get_rank()))
        found = metrics.snapshot(context)
        whole = metrics.snapshot(context, whole=True)
        assert gather_from_all_ranks((found.etp_rank, found.layers[0].tokens)) == [(0, 3), (1, 3)]
        assert whole.layers[0].expert_load == found.layers[0].expert_load  # of one EP rank
        texts = gather_from_all_ranks({family.name: list(family.samples(found)) for family in families()})
        assert texts[0]["ep_moe_layer_tokens"] == [(("moe0",), 3)]
        assert texts[1]["ep_moe_layer_tokens"] == []


@distributed(2)
def test_a_balancer_is_in_the_snapshot(world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        with ExpertBalancer(layers, context, on_request()) as balancer:
            assert metrics.snapshot(context, balancer).balancers[0].commits == 0
            balancer.move_to([random_map(2, 8, seed) for seed in (1, 2)])
            balancer.settle()
            (found,) = metrics.Source(context, balancer).newest().balancers
            assert (found.state, found.rebalances, found.commits) == (State.IDLE, 1, 2)
            assert found.received_bytes > 0
            assert found.predicted is None


@distributed(2)
def test_each_rank_answers_on_a_port_of_its_own(world_size):
    pytest.importorskip("prometheus_client")
    import urllib.request

    with context_of() as context:
        layer = MoELayer(CONFIG, context)
        call(layer, [[0, 1, 9]])
        with metrics.serve(metrics.Source(context), port=0) as server:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                page = answer.read().decode()
            ports = gather_from_all_ranks(server.port)
        assert len(set(ports)) == 2
        assert f'ep_moe_layer_tokens_total{{layer="moe0",rank="{dist.get_rank()}"}} 1.0' in page
