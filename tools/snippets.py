"""Code blocks of pages, and how to run their commands. `run_snippets.py` describes how a page marks blocks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ("configs", "docs", "examples", "launch")  # folders that commands of pages name
OUTPUT = "output"
LIMIT_S = 300.0
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?[^\n]*\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"# (?:needs (?P<gpus>\d*) ?GPUs?|not run in CI: (?P<reason>.+))")
_OF_CI = "<!-- ci: cpu -->\n"  # precedes README's block that .ci/run runs
_TAIL = 30  # lines of a failed command's output to show


@dataclass(frozen=True)
class Block:
    """A code block. `kind` is its language, `line` the line of the page where the code begins."""

    page: str
    line: int
    kind: str
    title: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, root: Path = ROOT) -> list[Block]:
    text = (root / page).read_text()
    return [
        Block(page, text[: found.start(3)].count("\n") + 1, found[1], found[2] or "", found[3])
        for found in _FENCE.finditer(text)
    ]


def commands_of_ci() -> frozenset[str]:
    """Return the commands that .ci/run runs, those of README included."""
    of_readme = _FENCE.match((ROOT / "README.md").read_text().partition(_OF_CI)[2])
    assert of_readme is not None
    return frozenset(_commands(of_readme[3]) + _commands((ROOT / ".ci" / "run").read_text()))


def _commands(source: str) -> list[str]:
    return [part.strip() for part in re.split(r"&&|\n", source) if part.strip()]


def unsupported_reason(block: Block, gpus: int, of_ci: frozenset[str]) -> str | None:
    """Return why the commands of a block are not run here, None if they are.

    Raises:
        ValueError: The block begins with a comment that looks like a marker, but is none.
    """
    first = block.source.partition("\n")[0]
    marker = _MARKER.fullmatch(first)
    if marker is None and re.match(r"#\s*(needs|not run)\b", first):
        raise ValueError(f"'# needs N GPUs' or '# not run in CI: REASON' mark a block, got {first!r}")
    if of_ci.issuperset(_commands(block.source)):
        return ".ci/run runs it"
    if marker is None:
        return None
    if marker["reason"]:
        return marker["reason"]
    return f"needs {marker['gpus'] or 1} GPUs" if gpus < int(marker["gpus"] or 1) else None


def make_folder(folder: Path) -> None:
    """Copy the files that commands name, so that the commands write outside the checkout."""
    for name in CARRIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))


def environment(folder: Path, gpus: int) -> dict[str, str]:
    """Return the environment of commands in a folder.

    This checkout and this Python come first, and pip installs into the folder.
    """
    packages = folder / ".packages"
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    modules = [str(packages), str(ROOT), os.environ.get("PYTHONPATH", "")]
    pip = {"PIP_TARGET": str(packages), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 means without isolation
    own = {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(filter(None, modules)), **pip}
    # unbuffered, a line of several words is several writes, and lines of ranks would mix
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    own["PYTHON_EXEC"] = str(ROOT / "tools" / "buffered_python.sh")
    return given | own | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


def run_commands(
    found: Sequence[Block], folder: Path, gpus: int, of_ci: frozenset[str]
) -> Iterator[tuple[Block, str, bool]]:
    """Run the bash blocks of a page in their order.

    Args:
        found: All blocks of the page.
        folder: Where commands run. Blocks share the files that they write.
        gpus: The number of GPUs. Without GPUs, outputs are compared, as pages show those of a CPU.
        of_ci: `commands_of_ci()`.

    Yields:
        A block, its result, and whether it failed.
    """
    for index, block in enumerate(found):
        if block.kind == "python" and block.title and not _is_named(block.title, found[index:]):
            yield block, f"no command behind it runs {block.title}", True
        if block.kind != "bash":
            continue
        try:
            reason = unsupported_reason(block, gpus, of_ci)
        except ValueError as error:
            yield block, str(error), True
            continue
        if reason is not None:
            yield block, f"not run, {reason}", False
            continue
        for name in {before.title for before in found[:index] if before.kind == "python" and before.title}:
            parts = [before.source for before in found[:index] if before.title == name]
            (folder / name).write_text("\n".join(parts))
        begin = time.monotonic()
        code, out, err = _run(block.source, folder, environment(folder, gpus))
        spent = time.monotonic() - begin
        if code != 0:
            tail = "\n".join((out + err).splitlines()[-_TAIL:])
            yield block, f"exit code {code} after {spent:.0f} s\n{tail}", True
            continue
        behind = found[index + 1] if index + 1 < len(found) else None
        if gpus or behind is None or behind.title != OUTPUT:
            yield block, f"ok ({spent:.0f} s)", False
            continue
        lacking = missing_lines(behind.source, out)
        if lacking:
            yield behind, "\n".join(["the output has no line", *lacking, "but", out]), True
        else:
            yield block, f"ok, with the output of the page ({spent:.0f} s)", False


def _is_named(file: str, found: Sequence[Block]) -> bool:
    return any(block.kind == "bash" and file in block.source for block in found)


def missing_lines(expected: str, out: str) -> list[str]:
    """Return the lines of `expected`, in any order, that are not in `out`. `...` matches anything within a line.

    Lines may share a line of `out`: ranks that write to one pipe may write a line and its end apart.
    """
    missing = []
    for line in filter(None, map(str.strip, expected.splitlines())):
        found = re.search(".*".join(map(re.escape, line.split("..."))), out)
        if found is None:
            missing.append(line)
        else:
            out = out[: found.start()] + out[found.end() :]
    return missing


def _run(source: str, folder: Path, variables: dict[str, str]) -> tuple[int, str, str]:
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", source], cwd=folder, env=variables, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
        time.sleep(5)
        os.killpg(process.pid, signal.SIGKILL)
        return 124, *process.communicate()
    return process.returncode, out, err
