"""Test where "auto" takes `hierarchical`, and how one-host transports refuse several nodes."""

import dataclasses

import pytest
import torch

from ep_moe import BackendUnavailable, MoEConfig, ParallelConfig, RankLayout, registry
from ep_moe.all2all.hierarchical_static import HierarchicalNVLinkDispatcher
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.selection.explain import BackendChoice, choose, explain

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
BETWEEN_HOSTS = {"allgather", "torch_a2a", "hierarchical", "hierarchical_nvlink", "hierarchical_static"}
OF_ONE_HOST = [name for name in registry.targets("dispatchers") if name not in BETWEEN_HOSTS | {"local"}]
CONFIG = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=32, top_k=8)


def layout(hosts: str, rank: int = 0, **sizes: int) -> RankLayout:
    """Return the layout of ranks on hosts; `hosts` has one letter per rank."""
    nodes = NodeLayout.from_hosts(range(len(hosts)), [(host, host) for host in hosts])
    return RankLayout.from_config(
        ParallelConfig(**{"dp": len(hosts)} | sizes), world=len(hosts), rank=rank, nodes=nodes
    )


def row(
    found: RankLayout, name: str, device: torch.device = CPU, config: MoEConfig = CONFIG, max_tokens: int | None = 64
) -> BackendChoice:
    (line,) = (
        line
        for line in explain(config, found, device, BF16, max_tokens=max_tokens)
        if (line.all2all, line.experts) == (name, "reference")
    )
    return line


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaaabbbb", "aabbccdd"])
def test_auto_takes_it_for_an_ep_group_on_several_nodes(hosts):
    for rank in range(len(hosts)):
        found = choose(CONFIG, layout(hosts, rank), CPU, BF16)
        nodes = len(set(hosts))
        reason = f"ranks of the EP group are on {nodes} nodes: a token travels once to a node, not once to each rank"
        assert (found.all2all, found.reason) == ("hierarchical", reason)


def test_a_row_that_stays_with_its_rank_takes_no_time_of_nvlink():
    """A row that stays on its rank counts no NVLink time.

    This decides the choice for two nodes of two ranks.
    """
    config = dataclasses.replace(CONFIG, top_k=2)
    assert choose(config, layout("aabb"), CPU, BF16).all2all == "hierarchical"


@pytest.mark.parametrize(
    ("hosts", "sizes"), [("aaaa", {}), ("aabb", {"ep": 2}), ("abcd", {})], ids=["one", "an EP group a node", "alone"]
)
def test_auto_does_not_where_a_node_has_nothing_to_pass_on(hosts, sizes):
    assert choose(CONFIG, layout(hosts, **sizes), CPU, BF16).all2all in ("allgather", "torch_a2a")
    assert row(layout(hosts, **sizes), "hierarchical").status == "possible"


@pytest.mark.parametrize(("nodes", "chosen"), [(2, "hierarchical"), (16, "hierarchical"), (32, "torch_a2a")])
def test_auto_does_not_where_the_network_saves_less_than_nvlink_takes(nodes, chosen):
    """ "auto" does not take `hierarchical` if the network time saved is less than the additional NVLink time.

    For DeepSeek-V3 on nodes of 8 ranks, that is the case from EP 256 on, as in the model of `bench.scaling`.
    """
    paper = NodeLayout.from_ranks_per_node(range(8 * nodes), 8)
    found = RankLayout.from_config(ParallelConfig(dp=8 * nodes), world=8 * nodes, rank=0, nodes=paper)
    config = dataclasses.replace(CONFIG, num_experts=256)
    assert choose(config, found, CPU, BF16).all2all == chosen
    if chosen != "hierarchical":
        assert row(found, "hierarchical", config=config).reason == (
            "7.0 rows of a token to other nodes for 7.6, which save less time on the network than passing rows on "
            "takes of NVLink"
        )
    one = dataclasses.replace(config, top_k=1)
    assert choose(one, found, CPU, BF16).all2all == "torch_a2a"


def test_uneven_nodes_are_refused_by_name_and_others_go_on():
    for rank in range(4):
        uneven = layout("aaab", rank)
        assert choose(CONFIG, uneven, CPU, BF16).all2all == "allgather"
        with pytest.raises(
            BackendUnavailable,
            match=r"hierarchical needs the same number of ranks of an EP group on each node, and the EP group has "
            r"different numbers of ranks on its nodes: a \(ranks 0, 1, 2\), b \(rank 3\)",
        ):
            choose(CONFIG, uneven, CPU, BF16, all2all="hierarchical")


@pytest.mark.parametrize("name", OF_ONE_HOST)
def test_transports_of_one_host_refuse_several(name, monkeypatch):
    """Transports of one host refuse an EP group on several hosts.

    They also refuse it if this host shows as many GPUs as the group has ranks. The same holds without `max_tokens`, for
    transports whose buffers grow.
    """
    on_gpus(monkeypatch)
    kind = registry.load("dispatchers", name)
    monkeypatch.setattr(kind, "available", classmethod(lambda cls: None))
    for rank in range(4):
        for max_tokens in (64, None) if kind.capabilities.grows or not kind.capabilities.static else (64,):
            found = row(layout("aabb", rank), name, GPU, max_tokens=max_tokens)
            sentence = "is for one host, and the ranks of an EP group are on several: a (ranks 0, 1), b (ranks 2, 3)"
            assert (found.status, found.reason) == ("refused", f"{name} {sentence}")
            lines = explain(CONFIG, layout("aabb", rank), GPU, BF16, max_tokens=max_tokens)
            assert [line.all2all for line in lines if line.status == "chosen"] == ["hierarchical"]
        assert "on several" not in row(layout("aabb", rank, ep=2), name, GPU).reason


def on_gpus(monkeypatch, count: int = 8) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_where_nvlink_can_carry_rows_within_nodes(monkeypatch):
    module = "ep_moe.all2all.hierarchical_static"
    monkeypatch.setattr(HierarchicalNVLinkDispatcher, "available", classmethod(lambda cls: None))
    asked = []
    monkeypatch.setattr(f"{module}.without_peer_atomics", lambda gpus: asked.append(gpus))
    on_gpus(monkeypatch, 2)
    many = dataclasses.replace(CONFIG, num_experts=36)

    def said(hosts, **sizes):
        found = row(layout(hosts, **sizes), "hierarchical_nvlink", GPU, many)
        return found.reason if found.status == "refused" else found.status

    assert said("aabb") == "possible"
    assert set(asked) == {2}
    assert (
        said("aaaabbbb") == "hierarchical_nvlink needs 4 GPUs for the ranks of an EP group on a node, and this host "
        "shows 2"
    )
    assert said("aaaabbbb", ep=4, etp=2) == said("aaaabbbb")  # an EP group has 2 ranks on a node, with 2 GPUs each
    assert "needs 8 GPUs for the ranks" in said("a" * 8 + "b" * 8)
    assert "serves at most 8 ranks of an EP group on a node, here are 9" in said("a" * 9 + "b" * 9)
    assert "different numbers of ranks" in said("aaab")
    odd = row(layout("aabb"), "hierarchical_nvlink", GPU, dataclasses.replace(many, hidden_size=36))
    assert "hierarchical_nvlink needs hidden_size to be a multiple of 8" in odd.reason
    lines = explain(many, layout("aabb"), GPU, torch.float64, max_tokens=64)
    assert {line.reason for line in lines if (line.all2all, line.experts) == ("hierarchical_nvlink", "reference")} == {
        "hierarchical_nvlink carries bfloat16, float16, float32, not float64"
    }
    monkeypatch.setattr(f"{module}.without_peer_atomics", lambda gpus: (0, 1))
    assert said("aabb") == "hierarchical_nvlink needs NVLink between the GPUs of a node, and 0 and 1 have none"
