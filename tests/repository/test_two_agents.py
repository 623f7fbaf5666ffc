"""Two torchrun agents with c10d rendezvous, as on two nodes. NCCL_HOSTID makes each a host of its own."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from ep_moe.parallel.groups import TorchrunEnv
from tests.fixtures.programs import ON_CPU, ROOT, TORCHRUN, Program

RANKS = 2  # per agent

pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts torchrun itself")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def agents(program: tuple[str, ...]) -> list[tuple[list[str], dict[str, str]]]:
    """Return, for both hosts, the words after `python` and the environment."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two agents"]
    words = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(RANKS), *meeting, "--local-addr", "127.0.0.1"]
    given = os.environ | ON_CPU | {"PYTHONPATH": str(ROOT)}
    return [([*words, *program], given | {"NCCL_HOSTID": host}) for host in ("left", "right")]


def on_two_hosts(*program: str, ends: int = 0) -> str:
    """Return what both agents print. Both must exit with `ends`."""
    with ExitStack() as stack:
        started = [stack.enter_context(Program(*words, env=env)) for words, env in agents(program)]
        found = [agent.ended(timeout_s=150) for agent in started]
    printed = "\n".join(out + err for _, out, err in found)
    assert [code for code, _, _ in found] == [ends, ends], printed[-3000:]
    return printed


@pytest.mark.timeout(240)
def test_a_layer():
    printed = on_two_hosts("tests/fixtures/two_agents.py")
    hosts = [line.split(":")[0].split(" on ")[1] for line in printed.splitlines() if line.startswith("rank ")]
    first = hosts[0].removeprefix("left of ").removeprefix("right of ")
    assert sorted(hosts) == [f"left of {first}"] * RANKS + [f"right of {first}"] * RANKS
    assert sorted(first.split(", ")) == ["left", "right"]
    assert printed.count("hierarchical, ranks of the EP group are on 2 nodes") == 2 * RANKS


@pytest.mark.timeout(240)
def test_the_example_trains():
    printed = on_two_hosts("examples/train.py", "--steps", "2", "--check")
    assert "4 ranks and one process agree" in printed


@pytest.mark.timeout(240)
def test_ep_moe_run():
    printed = on_two_hosts("-m", "ep_moe", "run", "--text-tokens", "2048", "--batch", "2")
    assert "all2all hierarchical" in printed
    assert "equal to 5 digits" in printed


@pytest.mark.timeout(240)
def test_the_host_of_the_store_is_lost():
    """Survivors name the lost store and its host.

    The agents run in interpreters of their own: forks of an agent would keep its connections open after its end.
    """
    started = [
        subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        for words, env in agents(("tests/fixtures/lost_agent.py",))
    ]
    try:
        printed = "\n".join(agent.communicate(timeout=150)[0] for agent in started)
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
    held = r"The store of the job is gone: the agent that started ranks (0, 1|2, 3) on host (left|right) held it, so"
    assert (
        len(re.findall(f"^found: .*{held} this process, its host, or the network to it is lost", printed, re.M))
        == RANKS
    )


@pytest.mark.timeout(240)
def test_doctor_finds_the_cluster_sound():
    printed = on_two_hosts("-m", "ep_moe", "doctor", "--cluster")
    assert printed.count("sound: 4 ranks on 2 hosts") == 1
    assert "GB/s each way over gloo" in printed


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("plant", "word"),
    [
        ("version", "odd: rank 2 (host {second}): torch is 1.0, but"),
        ("link", "odd: link of ranks 1, 2 (hosts {first}, {second}): 1 GB/s, less than half of the median"),
        ("gpu", "odd: rank 2 (host {second}): no GPU: it needs the one with index 0, and 0 are visible"),
    ],
)
def test_doctor_names_what_is_odd(plant, word):
    printed = on_two_hosts("tests/fixtures/cluster_doctor.py", plant, "60", ends=1)
    hosts = [{"first": "left", "second": "right"}, {"first": "right", "second": "left"}]
    assert any(word.format(**names) in printed for names in hosts), printed[-3000:]
    assert "sound" not in printed
