"""Test nodes, local ranks and rails of ranks, and why an EP group may have none."""

import re

import pytest

from ep_moe import ParallelConfig, RankLayout
from ep_moe.parallel import groups
from ep_moe.parallel.nodes import NodeLayout


def on(hosts: str) -> NodeLayout:
    """Return the nodes of ranks; `hosts` has one letter per rank."""
    return NodeLayout.from_hosts(range(len(hosts)), [(host, host) for host in hosts])


def layout(hosts: str, rank: int = 0, **sizes: int) -> RankLayout:
    parallel = ParallelConfig(**{"dp": len(hosts)} | sizes)
    return RankLayout.from_config(parallel, world=len(hosts), rank=rank, nodes=on(hosts))


def test_nodes_are_counted_in_the_order_in_which_they_appear():
    nodes = on("bbaa")
    assert (nodes.nodes, nodes.hosts) == ((0, 0, 1, 1), ("b", "a"))
    assert [nodes.node(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert nodes.host(3) == "a"
    assert nodes.described([0, 1, 3]) == "b (ranks 0, 1), a (rank 3)"


def test_a_name_that_two_hosts_have_tells_them_apart():
    nodes = NodeLayout.from_hosts([0, 1], [("box 1", "box"), ("box 2", "box")])
    assert nodes.hosts == ("box", "box (1)")


def test_nodes_of_a_group_ascend_whatever_the_order_of_its_ranks():
    nodes = NodeLayout.from_hosts(range(4), [(host, host) for host in "abba"])
    assert nodes.split([1, 2, 3]) == [[3], [1, 2]]
    assert nodes.rails([1, 3]) == [[3, 1]]


def test_ranks_per_node_counts_ranks_and_not_places():
    nodes = NodeLayout.from_ranks_per_node([5, 4, 7, 6], 2)
    assert nodes.split([5, 4, 7, 6]) == [[5, 4], [7, 6]]
    assert nodes.hosts == ("node 2", "node 3")
    assert (nodes.gpus, NodeLayout.from_ranks_per_node([5, 4, 7, 6], 2, gpus=8).gpus) == (None, 8)


@pytest.mark.parametrize(
    ("hosts", "sizes", "node", "rail"),
    [
        ("aabb", {}, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ("abab", {}, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ("aaaabbbb", {"ep": 4, "etp": 2}, [[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("aabb", {"ep": 2}, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        ("abcd", {}, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
    ],
    ids=str,
)
def test_groups_of_nodes_and_rails(hosts, sizes, node, rail):
    for rank in range(len(hosts)):
        found = layout(hosts, rank, **sizes)
        assert (found.groups["ep_node"], found.groups["ep_rail"]) == (node, rail)
        assert found.without_rails is None
        assert found.ep_nodes == [part for part in node if set(part) <= set(found.group("ep"))]


def test_one_node_has_no_groups_of_its_own():
    for found in (layout("aaaa"), RankLayout(world=4, rank=0, dp=4, ep=4)):
        assert found.groups["ep_node"] == found.groups["ep_rail"] == [[0], [1], [2], [3]]
        assert found.across_nodes is None
        assert found.ep_nodes == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("hosts", "sizes", "sentence"),
    [
        ("aaab", {}, r"different numbers of ranks on its nodes: a \(ranks 0, 1, 2\), b \(rank 3\)"),
        ("aabbb" + "b", {"ep": 3}, r"different numbers of ranks on its nodes: a \(ranks 0, 1\), b \(rank 2\)"),
        ("abba", {}, r"ranks 3, 2 of the EP group have the same local rank, and must be in the order of their nodes"),
    ],
)
def test_uneven_nodes_are_said_alike_on_all_ranks(hosts, sizes, sentence):
    for rank in range(len(hosts)):
        found = layout(hosts, rank, **sizes)
        assert re.search(sentence, found.without_rails)
        assert found.groups["ep_node"] == found.groups["ep_rail"] == [[rank] for rank in range(len(hosts))]


def test_a_group_that_spans_nodes_is_said_on_all_ranks():
    for rank in range(6):
        assert layout("aabbbb", rank, ep=3).across_nodes == "a (ranks 0, 1), b (rank 2)"
        assert layout("aabbcc", rank, ep=2).across_nodes is None
        assert layout("aaabbc", rank, ep=3).across_nodes == "b (ranks 3, 4), c (rank 5)"  # the second EP group


def test_hosts_of_silent_ranks_are_named():
    nodes = on("aabb")
    assert nodes.lost([2, 3], range(4)) == [
        "Host b, or the network to it, is lost: all its ranks in this group are silent (ranks 2, 3)."
    ]
    assert nodes.lost([1], range(4)) == ["Host of rank 1: a."]
    assert on("aabbb").lost([3, 4], range(5)) == ["Host of ranks 3, 4: b."]  # rank 2 on host b is still there
    assert on("aab").lost([2], range(3)) == ["Host of rank 2: b."]  # its process may have ended on its own
    assert nodes.lost([], range(4)) == on("aa").lost([1], range(2)) == []


def test_nccl_hostid_stands_for_the_host(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    identity, name = groups.host_identity()
    assert (identity, name) == groups.host_identity()
    assert name in identity
    monkeypatch.setenv("NCCL_HOSTID", "left")
    assert groups.host_identity() == ("left", "left")


def test_hosts_of_one_name_differ_by_their_boot(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    boots = ["one\n", "two\n"]
    monkeypatch.setattr(groups.Path, "read_text", lambda self: boots[0])
    first, again = groups.host_identity(), groups.host_identity()
    boots.reverse()
    other = groups.host_identity()
    assert first == again
    assert first[0] != other[0]
    assert first[1] == other[1]


def test_a_host_without_a_boot_id_is_told_by_its_name(monkeypatch):
    def unreadable(path):
        raise FileNotFoundError(path)

    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(groups.Path, "read_text", unreadable)
    name = groups.socket.gethostname()
    assert groups.host_identity() == (f"{name} ", name)


@pytest.mark.parametrize(
    ("hosts", "sizes", "size"),
    [
        ("aaaa", {}, 4),
        ("aabb", {}, 2),
        ("abcd", {}, 1),
        ("abab", {}, 4),  # not consecutive
        ("aaab", {}, 4),
        ("aaaabbbb", {"ep": 4, "etp": 2}, 2),
        ("aabb", {"ep": 2}, 2),
        ("aabbbb", {"ep": 3}, 3),
        ("aabbcdcd", {"ep": 4}, 4),  # only one of the EP groups interleaves hosts
    ],
)
def test_consecutive_ranks_of_a_node(hosts, sizes, size):
    assert {layout(hosts, rank, **sizes).ep_ranks_per_node for rank in range(len(hosts))} == {size}


@pytest.mark.parametrize(
    ("hosts", "holders", "words"),
    [
        ("aabb", ["", "", "", ""], ""),
        ("aabb", ["rank", "", "", ""], "the process of rank 0 on host a (ranks 0, 1) held it, so this process"),
        ("aabb", ["", "", "agent", "agent"], "the agent that started ranks 2, 3 on host b held it, so this process"),
        ("aaaa", ["rank", "", "", ""], "the process of rank 0 held it, so this process is lost"),
        ("aaaa", ["agent"] * 4, "the agent that started ranks 0, 1, 2, 3 held it, so this process is lost"),
    ],
    ids=str,
)
def test_what_holds_the_store_in_words(hosts, holders, words):
    nodes = NodeLayout.from_hosts(range(4), [(host, host) for host in hosts])
    assert re.match(re.escape(words), nodes.with_store(holders).store)
    assert bool(words) == bool(nodes.with_store(holders).store)
