"""Launch files with stubs of srun, scontrol, module, torchrun and getent: what they start, and when they stop.

One test starts ranks: SLURM's file with a stub of srun that starts the step twice, as on two nodes.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ep_moe.parallel.groups import TorchrunEnv

ROOT = Path(__file__).parents[2]
PREFLIGHT = ["-m", "ep_moe", "doctor", "--cluster"]
PROGRAM = ["train.py", "--steps", "2", "--name", "two words"]
LOG = 'python3 -c \'import json, sys; print(json.dumps(sys.argv[1:]))\' "${0##*/}" "$@" >> "$CALLS"\n'
# options have the form --name=value, so the first word without dashes is the program
STEP = "while [[ $1 == --* ]]; do shift; done\n"
STUBS = {
    "scontrol": 'printf "%s\\n" first second',
    "srun": LOG + STEP + 'exec "$@"',
    "torchrun": LOG + 'if [[ "$*" == *doctor* ]]; then exit "${PREFLIGHT_ENDS:-0}"; fi',
    "getent": LOG,
    "module": LOG,
}


class Calls:
    """Run commands with stubs first in PATH, and read the stubs' arguments."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "bin", folder / "calls"
        self.bin.mkdir()
        for name, text in STUBS.items():
            self.stub(name, text)

    def stub(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess:
        given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.log.write_text("")
        return subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=200,
            env=given | {"PATH": f"{self.bin}:{os.environ['PATH']}", "CALLS": str(self.log)} | variables,
        )  # fmt: skip

    def of(self, name: str) -> list[list[str]]:
        called = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [arguments for program, *arguments in called if program == name]

    def steps(self) -> list[list[str]]:
        """Return the arguments of both srun calls: the preflight and the program."""
        called = self.of("srun")
        assert len(called) == 2, called
        return called


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


JOB = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}


def slurm(calls, *program, **variables):
    return calls.run(["bash", "launch/slurm.sbatch", *(program or PROGRAM)], **JOB, **variables)


def meets(arguments, **options):
    """Check the values of torchrun's options."""
    for name, value in options.items():
        assert arguments[arguments.index(f"--{name.replace('_', '-')}") + 1] == value, arguments


def test_slurm_runs_a_script_with_its_arguments_after_the_preflight(calls):
    done = slurm(calls)
    assert done.returncode == 0, done.stderr
    preflight, job = calls.of("torchrun")
    assert preflight[-len(PREFLIGHT) :] == PREFLIGHT
    assert job[-len(PROGRAM) :] == PROGRAM
    for arguments, name in ((preflight, "17-preflight"), (job, "17")):
        meets(arguments, nnodes="2", nproc_per_node="gpu", rdzv_id=name, rdzv_backend="c10d",
              rdzv_endpoint="first:29500")  # fmt: skip
    assert all("--kill-on-bad-exit=1" in arguments for arguments in calls.steps())


def test_slurm_without_cpus_per_task(calls):
    assert slurm(calls).returncode == 0
    assert not any("--cpus-per-task" in word for arguments in calls.steps() for word in arguments)
    assert slurm(calls, SLURM_CPUS_PER_TASK="12").returncode == 0
    assert all("--cpus-per-task=12" in arguments for arguments in calls.steps())


def test_slurm_in_a_container(calls):
    assert slurm(calls).returncode == 0
    assert not any("container" in word for arguments in calls.steps() for word in arguments)
    assert slurm(calls, CONTAINER_IMAGE="/images/ep moe.sqsh").returncode == 0
    for arguments in calls.steps():
        assert "--container-image=/images/ep moe.sqsh" in arguments
        assert f"--container-mounts={ROOT}:{ROOT}" in arguments
    assert slurm(calls, CONTAINER_IMAGE="image", CONTAINER_MOUNTS="/data:/data").returncode == 0
    assert all("--container-mounts=/data:/data" in arguments for arguments in calls.steps())


def test_slurm_loads_modules(calls):
    assert slurm(calls).returncode == 0
    assert calls.of("module") == []
    assert slurm(calls, MODULES="cuda/12.8 python").returncode == 0
    assert calls.of("module") == [["load", "cuda/12.8"], ["load", "python"]]


def test_slurm_stops_where_the_preflight_fails(calls):
    assert slurm(calls, PREFLIGHT_ENDS="1").returncode == 1
    assert len(calls.of("torchrun")) == 1
    assert slurm(calls, PREFLIGHT_ENDS="1", PREFLIGHT="0").returncode == 0
    assert [arguments[-len(PROGRAM) :] for arguments in calls.of("torchrun")] == [PROGRAM]


def test_slurm_without_a_program(calls):
    done = calls.run(["bash", "launch/slurm.sbatch"], **JOB)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


def test_slurm_options_are_before_the_first_command():
    """All #SBATCH lines come before the first command, where sbatch stops reading them."""
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first for number, line in enumerate(lines) if line.startswith("#SBATCH"))


@pytest.mark.timeout(240)
@pytest.mark.skipif(TorchrunEnv.present(), reason="starts torchrun itself")
def test_slurm_with_ranks(calls):
    """The SLURM file runs doctor and then the program over 4 ranks on two simulated nodes."""
    (calls.bin / "torchrun").unlink()
    torchrun = f"{shlex.quote(sys.executable)} -m tests.fixtures.programs"
    calls.stub("scontrol", "echo 127.0.0.1")
    calls.stub("torchrun", LOG + f'exec {torchrun} "$@"')
    calls.stub("srun", STEP + 'NCCL_HOSTID=left "$@" & left=$!\nNCCL_HOSTID=right "$@" & wait $!; wait $left')
    done = slurm(
        calls, "examples/train.py", "--steps", "2", "--check", PORT=str(free_port()), NPROC_PER_NODE="2",
        PET_LOCAL_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sound: 4 ranks on 2 hosts" in done.stdout
    assert "4 ranks and one process agree" in done.stdout
    assert done.stdout.index("sound: ") < done.stdout.index("agree")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node(calls, *program, **variables):
    return calls.run(["launch/torchrun_node.sh", *program], **variables)


def test_torchrun_on_one_node(calls):
    assert node(calls, *PROGRAM, NPROC_PER_NODE="4").returncode == 0
    start = ["--standalone", "--nproc-per-node", "4"]
    assert calls.of("torchrun") == [start + PREFLIGHT, start + PROGRAM]


def test_torchrun_on_two_nodes(calls):
    assert node(calls, *PROGRAM, NNODES="2", ENDPOINT="head:4000", JOB_ID="x").returncode == 0
    preflight, job = calls.of("torchrun")
    assert (preflight[-len(PREFLIGHT) :], job[-len(PROGRAM) :]) == (PREFLIGHT, PROGRAM)
    meets(preflight, nnodes="2", nproc_per_node="gpu", rdzv_id="x-preflight", rdzv_endpoint="head:4001")
    meets(job, nnodes="2", nproc_per_node="gpu", rdzv_id="x-job", rdzv_endpoint="head:4000")


def test_torchrun_stops_where_the_preflight_fails(calls):
    assert node(calls, *PROGRAM, PREFLIGHT_ENDS="1").returncode == 1
    assert len(calls.of("torchrun")) == 1
    assert node(calls, *PROGRAM, PREFLIGHT_ENDS="1", PREFLIGHT="0").returncode == 0
    assert [arguments[-len(PROGRAM) :] for arguments in calls.of("torchrun")] == [PROGRAM]


@pytest.mark.parametrize("endpoint", ["", "head", "head:port"])
def test_torchrun_on_two_nodes_without_an_endpoint(calls, endpoint):
    done = node(calls, *PROGRAM, NNODES="2", ENDPOINT=endpoint)
    assert done.returncode == 2
    assert f"got '{endpoint}'" in done.stderr
    assert calls.of("torchrun") == []


def test_torchrun_without_a_program(calls):
    assert node(calls).returncode == 2
    assert calls.of("torchrun") == []


def manifest():
    found = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found, job, container


def test_kubernetes_meets_at_the_headless_service():
    found, job, container = manifest()
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    # pod names are <jobset>-<replicated job>-<job index>-<pod index>
    service = found["spec"]["network"]["subdomain"]
    assert found["spec"]["network"]["enableDNSHostnames"]
    assert given["HEAD"] == f"{found['metadata']['name']}-{job['name']}-0-0.{service}"
    spec = job["template"]["spec"]
    assert int(given["NNODES"]) == spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"
    assert all(isinstance(value, str) for value in given.values())  # Kubernetes refuses other types
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


@pytest.mark.parametrize(("ends", "programs"), [("0", 2), ("1", 1)])
def test_kubernetes_runs_the_preflight_and_the_program(calls, ends, programs):
    _, _, container = manifest()
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    done = calls.run([*container["command"], *container["args"]], **given, PREFLIGHT_ENDS=ends)
    assert done.returncode == int(ends), done.stderr
    called = calls.of("torchrun")
    assert len(called) == programs
    assert called[0][-len(PREFLIGHT) :] == PREFLIGHT
    meets(called[0], nnodes="2", nproc_per_node="gpu", rdzv_id="ep-moe-preflight",
          rdzv_endpoint="ep-moe-node-0-0.ep-moe:29501")  # fmt: skip
    if programs == 2:
        assert called[1][-len(container["args"]) :] == container["args"]
        meets(called[1], rdzv_id="ep-moe-job", rdzv_endpoint="ep-moe-node-0-0.ep-moe:29500")


def test_kubernetes_skips_the_preflight(calls):
    _, _, container = manifest()
    given = {variable["name"]: variable["value"] for variable in container["env"]} | {"PREFLIGHT": "0"}
    assert calls.run([*container["command"], *container["args"]], **given, PREFLIGHT_ENDS="1").returncode == 0
    assert len(calls.of("torchrun")) == 1
