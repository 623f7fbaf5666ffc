"""Test the command before its modules are imported: one line at Ctrl-C, and a message at once on a terminal."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ep_moe_command

ROOT = Path(__file__).parents[3]
COMMAND = ("-c", "import sys; sys.argv[0] = 'ep-moe'; import ep_moe_command; ep_moe_command.main()")
MODULE = ("-m", "ep_moe")
FORMS = pytest.mark.parametrize("form", [COMMAND, MODULE, ("-u", *MODULE)], ids=["ep-moe", "-m", "as torchrun's rank"])


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a form of the command whose import of torch never ends."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")

    def start(form, *words, **streams):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        return subprocess.Popen([sys.executable, *form, *words], env=environment, cwd=tmp_path, **streams)

    return start


@FORMS
@pytest.mark.parametrize(("rank", "said"), [("0", "interrupted\n"), ("1", "")])
def test_ctrl_c_while_torch_is_imported(form, rank, said, started, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    process = started(form, "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", said)


def test_ctrl_c_of_another_program_is_its_own(started):
    process = started(
        ("-c", "import ep_moe"), "-m", "ep_moe", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1].endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["-m", "ep_moe", "run"], True),
        (["-u", "-m", "ep_moe"], True),
        (["-m", "other", "ep_moe"], False),
        (["-mep_moe", "bench", "train", "-m"], False),
    ],
    ids=str,
)
def test_the_module_form_is_known_by_the_word_behind_m(words, begins, monkeypatch):
    """The module form is recognized by the word after -m. A final -m has no such word."""
    begun = []
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(ep_moe_command, "_begin", lambda: begun.append(True))
    ep_moe_command.begin_module_form()
    assert bool(begun) is begins


def read_to_end(terminal: int) -> str:
    """Return what was written to a terminal that no process has open any more, and close it."""
    found = b""
    with open(terminal, "rb", buffering=0) as written, contextlib.suppress(OSError):  # Linux signals the end by EIO
        while part := written.read(1000):
            found += part
    return found.decode()


@FORMS
@pytest.mark.parametrize(("words", "said"), [(("run",), "ep-moe: starting"), (("run", "--quiet"), "")])
def test_a_terminal_hears_of_it_first(form, words, said, started, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    main, side = pty.openpty()
    process = started(form, *words, stderr=side, stdout=subprocess.PIPE, text=True)
    os.close(side)
    imports = process.stdout.readline()
    process.kill()
    process.communicate()
    assert (imports, read_to_end(main)) == ("importing\n", said)


def test_it_becomes_the_command():
    """The early stub becomes the command, and restores Python's own SIGINT handler, which the commands rely on."""
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
