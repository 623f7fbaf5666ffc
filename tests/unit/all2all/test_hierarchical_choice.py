"""Where "auto" takes `hierarchical`, and what transports of one host say of several nodes."""

import pytest
import torch

from ep_moe import BackendUnavailable, MoEConfig, ParallelConfig, RankLayout
from ep_moe.all2all.deepep import DeepEPDispatcher
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.pplx import PplxDispatcher
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.selection.explain import BackendChoice, choose, explain

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
OF_ONE_HOST = (FlashInferNVLinkDispatcher, DeepEPDispatcher, NVLinkP2PDispatcher, PplxDispatcher)
CONFIG = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=32, top_k=8)


def layout(hosts: str, rank: int = 0, **sizes: int) -> RankLayout:
    """hosts: a letter a rank."""
    nodes = NodeLayout.found(range(len(hosts)), [(host, host) for host in hosts])
    return RankLayout.from_config(
        ParallelConfig(**{"dp": len(hosts)} | sizes), world=len(hosts), rank=rank, nodes=nodes
    )


def row(found: RankLayout, name: str, device: torch.device = CPU) -> BackendChoice:
    (line,) = (
        line
        for line in explain(CONFIG, found, device, BF16, max_tokens=64)
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


@pytest.mark.parametrize(
    ("hosts", "sizes"), [("aaaa", {}), ("aabb", {"ep": 2}), ("abcd", {})], ids=["one", "an EP group a node", "alone"]
)
def test_auto_does_not_where_a_node_has_nothing_to_pass_on(hosts, sizes):
    assert choose(CONFIG, layout(hosts, **sizes), CPU, BF16).all2all in ("allgather", "torch_a2a")
    assert row(layout(hosts, **sizes), "hierarchical").status == "possible"


def test_uneven_nodes_are_refused_by_name_and_others_go_on():
    for rank in range(4):
        uneven = layout("aaab", rank)
        assert choose(CONFIG, uneven, CPU, BF16).all2all == "allgather"
        with pytest.raises(
            BackendUnavailable,
            match=r"hierarchical needs as many ranks of an EP group on each of its nodes, and the EP group has "
            r"different numbers of ranks on its nodes: a \(ranks 0, 1, 2\), b \(rank 3\)",
        ):
            choose(CONFIG, uneven, CPU, BF16, all2all="hierarchical")


def test_transports_of_one_host_refuse_several(monkeypatch):
    """Also where a host shows GPUs for all ranks of an EP group, of which some are on another host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for kind in OF_ONE_HOST:
        monkeypatch.setattr(kind, "available", classmethod(lambda cls: None))
    for rank in range(4):
        for kind in OF_ONE_HOST:
            found = row(layout("aabb", rank), kind.name, GPU)
            sentence = "is for one host, and the ranks of an EP group are on several: a (ranks 0, 1), b (ranks 2, 3)"
            assert (found.status, found.reason) == ("refused", f"{kind.name} {sentence}")
        assert row(layout("aabb", rank), "hierarchical", GPU).status == "chosen"
        assert "on several" not in row(layout("aabb", rank, ep=2), "nvlink_p2p", GPU).reason
