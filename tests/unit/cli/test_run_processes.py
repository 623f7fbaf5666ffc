"""Test processes of `ep-moe`: ranks end with the command, which runs as a module and under torchrun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ep_moe.cli import run as run_module
from ep_moe.parallel.groups import TorchrunEnv
from tests.fixtures.programs import ON_CPU, TORCHRUN, ran
from tests.fixtures.run_command import invoke

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")


def command(*args):
    root = Path(__file__).parents[3]
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=100, cwd=root, check=False)


def started(*args, processes, folder):
    """Start a command, and wait until it has this many processes. Return it and their ids.

    folder: for its temporary files.
    """
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "ep_moe", *args],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    begins = time.monotonic()
    while len(session(process.pid)) < processes:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < begins + 60
        time.sleep(0.05)
    time.sleep(0.5)
    return process, session(process.pid)


def session(leader):
    """Return the live processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("how", "when"),
    [("SIGINT", "ranks"), ("SIGTERM", "ranks"), ("SIGKILL", "ranks"), ("SIGINT", "imports"), ("SIGKILL", "imports")],
)
def test_ranks_end_with_the_command(how, when, tmp_path):
    """Ranks and the fork server end with the command, even while the fork server still imports.

    With ranks, the processes are the command, the resource tracker, the fork server, its guard and the ranks.
    """
    args = ("run", "--text-tokens", "16384", "--no-reference", "--window", "32", "--batch", "1", "--quiet")
    count = 4 + (run_module.LAPTOP_RANKS if when == "ranks" else 0)
    process, members = started(*args, processes=count, folder=tmp_path)
    number = getattr(signal, how)
    if how == "SIGINT":
        for member in members:  # as a terminal does
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)
    else:
        process.send_signal(number)
    process.wait(timeout=30)
    begins = time.monotonic()
    while left := session(process.pid):
        assert time.monotonic() < begins + 4, f"{how}: {left} live on"
        time.sleep(0.05)
    output = process.stdout.read()
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[how], output
    # gloo prints lines about peers that ended while it connected to them
    said = [line for line in output.splitlines() if line.strip() and "gloo" not in line.lower()]
    assert said == (["interrupted"] if how == "SIGINT" else [])  # no warning about leaked semaphores
    if (how, when) != ("SIGKILL", "imports"):  # after a kill during imports, no process is left to remove the files
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("store", "stack"))]


def test_torchruns_ranks_end_at_once_by_sigterm(monkeypatch):
    """Ranks under torchrun end at once on SIGTERM, because the default handler is in place.

    A Python handler would run only after the collective that the rank waits in.
    """
    found = []
    for present in (True, False):
        monkeypatch.setattr(TorchrunEnv, "present", lambda present=present: present)
        monkeypatch.setattr("ep_moe.cli.app.run_model", lambda _: found.append(signal.getsignal(signal.SIGTERM)))
        assert invoke("run").exit_code == 0
    assert found[0] is signal.SIG_DFL
    assert found[1] is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_module_form():
    result = command("-m", "ep_moe", "--help")
    assert result.returncode == 0, result.stderr
    assert re.search(r"run +Run a model", result.stdout)
    assert re.search(r"doctor +Print versions", result.stdout)


def test_torchrun_form():
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    code, out, err = ran(*torchrun, "-m", "ep_moe", "run", "--text-tokens", "512", env=os.environ | ON_CPU)
    assert code == 0, err
    assert out.count("perplexity over 512 tokens") == 1
    assert out.count("2 ranks (dp 1, tp 2; ep 2, etp 1)") == 1
    assert "equal to 5 digits" in out
