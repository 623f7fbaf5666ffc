"""Layers with deferred routing, as on GPUs, give the results and load of layers that place ids at once."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, InputError, MoELayer, ParallelConfig
from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.parallel.rank_group import barrier
from ep_moe.placement.deferred import DeferredRouting
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Routing
from tests.fixtures.deferred_placement import DeferredPlacement
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, oracle
from tests.fixtures.layer_static import CONFIG, emulate_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs on the CPU")
KINDS = {"nvlink_p2p": NVLinkP2PDispatcher, "torch_a2a": TorchAll2AllDispatcher}


def seen_by(kind: type[Dispatcher]) -> list[bool]:
    """Record for each later dispatch of this class whether its routing was not yet materialized."""
    seen, before = [], kind._dispatch

    def dispatch(self, x, x_scale, routing, problem, max_tokens):
        seen.append(isinstance(routing, DeferredRouting) and "_placed" not in routing.__dict__)
        return before(self, x, x_scale, routing, problem, max_tokens)

    kind._dispatch = dispatch
    return seen


@distributed(2, set_device=True)
@pytest.mark.parametrize(("all2all", "pipeline", "low_latency_bytes", "late_there"), [
    ("nvlink_p2p", None, 0, True), ("nvlink_p2p", None, 800, True), ("nvlink_p2p", 2, 0, False),
    ("torch_a2a", None, 0, False),
])  # fmt: skip
@pytest.mark.parametrize("shared", [0, 16])
def test_late_ids_are_the_same_ones_and_counted_once(
    shared, all2all, pipeline, low_latency_bytes, late_there, world_size
):
    """Deferred ids give the same results and load, and are placed once per call.

    In a pipelined call, each row keeps its number in the whole call.
    """
    emulate_on_cpu(NVLinkP2PDispatcher, False, low_latency_bytes)
    rank, config = dist.get_rank(), dataclasses.replace(CONFIG, shared_intermediate_size=shared)
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9) as context:
        make = partial(MoELayer, config, context, expert_map=ExpertMap.redundant(6, 2, 4), all2all=all2all)
        plain, layer = [fill(make(experts="reference", pipeline=pipeline)) for _ in range(2)]
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            ours.data.copy_(theirs.data)
        deferred, seen = DeferredPlacement(layer.placement), seen_by(KINDS[all2all])
        for number, tokens in enumerate((9, 0, 5)):
            x, routing = integer_rows(tokens, 16, rank), integer_routing(tokens, CONFIG, 7 * number + rank)
            with torch.no_grad():
                wanted = plain.forward_routed(x, routing)
                seen.clear()
                assert_same(layer.forward_routed(x, routing), wanted)
            assert set(seen) == {late_there}
            assert deferred.place_calls == number + 1, "placed once"
        with layer.no_stats(), plain.no_stats(), torch.no_grad():
            layer.forward_routed(x, routing)
        assert torch.equal(layer.placement.slot_load, plain.placement.slot_load)
        assert torch.equal(layer.placement.expert_load, plain.placement.expert_load)
        assert plain.placement.slot_load.any()
        assert layer.stats().expert_load == plain.stats().expert_load
        if not shared:
            with torch.no_grad():
                assert_same(layer.forward_routed(x, routing), oracle(CONFIG, x, routing))


@distributed(2, set_device=True)
def test_gradients_flow_past_them(world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="torch_a2a", experts="reference"))
        found = []
        for _ in range(2):
            x, routing = integer_rows(5, 16, rank).requires_grad_(), integer_routing(5, CONFIG, rank)
            routing = Routing(routing.ids, routing.weights.requires_grad_())
            layer.forward_routed(x, routing).square().sum().backward()
            found.append((x.grad, routing.weights.grad))
            deferred = DeferredPlacement(layer.placement)
        assert deferred.place_calls == 0
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        layer.forward_routed(x, routing)
        assert deferred.place_calls == 1


@distributed(2, set_device=True)
@pytest.mark.parametrize("fault", ["tokens", "dispatched"])
def test_a_bad_call_is_refused_all_the_same(fault, world_size):
    emulate_on_cpu(NVLinkP2PDispatcher)
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9, deadline_s=8) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="nvlink_p2p", experts="reference"))
        layer._checks.first_call(layer)
        DeferredPlacement(layer.placement)
        tokens = 9 + rank * (fault == "tokens")
        x, routing = integer_rows(tokens, 16, rank), integer_routing(tokens, CONFIG, rank)
        with torch.no_grad():
            if not rank:
                assert layer.forward_routed(x, routing).isnan().any()
            elif fault == "tokens":
                with pytest.raises(InputError, match="rank 1: x has 10 tokens to dispatch"):
                    layer.forward_routed(x, routing)
            else:
                late = layer.placement(Routing(routing.ids[:3], routing.weights))
                with pytest.raises(InputError, match=r"rank 1: routing.ids must be \[T, K\] = \[9, 3\], got \[3, 3\]"):
                    layer._dispatcher().dispatch(x, late)
                assert not layer.placement.expert_load.any()
        barrier(rank_device())
