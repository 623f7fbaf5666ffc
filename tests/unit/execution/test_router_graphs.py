"""Which calls of a router are recorded and replayed. On GPUs: tests/distributed/test_automatic_graphs_layer.py."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ep_moe import MoEConfig, RoutingConfig
from ep_moe.execution.cuda_graph import _SIZES, MOST, RouterGraphs
from ep_moe.router import Router
from tests.emulations.graph import graph_beside

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2)


@pytest.fixture
def router():
    torch.manual_seed(0)
    return Router(CONFIG)


@pytest.fixture
def graphs():
    made = RouterGraphs(SimpleNamespace(graph_beside=lambda call: graphs_made.append(1) or graph_beside(call)))
    made.recorded = graphs_made = []
    return made


def rows(tokens, seed=0):
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def check(graphs, router, tokens, *, recorded):
    """Right, whatever was there before."""
    for seed in range(3):
        x = rows(tokens, seed)
        found, wanted = graphs(router, x), router(x)
        assert torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.weights, wanted.weights)
    assert len(graphs.recorded) == recorded


def test_the_second_call_of_a_size_is_recorded(graphs, router):
    with torch.no_grad():
        graphs(router, rows(4))
    assert not graphs.recorded, "sizes that come once are not"
    check(graphs, router, 4, recorded=1)
    check(graphs, router, 5, recorded=2)
    check(graphs, router, 4, recorded=2)


def test_many_and_no_tokens_are_not(graphs, router):
    check(graphs, router, MOST + 1, recorded=0)
    check(graphs, router, 0, recorded=0)


def test_replaced_parameters_are_recorded_anew(graphs, router):
    check(graphs, router, 4, recorded=1)
    router.weight.data.mul_(-1)
    check(graphs, router, 4, recorded=1)
    router.weight.data = torch.randn(8, 16)
    check(graphs, router, 4, recorded=2)


def test_another_dtype_of_rows_is_another_call(graphs):
    """The router in float32 stays where it is. 1 + 2**-8 is none of bfloat16's numbers, and one of float16's."""
    config = dataclasses.replace(CONFIG, routing=RoutingConfig(float32_logits=True))
    router = Router(config)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            x = (rows(4) + 2**-8).to(dtype)
            for _ in range(3):
                assert torch.equal(graphs(router, x).weights, router(x).weights), dtype


def test_hooks_see_each_call(graphs, router):
    check(graphs, router, 4, recorded=1)
    seen = []
    router.register_forward_hook(lambda *_: seen.append(1))
    check(graphs, router, 4, recorded=1)
    assert len(seen) == 6


def test_a_capture_that_fails_is_the_last(graphs, router):
    def fails(call):
        graphs.recorded.append(1)
        raise RuntimeError("another thread")

    graphs._recorder = SimpleNamespace(graph_beside=fails)
    check(graphs, router, 4, recorded=1)
    check(graphs, router, 5, recorded=1)


def test_few_sizes_are_kept(graphs, router):
    for tokens in range(1, 2 * _SIZES):
        check(graphs, router, tokens, recorded=tokens)
    assert len(graphs._made) <= _SIZES
