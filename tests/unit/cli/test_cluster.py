"""Test the verdict of `ep-moe doctor --cluster` from facts and rates, and ranks that never come, die or hang."""

import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ep_moe.cli import cluster, doctor
from ep_moe.cli.cluster_facts import RankFacts, find_odd, node_rates, rank_facts, slow_links, transfer_rounds, values_of
from ep_moe.errors import ConfigError
from ep_moe.parallel.nodes import NodeLayout
from tests.fixtures.programs import ON_CPU, Program, ran


def nodes_of(*hosts):
    return NodeLayout.from_hosts(range(len(hosts)), [(host, host) for host in hosts])


def sound(nodes):
    return [
        RankFacts(
            rank, 0, (nodes.host(rank), nodes.host(rank)), {"torch": "2.11", "GPUs visible": "2"}, gpu=f"gpu {rank}"
        )
        for rank in nodes.ranks
    ]


def rates_of(nodes, within=300.0, between=40.0):
    pairs = combinations(nodes.ranks, 2)
    return {(a, b): within if nodes.node(a) == nodes.node(b) else between for a, b in pairs}


TWO = nodes_of("a", "a", "b", "b")
THREE = nodes_of(*"aaaabbbbcccc")


def test_a_sound_cluster_has_nothing_odd():
    assert find_odd(sound(THREE), THREE, rates_of(THREE)) == []


def test_an_odd_version_is_named():
    facts = sound(THREE)
    for rank in (4, 5):
        facts[rank] = replace(facts[rank], compared=facts[rank].compared | {"torch": "2.10"})
    assert find_odd(facts, THREE, rates_of(THREE)) == [
        "ranks 4, 5 (host b): torch is 2.10, but 2.11 on 10 of 12 ranks"
    ]  # fmt: skip


def test_two_sides_without_a_majority():
    facts = sound(TWO)
    for rank in (2, 3):
        facts[rank] = replace(facts[rank], compared={"torch": "2.10", "GPUs visible": "2"})
    assert find_odd(facts, TWO, {}) == [
        "torch differs, without a majority: 2.11 on ranks 0, 1 (host a); 2.10 on ranks 2, 3 (host b)"
    ]


def test_a_fact_that_one_rank_lacks_is_odd():
    facts = sound(TWO)
    facts[3] = replace(facts[3], compared={"torch": "2.11"})
    assert find_odd(facts, TWO, {}) == ["rank 3 (host b): GPUs visible is unknown, but 2 on 3 of 4 ranks"]


def test_faults_and_shared_gpus_and_hosts_with_fewer_ranks():
    nodes = nodes_of("a", "a", "b", "b", "c")
    facts = sound(nodes)
    facts[1] = replace(facts[1], gpu="gpu 0")
    facts[2] = replace(facts[2], faults=("its GPU fails: broken",))
    assert find_odd(facts, nodes, {}) == [
        "rank 2 (host b): its GPU fails: broken",
        "ranks 0, 1 (host a): share one GPU, gpu 0",
        "host c: 1 rank, but other hosts have 2",
    ]


def test_of_hosts_of_two_sizes_the_smaller_are_named():
    nodes = nodes_of("a", "b", "b")
    assert find_odd(sound(nodes), nodes, {}) == ["host a: 1 rank, but other hosts have 2"]


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ([(4, 6)], ["link of ranks 4, 6 (host b): 1 GB/s, less than half of the median within hosts, 300 GB/s"]),
        ([(1, 9)], ["link of ranks 1, 9 (hosts a, c): 1 GB/s, less than half of the median between hosts, 40 GB/s"]),
        (
            [(a, 7) for a in (4, 5, 6)],
            [
                "rank 7 (host b): all 3 links within hosts are slow, 1 GB/s: "
                "less than half of the median within hosts, 300 GB/s"
            ],
        ),
        (
            [(a, c) for a in range(4) for c in range(8, 12)],
            [
                "hosts a and c: all links between them are slow, 1 GB/s: "
                "less than half of the median between hosts, 40 GB/s"
            ],
        ),
    ],
    ids=["within", "between", "rank", "hosts"],
)
def test_slow_links_are_named(slow, words):
    assert slow_links(rates_of(THREE) | dict.fromkeys(slow, 1.0), THREE) == words


def test_half_of_the_median_is_not_slow():
    assert slow_links(rates_of(THREE) | {(4, 6): 150.0}, THREE) == []
    assert len(slow_links(rates_of(THREE) | {(4, 6): 149.0}, THREE)) == 1


@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "aabb", "aaabbb", "abab", "abc", "aabbcc", "aab", "abbccc"])
def test_every_pair_transfers_once(hosts):
    nodes = nodes_of(*hosts)
    rounds = transfer_rounds(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(nodes.ranks, 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_links_between_hosts_are_measured_under_equal_load():
    """All links between hosts are measured at once, and none within a host at the same time."""
    for pairs in transfer_rounds(THREE):
        between = [pair for pair in pairs if THREE.node(pair[0]) != THREE.node(pair[1])]
        assert len(between) in (0, 4)
        assert not between or between == pairs


def test_rates_between_hosts_are_those_of_all_ranks():
    assert node_rates(rates_of(THREE), THREE) == {(0, 1): 160.0, (0, 2): 160.0, (1, 2): 160.0}
    assert node_rates(rates_of(nodes_of(*"aab")), nodes_of(*"aab")) == {(0, 1): 40.0}


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "nccl"),
        ({"gpu": None}, "gloo on the CPU: not every rank has a GPU of its own"),
        ({"gpu": "gpu 0"}, "gloo on the CPU: not every rank has a GPU of its own"),
        ({"faults": ("its GPU fails: broken",)}, "gloo on the CPU: a GPU fails"),
        ({"compared": {"device": "cuda", "NCCL": "1"}}, "gloo on the CPU: the ranks have different versions of NCCL"),
    ],
)
def test_nccl_only_where_it_can_work(change, backend):
    facts = [replace(entry, compared={"device": "cuda", "NCCL": "2"}) for entry in sound(TWO)]
    facts[2] = replace(facts[2], **change)
    assert "".join(cluster.chosen_backend(facts)) == backend


def test_ranks_without_gpus_use_gloo():
    """Ranks without GPUs use gloo. No reason is given if no rank has a GPU."""
    facts = [replace(entry, compared={"device": "cpu"}, gpu=None) for entry in sound(TWO)]
    assert cluster.chosen_backend(facts) == ("gloo", "")
    facts[3] = replace(facts[3], compared={"device": "cuda"}, gpu="gpu 3")
    assert cluster.chosen_backend(facts) == ("gloo", " on the CPU: not every rank has a GPU of its own")


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "5"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "head", "MASTER_PORT": "5",
}  # fmt: skip


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_the_launchers_variables(environment):
    launch = cluster.LaunchEnvironment.read(environment)
    assert (launch.rank, launch.world, launch.local_rank, launch.host, launch.port) == (3, 4, 1, "head", 5)
    for name in environment:
        with pytest.raises(ConfigError, match=name if name not in ("RANK", "SLURM_PROCID") else "RANK"):
            cluster.LaunchEnvironment.read({key: value for key, value in environment.items() if key != name})


def test_torchruns_variables_count_within_a_job_of_slurm():
    """torchrun's variables take precedence in a SLURM job.

    There srun starts torchrun's agent, which sets its own variables for its ranks.
    """
    launch = cluster.LaunchEnvironment.read(SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"} | TORCHRUN)
    assert (launch.rank, launch.world, launch.local_rank, launch.may_bind_gpus) == (3, 4, 1, False)
    assert cluster.LaunchEnvironment.read(SRUN).may_bind_gpus


def test_facts_of_this_machine_are_written_and_read():
    own = rank_facts(0, 0, None)
    assert own.compared["device"] == "cpu"
    assert {"ep_moe", "python", "torch", "CUDA", "NCCL", "Triton"} <= own.compared.keys()
    assert own.faults == ()


def test_a_rank_without_the_gpu_of_its_index_says_so():
    own = rank_facts(3, 3, 99)
    assert own.gpu is None
    assert own.faults[0].startswith("no GPU: it needs the one with index 99")


def test_the_tables_show_each_value_and_rate():
    facts = sound(TWO)
    facts[3] = replace(facts[3], compared={"torch": "2.10", "GPUs visible": "2"})
    report = cluster.ClusterReport(["rank 3"], facts, TWO, "gloo", rates_of(TWO))
    by_value, ranks, matrix, hosts = (rows for _, _, rows in doctor.tables(report))
    assert by_value[:2] == [["torch", "2.11", "ranks 0, 1, 2"], ["", "2.10", "rank 3"]]
    assert ranks[3] == ["rank 3", "b", "0", "300", "40"]
    assert matrix[1] == ["rank 1", "300", "", "40", "40"]
    assert hosts == [["a", "", "80"], ["b", "80", ""]]
    assert doctor.lines(report) == ["odd: rank 3"]
    assert doctor.lines(replace(report, odd=[])) == ["sound: 4 ranks on 2 hosts"]
    alone = cluster.ClusterReport([], facts[:1], nodes_of("a"))
    assert doctor.lines(alone) == ["sound: 1 rank on 1 host"]
    assert values_of(facts)["GPUs visible"] == {"2": [0, 1, 2, 3]}


def ranks_of_srun(world, come, *program):
    """Return exit codes and outputs of the ranks that come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    given = kept | ON_CPU | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_NTASKS": str(world)}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Program(*program, env=given | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}))
            for rank in come
        ]
        found = [process.ended(timeout_s=120) for process in ranks]
    return [code for code, _, _ in found], [out + err for _, out, err in found]


@pytest.mark.parametrize("come", [(0, 2), (1, 2)], ids=["another", "the one that serves the store"])
def test_a_rank_that_never_comes(come):
    codes, printed = ranks_of_srun(3, come, "-m", "ep_moe", "doctor", "--cluster", "--deadline", "20")
    assert codes == [1, 1], printed
    if 0 in come:
        assert "".join(printed).count("odd: rank 1 did not come within 20 s, of 3 ranks") == 1, printed
    else:
        assert all("no answer from the store of rank 0" in text for text in printed), printed


@pytest.mark.parametrize("plant", ["dies", "hangs"])
def test_a_rank_that_is_lost_in_transfers(plant):
    codes, printed = ranks_of_srun(3, range(3), "tests/fixtures/cluster_doctor.py", plant, "20")
    assert codes[:2] == [1, 1], printed
    named = [line for line in "".join(printed).splitlines() if line.startswith("odd: ")]
    assert len(named) == 1, printed
    assert "2" in named[0].split(":")[1], printed


def test_without_a_launcher_it_says_how_to_launch():
    given = {name: value for name, value in os.environ.items() if name != "RANK" and not name.startswith("SLURM")}
    code, _, err = ran("-m", "ep_moe", "doctor", "--cluster", env=given)
    assert code == 2
    assert "environment variable RANK must be a number, got ''; launch ep-moe doctor --cluster with torchrun" in err


def test_a_links_rate_is_the_best_of_all_passes(monkeypatch):
    """A link's rate is the best of all passes, so a pass slowed by another job does not count as a slow link."""
    passes = [{(0, 1): 9.0}, {(0, 1): 4.0}, {(0, 1): 6.0}]
    ours = iter(passes)
    monkeypatch.setattr(cluster, "PASSES", len(passes))
    monkeypatch.setattr(cluster, "slow_links", lambda *_: ["slow"])
    monkeypatch.setattr(cluster, "_own_rates", lambda *_: next(ours))
    exchange = SimpleNamespace(launch=SimpleNamespace(world=2), deadline_s=60.0, missing=lambda _: [])
    sent = []
    exchange.publish = lambda _, rates: sent.append(rates[0, 1])
    exchange.answers = lambda _: [("", [(1, sent[-1])]), ("", [(0, sent[-1])])]
    assert cluster._measure(exchange, None, "gloo", None, None, None) == ({(0, 1): 9.0}, [], [])
    assert sent == [9.0, 4.0, 6.0]


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_is_looked_at_before_ranks_meet(deadline):
    with pytest.raises(ConfigError, match="--deadline"):
        cluster.run(deadline, lambda _: None, environment={})


def test_links_that_were_not_measured_have_no_table():
    report = cluster.ClusterReport(odd=["a rank is missing"], facts=sound(TWO), nodes=TWO, backend="nccl")
    titles = [title for title, *_ in doctor.tables(report)]
    assert not any("between hosts" in title or "each way over" in title for title in titles)
    measured = replace(report, rates=rates_of(TWO))
    assert len(doctor.tables(measured)) == len(titles) + 2


@pytest.mark.parametrize(
    ("backend", "gpu", "device"),
    [("nccl", 1, "cuda:1"), ("gloo", 1, "cpu"), ("gloo", None, "cpu"), ("nccl", None, "cpu")],
)
def test_transfers_are_of_the_ranks_own_gpu_where_nccl_makes_them(backend, gpu, device, monkeypatch):
    asked = []

    def measure(exchange, nodes, backend, device, time_pair, show):
        asked.append((backend, str(device), time_pair))
        return {}, [], []

    monkeypatch.setattr(cluster, "_measure", measure)
    monkeypatch.setattr(cluster, "chosen_backend", lambda every: (backend, ": because"))
    monkeypatch.setattr(cluster.LaunchEnvironment, "gpu", lambda self: gpu)
    monkeypatch.setattr(cluster.LaunchEnvironment, "store", lambda self, deadline_s: HashStore())
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    reports = []
    report = cluster.run(5.0, reports.append, facts=rank_facts, environment=alone)
    assert asked == [(backend, device, cluster.pair_rate)]
    assert (report.backend, reports) == (f"{backend}: because", [report])
