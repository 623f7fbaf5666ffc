"""Random layouts, maps and batches: the layer on 1, 2 and 4 ranks equals one process exactly, on every transport.

Every rank draws the same examples (seeded, without a database). A mismatch on one rank reaches all ranks, so all stop
at the same example. The examples are small, so they are not shrunk.
"""

import dataclasses

import torch
import torch.distributed as dist
from hypothesis import given, seed
from hypothesis import strategies as st

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Routing, Tokens
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, oracle
from tests.fixtures.random_examples import random_examples

EXPERTS = 7
CONFIGS = [
    MoEConfig(hidden_size=8, intermediate_size=16, num_experts=EXPERTS, top_k=top_k, activation=Activation.RELU2)
    for top_k in (1, 3)
]
P = ParallelConfig
LAYOUTS = {
    1: [P()],
    2: [P(dp=2), P(tp=2), P(dp=2, ep=1, etp=2), P(tp=2, ep=1)],
    4: [
        P(dp=4),
        P(tp=4),
        P(dp=2, tp=2),
        P(dp=2, tp=2, ep=2, etp=2),
        P(dp=4, ep=2, etp=2),
        P(tp=4, ep=2, etp=2),
        P(tp=4, ep=2),
        P(dp=2, tp=2, ep=1, etp=4),
    ],
}


@st.composite
def expert_maps(draw, ranks: int) -> ExpertMap:
    kind = draw(st.sampled_from(["linear", "round_robin", "uneven", "redundant", "arbitrary"]))
    if kind == "linear":
        return ExpertMap.linear(EXPERTS, ranks)
    if kind == "round_robin":
        return ExpertMap.round_robin(EXPERTS, ranks)
    if kind == "redundant":
        return ExpertMap.redundant(EXPERTS, ranks, draw(st.integers(0, EXPERTS * (ranks - 1))))
    if kind == "uneven":
        cuts = sorted(draw(st.lists(st.integers(0, EXPERTS), min_size=ranks - 1, max_size=ranks - 1)))
        return ExpertMap.uneven([stop - start for start, stop in zip([0, *cuts], [*cuts, EXPERTS], strict=True)])
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(EXPERTS)]
    slots = [draw(st.permutations([e for e in range(EXPERTS) if r in holders[e]] + [-1])) for r in range(ranks)]
    return ExpertMap.from_ranks(slots, EXPERTS)


@st.composite
def routings(draw, config: MoEConfig) -> Routing:
    """Draw a routing for one batch: random with some -1, all tokens to one expert, or no routes at all."""
    tokens, kind = draw(st.integers(0, 6)), draw(st.sampled_from(["random", "one expert", "nowhere"]))
    routing = integer_routing(tokens, config, draw(st.integers(0, 99)))
    if kind == "random":
        return routing
    ids = torch.full_like(routing.ids, -1)
    if kind == "one expert":
        ids[:, draw(st.integers(0, config.top_k - 1))] = draw(st.integers(0, EXPERTS - 1))
    return Routing(ids, routing.weights)


def mismatch(layer: MoELayer, batch: int, routing: Routing) -> str | None:
    x = integer_rows(len(routing.ids), layer.config.hidden_size, batch)
    with torch.no_grad():
        y = layer.forward_routed(x.to(layer.device), moved(routing, layer.device))
    try:
        assert_same(y, oracle(layer.config, x, routing))
    except AssertionError as error:
        return str(error)
    return None


@distributed(1, 2, 4)
def test_any_layout_map_and_batch_equals_one_process(world_size):
    device, contexts = rank_device(), {}

    @seed(0)
    @random_examples(25)
    @given(data=st.data())
    def example(data: st.DataObject) -> None:
        layout = data.draw(st.sampled_from(LAYOUTS[world_size]))
        parallel = dataclasses.replace(layout, tokens=data.draw(st.sampled_from(list(Tokens))))
        if parallel not in contexts:
            contexts[parallel] = EPContext.from_groups(parallel, device=device, deadline_s=15)
        context = contexts[parallel]
        expert_map = data.draw(expert_maps(context.layout.ep))
        config = data.draw(st.sampled_from(CONFIGS))
        drawn = [data.draw(routings(config)) for _ in range(batches(context.layout))]
        batch = batch_of(context.layout, dist.get_rank())
        found = {}
        for all2all in ("allgather", "torch_a2a", "local")[: 3 if context.layout.ep == 1 else 2]:
            layer = fill(MoELayer(config, context, expert_map=expert_map, all2all=all2all))
            found[all2all] = mismatch(layer, batch, drawn[batch])
        problems = [f"rank {rank}: {by}" for rank, by in enumerate(gather_from_all_ranks(found)) if any(by.values())]
        assert not problems, f"{context.layout}, {expert_map.to_json()}, {drawn}: {problems}"

    example()
    for context in contexts.values():
        context.destroy()
