"""How tools/snippets.py reads a page, and how the pages mark their blocks."""

import re
from pathlib import Path

import pytest

from tools import snippets

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_CI = snippets.commands_of_ci()


@pytest.fixture
def became(tmp_path):
    """Return a function that runs a page's commands, and returns line, first line of the result, and failure of each
    block."""

    def run(text, gpus=0):
        (tmp_path / "page.md").write_text(text)
        found = snippets.blocks("page.md", tmp_path)
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        return [
            (block.line, said.splitlines()[0], failed)
            for block, said, failed in snippets.run_commands(found, folder, gpus, OF_CI)
        ]

    return run


def fenced(info, *lines):
    return "\n".join([f"```{info}", *lines, "```", ""])


def test_commands_run_and_a_failure_of_any_line_is_found(became):
    page = fenced("bash", "true") + fenced("bash", "false", "true") + fenced("bash", "false | cat")
    assert became(page) == [
        (2, "ok (0 s)", False),
        (5, "exit code 1 after 0 s", True),
        (9, "exit code 1 after 0 s", True),
    ]


def test_markers_say_why_a_block_is_not_run(became):
    marked = fenced("bash", "# not run in CI: needs SLURM", "false") + fenced("bash", "# needs 2 GPUs", "false")
    assert became(marked, gpus=1) == [(2, "not run, needs SLURM", False), (6, "not run, needs 2 GPUs", False)]
    assert became(marked, gpus=2)[1] == (6, "exit code 1 after 0 s", True)
    for wrong in ("# not run: needs SLURM", "# needs SLURM", "# needs two GPUs"):
        ((_, said, failed),) = became(fenced("bash", wrong, "true"))
        assert failed
        assert wrong in said


def test_what_ci_runs_is_not_run_again(became):
    assert became(fenced("bash", "ruff check . && ruff format --check .")) == [(2, "not run, .ci/run runs it", False)]
    ((_, said, _),) = became(fenced("bash", "ruff check . && false"))
    assert said.startswith("exit code")


def test_parts_of_a_file_are_put_together(became):
    first, second = fenced('python title="a.py"', "x = 1"), fenced('python title="a.py"', "print(x + 1)")
    command, output = fenced("bash", "python a.py"), fenced('text title="output"', "2")
    assert became(first + second + command + output) == [(8, "ok, with the output of the page (0 s)", False)]
    assert became(first + command + output) == [(8, "the output has no line", True)]
    assert became(first + command + second) == [
        (5, "ok (0 s)", False),
        (8, "no command behind it runs a.py", True),
    ]


@pytest.mark.parametrize(
    ("expected", "out", "missing"),
    [
        ("a\nb\n", "b\na\n", []),
        ("a\nb\n", "ab\n\n", []),  # two ranks wrote at once
        ("a\na\n", "a\n", ["a"]),
        ("a ... c\n", "a b c\n", []),
        ("a ... c\n", "a\nc\n", ["a ... c"]),
        ("1.5 (x)\n", "135 (x)\n", ["1.5 (x)"]),
    ],
)
def test_lines_of_an_output(expected, out, missing):
    assert snippets.missing_lines(expected, out) == missing


def test_ranks_that_torchrun_starts_write_whole_lines(became):
    rank = fenced(
        'python title="a.py"', "import os, sys, time", "print('one', end=' ')", "here = 'begun' + sys.argv[1]",
        "open(f'{here}-{os.getpid()}', 'w').close()",
        "while sum(name.startswith(here) for name in os.listdir()) < 2:", "    time.sleep(0.01)", "print('two')",
    )  # fmt: skip
    as_torchrun_does = fenced("bash", '"$PYTHON_EXEC" -u a.py 1 & "$PYTHON_EXEC" -u a.py 1', "wait")
    output = fenced('text title="output"', "one two", "one two")
    assert became(rank + as_torchrun_does + output)[0][2] is False
    as_python_does = as_torchrun_does.replace('"$PYTHON_EXEC"', "python").replace("a.py 1", "a.py 2")
    assert became(rank + as_python_does + output)[0][2] is True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_mark_their_blocks(page):
    found = snippets.blocks(page.relative_to(ROOT).as_posix())
    assert len(found) * 2 == sum(line.lstrip().startswith("```") for line in page.read_text().splitlines())
    for index, block in enumerate(found):
        assert block.kind in ("python", "bash", "text", "toml", "mermaid", "json"), block.name
        assert not block.title or block.kind == "python" or (block.kind, block.title) == ("text", "output"), block.name
        if block.kind == "bash" and snippets.unsupported_reason(block, 0, OF_CI) is None:
            assert not re.search(r"^pytest (?!.*\.py)", block.source, re.MULTILINE), f"{block.name}: no tests there"
        if block.title == "output":
            assert found[index - 1].kind == "bash", block.name
