"""Test the facts of a rank with a fake GPU, and which links and hosts are reported."""

import subprocess
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from ep_moe.cli import cluster_facts
from ep_moe.cli.cluster_facts import RankFacts, _does_not_compute, _smi, find_odd, node_rates, rank_facts, slow_links
from ep_moe.parallel.nodes import NodeLayout

SMI = {
    "driver": "580.1", "highest SM clock": "1980", "highest memory clock": "3201", "ECC": "Enabled",
    "SM clock": "1755", "uncorrected": "0",
}  # fmt: skip


def nodes_of(hosts):
    return NodeLayout.from_hosts(range(len(hosts)), [(host, host) for host in hosts])


def rates_of(nodes, within=300.0, between=40.0):
    pairs = combinations(nodes.ranks, 2)
    return {(a, b): within if nodes.node(a) == nodes.node(b) else between for a, b in pairs}


@pytest.fixture
def four_gpus(monkeypatch):
    """Pretend to have four GPUs, of which the others cannot access the last one.

    Return nvidia-smi's answer, for a test to change.
    """
    smi = dict(SMI)
    found = SimpleNamespace(uuid="GPU-abc", name="H200", major=9, minor=0, total_memory=141 * 2**30)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "get_device_properties": lambda device: found,
        "can_device_access_peer": lambda device, other: other != 3,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(cluster_facts, "_smi", lambda uuid: smi)
    monkeypatch.setattr(cluster_facts, "_does_not_compute", lambda device: None)
    monkeypatch.setattr(cluster_facts, "memory_left", lambda device: (2**36, 2**37))
    return smi


def test_facts_of_a_gpu(four_gpus):
    own = rank_facts(5, 1, 1)
    assert (own.rank, own.local_rank, own.gpu, list(own.faults)) == (5, 1, "GPU-abc", [])
    wanted = {
        "device": "cuda", "NCCL": "2.28.3", "GPUs visible": "4", "GPU": "H200, compute capability 9.0",
        "GPU memory": "141.0 GiB", "peer access": "to 2 of 3 other visible GPUs", "driver": "580.1", "ECC": "Enabled",
        "highest SM clock": "1980", "highest memory clock": "3201",
    }  # fmt: skip
    assert {name: own.compared[name] for name in wanted} == wanted
    assert own.shown == {"SM clock": "1755", "free": "64.0 GiB"}
    assert not own.shown.keys() & own.compared.keys(), "what changes from moment to moment is not compared"
    assert "uncorrected" not in own.compared


def test_what_the_driver_does_not_say_is_unknown(four_gpus):
    four_gpus.clear()
    own = rank_facts(0, 0, 0)
    assert own.compared["driver"] == own.compared["ECC"] == own.shown["SM clock"] == "unknown"
    assert list(own.faults) == []


@pytest.mark.parametrize(("gpu", "there"), [(3, True), (4, False)])
def test_a_rank_has_the_gpu_of_its_index(gpu, there, four_gpus):
    own = rank_facts(0, gpu, gpu)
    assert own.compared["device"] == ("cuda" if there else "none"), "no GPU, and no CPU that was asked for"
    assert any("4 are visible" in fault for fault in own.faults) is not there


@pytest.mark.parametrize(("errors", "faults"), [("0", 0), ("3", 1), ("[N/A]", 0)])
def test_uncorrected_errors_are_a_fault(errors, faults, four_gpus):
    four_gpus["uncorrected"] = errors
    found = rank_facts(0, 0, 0).faults
    assert [f"had {errors} uncorrected ECC errors" in fault for fault in found] == [True] * faults


def test_a_gpu_that_does_not_compute_is_a_fault(four_gpus, monkeypatch):
    monkeypatch.setattr(cluster_facts, "_does_not_compute", lambda device: "its GPU fails: broken")
    assert list(rank_facts(0, 0, 0).faults) == ["its GPU fails: broken"]


@pytest.mark.parametrize(
    ("ones", "fault"),
    [
        (lambda *_, **__: torch.full((1024,), 1.0), None),
        (lambda *_, **__: torch.full((1024,), 2.0), "its GPU adds 1024 ones to 2048.0"),
        (lambda *_, **__: (_ for _ in ()).throw(RuntimeError("CUDA error: x\nmore")), "its GPU fails: CUDA error: x"),
    ],
    ids=["sound", "wrong", "raises"],
)
def test_a_sum_on_the_gpu_tells_whether_it_computes(ones, fault, monkeypatch):
    monkeypatch.setattr(torch, "ones", ones)
    assert _does_not_compute(torch.device("cpu")) == fault


@pytest.mark.parametrize("uuid", ["abc", "GPU-abc"], ids=str)
def test_nvidia_smi_is_asked_about_one_gpu(uuid, monkeypatch):
    """nvidia-smi is queried for one GPU by its UUID, with or without the prefix, and with a timeout."""
    asked = []

    def run(words, **how):
        asked.append((words, how))
        return SimpleNamespace(stdout=" 580.1, 1980, 3201, Enabled, 1755, 0\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert _smi(uuid) == SMI
    ((words, how),) = asked
    assert words[:2] == ["nvidia-smi", "--id=GPU-abc"]
    assert (how["timeout"], how["check"], how["text"]) == (cluster_facts._SMI_S, True, True)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
        subprocess.CalledProcessError(9, "x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_nvidia_smi_that_fails_says_nothing(error, monkeypatch):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert _smi("abc") == {}


def test_an_answer_of_another_length_says_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.1, 1980\n"))
    assert _smi("abc") == {}


# --- links ----------------------------------------------------------------------------------------------------------


def test_the_one_link_of_two_ranks_is_no_rank_that_is_slow():
    """The only slow link of two ranks is reported as a link, because either rank may be the cause."""
    nodes = nodes_of("aabbcc")
    found = slow_links(rates_of(nodes) | {(0, 1): 1.0}, nodes)
    assert found == ["link of ranks 0, 1 (host a): 1 GB/s, less than half of the median within hosts, 300 GB/s"]


def test_the_one_link_between_two_hosts_is_a_link():
    nodes = nodes_of("abcd")
    found = slow_links(rates_of(nodes) | {(0, 1): 1.0}, nodes)
    assert found == ["link of ranks 0, 1 (hosts a, b): 1 GB/s, less than half of the median between hosts, 40 GB/s"]


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ([(0, 1), (0, 2), (0, 3)], "rank 0 (host a): all 3 links within hosts are slow, 3 GB/s"),
        ([(a, b) for a in range(4) for b in range(4, 8)], "hosts a and b: all links between them are slow, 16 GB/s"),
    ],
    ids=["rank", "hosts"],
)
def test_the_best_of_slow_links_is_told(slow, words):
    nodes = nodes_of("aaaabbbbcccc")
    rates = rates_of(nodes) | {pair: float(number) for number, pair in enumerate(slow, 1)}
    (found,) = slow_links(rates, nodes)
    assert found.startswith(words)


def test_rates_between_hosts_are_the_mean_of_the_links_times_the_ranks():
    """The rate between hosts is the mean of the links times the ranks, whichever host the lower rank is on.

    Ranks 1 and 2 are on the second and on the first host.
    """
    nodes = nodes_of("abab")
    rates = {(0, 1): 10.0, (0, 3): 20.0, (1, 2): 30.0, (2, 3): 40.0, (0, 2): 1.0, (1, 3): 1.0}
    assert node_rates(rates, nodes) == {(0, 1): 50.0}


def test_hosts_with_fewer_ranks_are_named_with_their_number():
    nodes = nodes_of("aaabbbcc")
    facts = [RankFacts(rank, 0, ("", ""), {}) for rank in nodes.ranks]
    assert find_odd(facts, nodes, {}) == ["host c: 2 ranks, but other hosts have 3"]
