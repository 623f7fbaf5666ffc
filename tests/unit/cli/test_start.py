"""The command before its modules are imported: one line at Ctrl-C, and a word at once on a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# replaces torch by a module whose import never ends
ENDLESS = """
import sys, time
class Endless:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("ep_moe."):
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Endless())
sys.modules["ep_moe"] = type(sys)("ep_moe")
sys.modules["ep_moe"].__path__ = []
sys.argv = ["ep-moe", *sys.argv[1:]]
import ep_moe_command
ep_moe_command.main()
"""


def started(*words, **streams):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", ENDLESS, *words], env=environment, **streams)


@pytest.mark.parametrize(("rank", "said"), [("0", "interrupted\n"), ("1", "")])
def test_ctrl_c_while_torch_is_imported(rank, said, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    process = started("run", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", said)


@pytest.mark.parametrize(("words", "said"), [(("run",), "ep-moe: starting"), (("run", "--quiet"), "")])
def test_a_terminal_hears_of_it_first(words, said, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    main, side = pty.openpty()
    process = started(*words, stderr=side, stdout=subprocess.PIPE, text=True)
    os.close(side)
    try:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        found = os.read(main, 1000).decode() if select.select([main], [], [], 0)[0] else ""
        assert found == said
    finally:
        process.kill()
        process.communicate()
        os.close(main)


def test_it_becomes_the_command():
    """With Python's own handler again, which the commands count on."""
    code = "import sys; sys.argv = ['ep-moe', '--version']; import ep_moe_command; ep_moe_command.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith("ep-moe ")
    assert done.stderr == ""
    ends = (
        "import os, signal, sys; sys.argv = ['ep-moe']; import ep_moe_command, ep_moe.cli.app as cli\n"
        "cli.app = lambda: sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)\n"
        "ep_moe_command.main()"
    )
    done = subprocess.run([sys.executable, "-c", ends], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
