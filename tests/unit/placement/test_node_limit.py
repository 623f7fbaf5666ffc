"""Test the limit on a token's nodes where each group of experts is on one node: `explain`, byte counts, and EPLB."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig, ParallelConfig, RankLayout, RoutingConfig, RoutingMethod
from ep_moe.bench.wire_rows import deduplicated, reached, two_level, within_groups
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.migration.consensus import with_routers_groups
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.placement.placement import NodeLimit
from ep_moe.router import sigmoid_topk
from ep_moe.selection.explain import explain

CPU, F32 = torch.device("cpu"), torch.float32


def config(groups: int = 4, top_groups: int = 2, experts: int = 32, top_k: int = 4) -> MoEConfig:
    method = RoutingMethod.SIGMOID_TOPK
    routing = RoutingConfig(method=method, num_groups=groups, top_groups=top_groups)
    return MoEConfig(hidden_size=64, intermediate_size=64, num_experts=experts, top_k=top_k, routing=routing)


def layout(hosts: str, rank: int = 0, **sizes: int) -> RankLayout:
    nodes = NodeLayout.from_hosts(range(len(hosts)), [(host, host) for host in hosts])
    parallel = ParallelConfig(**{"dp": len(hosts)} | sizes)
    return RankLayout.from_config(parallel, world=len(hosts), rank=rank, nodes=nodes)


@pytest.mark.parametrize(
    ("hosts", "expert_map", "most", "split_groups"),
    [
        ("aabbccdd", None, 2, ()),
        ("abcdabcd", None, 4, (0, 1, 2, 3)),  # ranks 0 and 1 share one group, but are on two nodes
        ("aabbccdd", ExpertMap.round_robin(32, 8), 4, (0, 1, 2, 3)),
        ("aabbccdd", ExpertMap.redundant(32, 8, 8), 4, (0, 1, 2, 3)),  # 5 slots per rank
    ],
    ids=str,
)
def test_nodes_of_a_token(hosts, expert_map, most, split_groups):
    for rank in range(len(hosts)):
        found = NodeLimit.of(config(), layout(hosts, rank), expert_map)
        assert (found.most, found.split_groups, found.nodes) == (most, split_groups, len(set(hosts)))


def test_a_token_goes_to_no_more_nodes_than_it_has_experts():
    assert NodeLimit.of(config(top_groups=3, top_k=2), layout("aabbccdd")).most == 2


def test_a_token_goes_to_no_more_nodes_than_there_are():
    """The limit never exceeds the number of nodes.

    Here two groups are on four nodes each, and a token has six experts.
    """
    assert NodeLimit.of(config(top_k=6), layout("aabbccdd"), ExpertMap.round_robin(32, 8)).most == 4


def test_every_ep_group_of_a_job_has_the_limit_of_the_first():
    for expert_map in (None, ExpertMap.redundant(32, 8, 8)):
        first, *others = (
            NodeLimit.of(config(), layout("aabbccddeeffgghh", rank, ep=8), expert_map) for rank in (0, 8, 15)
        )
        assert first.nodes == 4
        assert others == [first] * 2


def test_where_nothing_is_limited():
    assert NodeLimit.of(config(), layout("aaaa")) is None
    assert NodeLimit.of(config(), layout("aabb", ep=2)) is None
    assert NodeLimit.of(config(), layout("aabb"), ExpertMap.round_robin(32, 4)) is None  # 2 groups, 2 nodes
    assert NodeLimit.of(config(top_groups=4, top_k=4), layout("aabb")) is None


def reason(expert_map: ExpertMap | None, name: str) -> str:
    rows = explain(config(), layout("aabbccdd"), CPU, F32, expert_map=expert_map)
    return next(row.reason for row in rows if (row.all2all, row.experts) == (name, "reference"))


def test_explain_says_it():
    on_one = "a token chooses 2 of 4 groups of experts, each on one node, and so goes to 2 of 4 nodes at most"
    assert reason(None, "hierarchical").endswith(on_one)
    apart = "groups 0, 1, 2, 3 are on several nodes of this map, and so a token goes to up to 4 of 4 nodes"
    assert reason(ExpertMap.round_robin(32, 8), "hierarchical").endswith(apart)
    one = ExpertMap.from_ranks([[*range(3), 8], [*range(3, 8)], *[list(range(n, n + 4)) for n in range(8, 32, 4)]], 32)
    assert "group 1 is on several nodes of this map, and so a token goes to up to 3 of 4" in reason(one, "hierarchical")
    assert "groups" not in reason(None, "torch_a2a")  # torch_a2a sends a row once per rank


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"), [(256, 8, 4, 8), (256, 8, 3, 8), (64, 8, 2, 4)], ids=str
)
def test_uniform_scores_reach_as_many_nodes(experts, groups, top_groups, top_k):
    """The model gives the nodes that uniform scores reach, with one group per node and with two.

    The model is an upper bound that is nearly reached. By Hoeffding's inequality, a share of 20000 tokens is within
    0.02
    of its mean, except in 1 case in 10^6.
    """
    asked = config(groups, top_groups, experts, top_k)
    logits = torch.randn(20000, experts, generator=torch.Generator().manual_seed(1))
    ids = sigmoid_topk(logits, top_k, renormalize=True, num_groups=groups, top_groups=top_groups)[1]
    for nodes in (groups, groups // 2):
        there = (ids // (experts // nodes) == 0).any(1).double().mean()
        model = within_groups(asked, experts // nodes)
        assert there - 0.02 <= model <= there * 1.02 + 0.02
        assert model < reached(experts, top_k, nodes, 0, together=1)[0]
        assert two_level(asked, 2 * nodes, 2).far == (nodes - 1) * model
    part = experts // groups // 4
    there = (ids // part == 0).any(1).double().mean()
    assert abs(there - within_groups(asked, part)) <= 0.02
    assert deduplicated(asked, experts // part, 4).far == (experts // part - 4) * within_groups(asked, part)


def test_without_groups_the_model_is_as_before():
    for held in (1, 3, 8, 20, 32):
        assert within_groups(config(4, 4), held) is None
        assert within_groups(config(1, 1), held) is None
    assert within_groups(config(), 12) is None  # neither whole groups nor a fraction of one
    grouped, free = config(), config(4, 4)
    assert two_level(grouped, 8, 8) == two_level(free, 8, 8)  # one host
    assert two_level(grouped, 8, 2, redundant=8) == two_level(free, 8, 2, redundant=8)


def test_eplb_keeps_groups_on_nodes():
    limited, free = SimpleNamespace(config=config()), SimpleNamespace(config=config(4, 4))

    def groups(layers, **fields):
        return with_routers_groups(EPLBConfig(**fields), layers).groups

    assert groups([limited, limited], nodes=4) == 4
    assert groups([limited], nodes=1) == groups([limited], nodes=2) == 1  # 2 groups reach both nodes
    assert groups([limited], nodes=4, groups=1) == 1
    assert groups([free], nodes=4) == 1
    assert groups([limited, free], nodes=4) == 1
    assert groups([SimpleNamespace()], nodes=4) == 1
